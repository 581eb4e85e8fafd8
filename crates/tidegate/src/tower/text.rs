//! The text of a key while it is found.

use std::fmt;

/// Keys that are no longer than this need nothing from the heap.
const SHORT: usize = 64;

/// A text that grows. Nearly all keys are short, and there is one in every request.
pub(super) struct Text {
    short: [u8; SHORT],
    length: usize,
    /// All of it, as soon as it is not short.
    long: String,
}

impl Text {
    pub(super) fn new() -> Self {
        Text { short: [0; SHORT], length: 0, long: String::new() }
    }

    #[inline]
    pub(super) fn push_str(&mut self, text: &str) {
        let end = self.length + text.len();
        match self.short.get_mut(self.length..end) {
            Some(room) if self.long.is_empty() => {
                room.copy_from_slice(text.as_bytes());
                self.length = end;
            }
            _ => self.push_long(text),
        }
    }

    /// The first `length` of these letters of ASCII. All of them are written, which is quicker than to look how many there are.
    #[inline]
    pub(super) fn push_some<const N: usize>(&mut self, letters: &[u8; N], length: usize) {
        match self.short.get_mut(self.length..self.length + N) {
            Some(room) if self.long.is_empty() => {
                room.copy_from_slice(letters);
                self.length += length;
            }
            _ => self.push_long(&String::from_utf8_lossy(&letters[..length])),
        }
    }

    #[cold]
    fn push_long(&mut self, text: &str) {
        if self.long.is_empty() {
            self.long.push_str(&String::from_utf8_lossy(&self.short[..self.length]));
        }
        self.long.push_str(text);
    }

    pub(super) fn as_bytes(&self) -> &[u8] {
        if self.long.is_empty() { &self.short[..self.length] } else { self.long.as_bytes() }
    }

    /// Something else in its place.
    pub(super) fn replace(&mut self, text: &str) {
        *self = Text::new();
        self.push_str(text);
    }

    pub(super) fn into_string(self) -> String {
        if self.long.is_empty() { String::from_utf8_lossy(&self.short[..self.length]).into_owned() } else { self.long }
    }
}

impl fmt::Write for Text {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.push_str(text);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_what_was_written_however_long_it_gets() {
        for first in [0, 1, 3, 47, 48, 49, 63, 64, 65, 200] {
            for then in [0, 1, 15, 16, 17, 64, 100] {
                let (mut text, mut expected) = (Text::new(), String::new());
                for piece in ["ä".repeat(first / 2), "x".repeat(first % 2), "y".repeat(then), "z".to_owned()] {
                    text.push_str(&piece);
                    expected.push_str(&piece);
                    for length in [0, 7, 16] {
                        text.push_some(b"0123456789abcdef", length);
                        expected.push_str(&"0123456789abcdef"[..length]);
                    }
                    assert_eq!(text.as_bytes(), expected.as_bytes(), "{first} {then}");
                }
                assert_eq!(text.into_string(), expected);
            }
        }
    }

    #[test]
    fn what_is_replaced_is_gone() {
        let mut text = Text::new();
        text.push_str(&"x".repeat(100));
        text.replace("short");
        assert_eq!(text.as_bytes(), b"short");
    }
}
