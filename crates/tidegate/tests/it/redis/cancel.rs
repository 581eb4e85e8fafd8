//! Cancelled calls: no caller gets the answer of another, no budget is exceeded, and nothing is
//! held longer than without the cancellation.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;
use std::time::{Duration, Instant};

use tidegate::redis::{Redis, RedisBuilder};
use tidegate::{Check, Limiter, Limits};
use tidegate_testkit::{Flavor, Server, wait_until};
use tokio::runtime::Runtime;

use super::{assert_all_expire, at, left, limits, runtime, store};
use crate::conformance::Random;

const CALLERS: u64 = 16;
const CALLS: u64 = 400;
const PATIENCE: Duration = Duration::from_secs(30);

/// The output of `future`, unless it is dropped before: often after some polls, sometimes after a
/// short time.
async fn perhaps<F: Future>(random: &mut Random, future: F) -> Option<F::Output> {
    let mut future = pin!(future);
    let (mut polls, moment) = match random.below(4) {
        0 | 1 => (u64::MAX, None),
        2 => (random.below(3), None),
        _ => (u64::MAX, Some(Duration::from_micros(random.below(2_000)))),
    };
    let few = std::future::poll_fn(|context| {
        if polls == 0 {
            return Poll::Ready(None);
        }
        polls -= 1;
        future.as_mut().poll(context).map(Some)
    });
    match moment {
        Some(moment) => tokio::time::timeout(moment, few).await.ok().flatten(),
        None => few.await,
    }
}

/// Runs several callers concurrently, each with its own random numbers.
fn callers<F>(runtime: &Runtime, call: impl Fn(Random) -> F)
where
    F: Future<Output = ()> + Send + 'static,
{
    let callers: Vec<_> = (0..CALLERS).map(|caller| runtime.spawn(call(Random(caller)))).collect();
    callers.into_iter().for_each(|caller| runtime.block_on(caller).unwrap());
}

fn build(runtime: &Runtime, builder: RedisBuilder) -> Redis {
    runtime.block_on(async { builder.build() }).unwrap()
}

/// Every key has an amount of its own, which every answer about it contains.
#[test]
fn no_caller_gets_the_answer_of_another() {
    const KEYS: u64 = 20;
    let server = Server::start(Flavor::Valkey9);
    let runtime = runtime();
    let redis = build(&runtime, store(&server));
    let kinds = ["1000d window", "1000d estimate", "1000d log", "1000d sliding"];
    let amount = |key: u64| 30 + key;
    let limit = move |key: u64| {
        let kind = key % 5;
        let kind =
            kinds.get(usize::try_from(kind).unwrap()).map(|kind| format!("{}/{kind}", amount(key)));
        limits(&kind.unwrap_or_else(|| format!("1/h burst {}", amount(key))))
    };
    let counts: Arc<Vec<[AtomicU64; 2]>> =
        Arc::new((0..KEYS).map(|_| Default::default()).collect());
    callers(&runtime, |mut random| {
        let (redis, counts) = (redis.clone(), Arc::clone(&counts));
        async move {
            let limiters: Vec<Limiter> = (0..KEYS)
                .map(|key| Limiter::builder(limit(key)).redis(redis.clone()).build())
                .collect();
            for _ in 0..CALLS {
                let key = random.below(KEYS);
                let place = usize::try_from(key).unwrap();
                let (limiter, name) = (&limiters[place], format!("key:{key}"));
                let allowed = match random.below(3) {
                    0 => {
                        let reserved = perhaps(&mut random, limiter.reserve(&name, 1)).await;
                        reserved.map(|reserved| reserved.unwrap().decision().clone())
                    }
                    _ => perhaps(&mut random, limiter.check(&name).into_future())
                        .await
                        .map(Result::unwrap),
                };
                match allowed {
                    Some(decision) => {
                        assert_eq!(
                            decision.binding().amount,
                            amount(key),
                            "the answer for key {key}: {decision:?}"
                        );
                        counts[place][0]
                            .fetch_add(u64::from(decision.allowed()), Ordering::Relaxed);
                    }
                    None => _ = counts[place][1].fetch_add(1, Ordering::Relaxed),
                }
            }
        }
    });
    for (key, counts) in (0..).zip(counts.iter()) {
        let [admitted, gone] = [0, 1].map(|at| counts[at].load(Ordering::Relaxed));
        let left = runtime.block_on(left(&redis, &format!("key:{key}"), &limit(key)));
        assert!(admitted <= amount(key), "key {key}: {admitted} admitted of {}", amount(key));
        // A cancelled check was charged or not; a completed one was.
        let used = amount(key) - left;
        assert!(
            (admitted..=admitted + gone).contains(&used),
            "key {key}: {used} used, {admitted} admitted, {gone} gone"
        );
    }
    assert_all_expire(&server);
}

/// Leases of cancelled calls end with their ttl at the latest.
#[test]
fn leases_do_not_outlive_their_ttl() {
    const LEASES: u64 = 5;
    let server = Server::start(Flavor::Redis7);
    let runtime = runtime();
    let redis = build(&runtime, store(&server));
    let limits = limits(&format!("{LEASES} concurrent ttl 1s"));
    let limiter = Limiter::builder(limits.clone()).redis(redis.clone()).build();
    let held = Arc::new(AtomicU64::new(0));
    callers(&runtime, |mut random| {
        let (limiter, held) = (limiter.clone(), Arc::clone(&held));
        async move {
            for _ in 0..CALLS / 4 {
                let began = Instant::now();
                let wait = Duration::from_millis(random.below(20));
                let lease = match random.below(2) {
                    0 => perhaps(&mut random, limiter.lease("k")).await.map(Result::unwrap),
                    _ => perhaps(&mut random, limiter.acquire_lease("k", wait))
                        .await
                        .and_then(Result::ok),
                };
                let Some(lease) = lease.filter(tidegate::Lease::allowed) else { continue };
                let holders = held.fetch_add(1, Ordering::SeqCst) + 1;
                tokio::task::yield_now().await;
                held.fetch_sub(1, Ordering::SeqCst);
                // A lease held longer than its ttl has ended.
                assert!(
                    holders <= LEASES || began.elapsed() > Duration::from_millis(900),
                    "{holders} hold a lease"
                );
                if random.below(2) == 0 {
                    drop(lease);
                } else {
                    perhaps(&mut random, lease.release()).await;
                }
            }
        }
    });
    let began = Instant::now();
    wait_until("all leases have ended", PATIENCE, || {
        runtime.block_on(left(&redis, "k", &limits)) == LEASES
    });
    println!("all leases had ended after {:?}", began.elapsed());
    assert_all_expire(&server);
}

/// Bookings of cancelled calls are given back, or pass: the bucket is full again as soon as it can
/// be.
#[test]
fn cancelled_bookings_do_not_stay() {
    const BURST: u64 = 5;
    const PER_SECOND: u64 = 200;
    let server = Server::start(Flavor::Redis8);
    let runtime = runtime();
    let redis = build(&runtime, store(&server));
    let limits = limits(&format!("{PER_SECOND}/s burst {BURST}"));
    let limiter = Limiter::builder(limits.clone()).redis(redis.clone()).build();
    let passed = Arc::new(AtomicU64::new(0));
    let began = Instant::now();
    callers(&runtime, |mut random| {
        let (limiter, passed) = (limiter.clone(), Arc::clone(&passed));
        async move {
            for _ in 0..CALLS / 8 {
                let wait = Duration::from_millis(random.below(200));
                let pass = perhaps(&mut random, limiter.acquire("k", wait).into_future()).await;
                passed.fetch_add(u64::from(matches!(pass, Some(Ok(_)))), Ordering::Relaxed);
            }
        }
    });
    let micros = u64::try_from(began.elapsed().as_micros()).unwrap();
    let (passed, most) =
        (passed.load(Ordering::Relaxed), BURST + 1 + micros * PER_SECOND / 1_000_000);
    assert!(passed <= most, "{passed} passed in {micros} us: expected at most {most}");
    assert!(passed > 0);
    // The latest booking was at most 200 ms ahead.
    wait_until("the bucket is full", PATIENCE, || {
        runtime.block_on(left(&redis, "k", &limits)) == BURST
    });
    assert_all_expire(&server);
}

/// A cancelled check over several slots runs to its end: it keeps its charges in all slots or gives
/// them back in all.
#[test]
fn a_cancelled_check_over_several_slots_runs_to_its_end() {
    const USERS: u64 = 6;
    let cluster = super::cluster::shared(Flavor::Redis7);
    let runtime = runtime();
    let redis = build(&runtime, at(&cluster.url()).namespace("cancel"));
    let (per_user, for_all): (Limits, Limits) =
        (limits("40/1000d window"), limits("200/1000d window"));
    let admitted = Arc::new(AtomicU64::new(0));
    callers(&runtime, |mut random| {
        let (limiter, admitted) = (
            Limiter::builder(per_user.clone()).redis(redis.clone()).build(),
            Arc::clone(&admitted),
        );
        let (per_user, for_all) = (per_user.clone(), for_all.clone());
        async move {
            for _ in 0..CALLS / 10 {
                let user = format!("user:{}", random.below(USERS));
                let check = Check::new().charge(&user, &per_user, 1).charge("for_all", &for_all, 1);
                if let Some(decision) = perhaps(&mut random, limiter.decide(check)).await {
                    admitted.fetch_add(u64::from(decision.unwrap().allowed()), Ordering::Relaxed);
                }
            }
        }
    });
    let used = || {
        runtime.block_on(async {
            let mut users = 0;
            for user in 0..USERS {
                users += 40 - left(&redis, &format!("user:{user}"), &per_user).await;
            }
            (users, 200 - left(&redis, "for_all", &for_all).await)
        })
    };
    // Cancelled checks may still be running.
    wait_until("both sides agree", PATIENCE, || used().0 == used().1);
    assert!(admitted.load(Ordering::Relaxed) <= used().1);
    assert_eq!(cluster.keys_without_ttl("tg1:"), Vec::<String>::new());
}
