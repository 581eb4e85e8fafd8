//! One shard as its callers meet it: a lock, and the decision on one key by the shortest way.

use std::sync::atomic::{AtomicBool, Ordering};

use tidegate_core::algorithm::Window;
use tidegate_core::{Algorithm, Limit, Timestamp};

use super::gate::Answer;
use super::shard::{self, Shard, Tag};
use super::slots::Words;
use crate::raw;

/// A shard's lock on a cache line of its own. The shard itself is elsewhere, so that the locks take
/// little of the cache.
#[derive(Debug)]
#[repr(align(64))]
pub(super) struct Line {
    pub(super) shard: raw::Versioned<Box<Shard>>,
    /// Whether the last check here was charged: then the next is likely to be, too.
    charges: AtomicBool,
}

impl Line {
    pub(super) fn new(shard: Shard) -> Self {
        Line { shard: raw::Versioned::new(Box::new(shard)), charges: AtomicBool::new(false) }
    }

    /// Decides by reading without the lock, and taking it only to write, if nobody has written
    /// since. A denial changes nothing, so it takes no lock at all, and many threads that are
    /// denied do not disturb each other.
    ///
    /// Where checks are charged, the lock is taken first: a processor can wait for the slot's
    /// memory and go on with what comes next meanwhile, but not past the taking of a lock.
    #[inline(always)]
    pub(super) fn try_check<A: Answer, W: Words>(
        &self,
        limit: &Limit,
        cost: u64,
        now: Timestamp,
        tag_of: impl Fn((u64, u64)) -> Option<Tag>,
        look: impl FnOnce() -> Option<W>,
    ) -> Option<A> {
        // Two ways, so that neither has to ask on which it is.
        if self.charges.load(Ordering::Relaxed) {
            let writing = self.shard.try_write()?;
            self.check_read(Hold::Lock(writing), limit, cost, now, tag_of, look)
        } else {
            let version = self.shard.version();
            self.check_read(Hold::Version(version), limit, cost, now, tag_of, look)
        }
    }

    /// The rest of [`try_check`](Line::try_check): under the lock, or from the version on.
    #[allow(
        clippy::too_many_arguments,
        reason = "it is one step with the one before, written twice by the compiler"
    )]
    #[inline(always)]
    fn check_read<A: Answer, W: Words>(
        &self,
        hold: Hold<'_>,
        limit: &Limit,
        cost: u64,
        now: Timestamp,
        tag_of: impl Fn((u64, u64)) -> Option<Tag>,
        look: impl FnOnce() -> Option<W>,
    ) -> Option<A> {
        let found = look()?;
        let words = found.words();
        let tag = tag_of(words)?;
        let read = Read { found, hold, tag, numbers: tag.unpack(words)? };
        match limit.algorithm() {
            Algorithm::Bucket(bucket) => {
                let mut level = shard::level_of(read.numbers);
                let outcome = tidegate_core::admit(limit, bucket, &mut level, now, cost);
                let changed = (level.units, level.at.as_micros());
                self.write(limit, read, outcome.0, cost, changed)
                    .then(|| A::of(limit, bucket, outcome, cost))
            }
            Algorithm::Window(window) => self.try_window(limit, window, cost, now, read),
            _ => None,
        }
    }

    /// The rest of [`try_check`](Line::try_check) for windows, out of the way of the most usual
    /// limits.
    #[cold]
    #[inline(never)]
    fn try_window<A: Answer, W: Words>(
        &self,
        limit: &Limit,
        window: &Window,
        cost: u64,
        now: Timestamp,
        read: Read<'_, W>,
    ) -> Option<A> {
        let mut count = shard::count_of(read.numbers, window.period);
        let outcome = tidegate_core::admit(limit, window, &mut count, now, cost);
        let changed = (count.used, count.last.as_micros());
        self.write(limit, read, outcome.0, cost, changed)
            .then(|| A::of(limit, window, outcome, cost))
    }

    /// Writes what has changed, if anything has, and says whether what was read still held until
    /// then.
    #[inline(always)]
    fn write<W: Words>(
        &self,
        limit: &Limit,
        read: Read<'_, W>,
        is_allowed: bool,
        cost: u64,
        changed: (u64, u64),
    ) -> bool {
        let Read { found, hold, tag, .. } = read;
        // What is denied is not charged, unless the limit counts that, too; and looking costs
        // nothing.
        let is_charged = (is_allowed || limit.counts_rejected()) && cost > 0;
        match hold {
            Hold::Lock(_writing) => {
                if is_charged {
                    found.set_words(tag.pack(changed));
                } else {
                    self.charges.store(false, Ordering::Relaxed);
                }
                true
            }
            Hold::Version(version) if !is_charged => self.shard.is_still(version),
            Hold::Version(version) => {
                let Some(_writing) = self.shard.write_if_still(version) else { return false };
                found.set_words(tag.pack(changed));
                self.charges.store(true, Ordering::Relaxed);
                true
            }
        }
    }
}

/// What makes sure of what was read: the lock, or that it has this version still.
enum Hold<'a> {
    Lock(raw::Writing<'a>),
    Version(u64),
}

/// What was read of a key.
struct Read<'a, W> {
    found: W,
    hold: Hold<'a>,
    tag: Tag,
    numbers: (u64, u64),
}
