//! Every operation through the limiter.

use std::future::Future;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tidegate::store::Deciding;
use tidegate::{Check, Id, Limiter, Limits, ManualClock, Memory, Op, Retry, Store, StoreError};

pub(crate) fn limiter(limits: &str) -> (Limiter, ManualClock) {
    let clock = ManualClock::new();
    let memory = Memory::builder().clock(clock.clone()).build();
    (Limiter::builder(limits.parse().unwrap()).memory(memory).build(), clock)
}

#[tokio::test]
async fn several_limits_are_one_decision() {
    let (limiter, clock) = limiter("2/s; 3/min window");
    for remaining in [1, 0] {
        let decision = limiter.check("k").await.unwrap();
        assert!(decision.allowed());
        assert_eq!(decision.verdicts()[0].remaining, remaining);
    }
    let denied = limiter.check("k").await.unwrap();
    assert!(!denied.allowed());
    assert_eq!((denied.binding_index(), denied.retry()), (0, Retry::After(500_000)));
    assert_eq!(denied.verdicts()[1].remaining, 1, "a denial leaves nothing charged");
    clock.advance(Duration::from_secs(1));
    assert!(limiter.check("k").await.unwrap().allowed());
    let denied = limiter.check("k").await.unwrap();
    assert_eq!((denied.binding_index(), denied.retry()), (1, Retry::After(59_000_000)));
}

#[tokio::test]
async fn weights_peeks_takes_debits_refunds_and_resets() {
    let (limiter, _) = limiter("10/min");
    assert_eq!(limiter.check("k").cost(4).await.unwrap().remaining(), 6);
    assert!(!limiter.peek("k").cost(7).await.unwrap().allowed());
    assert_eq!(limiter.peek("k").await.unwrap().remaining(), 6);
    assert_eq!(limiter.take_up_to("k", 9).await.unwrap().granted(), 6);
    assert!(!limiter.take_up_to("k", 9).await.unwrap().allowed());
    assert!(limiter.debit("k", 10).await.unwrap().allowed(), "one capacity below empty");
    assert!(!limiter.debit("k", 1).await.unwrap().allowed());
    assert_eq!(limiter.refund("k", 15).await.unwrap().remaining(), 5);
    assert_eq!(limiter.refund("k", 99).await.unwrap().remaining(), 10);
    assert!(limiter.check("k").cost(10).await.unwrap().allowed());
    assert_eq!(limiter.reset("k").await.unwrap().remaining(), 10);
    assert_eq!(limiter.check("k").cost(11).await.unwrap().retry(), Retry::Never);
}

#[tokio::test]
async fn tiers_share_what_was_used() {
    let (free, _) = limiter("10/min");
    let pro = free.with_limits("100/min".parse().unwrap());
    assert!(free.check("k").cost(10).await.unwrap().allowed());
    assert_eq!(pro.peek("k").await.unwrap().remaining(), 90);
    assert!(pro.check("k").cost(50).await.unwrap().allowed());
    assert!(!free.check("k").await.unwrap().allowed());
}

#[tokio::test]
async fn named_limits_keep_their_usage_through_changes() {
    let clock = ManualClock::new();
    let memory = Memory::builder().clock(clock.clone()).build();
    let named = |name: &str, limits: &str| {
        Limiter::builder(limits.parse().unwrap()).memory(memory.clone()).name(name).build()
    };
    assert!(named("search", "10/min").check("k").cost(10).await.unwrap().allowed());
    assert!(!named("search", "10/min window").check("k").await.unwrap().allowed());
    assert!(!named("search", "10/min log").check("k").await.unwrap().allowed());
    assert!(named("login", "10/min").check("k").cost(10).await.unwrap().allowed());
}

#[tokio::test]
async fn a_reservation_is_settled_once_at_its_true_cost() {
    let (limiter, _) = limiter("100/min");
    let reservation = limiter.reserve("k", 40).await.unwrap();
    assert_eq!(reservation.decision().remaining(), 60);
    assert_eq!(reservation.settle(10).await.unwrap().remaining(), 90);
    let more = limiter.reserve("k", 40).await.unwrap();
    let settled = more.settle(95).await.unwrap(); // 5 more than there is: into debt
    assert!(settled.allowed());
    assert_eq!((settled.granted(), settled.remaining()), (55, 0));
    let denied = limiter.reserve("k", 1).await.unwrap();
    assert!(!denied.allowed());
    assert_eq!(
        denied.settle(50).await.unwrap().remaining(),
        0,
        "nothing was reserved, nothing is settled"
    );
}

#[tokio::test]
async fn cancelling_gives_back_units_that_have_not_regrown() {
    let (limiter, clock) = limiter("60/min");
    let reservation = limiter.reserve("k", 30).await.unwrap();
    clock.advance(Duration::from_secs(10)); // ten of them have regrown
    assert_eq!(reservation.cancel().await.unwrap().granted(), 20);
    assert_eq!(limiter.peek("k").await.unwrap().remaining(), 60);
}

#[tokio::test]
async fn leases_end_when_released_dropped_or_over() {
    let (limiter, clock) = limiter("2 concurrent ttl 30s");
    let first = limiter.lease("k").await.unwrap();
    let second = limiter.lease("k").await.unwrap();
    assert!(first.allowed() && second.allowed());
    let third = limiter.lease("k").await.unwrap();
    assert_eq!(third.decision().retry(), Retry::After(30_000_000));
    drop(third);
    assert_eq!(
        limiter.peek("k").await.unwrap().remaining(),
        0,
        "what was not granted is not released"
    );
    assert_eq!(first.release().await.unwrap().remaining(), 1);
    drop(second);
    assert_eq!(limiter.peek("k").await.unwrap().remaining(), 2);
    std::mem::forget(limiter.lease("k").await.unwrap()); // a process that died
    clock.advance(Duration::from_secs(30));
    assert_eq!(limiter.peek("k").await.unwrap().remaining(), 2);
}

#[tokio::test]
async fn a_check_under_a_concurrent_limit_is_a_lease_with_an_id() {
    let (limiter, _) = limiter("1 concurrent ttl 30s");
    let decision = limiter.check("k").await.unwrap();
    assert!(decision.allowed() && decision.id().is_some());
    assert!(!limiter.check("k").await.unwrap().allowed());
    let id = decision.id().unwrap();
    assert_eq!(limiter.refund("k", 1).id(id).await.unwrap().granted(), 1);
    assert_eq!(limiter.refund("k", 1).id(id).await.unwrap().granted(), 0);
    assert!(limiter.check("k").await.unwrap().allowed());
}

#[tokio::test]
async fn a_check_repeated_under_its_id_is_taken_once() {
    let (limiter, _) = limiter("10/min; 10/min window");
    for _ in 0..5 {
        let decision = limiter.check("k").cost(3).id(Id(77)).await.unwrap();
        assert!(decision.allowed());
        assert_eq!(decision.remaining(), 7);
    }
    assert_eq!(limiter.refund("k", 99).id(Id(77)).await.unwrap().remaining(), 10);
    assert_eq!(limiter.refund("k", 99).id(Id(77)).await.unwrap().granted(), 0);
}

#[tokio::test]
async fn one_check_over_several_keys_is_all_or_nothing() {
    let (limiter, _) = limiter("1/s");
    let (user, global): (Limits, Limits) = ("5/min".parse().unwrap(), "7/min".parse().unwrap());
    let both = |user_key: &'static str| {
        Check::new().charge(user_key, &user, 3).charge("everyone", &global, 3)
    };
    assert!(limiter.decide(both("a")).await.unwrap().allowed());
    assert!(limiter.decide(both("b")).await.unwrap().allowed());
    let denied = limiter.decide(both("c")).await.unwrap();
    assert!(!denied.allowed());
    assert_eq!(denied.binding_index(), 1);
    assert_eq!(denied.verdicts()[0].remaining, 5, "c has paid nothing");
}

#[tokio::test]
async fn a_take_under_a_concurrent_limit_is_a_lease_too() {
    let (limiter, _) = limiter("5 concurrent ttl 1m");
    let taken = limiter.take_up_to("k", 3).await.unwrap();
    let id = taken.id().expect("by which it can be released");
    let again = limiter.take_up_to("k", 3).id(id).await.unwrap();
    assert_eq!(
        (again.allowed(), again.granted(), again.remaining()),
        (true, 3, 2),
        "the answer is what it got"
    );
    assert!(limiter.refund("k", 3).id(id).await.unwrap().allowed());
    assert_eq!(limiter.peek("k").await.unwrap().remaining(), 5);
}

#[tokio::test]
async fn reserved_charges_are_settled_separately() {
    let (limiter, _) = limiter("1/s");
    let (requests, tokens): (Limits, Limits) =
        ("2/min".parse().unwrap(), "1000/min".parse().unwrap());
    let call = |estimate| {
        Check::new()
            .charge_named("requests", "k", &requests, 1)
            .charge_named("tokens", "k", &tokens, estimate)
    };
    let left = |name: &'static str, limits: &'static str| {
        let limiter = Limiter::clone(&limiter);
        async move {
            let limits: Limits = limits.parse().unwrap();
            let check = Check::of(tidegate::Op::Peek).charge_named(name, "k", &limits, 1);
            limiter.decide(check).await.unwrap().remaining()
        }
    };
    let reserved = limiter.reserve_all(call(400)).await.unwrap();
    assert!(reserved.allowed());
    let _ = reserved.settle_each(&[1, 150]).await.unwrap();
    assert_eq!((left("requests", "2/min").await, left("tokens", "1000/min").await), (1, 850));
    let denied = limiter.reserve_all(call(900)).await.unwrap();
    assert!(!denied.allowed());
    let reserved = limiter.reserve_all(call(100)).await.unwrap();
    let _ = reserved.settle_each(&[]).await.unwrap();
    assert_eq!((left("requests", "2/min").await, left("tokens", "1000/min").await), (0, 750));
    let denied = limiter.reserve_all(call(1)).await.unwrap();
    assert!(!denied.allowed(), "no request is left");
    assert_eq!(left("tokens", "1000/min").await, 750, "and no token was taken");
}

#[tokio::test]
async fn a_limiter_names_its_limits_in_headers_by_their_notation() {
    let (limiter, _) = limiter("2/s; 3/min window");
    let decision = limiter.check("k").await.unwrap();
    let headers = limiter.headers(&decision, tidegate::http::headers::HeaderFamilies::IETF);
    assert_eq!(headers[0], ("RateLimit-Policy", r#""2/s";q=2;w=1, "3/m window";q=3;w=60"#.into()));
    assert_eq!(headers[1], ("RateLimit", r#""2/s";r=1;t=1, "3/m window";r=2;t=60"#.into()));
}

/// A check charges equal limits together.
#[tokio::test]
async fn a_limit_that_is_written_twice_is_one_policy() {
    let (limiter, _) = limiter("4/s; 4/s; 3/m window");
    let decision = limiter.check("a").await.unwrap();
    let headers = limiter.headers(&decision, tidegate::http::headers::HeaderFamilies::IETF);
    assert_eq!(headers[0].1, r#""4/s";q=4;w=1, "3/m window";q=3;w=60"#);
    assert!(headers[1].1.starts_with(r#""4/s";r=2;t=1, "3/m window";r=2;"#), "{headers:?}");
}

type Asked = Arc<Mutex<Vec<(Op, Option<Id>)>>>;

/// Records its calls, and hangs on checks or fails them.
struct Unresponsive {
    asked: Asked,
    hangs: bool,
}

impl Store for Unresponsive {
    fn decide<'a>(&'a self, check: &'a Check<'a>) -> Deciding<'a> {
        self.asked.lock().unwrap().push((check.op(), check.id()));
        match (check.op(), self.hangs) {
            (Op::Check, true) => Box::pin(std::future::pending()),
            _ => Box::pin(std::future::ready(Err(StoreError::Unavailable("lost".into())))),
        }
    }
}

/// Units that were perhaps taken under an unknown id are given back, whether the caller went
/// away or the store did.
#[tokio::test]
async fn charges_without_an_answer_are_refunded() {
    for hangs in [true, false] {
        for kind in ["reserve", "lease", "check of a lease"] {
            let asked = Asked::default();
            let unresponsive = Unresponsive { asked: Arc::clone(&asked), hangs };
            let limits: Limits = "3 concurrent ttl 10s".parse().unwrap();
            let limiter = Limiter::builder(limits).store(unresponsive, ManualClock::new()).build();
            let call = async {
                match kind {
                    "reserve" => drop(limiter.reserve("k", 1).await),
                    "lease" => drop(limiter.lease("k").await),
                    _ => drop(limiter.check("k").await),
                }
            };
            // Polled once, then dropped.
            let mut call = Box::pin(call);
            std::future::poll_fn(|context| {
                let _ = call.as_mut().poll(context);
                std::task::Poll::Ready(())
            })
            .await;
            drop(call);
            while asked.lock().unwrap().len() < 2 {
                tokio::task::yield_now().await;
            }
            let asked = asked.lock().unwrap();
            assert_eq!((asked[0].0, asked[1].0), (Op::Check, Op::Refund), "{kind}");
            assert!(asked[0].1.is_some() && asked[0].1 == asked[1].1, "{kind}: {asked:?}");
        }
    }
}
