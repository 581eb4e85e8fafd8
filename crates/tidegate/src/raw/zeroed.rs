//! Memory that is zero and not resident until it is used, and that never moves.

use std::alloc::{Layout, handle_alloc_error};
use std::ops::{Deref, Range};
use std::ptr::{NonNull, null_mut};
use std::sync::OnceLock;

use crate::sync::{AtomicPtr, AtomicU64, AtomicUsize, version};

/// Types for which all bytes zero are a value, that need no dropping and are shared between
/// threads.
///
/// # Safety
/// Both must be true.
pub(crate) unsafe trait Zero: Sync + Send {}

/// One key of the memory store: half a cache line. Written only under the lock of its shard.
#[derive(Debug)]
#[repr(C, align(32))]
pub(crate) struct Slot {
    pub(crate) order: AtomicU64,
    pub(crate) other: AtomicU64,
    pub(crate) low: AtomicU64,
    pub(crate) high: AtomicU64,
}

// SAFETY: four zero words are four zero words.
unsafe impl Zero for Slot {}

const LINE: usize = 64;
/// A huge page, on most machines. Memory of one or more is made of them where the system can, which
/// spares most of the walks through the page tables: a trip to a random slot among a million is a
/// fifth shorter.
pub(crate) const HUGE: usize = 1 << 21;

/// A slice of zeroes at the beginning of a cache line, or of a huge page if it has one. Memory from
/// the operating system is zero already, and is not touched here, so that even a large one costs
/// nothing until it is used.
#[derive(Debug)]
struct Zeroed<T: Zero> {
    start: NonNull<T>,
    length: usize,
    /// All of it, `start` being somewhat later.
    allocated: NonNull<u8>,
    layout: Layout,
}

// SAFETY: it owns its memory and hands out shared references to `T: Sync` only.
unsafe impl<T: Zero> Send for Zeroed<T> {}
// SAFETY: as above.
unsafe impl<T: Zero> Sync for Zeroed<T> {}

impl<T: Zero> Zeroed<T> {
    fn new(length: usize) -> Self {
        let bytes = length.checked_mul(size_of::<T>()).expect("it fits memory");
        let aligned = if bytes < HUGE { LINE } else { HUGE };
        let bytes = bytes.checked_add(aligned).expect("it fits memory");
        let layout = Layout::from_size_align(bytes, align_of::<u64>()).expect("it fits memory");
        const { assert!(align_of::<T>() <= LINE) };
        let Some(allocated) = system::zeroes(layout) else { handle_alloc_error(layout) };
        // SAFETY: `start` is rounded up by less than what was added.
        let start = unsafe { allocated.add(allocated.align_offset(aligned)).cast::<T>() };
        Zeroed { start, length, allocated, layout }
    }

    /// Advises the operating system about those pages that are all within `range`. If the system
    /// refuses, nothing happens.
    fn advise(&self, range: &Range<usize>, page: usize, advice: system::Advice) {
        let range = range.start.min(self.length)..range.end.min(self.length);
        let (first, start) = (self.start.cast::<u8>(), self.start.addr().get());
        let (from, to) = (start + range.start * size_of::<T>(), start + range.end * size_of::<T>());
        let (from, to) = (from.next_multiple_of(page), to / page * page);
        if to > from {
            // SAFETY: whole pages of memory that is ours. Those not needed are private, so they
            // read as zeroes afterwards.
            unsafe { system::advise(first.add(from - start), to - from, advice) };
        }
    }

    fn all(&self) -> Range<usize> {
        0..self.length
    }
}

impl<T: Zero> Deref for Zeroed<T> {
    type Target = [T];

    #[inline(always)]
    fn deref(&self) -> &[T] {
        // SAFETY: so many were allocated, zeroes are values of `T`, and nobody has them
        // exclusively.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.length) }
    }
}

impl<T: Zero> Drop for Zeroed<T> {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, and nobody has references to it any longer. `T` needs
        // no dropping.
        unsafe { system::give_back(self.allocated, self.layout) };
    }
}

/// Slices of zeroes by number, each made when it is needed, and never moved.
#[derive(Debug)]
pub(crate) struct Later<T: Zero> {
    /// Of each slice, once it is made: nothing else need be asked on the way to a few of its
    /// values.
    starts: [AtomicPtr<T>; SLICES],
    /// How many of its values have `FEW - 1` more behind them.
    fews: [AtomicUsize; SLICES],
    made: [OnceLock<Made<T>>; SLICES],
    /// What slices of less than a huge page are parts of: side by side they have some.
    parts: OnceLock<Zeroed<T>>,
}

#[derive(Debug)]
enum Made<T: Zero> {
    Whole(Zeroed<T>),
    Part(Range<usize>),
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
            parts: OnceLock::new(),
        }
    }
}

impl<T: Zero> Later<T> {
    /// Makes a slice, if that was not done, on huge pages or on none.
    pub(crate) fn make(&self, number: u8, length: usize, is_huge: bool) {
        self.made[usize::from(number)].get_or_init(|| {
            let zeroed = Zeroed::new(length);
            let advice =
                if is_huge { system::Advice::HugePages } else { system::Advice::NoHugePages };
            zeroed.advise(&zeroed.all(), HUGE, advice);
            self.publish(number, &zeroed);
            Made::Whole(zeroed)
        });
    }

    /// Makes a slice that is one of several with `length` values together, if that was not done.
    pub(crate) fn make_part(&self, number: u8, range: Range<usize>, length: usize) {
        self.made[usize::from(number)].get_or_init(|| {
            let parts = self.parts.get_or_init(|| {
                let parts = Zeroed::new(length);
                // A few values would take a huge page where the system gives them unasked.
                parts.advise(&parts.all(), HUGE, system::Advice::NoHugePages);
                parts
            });
            self.publish(number, &parts[range.clone()]);
            Made::Part(range)
        });
    }

    /// Moves one more of the pages of the parts together into a huge one: the first, second and so
    /// on. For when all of them are in use. It takes the system as long as it takes to copy one,
    /// less than a millisecond.
    pub(crate) fn gather(&self, page: usize) {
        let Some(parts) = self.parts.get() else { return };
        let values = HUGE / size_of::<T>();
        let range = page.saturating_mul(values)..page.saturating_add(1).saturating_mul(values);
        parts.advise(&range, HUGE, system::Advice::HugePages);
        parts.advise(&range, HUGE, system::Advice::Collapse);
    }

    fn publish(&self, number: u8, values: &[T]) {
        let place = usize::from(number);
        let fews = values.len().saturating_sub(FEW - 1);
        version::publish(&self.starts[place], &self.fews[place], values.as_ptr().cast_mut(), fews);
    }

    #[inline(always)]
    pub(crate) fn get(&self, number: u8) -> Option<&[T]> {
        match self.made[usize::from(number)].get()? {
            Made::Whole(zeroed) => Some(zeroed),
            Made::Part(range) => self.parts.get()?.get(range.clone()),
        }
    }

    /// A few values of a slice from `position` on; if there are none, `otherwise`.
    #[inline(always)]
    pub(crate) fn few<'a>(
        &'a self,
        number: u8,
        position: usize,
        otherwise: &'a [T; FEW],
    ) -> &'a [T; FEW] {
        let place = usize::from(number);
        match version::published(&self.starts[place], &self.fews[place], position) {
            // SAFETY: whoever sees a number other than zero sees the start that was stored before
            // it, and so many values have `FEW - 1` behind them. `made` and `parts` keep the memory
            // until `self` is dropped; zeroes are values of `T`, and nobody has them exclusively.
            Some(start) => unsafe { &*start.add(position).cast() },
            None => cold(otherwise),
        }
    }

    /// Makes a slice all zero again, and gives the memory back to the operating system where that
    /// is possible.
    ///
    /// What is not whole pages must be zero already. Nobody may be writing to it; whoever reads it
    /// reads either the old values or zeroes.
    pub(crate) fn release(&self, number: u8) {
        const PAGE: usize = 65_536; // the largest that is usual; every smaller one divides it
        let advise =
            |zeroed: &Zeroed<T>, range| zeroed.advise(range, PAGE, system::Advice::DontNeed);
        match self.made[usize::from(number)].get() {
            Some(Made::Whole(zeroed)) => advise(zeroed, &zeroed.all()),
            Some(Made::Part(range)) => {
                advise(self.parts.get().expect("it is a part of them"), range)
            }
            None => {}
        }
    }
}

/// Tells the compiler that this hardly ever happens, and is worth no step on the usual way.
#[cold]
#[inline(never)]
fn cold<T>(value: T) -> T {
    value
}

/// Memory from the system itself: an allocator that has memory left which was used before would
/// write the zeroes.
#[cfg(target_os = "linux")]
mod system {
    use std::alloc::Layout;
    use std::ptr::{NonNull, null_mut};

    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

    /// What the system can be told about memory; the numbers are Linux's.
    #[derive(Clone, Copy)]
    pub(super) enum Advice {
        DontNeed = 4,
        HugePages = 14,
        NoHugePages = 15,
        /// Make a huge page of it now. Known since Linux 6.1; before that the system does so some
        /// time later, if it likes.
        Collapse = 25,
    }

    pub(super) fn zeroes(layout: Layout) -> Option<NonNull<u8>> {
        let (access, flags) =
            (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
        // SAFETY: new memory, wherever the system likes.
        let mapped = unsafe { mmap_anonymous(null_mut(), layout.size(), access, flags) };
        NonNull::new(mapped.ok()?.cast())
    }

    /// # Safety
    /// It came from [`zeroes`] with this layout, and nobody uses it any longer.
    pub(super) unsafe fn give_back(start: NonNull<u8>, layout: Layout) {
        // SAFETY: as above. That there is no such memory is the only error.
        let _ = unsafe { munmap(start.as_ptr().cast(), layout.size()) };
    }

    /// # Safety
    /// Whole pages that came from [`zeroes`]; if they are not needed, nobody is writing to them.
    pub(super) unsafe fn advise(start: NonNull<u8>, bytes: usize, advice: Advice) {
        unsafe extern "C" {
            fn madvise(address: *mut u8, length: usize, advice: i32) -> i32;
        }
        // SAFETY: as above.
        unsafe { madvise(start.as_ptr(), bytes, advice as i32) };
    }
}

/// Memory from the allocator, which has to be zero because it was asked for as such, and stays with
/// us until we are done with all of it.
#[cfg(not(target_os = "linux"))]
mod system {
    use std::alloc::{Layout, alloc_zeroed, dealloc};
    use std::ptr::NonNull;

    #[derive(Clone, Copy)]
    pub(super) enum Advice {
        DontNeed,
        HugePages,
        NoHugePages,
        Collapse,
    }

    pub(super) fn zeroes(layout: Layout) -> Option<NonNull<u8>> {
        // SAFETY: the layout is not empty.
        NonNull::new(unsafe { alloc_zeroed(layout) })
    }

    /// # Safety
    /// It came from [`zeroes`] with this layout, and nobody uses it any longer.
    pub(super) unsafe fn give_back(start: NonNull<u8>, layout: Layout) {
        // SAFETY: as above.
        unsafe { dealloc(start.as_ptr(), layout) };
    }

    /// # Safety
    /// None needed: it does nothing.
    pub(super) unsafe fn advise(_: NonNull<u8>, _: usize, _: Advice) {}
}
