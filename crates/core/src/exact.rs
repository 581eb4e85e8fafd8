//! The few pieces of arithmetic that need more than 53 bits on the way to a result that does not.

use crate::time::EXACT;

/// The sum, if it is below 2^53.
pub(crate) fn exact_sum(mut numbers: impl Iterator<Item = u64>) -> Option<u64> {
    numbers.try_fold(0_u64, |sum, number| sum.checked_add(number).filter(|sum| *sum < EXACT))
}

/// The greatest common divisor.
pub(crate) fn gcd(a: u128, b: u128) -> u128 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// `a * b / c`, rounded up, exactly; `u64::MAX` if it is larger than that or `c` is zero.
pub(crate) fn mul_div_ceil(a: u64, b: u64, c: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    if c == 0 {
        u64::MAX
    } else {
        u64::try_from(product.div_ceil(u128::from(c))).unwrap_or(u64::MAX)
    }
}

/// `a * b / c`, rounded down, exactly; `u64::MAX` if it is larger than that or `c` is zero.
pub(crate) fn mul_div_floor(a: u64, b: u64, c: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    if c == 0 { u64::MAX } else { u64::try_from(product / u128::from(c)).unwrap_or(u64::MAX) }
}
