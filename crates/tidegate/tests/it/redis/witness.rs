//! State that a server loses is restored from what its callers have observed.

use std::time::Duration;
use tidegate::redis::Redis;
use tidegate::{Check, Limits, ManualClock, Op, Store, Timestamp};
use tidegate_testkit::{Flavor, Server, wait_until};

use super::{runtime, store};

async fn admitted(redis: &Redis, limits: &Limits, tries: usize) -> u64 {
    let mut admitted = 0;
    for _ in 0..tries {
        admitted +=
            u64::from(redis.decide(&Check::new().charge("k", limits, 1)).await.unwrap().allowed());
    }
    admitted
}

/// Limits whose period outlasts any test, so that nothing refills meanwhile.
const LIMITS: [&str; 4] =
    ["100/day", "100/day window", "100/day window from first hit", "100/day estimate"];

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
            assert_eq!(
                redis.stats().regressions,
                1,
                "{limit}: restored once, then the server knows again"
            );
            // Without a witness the state is lost, so it was the witness that restored it.
            let forgetful = store(&server).witness_keys(0).build().unwrap();
            server.command(&["FLUSHALL"]);
            assert_eq!(admitted(&forgetful, &limits, 120).await, 100, "{limit}");
            server.command(&["FLUSHALL"]);
        }
    });
}

/// Units that were given back are not charged again, although another store has observed more.
#[test]
fn give_backs_are_not_taken_for_losses() {
    let server = Server::start(Flavor::Valkey9);
    runtime().block_on(async {
        for limit in LIMITS {
            let limits: Limits = limit.parse().unwrap();
            let (one, other) = (store(&server).build().unwrap(), store(&server).build().unwrap());
            assert_eq!(admitted(&one, &limits, 100).await, 100);
            assert_eq!(admitted(&other, &limits, 1).await, 0); // both have observed it full
            let refund = Check::of(Op::Refund).charge("k", &limits, 40);
            assert_eq!(other.decide(&refund).await.unwrap().granted(), 40, "{limit}");
            assert_eq!(admitted(&one, &limits, 60).await, 40, "{limit}");
            let reset = Check::of(Op::Reset).charge("k", &limits, 0);
            assert!(other.decide(&reset).await.unwrap().allowed());
            assert_eq!(admitted(&one, &limits, 120).await, 100, "{limit}");
            assert_eq!(one.stats().regressions + other.stats().regressions, 0, "{limit}");
            // A loss after that is still noticed.
            server.command(&["FLUSHALL"]);
            assert_eq!(admitted(&one, &limits, 10).await, 0, "{limit}");
            assert_eq!(one.stats().regressions, 1, "{limit}");
            server.command(&["FLUSHALL"]);
        }
    });
}

/// A change of the limit converts the state, which then drains at another rate; that is not taken
/// for a loss.
#[test]
fn a_changed_limit_is_not_taken_for_a_loss() {
    let server = Server::start(Flavor::Redis62);
    runtime().block_on(async {
        let (slow, fast): (Limits, Limits) =
            ("100/day".parse().unwrap(), "1000000/s burst 100".parse().unwrap());
        let (one, other) = (store(&server).build().unwrap(), store(&server).build().unwrap());
        assert_eq!(admitted(&one, &slow, 90).await, 90);
        assert_eq!(admitted(&other, &fast, 5).await, 5); // at a million a second it is soon empty
        wait_until("the fast bucket is empty", Duration::from_secs(5), || true);
        assert!(admitted(&one, &slow, 50).await >= 10);
        assert_eq!(one.stats().regressions, 0);
    });
}

/// A replica that lagged is promoted: the caller restores what was not replicated.
#[test]
fn a_stale_replica_that_is_promoted_gets_back_what_it_lost() {
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
                        && replica
                            .command(&["INFO", "replication"])
                            .text()
                            .contains("master_link_status:up")
                });
                replica.command(&["REPLICAOF", "127.0.0.1", "1"]); // replication stops
                assert_eq!(admitted(&redis, &limits, 50).await, 50);
                primary.kill();
                replica.command(&["REPLICAOF", "NO", "ONE"]);
                replica.command(&["CONFIG", "SET", "port", &port]);
                let mut after = 0;
                let mut asked = 0;
                while asked < 60 {
                    // During the reconnect there is no answer, and nothing is allowed.
                    if let Ok(decision) = redis.decide(&Check::new().charge("k", &limits, 1)).await
                    {
                        after += u64::from(decision.allowed());
                        asked += 1;
                    }
                }
                assert_eq!(
                    after, 30,
                    "{flavor:?}, {limit}: 100 in all, although the replica knew of 20 only"
                );
                assert_eq!(redis.stats().regressions, 1, "{flavor:?}, {limit}");
            });
        }
    }
}

/// A store with the clock of the test.
fn with_clock(server: &Server, clock: &ManualClock) -> Redis {
    store(server).clock(clock.clone()).build().unwrap()
}

fn at(secs: u64) -> ManualClock {
    let clock = ManualClock::new();
    clock.set(Timestamp::from_secs(1_700_000_000 + secs));
    clock
}

/// Bookings exceed the capacity of a bucket. An observation of them must not replace later charges.
#[test]
fn lost_bookings_do_not_allow_more() {
    let server = Server::start(Flavor::Redis7);
    runtime().block_on(async {
        let limits: Limits = "1/s burst 10".parse().unwrap();
        let clock = at(0);
        let redis = with_clock(&server, &clock);
        for _ in 0..100 {
            let book = Check::of(Op::Book { max_wait_us: 1_000_000_000 }).charge("k", &limits, 1);
            assert!(redis.decide(&book).await.unwrap().allowed());
        }
        server.command(&["FLUSHALL"]);
        clock.advance(Duration::from_secs(30));
        assert_eq!(admitted(&redis, &limits, 50).await, 0, "seventy places are still to come");
        assert_eq!(redis.stats().regressions, 1);
        // It is full to its legal maximum now, burst and debt, and no longer.
        clock.advance(Duration::from_secs(15));
        assert_eq!(admitted(&redis, &limits, 50).await, 5);
    });
}

/// A store with a smaller limit on the same key restores at most that limit, and does not undo the
/// charges of others.
#[test]
fn a_smaller_limit_never_lowers_what_is_kept() {
    let server = Server::start(Flavor::Redis7);
    runtime().block_on(async {
        for (large, small) in [
            ("1/s burst 100", "1/s burst 10"),
            ("100/h window", "10/h window"),
            ("100/h estimate", "10/h estimate"),
        ] {
            let (large, small): (Limits, Limits) = (large.parse().unwrap(), small.parse().unwrap());
            let clock = at(0);
            let (one, other) = (with_clock(&server, &clock), with_clock(&server, &clock));
            assert_eq!(admitted(&one, &large, 100).await, 100);
            assert_eq!(admitted(&other, &small, 1).await, 0); // and has observed a hundred
            server.command(&["FLUSHALL"]);
            let fresh = with_clock(&server, &clock);
            assert_eq!(admitted(&fresh, &large, 60).await, 60);
            for _ in 0..3 {
                assert_eq!(admitted(&other, &small, 5).await, 0, "{small:?}");
            }
            let fresh = with_clock(&server, &clock);
            assert_eq!(admitted(&fresh, &large, 100).await, 40, "{large:?}: sixty were taken");
            clock.advance(Duration::from_secs(50));
            assert_eq!(admitted(&other, &small, 30).await, 0, "{small:?}");
            server.command(&["FLUSHALL"]);
        }
    });
}

/// A promoted replica may have a clock that is behind. Restored state then counts from its now,
/// once.
#[test]
fn a_clock_that_is_behind_after_a_loss_does_not_allow_more() {
    let server = Server::start(Flavor::Redis7);
    runtime().block_on(async {
        for limit in ["10/min", "10/min window", "10/min window from first hit", "10/min estimate"]
        {
            for behind in [1, 5, 70] {
                let limits: Limits = limit.parse().unwrap();
                let clock = at(122);
                let redis = with_clock(&server, &clock);
                assert_eq!(admitted(&redis, &limits, 3).await, 3);
                server.command(&["FLUSHALL"]);
                clock.set(Timestamp::from_secs(1_700_000_122 - behind));
                assert_eq!(admitted(&redis, &limits, 50).await, 7, "{limit}, {behind} s behind");
                assert_eq!(redis.stats().regressions, 1, "{limit}, {behind} s behind");
                server.command(&["FLUSHALL"]);
            }
        }
    });
}

/// Units given back before a loss are not charged after it, although another store remembers an
/// earlier state.
#[test]
fn given_back_units_stay_given_back_after_a_loss() {
    let server = Server::start(Flavor::Valkey9);
    runtime().block_on(async {
        for limit in LIMITS {
            let limits: Limits = limit.parse().unwrap();
            let (one, other) = (store(&server).build().unwrap(), store(&server).build().unwrap());
            assert_eq!(admitted(&one, &limits, 100).await, 100);
            assert_eq!(admitted(&other, &limits, 1).await, 0); // both have observed it full
            let refund = Check::of(Op::Refund).charge("k", &limits, 40);
            assert_eq!(other.decide(&refund).await.unwrap().granted(), 40, "{limit}");
            server.command(&["FLUSHALL"]);
            assert_eq!(admitted(&other, &limits, 10).await, 10, "{limit}");
            assert_eq!(admitted(&one, &limits, 60).await, 30, "{limit}");
            assert_eq!((one.stats().regressions, other.stats().regressions), (0, 1), "{limit}");
            server.command(&["FLUSHALL"]);
        }
    });
}

/// After a loss, a store without observations comes first; a store with one still restores the
/// state.
#[test]
fn a_store_without_observations_does_not_hide_a_loss() {
    let server = Server::start(Flavor::Redis8);
    runtime().block_on(async {
        for limit in ["100/h", "100/h window", "100/h window from first hit", "100/h estimate"] {
            let limits: Limits = limit.parse().unwrap();
            let clock = at(0);
            let (one, stranger) = (with_clock(&server, &clock), with_clock(&server, &clock));
            assert_eq!(admitted(&one, &limits, 80).await, 80);
            server.command(&["FLUSHALL"]);
            clock.advance(Duration::from_secs(1));
            assert_eq!(admitted(&stranger, &limits, 1).await, 1);
            assert_eq!(admitted(&one, &limits, 100).await, 20, "{limit}");
            assert_eq!(one.stats().regressions, 1, "{limit}");
            server.command(&["FLUSHALL"]);
        }
        // The same for an estimate whose next window has begun: its previous one was lost.
        let limits: Limits = "100/h estimate".parse().unwrap();
        let clock = at(0);
        clock.set(Timestamp::from_secs(3600 * 472_222 - 1));
        let (one, stranger) = (with_clock(&server, &clock), with_clock(&server, &clock));
        assert_eq!(admitted(&one, &limits, 80).await, 80);
        server.command(&["FLUSHALL"]);
        clock.advance(Duration::from_secs(1));
        assert_eq!(admitted(&stranger, &limits, 1).await, 1);
        assert_eq!(admitted(&one, &limits, 100).await, 19);
    });
}
