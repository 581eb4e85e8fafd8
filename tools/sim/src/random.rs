//! The random numbers of a run, all from one seed.

/// A random generator. Each part of a simulation has its own, so that one part drawing more numbers
/// changes nothing for another.
#[derive(Clone, Debug)]
pub struct Random(tidegate_trace::Random);

impl Random {
    /// The generator of this seed for this use.
    pub fn new(seed: u64, of: &str) -> Self {
        let start = of.bytes().fold(seed, |sum, byte| sum.rotate_left(9) ^ u64::from(byte));
        Random(tidegate_trace::Random(tidegate_trace::Random(start).next()))
    }

    pub fn number(&mut self) -> u64 {
        self.0.next()
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
