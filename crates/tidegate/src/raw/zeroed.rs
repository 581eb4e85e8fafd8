//! Memory that is zero, not resident until it is used, and never moves.

use std::alloc::{Layout, handle_alloc_error};
use std::ops::{Deref, Range};
use std::ptr::{NonNull, null_mut};
use std::sync::OnceLock;

use crate::sync::{AtomicPtr, AtomicU64, AtomicUsize, version};

/// Types that are valid when all bytes are zero, have no destructor, and can be shared between
/// threads.
///
/// # Safety
/// Zero bytes must be a valid value, and the type must need no drop.
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
/// The size of a huge page on most machines. Larger memory uses huge pages where the system can,
/// which saves most page table walks: access to a random slot among a million takes a fifth less
/// time.
pub(crate) const HUGE: usize = 1 << 21;

/// A slice of zeroes, aligned to a cache line, or to a huge page if it is that large. Memory from
/// the operating system is zero and is not touched here, so a large slice costs nothing until it is
/// used.
#[derive(Debug)]
struct Zeroed<T: Zero> {
    start: NonNull<T>,
    length: usize,
    /// The complete allocation; `start` is in it.
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
        // SAFETY: `start` is rounded up by less than the padding.
        let start = unsafe { allocated.add(allocated.align_offset(aligned)).cast::<T>() };
        Zeroed { start, length, allocated, layout }
    }

    /// Advises the operating system about the complete pages in `range`. Ignored if the system
    /// refuses.
    fn advise(&self, range: &Range<usize>, page: usize, advice: Advice) {
        let range = range.start.min(self.length)..range.end.min(self.length);
        let (first, start) = (self.start.cast::<u8>(), self.start.addr().get());
        let (from, to) = (start + range.start * size_of::<T>(), start + range.end * size_of::<T>());
        let (from, to) = (from.next_multiple_of(page), to / page * page);
        if to > from {
            // SAFETY: complete pages of this allocation. Pages that are not needed are private, so
            // they read as zeroes afterwards.
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
        // SAFETY: `length` values were allocated, zeroes are values of `T`, and there is no
        // exclusive reference to them.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.length) }
    }
}

impl<T: Zero> Drop for Zeroed<T> {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, and there are no references to it. `T` needs no drop.
        unsafe { system::give_back(self.allocated, self.layout) };
    }
}

/// Slices of zeroes by number, each allocated when it is needed, and never moved.
#[derive(Debug)]
pub(crate) struct Later<T: Zero> {
    /// The address of each slice, once it is allocated: all that a read of its values needs.
    starts: [AtomicPtr<T>; SLICES],
    /// The number of values with `FEW - 1` more after them.
    fews: [AtomicUsize; SLICES],
    made: [OnceLock<Made<T>>; SLICES],
    /// The allocations that small slices share, so that together they fill huge pages.
    parts: OnceLock<Zeroed<T>>,
}

#[derive(Debug)]
enum Made<T: Zero> {
    Own(Zeroed<T>),
    Part(Range<usize>),
}

/// The number of values that are read together.
pub(crate) const FEW: usize = 6;

/// As many slices as a byte can number, so that the index needs no check.
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
    /// Allocates a slice, unless it exists, with or without huge pages.
    pub(crate) fn make(&self, number: u8, length: usize, is_huge: bool) {
        self.made[usize::from(number)].get_or_init(|| {
            let zeroed = Zeroed::new(length);
            let advice = if is_huge { Advice::HugePages } else { Advice::NoHugePages };
            zeroed.advise(&zeroed.all(), HUGE, advice);
            self.publish(number, &zeroed);
            Made::Own(zeroed)
        });
    }

    /// Allocates a slice as one of several with `length` values together, unless it exists.
    pub(crate) fn make_part(&self, number: u8, range: Range<usize>, length: usize) {
        self.made[usize::from(number)].get_or_init(|| {
            let parts = self.parts.get_or_init(|| {
                let parts = Zeroed::new(length);
                // Otherwise a few values could take a huge page, where the system uses them by
                // default.
                parts.advise(&parts.all(), HUGE, Advice::NoHugePages);
                parts
            });
            self.publish(number, &parts[range.clone()]);
            Made::Part(range)
        });
    }

    /// Collapses the next pages of the shared allocation into a huge page, once all of them are in
    /// use. The system copies them in less than a millisecond.
    pub(crate) fn gather(&self, page: usize) {
        let Some(parts) = self.parts.get() else { return };
        let values = HUGE / size_of::<T>();
        let range = page.saturating_mul(values)..page.saturating_add(1).saturating_mul(values);
        parts.advise(&range, HUGE, Advice::HugePages);
        parts.advise(&range, HUGE, Advice::Collapse);
    }

    fn publish(&self, number: u8, values: &[T]) {
        let place = usize::from(number);
        let fews = values.len().saturating_sub(FEW - 1);
        version::publish(&self.starts[place], &self.fews[place], values.as_ptr().cast_mut(), fews);
    }

    #[inline(always)]
    pub(crate) fn get(&self, number: u8) -> Option<&[T]> {
        match self.made[usize::from(number)].get()? {
            Made::Own(zeroed) => Some(zeroed),
            Made::Part(range) => self.parts.get()?.get(range.clone()),
        }
    }

    /// A few values of a slice from `position` on, or `otherwise` if there are none.
    #[inline(always)]
    pub(crate) fn few<'a>(
        &'a self,
        number: u8,
        position: usize,
        otherwise: &'a [T; FEW],
    ) -> &'a [T; FEW] {
        let place = usize::from(number);
        match version::published(&self.starts[place], &self.fews[place], position) {
            // SAFETY: a thread that sees a count other than zero sees the start that was stored
            // before it, and that many values have `FEW - 1` after them. `made` and `parts` keep
            // the memory until `self` is dropped; zeroes are values of `T`, and there is no
            // exclusive reference to them.
            Some(start) => unsafe { &*start.add(position).cast() },
            None => cold(otherwise),
        }
    }

    /// Zeroes a slice, and returns its memory to the operating system where possible.
    ///
    /// The parts that are not complete pages must be zero already. There must be no writer; a
    /// reader gets either the old values or zeroes.
    pub(crate) fn release(&self, number: u8) {
        const PAGE: usize = 65_536; // the largest common page size; a multiple of the smaller ones
        let advise = |zeroed: &Zeroed<T>, range| zeroed.advise(range, PAGE, Advice::DontNeed);
        match self.made[usize::from(number)].get() {
            Some(Made::Own(zeroed)) => advise(zeroed, &zeroed.all()),
            Some(Made::Part(range)) => {
                advise(self.parts.get().expect("it is a part of them"), range)
            }
            None => {}
        }
    }
}

/// Tells the compiler that this branch is rare.
#[cold]
#[inline(never)]
fn cold<T>(value: T) -> T {
    value
}

/// Advice about memory, with the numbers of Linux.
#[derive(Clone, Copy)]
#[cfg_attr(not(target_os = "linux"), allow(dead_code, reason = "only Linux takes advice"))]
enum Advice {
    DontNeed = 4,
    HugePages = 14,
    NoHugePages = 15,
    /// Collapse it into a huge page now. Since Linux 6.1; older systems may do so later.
    Collapse = 25,
}

/// Memory directly from the system. An allocator would have to write zeroes to reused memory.
#[cfg(target_os = "linux")]
mod system {
    use std::alloc::Layout;
    use std::ptr::{NonNull, null_mut};

    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

    use super::Advice;

    pub(super) fn zeroes(layout: Layout) -> Option<NonNull<u8>> {
        let (access, flags) =
            (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
        // SAFETY: new memory, at any address.
        let mapped = unsafe { mmap_anonymous(null_mut(), layout.size(), access, flags) };
        NonNull::new(mapped.ok()?.cast())
    }

    /// # Safety
    /// It came from [`zeroes`] with this layout and is not used any longer.
    pub(super) unsafe fn give_back(start: NonNull<u8>, layout: Layout) {
        // SAFETY: as above. The only error is unmapped memory.
        let _ = unsafe { munmap(start.as_ptr().cast(), layout.size()) };
    }

    /// # Safety
    /// Complete pages that came from [`zeroes`]; pages that are not needed have no writer.
    pub(super) unsafe fn advise(start: NonNull<u8>, bytes: usize, advice: Advice) {
        unsafe extern "C" {
            fn madvise(address: *mut u8, length: usize, advice: i32) -> i32;
        }
        // SAFETY: as above.
        unsafe { madvise(start.as_ptr(), bytes, advice as i32) };
    }
}

/// Zeroed memory from the allocator.
#[cfg(not(target_os = "linux"))]
mod system {
    use std::alloc::{Layout, alloc_zeroed, dealloc};
    use std::ptr::NonNull;

    use super::Advice;

    pub(super) fn zeroes(layout: Layout) -> Option<NonNull<u8>> {
        // SAFETY: the layout is not empty.
        NonNull::new(unsafe { alloc_zeroed(layout) })
    }

    /// # Safety
    /// It came from [`zeroes`] with this layout and is not used any longer.
    pub(super) unsafe fn give_back(start: NonNull<u8>, layout: Layout) {
        // SAFETY: as above.
        unsafe { dealloc(start.as_ptr(), layout) };
    }

    /// # Safety
    /// None needed: it does nothing.
    pub(super) unsafe fn advise(_: NonNull<u8>, _: usize, _: Advice) {}
}
