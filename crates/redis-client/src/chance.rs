//! Random numbers for jitter and for the order of queries; reproducible with a seed.

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A source of random numbers (SplitMix64). Clones share its state.
#[derive(Clone, Debug)]
pub struct Chance(Arc<AtomicU64>);

impl Chance {
    /// The same numbers for the same seed.
    pub fn of_seed(seed: u64) -> Self {
        Chance(Arc::new(AtomicU64::new(seed)))
    }

    /// A random number.
    pub fn number(&self) -> u64 {
        let mut z = self.0.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `bound`, or 0.
    pub(super) fn below(&self, bound: usize) -> usize {
        usize::try_from(self.number() % u64::try_from(bound.max(1)).unwrap_or(1)).unwrap_or(0)
    }

    /// A random duration up to `most`.
    pub(super) fn up_to(&self, most: Duration) -> Duration {
        most / (1 << 16) * u32::try_from(self.below(1 << 16)).unwrap_or(0)
    }
}

/// Seeded at random.
impl Default for Chance {
    fn default() -> Self {
        Self::of_seed(RandomState::new().hash_one(0_u8))
    }
}
