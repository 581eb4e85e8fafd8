//! Random numbers: probe times, lease ids and the secret of the fingerprints.

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};

use tidegate_core::Id;

/// A SplitMix64 generator that tasks share; from a seed it repeats its sequence.
pub(super) struct Random(AtomicU64);

impl Random {
    pub(super) fn of_seed(seed: u64) -> Self {
        Random(AtomicU64::new(seed))
    }

    pub(super) fn number(&self) -> u64 {
        let mut z = self.0.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// An id that is not zero.
    pub(super) fn id(&self) -> Id {
        Id(self.number() | 1)
    }
}

/// Seeded by the operating system.
impl Default for Random {
    fn default() -> Self {
        Self::of_seed(RandomState::new().hash_one(0_u8))
    }
}
