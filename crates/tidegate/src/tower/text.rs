//! The text of a key, without an allocation if it is short.

use std::fmt;

/// The longest text without an allocation.
const SHORT: usize = 64;

/// A growing text. Every request builds one, and most are short.
pub(super) struct KeyText {
    short: [u8; SHORT],
    length: usize,
    /// The complete text, if it is not short.
    long: String,
}

impl KeyText {
    pub(super) fn new() -> Self {
        KeyText { short: [0; SHORT], length: 0, long: String::new() }
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

    /// Appends at most `N` ASCII letters. `write` gets the buffer and returns how many it wrote.
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

    /// Replaces the text.
    pub(super) fn replace(&mut self, text: &str) {
        *self = KeyText::new();
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

impl fmt::Write for KeyText {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.push_str(text);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_and_long_texts_keep_what_was_written() {
        for first in [0, 1, 3, 47, 48, 49, 63, 64, 65, 200] {
            for then in [0, 1, 15, 16, 17, 64, 100] {
                let (mut text, mut expected) = (KeyText::new(), String::new());
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
    fn replace_drops_the_old_text() {
        let mut text = KeyText::new();
        text.push_str(&"x".repeat(100));
        text.replace("short");
        assert_eq!(text.as_bytes(), b"short");
    }
}
