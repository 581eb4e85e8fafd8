//! Numbers as text, for answers that are mostly numbers: no detour over the formatting machinery.

/// Writes a number behind what is there.
pub(crate) fn push(out: &mut Vec<u8>, mut number: u64) {
    let mut digits = [0; 20];
    let mut from = digits.len();
    loop {
        from -= 1;
        digits[from] = b'0' + u8::try_from(number % 10).unwrap_or(0);
        number /= 10;
        if number == 0 {
            break;
        }
    }
    out.extend_from_slice(&digits[from..]);
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
