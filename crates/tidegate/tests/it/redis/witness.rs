//! State that a server loses is restored from what its callers have seen.

use std::time::Duration;
use tidegate::{Check, Limits, Op, Redis, Store};
use tidegate_testkit::{Flavor, Server, wait_until};

use super::{runtime, store};

async fn admitted(redis: &Redis, limits: &Limits, tries: usize) -> u64 {
    let mut admitted = 0;
    for _ in 0..tries {
        admitted += u64::from(redis.decide(&Check::new().charge("k", limits, 1)).await.unwrap().allowed());
    }
    admitted
}

/// Limits whose period outlasts any test, so that nothing comes back in the meantime.
const LIMITS: [&str; 4] = ["100/day", "100/day window", "100/day window from first hit", "100/day estimate"];

#[test]
fn a_flush_mints_nothing() {
    let server = Server::start(Flavor::Redis7);
    runtime().block_on(async {
        for limit in LIMITS {
            let limits: Limits = limit.parse().unwrap();
            let redis = store(&server).build().unwrap();
            assert_eq!(admitted(&redis, &limits, 70).await, 70);
            server.command(&["FLUSHALL"]);
            assert_eq!(admitted(&redis, &limits, 70).await, 30, "{limit}");
            assert_eq!(redis.stats().regressions, 1, "{limit}: restored once, then the server knows again");
            // Without a witness everything is forgotten, which shows that it was the witness.
            let forgetful = store(&server).witness_keys(0).build().unwrap();
            server.command(&["FLUSHALL"]);
            assert_eq!(admitted(&forgetful, &limits, 120).await, 100, "{limit}");
            server.command(&["FLUSHALL"]);
        }
    });
}

/// What was given back is not charged again, although somebody has seen more.
#[test]
fn give_backs_are_not_taken_for_losses() {
    let server = Server::start(Flavor::Valkey9);
    runtime().block_on(async {
        for limit in LIMITS {
            let limits: Limits = limit.parse().unwrap();
            let (one, other) = (store(&server).build().unwrap(), store(&server).build().unwrap());
            assert_eq!(admitted(&one, &limits, 100).await, 100);
            assert_eq!(admitted(&other, &limits, 1).await, 0); // both have seen it full
            let refund = Check::of(Op::Refund).charge("k", &limits, 40);
            assert_eq!(other.decide(&refund).await.unwrap().granted(), 40, "{limit}");
            assert_eq!(admitted(&one, &limits, 60).await, 40, "{limit}");
            let reset = Check::of(Op::Reset).charge("k", &limits, 0);
            assert!(other.decide(&reset).await.unwrap().allowed());
            assert_eq!(admitted(&one, &limits, 120).await, 100, "{limit}");
            assert_eq!(one.stats().regressions + other.stats().regressions, 0, "{limit}");
            // After all that a loss is still noticed.
            server.command(&["FLUSHALL"]);
            assert_eq!(admitted(&one, &limits, 10).await, 0, "{limit}");
            assert_eq!(one.stats().regressions, 1, "{limit}");
            server.command(&["FLUSHALL"]);
        }
    });
}

/// A change of the limit converts the state, and drains it at another rate from then on; nobody takes that for a loss.
#[test]
fn a_changed_limit_is_not_taken_for_a_loss() {
    let server = Server::start(Flavor::Redis62);
    runtime().block_on(async {
        let (slow, fast): (Limits, Limits) = ("100/day".parse().unwrap(), "1000000/s burst 100".parse().unwrap());
        let (one, other) = (store(&server).build().unwrap(), store(&server).build().unwrap());
        assert_eq!(admitted(&one, &slow, 90).await, 90);
        assert_eq!(admitted(&other, &fast, 5).await, 5); // at a million a second it is soon empty
        wait_until("the fast bucket is empty", Duration::from_secs(5), || true);
        assert!(admitted(&one, &slow, 50).await >= 10);
        assert_eq!(one.stats().regressions, 0);
    });
}

/// A replica that lagged behind is promoted in the primary's place: what it never heard of is told to it by the caller.
#[test]
fn a_stale_replica_that_is_promoted_is_told_what_it_lost() {
    // Redis 6.2 cannot change its port while it runs.
    for flavor in [Flavor::Redis7, Flavor::Redis8, Flavor::Valkey9] {
        for limit in LIMITS {
            let limits: Limits = limit.parse().unwrap();
            let start = || Server::builder(flavor).arg("--repl-diskless-sync-delay", "0").start();
            let (primary, replica) = (start(), start());
            let port = primary.port().to_string();
            replica.command(&["REPLICAOF", "127.0.0.1", &port]);
            runtime().block_on(async {
                let redis = store(&primary).build().unwrap();
                assert_eq!(admitted(&redis, &limits, 20).await, 20);
                wait_until("the replica has it", Duration::from_secs(20), || {
                    replica.command(&["DBSIZE"]).int() == 1
                        && replica.command(&["INFO", "replication"]).text().contains("master_link_status:up")
                });
                replica.command(&["REPLICAOF", "127.0.0.1", "1"]); // it hears nothing any more
                assert_eq!(admitted(&redis, &limits, 50).await, 50);
                primary.kill();
                replica.command(&["REPLICAOF", "NO", "ONE"]);
                replica.command(&["CONFIG", "SET", "port", &port]);
                let mut after = 0;
                let mut asked = 0;
                while asked < 60 {
                    // While the connection is being made again there is no answer, and nobody is admitted.
                    if let Ok(decision) = redis.decide(&Check::new().charge("k", &limits, 1)).await {
                        after += u64::from(decision.allowed());
                        asked += 1;
                    }
                }
                assert_eq!(after, 30, "{flavor:?}, {limit}: 100 in all, although the replica knew of 20 only");
                assert_eq!(redis.stats().regressions, 1, "{flavor:?}, {limit}");
            });
        }
    }
}
