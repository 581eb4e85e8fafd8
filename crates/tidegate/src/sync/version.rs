//! The orderings of everything that is read without a lock, in one place. `cargo xtask loom` tries
//! all ways in which threads can meet here, and shows of each ordering that it is needed.
//!
//! A version is odd while somebody writes, and another one each time they are done. A reading
//! counts if the version was even before it and the same after it; what is read in between are
//! atomics, read and written `Relaxed`.

use crate::sync::{AtomicPtr, AtomicU64, AtomicUsize, Ordering, fence};

/// The version from which a reading begins; odd if somebody is writing.
#[inline(always)]
pub(crate) fn begin(version: &AtomicU64) -> u64 {
    version.load(Ordering::Acquire)
}

/// Whether nobody has written since it was `seen`.
#[inline(always)]
pub(crate) fn is_still(version: &AtomicU64, seen: u64) -> bool {
    fence(Ordering::Acquire);
    seen & 1 == 0 && version.load(Ordering::Relaxed) == seen
}

/// Begins to write if nobody has written since it was `seen`, which is even. What was read before
/// counts then: whoever writes later has seen that this was [done].
#[inline(always)]
pub(crate) fn take(version: &AtomicU64, seen: u64) -> bool {
    // Relaxed: whoever has `seen` it has [begun](begin) with it, and it comes once only.
    before_writing(
        version.compare_exchange(seen, seen | 1, Ordering::Relaxed, Ordering::Relaxed).is_ok(),
    )
}

/// Begins to write if nobody is writing. Whoever is told no has changed nothing: the version was
/// odd.
#[inline(always)]
pub(crate) fn take_now(version: &AtomicU64) -> bool {
    // One instruction, which waits for nothing that was read before.
    before_writing(version.fetch_or(1, Ordering::Acquire) & 1 == 0)
}

/// Whoever sees anything that is written from here on also sees that the version is odd.
#[inline(always)]
fn before_writing(taken: bool) -> bool {
    fence(Ordering::Release);
    taken
}

/// Is done with writing, which began when the version was `seen`.
#[inline(always)]
pub(crate) fn done(version: &AtomicU64, seen: u64) {
    version.store(seen.wrapping_add(2), Ordering::Release);
}

/// The same for who has forgotten when it began: nobody else writes the version while it is odd.
#[inline(always)]
pub(crate) fn give_back(version: &AtomicU64) {
    let odd = version.load(Ordering::Relaxed);
    done(version, odd.wrapping_sub(1));
}

/// Shows others that from `start` on there are so many values. Done once.
pub(crate) fn publish<T>(
    start: &AtomicPtr<T>,
    count: &AtomicUsize,
    values: *mut T,
    values_count: usize,
) {
    start.store(values, Ordering::Relaxed);
    count.store(values_count, Ordering::Release);
}

/// Where the values start, if the one at `position` is among them.
#[inline(always)]
pub(crate) fn published<T>(
    start: &AtomicPtr<T>,
    count: &AtomicUsize,
    position: usize,
) -> Option<*mut T> {
    (position < count.load(Ordering::Acquire)).then(|| start.load(Ordering::Relaxed))
}
