//! What keys are known by: 127 bits, by a function that each store draws at random from a family of them.
//!
//! A key is words of 64 bits, each place has a random factor, each length a random number to begin with, and the hash is the sum of the products
//! modulo the prime 2^127 - 1. Two different keys have the same hash under at most one in 2^111 of the functions, whoever chose the keys: in a
//! field there is only one factor that could make up for the difference. That is a theorem, not a hope, and costs two multiplications for a word
//! (`docs/decisions/0019-a-hash-with-a-proof.md`). It holds for keys that were chosen without knowing the factors, and nobody is told hashes. What can
//! be seen, by measuring time, is where a key stands in the table, so that half goes through one more step, which is not linear.

use std::hash::Hasher;

use siphasher::sip128::{Hasher128, SipHasher13};

/// Keys of up to so many bytes have a factor for every word.
const LONGEST: usize = 1024;
/// Two more words for the name of a rule: its length, and what fills its last word up.
const PLACES: usize = LONGEST / 8 + 3;
/// Keys shorter than this have a number to begin with of their own. With the longer ones, their length is one more word.
const SHORT: usize = 64;
/// The halves of a factor are below 2^56 and 2^55, so that there is room to add all the products up before anything is carried, and what is carried in
/// the end is one word.
const LOW: u64 = (1 << 56) - 1;
const HIGH: u64 = (1 << 55) - 1;

/// A function of the family.
#[derive(Clone, Debug)]
pub(super) struct Hashing {
    mask: u64,
    odd: u64,
    /// What the sums begin with, by the length of the key.
    starts: Starts,
    /// For each place.
    factors: [Factor; PLACES],
    /// What tells longer keys, those of rules and those that were shortened from all others.
    long: Factor,
    named: Factor,
    shortened: Factor,
    /// Draws all of the above, and shortens what is too long.
    seed: SipHasher13,
}

#[derive(Clone, Copy, Debug)]
struct Factor {
    low: u64,
    high: u64,
}

/// Factors by number, their halves apart: so a number is all it takes to address one.
#[derive(Clone, Debug)]
struct Starts {
    low: [u64; SHORT],
    high: [u64; SHORT],
}

impl Starts {
    #[inline(always)]
    fn get(&self, number: usize) -> Option<Factor> {
        Some(Factor { low: *self.low.get(number)?, high: *self.high.get(number)? })
    }
}

/// The name of a rule, and the sum of its words.
#[derive(Clone, Debug)]
pub(super) struct Named {
    name: Box<str>,
    sum: Sum,
}

/// The name of a rule and a key may have so many bytes together to have a factor for every word.
const LONGEST_NAMED: usize = LONGEST - 8;

/// One word that tells where the name ends and the key begins.
#[inline(always)]
fn lengths(name: &str, key: &[u8]) -> u64 {
    (name.len() as u64) << 32 | key.len() as u64
}

/// How many places are taken by the lengths and the name.
#[inline(always)]
fn places_of(name: &str) -> usize {
    2 + name.len() / 8
}

/// A sum of products: `high` counts 2^64 times.
#[derive(Clone, Copy, Debug)]
struct Sum {
    low: u128,
    high: u128,
}

impl Sum {
    #[inline(always)]
    fn from(start: Factor) -> Self {
        Sum { low: u128::from(start.high) << 64 | u128::from(start.low), high: 0 }
    }

    #[inline(always)]
    fn add(&mut self, word: u64, factor: &Factor) {
        self.low = self.low.wrapping_add(u128::from(word) * u128::from(factor.low));
        self.high = self.high.wrapping_add(u128::from(word) * u128::from(factor.high));
    }
}

impl Hashing {
    /// The function that these numbers choose.
    pub(super) fn new(k0: u64, k1: u64) -> Self {
        let seed = SipHasher13::new_with_keys(k0, k1);
        let mut drawn = 0_u64;
        let mut factor = || {
            drawn += 1;
            let (low, high) = halves(seed.hash(&drawn.to_le_bytes()).as_u128());
            Factor { low: low & LOW, high: high & HIGH }
        };
        let starts: [Factor; SHORT] = std::array::from_fn(|_| factor());
        let starts = Starts { low: starts.map(|start| start.low), high: starts.map(|start| start.high) };
        let factors = std::array::from_fn(|_| factor());
        let (long, named, shortened) = (factor(), factor(), factor());
        Hashing { mask: factor().low << 7, odd: factor().low << 8 | 1, starts, factors, long, named, shortened, seed }
    }

    /// Both halves of the hash of `key`.
    #[inline(always)]
    pub(super) fn hash(&self, key: &[u8]) -> (u64, u64) {
        match (key.first_chunk::<8>(), key.last_chunk::<8>(), self.starts.get(key.len())) {
            // Most keys are two words, which may overlap.
            (Some(first), Some(last), Some(start)) if key.len() <= 16 => {
                let mut sum = Sum::from(start);
                sum.add(u64::from_le_bytes(*first), &self.factors[0]);
                sum.add(u64::from_le_bytes(*last), &self.factors[1]);
                self.finish(sum)
            }
            _ => self.hash_other(key),
        }
    }

    /// Of a key of any length.
    #[cold]
    #[inline(never)]
    fn hash_other(&self, key: &[u8]) -> (u64, u64) {
        if let Some(start) = self.starts.get(key.len()) {
            return self.finish(self.words(Sum::from(start), key, 0));
        }
        if key.len() > LONGEST {
            return self.hash_shortened(&[key]);
        }
        let mut sum = Sum::from(self.long);
        sum.add(key.len() as u64, &self.factors[0]);
        self.finish(self.words(sum, key, 1))
    }

    /// The same for a key of a rule.
    pub(super) fn hash_named(&self, name: &str, key: &[u8]) -> (u64, u64) {
        let lengths = lengths(name, key);
        if name.len() + key.len() > LONGEST_NAMED {
            return self.hash_shortened(&[&lengths.to_le_bytes(), name.as_bytes(), key]);
        }
        let mut sum = Sum::from(self.named);
        sum.add(lengths, &self.factors[0]);
        let sum = self.words(sum, name.as_bytes(), 1);
        self.finish(self.words(sum, key, places_of(name)))
    }

    /// What keys of this rule have in common, so that it need not be computed for each.
    pub(super) fn begin_named(&self, name: &str) -> Named {
        let fits = name.len() <= LONGEST_NAMED;
        let sum = if fits { self.words(Sum::from(self.named), name.as_bytes(), 1) } else { Sum::from(self.named) };
        Named { name: name.into(), sum }
    }

    /// As [`hash_named`](Hashing::hash_named), of which the first part is done.
    #[inline(always)]
    pub(super) fn hash_begun(&self, begun: &Named, key: &[u8]) -> (u64, u64) {
        let (name, mut sum) = (&begun.name, begun.sum);
        if name.len() + key.len() > LONGEST_NAMED {
            return self.hash_named(name, key);
        }
        sum.add(lengths(name, key), &self.factors[0]);
        self.finish(self.words(sum, key, places_of(name)))
    }

    /// What is too long is shortened first, by a function of which nobody knows two keys that it takes for one.
    #[cold]
    fn hash_shortened(&self, pieces: &[&[u8]]) -> (u64, u64) {
        let mut hasher = self.seed;
        pieces.iter().for_each(|piece| hasher.write(piece));
        let (h1, h2) = halves(hasher.finish128().as_u128());
        let mut sum = Sum::from(self.shortened);
        sum.add(h1, &self.factors[0]);
        sum.add(h2, &self.factors[1]);
        self.finish(sum)
    }

    /// Adds the words of `bytes` from `place` on, at most one more than there are whole ones. Bytes of one length are told apart by them.
    #[inline(always)]
    fn words(&self, mut sum: Sum, bytes: &[u8], place: usize) -> Sum {
        let factors = &self.factors[place..];
        let (Some(first), Some(last)) = (bytes.first_chunk::<8>(), bytes.last_chunk::<8>()) else {
            sum.add(few(bytes), &factors[0]);
            return sum;
        };
        sum.add(u64::from_le_bytes(*first), &factors[0]);
        sum.add(u64::from_le_bytes(*last), &factors[1]); // the two may overlap
        if bytes.len() > 16 {
            let (words, _) = bytes[8..bytes.len() - 1].as_chunks::<8>();
            for (word, factor) in words.iter().zip(&factors[2..]) {
                sum.add(u64::from_le_bytes(*word), factor);
            }
        }
        sum
    }

    /// The sum modulo 2^127 - 1, as 64 and 63 bits. The first half is mixed with the second in a way that could be undone, so together they still tell
    /// keys apart as well.
    #[inline(always)]
    fn finish(&self, sum: Sum) -> (u64, u64) {
        let (lowest, carried) = halves(sum.low);
        let above = sum.high.wrapping_add(u128::from(carried));
        let rest = (above << 65 >> 1).wrapping_add(u128::from(lowest));
        let (carry, _) = halves(above >> 63); // `above` is below 2^127
        let (first, second) = halves(rest.wrapping_add(u128::from(carry)));
        let (low, high) = halves(u128::from(second ^ self.mask) * u128::from(self.odd));
        (first ^ low ^ high, second)
    }
}

/// The lower and the upper half.
#[inline(always)]
#[allow(clippy::cast_possible_truncation, reason = "the lower half is what remains")]
fn halves(number: u128) -> (u64, u64) {
    (number as u64, (number >> 64) as u64)
}

/// Fewer than eight bytes.
#[inline(always)]
fn few(bytes: &[u8]) -> u64 {
    if let (Some(first), Some(last)) = (bytes.first_chunk::<4>(), bytes.last_chunk::<4>()) {
        return u64::from(u32::from_le_bytes(*first)) | u64::from(u32::from_le_bytes(*last)) << 32;
    }
    bytes.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte))
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeSet, HashMap};

    use super::*;

    fn hashing() -> Hashing {
        Hashing::new(0x0706_0504_0302_0100, 0x0f0e_0d0c_0b0a_0908)
    }

    /// The definition, word by word and one remainder after the other: what the fast one must agree with.
    fn by_definition(hashing: &Hashing, key: &[u8]) -> (u64, u64) {
        const PRIME: u128 = (1 << 127) - 1;
        let number = |factor: Factor| u128::from(factor.high) << 64 | u128::from(factor.low);
        let times = |word: u64, factor: Factor| {
            (0..64).rev().fold(0, |product: u128, bit| {
                (2 * product % PRIME + if word >> bit & 1 == 1 { number(factor) } else { 0 }) % PRIME
            })
        };
        let mut words = Vec::new();
        let start = hashing.starts.get(key.len()).unwrap_or_else(|| {
            words.push(key.len() as u64);
            hashing.long
        });
        if key.len() < 8 {
            words.push(few(key));
        } else {
            let places = [0, key.len() - 8].into_iter().chain((8..key.len() - 8).step_by(8));
            words.extend(places.map(|place| u64::from_le_bytes(key[place..place + 8].try_into().unwrap())));
        }
        let sum = words
            .iter()
            .zip(hashing.factors)
            .fold(number(start), |sum, (word, factor)| (sum + times(*word, factor)) % PRIME);
        let (first, second) = halves(sum);
        let (low, high) = halves(u128::from(second ^ hashing.mask) * u128::from(hashing.odd));
        (first ^ low ^ high, second)
    }

    #[test]
    fn agrees_with_the_definition_for_keys_of_every_length() {
        let hashing = hashing();
        let mut key = Vec::new();
        for length in 0..=LONGEST {
            assert_eq!(hashing.hash(&key), by_definition(&hashing, &key), "{length} bytes");
            key.push((length.wrapping_mul(0x9e37_79b9) >> 24 & 0xff).try_into().unwrap());
        }
    }

    /// The most that can be added up still has room.
    #[test]
    fn the_greatest_factors_agree_with_the_definition_for_the_greatest_keys() {
        let greatest = Factor { low: LOW, high: HIGH };
        let mut hashing = hashing();
        hashing.factors = [greatest; PLACES];
        (hashing.long, hashing.named) = (greatest, greatest);
        for length in [8, 15, 16, SHORT, LONGEST - 1, LONGEST] {
            let key = vec![u8::MAX; length];
            assert_eq!(hashing.hash(&key), by_definition(&hashing, &key), "{length} bytes");
        }
        let all = (0..PLACES).fold(Sum::from(greatest), |mut sum, _| {
            sum.add(u64::MAX, &greatest);
            sum
        });
        let (_, carried) = halves(all.low);
        assert!(all.high.checked_add(u128::from(carried)).is_some_and(|above| above >> 127 == 0));
    }

    #[test]
    fn keys_that_look_alike_are_told_apart() {
        let hashing = hashing();
        let mut seen = HashMap::new();
        let mut see = |hash: (u64, u64), what: String| {
            // Each half alone tells a few thousand keys apart.
            for half in [(hash.0, 0), (0, hash.1)] {
                if let Some(other) = seen.insert(half, what.clone()) {
                    panic!("{what} and {other} have the hash {half:?}");
                }
            }
        };
        for length in 0..=2 * LONGEST {
            see(hashing.hash(&vec![0; length]), format!("{length} zeroes"));
            let mut one = vec![0; length];
            one.push(1);
            see(hashing.hash(&one), format!("{length} zeroes and a one"));
        }
        // Wherever the border between name and key is.
        let text = "a".repeat(LONGEST + 40);
        for length in 1..text.len() {
            let cuts: BTreeSet<usize> = [0, 1, 7, 8, 9, 16, 17, length / 2, length].into();
            for cut in cuts.range(..=length) {
                let (name, key) = text[..length].split_at(*cut);
                let hash = hashing.hash_named(name, key.as_bytes());
                assert_eq!(hashing.hash_begun(&hashing.begin_named(name), key.as_bytes()), hash, "{cut} of {length}");
                see(hash, format!("a name of {cut} and a key of {}", key.len()));
            }
        }
    }

    #[test]
    fn another_seed_is_another_function() {
        let (one, other) = (Hashing::new(1, 2), Hashing::new(1, 3));
        for key in ["", "user:7", "a key of more than one word"] {
            assert_ne!(one.hash(key.as_bytes()), other.hash(key.as_bytes()));
        }
    }

    /// Keys that count up, keys that differ in one bit, keys of one letter: all are spread as evenly as chance would.
    #[test]
    fn the_half_that_chooses_the_place_is_even_whatever_the_keys_look_like() {
        const KEYS: u32 = 1 << 16;
        const BINS: usize = 256;
        type Named = (&'static str, fn(u32) -> Vec<u8>);
        let kinds: [Named; 5] = [
            ("counting", |n| format!("user:{n:08}").into_bytes()),
            ("binary", |n| n.to_le_bytes().to_vec()),
            ("high bits", |n| (u64::from(n) << 48).to_le_bytes().to_vec()),
            ("one letter", |n| {
                vec![b'a'; n as usize % LONGEST].into_iter().chain(n.to_be_bytes()).take(LONGEST).collect()
            }),
            ("addresses", |n| format!("10.{}.{}.{}", n >> 16, n >> 8 & 255, n & 255).into_bytes()),
        ];
        let seeds: [(u64, u64); 3] = [(1, 2), (3, 4), (5, 6)];
        for (kind, key) in kinds {
            for (k0, k1) in seeds {
                let hashing = Hashing::new(k0, k1);
                let mut bins = [[0_u32; BINS]; 8];
                for n in 0..KEYS {
                    let (first, _) = hashing.hash(&key(n));
                    bins.iter_mut().zip(first.to_le_bytes()).for_each(|(bins, byte)| bins[usize::from(byte)] += 1);
                }
                let expected = f64::from(KEYS) / BINS as f64;
                for (byte, bins) in bins.iter().enumerate() {
                    let chi: f64 = bins.iter().map(|n| (f64::from(*n) - expected).powi(2) / expected).sum();
                    // 255 degrees of freedom: mean 255, deviation 22.6.
                    assert!(chi < 255.0 + 6.0 * 22.6, "{kind}, seed {k0}, byte {byte}: {chi}");
                }
            }
        }
    }
}
