//! A server that loses state: how much is allowed twice, with a witness and without.
//! (`witness.rs` has the stale replica; the failovers of clusters and sentinels are beside.)

use std::time::Duration;

use tidegate::Limits;
use tidegate::redis::Redis;
use tidegate_testkit::{ClockShim, Flavor, Server, wait_until};
use tokio::runtime::Runtime;

use super::clock::shimmed;
use super::{ask, assert_all_expire, limits, runtime, store};

const PATIENCE: Duration = Duration::from_secs(60);
/// The amount of every limit here, and how much of it is used before the loss.
const AMOUNT: u64 = 100;
const BEFORE: u64 = 70;
const LIMITS: [&str; 4] =
    ["1/h burst 100", "100/1000d window", "100/1000d window from first hit", "100/1000d estimate"];

/// How many of `tries` checks are allowed. A call without an answer, during the reconnect, is
/// repeated.
async fn admitted(redis: &Redis, limits: &Limits, tries: u64) -> u64 {
    let (mut admitted, mut asked) = (0, 0);
    let end = tokio::time::Instant::now() + PATIENCE;
    while asked < tries {
        match ask(redis, "k", limits).await {
            Ok(decision) => {
                admitted += u64::from(decision.allowed());
                asked += 1;
            }
            Err(error) => assert!(tokio::time::Instant::now() < end, "{error}"),
        }
    }
    admitted
}

/// Charges some, loses the state, and checks again: with a witness and without.
#[allow(clippy::print_stdout, reason = "prints the measurement under --nocapture")]
fn lose(server: &Server, name: &str, text: &str, lose: impl Fn(&Runtime)) {
    let runtime = runtime();
    let limits = limits(text);
    for witness in [1000, 0] {
        let redis = store(server).namespace(format!("w{witness}")).witness_keys(witness);
        let redis = runtime.block_on(async { redis.build() }).unwrap();
        assert_eq!(runtime.block_on(admitted(&redis, &limits, BEFORE)), BEFORE);
        lose(&runtime);
        let after = runtime.block_on(admitted(&redis, &limits, 2 * AMOUNT));
        let over = (BEFORE + after).saturating_sub(AMOUNT);
        let regressions = redis.stats().regressions;
        println!(
            "{name}, {text}, witness of {witness} keys: {over} too many, {regressions} regressions"
        );
        let expected = if witness > 0 { (0, 1) } else { (BEFORE, 0) };
        assert_eq!((over, regressions), expected, "{name}, {text}, witness of {witness} keys");
        assert_all_expire(server);
    }
}

#[test]
fn a_flush_is_noticed_and_restored() {
    let server = Server::start(Flavor::Redis8);
    for limit in LIMITS {
        lose(&server, "FLUSHALL", limit, |_| {
            server.command(&["FLUSHALL"]);
        });
        server.command(&["FLUSHALL"]);
    }
}

#[test]
fn an_empty_restart_is_noticed_and_restored() {
    let server = Server::start(Flavor::Redis62);
    for limit in LIMITS {
        lose(&server, "kill and restart", limit, |_| server.restart());
        server.command(&["FLUSHALL"]);
    }
}

#[test]
fn an_eviction_is_noticed_and_restored() {
    let server = Server::builder(Flavor::Redis7).arg("--maxmemory-policy", "volatile-lru").start();
    for limit in LIMITS {
        lose(&server, "eviction", limit, |_| {
            server.command(&["CONFIG", "SET", "maxmemory", "6mb"]);
            let mut client = server.client().unwrap();
            let junk = "x".repeat(20_000);
            let mut n = 0;
            wait_until("our key is evicted", PATIENCE, || {
                for _ in 0..50 {
                    n += 1;
                    client.command(&["SET", &format!("junk:{n}"), &junk, "EX", "1000"]).unwrap();
                }
                server.command(&["KEYS", "tg1:*"]).array().is_empty()
            });
            // Once is enough: later writes stay.
            server.command(&["CONFIG", "SET", "maxmemory", "0"]);
        });
        server.command(&["FLUSHALL"]);
    }
}

/// The clock of the server jumps a month ahead briefly: keys that expire before that are deleted,
/// although they count when the clock is right again.
#[test]
fn a_clock_that_jumps_ahead_and_back_is_noticed_and_restored() {
    let shim = ClockShim::build();
    let server = shimmed(Flavor::Redis7, &shim);
    for limit in ["100/day window from first hit", "1/h burst 100"] {
        lose(&server, "clock ahead and back", limit, |_| {
            shim.set(30 * 86_400);
            wait_until("everything has expired", PATIENCE, || {
                server.command(&["DBSIZE"]).int() == 0
            });
            shim.set(0);
            wait_until("the server has seen it", PATIENCE, || is_right(&server));
        });
        server.command(&["FLUSHALL"]);
    }
}

/// Whether the server's clock is the machine's, give or take a minute.
fn is_right(server: &Server) -> bool {
    let told: u64 = server.command(&["TIME"]).array()[0].text().parse().unwrap();
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
    told.abs_diff(now) < 60
}
