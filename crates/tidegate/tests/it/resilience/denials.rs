//! The deny cache: a denial is answered here until its wait is over, and not longer.

use std::time::Duration;

use tidegate::resilience::Resilient;
use tidegate::{Check, Limits, ManualClock, Op, Retry, Source, Store};

use super::{Remote, ask, limits, node};
use crate::conformance::Random;

#[tokio::test(start_paused = true)]
async fn a_cached_denial_holds_until_its_wait_is_over() {
    let clock = ManualClock::with_runtime();
    let remote = Remote::new(&clock);
    let resilient = node(&remote, &clock, 1, 1).build();
    let limits = limits("10/s");
    assert!(ask(&resilient, "k", &limits, 10).await.allowed());
    let first = ask(&resilient, "k", &limits, 5).await;
    assert_eq!((first.allowed(), first.source()), (false, Source::Store));
    let calls = remote.calls();
    tokio::time::sleep(Duration::from_millis(300)).await;
    let second = ask(&resilient, "k", &limits, 5).await;
    assert_eq!((second.allowed(), second.source(), remote.calls()), (false, Source::Local, calls));
    let (first_wait, wait) = (first.retry().micros().unwrap(), second.retry().micros().unwrap());
    assert!(
        wait <= first_wait - 300_000 + 1000 && wait >= first_wait - 300_000,
        "{first_wait} then {wait}"
    );
    // A higher cost waits longer, by the time the difference takes.
    let dearer = ask(&resilient, "k", &limits, 7).await;
    assert_eq!((dearer.retry(), remote.calls()), (Retry::After(wait + 200_000), calls));
    // A lower cost is sent to the store.
    assert!(!ask(&resilient, "k", &limits, 4).await.allowed());
    assert_eq!(remote.calls(), calls + 1);
    // After the wait it is allowed.
    tokio::time::sleep(Duration::from_micros(wait)).await;
    assert!(ask(&resilient, "k", &limits, 5).await.allowed());
}

#[tokio::test(start_paused = true)]
async fn giving_back_or_changing_the_limit_clears_a_cached_denial() {
    let clock = ManualClock::with_runtime();
    let remote = Remote::new(&clock);
    let resilient = node(&remote, &clock, 1, 1).build();
    let hour = limits("10/h window");
    for op in [Op::Refund, Op::Reset] {
        assert!(
            ask(&resilient, "k", &hour, ask(&resilient, "k", &hour, 0).await.remaining())
                .await
                .allowed()
        );
        assert!(!ask(&resilient, "k", &hour, 1).await.allowed());
        assert_eq!(ask(&resilient, "k", &hour, 1).await.source(), Source::Local);
        let _ = resilient.decide(&Check::of(op).charge("k", &hour, 1)).await.unwrap();
        assert!(ask(&resilient, "k", &hour, 1).await.allowed(), "after {op:?}");
    }
    assert!(!ask(&resilient, "k", &hour, 10).await.allowed());
    assert!(ask(&resilient, "k", &limits("100/h window"), 10).await.allowed());
}

#[tokio::test(start_paused = true)]
async fn denials_that_are_charged_reach_the_store() {
    let clock = ManualClock::with_runtime();
    let remote = Remote::new(&clock);
    let resilient = node(&remote, &clock, 1, 1).build();
    let limits = limits("2/h count rejected");
    for _ in 0..6 {
        let _ = ask(&resilient, "k", &limits, 1).await;
    }
    assert_eq!(remote.calls(), 6);
}

#[tokio::test(start_paused = true)]
async fn a_cached_denial_has_the_fields_of_all_charges() {
    let clock = ManualClock::with_runtime();
    let remote = Remote::new(&clock);
    let resilient = node(&remote, &clock, 1, 1).build();
    let (user, everyone) = (limits("2/h window; 5/h window"), limits("100/h window"));
    let check = Check::new().charge("user", &user, 1).charge("everyone", &everyone, 1);
    for _ in 0..2 {
        assert!(resilient.decide(&check).await.unwrap().allowed());
    }
    let (asked, here) =
        (resilient.decide(&check).await.unwrap(), resilient.decide(&check).await.unwrap());
    assert_eq!((asked.source(), here.source()), (Source::Store, Source::Local));
    for (asked, here) in asked.charges().iter().zip(here.charges()) {
        assert_eq!(
            (asked.allowed, asked.remaining, asked.amount),
            (here.allowed, here.remaining, here.amount)
        );
    }
    assert_eq!(here.binding_index(), 0);
}

/// The store would deny what the node denies: one node, any limit, any cost, random times.
#[tokio::test(start_paused = true)]
async fn nothing_is_denied_that_the_store_would_allow() {
    let all = [
        "7/s",
        "30/min burst 4",
        "5/s window",
        "5/s window from first hit",
        "6/s sliding",
        "6/s estimate",
        "4/s log",
    ];
    let mut all_here = 0;
    for seed in 0..40 {
        let mut random = Random(seed);
        let clock = ManualClock::with_runtime();
        let remote = Remote::new(&clock);
        let delay = random.below(4_000) / 2 * 2;
        remote.delay(Duration::from_micros(delay));
        let resilient = node(&remote, &clock, 1, seed).build();
        let mut here = 0;
        for _ in 0..300 {
            // One key per limit: if limits alternate on a key, the wait of a denial may be too long.
            let key = *random.pick::<&str>(&all);
            let limits = limits(key);
            let cost = random.below(5);
            let before = remote.calls();
            let would = remote.left(key, &limits) >= cost;
            let decision = ask(&resilient, key, &limits, cost).await;
            if remote.calls() == before {
                here += 1;
                assert!(!would && !decision.allowed(), "{limits} cost {cost} was denied here");
            }
            let mut pause = *random.pick(&[0, 1, 1000, 50_000, 400_000]);
            if let Retry::After(wait) = decision.retry()
                && decision.source() == Source::Store
                && random.below(2) == 0
            {
                // The answer took half of the delay: to the exact time at which the store would allow
                // it, or close to it.
                pause = (wait + random.below(3)).saturating_sub(delay / 2 + random.below(2));
            }
            tokio::time::sleep(Duration::from_micros(pause)).await;
        }
        all_here += here;
    }
    assert!(all_here > 200, "only {all_here} were decided here");
}

/// Sends many checks concurrently: how many were allowed, the denials, and the number of calls.
async fn all_at_once(
    resilient: &Resilient,
    limits: &Limits,
    costs: &[u64],
    remote: &Remote,
) -> (u64, Vec<u64>, u64) {
    let calls = remote.calls();
    let tasks: Vec<_> = costs
        .iter()
        .map(|&cost| {
            let (resilient, limits) = (resilient.clone(), limits.clone());
            tokio::spawn(async move { (cost, ask(&resilient, "k", &limits, cost).await.allowed()) })
        })
        .collect();
    let (mut passed, mut denied) = (0, Vec::new());
    for task in tasks {
        match task.await.unwrap() {
            (cost, true) => passed += cost,
            (cost, false) => denied.push(cost),
        }
    }
    (passed, denied, remote.calls() - calls)
}

/// Under overload a node does not queue more checks of a key than the store can allow.
#[tokio::test(start_paused = true)]
async fn a_node_sends_no_more_of_a_key_than_can_be_left() {
    let clock = ManualClock::with_runtime();
    clock.advance(Duration::from_secs(1_000_000));
    for limit in ["50/d window", "50/d"] {
        let remote = Remote::new(&clock);
        let resilient = node(&remote, &clock, 4, 7).build();
        let limits = limits(limit);
        assert!(ask(&resilient, "k", &limits, 1).await.allowed());
        let (passed, denied, calls) = all_at_once(&resilient, &limits, &[1; 500], &remote).await;
        assert_eq!((passed, denied.len()), (49, 451), "{limit}");
        assert!(calls <= 50, "{limit}: {calls} calls");
    }
    // A hundred times the limit, for a second.
    let remote = Remote::new(&clock);
    let resilient = node(&remote, &clock, 1, 7).build();
    let limits = limits("100/s");
    assert!(ask(&resilient, "k", &limits, 1).await.allowed());
    let (began, mut passed, mut calls) = (tokio::time::Instant::now(), 0, 0);
    for _ in 0..1000 {
        let (more, _, called) = all_at_once(&resilient, &limits, &[1; 10], &remote).await;
        (passed, calls) = (passed + more, calls + called);
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let may = 99 + u64::try_from(began.elapsed().as_millis()).unwrap() / 10;
    assert!((may - 5..=may + 1).contains(&passed), "{passed} of {may}");
    assert!(calls <= 2 * passed + 20, "{calls} calls for 10000 requests of which {passed} passed");
}

/// With any mix of concurrent costs, a denied check would not have fitted.
#[tokio::test(start_paused = true)]
async fn denials_by_units_in_flight_would_not_have_fitted() {
    let clock = ManualClock::with_runtime();
    clock.advance(Duration::from_secs(1_000_000));
    let mut here = 0;
    for seed in 0..200 {
        let mut random = Random(seed);
        let remote = Remote::new(&clock);
        let resilient = node(&remote, &clock, 2, seed).build();
        let limits = limits("60/d window");
        assert!(ask(&resilient, "k", &limits, 1).await.allowed());
        let mut left = 59;
        for _ in 0..6 {
            if random.below(2) == 0 {
                // Another client charges units that this node does not know of yet.
                let other = Check::of(Op::Take).charge("k", &limits, random.below(10));
                left -= remote.another_line().decide(&other).await.unwrap().granted();
            }
            let most = 1 + random.below(5);
            let costs: Vec<u64> = (0..random.below(40)).map(|_| 1 + random.below(most)).collect();
            let before = resilient.stats().denied_here;
            let (passed, denied, _) = all_at_once(&resilient, &limits, &costs, &remote).await;
            left -= passed;
            here += resilient.stats().denied_here - before;
            assert_eq!(left, remote.left("k", &limits));
            assert!(
                denied.iter().all(|cost| *cost > left),
                "seed {seed}: {denied:?} were denied of {left}"
            );
        }
    }
    assert!(here > 5000, "only {here} were denied here");
}
