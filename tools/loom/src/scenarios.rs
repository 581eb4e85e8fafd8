//! At most three threads, a few steps each: what the memory store and its clock do, without what
//! they compute. No thread waits here: one that comes at the wrong moment gives up, so that there
//! are finitely many ways to meet. To wait is to come again.

use std::sync::Arc;

use loom::cell::UnsafeCell;
use loom::thread;

use super::version;
use crate::sync::{AtomicPtr, AtomicU64, AtomicUsize, Ordering};

/// A scenario, and how often a thread may be interrupted in it; as often as there are ways, unless
/// told.
pub(crate) type Scenario = (fn(), Option<usize>);

/// Those with the fewest ways first.
pub(crate) const ALL: &[Scenario] = &[
    (what_is_shown_is_whole, None),
    (what_is_read_during_a_write_does_not_count, None),
    (who_holds_the_lock_is_alone, None),
    (no_update_is_lost_between_two, None),
    (a_limit_of_one_admits_one_of_two, None),
    (no_update_is_lost_between_three, Some(2)),
    (a_limit_of_one_admits_one_of_three, Some(2)),
];

/// Two words that are always equal, for a reader that gets both in one piece.
struct Words {
    version: AtomicU64,
    low: AtomicU64,
    high: AtomicU64,
}

impl Words {
    fn new() -> Arc<Self> {
        Arc::new(Words {
            version: AtomicU64::new(0),
            low: AtomicU64::new(0),
            high: AtomicU64::new(0),
        })
    }

    fn read(&self) -> (u64, u64) {
        (self.low.load(Ordering::Relaxed), self.high.load(Ordering::Relaxed))
    }

    fn write(&self, value: u64) {
        self.low.store(value, Ordering::Relaxed);
        self.high.store(value, Ordering::Relaxed);
    }

    /// Adds one under the lock, unless another thread has it.
    fn add_locked(&self) -> bool {
        let taken = version::take_now(&self.version);
        if taken {
            let (low, high) = self.read();
            assert_eq!(low, high, "who holds the lock sees what was written before");
            self.write(low + 1);
            version::give_back(&self.version);
        }
        taken
    }

    /// Reads, and takes the lock only to write, if no thread has written since.
    fn add(&self) -> bool {
        let seen = version::begin(&self.version) & !1;
        let (low, high) = self.read();
        let taken = version::take(&self.version, seen);
        if taken {
            assert_eq!(low, high, "what was decided by is whole");
            self.write(low + 1);
            version::done(&self.version, seen);
        }
        taken
    }
}

fn what_is_read_during_a_write_does_not_count() {
    let words = Words::new();
    let writer = thread::spawn({
        let words = Arc::clone(&words);
        move || {
            for value in 1..=2 {
                assert!(version::take_now(&words.version), "no other thread writes");
                words.write(value);
                version::give_back(&words.version);
            }
        }
    });
    let mut last = 0;
    for _ in 0..2 {
        let seen = version::begin(&words.version);
        let (low, high) = words.read();
        if version::is_still(&words.version, seen) {
            assert_eq!(low, high, "a reading that counts is whole");
            assert!(low >= last, "and no older than the one before");
            last = low;
        }
    }
    writer.join().expect("it does not fail");
}

fn no_update_is_lost_between_two() {
    no_update_is_lost(&[Words::add]);
    no_update_is_lost(&[Words::add_locked]);
}

fn no_update_is_lost_between_three() {
    no_update_is_lost(&[Words::add, Words::add_locked]);
}

fn no_update_is_lost(others: &[fn(&Words) -> bool]) {
    let words = Words::new();
    let spawn = |add: &fn(&Words) -> bool| {
        let (words, add) = (Arc::clone(&words), *add);
        thread::spawn(move || add(&words))
    };
    let others: Vec<_> = others.iter().map(spawn).collect();
    let mut added = u64::from(words.add());
    for other in others {
        added += u64::from(other.join().expect("it does not fail"));
    }
    assert!(added > 0);
    assert_eq!(words.read(), (added, added));
}

fn a_limit_of_one_admits_one_of_two() {
    a_limit_of_one_admits_one_of(2);
}

fn a_limit_of_one_admits_one_of_three() {
    a_limit_of_one_admits_one_of(3);
}

fn a_limit_of_one_admits_one_of(threads: usize) {
    let words = Words::new();
    // Admitted, denied, or unknown.
    let ask = |words: Arc<Words>| {
        move || {
            let seen = version::begin(&words.version);
            match words.read() {
                (0, _) if seen & 1 == 0 && version::take(&words.version, seen) => {
                    words.write(1);
                    version::done(&words.version, seen);
                    Some(true)
                }
                (1, _) if version::is_still(&words.version, seen) => Some(false),
                _ => None,
            }
        }
    };
    let others: Vec<_> = (1..threads).map(|_| thread::spawn(ask(Arc::clone(&words)))).collect();
    let mut answers = vec![ask(Arc::clone(&words))()];
    answers.extend(others.into_iter().map(|other| other.join().expect("it does not fail")));
    let of = |answer| answers.iter().filter(|given| **given == Some(answer)).count();
    assert_eq!(of(true), 1);
    assert_eq!(words.read(), (1, 1));
}

/// What is behind the lock is no atomic at all.
fn who_holds_the_lock_is_alone() {
    struct Locked {
        version: AtomicU64,
        value: UnsafeCell<u64>,
    }
    // SAFETY: loom notices if two have the value at the same time.
    unsafe impl Sync for Locked {}
    // SAFETY: as above.
    unsafe impl Send for Locked {}
    let locked = Arc::new(Locked { version: AtomicU64::new(0), value: UnsafeCell::new(0) });
    let add = |locked: Arc<Locked>| {
        move || {
            let taken = version::take_now(&locked.version);
            if taken {
                // SAFETY: who holds the lock is alone; that is what is shown.
                locked.value.with_mut(|value| unsafe { *value += 1 });
                version::give_back(&locked.version);
            }
            u64::from(taken)
        }
    };
    let others = [thread::spawn(add(Arc::clone(&locked))), thread::spawn(add(Arc::clone(&locked)))];
    let mut added = add(Arc::clone(&locked))();
    for other in others {
        added += other.join().expect("it does not fail");
    }
    // SAFETY: the others are gone.
    assert_eq!(locked.value.with(|value| unsafe { *value }), added);
}

fn what_is_shown_is_whole() {
    let shown = Arc::new((AtomicPtr::new(std::ptr::null_mut::<AtomicU64>()), AtomicUsize::new(0)));
    let value = Arc::new(AtomicU64::new(0));
    let shows = thread::spawn({
        let (shown, value) = (Arc::clone(&shown), Arc::clone(&value));
        move || {
            value.store(7, Ordering::Relaxed);
            version::publish(&shown.0, &shown.1, Arc::as_ptr(&value).cast_mut(), 1);
        }
    });
    assert!(version::published(&shown.0, &shown.1, 1).is_none(), "there is only one");
    if let Some(start) = version::published(&shown.0, &shown.1, 0) {
        assert_eq!(start.cast_const(), Arc::as_ptr(&value));
        assert_eq!(value.load(Ordering::Relaxed), 7);
    }
    shows.join().expect("it does not fail");
}
