//! The memory orderings of all values that are read without a lock. `cargo xtask loom` checks this
//! file under every interleaving of threads, and shows that each ordering is necessary.
//!
//! A version is odd during a write, and has a new value after it. A read is valid if the version
//! was even before it and unchanged after it. The values between are atomics, read and written
//! `Relaxed`.

use crate::sync::{AtomicPtr, AtomicU64, AtomicUsize, Ordering, fence};

/// The version at the start of a read; odd during a write.
#[inline(always)]
pub(crate) fn begin(version: &AtomicU64) -> u64 {
    version.load(Ordering::Acquire)
}

/// Whether there was no write since the version was `seen`.
#[inline(always)]
pub(crate) fn is_still(version: &AtomicU64, seen: u64) -> bool {
    fence(Ordering::Acquire);
    seen & 1 == 0 && version.load(Ordering::Relaxed) == seen
}

/// Starts a write if there was no write since the version was `seen`, which is even. Reads since
/// then are valid, because the next writer sees that this write is [done].
#[inline(always)]
pub(crate) fn take(version: &AtomicU64, seen: u64) -> bool {
    // Relaxed: `seen` comes from [`begin`], which acquires, and each version occurs once.
    before_writing(
        version.compare_exchange(seen, seen | 1, Ordering::Relaxed, Ordering::Relaxed).is_ok(),
    )
}

/// Starts a write if no other write is in progress. A failed attempt changes nothing, because the
/// version was odd.
#[inline(always)]
pub(crate) fn take_now(version: &AtomicU64) -> bool {
    // One instruction that does not depend on an earlier read.
    before_writing(version.fetch_or(1, Ordering::Acquire) & 1 == 0)
}

/// Makes the odd version visible to every thread that sees a value written from here on.
#[inline(always)]
fn before_writing(taken: bool) -> bool {
    fence(Ordering::Release);
    taken
}

/// Ends a write that started at the version `seen`.
#[inline(always)]
pub(crate) fn done(version: &AtomicU64, seen: u64) {
    version.store(seen.wrapping_add(2), Ordering::Release);
}

/// Ends a write whose first version is not known: no other thread changes an odd version.
#[inline(always)]
pub(crate) fn give_back(version: &AtomicU64) {
    let odd = version.load(Ordering::Relaxed);
    done(version, odd.wrapping_sub(1));
}

/// Publishes the address and number of values, once.
pub(crate) fn publish<T>(
    start: &AtomicPtr<T>,
    count: &AtomicUsize,
    values: *mut T,
    values_count: usize,
) {
    start.store(values, Ordering::Relaxed);
    count.store(values_count, Ordering::Release);
}

/// The address of the published values, if there is one at `position`.
#[inline(always)]
pub(crate) fn published<T>(
    start: &AtomicPtr<T>,
    count: &AtomicUsize,
    position: usize,
) -> Option<*mut T> {
    (position < count.load(Ordering::Acquire)).then(|| start.load(Ordering::Relaxed))
}
