//! When every place is taken: idle keys make room first, keys in use never do, and the policy
//! decides about the rest.

use std::time::Duration;

use tidegate::memory::Overflow;
use tidegate::resilience::Policy;
use tidegate::{AcquireError, Check, Limit, Limiter, Limits, ManualClock, Memory, Op};

const KEYS: usize = 1_000;

fn full(overflow: Overflow) -> (Memory, ManualClock, Limit) {
    let clock = ManualClock::new();
    let memory = Memory::builder().clock(clock.clone()).max_keys(KEYS).overflow(overflow).build();
    let limit: Limit = "5/min".parse().unwrap();
    for key in 0..KEYS {
        assert!(memory.check(&format!("old:{key}"), &limit, 2).allowed);
    }
    assert_eq!(memory.len(), KEYS);
    (memory, clock, limit)
}

fn old_keys_are_exact(memory: &Memory, limit: &Limit) {
    for key in 0..KEYS {
        let verdict =
            memory.decide(&Check::of(Op::Peek).charge(&format!("old:{key}"), [limit], 1)).unwrap();
        assert_eq!(verdict.remaining(), 3, "old:{key}");
    }
    assert_eq!(memory.len(), KEYS);
}

#[test]
fn overflowing_keys_share_one_budget_by_default() {
    let (memory, _, limit) = full(Overflow::default());
    let allowed = (0..10_000).filter(|key| memory.allows(&format!("new:{key}"), &limit, 1)).count();
    assert_eq!(allowed, 5);
    old_keys_are_exact(&memory, &limit);
}

#[test]
fn overflowing_keys_can_be_denied() {
    let (memory, _, limit) = full(Overflow::DenyNew);
    assert!((0..10_000).all(|key| !memory.allows(&format!("new:{key}"), &limit, 1)));
    assert!(memory.check("new", &limit, 0).allowed);
    old_keys_are_exact(&memory, &limit);
}

#[test]
fn overflowing_keys_can_be_allowed() {
    let (memory, _, limit) = full(Overflow::AllowNew);
    assert!((0..10_000).all(|key| memory.allows(&format!("new:{key}"), &limit, 1)));
    old_keys_are_exact(&memory, &limit);
}

/// Whatever the store says.
#[test]
fn a_charge_may_have_an_overflow_of_its_own() {
    for store in [Overflow::SharedBucket, Overflow::DenyNew, Overflow::AllowNew] {
        let (memory, _, limit) = full(store);
        for own in [Overflow::SharedBucket, Overflow::DenyNew, Overflow::AllowNew] {
            let policy = Policy { overflow: Some(own), ..Policy::default() };
            let keys: Vec<String> = (0..100).map(|key| format!("new:{key}")).collect();
            let checks =
                keys.iter().map(|key| Check::new().policy(policy).charge(key, [&limit], 1));
            let allowed = checks.filter(|check| memory.decide(check).unwrap().allowed()).count();
            let expected = match own {
                Overflow::SharedBucket => 5,
                Overflow::DenyNew => 0,
                Overflow::AllowNew => 100,
            };
            assert_eq!(allowed, expected, "{own:?} in a store with {store:?}");
        }
        old_keys_are_exact(&memory, &limit);
    }
}

#[test]
fn a_single_idle_key_makes_room_for_a_new_one() {
    let (memory, clock, limit) = full(Overflow::DenyNew);
    // All but one are used again a little later; that one is idle first.
    clock.advance(Duration::from_secs(12));
    for key in (0..KEYS).filter(|key| *key != 321) {
        assert!(memory.check(&format!("old:{key}"), &limit, 1).allowed);
    }
    clock.advance(Duration::from_secs(12));
    assert!(memory.allows("new", &limit, 1));
    assert!(!memory.allows("newer", &limit, 1));
    assert_eq!(memory.len(), KEYS);
    let kept = memory.decide(&Check::of(Op::Peek).charge("new", [&limit], 1)).unwrap();
    assert_eq!(kept.remaining(), 4);
}

#[test]
fn the_bound_holds_for_checks_over_many_keys() {
    let clock = ManualClock::new();
    let memory = Memory::builder().clock(clock).max_keys(7).overflow(Overflow::AllowNew).build();
    let limit: Limit = "5/min".parse().unwrap();
    for round in 0..50 {
        let keys: Vec<String> = (0..10).map(|key| format!("{round}:{key}")).collect();
        let check = keys.iter().fold(Check::new(), |check, key| check.charge(key, [&limit], 1));
        assert!(memory.decide(&check).unwrap().allowed());
        assert!(memory.len() <= 7);
    }
    assert_eq!(memory.len(), 7);
}

#[test]
fn overflowing_keys_of_one_check_are_charged_separately() {
    let (memory, _, limit) = full(Overflow::SharedBucket);
    let both = |a: &str, b: &str| {
        let (a, b) = (a.to_owned(), b.to_owned());
        memory
            .decide(&Check::new().charge(&a, [&limit], 2).charge(&b, [&limit], 2))
            .unwrap()
            .allowed()
    };
    assert!(both("x1", "y1"));
    assert!(both("x2", "y2"));
    assert!(!both("x3", "y3"));
}

#[test]
fn overflowing_keys_share_every_limit_of_a_check() {
    let (memory, _, _) = full(Overflow::SharedBucket);
    let limits: Limits = "5/min; 100/h; 1000/d".parse().unwrap();
    let ask = |key: &str| memory.decide(&Check::new().charge(key, &limits, 5)).unwrap().allowed();
    assert!(ask("new:1"));
    assert!(!ask("new:2"), "the first limit has been used up by the first key");
}

#[tokio::test]
async fn waiting_calls_of_overflowing_keys_are_denied() {
    let (memory, _, limit) = full(Overflow::DenyNew);
    let limiter = Limiter::builder(limit.into()).memory(memory).build();
    for key in 0..100 {
        let key = format!("new:{key}");
        let waiting = tokio::time::timeout(
            Duration::from_millis(10),
            limiter.acquire(&key, Duration::from_secs(600)),
        );
        let Ok(denied) = waiting.await else { panic!("it waits for a place that is not kept") };
        assert!(matches!(denied, Err(AcquireError::TooLong(_))), "{denied:?}");
    }
}

#[test]
fn resetting_an_overflowing_key_does_not_reset_the_others() {
    let (memory, _, limit) = full(Overflow::SharedBucket);
    assert!(memory.allows("new:1", &limit, 5));
    let reset = memory.decide(&Check::of(Op::Reset).charge("new:2", [&limit], 0)).unwrap();
    assert!(reset.allowed());
    let both = Check::of(Op::Reset).charge("new:3", [&limit], 0).charge("new:4", [&limit], 0);
    assert!(memory.decide(&both).unwrap().allowed());
    assert!(!memory.allows("new:5", &limit, 1));
}
