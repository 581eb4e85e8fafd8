//! Concurrent checks of one hot key: a few calls, and the same decisions as one by one.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use tidegate::{Check, Decision, ManualClock, Memory, Store};
use tidegate_testkit::{Flavor, Server};

use super::{assert_all_expire, left, limits, runtime, store};
use crate::conformance::Random;

/// Starts all futures in this order, and waits for all.
async fn all<T>(mut futures: Vec<Pin<Box<dyn Future<Output = T> + Send>>>) -> Vec<T> {
    let mut outputs: Vec<Option<T>> = futures.iter().map(|_| None).collect();
    poll_fn(|context| {
        for (future, output) in futures.iter_mut().zip(&mut outputs) {
            if output.is_none()
                && let Poll::Ready(ready) = future.as_mut().poll(context)
            {
                *output = Some(ready);
            }
        }
        if outputs.iter().all(Option::is_some) { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    outputs.into_iter().flatten().collect()
}

#[test]
fn checks_that_are_sent_together_are_decided_as_one_by_one() {
    let texts = [
        "100/s",
        "7/min burst 40",
        "50/s window",
        "50/s window from first hit",
        "60/s estimate",
        "40/s sliding",
        "40/s log",
        "20/s count rejected",
        "20/s log count rejected",
        "30/s window count rejected",
    ];
    for flavor in Flavor::ALL {
        let server = Server::start(flavor);
        let runtime = runtime();
        runtime.block_on(async {
            let clock = ManualClock::new();
            clock.advance(Duration::from_secs(1_000_000));
            let redis =
                Arc::new(store(&server).clock(clock.clone()).coalesce(true).build().unwrap());
            redis.prepare().await.unwrap();
            let memory = Memory::builder().clock(clock.clone()).max_keys(1024).build();
            let mut random = Random(7);
            for round in 0..200 {
                let text: &'static str = random.pick::<&str>(&texts);
                // Sometimes another limit on a key that has been used.
                let key: &'static str = if random.below(10) == 0 { "shared" } else { text };
                // The cost of each check, and how much later than the previous one it comes.
                let asks: Vec<(u64, u64, &'static str)> = (0..1 + random.below(200))
                    .map(|_| {
                        let other = random.below(40) == 0 && key == "shared";
                        let text = if other { *random.pick::<&str>(&texts) } else { text };
                        (
                            random.below(5),
                            if random.below(20) == 0 { random.below(5_000) } else { 0 },
                            text,
                        )
                    })
                    .collect();
                let asking = asks.iter().map(|&(cost, later, text)| {
                    let (redis, limits, clock) = (Arc::clone(&redis), limits(text), clock.clone());
                    let asking = async move {
                        // On the first poll, which is in order.
                        clock.advance(Duration::from_micros(later));
                        redis.decide(&Check::new().charge(key, &limits, cost)).await.unwrap()
                    };
                    Box::pin(asking) as Pin<Box<dyn Future<Output = Decision> + Send>>
                });
                let begin = clock.now();
                let together = all(asking.collect()).await;
                let end = clock.now();
                clock.set(begin);
                for ((cost, later, text), answer) in asks.iter().zip(&together) {
                    clock.advance(Duration::from_micros(*later));
                    let alone =
                        memory.decide(&Check::new().charge(key, &limits(text), *cost)).unwrap();
                    assert_eq!(*answer, alone, "{flavor}, round {round}: {text}, cost {cost}");
                }
                assert_eq!(clock.now(), end);
                let pause = *random.pick(&[0, 1, 999, 40_000, 300_000, 2_000_000]);
                clock.advance(Duration::from_micros(pause));
            }
            let stats = redis.stats();
            assert!(stats.coalesced > 10_000, "only {} were sent together", stats.coalesced);
            assert!(stats.calls < 10_000, "{} calls", stats.calls);
            assert_eq!((stats.regressions, stats.repairs), (0, 0));
        });
        assert_all_expire(&server);
    }
}

/// A check that is cancelled before its call is not charged, and no other check hangs.
#[test]
fn a_cancelled_check_does_not_disturb_the_others() {
    let server = Server::start(Flavor::Valkey9);
    let runtime = runtime();
    let (limits, rounds) = (limits("1000000/h window"), 60);
    let redis = Arc::new(runtime.block_on(async { store(&server).build() }).unwrap());
    let mut random = Random(3);
    let mut answered = 0;
    for _ in 0..rounds {
        let tasks: Vec<_> = (0..100)
            .map(|_| {
                let (redis, limits, patience) =
                    (Arc::clone(&redis), limits.clone(), random.below(3_000));
                runtime.spawn(async move {
                    let check = Check::new().charge("k", &limits, 1);
                    let asking = redis.decide(&check);
                    tokio::time::timeout(Duration::from_micros(patience), asking)
                        .await
                        .is_ok_and(|answer| answer.is_ok())
                })
            })
            .collect();
        answered += tasks
            .into_iter()
            .filter(|_| true)
            .map(|task| u64::from(runtime.block_on(task).unwrap()))
            .sum::<u64>();
    }
    let used = 1_000_000 - runtime.block_on(left(&redis, "k", &limits));
    assert!(
        (answered..=rounds * 100).contains(&used),
        "{answered} were answered and {used} charged"
    );
}
