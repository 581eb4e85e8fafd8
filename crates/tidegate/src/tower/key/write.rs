//! The text of keys.

use std::fmt::Write;
use std::net::Ipv4Addr;

use super::KeyResult;
use crate::http::Group;
use crate::tower::text::KeyText;

/// Longer keys are replaced by a digest, because some tokens are longer than a key may be.
const MAX_PLAIN_BYTES: usize = 256;

#[inline]
pub(super) fn push_group(group: Group, out: &mut KeyText) {
    out.push_str("ip:");
    match group {
        Group::V4(v4) => out.push_some(|letters| write_v4(v4, letters)),
        Group::V6(..) => {
            let _ = write!(out, "{group}");
        }
    }
}

/// Joins pieces so that different lists of pieces give different keys. A missing piece is empty.
pub(super) fn join(pieces: &[String], out: &mut KeyText) -> KeyResult {
    for (index, piece) in pieces.iter().enumerate() {
        if index > 0 {
            out.push_str("|");
        }
        for char in piece.chars() {
            match char {
                '%' => out.push_str("%25"),
                '|' => out.push_str("%7C"),
                char => out.push_str(char.encode_utf8(&mut [0; 4])),
            }
        }
    }
    let empty = pieces.iter().filter(|piece| piece.is_empty()).count();
    match empty {
        0 => KeyResult::Found,
        all if all == pieces.len() => KeyResult::Missing,
        _ => KeyResult::Partial,
    }
}

/// The digest of a key, if the key is too long. No other key looks like it: all others contain a
/// colon or are `global`.
pub(in crate::tower) fn digest_if_long(key: &[u8]) -> Option<String> {
    (key.len() > MAX_PLAIN_BYTES).then(|| format!("#{}", digest(key)))
}

/// Writes an address as it is displayed, and returns its length. Faster than `Display`, for the
/// most frequent kind of key.
#[inline]
fn write_v4(v4: Ipv4Addr, letters: &mut [u8; 16]) -> usize {
    let mut length = 0;
    for octet in v4.octets() {
        let digit = |unit: u8| b'0' + octet / unit % 10;
        let (digits, more) = if octet < 10 {
            ([digit(1), b'.', 0, 0], 2)
        } else if octet < 100 {
            ([digit(10), digit(1), b'.', 0], 3)
        } else {
            ([digit(100), digit(10), digit(1), b'.'], 4)
        };
        // Always there: four octets of four bytes.
        if let Some(room) = letters.get_mut(length..length + 4) {
            room.copy_from_slice(&digits);
        }
        length += more;
    }
    // The last dot is not part of it.
    length - 1
}

/// Distinguishes keys; it does not have to be a secret.
pub(super) fn digest(bytes: &[u8]) -> String {
    sha1_smol::Sha1::from(bytes).digest().to_string()
}
