//! Writes integers as decimal digits.

/// Appends the decimal digits of a number.
#[inline]
pub(crate) fn push(out: &mut Vec<u8>, number: u64) {
    out.extend_from_slice(itoa::Buffer::new().format(number).as_bytes());
}
