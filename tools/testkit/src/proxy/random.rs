//! Chance that can be had again: SplitMix64.

pub(super) struct Random(u64);

impl Random {
    /// The same for the same seed and stream, and unlike that of any other.
    pub(super) fn new(seed: u64, stream: u64) -> Random {
        let start = Random(seed).next().wrapping_add(stream);
        Random(Random(start).next())
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `end`, which is not 0. Every number is as likely as far as a test can tell.
    pub(super) fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }
}
