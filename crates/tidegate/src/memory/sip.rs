//! SipHash-1-3 with 128 bits for a key that lies in one piece, in two halves.
//!
//! The same function as `siphasher`'s, to the bit, and only for speed: it knows the length from the start, and it has the first
//! half before it begins with the second, so that the processor can look for the slot meanwhile.

use std::hash::Hasher;

use siphasher::sip128::{Hasher128, SipHasher13};

/// Keyed; the key is the store's.
#[derive(Clone, Debug)]
pub(super) struct Sip {
    start: State,
    /// For keys in several pieces.
    in_pieces: SipHasher13,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct State {
    v0: u64,
    v1: u64,
    v2: u64,
    v3: u64,
}

impl Sip {
    pub(super) fn new(k0: u64, k1: u64) -> Self {
        let start = State {
            v0: k0 ^ 0x736f_6d65_7073_6575,
            v1: k1 ^ 0x646f_7261_6e64_6f6d ^ 0xee,
            v2: k0 ^ 0x6c79_6765_6e65_7261,
            v3: k1 ^ 0x7465_6462_7974_6573,
        };
        Sip { start, in_pieces: SipHasher13::new_with_keys(k0, k1) }
    }

    /// Both halves of the hash of `key`.
    #[inline(always)]
    pub(super) fn hash(&self, key: &[u8]) -> (u64, u64) {
        let mut state = self.start;
        let (words, _) = key.as_chunks::<8>();
        for word in words {
            state.absorb(u64::from_le_bytes(*word));
        }
        state.absorb(last_word(key));
        state.v2 ^= 0xee;
        let first = state.finish();
        state.v1 ^= 0xdd;
        (first, state.finish())
    }

    /// The same for a key that lies in several pieces.
    pub(super) fn hash_pieces(&self, pieces: &[&[u8]]) -> (u64, u64) {
        let hash = pieces.iter().fold(self.in_pieces, |mut hasher, piece| {
            hasher.write(piece);
            hasher
        });
        let hash = hash.finish128();
        (hash.h1, hash.h2)
    }
}

/// The bytes behind the last whole word, and in the highest byte the length.
#[inline(always)]
fn last_word(key: &[u8]) -> u64 {
    let length = (key.len() as u64) << 56;
    if let Some(last) = key.last_chunk::<8>() {
        // Drops the bytes that belong to the word before; in two steps, because all eight may.
        return length | u64::from_le_bytes(*last) >> 8 >> (8 * (7 - key.len() % 8));
    }
    if let (Some(first), Some(last)) = (key.first_chunk::<4>(), key.last_chunk::<4>()) {
        // They overlap, and agree where they do.
        let (first, last) = (u32::from_le_bytes(*first), u32::from_le_bytes(*last));
        return length | u64::from(first) | u64::from(last) << (8 * (key.len() - 4));
    }
    key.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte)) | length
}

impl State {
    #[inline(always)]
    fn absorb(&mut self, word: u64) {
        self.v3 ^= word;
        self.round();
        self.v0 ^= word;
    }

    #[inline(always)]
    fn finish(&mut self) -> u64 {
        self.round();
        self.round();
        self.round();
        self.v0 ^ self.v1 ^ self.v2 ^ self.v3
    }

    #[inline(always)]
    fn round(&mut self) {
        let State { v0, v1, v2, v3 } = self;
        *v0 = v0.wrapping_add(*v1);
        *v2 = v2.wrapping_add(*v3);
        *v1 = v1.rotate_left(13) ^ *v0;
        *v3 = v3.rotate_left(16) ^ *v2;
        *v0 = v0.rotate_left(32);
        *v2 = v2.wrapping_add(*v1);
        *v0 = v0.wrapping_add(*v3);
        *v1 = v1.rotate_left(17) ^ *v2;
        *v3 = v3.rotate_left(21) ^ *v0;
        *v2 = v2.rotate_left(32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agrees_with_siphasher_for_keys_of_every_length() {
        let sip = Sip::new(0x0706_0504_0302_0100, 0x0f0e_0d0c_0b0a_0908);
        let mut key = Vec::new();
        for length in 0..=1100u32 {
            let hash = sip.in_pieces.hash(&key);
            assert_eq!(sip.hash(&key), (hash.h1, hash.h2), "{length} bytes");
            let (head, tail) = key.split_at(key.len() / 3);
            assert_eq!(sip.hash_pieces(&[head, tail]), (hash.h1, hash.h2), "{length} bytes");
            key.push((length.wrapping_mul(0x9e37_79b9) >> 24) as u8);
        }
    }
}
