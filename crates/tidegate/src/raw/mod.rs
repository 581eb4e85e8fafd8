//! The only `unsafe` of this crate, each piece with what it buys (`tools/bench/`, two cores at 2.8 GHz;
//! `docs/decisions/0004-unsafe.md` and `0016-reading-without-a-lock.md`).
//!
//! - [`Versioned`]: a lock that counts how often it was given back, so that whoever only reads need
//!   not take it.
//! - [`zeroed`]: memory that is zero and not resident until it is used.
//! - [`prefetch`]: fetching the slots of the next keys while one is decided.
//! - [`Aes`]: a hash of a third of the instructions.
//! - [`log2`]: an instruction that does not wait for the last decision.

#![allow(
    unsafe_code,
    reason = "measured above; this crate has no other unsafe code but the tables beside this file"
)]

mod zeroed;

use lock_api::{GuardSend, Mutex, MutexGuard, RawMutex};

use crate::sync::{AtomicU64, version};
pub(crate) use zeroed::{FEW, HUGE, Later, Slot};

/// How often to look again before letting other threads run.
const SPINS: u32 = 64;

/// A lock for critical sections that are much shorter than a system call. Its version is odd while
/// somebody holds it, and another one each time it is given back.
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

/// A value behind a lock, and beside it other memory of atomics that is only written by who holds
/// the lock and may be read without: a reading counts if the version was even before it and the
/// same after it.
#[derive(Debug)]
pub(crate) struct Versioned<T> {
    mutex: Mutex<VersionLock, T>,
}

pub(crate) type Guard<'a, T> = MutexGuard<'a, VersionLock, T>;

/// The lock while two words are written: given back when dropped.
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
        // SAFETY: the lock is given back only by who took it, see `Writing`.
        unsafe { self.mutex.raw() }
    }

    /// The version from which a reading begins; odd if somebody is writing.
    #[inline(always)]
    pub(crate) fn version(&self) -> u64 {
        version::begin(&self.raw().version)
    }

    /// Whether nobody has written since it was `version`.
    #[inline(always)]
    pub(crate) fn is_still(&self, version: u64) -> bool {
        version::is_still(&self.raw().version, version)
    }

    /// Takes the lock if nobody has it.
    #[inline(always)]
    pub(crate) fn try_write(&self) -> Option<Writing<'_>> {
        let lock = self.raw();
        version::take_now(&lock.version).then(|| Writing { lock })
    }

    /// Takes the lock if nobody has written since it was `version`.
    #[inline(always)]
    pub(crate) fn write_if_still(&self, version: u64) -> Option<Writing<'_>> {
        let lock = self.raw();
        // Not before it is taken: what is made is also dropped.
        (version & 1 == 0 && version::take(&lock.version, version)).then(|| Writing { lock })
    }
}

impl Drop for Writing<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        version::give_back(&self.lock.version);
    }
}

/// Whether [`cycles`] counts at one speed, whatever the processor is doing.
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

/// The processor's own instruction for a round of AES: whoever has this may use it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Aes(());

impl Aes {
    /// If this processor has it.
    pub(crate) fn of_this_processor() -> Option<Self> {
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        return std::arch::is_x86_feature_detected!("aes").then_some(Aes(()));
        #[cfg(not(all(target_arch = "x86_64", not(miri))))]
        None
    }

    /// Four rounds, the lower half of the block first. Written here, not called by its name: a
    /// function for processors that have it cannot become part of one for all processors.
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

    /// Nobody has one.
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    pub(crate) fn four_rounds(self, block: (u64, u64), _: &[u128; 4], _: &u128) -> (u64, u64) {
        block
    }
}

/// The binary logarithm of a number that is not zero.
///
/// The instruction leaves its register as it was for zero, so that it waits for whatever was in
/// there before: what the last decision read from memory, as the compiler happened to choose it,
/// and then no two decisions are under way at the same time. So the register is set first.
#[inline(always)]
pub(crate) fn log2(number: usize) -> u32 {
    debug_assert!(number > 0, "zero has no logarithm");
    #[cfg(target_arch = "x86_64")]
    {
        let log: u32;
        // SAFETY: it only computes.
        unsafe {
            core::arch::asm!("bsr {0:r}, {1:r}", inout(reg) 0_u32 => log, in(reg) number, options(pure, nomem, nostack));
        }
        log
    }
    #[cfg(not(target_arch = "x86_64"))]
    number.ilog2()
}

/// Asks the processor to fetch the memory of a value soon.
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

/// The same for a value that is going to be written, so that no other processor has it any longer.
/// Processors that do not know this do nothing.
#[inline(always)]
pub(crate) fn prefetch_to_write<T>(value: &T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch changes nothing the program can see and does not fault.
    unsafe {
        core::arch::asm!("prefetchw [{}]", in(reg) &raw const *value, options(nostack, preserves_flags, readonly));
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = value;
}
