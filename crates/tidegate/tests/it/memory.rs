//! The memory store's own promises: the fast paths say the same as the general one, and what is
//! idle is forgotten.

use std::time::Duration;

use tidegate::memory::Overflow;
use tidegate::{
    Check, Id, Limit, ManualClock, Memory, Op, Period, Scope, Subject, Timestamp, Verdict,
};

use crate::conformance::Random;

fn memory() -> (Memory, ManualClock) {
    let clock = ManualClock::new();
    clock.set(Timestamp::from_secs(1_700_000_000));
    (Memory::builder().clock(clock.clone()).build(), clock)
}

#[test]
fn every_check_decides_like_a_check_of_one_charge() {
    let limits: Vec<Limit> = [
        "3/s",
        "5/s burst 2",
        "3/s window",
        "4/s sliding",
        "2/s log",
        "2/s count rejected",
        "3/s window count rejected",
    ]
    .iter()
    .map(|text| text.parse().unwrap())
    .collect();
    let mut random = Random(7);
    let (clock_a, clock_b, clock_c, clock_d) =
        (ManualClock::new(), ManualClock::new(), ManualClock::new(), ManualClock::new());
    let [a, b, c, d] = [&clock_a, &clock_b, &clock_c, &clock_d]
        .map(|clock| Memory::builder().clock(clock.clone()).build());
    for _ in 0..30_000 {
        let step = Duration::from_micros(random.below(3) * random.below(400_000));
        for clock in [&clock_a, &clock_b, &clock_c, &clock_d] {
            clock.advance(step);
        }
        let limit = random.pick(&limits);
        let asks: Vec<(String, u64)> = (0..random.below(40))
            .map(|_| (format!("k{}", random.below(30)), random.below(4)))
            .collect();
        let general: Vec<Verdict> = asks
            .iter()
            .map(|(key, cost)| {
                *a.decide(&Check::of(Op::Check).charge(key, [limit], *cost)).unwrap().binding()
            })
            .collect();
        let one_by_one: Vec<Verdict> =
            asks.iter().map(|(key, cost)| b.check(key, limit, *cost)).collect();
        let allowed: Vec<bool> =
            asks.iter().map(|(key, cost)| d.allows(key, limit, *cost)).collect();
        assert_eq!(one_by_one, general);
        let mut batch = Vec::new();
        c.prepare(&Scope::AdHoc, limit)
            .check_each(&asks, |_, verdict: Verdict| batch.push(verdict));
        assert_eq!(batch, general);
        assert_eq!(allowed, general.iter().map(|verdict| verdict.allowed).collect::<Vec<_>>());
    }
}

#[test]
fn a_prepared_store_decides_like_a_check_of_one_charge() {
    let limits: Vec<Limit> = ["3/s", "5/s burst 2", "3/s window", "2/s log", "2/s count rejected"]
        .iter()
        .map(|text| text.parse().unwrap())
        .collect();
    let long = "n".repeat(1000);
    let scopes = [Scope::AdHoc, Scope::Rule("cl:throttle".into()), Scope::Rule(long.into())];
    let mut random = Random(11);
    let ((one, clock_one), (other, clock_other)) = (memory(), memory());
    for _ in 0..10_000 {
        let step = Duration::from_micros(random.below(3) * random.below(400_000));
        for clock in [&clock_one, &clock_other] {
            clock.advance(step);
        }
        let (limit, scope, cost) = (random.pick(&limits), random.pick(&scopes), random.below(4));
        let keys: Vec<String> = (0..random.below(40))
            .map(|_| "k".repeat(1 + 3 * usize::try_from(random.below(12)).unwrap()))
            .collect();
        let each =
            keys.iter().map(|key| Subject { scope: scope.clone(), key: key.as_bytes().into() });
        let general: Vec<Verdict> = each
            .map(|subject| {
                *one.decide(&Check::new().charge_subject(subject, [limit], cost)).unwrap().binding()
            })
            .collect();
        let (mut verdicts, mut decided_keys) = (Vec::new(), Vec::new());
        let batch: Vec<_> = keys.iter().map(|key| (key.as_bytes(), cost)).collect();
        let prepared = other.prepare(scope, limit);
        prepared.check_each(&batch, |key, verdict: Verdict| {
            decided_keys.push(*key);
            verdicts.push(verdict);
        });
        let keys: Vec<&[u8]> = keys.iter().map(|key| key.as_bytes()).collect();
        assert_eq!((verdicts, decided_keys), (general, keys));
    }
}

#[test]
fn peeks_and_denials_create_no_key() {
    let (memory, _) = memory();
    let limit: Limit = "1/s".parse().unwrap();
    assert!(memory.check("k", &limit, 0).allowed);
    assert!(!memory.check("k", &limit, 2).allowed);
    for op in [Op::Peek, Op::Refund, Op::Reset, Op::Release] {
        let _ = memory.decide(&Check::of(op).charge("k", [&limit], 1));
    }
    assert_eq!(memory.len(), 0);
}

#[test]
fn an_idle_key_is_removed_when_it_is_used() {
    let (memory, clock) = memory();
    for text in
        ["10/s", "10/s window", "10/s log", "10/s sliding", "10/s estimate", "5 concurrent ttl 1s"]
    {
        let limit: Limit = text.parse().unwrap();
        let _ = memory.decide(&Check::new().charge("k", [&limit], 1));
        assert_eq!(memory.len(), 1, "{text}");
        clock.advance(Duration::from_secs(3));
        let _ = memory.decide(&Check::of(Op::Peek).charge("k", [&limit], 1));
        assert_eq!(memory.len(), 0, "{text}");
    }
}

#[test]
fn short_lived_keys_take_the_memory_of_those_in_use_only() {
    let (memory, clock) = memory();
    let limit: Limit = "10/s".parse().unwrap(); // one hit is forgotten after 100 ms
    for key in 0..1_000_000 {
        if key % 10 == 0 {
            // 100 000 keys a second: 10 000 are in use at a time.
            clock.advance(Duration::from_micros(100));
        }
        assert!(memory.allows(&format!("key:{key}"), &limit, 1));
    }
    assert!(memory.len() < 40_000, "{} keys are kept", memory.len());
    assert!(memory.allocated_bytes() < 64 * 60_000, "{} bytes", memory.allocated_bytes());
    clock.advance(Duration::from_secs(1));
    memory.reclaim();
    assert_eq!(memory.len(), 0);
    assert!(memory.allocated_bytes() < 512 * 1024, "{} bytes", memory.allocated_bytes());
}

#[test]
fn a_live_key_takes_at_most_64_bytes() {
    let (memory, _) = memory();
    let limit: Limit = "600/h".parse().unwrap();
    for keys in [100_000, 250_000, 400_000, 1_000_000] {
        for key in memory.len()..keys {
            assert!(memory.allows(&format!("user:{key}"), &limit, 1));
        }
        assert_eq!(memory.len(), keys);
        let bytes = memory.allocated_bytes() / keys;
        assert!(bytes <= 64, "{bytes} bytes per key at {keys} keys");
    }
}

#[test]
fn more_limits_than_can_be_numbered_are_still_kept_apart() {
    let (memory, _) = memory();
    let limit = |amount| Limit::bucket(amount, tidegate::Period::HOUR).build().unwrap();
    let keys = 70_000u64;
    for key in 0..keys {
        let verdict = memory.check(&format!("k{key}"), &limit(key + 2), 1);
        assert_eq!(verdict.remaining, key + 1);
    }
    for key in 0..keys {
        let verdict = memory.check(&format!("k{key}"), &limit(key + 2), 1);
        assert_eq!((verdict.allowed, verdict.remaining), (true, key));
    }
}

/// However many keys, hits and leases there are, and whatever becomes of what finds no room.
#[test]
fn bytes_are_bounded_for_all_checks() {
    const BUDGET: usize = 4 << 20;
    let limits = [
        "100000/d log",
        "5/s log",
        "1000/h sliding step 4s",
        "90000 concurrent ttl 1h",
        "20/m estimate",
        "30/m window from first hit",
        "10/h",
        "9/m window",
    ];
    let limits: Vec<Limit> =
        limits.map(|text| text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))).into();
    for overflow in [Overflow::SharedBucket, Overflow::DenyNew, Overflow::AllowNew] {
        let clock = ManualClock::new();
        let memory =
            Memory::builder().clock(clock.clone()).max_bytes(BUDGET).overflow(overflow).build();
        let mut random = 7_u64;
        let mut next = |below: u64| {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) % below
        };
        let mut most = 0;
        for step in 0..300_000_u64 {
            clock.advance(Duration::from_micros(next(3) * 500));
            // Few keys get long lists, many get short ones.
            let key = if next(2) == 0 {
                format!("few:{}", next(10))
            } else {
                format!("many:{}", next(1_000_000))
            };
            let limit = &limits[usize::try_from(next(limits.len() as u64)).unwrap()];
            let check = Check::new().charge(&key, [limit], 1);
            let check = if next(3) == 0 { check.with_id(Id(step + 1)) } else { check };
            let _ = memory.decide(&check);
            most = most.max(memory.allocated_bytes());
        }
        assert!(most <= BUDGET + BUDGET / 4, "{overflow:?}: {most} bytes, of {BUDGET}");
        assert!(
            most >= BUDGET * 3 / 4,
            "{overflow:?}: {most} bytes only, of {BUDGET}: that was no test"
        );
        clock.advance(Duration::from_secs(3 * 24 * 60 * 60));
        memory.reclaim();
        assert_eq!(memory.len(), 0);
        assert!(
            memory.allocated_bytes() < BUDGET / 4,
            "{overflow:?}: {} bytes at the end",
            memory.allocated_bytes()
        );
    }
}

/// Keys from before the bound was reached are decided as before if their state does not grow. A
/// charge that would grow it is denied, and the key is not forgotten.
#[test]
fn known_keys_stay_exact_at_the_bound_on_bytes() {
    let clock = ManualClock::new();
    let memory = Memory::builder().clock(clock.clone()).max_bytes(1 << 20).build();
    let (bucket, estimate): (Limit, Limit) =
        ("100/h".parse().unwrap(), "100/h estimate".parse().unwrap());
    let log: Limit = "3/h log".parse().unwrap();
    let allowed = |key: &str, limit: &Limit| {
        memory.decide(&Check::new().charge(key, [limit], 1)).unwrap().allowed()
    };
    for limit in [&bucket, &estimate, &log] {
        assert!(allowed("victim", limit));
    }
    let flood: Limit = "1000/m log".parse().unwrap();
    let mut rounds = 0;
    while (0..2000).filter(|key| allowed(&format!("flood:{key}"), &flood)).count() > 0 {
        clock.advance(Duration::from_micros(1));
        rounds += 1;
        assert!(rounds < 1000, "it never ends");
    }
    for limit in [&bucket, &estimate] {
        for _ in 1..100 {
            assert!(allowed("victim", limit), "{limit}");
        }
        assert!(!allowed("victim", limit), "{limit}");
    }
    assert!(!allowed("victim", &log), "there is no room for another hit");
    assert_eq!(
        memory
            .decide(&Check::of(Op::Peek).charge("victim", [&log], 1))
            .unwrap()
            .binding()
            .remaining,
        2
    );
    clock.advance(Duration::from_secs(60));
    // The flood is idle now and makes room.
    for _ in 1..3 {
        assert!(allowed("victim", &log));
    }
    assert!(!allowed("victim", &log), "three an hour, and the first is not forgotten");
}

/// Whether new keys under a limit are kept in a slot each, by number of the limit. A key takes 40
/// bytes of a snapshot then, and 80 otherwise.
fn has_number(memory: &Memory, limit: &Limit, prefix: &str) -> bool {
    const KEYS: u64 = 1_000;
    let saved = || memory.save(&mut std::io::sink()).unwrap().bytes;
    let before = saved();
    for key in 0..KEYS {
        assert!(memory.check(&format!("{prefix}:{key}"), limit, 1).allowed);
    }
    (saved() - before) / KEYS < 60
}

#[test]
fn ad_hoc_limits_do_not_take_reserved_numbers() {
    let clock = ManualClock::new();
    clock.set(Timestamp::from_secs(1_700_000_000));
    let memory = Memory::builder().clock(clock.clone()).max_keys(1 << 20).build();
    let [configured, early, late]: [Limit; 3] =
        ["9/h", "8/h window", "7/h"].map(|text| text.parse().unwrap());
    let reserved = memory.reserve_limits([&configured]);
    assert!(has_number(&memory, &early, "early"));
    let before = memory.allocated_bytes();
    // Many limits, each on its own key.
    let bring = |amounts: std::ops::Range<u64>| {
        for amount in amounts {
            let limit = Limit::bucket(amount, Period::MINUTE).build().unwrap();
            assert!(memory.check(&format!("own:{amount}"), &limit, 1).allowed);
        }
    };
    bring(10_000..50_000);
    assert!(
        memory.allocated_bytes() - before < 40_000 * 400,
        "their table is counted, and bounded"
    );
    // They have used all numbers for ad hoc limits, but not the reserved one, and an earlier limit
    // still has its number.
    assert!(!has_number(&memory, &late, "late"));
    assert!(has_number(&memory, &configured, "configured"));
    assert!(has_number(&memory, &early, "earlier"));
    // Once their keys are idle, the next limits have their numbers.
    clock.advance(Duration::from_secs(7200));
    bring(60_000..65_000);
    let next: Limit = "6/h".parse().unwrap();
    assert!(has_number(&memory, &next, "next"));
    drop(reserved);
}

#[test]
fn reused_numbers_keep_states_apart() {
    let clock = ManualClock::new();
    clock.set(Timestamp::from_secs(1_700_000_000));
    let builder = Memory::builder().clock(clock.clone()).max_keys(1 << 16).max_bytes(8 << 20);
    let memory = builder.clone().build();
    let lasting: Limit = "5/d".parse().unwrap();
    let prepared = memory.prepare(&Scope::AdHoc, &"6/d".parse().unwrap());
    assert_eq!(memory.check("lasting", &lasting, 2).remaining, 3);
    assert_eq!(prepared.check("held", 2).remaining, 4);
    let limit = |amount: u64| Limit::window(amount, Period::SECOND).build().unwrap();
    // Each second as many limits as have numbers, and some more; those of the second before are
    // idle then.
    for second in 0..5_u64 {
        for number in 0..8_000 {
            let amount = 100 + second * 8_000 + number;
            let key = format!("{number}");
            assert_eq!(
                memory.check(&key, &limit(amount), 1).remaining,
                amount - 1,
                "{second} {number}"
            );
            assert_eq!(
                memory.check(&key, &limit(amount), 1).remaining,
                amount - 2,
                "{second} {number}"
            );
        }
        assert_eq!(memory.check("lasting", &lasting, 0).remaining, 3);
        assert_eq!(prepared.check("held", 0).remaining, 4);
        let mut file = Vec::new();
        let saved = memory.save(&mut file).unwrap();
        let (again, loaded) = builder.clone().load(&mut &file[..]).unwrap();
        assert!(
            loaded.is_complete() && loaded.keys + loaded.idle == saved.keys,
            "{saved:?}, {loaded:?}"
        );
        assert_eq!(again.check("lasting", &lasting, 0).remaining, 3);
        for number in (0..8_000).step_by(97) {
            let amount = 100 + second * 8_000 + number;
            assert_eq!(again.check(&format!("{number}"), &limit(amount), 0).remaining, amount - 2);
        }
        clock.advance(Duration::from_secs(2));
    }
}
