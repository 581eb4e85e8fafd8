//! The hash of keys: 128 bits, by a function that each store draws at random from a family.
//!
//! A key is a sequence of 16-byte blocks. Each position has four random round keys, and each length
//! has a random number. The hash is the exclusive or of that number and of all blocks, each after
//! four rounds of AES under the keys of its position. Two different keys collide under at most one
//! in 2^113 of the functions; two keys of equal length up to 16 bytes never collide, because rounds
//! are invertible. That is proved, and costs four instructions per block
//! (`docs/decisions/0032-a-hash-of-aes-rounds.md`). It holds for keys that are chosen without
//! knowledge of the function; no interface shows hashes.

use std::hash::Hasher;

use aes::hazmat::cipher_round;
use siphasher::sip128::{Hasher128, SipHasher13};

use crate::raw::Aes;

/// The longest key whose blocks each have a position.
const LONGEST: usize = 1024;
/// Two more positions for the name of a rule: for the lengths, and for the padding.
const PLACES: usize = LONGEST / 16 + 3;
/// Keys shorter than this have a number for their length. The length of longer ones is another
/// block.
const SHORT: usize = 64;

/// The lower and upper 64 bits of 128.
type Halves = (u64, u64);

/// The keys of a position: added before the first round and after all but the last.
type RoundKeys = [u128; 4];

/// A function of the family.
#[derive(Clone, Debug)]
pub(super) struct Hashing {
    /// The round keys of each position.
    keys: [RoundKeys; PLACES],
    /// The number that is added last, by the length of the key.
    ends: [u128; SHORT],
    /// That number for longer keys, keys of rules and shortened keys.
    long: u128,
    named: u128,
    shortened: u128,
    /// The AES instructions, if the processor has them.
    aes: Option<Aes>,
    /// Draws all of the above, and shortens long keys.
    seed: SipHasher13,
}

/// The name of a rule, with the sum of its blocks.
#[derive(Clone, Debug)]
pub(super) struct Named {
    name: Box<str>,
    sum: Halves,
}

/// The longest name and key of a rule whose blocks each have a position.
const LONGEST_NAMED: usize = LONGEST - 16;

/// A block with the lengths of name and key.
#[inline(always)]
fn lengths(name: &str, key: &[u8]) -> Halves {
    (name.len() as u64, key.len() as u64)
}

/// The number of positions for the lengths and the name.
#[inline(always)]
fn places_of(name: &str) -> usize {
    1 + name.len().div_ceil(16).max(1)
}

impl Hashing {
    /// The function that these seeds select.
    pub(super) fn new(k0: u64, k1: u64) -> Self {
        let seed = SipHasher13::new_with_keys(k0, k1);
        let mut drawn = 0_u64;
        let mut draw = || {
            drawn += 1;
            seed.hash(&drawn.to_le_bytes()).as_u128()
        };
        let keys = std::array::from_fn(|_| std::array::from_fn(|_| draw()));
        let ends = std::array::from_fn(|_| draw());
        let (long, named, shortened) = (draw(), draw(), draw());
        Hashing { keys, ends, long, named, shortened, aes: Aes::of_this_processor(), seed }
    }

    /// Both halves of the hash of `key`.
    #[inline(always)]
    pub(super) fn hash(&self, key: &[u8]) -> Halves {
        match (key.first_chunk::<8>(), key.last_chunk::<8>()) {
            // A short key is one block of two halves, which may overlap.
            (Some(first), Some(last)) if key.len() <= 16 => {
                let block = (u64::from_le_bytes(*first), u64::from_le_bytes(*last));
                self.mixed(block, 0, &self.ends[key.len()])
            }
            _ => self.hash_other(key),
        }
    }

    /// Both halves of the hash of a key of any length.
    #[cold]
    #[inline(never)]
    fn hash_other(&self, key: &[u8]) -> Halves {
        if let Some(end) = self.ends.get(key.len()) {
            return self.blocks(halves(*end), key, 0);
        }
        if key.len() > LONGEST {
            return self.hash_shortened(&[key]);
        }
        self.blocks(self.mixed((key.len() as u64, 0), 0, &self.long), key, 1)
    }

    /// Both halves of the hash of a rule's key.
    pub(super) fn hash_named(&self, name: &str, key: &[u8]) -> Halves {
        let lengths = lengths(name, key);
        if name.len() + key.len() > LONGEST_NAMED {
            return self.hash_shortened(&[
                &lengths.0.to_le_bytes(),
                &lengths.1.to_le_bytes(),
                name.as_bytes(),
                key,
            ]);
        }
        let sum = self.mixed(lengths, 0, &self.named);
        self.blocks(self.blocks(sum, name.as_bytes(), 1), key, places_of(name))
    }

    /// The common part of the hashes of a rule's keys.
    pub(super) fn begin_named(&self, name: &str) -> Named {
        let fits = name.len() <= LONGEST_NAMED;
        let sum = if fits {
            self.blocks(halves(self.named), name.as_bytes(), 1)
        } else {
            halves(self.named)
        };
        Named { name: name.into(), sum }
    }

    /// The result of [`hash_named`](Hashing::hash_named), from the common part.
    #[inline(always)]
    pub(super) fn hash_begun(&self, begun: &Named, key: &[u8]) -> Halves {
        let name = &begun.name;
        if name.len() + key.len() > LONGEST_NAMED {
            return self.hash_named(name, key);
        }
        self.blocks(sum(begun.sum, self.mixed(lengths(name, key), 0, &0)), key, places_of(name))
    }

    /// The hash of a long key, which is shortened first by SipHash with 128 bits.
    #[cold]
    fn hash_shortened(&self, pieces: &[&[u8]]) -> Halves {
        let mut hasher = self.seed;
        pieces.iter().for_each(|piece| hasher.write(piece));
        self.mixed(halves(hasher.finish128().as_u128()), 0, &self.shortened)
    }

    /// Adds the blocks of `bytes` from `place` on, at least one.
    #[inline(always)]
    fn blocks(&self, start: Halves, bytes: &[u8], place: usize) -> Halves {
        let Some(last) = bytes.last_chunk::<16>() else {
            return sum(start, self.mixed(few(bytes), place, &0));
        };
        let (whole, rest) = bytes.as_chunks::<16>();
        let last = (!rest.is_empty()).then_some(last); // may overlap with the block before
        whole.iter().chain(last).zip(place..).fold(start, |start, (block, place)| {
            sum(start, self.mixed(halves(u128::from_le_bytes(*block)), place, &0))
        })
    }

    /// A block after four rounds of AES under the keys of a position, with `end` added.
    #[inline(always)]
    fn mixed(&self, block: Halves, place: usize, end: &u128) -> Halves {
        let keys = &self.keys[place];
        match self.aes {
            Some(aes) => aes.four_rounds(block, keys, end),
            None => four_rounds(block, keys, end),
        }
    }
}

/// Four rounds for processors without AES instructions, and for comparison in tests.
#[cold]
#[inline(never)]
fn four_rounds((low, high): Halves, keys: &RoundKeys, end: &u128) -> Halves {
    let bytes = |number: u128| number.to_le_bytes().into();
    let mut block = bytes((u128::from(high) << 64 | u128::from(low)) ^ keys[0]);
    for key in [keys[1], keys[2], keys[3], *end] {
        cipher_round(&mut block, &bytes(key));
    }
    halves(u128::from_le_bytes(block.into()))
}

/// The lower and the upper half.
#[inline(always)]
#[allow(clippy::cast_possible_truncation, reason = "the lower half is what remains")]
fn halves(number: u128) -> Halves {
    (number as u64, (number >> 64) as u64)
}

#[inline(always)]
fn sum(one: Halves, other: Halves) -> Halves {
    (one.0 ^ other.0, one.1 ^ other.1)
}

/// Fewer than sixteen bytes.
#[inline(always)]
fn few(bytes: &[u8]) -> Halves {
    if let (Some(first), Some(last)) = (bytes.first_chunk::<8>(), bytes.last_chunk::<8>()) {
        return (u64::from_le_bytes(*first), u64::from_le_bytes(*last));
    }
    if let (Some(first), Some(last)) = (bytes.first_chunk::<4>(), bytes.last_chunk::<4>()) {
        return (
            u64::from(u32::from_le_bytes(*first)) | u64::from(u32::from_le_bytes(*last)) << 32,
            0,
        );
    }
    (bytes.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte)), 0)
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeSet, HashMap};

    use super::*;

    fn hashing() -> Hashing {
        Hashing::new(0x0706_0504_0302_0100, 0x0f0e_0d0c_0b0a_0908)
    }

    /// The definition, block by block, for comparison.
    fn by_definition(hashing: &Hashing, key: &[u8]) -> Halves {
        let mut blocks = Vec::new();
        let end = hashing.ends.get(key.len()).unwrap_or_else(|| {
            blocks.push((key.len() as u64, 0));
            &hashing.long
        });
        if key.len() < 16 {
            blocks.push(few(key));
        } else {
            let places = (0..=key.len() - 16)
                .step_by(16)
                .chain((!key.len().is_multiple_of(16)).then(|| key.len() - 16));
            blocks.extend(
                places.map(|at| halves(u128::from_le_bytes(key[at..at + 16].try_into().unwrap()))),
            );
        }
        let mixed =
            blocks.into_iter().zip(&hashing.keys).map(|(block, keys)| four_rounds(block, keys, &0));
        mixed.fold(halves(*end), sum)
    }

    #[test]
    fn agrees_with_the_definition_for_keys_of_every_length() {
        let hashing = hashing();
        let without = Hashing { aes: None, ..hashing.clone() };
        let mut key = Vec::new();
        for length in 0..=LONGEST {
            assert_eq!(hashing.hash(&key), by_definition(&hashing, &key), "{length} bytes");
            assert_eq!(
                without.hash(&key),
                by_definition(&hashing, &key),
                "{length} bytes, without the instruction"
            );
            key.push((length.wrapping_mul(0x9e37_79b9) >> 24 & 0xff).try_into().unwrap());
        }
    }

    /// The example of FIPS 197, appendix B, up to where its fifth round starts.
    #[test]
    fn rounds_are_those_of_the_standard() {
        let number = |hex: &str| u128::from_str_radix(hex, 16).unwrap().swap_bytes();
        let keys = [
            number("2b7e151628aed2a6abf7158809cf4f3c"),
            number("a0fafe1788542cb123a339392a6c7605"),
            number("f2c295f27a96b9435935807a7359f67f"),
            number("3d80477d4716fe3e1e237e446d7a883b"),
        ];
        let fourth = number("ef44a541a8525b7fb671253bdb0bad00");
        let input = halves(number("3243f6a8885a308d313198a2e0370734"));
        let fifth = halves(number("e0927fe8c86363c0d9b1355085b8be01"));
        assert_eq!(four_rounds(input, &keys, &fourth), fifth);
        if let Some(aes) = Aes::of_this_processor() {
            assert_eq!(aes.four_rounds(input, &keys, &fourth), fifth);
        }
    }

    #[test]
    fn similar_keys_have_different_hashes() {
        let hashing = hashing();
        let mut seen = HashMap::new();
        let mut see = |hash: (u64, u64), what: String| {
            // Each half is different for a few thousand keys.
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
        // For every border between name and key.
        let text = "a".repeat(LONGEST + 40);
        for length in 1..text.len() {
            let cuts: BTreeSet<usize> = [0, 1, 7, 8, 9, 16, 17, length / 2, length].into();
            for cut in cuts.range(..=length) {
                let (name, key) = text[..length].split_at(*cut);
                let hash = hashing.hash_named(name, key.as_bytes());
                assert_eq!(
                    hashing.hash_begun(&hashing.begin_named(name), key.as_bytes()),
                    hash,
                    "{cut} of {length}"
                );
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

    /// Counted keys, keys that differ in one bit, and keys of one letter are spread as evenly as
    /// random numbers.
    #[test]
    fn the_half_that_selects_the_slot_is_uniform() {
        const KEYS: u32 = 1 << 16;
        const BINS: usize = 256;
        type Named = (&'static str, fn(u32) -> Vec<u8>);
        let kinds: [Named; 5] = [
            ("counting", |n| format!("user:{n:08}").into_bytes()),
            ("binary", |n| n.to_le_bytes().to_vec()),
            ("high bits", |n| (u64::from(n) << 48).to_le_bytes().to_vec()),
            ("one letter", |n| {
                vec![b'a'; n as usize % LONGEST]
                    .into_iter()
                    .chain(n.to_be_bytes())
                    .take(LONGEST)
                    .collect()
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
                    bins.iter_mut()
                        .zip(first.to_le_bytes())
                        .for_each(|(bins, byte)| bins[usize::from(byte)] += 1);
                }
                let expected = f64::from(KEYS) / BINS as f64;
                for (byte, bins) in bins.iter().enumerate() {
                    let chi: f64 =
                        bins.iter().map(|n| (f64::from(*n) - expected).powi(2) / expected).sum();
                    // 255 degrees of freedom: mean 255, deviation 22.6.
                    assert!(chi < 255.0 + 6.0 * 22.6, "{kind}, seed {k0}, byte {byte}: {chi}");
                }
            }
        }
    }
}
