//! SipHash-1-3 with 128 bits of output, for a key that is there in one piece.
//!
//! The same function as `siphasher::sip128::SipHasher13` (a test compares them), which is made to be fed in pieces and
//! spends more than half of its time on that when a key is short. See `docs/decisions/0003-own-siphash.md`.

use super::slots::Hash;

/// A secret that only this process knows, so that nobody outside can choose keys that collide.
#[derive(Clone, Copy)]
pub(crate) struct SipHash13 {
    k0: u64,
    k1: u64,
}

impl std::fmt::Debug for SipHash13 {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SipHash13(secret)")
    }
}

impl SipHash13 {
    pub(crate) fn new(k0: u64, k1: u64) -> Self {
        SipHash13 { k0, k1 }
    }

    #[inline]
    pub(crate) fn hash(&self, bytes: &[u8]) -> Hash {
        let mut v = [
            self.k0 ^ 0x736f_6d65_7073_6575,
            self.k1 ^ 0x646f_7261_6e64_6f6d ^ 0xee,
            self.k0 ^ 0x6c79_6765_6e65_7261,
            self.k1 ^ 0x7465_6462_7974_6573,
        ];
        let (blocks, tail) = bytes.as_chunks::<8>();
        for block in blocks {
            let word = u64::from_le_bytes(*block);
            v[3] ^= word;
            round(&mut v);
            v[0] ^= word;
        }
        let word = last_word(bytes, tail) | (bytes.len() as u64) << 56;
        v[3] ^= word;
        round(&mut v);
        v[0] ^= word;

        v[2] ^= 0xee;
        rounds(&mut v);
        let first = v[0] ^ v[1] ^ v[2] ^ v[3];
        v[1] ^= 0xdd;
        rounds(&mut v);
        Hash { order: first, other: v[0] ^ v[1] ^ v[2] ^ v[3] }
    }
}

/// The up to seven bytes after the last whole block, the first of them lowest.
#[inline]
fn last_word(bytes: &[u8], tail: &[u8]) -> u64 {
    match (bytes.last_chunk::<8>(), tail.len()) {
        (_, 0) => 0,
        // The last eight bytes overlap the block before; what belongs to it is shifted out.
        (Some(last), length) => u64::from_le_bytes(*last) >> (64 - 8 * length),
        (None, _) => tail.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte)),
    }
}

#[inline]
fn rounds(v: &mut [u64; 4]) {
    round(v);
    round(v);
    round(v);
}

#[inline]
fn round(v: &mut [u64; 4]) {
    v[0] = v[0].wrapping_add(v[1]);
    v[2] = v[2].wrapping_add(v[3]);
    v[1] = v[1].rotate_left(13) ^ v[0];
    v[3] = v[3].rotate_left(16) ^ v[2];
    v[0] = v[0].rotate_left(32);
    v[2] = v[2].wrapping_add(v[1]);
    v[0] = v[0].wrapping_add(v[3]);
    v[1] = v[1].rotate_left(17) ^ v[2];
    v[3] = v[3].rotate_left(21) ^ v[0];
    v[2] = v[2].rotate_left(32);
}

#[cfg(test)]
mod tests {
    use siphasher::sip128::SipHasher13;

    use super::*;

    #[test]
    fn is_siphash_1_3_with_128_bits() {
        let bytes: Vec<u8> = (0..=255).map(|n: u8| n.wrapping_mul(167)).collect();
        for (k0, k1) in [(0, 0), (1, 2), (u64::MAX, 0x0706_0504_0302_0100)] {
            for length in 0..=bytes.len() {
                let expected = SipHasher13::new_with_keys(k0, k1).hash(&bytes[..length]);
                let hash = SipHash13::new(k0, k1).hash(&bytes[..length]);
                assert_eq!((hash.order, hash.other), (expected.h1, expected.h2), "{length} bytes");
            }
        }
    }
}
