//! The memory store: exact, bounded, fast, and inside the process.
//!
//! Keys are spread over shards, each behind its own lock, and identified by a keyed 128-bit hash.
//! The store does not keep their bytes, and without the secret of the hash a client cannot produce
//! collisions. There is no background task: an idle key, whose state is the same as that of a new
//! one, is removed when its memory is needed or when it is used again.

mod arena;
mod builder;
mod hash;
mod inner;
mod interned;
mod overflow;
mod packed;
mod pinned;
pub(crate) mod prepared;
mod room;
mod shard;
mod shard_line;
mod slots;
mod snapshot;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use tidegate_core::{Decision, Limit, Verdict};

use crate::clock::Clock;
pub use crate::store::Overflow;
use crate::store::{Check, Deciding, InvalidCheck, Scope, Store};
pub use builder::{DEFAULT_MAX_KEYS, MemoryBuilder};
use inner::MemoryInner;
#[doc(hidden)]
pub use pinned::ReservedLimits;
use prepared::Prepared;
use shard::Shard;
use shard_line::ShardLine;
pub use snapshot::{LoadError, Loaded, Saved};

/// A store that keeps state in this process. Clones share their state.
///
/// It decides immediately and cannot fail, so besides being a [`Store`] it can be called directly,
/// without a runtime:
/// ```
/// use tidegate::{Limit, Memory};
/// let memory = Memory::new();
/// let limit: Limit = "10/s".parse()?;
/// let verdict = memory.check("user:7", &limit, 1);
/// assert!(verdict.allowed);
/// assert_eq!(verdict.remaining, 9);
/// # Ok::<(), tidegate::ParseError>(())
/// ```
#[derive(Clone)]
pub struct Memory {
    inner: Arc<MemoryInner>,
}

/// Shows the settings, never the keys.
impl std::fmt::Debug for Memory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Memory")
            .field("clock", &self.inner.clock)
            .field("max_keys", &self.inner.max_keys())
            .field("max_bytes", &self.inner.max_bytes)
            .field("overflow", &self.inner.overflow)
            .finish_non_exhaustive()
    }
}

impl Default for Memory {
    fn default() -> Self {
        Self::new()
    }
}

impl Memory {
    /// Creates a store of up to ten million keys on the system's clock.
    pub fn new() -> Self {
        Self::builder().build()
    }

    /// Starts a store with other settings.
    pub fn builder() -> MemoryBuilder {
        MemoryBuilder::new()
    }

    /// The clock by which the store decides.
    pub fn clock(&self) -> &Clock {
        &self.inner.clock
    }

    /// The number of keys, including idle keys that have not been removed.
    pub fn len(&self) -> usize {
        self.inner.in_use().iter().map(|line| line.shard.lock().len()).sum()
    }

    /// Whether the store has no keys.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The bytes that are allocated for keys and their state.
    pub fn allocated_bytes(&self) -> usize {
        let shards = self.inner.in_use().len() * (size_of::<ShardLine>() + size_of::<Shard>());
        shards + self.inner.bytes.load(Ordering::Relaxed)
    }

    /// The maximum number of bytes for keys and their state.
    pub fn max_bytes(&self) -> usize {
        self.inner.max_bytes
    }

    /// The number of charges that found the store full and were decided by its [`Overflow`].
    pub fn without_room(&self) -> u64 {
        self.inner.without_room.load(Ordering::Relaxed)
    }

    /// Removes all idle keys now. This is never necessary; it returns their memory sooner.
    pub fn reclaim(&self) {
        self.inner.reclaim();
    }

    /// Prepares the store for many checks under one limit and in one scope.
    pub fn prepare(&self, scope: &Scope<'_>, limit: &Limit) -> Prepared {
        Prepared::new(self, scope, limit)
    }

    /// Keeps the compact format for keys under these limits while the returned value lives,
    /// whatever other limits are in use.
    ///
    /// A bucket or a window takes a slot of 32 bytes that refers to its limit by number. At most
    /// 16 383 limits that are not reserved have a number at a time, fewer with small
    /// [`max_bytes`](MemoryBuilder::max_bytes); keys under other limits take about five times the
    /// memory.
    ///
    /// Hidden because only the server of this workspace has both limits of its own and limits that
    /// clients bring.
    #[doc(hidden)]
    pub fn reserve_limits<'a>(
        &self,
        limits: impl IntoIterator<Item = &'a Limit>,
    ) -> ReservedLimits {
        ReservedLimits::new(self, limits)
    }

    /// Checks one key under one limit, as a [`Check`] with one charge does. A cost of 0 takes
    /// nothing.
    ///
    /// Under a `concurrent` limit this takes a lease without an id, which ends by its ttl. A lease
    /// that is to be released needs a [`Check`] with an [id](Check::with_id), or
    /// [`Limiter::lease`](crate::Limiter::lease).
    #[must_use = "continue with the request only if it is allowed"]
    #[inline]
    pub fn check<K: AsRef<[u8]> + ?Sized>(&self, key: &K, limit: &Limit, cost: u64) -> Verdict {
        self.inner.check_key(key.as_ref(), limit, cost)
    }

    /// Checks one key under one limit and returns whether it is allowed. Slightly faster than
    /// [`check`](Memory::check).
    #[must_use = "continue with the request only if it is allowed"]
    #[inline]
    pub fn allows<K: AsRef<[u8]> + ?Sized>(&self, key: &K, limit: &Limit, cost: u64) -> bool {
        self.inner.check_key(key.as_ref(), limit, cost)
    }

    /// Decides a check of any kind.
    ///
    /// # Errors
    /// If no store could decide it: it has no charges, too many, or a key that is too long.
    pub fn decide(&self, check: &Check<'_>) -> Result<Decision, InvalidCheck> {
        check.validate()?;
        let now = self.inner.clock.now();
        Ok(match check.plain_charge() {
            Some(charge) => self.inner.check_charge(charge, now),
            None => self.inner.decide(check, now),
        })
    }
}

impl Store for Memory {
    fn decide<'a>(&'a self, check: &'a Check<'a>) -> Deciding<'a> {
        Box::pin(async move { Ok(Memory::decide(self, check)?) })
    }
}
