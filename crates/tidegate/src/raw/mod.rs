//! The `unsafe` code of this crate, each piece with its purpose (`tools/bench/`, two cores at 2.8
//! GHz; `docs/decisions/0004-unsafe.md` and `0016-reading-without-a-lock.md`).
//!
//! - [`Versioned`]: a lock with a version, so that reads need not take it.
//! - [`zeroed`]: memory that is zero, and not resident until it is used.
//! - [`prefetch`]: fetching the slots of the next keys while one is decided.
//! - [`Aes`]: a hash with a third of the instructions.
//! - [`log2`]: an instruction without a dependency on the last decision.

#![allow(
    unsafe_code,
    reason = "measured above; this crate has no other unsafe code but the tables beside this file"
)]

mod zeroed;

use lock_api::{GuardSend, Mutex, MutexGuard, RawMutex};

use crate::sync::{AtomicU64, version};
pub(crate) use zeroed::{FEW, HUGE, Later, Slot};

/// The number of attempts before the thread yields.
const SPINS: u32 = 64;

/// A lock for critical sections much shorter than a system call. Its version is odd while it is
/// held, and has a new value after each release.
#[derive(Debug)]
pub(crate) struct VersionLock {
    version: AtomicU64,
}

impl VersionLock {
    #[cold]
    fn wait(&self) {
        loop {
            for _ in 0..SPINS {
                if self.try_lock() {
                    return;
                }
                std::hint::spin_loop();
            }
            std::thread::yield_now();
        }
    }
}

// SAFETY: only the thread whose compare-exchange turned an even version into an odd one holds the
// lock, until it calls `unlock`, which only the holder may. Acquire on taking and Release on giving
// back order everything done under the lock.
unsafe impl RawMutex for VersionLock {
    #[allow(clippy::declare_interior_mutable_const, reason = "it is how lock_api makes a new lock")]
    const INIT: VersionLock = VersionLock { version: AtomicU64::new(0) };
    type GuardMarker = GuardSend;

    #[inline(always)]
    fn lock(&self) {
        if !self.try_lock() {
            self.wait();
        }
    }

    #[inline(always)]
    fn try_lock(&self) -> bool {
        version::take_now(&self.version)
    }

    #[inline(always)]
    unsafe fn unlock(&self) {
        version::give_back(&self.version);
    }
}

/// A value behind a lock that also protects atomics elsewhere. The atomics are written under the
/// lock and may be read without it: a read is valid if the version was even before it and unchanged
/// after it.
#[derive(Debug)]
pub(crate) struct Versioned<T> {
    mutex: Mutex<VersionLock, T>,
}

pub(crate) type Guard<'a, T> = MutexGuard<'a, VersionLock, T>;

/// The lock while two words are written. Dropping it releases the lock.
pub(crate) struct Writing<'a> {
    lock: &'a VersionLock,
}

impl<T> Versioned<T> {
    pub(crate) fn new(value: T) -> Self {
        Versioned { mutex: Mutex::new(value) }
    }

    #[inline]
    pub(crate) fn lock(&self) -> Guard<'_, T> {
        self.mutex.lock()
    }

    #[inline(always)]
    fn raw(&self) -> &VersionLock {
        // SAFETY: only the holder releases the lock, see `Writing`.
        unsafe { self.mutex.raw() }
    }

    /// The version at the start of a read; odd during a write.
    #[inline(always)]
    pub(crate) fn version(&self) -> u64 {
        version::begin(&self.raw().version)
    }

    /// Whether there was no write since `version`.
    #[inline(always)]
    pub(crate) fn is_still(&self, version: u64) -> bool {
        version::is_still(&self.raw().version, version)
    }

    /// Takes the lock if it is free.
    #[inline(always)]
    pub(crate) fn try_write(&self) -> Option<Writing<'_>> {
        let lock = self.raw();
        version::take_now(&lock.version).then(|| Writing { lock })
    }

    /// Takes the lock if there was no write since `version`.
    #[inline(always)]
    pub(crate) fn write_if_still(&self, version: u64) -> Option<Writing<'_>> {
        let lock = self.raw();
        // Created only after the lock is taken, because dropping it releases the lock.
        (version & 1 == 0 && version::take(&lock.version, version)).then(|| Writing { lock })
    }
}

impl Drop for Writing<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        version::give_back(&self.lock.version);
    }
}

/// Whether [`cycles`] counts at a constant speed.
pub(crate) fn cycles_are_steady() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        use core::arch::x86_64::__cpuid;
        const EXTENDED: u32 = 0x8000_0000;
        const POWER: u32 = EXTENDED + 7;
        const STEADY: u32 = 1 << 8;
        __cpuid(EXTENDED).eax >= POWER && __cpuid(POWER).edx & STEADY != 0
    }
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// The processor's cycle counter, where it has one.
#[inline(always)]
pub(crate) fn cycles() -> u64 {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: it only reads a register.
    unsafe {
        core::arch::x86_64::_rdtsc()
    }
    #[cfg(not(target_arch = "x86_64"))]
    0
}

/// A proof that the processor has the AES instructions.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Aes(());

impl Aes {
    /// The proof, if this processor has them.
    pub(crate) fn of_this_processor() -> Option<Self> {
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        return std::arch::is_x86_feature_detected!("aes").then_some(Aes(()));
        #[cfg(not(all(target_arch = "x86_64", not(miri))))]
        None
    }

    /// Four rounds, the lower half of the block first. Assembly, because a function with a target
    /// feature cannot be inlined into one without it.
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    #[inline(always)]
    #[allow(clippy::cast_sign_loss, clippy::cast_possible_wrap, reason = "bits, not numbers")]
    pub(crate) fn four_rounds(
        self,
        (low, high): (u64, u64),
        keys: &[u128; 4],
        end: &u128,
    ) -> (u64, u64) {
        use core::arch::x86_64::{_mm_cvtsi128_si64, _mm_set_epi64x, _mm_unpackhi_epi64};
        // SAFETY: the processor has the instruction, or there would be no `self`. What is read are
        // the keys, which stand where numbers of 128 bits have to; the other instructions are those
        // that every such processor has.
        unsafe {
            let mut block = _mm_set_epi64x(high as i64, low as i64);
            core::arch::asm!(
                "pxor {block}, xmmword ptr [{keys}]",
                "aesenc {block}, xmmword ptr [{keys} + 16]",
                "aesenc {block}, xmmword ptr [{keys} + 32]",
                "aesenc {block}, xmmword ptr [{keys} + 48]",
                "aesenc {block}, xmmword ptr [{end}]",
                block = inout(xmm_reg) block,
                keys = in(reg) keys,
                end = in(reg) end,
                options(pure, readonly, nostack, preserves_flags),
            );
            (
                _mm_cvtsi128_si64(block) as u64,
                _mm_cvtsi128_si64(_mm_unpackhi_epi64(block, block)) as u64,
            )
        }
    }

    /// There is no proof on this target.
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    pub(crate) fn four_rounds(self, block: (u64, u64), _: &[u128; 4], _: &u128) -> (u64, u64) {
        block
    }
}

/// The binary logarithm of a number that is not zero.
///
/// For zero the instruction leaves its output register unchanged, so it depends on the old value.
/// That may be a value that the last decision loads from memory, and then two decisions do not
/// overlap. So the register is set first.
#[inline(always)]
pub(crate) fn log2(number: usize) -> u32 {
    debug_assert!(number > 0, "zero has no logarithm");
    #[cfg(target_arch = "x86_64")]
    {
        let log: u32;
        // SAFETY: it only computes.
        unsafe {
            core::arch::asm!(
                "bsr {0:r}, {1:r}",
                inout(reg) 0_u32 => log,
                in(reg) number,
                options(pure, nomem, nostack),
            );
        }
        log
    }
    #[cfg(not(target_arch = "x86_64"))]
    number.ilog2()
}

/// Starts to fetch the memory of a value.
#[inline(always)]
pub(crate) fn prefetch<T>(value: &T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch reads nothing the program can see and does not fault.
    unsafe {
        use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>((&raw const *value).cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = value;
}

/// Starts to fetch the memory of a value for writing, so that no other processor caches it.
/// Processors without the instruction do nothing.
#[inline(always)]
pub(crate) fn prefetch_to_write<T>(value: &T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch changes nothing the program can see and does not fault.
    unsafe {
        core::arch::asm!(
            "prefetchw [{}]",
            in(reg) &raw const *value,
            options(nostack, preserves_flags, readonly),
        );
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = value;
}
