//! Numbers as text, for answers that are mostly numbers: no detour over the formatting machinery.

/// As many as the largest number has.
const MOST: usize = 20;

/// Writes a number behind what is there.
pub(crate) fn push(out: &mut Vec<u8>, number: u64) {
    let mut digits = [0; MOST];
    let end = write(&mut digits, 0, number);
    out.extend_from_slice(&digits[..end]);
}

/// Writes a number from `at` on, where there is room, and says where it ends.
#[allow(clippy::cast_possible_truncation, reason = "a digit")]
#[inline]
pub(crate) fn write(out: &mut [u8], at: usize, mut number: u64) -> usize {
    // Most are small.
    if number < 10 {
        out[at] = b'0' + number as u8;
        return at + 1;
    }
    if number < 100 {
        out[at..at + 2].copy_from_slice(&[b'0' + (number / 10) as u8, b'0' + (number % 10) as u8]);
        return at + 2;
    }
    let end = at + number.checked_ilog10().unwrap_or(0) as usize + 1;
    for digit in out[at..end].iter_mut().rev() {
        *digit = b'0' + (number % 10) as u8;
        number /= 10;
    }
    end
}

#[cfg(test)]
mod tests {
    #[test]
    fn numbers_are_written_in_full() {
        for number in [0, 1, 9, 10, 99, 100, 1_234_567_890, u64::MAX] {
            let mut out = b"=".to_vec();
            super::push(&mut out, number);
            assert_eq!(out, format!("={number}").as_bytes());
        }
    }
}
