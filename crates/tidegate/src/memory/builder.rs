//! Settings of a memory store.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::Arc;

use super::Memory;
use super::inner::{MAX_SHARDS, MemoryInner};
use crate::clock::Clock;
use crate::store::Overflow;

/// The default maximum number of keys.
pub const DEFAULT_MAX_KEYS: usize = 10_000_000;
/// The number of keys from which on another shard is useful.
const KEYS_PER_SHARD: usize = 1024;
/// The number of bytes from which on another shard is useful.
const BYTES_PER_SHARD: usize = 256 << 10;

/// Settings of a [`Memory`].
///
/// ```
/// use tidegate::{ManualClock, Memory};
/// let builder = Memory::builder().max_keys(100_000).max_bytes(64 << 20);
/// let memory = builder.clock(ManualClock::new()).build();
/// assert!(memory.is_empty());
/// ```
#[derive(Clone, Debug)]
#[must_use = "there is no store until `build` is called"]
pub struct MemoryBuilder {
    pub(super) clock: Clock,
    max_keys: usize,
    max_bytes: usize,
    overflow: Overflow,
}

impl MemoryBuilder {
    pub(super) fn new() -> Self {
        let (clock, overflow) = (Clock::default(), Overflow::default());
        MemoryBuilder { clock, max_keys: DEFAULT_MAX_KEYS, max_bytes: usize::MAX, overflow }
    }

    /// Sets the clock by which the store decides; the default is the system's.
    pub fn clock(mut self, clock: impl Into<Clock>) -> Self {
        self.clock = clock.into();
        self
    }

    /// Sets the maximum number of keys, at least 1; the default is ten million. A key with several
    /// limits counts once for each limit.
    ///
    /// The bound is hard. Each shard has its part of it, so a few per cent may be free when the
    /// first new keys overflow. It bounds keys, not bytes: a key under `log` or `concurrent` has an
    /// entry for each hit or lease that still counts, at most 200 000; see
    /// [`max_bytes`](Self::max_bytes).
    pub fn max_keys(mut self, keys: usize) -> Self {
        self.max_keys = keys.max(1);
        self
    }

    /// Sets the maximum number of bytes for keys and their state; there is no bound by default.
    ///
    /// When the bound is reached, idle keys are removed. If that is not enough, new keys
    /// [overflow](Self::overflow), and so do charges that would enlarge the state of a key: a hit
    /// under `log`, a lease under `concurrent`, another step of a `sliding`, a charge with an id.
    /// With [`Overflow::SharedBucket`] such charges are denied, because their state cannot be kept
    /// elsewhere. Other keys stay exact.
    ///
    /// The bound is on allocated bytes. It can be exceeded by 4 MiB, and, while a list of many
    /// thousand hits or leases grows, by the size of that list.
    pub fn max_bytes(mut self, bytes: usize) -> Self {
        self.max_bytes = bytes;
        self
    }

    /// Sets what happens to new keys when the store is full of keys in use. A charge may have a
    /// [policy](crate::store::Policy) of its own.
    pub fn overflow(mut self, overflow: Overflow) -> Self {
        self.overflow = overflow;
        self
    }

    /// Builds the store, empty.
    pub fn build(self) -> Memory {
        let seed = || RandomState::new().build_hasher().finish();
        self.build_with((seed(), seed()))
    }

    /// Builds the store with these seeds of the hash.
    pub(super) fn build_with(self, seeds: (u64, u64)) -> Memory {
        let shards = (self.max_keys / KEYS_PER_SHARD)
            .min(self.max_bytes / BYTES_PER_SHARD)
            .clamp(1, MAX_SHARDS);
        let shards = 1 << shards.ilog2();
        let MemoryBuilder { clock, max_keys, max_bytes, overflow } = self;
        let inner = MemoryInner::new(shards, seeds, clock, max_keys / shards, max_bytes, overflow);
        Memory { inner: Arc::new(inner) }
    }
}
