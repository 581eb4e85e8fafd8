//! Real threads on real locks.

use std::sync::atomic::{AtomicU64, Ordering};

use tidegate::{Check, Limit, ManualClock, Memory, Scope};

const THREADS: usize = 4;

#[test]
fn a_limit_of_one_raced_on_over_a_million_keys_admits_exactly_one_each() {
    let keys = 1_000_000;
    let memory = Memory::builder().clock(ManualClock::new()).build();
    let limits: [Limit; 2] = ["1/day".parse().unwrap(), "1/day window".parse().unwrap()];
    for limit in limits {
        let admitted = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let (memory, admitted) = (&memory, &admitted);
                scope.spawn(move || {
                    let mut own = 0;
                    let mut name = String::new();
                    for key in 0..keys {
                        use std::fmt::Write;
                        name.clear();
                        // Two threads go up and two go down, so that they meet.
                        let key = if thread % 2 == 0 { key } else { keys - 1 - key };
                        write!(name, "k{key}").unwrap();
                        own += u64::from(memory.allows(&name, &limit, 1));
                    }
                    admitted.fetch_add(own, Ordering::Relaxed);
                });
            }
        });
        assert_eq!(admitted.into_inner(), keys, "{limit}");
    }
}

#[test]
fn checks_over_the_same_keys_in_any_order_do_not_deadlock() {
    let memory = Memory::builder().clock(ManualClock::new()).build();
    let limit: Limit = "1000/day".parse().unwrap();
    let keys: Vec<String> = (0..16).map(|key| format!("k{key}")).collect();
    let admitted = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (memory, limit, keys, admitted) = (&memory, &limit, &keys, &admitted);
            scope.spawn(move || {
                for round in 0..2_000 {
                    let mut order: Vec<&String> = keys.iter().collect();
                    order.rotate_left((round + thread * 5) % keys.len());
                    if thread % 2 == 1 {
                        order.reverse();
                    }
                    let check = order
                        .iter()
                        .fold(Check::new(), |check, key| check.charge(*key, [limit], 1));
                    admitted.fetch_add(
                        u64::from(memory.decide(&check).unwrap().allowed()),
                        Ordering::Relaxed,
                    );
                }
            });
        }
    });
    assert_eq!(admitted.into_inner(), 1000);
}

#[test]
fn keys_added_and_removed_by_many_threads_stay_exact() {
    // Every thread checks every key, while the table grows, is swept and shrinks.
    let clock = ManualClock::new();
    let memory = Memory::builder().clock(clock.clone()).build();
    let limit: Limit = "3/s".parse().unwrap();
    for round in 0..20 {
        let admitted = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for _ in 0..THREADS {
                let (prepared, admitted) = (memory.prepare(&Scope::AdHoc, &limit), &admitted);
                scope.spawn(move || {
                    for key in 0..5_000 {
                        let batch = [(format!("{round}:{key}"), 1), (format!("{round}:{key}"), 1)];
                        prepared.check_each(&batch, |_, is_allowed: bool| {
                            admitted.fetch_add(u64::from(is_allowed), Ordering::Relaxed);
                        });
                    }
                });
            }
        });
        assert_eq!(admitted.into_inner(), 3 * 5_000);
        clock.advance(std::time::Duration::from_secs(1));
    }
}

#[test]
fn an_exhausted_key_stays_denied_while_others_come_and_go() {
    // Denials read without a lock. The table is rebuilt, swept and given back all the while.
    let clock = ManualClock::new();
    let memory = Memory::builder().clock(clock.clone()).build();
    let (long, short): (Limit, Limit) = ("1/day".parse().unwrap(), "1000/s".parse().unwrap());
    let used_up: Vec<String> = (0..500).map(|key| format!("used up {key}")).collect();
    assert!(used_up.iter().all(|key| memory.allows(key, &long, 1)));
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                for _ in 0..2_000 {
                    assert!(used_up.iter().all(|key| !memory.allows(key, &long, 1)));
                }
            });
        }
        for round in 0..20 {
            for key in 0..20_000 {
                assert!(memory.allows(&format!("{round}:{key}"), &short, 1));
            }
            clock.advance(std::time::Duration::from_millis(2));
            memory.reclaim();
            assert_eq!(memory.len(), used_up.len());
        }
    });
}
