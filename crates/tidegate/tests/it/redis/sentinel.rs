//! A master and its replica behind Sentinel: the store follows the master.

use std::time::{Duration, Instant};

use tidegate::StoreError;
use tidegate::redis::{FailureKind, NoAnswer};
use tidegate_testkit::{Flavor, Sentinels, wait_until};

use super::failover::{BUDGET, CALLERS, Load, PATIENCE, plenty};
use super::{ask, assert_all_expire, at, left, runtime};

/// The units allowed beyond the budget, if the rest is spent, too. `failed` calls may have been
/// charged without an answer.
#[track_caller]
fn too_many(admitted: u64, failed: u64, left: u64) -> u64 {
    assert!(
        BUDGET - left <= admitted + failed,
        "{left} left after {admitted} admitted and {failed} failed"
    );
    (admitted + left).saturating_sub(BUDGET)
}

#[test]
fn a_dead_master_is_replaced_and_costs_at_most_the_calls_in_flight() {
    for flavor in [Flavor::Redis7, Flavor::Valkey9] {
        let sentinels = Sentinels::start(flavor);
        let runtime = runtime();
        let limits = plenty("window");
        let short = || at(&sentinels.url()).timeout(Duration::from_millis(500));
        let redis = runtime.block_on(async { short().build() }).unwrap();
        let forgetful = runtime
            .block_on(async { short().namespace("forgotten").witness_keys(0).build() })
            .unwrap();
        let key = ["k".to_owned()];
        let mut load = Load::start(&runtime, &redis, &key, &limits);
        let mut unseen = Load::start(&runtime, &forgetful, &key, &limits);
        load.goes_on("calls go on", 500);
        unseen.goes_on("calls go on", 500);
        let killed = Instant::now();
        sentinels.kill_master();
        let master = sentinels.wait_for_failover();
        let elected = Instant::now();
        load.goes_on("calls go on by themselves", 500);
        unseen.goes_on("calls go on by themselves", 500);
        load.stop(&runtime);
        unseen.stop(&runtime);
        let (last, why) =
            load.last_failure().expect("a call must have failed while there was no master");
        assert!(
            last < elected + Duration::from_secs(5),
            "{why}, {:?} after the election",
            last - elected
        );
        let left_here = runtime.block_on(left(&redis, "k", &limits));
        let left_there = runtime.block_on(left(&forgetful, "k", &limits));
        let over = too_many(load.admitted(), load.failed(), left_here);
        println!(
            "{flavor}: killed; elected after {:?}, last failure {:?} after that; {} admitted, {} failed, {over} too many (at most \
             {CALLERS} may be), {} regressions; without a witness {} too many",
            elected - killed,
            last.saturating_duration_since(elected),
            load.admitted(),
            load.failed(),
            redis.stats().regressions,
            (unseen.admitted() + left_there).saturating_sub(BUDGET),
        );
        assert!(over <= CALLERS, "{over} too many: {:?}", redis.stats());
        assert_all_expire(master);
    }
}

/// `SENTINEL FAILOVER`: the replica is promoted while the old master still takes calls. Charges
/// that were not replicated are lost; the caller has observed them and restores them.
#[test]
fn a_failover_by_order_stays_within_the_bound() {
    let sentinels = Sentinels::start(Flavor::Redis8);
    let runtime = runtime();
    let limits = plenty("window");
    let redis = runtime
        .block_on(async { at(&sentinels.url()).timeout(Duration::from_secs(2)).build() })
        .unwrap();
    let mut load = Load::start(&runtime, &redis, &["k".to_owned()], &limits);
    load.goes_on("calls go on", 500);
    let master = sentinels.failover();
    load.goes_on("calls go on by themselves", 500);
    assert_eq!(master.port(), sentinels.master().port());
    load.stop(&runtime);
    let over =
        too_many(load.admitted(), load.failed(), runtime.block_on(left(&redis, "k", &limits)));
    println!(
        "by order: {} admitted, {} failed, {over} too many, {:?}",
        load.admitted(),
        load.failed(),
        redis.stats()
    );
    assert!(over <= CALLERS, "{over} too many: {:?}", redis.stats());
    sentinels.servers().iter().for_each(assert_all_expire);
}

/// A master that was suspended and replaced still answers briefly when it continues, until Sentinel
/// makes it a replica. It decides no check once the store knows the new one.
#[test]
fn a_replaced_master_that_continues_is_not_used() {
    let sentinels = Sentinels::start(Flavor::Redis7);
    let runtime = runtime();
    let limits = plenty("window");
    let redis = runtime
        .block_on(async { at(&sentinels.url()).timeout(Duration::from_millis(500)).build() })
        .unwrap();
    let mut load = Load::start(&runtime, &redis, &["k".to_owned()], &limits);
    load.goes_on("calls go on", 500);
    let old = sentinels.master();
    old.stop_signal();
    let new = sentinels.wait_for_failover();
    assert_ne!(old.port(), new.port());
    load.goes_on("calls go on by themselves", 500);
    old.continue_signal();
    sentinels.wait_until_ok();
    load.goes_on("calls go on", 500);
    load.stop(&runtime);
    let over =
        too_many(load.admitted(), load.failed(), runtime.block_on(left(&redis, "k", &limits)));
    assert!(over <= CALLERS, "{over} too many: {:?}", redis.stats());
    let value = |server: &tidegate_testkit::Server| server.command(&["DBSIZE"]).int();
    assert_eq!((value(old), value(new)), (1, 1), "the old one follows the new one");
    sentinels.servers().iter().for_each(assert_all_expire);
}

/// A server that became a replica answers READONLY: the call is not applied. When it is the master
/// again, the same store continues.
#[test]
fn a_demoted_master_decides_no_check() {
    Flavor::on_all(|flavor| {
        let (server, other) =
            (tidegate_testkit::Server::start(flavor), tidegate_testkit::Server::start(flavor));
        let runtime = runtime();
        let limits = plenty("window");
        let redis = runtime
            .block_on(async { super::store(&server).timeout(Duration::from_secs(2)).build() })
            .unwrap();
        assert!(runtime.block_on(ask(&redis, "k", &limits)).unwrap().allowed());
        server.command(&["REPLICAOF", "127.0.0.1", &other.port().to_string()]);
        for _ in 0..20 {
            let error = runtime.block_on(ask(&redis, "k", &limits)).unwrap_err();
            let StoreError::Unavailable(source) = &error else { panic!("{flavor}: {error}") };
            let no_answer =
                source.downcast_ref::<NoAnswer>().unwrap_or_else(|| panic!("{flavor}: {error}"));
            assert!(!no_answer.may_have_been_counted(), "{flavor}: {error}");
            // READONLY; or MASTERDOWN or LOADING, if it has lost the other one or is still syncing.
            let kind = no_answer.failure().kind();
            assert!(
                matches!(
                    kind,
                    FailureKind::ReadOnly | FailureKind::MasterDown | FailureKind::Loading
                ),
                "{flavor}: {error}"
            );
        }
        server.command(&["REPLICAOF", "NO", "ONE"]);
        wait_until("the store goes on", PATIENCE, || {
            runtime.block_on(ask(&redis, "k", &limits)).is_ok()
        });
        assert_all_expire(&server);
    });
}
