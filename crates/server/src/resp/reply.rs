//! Answers into bytes, in the protocol version the client asked for.

use tidegate::{Retry, Source, Verdict};

use crate::digits;

/// Writes answers behind one another.
#[derive(Debug, Default)]
pub(crate) struct Replies {
    pub(crate) bytes: Vec<u8>,
    /// Version 3 of the protocol.
    pub(crate) three: bool,
    /// Arrays of numbers end with who gave the answer, because the client wants to know.
    pub(crate) marked: bool,
}

impl Replies {
    pub(crate) fn simple(&mut self, text: &str) {
        self.line(b'+', text.as_bytes());
    }

    /// An error. Whatever it repeats of what was asked is made harmless: one line of printable characters.
    pub(crate) fn error(&mut self, text: &str) {
        let harmless: String = text.chars().map(|c| if (' '..='~').contains(&c) { c } else { '?' }).take(256).collect();
        self.line(b'-', harmless.as_bytes());
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
        self.bytes.extend_from_slice(if self.three { b"_\r\n" } else { b"$-1\r\n" });
    }

    pub(crate) fn array(&mut self, length: usize) {
        self.number(b'*', false, length as u64);
    }

    /// Begins a map of so many pairs; an array of both in version 2.
    pub(crate) fn map(&mut self, pairs: usize) {
        if self.three { self.number(b'%', false, pairs as u64) } else { self.array(2 * pairs) }
    }

    /// The five numbers of `CL.THROTTLE`.
    pub(crate) fn throttle(&mut self, numbers: [i64; 5], source: Source) {
        if self.marked {
            self.array(6);
            numbers.into_iter().for_each(|number| self.integer(number));
            return self.bulk(source.name().as_bytes());
        }
        // The most frequent answer of all: the longest it can be, and one copy.
        const LONGEST: usize = 4 + 5 * (1 + 20 + 2);
        let mut line = [0; LONGEST];
        line[..4].copy_from_slice(b"*5\r\n");
        let mut at = 4;
        for number in numbers {
            if let 0..10 = number {
                // Most have one digit.
                line[at..at + 4].copy_from_slice(&[b':', b'0' + number.to_le_bytes()[0], b'\r', b'\n']);
                at += 4;
                continue;
            }
            line[at] = b':';
            line[at + 1] = b'-';
            at += 1 + usize::from(number.is_negative());
            at = digits::write(&mut line, at, number.unsigned_abs());
            line[at..at + 2].copy_from_slice(b"\r\n");
            at += 2;
        }
        self.bytes.extend_from_slice(&line[..at]);
    }

    /// `[allowed, amount, remaining, retry_after_ms, reset_after_ms]`, and whatever else there is; in version 3 with names, and with who gave the answer.
    pub(crate) fn verdict(&mut self, allowed: bool, verdict: &Verdict, more: &[(&str, i64)], source: Source) {
        let retry_ms = match verdict.retry {
            _ if allowed => 0,
            // The limits would let it pass: it is a rule that lets nothing pass, and never will.
            Retry::Never | Retry::Now => -1,
            Retry::After(micros) => to_ms(micros),
        };
        let numbers = [
            ("allowed", i64::from(allowed)),
            ("amount", whole(verdict.amount)),
            ("remaining", whole(verdict.remaining)),
            ("retry_after_ms", retry_ms),
            ("reset_after_ms", to_ms(verdict.reset_after_us)),
        ];
        if self.three {
            self.map(6 + more.len())
        } else {
            self.array(5 + more.len() + usize::from(self.marked))
        }
        for (name, number) in numbers.iter().chain(more) {
            if self.three {
                self.bulk(name.as_bytes());
            }
            self.integer(*number);
        }
        if self.three {
            self.bulk(b"source");
        }
        if self.three || self.marked {
            self.bulk(source.name().as_bytes());
        }
    }

    /// A line with a number, the most frequent of all.
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
    fn errors_are_one_harmless_line() {
        let mut out = Replies { three: true, ..Replies::default() };
        out.error("ERR a\r\n+OK\r\n\u{1b}[31m\u{e9}");
        assert_eq!(out.bytes, b"-ERR a??+OK???[31m?\r\n");
    }
}
