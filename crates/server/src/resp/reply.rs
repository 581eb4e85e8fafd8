//! Writes answers in the protocol version of the connection.

use tidegate::{Retry, Source, Verdict};

use crate::digits;

/// The longest answer to `CL.THROTTLE`: five numbers with a sign and nineteen digits each.
const LONGEST_THROTTLE: usize = 4 + 5 * (1 + 20 + 2);

/// A buffer of answers.
#[derive(Debug, Default)]
pub(crate) struct Replies {
    pub(crate) bytes: Vec<u8>,
    /// RESP3.
    pub(crate) is_resp3: bool,
    /// `TG.MARK ON`: the source is the last element of every array of numbers.
    pub(crate) has_source: bool,
}

impl Replies {
    pub(crate) fn simple(&mut self, text: &str) {
        self.line(b'+', text.as_bytes());
    }

    /// An error, as one line of printable characters: the text may repeat input.
    pub(crate) fn error(&mut self, text: &str) {
        let line: String = text
            .chars()
            .map(|c| if (' '..='~').contains(&c) { c } else { '?' })
            .take(256)
            .collect();
        self.line(b'-', line.as_bytes());
    }

    pub(crate) fn integer(&mut self, number: i64) {
        self.number(b':', number.is_negative(), number.unsigned_abs());
    }

    pub(crate) fn bulk(&mut self, bytes: &[u8]) {
        self.number(b'$', false, bytes.len() as u64);
        self.bytes.extend_from_slice(bytes);
        self.bytes.extend_from_slice(b"\r\n");
    }

    pub(crate) fn null(&mut self) {
        self.bytes.extend_from_slice(if self.is_resp3 { b"_\r\n" } else { b"$-1\r\n" });
    }

    pub(crate) fn array(&mut self, length: usize) {
        self.number(b'*', false, length as u64);
    }

    /// Begins a map of this many pairs; in RESP2, an array of keys and values.
    pub(crate) fn map(&mut self, pairs: usize) {
        if self.is_resp3 { self.number(b'%', false, pairs as u64) } else { self.array(2 * pairs) }
    }

    /// The five numbers of `CL.THROTTLE`.
    pub(crate) fn throttle(&mut self, numbers: [i64; 5], source: Source) {
        if self.has_source {
            self.array(6);
            numbers.into_iter().for_each(|number| self.integer(number));
            return self.bulk(source.name().as_bytes());
        }
        // The most frequent answer: written to a buffer on the stack, then copied once.
        let mut line = [0; LONGEST_THROTTLE];
        line[..4].copy_from_slice(b"*5\r\n");
        let mut at = 4;
        for number in numbers {
            if let Some((word, length)) = short_integer(number) {
                // The next number overwrites the padding.
                line[at..at + 8].copy_from_slice(&word);
                at += length;
                continue;
            }
            let mut buffer = itoa::Buffer::new();
            let digits = buffer.format(number).as_bytes();
            line[at] = b':';
            at += 1;
            line[at..at + digits.len()].copy_from_slice(digits);
            at += digits.len();
            line[at..at + 2].copy_from_slice(b"\r\n");
            at += 2;
        }
        self.bytes.extend_from_slice(&line[..at]);
    }

    /// `[allowed, amount, remaining, retry_after_ms, reset_after_ms]` and the numbers that the
    /// command adds.
    pub(crate) fn verdict(
        &mut self,
        allowed: bool,
        verdict: &Verdict,
        more: &[(&str, i64)],
        source: Source,
    ) {
        self.array(5 + more.len() + usize::from(self.has_source));
        for (_, number) in named(allowed, verdict).iter().chain(more) {
            self.integer(*number);
        }
        if self.has_source {
            self.bulk(source.name().as_bytes());
        }
    }

    /// A verdict as a map, with the source.
    pub(crate) fn verdict_map(
        &mut self,
        allowed: bool,
        verdict: &Verdict,
        more: &[(&str, i64)],
        source: Source,
    ) {
        self.verdict_map_with_warning(allowed, verdict, more, source, None);
    }

    /// A verdict as a map, with the source and a warning.
    pub(crate) fn verdict_map_with_warning(
        &mut self,
        allowed: bool,
        verdict: &Verdict,
        more: &[(&str, i64)],
        source: Source,
        warning: Option<&str>,
    ) {
        self.map(6 + more.len() + usize::from(warning.is_some()));
        for (name, number) in named(allowed, verdict).iter().chain(more) {
            self.bulk(name.as_bytes());
            self.integer(*number);
        }
        self.bulk(b"source");
        self.bulk(source.name().as_bytes());
        if let Some(warning) = warning {
            self.bulk(b"warning");
            self.bulk(warning.as_bytes());
        }
    }

    /// A line with a number.
    fn number(&mut self, kind: u8, negative: bool, number: u64) {
        self.bytes.push(kind);
        if negative {
            self.bytes.push(b'-');
        }
        digits::push(&mut self.bytes, number);
        self.bytes.extend_from_slice(b"\r\n");
    }

    fn line(&mut self, kind: u8, text: &[u8]) {
        self.bytes.push(kind);
        self.bytes.extend_from_slice(text);
        self.bytes.extend_from_slice(b"\r\n");
    }
}

/// The five numbers that every `TG.` command answers, with their names.
fn named(allowed: bool, verdict: &Verdict) -> [(&'static str, i64); 5] {
    let retry_ms = match verdict.retry {
        _ if allowed => 0,
        // `Now` is the limits' wait; a rule with `limit: deny` never allows the request.
        Retry::Never | Retry::Now => -1,
        Retry::After(micros) => to_ms(micros),
    };
    [
        ("allowed", i64::from(allowed)),
        ("amount", whole(verdict.amount)),
        ("remaining", whole(verdict.remaining)),
        ("retry_after_ms", retry_ms),
        ("reset_after_ms", to_ms(verdict.reset_after_us)),
    ]
}

/// The line of an integer from -1 to 99 in eight padded bytes, and its length.
#[inline(always)]
fn short_integer(number: i64) -> Option<([u8; 8], usize)> {
    const ONE: u64 = u64::from_le_bytes(*b":0\r\n\0\0\0\0");
    const TWO: u64 = u64::from_le_bytes(*b":00\r\n\0\0\0");
    match number.cast_unsigned() {
        digit @ 0..10 => Some(((ONE + (digit << 8)).to_le_bytes(), 4)),
        both @ 10..100 => Some(((TWO + ((both / 10) << 8) + ((both % 10) << 16)).to_le_bytes(), 5)),
        _ if number == -1 => Some((*b":-1\r\n\0\0\0", 5)),
        _ => None,
    }
}

/// Milliseconds, rounded up.
fn to_ms(micros: u64) -> i64 {
    whole(micros.div_ceil(1000))
}

pub(crate) fn whole(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_written_in_full() {
        for number in [0, 1, -1, 9, 10, 1_234_567_890, i64::MAX, i64::MIN] {
            let mut out = Replies::default();
            out.integer(number);
            assert_eq!(out.bytes, format!(":{number}\r\n").as_bytes());
        }
    }

    #[test]
    fn five_numbers_are_written_in_full() {
        let odd = [
            -100,
            -99,
            -10,
            -9,
            -2,
            -1,
            0,
            1,
            9,
            10,
            11,
            99,
            100,
            101,
            1_234_567_890,
            i64::MAX,
            i64::MIN,
        ];
        for numbers in odd.windows(5) {
            let numbers: [i64; 5] = numbers.try_into().unwrap();
            let mut out = Replies::default();
            out.throttle(numbers, Source::Store);
            let each: String = numbers.iter().map(|number| format!(":{number}\r\n")).collect();
            assert_eq!(out.bytes, format!("*5\r\n{each}").as_bytes());
        }
        let mut out = Replies::default();
        out.throttle([i64::MIN; 5], Source::Store);
        assert_eq!(out.bytes.len(), LONGEST_THROTTLE);
    }

    #[test]
    fn errors_are_one_printable_line() {
        let mut out = Replies { is_resp3: true, ..Replies::default() };
        out.error("ERR a\r\n+OK\r\n\u{1b}[31m\u{e9}");
        assert_eq!(out.bytes, b"-ERR a??+OK???[31m?\r\n");
    }
}
