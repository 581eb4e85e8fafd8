//! A shard behind its lock, and the fast path for one key.

use std::sync::atomic::{AtomicBool, Ordering};

use tidegate_core::algorithm::Window;
use tidegate_core::{Algorithm, Limit, Timestamp};

use super::packed::{self, LimitTag};
use super::prepared::CheckResult;
use super::shard::Shard;
use super::slots::Words;
use crate::raw;

/// A shard's lock, on a cache line of its own. The shard is boxed, so that the locks take little
/// cache.
#[derive(Debug)]
#[repr(align(64))]
pub(super) struct ShardLine {
    pub(super) shard: raw::Versioned<Box<Shard>>,
    /// Whether the last check was charged: the next one is then likely to be charged, too.
    charges: AtomicBool,
}

impl ShardLine {
    pub(super) fn new(shard: Shard) -> Self {
        ShardLine { shard: raw::Versioned::new(Box::new(shard)), charges: AtomicBool::new(false) }
    }

    /// Decides by a read without the lock, and takes the lock only to write, if no other thread has
    /// written since. A denial changes nothing and takes no lock, so denied threads do not disturb
    /// each other.
    ///
    /// Where checks are usually charged, the lock is taken first: a processor can continue while it
    /// waits for the slot's memory, but not past a lock that is taken after it.
    ///
    /// Returns nothing if the decision needs the lock: the key is not found or another limit's, its
    /// state is not packed, or another thread was writing.
    #[inline(always)]
    pub(super) fn try_check<R: CheckResult, W: Words>(
        &self,
        limit: &Limit,
        cost: u64,
        now: Timestamp,
        tag_of: impl Fn((u64, u64)) -> Option<LimitTag>,
        look: impl FnOnce() -> Option<W>,
    ) -> Option<R> {
        // Two calls, so that neither has a branch on the kind of hold.
        if self.charges.load(Ordering::Relaxed) {
            let writing = self.shard.try_write()?;
            self.check_read(Hold::Lock(writing), limit, cost, now, tag_of, look)
        } else {
            let version = self.shard.version();
            self.check_read(Hold::Version(version), limit, cost, now, tag_of, look)
        }
    }

    /// The rest of [`try_check`](ShardLine::try_check): under the lock, or from the version on.
    #[allow(
        clippy::too_many_arguments,
        reason = "it is one step with the one before, compiled twice"
    )]
    #[inline(always)]
    fn check_read<R: CheckResult, W: Words>(
        &self,
        hold: Hold<'_>,
        limit: &Limit,
        cost: u64,
        now: Timestamp,
        tag_of: impl Fn((u64, u64)) -> Option<LimitTag>,
        look: impl FnOnce() -> Option<W>,
    ) -> Option<R> {
        let found = look()?;
        let words = found.words();
        let tag = tag_of(words)?;
        let read = SlotReading { found, hold, tag, numbers: tag.unpack(words)? };
        match limit.algorithm() {
            Algorithm::Bucket(bucket) => {
                let mut level = packed::level_of(read.numbers);
                let outcome = tidegate_core::admit(limit, bucket, &mut level, now, cost);
                let changed = (level.units, level.at.as_micros());
                self.write(limit, read, outcome.0, cost, changed)
                    .then(|| R::from_outcome(limit, bucket, outcome, cost))
            }
            Algorithm::Window(window) => self.try_window(limit, window, cost, now, read),
            _ => None,
        }
    }

    /// The rest of [`try_check`](ShardLine::try_check) for windows, kept out of the code for
    /// buckets.
    #[cold]
    #[inline(never)]
    fn try_window<R: CheckResult, W: Words>(
        &self,
        limit: &Limit,
        window: &Window,
        cost: u64,
        now: Timestamp,
        read: SlotReading<'_, W>,
    ) -> Option<R> {
        let mut count = packed::count_of(read.numbers, window.period);
        let outcome = tidegate_core::admit(limit, window, &mut count, now, cost);
        let changed = (count.used, count.last.as_micros());
        self.write(limit, read, outcome.0, cost, changed)
            .then(|| R::from_outcome(limit, window, outcome, cost))
    }

    /// Writes the change, if there is one. Returns whether the slot had not changed since it was
    /// read.
    #[inline(always)]
    fn write<W: Words>(
        &self,
        limit: &Limit,
        read: SlotReading<'_, W>,
        is_allowed: bool,
        cost: u64,
        changed: (u64, u64),
    ) -> bool {
        let SlotReading { found, hold, tag, .. } = read;
        // A denial is charged only by a limit that counts rejected requests, and a cost of 0 never.
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

/// What makes a read valid: the lock, or an unchanged version.
enum Hold<'a> {
    Lock(raw::Writing<'a>),
    Version(u64),
}

/// The slot of a key, and what it holds.
struct SlotReading<'a, W> {
    found: W,
    hold: Hold<'a>,
    tag: LimitTag,
    numbers: (u64, u64),
}
