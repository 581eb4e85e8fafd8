//! The only `unsafe` of this crate, each piece with what it buys (`bench/`, two cores at 2.8 GHz; `docs/decisions/0004-unsafe.md`).
//!
//! - [`SpinLock`]: unlocking by a plain store instead of an atomic exchange saves about 8 of 16 ns per uncontended lock and
//!   unlock (`cargo xtask bench parts`). A shard is held for tens of nanoseconds by a bucket or window, longer by a rebuild or a
//!   long log, and never across a wait; whoever finds it taken spins briefly, then yields to the thread that holds it.
//! - [`prefetch`]: fetching the slots of the next keys while one is decided makes batches on a million keys about twice as fast
//!   as single calls (`cargo xtask bench memory 1e6`).

#![allow(unsafe_code, reason = "measured above; nothing else in this crate is unsafe")]

use std::sync::atomic::{AtomicBool, Ordering};

use lock_api::{GuardSend, RawMutex};

/// How often to look again before letting other threads run.
const SPINS: u32 = 64;

/// A lock for critical sections that are much shorter than a system call.
#[derive(Debug)]
pub(crate) struct SpinLock {
    taken: AtomicBool,
}

// SAFETY: only the thread whose compare-exchange turned `taken` from false to true holds the lock, until it calls `unlock`,
// which only the holder may. Acquire on taking and Release on giving back order everything done under the lock.
unsafe impl RawMutex for SpinLock {
    #[allow(clippy::declare_interior_mutable_const, reason = "it is how lock_api makes a new lock")]
    const INIT: SpinLock = SpinLock { taken: AtomicBool::new(false) };
    type GuardMarker = GuardSend;

    #[inline(always)]
    fn lock(&self) {
        if !self.try_lock() {
            self.wait();
        }
    }

    #[inline(always)]
    fn try_lock(&self) -> bool {
        self.taken.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    #[inline(always)]
    unsafe fn unlock(&self) {
        self.taken.store(false, Ordering::Release);
    }
}

impl SpinLock {
    #[cold]
    fn wait(&self) {
        loop {
            for _ in 0..SPINS {
                if !self.taken.load(Ordering::Relaxed) && self.try_lock() {
                    return;
                }
                std::hint::spin_loop();
            }
            std::thread::yield_now();
        }
    }
}

/// Asks the processor to fetch the memory at `address` soon. Any address will do, also one that is no longer valid.
#[inline(always)]
pub(crate) fn prefetch(address: usize) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch reads nothing the program can see and does not fault, whatever the address.
    unsafe {
        use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(core::ptr::without_provenance::<i8>(address));
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}
