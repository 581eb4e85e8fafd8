//! The clock of a real server goes back, or a server with an earlier clock takes over: usage is
//! kept, and counts from the new time on.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tidegate::redis::Redis;
use tidegate::resilience::Resilient;
use tidegate::{Check, Limits, Op, Store};
use tidegate_testkit::{ClockShim, Flavor, Server, wait_until};

use super::{ask, assert_all_expire, limits, runtime, store};

const PATIENCE: Duration = Duration::from_secs(60);
/// Windows of this many seconds are half over whenever a test reads them.
const WINDOW_SECS: i64 = 1000;

/// A server whose clock this test sets.
struct Clocked {
    shim: ClockShim,
    server: Server,
    /// By how much the machine's clock is off the middle of a window.
    middle: i64,
}

impl Clocked {
    fn start(flavor: Flavor) -> Self {
        let shim = ClockShim::build();
        let server = shimmed(flavor, &shim);
        let middle = WINDOW_SECS / 2 - machine_secs() % WINDOW_SECS;
        let clocked = Clocked { shim, server, middle };
        clocked.set(0);
        clocked
    }

    /// Sets the server's clock so many seconds ahead, in the middle of a window.
    fn set(&self, ahead: i64) {
        self.shim.set(self.middle + ahead);
        let is_set =
            || (server_secs(&self.server) - machine_secs() - self.middle - ahead).abs() < 60;
        wait_until("the server has seen it", PATIENCE, is_set);
    }
}

pub(super) fn shimmed(flavor: Flavor, shim: &ClockShim) -> Server {
    let builder = Server::builder(flavor).arg("--repl-diskless-sync-delay", "0");
    shim.environment()
        .into_iter()
        .fold(builder, |builder, (name, value)| builder.env(name, &value))
        .start()
}

fn machine_secs() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs().try_into().unwrap()
}

fn server_secs(server: &Server) -> i64 {
    server.command(&["TIME"]).array()[0].text().parse().unwrap()
}

/// How many of `tries` checks are allowed.
async fn admitted(redis: &Redis, limits: &Limits, tries: u64) -> u64 {
    let mut admitted = 0;
    for _ in 0..tries {
        admitted += u64::from(ask(redis, "k", limits).await.unwrap().allowed());
    }
    admitted
}

/// Limits, and how many states of them are rebased when the clock goes back within a window and a
/// step, and over their edges.
const LIMITS: [(&str, u64, u64); 8] = [
    ("1/h burst 100", 1, 1),
    ("100/1000s window", 0, 1),
    ("100/1000s window from first hit", 1, 1),
    ("100/1000s sliding", 0, 1),
    ("100/1000s estimate", 0, 1),
    ("100/1000s log", 1, 1),
    ("100 concurrent ttl 1000s", 1, 1),
    ("100/1000s window; 100/h", 1, 2),
];

/// By a minute, by less than the period, by more, and by a day; a process that remembers the time
/// before, and one that does not.
#[test]
fn usage_is_kept_when_the_servers_clock_goes_back() {
    for flavor in [Flavor::Redis62, Flavor::Redis7, Flavor::Valkey9] {
        let clocked = Clocked::start(flavor);
        let runtime = runtime();
        for back in [60, 900, 4000, 86_400] {
            for (text, within, beyond) in LIMITS {
                for witness_keys in [0, 1000] {
                    let limits = limits(text);
                    clocked.set(back);
                    let builder = store(&clocked.server).witness_keys(witness_keys);
                    let redis = runtime.block_on(async { builder.build() }).unwrap();
                    assert_eq!(runtime.block_on(admitted(&redis, &limits, 70)), 70, "{text}");
                    clocked.set(0);
                    let peek = Check::of(Op::Peek).charge("k", &limits, 1);
                    let peek = runtime.block_on(redis.decide(&peek)).unwrap();
                    assert_eq!(peek.remaining(), 30, "{text}, {back} s back");
                    assert_eq!(
                        redis.stats().clock_regressions,
                        0,
                        "{text}, {back} s back: a peek writes nothing"
                    );
                    assert_eq!(
                        runtime.block_on(admitted(&redis, &limits, 100)),
                        30,
                        "{text}, {back} s back"
                    );
                    let stats = redis.stats();
                    let expected = if back == 60 { within } else { beyond };
                    assert_eq!(stats.clock_regressions, expected, "{text}, {back} s back");
                    assert_eq!((stats.regressions, stats.repairs), (0, 0), "{text}, {back} s back");
                    assert_all_expire(&clocked.server);
                    clocked.server.command(&["FLUSHALL"]);
                }
            }
        }
    }
}

/// The wait of a denial after the step is exact, and all nodes agree on it, whatever they remember.
#[test]
fn a_wait_after_a_clock_step_is_exact() {
    let clocked = Clocked::start(Flavor::Valkey9);
    let runtime = runtime();
    for text in ["1/s burst 3", "3/s window from first hit", "3/s log", "3 concurrent ttl 1s"] {
        let limits = limits(text);
        clocked.set(3600);
        let build = || runtime.block_on(async { store(&clocked.server).build() }).unwrap();
        let (one, other) = (build(), build());
        assert_eq!(runtime.block_on(admitted(&one, &limits, 3)), 3, "{text}");
        assert_eq!(runtime.block_on(admitted(&other, &limits, 1)), 0, "{text}"); // both have seen it full
        clocked.set(0);
        let begun = std::time::Instant::now();
        let denied = runtime.block_on(ask(&one, "k", &limits)).unwrap();
        let wait = denied.retry().micros().unwrap();
        assert!(!denied.allowed() && (1..=1_000_000).contains(&wait), "{text}: {denied:?}");
        wait_until("it is free again", PATIENCE, || {
            runtime.block_on(ask(&one, "k", &limits)).unwrap().allowed()
        });
        let waited = begun.elapsed();
        assert!(
            waited >= Duration::from_micros(wait) && waited < Duration::from_secs(30),
            "{text}: {waited:?}"
        );
        // The other node remembers a key that is full in an hour. It does not restore that.
        wait_until("it is free again", PATIENCE, || {
            runtime.block_on(ask(&other, "k", &limits)).unwrap().allowed()
        });
        for stats in [one.stats(), other.stats()] {
            assert_eq!((stats.regressions, stats.repairs), (0, 0), "{text}");
        }
        assert_eq!(
            one.stats().clock_regressions + other.stats().clock_regressions,
            1,
            "{text}: once"
        );
        assert_all_expire(&clocked.server);
        clocked.server.command(&["FLUSHALL"]);
    }
}

/// A replica whose clock is behind takes over: replicated usage counts from its own time; usage
/// that was not replicated is restored by the callers.
#[test]
fn a_replica_whose_clock_is_behind_takes_over() {
    for text in ["1/h burst 100", "100/1000s window", "100/1000s estimate", "100/1000s log"] {
        let limits = limits(text);
        let ahead = Clocked::start(Flavor::Redis7);
        ahead.set(3600);
        let behind = Clocked::start(Flavor::Redis7);
        let port = ahead.server.port().to_string();
        behind.server.command(&["REPLICAOF", "127.0.0.1", &port]);
        let runtime = runtime();
        let redis = runtime.block_on(async { store(&ahead.server).build() }).unwrap();
        assert_eq!(runtime.block_on(admitted(&redis, &limits, 50)), 50);
        wait_until("the replica has it", PATIENCE, || {
            behind.server.command(&["INFO", "replication"]).text().contains("master_link_status:up")
                && behind.server.command(&["DBSIZE"]).int() == 1
        });
        behind.server.command(&["REPLICAOF", "127.0.0.1", "1"]); // it hears nothing any more
        assert_eq!(runtime.block_on(admitted(&redis, &limits, 20)), 20);
        ahead.server.kill();
        behind.server.command(&["REPLICAOF", "NO", "ONE"]);
        behind.server.command(&["CONFIG", "SET", "port", &port]);
        let (mut after, mut asked) = (0, 0);
        wait_until("it answers", PATIENCE, || {
            // During the reconnect there is no answer, and nothing is allowed.
            if let Ok(decision) = runtime.block_on(ask(&redis, "k", &limits)) {
                after += u64::from(decision.allowed());
                asked += 1;
            }
            asked == 100
        });
        // No caller remembers a log.
        let lost = if text.contains("log") { 20 } else { 0 };
        assert_eq!(after, 30 + lost, "{text}");
        assert_eq!(redis.stats().clock_regressions, 1, "{text}");
        assert_eq!(redis.stats().regressions, u64::from(lost == 0), "{text}");
    }
}

/// Nodes are counted by leases. Leases from before the step expire as fast as any other.
#[test]
fn nodes_are_counted_after_a_step_back() {
    let clocked = Clocked::start(Flavor::Redis8);
    let runtime = runtime();
    clocked.set(3600);
    let node = || {
        runtime.block_on(async {
            let redis = store(&clocked.server).build().unwrap();
            redis.prepare().await.unwrap();
            Resilient::builder(redis).deadline(Duration::from_secs(5)).build()
        })
    };
    let (one, other) = (node(), node());
    let limits = limits("1000000/s");
    let counted = |nodes: u64| {
        wait_until("the nodes are counted", PATIENCE, || {
            assert!(
                runtime
                    .block_on(one.decide(&Check::new().charge("k", &limits, 1)))
                    .unwrap()
                    .allowed()
            );
            one.stats().nodes == nodes
        });
    };
    assert!(
        runtime.block_on(other.decide(&Check::new().charge("k", &limits, 1))).unwrap().allowed()
    );
    counted(2);
    drop(other); // it is gone, and has not said so
    clocked.set(0);
    counted(1);
}
