//! A slow, unresponsive or unreachable store: decisions in time, marked and counted, and a fast
//! recovery.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tidegate::resilience::{BreakerState, OnFailure, Policy, SyncMode};
use tidegate::{Check, ManualClock, Source, Store};
use tokio::time::Instant;

use super::{Remote, ask, limits, node};

#[tokio::test(start_paused = true)]
async fn an_open_breaker_avoids_delays_and_closes_within_half_a_second() {
    let clock = ManualClock::with_runtime();
    let remote = Remote::new(&clock);
    let changes = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&changes);
    let resilient = node(&remote, &clock, 2, 7).build();
    resilient.on_state(move |_| _ = counted.fetch_add(1, Ordering::Relaxed));
    let limits = limits("1000000/s");
    assert_eq!(ask(&resilient, "k", &limits, 1).await.source(), Source::Store);
    remote.silent(true);
    let stalled = Instant::now();
    while resilient.stats().breaker == BreakerState::Closed {
        let began = Instant::now();
        let decision = ask(&resilient, "k", &limits, 1).await;
        assert_eq!((decision.allowed(), decision.source()), (true, Source::Fallback));
        assert!(began.elapsed() <= Duration::from_millis(18));
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert!(
        stalled.elapsed() <= Duration::from_millis(100),
        "opened after {:?}",
        stalled.elapsed()
    );
    for _ in 0..1000 {
        let began = Instant::now();
        assert_eq!(ask(&resilient, "k", &limits, 1).await.source(), Source::Fallback);
        assert_eq!(began.elapsed(), Duration::ZERO);
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    remote.silent(false);
    let back = Instant::now();
    while ask(&resilient, "k", &limits, 1).await.source() != Source::Store {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert!(back.elapsed() <= Duration::from_millis(500), "back after {:?}", back.elapsed());
    // From then on the store decides every check: no answer is late on a simulated clock.
    for _ in 0..1000 {
        assert_eq!(ask(&resilient, "k", &limits, 1).await.source(), Source::Store);
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let stats = resilient.stats();
    assert_eq!((stats.opened, stats.closed, changes.load(Ordering::Relaxed)), (1, 1, 2));
    assert!(stats.fallback_allowed > 1000 && stats.not_called >= 1000);
}

/// Consecutive requests, as of a pipeline, wait for a stalled store once and not each by itself.
#[tokio::test(start_paused = true)]
async fn only_the_first_requests_wait_for_a_stalled_store() {
    let clock = ManualClock::with_runtime();
    let limits = limits("1000000/s");
    for sync in [SyncMode::Direct, SyncMode::Lease, SyncMode::Async] {
        let remote = Remote::new(&clock);
        let resilient = node(&remote, &clock, 2, 7).async_cap(1).build();
        let policy = Policy { sync, ..Policy::default() };
        // Enough requests to use up a lease.
        let check = Check::new().policy(policy).charge("k", &limits, 2000);
        for _ in 0..50 {
            assert!(resilient.decide(&check).await.unwrap().allowed());
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        remote.silent(true);
        let began = Instant::now();
        let (mut alone, mut waited) = (0, 0);
        while began.elapsed() < Duration::from_millis(45) {
            let asked = Instant::now();
            let decision = resilient.decide(&check).await.unwrap();
            alone += u32::from(decision.source() == Source::Fallback);
            waited += u32::from(asked.elapsed() > Duration::ZERO);
            if asked.elapsed() == Duration::ZERO {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        }
        assert_eq!(resilient.stats().breaker, BreakerState::Closed);
        assert!(
            alone > 0 && waited <= 2,
            "{sync:?}: {waited} waited, {alone} were answered without the store"
        );
        // The unresponsive probe notices the first answer.
        remote.silent(false);
        let back = Instant::now();
        while resilient.decide(&check).await.unwrap().source() == Source::Fallback {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        assert!(
            back.elapsed() <= Duration::from_millis(10),
            "{sync:?}: back after {:?}",
            back.elapsed()
        );
        assert_eq!(resilient.stats().opened, 0);
    }
}

#[tokio::test(start_paused = true)]
async fn short_stalls_change_only_the_decisions_made_during_them() {
    let clock = ManualClock::with_runtime();
    let remote = Remote::new(&clock);
    let resilient = node(&remote, &clock, 1, 7).build();
    let limits = limits("1000000/s");
    for ms in 0..5000_u64 {
        remote.silent(ms % 500 >= 470);
        let (resilient, limits) = (resilient.clone(), limits.clone());
        tokio::spawn(async move { ask(&resilient, "k", &limits, 1).await.source() });
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let stats = resilient.stats();
    assert_eq!((stats.opened, stats.breaker), (0, BreakerState::Closed));
    assert!(stats.misses > 20 && stats.not_called > 100);
}

#[tokio::test(start_paused = true)]
async fn each_charge_has_its_policy() {
    let clock = ManualClock::with_runtime();
    let remote = Remote::new(&clock);
    let resilient = node(&remote, &clock, 1, 7).build();
    remote.fails(true);
    let limits = limits("2/h");
    for (on_failure, allowed) in
        [(OnFailure::Local, 2), (OnFailure::Open, 10), (OnFailure::Closed, 0)]
    {
        let policy = Policy { on_failure: Some(on_failure), ..Policy::default() };
        let mut passed = 0;
        for _ in 0..10 {
            let check =
                Check::new().policy(policy).charge_named(on_failure.name(), "k", &limits, 1);
            let decision = resilient.decide(&check).await.unwrap();
            assert_eq!(decision.source(), Source::Fallback);
            passed += usize::from(decision.allowed());
        }
        assert_eq!(passed, allowed, "{on_failure:?}");
    }
    // A peek does not count as allowed without a charge.
    let policy = Policy { on_failure: Some(OnFailure::Open), ..Policy::default() };
    assert!(
        resilient
            .decide(&Check::new().policy(policy).charge("k", &limits, 0))
            .await
            .unwrap()
            .allowed()
    );
    assert_eq!(resilient.stats().fail_open, 10);
}

#[tokio::test(start_paused = true)]
async fn calls_in_flight_are_bounded() {
    let clock = ManualClock::with_runtime();
    let remote = Remote::new(&clock);
    let resilient = node(&remote, &clock, 1, 7).max_in_flight(10).build();
    let limits = limits("1000/s");
    remote.delay(Duration::from_millis(4));
    let calls: Vec<_> = (0..100)
        .map(|_| {
            let (resilient, limits) = (resilient.clone(), limits.clone());
            tokio::spawn(async move { ask(&resilient, "k", &limits, 1).await.source() })
        })
        .collect();
    let mut from_store = 0;
    for call in calls {
        from_store += usize::from(call.await.unwrap() == Source::Store);
    }
    let stats = resilient.stats();
    assert_eq!((from_store, stats.overloads, stats.in_flight), (10, 90, 0));
}

/// Only the store can confirm that something was given back.
#[tokio::test(start_paused = true)]
async fn giving_back_to_an_unreachable_store_is_an_error() {
    let clock = ManualClock::with_runtime();
    let remote = Remote::new(&clock);
    let resilient = node(&remote, &clock, 1, 7).build();
    remote.fails(true);
    let limits = limits("2/h");
    assert!(
        resilient.decide(&Check::of(tidegate::Op::Refund).charge("k", &limits, 1)).await.is_err()
    );
}
