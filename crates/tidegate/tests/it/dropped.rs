//! Every operation of a limiter, dropped after every number of polls it can have had: what it takes
//! is taken once or not at all, units without an answer are given back, and no call is kept
//! waiting.

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::task::Poll;
use std::time::Duration;

use tidegate::{Limiter, Limits, Memory};

/// Polls a future at most `polls` times, and drops it then.
pub(crate) async fn poll_at_most<F: Future>(future: F, mut polls: usize) -> Option<F::Output> {
    let mut future = pin!(future);
    poll_fn(|context| {
        if polls == 0 {
            return Poll::Ready(None);
        }
        polls -= 1;
        future.as_mut().poll(context).map(Some)
    })
    .await
}

type Operation = for<'a> fn(&'a Limiter, &'a str) -> Pin<Box<dyn Future<Output = ()> + 'a>>;

/// An operation, what is used of a hundred units before it, and what may be afterwards: if it was
/// not done, and if it was.
struct Row {
    name: &'static str,
    limit: &'static str,
    before: u64,
    used: [u64; 2],
    run: Operation,
}

const WINDOW: &str = "100/1000d window";
const BUCKET: &str = "1/h burst 100";
const LEASES: &str = "100 concurrent ttl 1000d";
const WAIT: Duration = Duration::from_secs(5);

const ROWS: &[Row] = &[
    Row {
        name: "check",
        limit: WINDOW,
        before: 5,
        used: [5, 6],
        run: |l, k| Box::pin(async move { assert!(l.check(k).await.unwrap().allowed()) }),
    },
    Row {
        name: "peek",
        limit: WINDOW,
        before: 5,
        used: [5, 5],
        run: |l, k| {
            Box::pin(async move {
                let _ = l.peek(k).await.unwrap();
            })
        },
    },
    Row {
        name: "take",
        limit: WINDOW,
        before: 5,
        used: [5, 8],
        run: |l, k| {
            Box::pin(async move {
                let _ = l.take_up_to(k, 3).await.unwrap();
            })
        },
    },
    Row {
        name: "debit",
        limit: BUCKET,
        before: 5,
        used: [5, 7],
        run: |l, k| {
            Box::pin(async move {
                let _ = l.debit(k, 2).await.unwrap();
            })
        },
    },
    Row {
        name: "refund",
        limit: WINDOW,
        before: 5,
        used: [5, 4],
        run: |l, k| {
            Box::pin(async move {
                let _ = l.refund(k, 1).await.unwrap();
            })
        },
    },
    Row {
        name: "reset",
        limit: WINDOW,
        before: 5,
        used: [5, 0],
        run: |l, k| {
            Box::pin(async move {
                let _ = l.reset(k).await.unwrap();
            })
        },
    },
    // A caller without the reservation cannot settle it.
    Row {
        name: "reserve",
        limit: WINDOW,
        before: 5,
        used: [5, 9],
        run: |l, k| {
            Box::pin(async move {
                let _ = l.reserve(k, 4).await.unwrap();
            })
        },
    },
    Row {
        name: "acquire",
        limit: WINDOW,
        before: 5,
        used: [5, 6],
        run: |l, k| {
            Box::pin(async move {
                let _ = l.acquire(k, WAIT).await.unwrap();
            })
        },
    },
    Row {
        name: "acquire a place",
        limit: BUCKET,
        before: 5,
        used: [5, 6],
        run: |l, k| {
            Box::pin(async move {
                let _ = l.acquire(k, WAIT).await.unwrap();
            })
        },
    },
    // What is dropped is released.
    Row {
        name: "lease",
        limit: LEASES,
        before: 0,
        used: [0, 0],
        run: |l, k| Box::pin(async move { assert!(l.lease(k).await.unwrap().allowed()) }),
    },
    Row {
        name: "lease and release",
        limit: LEASES,
        before: 0,
        used: [0, 0],
        run: |l, k| {
            Box::pin(async move {
                let _ = l.lease(k).await.unwrap().release().await.unwrap();
            })
        },
    },
    Row {
        name: "acquire a lease",
        limit: LEASES,
        before: 0,
        used: [0, 0],
        run: |l, k| {
            Box::pin(async move {
                let _ = l.acquire_lease(k, WAIT).await.unwrap();
            })
        },
    },
    Row {
        name: "reserve and settle",
        limit: WINDOW,
        before: 5,
        used: [5, 7],
        run: |l, k| {
            Box::pin(async move {
                let _ = l.reserve(k, 4).await.unwrap().settle(2).await.unwrap();
            })
        },
    },
    Row {
        name: "reserve and cancel",
        limit: WINDOW,
        before: 5,
        used: [5, 5],
        run: |l, k| {
            Box::pin(async move {
                let _ = l.reserve(k, 4).await.unwrap().cancel().await.unwrap();
            })
        },
    },
];

/// Runs every operation under limiters that `make` makes, dropped after every number of polls.
pub(crate) async fn every_operation(make: impl Fn(Limits) -> Limiter) {
    for row in ROWS {
        let limiter = make(row.limit.parse().unwrap());
        for polls in 0..40 {
            let key = format!("{} {polls}", row.name);
            if row.before > 0 {
                let _ = limiter.debit(&key, row.before).await.unwrap();
            }
            let done = poll_at_most((row.run)(&limiter, &key), polls).await.is_some();
            let mut used = None;
            // Giving back takes a moment; a call that is still on its way may arrive.
            for _ in 0..1000 {
                let left = limiter.peek(&key).await.unwrap().remaining();
                used = Some(100 - left);
                let fine = if done {
                    used == Some(row.used[1])
                } else {
                    used.is_some_and(|used| row.used.contains(&used))
                };
                // A reservation that was made and not settled stays charged: its caller is gone.
                let kept = !done && row.name.starts_with("reserve and") && used == Some(9);
                if fine || kept {
                    used = None;
                    break;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            assert_eq!(
                used, None,
                "{} dropped after {polls} polls, done {done}: units used",
                row.name
            );
            // No call blocks another one.
            if row.limit != LEASES {
                assert!(
                    limiter.acquire(&key, WAIT).await.is_ok(),
                    "{} dropped after {polls} polls",
                    row.name
                );
            }
            if done {
                break;
            }
            assert!(polls < 39, "{} is never done", row.name);
        }
    }
}

#[tokio::test]
async fn a_call_dropped_in_memory_leaves_nothing() {
    let memory = Memory::new();
    every_operation(|limits| Limiter::builder(limits).memory(memory.clone()).build()).await;
}
