//! A check dropped at any await point leaves nothing behind: no call in flight and no units.

use std::time::Duration;

use tidegate::resilience::{Policy, SyncMode};
use tidegate::{Check, Limiter, ManualClock, Store};

use super::{Remote, ask, limits, node};
use crate::dropped::{every_operation, poll_at_most};

#[tokio::test(start_paused = true)]
async fn a_check_that_is_dropped_after_any_number_of_polls_leaves_nothing_behind() {
    for sync in [SyncMode::Direct, SyncMode::Lease, SyncMode::Async] {
        for polls in 0..8 {
            let clock = ManualClock::with_runtime();
            let remote = Remote::new(&clock);
            let resilient = node(&remote, &clock, 1, 3).build();
            let (near_by, far) = (limits("100000/h window"), limits("5/h window"));
            let policy = Policy { sync, ..Policy::default() };
            let check = Check::new().policy(policy).charge("near", &near_by, 1);
            for _ in 0..50 {
                let _ = resilient.decide(&check).await.unwrap();
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            assert!(ask(&resilient, "far", &far, 5).await.allowed());
            // One charge is spent here and one in the store, which denies it if the call gets there.
            let both = Check::new()
                .policy(policy)
                .charge("near", &near_by, 1)
                .policy(Policy::default())
                .charge("far", &far, 1);
            let before = resilient.stats();
            for _ in 0..20 {
                let decision = poll_at_most(resilient.decide(&both), polls).await;
                assert!(decision.is_none_or(|decision| !decision.unwrap().allowed()));
            }
            let after = resilient.stats();
            assert_eq!(after.in_flight, 0, "{sync:?} after {polls} polls");
            assert_eq!(
                before.lease_units_spent, after.lease_units_spent,
                "{sync:?} after {polls} polls"
            );
            resilient.close().await;
            tokio::time::sleep(Duration::from_millis(100)).await;
            let stats = resilient.stats();
            assert_eq!(
                (stats.lease_units_held, stats.unsynced_units),
                (0, 0),
                "{sync:?} after {polls} polls"
            );
            assert_eq!(remote.left("near", &near_by), 100_000 - 50, "{sync:?} after {polls} polls");
            assert_eq!(
                stats.lease_units_granted,
                stats.lease_units_spent + stats.lease_units_returned + stats.lease_units_expired
            );
        }
    }
}

#[tokio::test(start_paused = true)]
async fn every_operation_that_is_dropped_leaves_nothing_behind() {
    for sync in [SyncMode::Direct, SyncMode::Lease, SyncMode::Async] {
        let clock = ManualClock::with_runtime();
        let remote = Remote::new(&clock);
        let resilient = node(&remote, &clock, 1, 3).build();
        every_operation(|limits| {
            Limiter::builder(limits).resilient(resilient.clone()).sync(sync).build()
        })
        .await;
        resilient.close().await;
        tokio::time::sleep(Duration::from_millis(100)).await;
        let stats = resilient.stats();
        assert_eq!(
            (stats.in_flight, stats.lease_units_held, stats.unsynced_units),
            (0, 0, 0),
            "{sync:?}"
        );
    }
}
