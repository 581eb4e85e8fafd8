use std::sync::atomic::AtomicBool;

use super::*;

fn interned(max_bytes: usize) -> Interned {
    Interned::new(max_bytes, Arc::default())
}

fn window(amount: usize) -> Limit {
    Limit::window(amount as u64, Period::SECOND).build().unwrap()
}

/// A sweep over one shard whose slots have these numbers.
fn sweep(interned: &Interned, seconds: u64, in_use: &[u32]) {
    for _ in 0..2 {
        interned.sweep(1, Timestamp::from_secs(seconds), |_, show| {
            in_use.iter().for_each(|number| show(*number))
        });
    }
}

#[test]
fn numbers_are_stable_and_bounded() {
    let interned = interned(usize::MAX);
    let most = MAX_INTERNED / AD_HOC_PART;
    for amount in 1..=most {
        let number = interned.number(&window(amount)).unwrap();
        assert_eq!(interned.number(&window(amount)), Some(number));
        assert!(interned.is(number, &window(amount)) && !interned.is(number, &window(amount + 1)));
        assert_eq!(interned.limit(number), Some(window(amount)));
    }
    assert_eq!(interned.number(&window(most + 1)), None);
    assert_eq!(interned.limit(0), None);
    // Those that are reserved are not counted among them, up to all that there are.
    let reserved: Vec<_> =
        (most + 1..=MAX_INTERNED).map(|amount| interned.hold(&window(amount), true)).collect();
    assert!(reserved.iter().all(Option::is_some));
    assert_eq!(interned.hold(&window(MAX_INTERNED + 1), true), None);
    let bytes = interned.bytes.load(Ordering::Relaxed);
    assert!(bytes < MAX_INTERNED * 110 && bytes > MAX_INTERNED * 72, "{bytes}");
}

#[test]
fn every_numbered_limit_is_read_from_its_number() {
    let interned = interned(usize::MAX);
    for text in [
        "10/s",
        "7/min",
        "10/s burst 3",
        "10/s burst 3 debt 5",
        "1000000/d burst 5000000",
        "10/s count rejected",
        "10/min window",
        "10/min window debt 4",
        "10/min window count rejected",
        "1/1000h",
    ] {
        let limit: Limit = text.parse().unwrap();
        let number = interned.number(&limit).unwrap_or_else(|| panic!("{text} has no number"));
        assert_eq!(interned.limit(number), Some(limit), "{text}");
    }
    for text in
        ["10/min window from first hit", "10/min sliding", "10/min log", "5 concurrent ttl 1m"]
    {
        assert_eq!(interned.number(&text.parse().unwrap()), None, "{text}");
    }
}

#[test]
fn a_small_store_has_few_numbers_for_callers() {
    let interned = interned(1 << 20);
    let found = (1..10_000).filter(|amount| interned.number(&window(*amount)).is_some()).count();
    assert!((200..1000).contains(&found), "{found}");
    assert!(interned.bytes.load(Ordering::Relaxed) <= (1 << 20) / BYTES_PART * 3 / 2);
}

#[test]
fn numbers_that_no_key_has_are_given_again() {
    let interned = interned(1 << 20);
    let most = interned.max_ad_hoc;
    let numbers: Vec<u32> =
        (1..=most).map(|amount| interned.number(&window(amount)).unwrap()).collect();
    assert!(!interned.wants_sweep());
    for _ in 0..REFUSALS_PER_STEP {
        assert_eq!(interned.number(&window(most + 1)), None);
    }
    assert!(interned.wants_sweep());
    let held = interned.hold(&window(5), false).unwrap();
    sweep(&interned, 10, &numbers[..2]);
    assert_eq!(interned.len(), 3, "two that are in slots, and one that is held");
    assert!(
        interned.is(numbers[0], &window(1))
            && interned.is(numbers[1], &window(2))
            && interned.is(held, &window(5))
    );
    assert!(!interned.is(numbers[2], &window(3)));
    let bytes = interned.bytes.load(Ordering::Relaxed);
    for amount in most + 1..=2 * most - 3 {
        assert!(interned.number(&window(amount)).is_some(), "{amount}");
    }
    assert_eq!(interned.number(&window(2 * most)), None);
    assert!(interned.bytes.load(Ordering::Relaxed) <= bytes + bytes / 2, "they are the same ones");
}

#[test]
fn a_number_that_comes_into_a_slot_during_a_sweep_stays() {
    let interned = interned(usize::MAX);
    let [one, two, three] = [1, 2, 3].map(|amount| interned.number(&window(amount)).unwrap());
    let now = Timestamp::from_secs(1);
    interned.sweep(1, now, |_, _| {});
    assert!(
        ![one, two, three].iter().any(|number| interned.limit(*number).is_none()),
        "slots can still be read"
    );
    assert!(!interned.is(one, &window(1)), "but nothing is written with them");
    // The first is used again, the second was about to be written, the third is unused.
    assert_eq!(interned.number(&window(1)), Some(one));
    interned.sweep(1, now, |_, show| show(two));
    assert!(
        interned.is(one, &window(1))
            && interned.is(two, &window(2))
            && !interned.is(three, &window(3))
    );
    assert_eq!((interned.len(), interned.number(&window(4))), (2, Some(three)));
}

#[test]
fn a_sweep_is_not_begun_again_at_once() {
    let interned = interned(usize::MAX);
    sweep(&interned, 10, &[]);
    let visited = AtomicBool::new(false);
    let visit = |now: u64| {
        interned.sweep(1, Timestamp::from_secs(now), |_, _| visited.store(true, Ordering::Relaxed));
        visited.swap(false, Ordering::Relaxed)
    };
    assert!(!visit(10) && visit(11));
}
