//! Leases in single scenarios, beside the random histories of `bounds.rs`.

use std::time::Duration;

use tidegate::resilience::{BreakerState, Policy, Resilient, SyncMode};
use tidegate::{Check, Decision, Limits, ManualClock, Source, Store};

use super::{Remote, limits, node};

const LEASE: Policy = Policy { sync: SyncMode::Lease, on_failure: None, overflow: None };

async fn ask(resilient: &Resilient, limits: &Limits) -> Decision {
    resilient.decide(&Check::new().policy(LEASE).charge("hot", limits, 1)).await.unwrap()
}

/// Checks every millisecond until a check is decided locally.
async fn warmed_up(limit: &str) -> (ManualClock, Remote, Resilient, Limits) {
    warmed_up_with(limit, tidegate::resilience::DEFAULT_DEADLINE).await
}

async fn warmed_up_with(
    limit: &str,
    deadline: Duration,
) -> (ManualClock, Remote, Resilient, Limits) {
    let clock = ManualClock::with_runtime();
    clock.advance(Duration::from_secs(1_000_000));
    let remote = Remote::new(&clock);
    let resilient = node(&remote, &clock, 1, 1).deadline(deadline).build();
    let limits = limits(limit);
    while ask(&resilient, &limits).await.source() != Source::Local {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    (clock, remote, resilient, limits)
}

#[tokio::test(start_paused = true)]
async fn a_hot_key_is_spent_locally_without_running_out() {
    let (_, remote, resilient, limits) = warmed_up("100000/s").await;
    let (calls, mut here) = (remote.calls(), 0);
    for _ in 0..2000 {
        let decision = ask(&resilient, &limits).await;
        assert!(decision.allowed());
        here += usize::from(decision.source() == Source::Local);
        tokio::time::sleep(Duration::from_micros(500)).await;
    }
    assert!(here > 1900, "{here} of 2000");
    assert!(remote.calls() - calls < 60, "{} calls", remote.calls() - calls);
}

#[tokio::test(start_paused = true)]
async fn leased_units_expire_while_the_machine_sleeps() {
    let (clock, _, resilient, limits) = warmed_up("1000/s").await;
    assert!(resilient.stats().lease_units_held > 0);
    clock.advance(Duration::from_secs(2)); // asleep: no timer has run
    assert_ne!(ask(&resilient, &limits).await.source(), Source::Local);
    let stats = resilient.stats();
    assert!(stats.lease_units_expired > 0 || stats.lease_units_returned > 0);
}

#[tokio::test(start_paused = true)]
async fn unused_units_are_returned() {
    let (_, remote, resilient, limits) = warmed_up("100000/h window").await;
    let stats = resilient.stats();
    assert!(stats.lease_units_held > 0);
    tokio::time::sleep(Duration::from_millis(400)).await;
    let stats = resilient.stats();
    assert_eq!((stats.lease_units_held, stats.lease_units_expired), (0, 0));
    let direct = 100_000 - remote.left("hot", &limits) - stats.lease_units_spent;
    assert!(direct < 20, "{direct} calls before the lease arrived");
}

#[tokio::test(start_paused = true)]
async fn units_are_returned_after_an_outage() {
    let (_, remote, resilient, limits) = warmed_up("100000/h window").await;
    let held = resilient.stats().lease_units_held;
    assert!(held > 0);
    // Other keys notice that the store is unreachable. The units of the idle key are due to be
    // returned, which fails while the breaker is open.
    remote.fails(true);
    while resilient.stats().breaker == BreakerState::Closed {
        let _ = resilient.decide(&Check::new().charge("other", &limits, 1)).await;
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    tokio::time::sleep(Duration::from_millis(400)).await;
    let stats = resilient.stats();
    assert_eq!(
        (stats.lease_units_held, stats.lease_units_expired),
        (held, 0),
        "it is not lost yet"
    );
    remote.fails(false);
    tokio::time::sleep(Duration::from_secs(2)).await;
    let stats = resilient.stats();
    assert_eq!((stats.lease_units_held, stats.lease_units_expired), (0, 0));
    let direct = 100_000 - remote.left("hot", &limits) - stats.lease_units_spent;
    assert!(direct < 20, "{direct} calls before the lease arrived");
}

#[tokio::test(start_paused = true)]
async fn held_leases_are_spent_while_the_store_is_unavailable() {
    let (_, remote, resilient, limits) = warmed_up("100000/s").await;
    for _ in 0..300 {
        let _ = ask(&resilient, &limits).await;
        tokio::time::sleep(Duration::from_micros(300)).await;
    }
    let held = resilient.stats().lease_units_held;
    assert!(held > 10);
    remote.silent(true);
    for _ in 0..held {
        assert_eq!(ask(&resilient, &limits).await.source(), Source::Local);
    }
    assert_eq!(ask(&resilient, &limits).await.source(), Source::Fallback);
}

#[tokio::test(start_paused = true)]
async fn another_limit_on_the_key_ends_its_lease() {
    let (_, remote, resilient, limits) = warmed_up("100000/h window").await;
    assert!(resilient.stats().lease_units_held > 0);
    let other: Limits = "50000/h window".parse().unwrap();
    assert_ne!(ask(&resilient, &other).await.source(), Source::Local);
    tokio::time::sleep(Duration::from_millis(50)).await;
    let stats = resilient.stats();
    assert_eq!(
        stats.lease_units_granted,
        stats.lease_units_spent + stats.lease_units_returned + stats.lease_units_held
    );
    assert!(remote.left("hot", &limits) < 100_000);
}

#[tokio::test(start_paused = true)]
async fn waiting_for_a_lease_respects_the_deadline() {
    let (_, remote, resilient, limits) = warmed_up("100000/s").await;
    remote.silent(true);
    for _ in 0..resilient.stats().lease_units_held {
        assert_eq!(ask(&resilient, &limits).await.source(), Source::Local);
    }
    // The call for units is in flight and will not be answered.
    let start = tokio::time::Instant::now();
    assert_eq!(ask(&resilient, &limits).await.source(), Source::Fallback);
    assert!(
        start.elapsed() <= tidegate::resilience::DEFAULT_DEADLINE + Duration::from_millis(1),
        "{:?}",
        start.elapsed()
    );
}

#[tokio::test(start_paused = true)]
async fn charging_unsynced_units_first_respects_the_deadline() {
    let clock = ManualClock::with_runtime();
    clock.advance(Duration::from_secs(1_000_000));
    let remote = Remote::new(&clock);
    let resilient =
        node(&remote, &clock, 2, 1).async_cap(5).async_period(Duration::from_secs(10)).build();
    let (limits, policy) =
        (limits("1000/s"), Policy { sync: SyncMode::Async, ..Policy::default() });
    let ask = async || {
        resilient
            .decide(&Check::new().policy(policy).charge("k", &limits, 1))
            .await
            .unwrap()
            .source()
    };
    assert_eq!(ask().await, Source::Store);
    remote.silent(true);
    for _ in 0..5 {
        assert_eq!(ask().await, Source::Local);
    }
    let start = tokio::time::Instant::now();
    assert_eq!(ask().await, Source::Fallback);
    assert!(
        start.elapsed() <= tidegate::resilience::DEFAULT_DEADLINE + Duration::from_millis(1),
        "{:?}",
        start.elapsed()
    );
}

/// From two thousand units per node on, leases have at least twenty times the throughput of one
/// round trip per check, and allow nothing beyond the limit.
#[tokio::test(start_paused = true)]
async fn leases_of_two_thousand_per_node_are_twenty_times_faster() {
    for (limit, nodes, amount) in
        [("2000/h window", 1, 2000), ("4000/h window", 2, 4000), ("4000/h", 2, 4000)]
    {
        let clock = ManualClock::with_runtime();
        clock.advance(Duration::from_secs(3_600_000));
        let remote = Remote::new(&clock);
        let resilient = node(&remote, &clock, nodes, 1).build();
        let limits = limits(limit);
        // One round trip per check, on the timers of the runtime.
        let began = tokio::time::Instant::now();
        for _ in 0..100 {
            assert!(
                resilient
                    .decide(&Check::new().charge("direct", &limits, 1))
                    .await
                    .unwrap()
                    .allowed()
            );
        }
        let direct_us = u64::try_from(began.elapsed().as_micros()).unwrap() / 100;
        let (began, mut passed) = (tokio::time::Instant::now(), 0_u64);
        while ask(&resilient, &limits).await.allowed() {
            passed += 1;
        }
        let took_us = u64::try_from(began.elapsed().as_micros()).unwrap();
        assert_eq!(passed, amount, "{limit}");
        assert!(
            took_us * 20 <= amount * direct_us,
            "{limit} over {nodes}: {} times",
            amount * direct_us / took_us
        );
        let stats = resilient.stats();
        assert_eq!((stats.fallback_allowed, stats.fallback_denied), (0, 0));
    }
}

#[tokio::test(start_paused = true)]
async fn held_units_are_returned_before_a_larger_cost_is_denied() {
    // Three consecutive calls, on timers with a resolution of milliseconds.
    let (_, remote, resilient, limits) =
        warmed_up_with("10000/d window", Duration::from_millis(50)).await;
    let held = resilient.stats().lease_units_held;
    assert!(held > 0);
    let rest = remote.left("hot", &limits) + held;
    let check = Check::new().policy(LEASE).charge("hot", &limits, rest);
    assert!(
        resilient.decide(&check).await.unwrap().allowed(),
        "{rest} are left, of which {held} are held here"
    );
    assert_eq!(remote.left("hot", &limits), 0);
    assert!(!ask(&resilient, &limits).await.allowed());
}
