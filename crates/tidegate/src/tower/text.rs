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

    /// Letters of ASCII that `write` writes and says how many they are, where they belong if there
    /// is room for as many as there may be.
    #[inline]
    pub(super) fn push_some<const N: usize>(&mut self, write: impl Fn(&mut [u8; N]) -> usize) {
        match self.short.get_mut(self.length..).and_then(|room| room.first_chunk_mut()) {
            Some(room) if self.long.is_empty() => self.length += write(room),
            _ => {
                let mut letters = [0; N];
                let length = write(&mut letters);
                self.push_long(&String::from_utf8_lossy(&letters[..length]));
            }
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
        if self.long.is_empty() {
            String::from_utf8_lossy(&self.short[..self.length]).into_owned()
        } else {
            self.long
        }
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
                for piece in
                    ["ä".repeat(first / 2), "x".repeat(first % 2), "y".repeat(then), "z".to_owned()]
                {
                    text.push_str(&piece);
                    expected.push_str(&piece);
                    for length in [0, 7, 16] {
                        text.push_some(|room| {
                            *room = *b"0123456789abcdef";
                            length
                        });
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
