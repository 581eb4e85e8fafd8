//! The only `unsafe` of this crate, each piece with what it buys (`bench/`, two cores at 2.8 GHz; `docs/decisions/0004-unsafe.md` and
//! `0016-reading-without-a-lock.md`).
//!
//! - [`Versioned`]: a lock that counts how often it was given back, so that whoever only reads need not take it.
//! - [`Zeroed`]: memory that is zero and not resident until it is used.
//! - [`prefetch`]: fetching the slots of the next keys while one is decided.

#![allow(unsafe_code, reason = "measured above; nothing else in this crate is unsafe")]

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ops::Deref;
use std::ptr::{NonNull, null_mut};
use std::sync::OnceLock;

use lock_api::{GuardSend, Mutex, MutexGuard, RawMutex};

use super::version;
use crate::sync::{AtomicPtr, AtomicU64, AtomicUsize};

/// How often to look again before letting other threads run.
const SPINS: u32 = 64;

/// A lock for critical sections that are much shorter than a system call. Its version is odd while somebody holds it, and
/// another one each time it is given back.
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

// SAFETY: only the thread whose compare-exchange turned an even version into an odd one holds the lock, until it calls `unlock`,
// which only the holder may. Acquire on taking and Release on giving back order everything done under the lock.
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
        version::take_now(&self.version).is_some()
    }

    #[inline(always)]
    unsafe fn unlock(&self) {
        version::give_back(&self.version);
    }
}

/// A value behind a lock, and beside it other memory of atomics that is only written by who holds the lock and may be read
/// without: a reading counts if the version was even before it and the same after it.
#[derive(Debug)]
pub(crate) struct Versioned<T> {
    mutex: Mutex<VersionLock, T>,
}

pub(crate) type Guard<'a, T> = MutexGuard<'a, VersionLock, T>;

/// The lock while two words are written: given back when dropped.
pub(crate) struct Writing<'a> {
    lock: &'a VersionLock,
    version: u64,
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
        version::take_now(&lock.version).map(|version| Writing { lock, version })
    }

    /// Takes the lock if nobody has written since it was `version`.
    #[inline(always)]
    pub(crate) fn write_if_still(&self, version: u64) -> Option<Writing<'_>> {
        let lock = self.raw();
        // Not before it is taken: what is made is also dropped.
        (version & 1 == 0 && version::take(&lock.version, version)).then(|| Writing { lock, version })
    }
}

impl Drop for Writing<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        version::done(&self.lock.version, self.version);
    }
}

/// Types for which all bytes zero are a value, that need no dropping and are shared between threads.
///
/// # Safety
/// Both must be true.
pub(crate) unsafe trait Zero: Sync + Send {}

// SAFETY: four zero words are four zero words.
unsafe impl Zero for super::slots::Slot {}

/// A slice of zeroes at the beginning of a cache line. Memory from the operating system is zero already, and is not
/// touched here, so that even a large one costs nothing until it is used.
#[derive(Debug)]
pub(crate) struct Zeroed<T: Zero> {
    start: NonNull<T>,
    length: usize,
    allocated: NonNull<u8>,
    layout: Layout,
}

const LINE: usize = 64;
/// A huge page, on most machines. Memory of one or more is made of them where the system can, which spares most of the walks
/// through the page tables: a trip to a random slot among a million is a fifth shorter.
const HUGE: usize = 1 << 21;

// SAFETY: it owns its memory and hands out shared references to `T: Sync` only.
unsafe impl<T: Zero> Send for Zeroed<T> {}
// SAFETY: as above.
unsafe impl<T: Zero> Sync for Zeroed<T> {}

impl<T: Zero> Zeroed<T> {
    pub(crate) fn new(length: usize) -> Self {
        let bytes = length.checked_mul(size_of::<T>()).expect("it fits memory");
        let aligned = if bytes < HUGE { LINE } else { HUGE };
        let bytes = bytes.checked_add(aligned).expect("it fits memory");
        // More than the allocator gives anyway would make it write the zeroes itself.
        let layout = Layout::from_size_align(bytes, align_of::<u64>()).expect("it fits memory");
        const { assert!(align_of::<T>() <= LINE) };
        // SAFETY: the layout is not empty; `start` is rounded up by less than what was added, and aligned.
        let zeroed = unsafe {
            let Some(allocated) = NonNull::new(alloc_zeroed(layout)) else { handle_alloc_error(layout) };
            let start = allocated.add(allocated.align_offset(aligned)).cast::<T>();
            Zeroed { start, length, allocated, layout }
        };
        zeroed.advise(HUGE, advice::HUGE_PAGES);
        zeroed
    }

    /// Makes it all zero again, and gives the memory back to the operating system where that is possible.
    ///
    /// Nobody may be writing to it; whoever reads it reads either the old values or zeroes.
    pub(crate) fn release(&self) {
        const PAGE: usize = 65_536; // the largest that is usual; every smaller one divides it
        self.advise(PAGE, advice::DONT_NEED);
    }

    /// Advises the operating system about those of its pages that are all ours. If the system refuses, nothing happens.
    #[cfg(target_os = "linux")]
    fn advise(&self, page: usize, advice: i32) {
        unsafe extern "C" {
            fn madvise(address: *mut u8, length: usize, advice: i32) -> i32;
        }
        let bytes = self.length * size_of::<T>();
        let (first, start) = (self.start.cast::<u8>(), self.start.addr().get());
        let (from, to) = (start.next_multiple_of(page) - start, (start + bytes) / page * page);
        if to > start + from {
            // SAFETY: whole pages of memory that is ours. Those not needed are private, so they read as zeroes afterwards.
            unsafe { madvise(first.add(from).as_ptr(), to - start - from, advice) };
        }
    }

    #[cfg(not(target_os = "linux"))]
    fn advise(&self, _: usize, _: i32) {}
}

/// What the operating system can be told about memory.
mod advice {
    pub(super) const DONT_NEED: i32 = 4;
    pub(super) const HUGE_PAGES: i32 = 14;
}

impl<T: Zero> Deref for Zeroed<T> {
    type Target = [T];

    #[inline(always)]
    fn deref(&self) -> &[T] {
        // SAFETY: so many were allocated, zeroes are values of `T`, and nobody has them exclusively.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.length) }
    }
}

impl<T: Zero> Drop for Zeroed<T> {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout. `T` needs no dropping.
        unsafe { dealloc(self.allocated.as_ptr(), self.layout) };
    }
}

/// Slices of zeroes by number, each made when it is needed, and never moved.
#[derive(Debug)]
pub(crate) struct Later<T: Zero> {
    /// Of each slice, once it is made: nothing else need be asked on the way to a few of its values.
    starts: [AtomicPtr<T>; SLICES],
    /// How many of its values have `FEW - 1` more behind them.
    fews: [AtomicUsize; SLICES],
    made: [OnceLock<Zeroed<T>>; SLICES],
}

/// How many values are looked at together.
pub(crate) const FEW: usize = 6;

/// As many as a byte can number, so that nobody has to ask whether there is such a slice.
const SLICES: usize = 1 << u8::BITS;

impl<T: Zero> Default for Later<T> {
    fn default() -> Self {
        Later {
            starts: std::array::from_fn(|_| AtomicPtr::new(null_mut())),
            fews: std::array::from_fn(|_| AtomicUsize::new(0)),
            made: [const { OnceLock::new() }; SLICES],
        }
    }
}

impl<T: Zero> Later<T> {
    /// Makes a slice, if that was not done.
    pub(crate) fn make(&self, number: u8, length: usize) {
        let place = usize::from(number);
        self.made[place].get_or_init(|| {
            let zeroed = Zeroed::new(length);
            let fews = length.saturating_sub(FEW - 1);
            version::publish(&self.starts[place], &self.fews[place], zeroed.start.as_ptr(), fews);
            zeroed
        });
    }

    #[inline(always)]
    pub(crate) fn get(&self, number: u8) -> Option<&[T]> {
        self.made[usize::from(number)].get().map(|zeroed| &**zeroed)
    }

    /// A few values of a slice from `position` on; if there are none, `otherwise`.
    #[inline(always)]
    pub(crate) fn few<'a>(&'a self, number: u8, position: usize, otherwise: &'a [T; FEW]) -> &'a [T; FEW] {
        let place = usize::from(number);
        match version::published(&self.starts[place], &self.fews[place], position) {
            // SAFETY: whoever sees a number other than zero sees the start that was stored before it, and so many values have `FEW - 1` behind
            // them. `made` keeps the memory until `self` is dropped; zeroes are values of `T`, and nobody has them exclusively.
            Some(start) => unsafe { &*start.add(position).cast() },
            None => cold(otherwise),
        }
    }

    /// See [`Zeroed::release`].
    pub(crate) fn release(&self, number: u8) {
        if let Some(zeroed) = self.made[usize::from(number)].get() {
            zeroed.release();
        }
    }
}

/// Tells the compiler that this hardly ever happens, and is worth no step on the usual way.
#[cold]
#[inline(never)]
fn cold<T>(value: T) -> T {
    value
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

/// The same for a value that is going to be written, so that no other processor has it any longer. Processors that do not know this do nothing.
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
