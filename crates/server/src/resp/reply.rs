//! Answers into bytes, in the protocol version the client asked for.

use tidegate::{Retry, Verdict};

/// Writes answers behind one another.
#[derive(Debug)]
pub(crate) struct Replies {
    pub(crate) bytes: Vec<u8>,
    /// Version 3 of the protocol.
    pub(crate) three: bool,
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
        self.line(b':', number.to_string().as_bytes());
    }

    pub(crate) fn bulk(&mut self, bytes: &[u8]) {
        self.line(b'$', bytes.len().to_string().as_bytes());
        self.bytes.extend_from_slice(bytes);
        self.bytes.extend_from_slice(b"\r\n");
    }

    pub(crate) fn null(&mut self) {
        self.bytes.extend_from_slice(if self.three { b"_\r\n" } else { b"$-1\r\n" });
    }

    pub(crate) fn array(&mut self, length: usize) {
        self.line(b'*', length.to_string().as_bytes());
    }

    /// Begins a map of so many pairs; an array of both in version 2.
    pub(crate) fn map(&mut self, pairs: usize) {
        if self.three { self.line(b'%', pairs.to_string().as_bytes()) } else { self.array(2 * pairs) }
    }

    /// `[allowed, amount, remaining, retry_after_ms, reset_after_ms]`, with names in version 3, and whatever else there is.
    pub(crate) fn verdict(&mut self, allowed: bool, verdict: &Verdict, more: &[(&str, i64)]) {
        let retry_ms = match verdict.retry {
            _ if allowed => 0,
            Retry::Never => -1,
            retry => to_ms(retry.micros().unwrap_or(0)),
        };
        let numbers = [
            ("allowed", i64::from(allowed)),
            ("amount", whole(verdict.amount)),
            ("remaining", whole(verdict.remaining)),
            ("retry_after_ms", retry_ms),
            ("reset_after_ms", to_ms(verdict.reset_after_us)),
        ];
        if self.three {
            self.map(5 + more.len())
        } else {
            self.array(5 + more.len())
        }
        for (name, number) in numbers.iter().chain(more) {
            if self.three {
                self.bulk(name.as_bytes());
            }
            self.integer(*number);
        }
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
