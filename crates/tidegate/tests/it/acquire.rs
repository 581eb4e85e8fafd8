//! Waiting, on a clock that moves when told to: no test sleeps.

use std::future::IntoFuture;
use std::task::Poll;
use std::time::Duration;

use tidegate::{AcquireError, Pass, Retry};
use tokio::task::JoinHandle;

use crate::limiter::limiter;

const MINUTE: Duration = Duration::from_secs(60);

/// Lets every other task run until it waits.
async fn settle() {
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
}

fn spawn(
    limiter: &tidegate::Limiter,
    key: &'static str,
    max: Duration,
) -> JoinHandle<Result<Pass, AcquireError>> {
    let limiter = limiter.clone();
    tokio::spawn(async move { limiter.acquire(key, max).await })
}

/// The calls that got a pass, in the order they were started.
fn through<T>(tasks: &[JoinHandle<T>]) -> Vec<bool> {
    tasks.iter().map(JoinHandle::is_finished).collect()
}

#[tokio::test]
async fn places_are_kept_in_order_of_arrival() {
    // A bucket books places in the store; a window, or two limits, make calls wait in a queue.
    for limits in ["1/s", "1/s window", "1/s; 100/min"] {
        let (limiter, clock) = limiter(limits);
        let mut tasks = Vec::new();
        for _ in 0..4 {
            tasks.push(spawn(&limiter, "k", MINUTE));
            settle().await;
        }
        for done in 1..=4 {
            assert_eq!(through(&tasks), (0..4).map(|n| n < done).collect::<Vec<_>>(), "{limits}");
            clock.advance(Duration::from_micros(999_999));
            settle().await;
            assert_eq!(
                through(&tasks),
                (0..4).map(|n| n < done).collect::<Vec<_>>(),
                "{limits}: one microsecond early"
            );
            clock.advance(Duration::from_micros(1));
            settle().await;
        }
        for task in tasks {
            assert!(task.await.unwrap().unwrap().decision().allowed());
        }
    }
}

#[tokio::test]
async fn a_wait_known_to_be_too_long_is_refused_without_waiting() {
    for limits in ["1/10s", "1/10s window", "1/10s log; 5/min"] {
        let (limiter, _clock) = limiter(limits);
        limiter.acquire("k", Duration::ZERO).await.unwrap();
        let Err(AcquireError::TooLong(denied)) = limiter.acquire("k", Duration::from_secs(9)).await
        else {
            panic!("{limits}: it would have to wait ten seconds")
        };
        assert!(!denied.allowed());
        assert_eq!(denied.retry(), Retry::After(10_000_000), "{limits}");
        let too_dear = limiter.acquire("other", MINUTE).cost(6).await;
        assert!(
            matches!(too_dear, Err(AcquireError::TooLong(denied)) if denied.retry() == Retry::Never),
            "{limits}"
        );
        assert!(limiter.peek("other").await.unwrap().remaining() > 0, "nothing was taken");
    }
}

#[tokio::test]
async fn a_call_does_not_wait_behind_a_longer_sleep() {
    let (limiter, clock) = limiter("1/10s window");
    limiter.acquire("k", Duration::ZERO).await.unwrap();
    let front = spawn(&limiter, "k", MINUTE);
    settle().await;
    let impatient = spawn(&limiter, "k", Duration::from_secs(5));
    settle().await;
    assert!(impatient.is_finished() && !front.is_finished());
    assert!(matches!(impatient.await.unwrap(), Err(AcquireError::TooLong(_))));
    // Behind it, one that can wait for the front but not for its own turn gives up when its time is
    // over.
    let hopeful = spawn(&limiter, "k", Duration::from_secs(15));
    settle().await;
    clock.advance(Duration::from_secs(10));
    settle().await;
    assert!(front.is_finished());
    assert!(matches!(hopeful.await.unwrap(), Err(AcquireError::TooLong(_))));
}

#[tokio::test]
async fn queues_are_bounded() {
    let clock = tidegate::ManualClock::new();
    let memory = tidegate::Memory::builder().clock(clock.clone()).build();
    let limiter = tidegate::Limiter::builder("1/s".parse().unwrap())
        .memory(memory)
        .max_waiting_per_key(2)
        .max_waiting(3)
        .build();
    limiter.acquire("a", MINUTE).await.unwrap();
    limiter.acquire("b", MINUTE).await.unwrap();
    let _waiting = [spawn(&limiter, "a", MINUTE), spawn(&limiter, "a", MINUTE)];
    settle().await;
    let full = limiter.acquire("a", MINUTE).await;
    assert!(matches!(full, Err(AcquireError::QueueFull { waiting: 2 })), "{full:?}");
    let _third = spawn(&limiter, "b", MINUTE);
    settle().await;
    let full = limiter.acquire("c", MINUTE).await;
    assert!(matches!(full, Err(AcquireError::QueueFull { waiting: 3 })), "{full:?}");
}

#[tokio::test]
async fn a_call_dropped_while_it_waits_leaves_nothing_behind() {
    for limits in ["1/s", "1/s window", "1/s; 100/min"] {
        // Dropped after every number of polls it can have had.
        for polls in 0..4 {
            let (limiter, clock) = limiter(limits);
            limiter.acquire("k", MINUTE).await.unwrap();
            let before = limiter.peek("k").await.unwrap();
            let mut waiting = Box::pin(limiter.acquire("k", MINUTE).into_future());
            for _ in 0..polls {
                let polled = std::future::poll_fn(|context| {
                    Poll::Ready(waiting.as_mut().poll(context).is_ready())
                })
                .await;
                assert!(!polled, "{limits}");
            }
            drop(waiting);
            assert_eq!(
                limiter.peek("k").await.unwrap(),
                before,
                "{limits}, dropped after {polls} polls"
            );
            // The place is free for the next.
            let next = spawn(&limiter, "k", MINUTE);
            settle().await;
            clock.advance(Duration::from_secs(1));
            settle().await;
            assert!(next.is_finished(), "{limits}, dropped after {polls} polls");
        }
    }
}

#[tokio::test]
async fn a_place_left_in_the_middle_is_not_given_to_a_later_call() {
    let (limiter, clock) = limiter("1/s");
    limiter.acquire("k", MINUTE).await.unwrap();
    let second = spawn(&limiter, "k", MINUTE); // at 1 s
    settle().await;
    let third = spawn(&limiter, "k", MINUTE); // at 2 s
    settle().await;
    second.abort();
    settle().await;
    // The third keeps its place at 2 s; were the second's given away, the fourth would come at the
    // same moment.
    let fourth = spawn(&limiter, "k", MINUTE);
    settle().await;
    clock.advance(Duration::from_secs(2));
    settle().await;
    assert!(third.is_finished() && !fourth.is_finished());
    clock.advance(Duration::from_secs(1));
    settle().await;
    assert!(fourth.is_finished());
}

#[tokio::test]
async fn weights_wait_for_as_much_as_they_need() {
    let (limiter, clock) = limiter("10/s");
    limiter.acquire("k", MINUTE).cost(10).await.unwrap();
    let big = {
        let limiter = limiter.clone();
        tokio::spawn(async move { limiter.acquire("k", MINUTE).cost(5).await })
    };
    settle().await;
    let small = spawn(&limiter, "k", MINUTE);
    settle().await;
    clock.advance(Duration::from_millis(499));
    settle().await;
    assert!(!big.is_finished() && !small.is_finished(), "the small one does not overtake");
    clock.advance(Duration::from_millis(1));
    settle().await;
    assert!(big.is_finished() && !small.is_finished());
    clock.advance(Duration::from_millis(100));
    settle().await;
    assert!(small.is_finished());
}

#[tokio::test]
async fn a_call_that_leaves_the_queue_makes_room() {
    for limits in ["1/s", "1/s window"] {
        let clock = tidegate::ManualClock::new();
        let memory = tidegate::Memory::builder().clock(clock.clone()).build();
        let limiter = tidegate::Limiter::builder(limits.parse().unwrap())
            .memory(memory)
            .max_waiting(1)
            .build();
        limiter.acquire("k", MINUTE).await.unwrap();
        for _ in 0..100 {
            let waiting = spawn(&limiter, "k", MINUTE);
            settle().await;
            assert!(matches!(
                limiter.acquire("k", MINUTE).await,
                Err(AcquireError::QueueFull { waiting: 1 })
            ));
            waiting.abort();
            let _ = waiting.await;
        }
        let through = spawn(&limiter, "k", MINUTE);
        settle().await;
        clock.advance(Duration::from_secs(1));
        assert!(through.await.unwrap().is_ok(), "{limits}: a hundred that left have taken nothing");
    }
}

#[tokio::test]
async fn waiting_calls_wake_when_a_lease_ends() {
    // The ttl is 30 s; a call with a shorter wait also gets the lease when it ends.
    for max_wait in [MINUTE, Duration::from_secs(10)] {
        for dropped in [true, false] {
            let (limiter, clock) = limiter("1 concurrent ttl 30s");
            let lease = limiter.lease("k").await.unwrap();
            let waiting = [spawn(&limiter, "k", max_wait), spawn(&limiter, "k", max_wait)];
            settle().await;
            clock.advance(Duration::from_secs(1));
            settle().await;
            assert_eq!(through(&waiting), [false, false]);
            if dropped {
                drop(lease)
            } else {
                assert!(lease.release().await.unwrap().allowed())
            };
            settle().await;
            assert_eq!(through(&waiting), [true, false], "one lease, one pass");
            clock.advance(Duration::from_secs(9));
            settle().await;
            assert_eq!(
                waiting[1].is_finished(),
                max_wait != MINUTE,
                "nothing was released: its ttl is over"
            );
        }
    }
}

#[tokio::test]
async fn waiting_calls_wake_on_refunds_and_resets() {
    let (limiter, _clock) = limiter("2/min window");
    let _ = limiter.acquire("k", MINUTE).cost(2).await.unwrap();
    let waiting = [spawn(&limiter, "k", MINUTE), spawn(&limiter, "k", MINUTE)];
    settle().await;
    assert_eq!(through(&waiting), [false, false]);
    let _ = limiter.refund("k", 1).await.unwrap();
    settle().await;
    assert_eq!(through(&waiting), [true, false]);
    let _ = limiter.reset("k").await.unwrap();
    settle().await;
    assert_eq!(through(&waiting), [true, true]);
}

#[tokio::test]
async fn a_call_that_leaves_the_front_does_not_fail_the_others() {
    let (limiter, _clock) = limiter("2/min window");
    let _ = limiter.acquire("k", MINUTE).await.unwrap();
    let dear = {
        let limiter = limiter.clone();
        tokio::spawn(async move { limiter.acquire("k", MINUTE).cost(2).await })
    };
    settle().await;
    let mut behind = Box::pin(limiter.acquire("k", MINUTE).into_future());
    assert!(
        std::future::poll_fn(|context| Poll::Ready(behind.as_mut().poll(context).is_pending()))
            .await
    );
    dear.abort();
    settle().await;
    // The second call is at the front and has not checked yet; no call sleeps for a minute.
    let mut brief = Box::pin(limiter.acquire("k", Duration::from_secs(1)).into_future());
    assert!(
        std::future::poll_fn(|context| Poll::Ready(brief.as_mut().poll(context).is_pending()))
            .await
    );
    behind.await.unwrap();
}

#[tokio::test]
async fn when_all_have_left_their_places_are_free_whatever_the_order() {
    for order in [[0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 0, 4, 1, 3], [1, 3, 4, 2, 0]] {
        let (limiter, _clock) = limiter("10/s burst 2");
        let _ = limiter.acquire("k", MINUTE).cost(2).await.unwrap();
        let before = limiter.peek("k").await.unwrap();
        let mut tasks = Vec::new();
        for _ in 0..5 {
            tasks.push(spawn(&limiter, "k", MINUTE));
            settle().await;
        }
        for place in order {
            tasks[place].abort();
            settle().await;
        }
        assert_eq!(limiter.peek("k").await.unwrap(), before, "{order:?}");
    }
}

#[tokio::test]
async fn leases_are_granted_in_order_of_arrival() {
    let (limiter, clock) = limiter("1 concurrent ttl 1h");
    let held = limiter.lease("k").await.unwrap();
    let mut tasks = Vec::new();
    for _ in 0..3 {
        let limiter = limiter.clone();
        tasks.push(tokio::spawn(async move { limiter.acquire_lease("k", MINUTE).await }));
        settle().await;
    }
    assert_eq!(through(&tasks), [false, false, false]);
    drop(held);
    settle().await;
    assert_eq!(
        through(&tasks),
        [true, false, false],
        "the first in line has it, the others wait for that one"
    );
    let first = tasks.remove(0).await.unwrap().unwrap();
    let _ = first.release().await.unwrap();
    settle().await;
    assert_eq!(through(&tasks), [true, false]);
    // The last call waits a minute without effect.
    clock.advance(Duration::from_secs(60));
    settle().await;
    let last = tasks.remove(1).await.unwrap();
    assert!(matches!(last, Err(AcquireError::TooLong(denied)) if !denied.allowed()));
    assert!(matches!(
        limiter.acquire_lease("k", Duration::ZERO).await,
        Err(AcquireError::TooLong(_))
    ));
}

#[tokio::test]
async fn a_lease_released_by_another_limiter_is_noticed() {
    let (limiter, clock) = limiter("1 concurrent ttl 1h");
    let memory = tidegate::Memory::builder().clock(clock.clone()).build();
    let [one, other] = [(); 2].map(|()| {
        tidegate::Limiter::builder(limiter.limits().clone()).memory(memory.clone()).build()
    });
    let lease = one.lease("k").await.unwrap();
    let waiting = spawn(&other, "k", MINUTE);
    settle().await;
    drop(lease);
    clock.advance(Duration::from_millis(50));
    settle().await;
    assert!(waiting.is_finished());
}

/// The units that a settlement gives back allow the call at the front.
#[tokio::test]
async fn a_settled_reservation_wakes_waiting_calls() {
    for limits in ["2/min window", "2/min log", "2/min; 100/h"] {
        let (limiter, _clock) = limiter(limits);
        let reservation = limiter.reserve("k", 2).await.unwrap();
        let waiting = spawn(&limiter, "k", MINUTE);
        settle().await;
        assert!(!waiting.is_finished(), "{limits}");
        assert!(reservation.settle(1).await.unwrap().allowed());
        settle().await;
        assert!(waiting.is_finished(), "{limits}");
    }
}
