//! The value of `RateLimit` for one charge in a fixed buffer, without an allocation.

use tidegate_core::Verdict;

use super::{MAX_FIELD_INTEGER, SECOND_US, quoted_name};

/// A policy name between quotes that is short enough for a [`RateLimitValue`].
#[derive(Clone, Copy, Debug)]
pub struct QuotedName {
    // At the end of the array.
    text: [u8; QuotedName::MAX_BYTES],
    length: usize,
}

impl QuotedName {
    const MAX_BYTES: usize = 64;

    /// Quotes a name; `None` if the result is longer than 64 bytes.
    pub fn new(name: &str) -> Option<QuotedName> {
        let (quoted, mut text) = (quoted_name(name), [0; QuotedName::MAX_BYTES]);
        let from = QuotedName::MAX_BYTES.checked_sub(quoted.len())?;
        text[from..].copy_from_slice(quoted.as_bytes());
        Some(QuotedName { text, length: quoted.len() })
    }
}

/// The value of `RateLimit` for one charge, in a buffer that can be written again and again.
///
/// ```
/// use tidegate::Verdict;
/// use tidegate::http::headers::{QuotedName, RateLimitValue};
/// # let verdict = Verdict { remaining: 7, amount: 10, next_after_us: 900_000, ..Verdict::default() };
/// assert_eq!(RateLimitValue::parameters(&verdict).as_bytes(), b";r=7;t=1");
/// let name = QuotedName::new("per-ip").expect("a short name");
/// let mut value = RateLimitValue::empty();
/// value.write(&name, 7, 10, 900_000);
/// assert_eq!(value.as_bytes(), b"\"per-ip\";r=7;t=1");
/// ```
#[derive(Clone, Copy, Debug)]
pub struct RateLimitValue {
    text: [u8; RateLimitValue::MAX_BYTES],
    from: usize,
}

impl RateLimitValue {
    // A name, and twice three letters and a number.
    const MAX_BYTES: usize = QuotedName::MAX_BYTES + 48;

    /// The parameters for a verdict, without a name.
    pub fn parameters(verdict: &Verdict) -> RateLimitValue {
        let mut value = RateLimitValue::empty();
        value.prepend_parameters(verdict.remaining, verdict.amount, verdict.next_after_us);
        value
    }

    /// Replaces the value: `remaining` of `amount` units are left, and more are available after
    /// `next_after_us` microseconds.
    #[inline]
    pub fn write(&mut self, name: &QuotedName, remaining: u64, amount: u64, next_after_us: u64) {
        self.from = self.text.len();
        self.prepend_parameters(remaining, amount, next_after_us);
        // Copying the full array is faster than copying only the name.
        self.prepend(name.text);
        self.from += QuotedName::MAX_BYTES - name.length;
    }

    /// An empty value.
    #[inline]
    pub fn empty() -> RateLimitValue {
        RateLimitValue { text: [0; RateLimitValue::MAX_BYTES], from: RateLimitValue::MAX_BYTES }
    }

    /// The value: visible ASCII.
    pub fn as_bytes(&self) -> &[u8] {
        &self.text[self.from..]
    }

    /// Writes from the end to the start, in the order in which digits are computed.
    fn prepend_parameters(&mut self, remaining: u64, amount: u64, next_after_us: u64) {
        if remaining < amount {
            self.prepend_number(next_after_us.div_ceil(SECOND_US));
            self.prepend(*b";t=");
        }
        self.prepend_number(remaining.min(MAX_FIELD_INTEGER));
        self.prepend(*b";r=");
    }

    /// Writes two digits at a time.
    #[allow(clippy::cast_possible_truncation, reason = "one or two digits")]
    fn prepend_number(&mut self, number: u64) {
        const PAIRS: &[u8; 200] = b"\
            0001020304050607080910111213141516171819202122232425262728293031323334353637383940414243444546474849\
            5051525354555657585960616263646566676869707172737475767778798081828384858687888990919293949596979899";
        let mut rest = number;
        while rest >= 10 {
            let pair = 2 * (rest % 100) as usize;
            self.prepend([PAIRS[pair], PAIRS[pair + 1]]);
            rest /= 100;
        }
        // The first digit, unless the last pair had it.
        if rest > 0 || number == 0 {
            self.prepend([b'0' + rest as u8]);
        }
    }

    fn prepend<const N: usize>(&mut self, letters: [u8; N]) {
        self.from -= N;
        self.text[self.from..self.from + N].copy_from_slice(&letters);
    }
}

/// Appends the parameters for a verdict.
pub(super) fn push_parameters(out: &mut String, verdict: &Verdict) {
    out.push_str(
        str::from_utf8(RateLimitValue::parameters(verdict).as_bytes()).unwrap_or_default(),
    );
}

/// Appends a number.
pub(super) fn push_number(out: &mut String, number: u64) {
    let mut value = RateLimitValue::empty();
    value.prepend_number(number);
    out.push_str(str::from_utf8(value.as_bytes()).unwrap_or_default());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_written_in_full() {
        let mut value = RateLimitValue::empty();
        let around = (0..20)
            .flat_map(|power| [10_u64.pow(power) - 1, 10_u64.pow(power), 10_u64.pow(power) + 1]);
        for number in (0..100_000).chain(around).chain([1_234_567_890, MAX_FIELD_INTEGER, u64::MAX])
        {
            value.from = value.text.len();
            value.prepend_number(number);
            assert_eq!(value.as_bytes(), number.to_string().as_bytes());
        }
        let mut out = String::from("=");
        push_number(&mut out, 1_234);
        assert_eq!(out, "=1234");
    }

    #[test]
    fn names_of_any_kind_are_written_as_visible_ascii() {
        let long = "x".repeat(62);
        let names =
            ["per-ip", "", "a \"b\" \\c", "größe", "a\r\nb: c", "50%", "\0\u{7f}", long.as_str()];
        let mut value = RateLimitValue::empty();
        for name in names {
            let quoted = QuotedName::new(name).unwrap_or_else(|| panic!("{name:?} is short"));
            value.write(&quoted, 999_999, 1_000_000, 1);
            let expected = format!("{};r=999999;t=1", quoted_name(name));
            assert_eq!(value.as_bytes(), expected.as_bytes());
            assert!(value.as_bytes().iter().all(|byte| matches!(byte, b' '..=b'~')), "{name:?}");
        }
        assert!(QuotedName::new(&"x".repeat(63)).is_none());
        let name = QuotedName::new("x").expect("a short name");
        for number in [0, 1, 9, 10, 99, 100, 12_345, MAX_FIELD_INTEGER, u64::MAX] {
            let shown = number.min(MAX_FIELD_INTEGER);
            value.write(&name, number, u64::MAX, u64::MAX);
            let more = if number < u64::MAX { ";t=18446744073710" } else { "" };
            assert_eq!(value.as_bytes(), format!("\"x\";r={shown}{more}").as_bytes());
        }
    }
}
