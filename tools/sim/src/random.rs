//! Chance, all of it from one seed.

/// A generator of numbers. Parts of a simulation have generators of their own, so that what one
/// draws changes nothing for another.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// The generator of this seed for this use.
    pub fn new(seed: u64, of: &str) -> Self {
        let mut random =
            Random(of.bytes().fold(seed, |sum, byte| sum.rotate_left(9) ^ u64::from(byte)));
        Random(random.number())
    }

    pub fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Below `bound`.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.number() % bound.max(1)
    }

    /// From `least` to `most`, both included.
    pub fn between(&mut self, least: u64, most: u64) -> u64 {
        least + self.below(most - least + 1)
    }

    /// Once in `times`.
    pub fn once_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }

    pub fn pick<T: Clone>(&mut self, of: &[T]) -> T {
        let at = usize::try_from(self.below(of.len() as u64)).unwrap_or(0);
        of[at].clone()
    }

    /// About `mean`, as the time between events that know nothing of each other.
    pub fn around(&mut self, mean: u64) -> u64 {
        // The sum of two is close enough to an exponential, and has no logarithm.
        let (a, b) = (self.below(mean + 1), self.below(mean + 1));
        if self.once_in(4) { a + b + mean } else { (a + b) / 2 }
    }
}
