//! A text that only the processes of a store know, so that clients cannot compute the slot of a
//! key.

use std::fmt;

/// The allowed length in bytes: 16 random bytes cannot be guessed.
const BYTES: std::ops::RangeInclusive<usize> = 16..=512;

/// A secret of any length. `Debug` does not show it.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

/// A secret of a wrong length. It shows only the length.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected {}", self.expected())]
pub struct InvalidSecret(usize);

impl Secret {
    /// A secret of any length; [`Secret::checked`] checks it.
    pub fn new(text: impl Into<String>) -> Self {
        Secret(text.into())
    }

    /// The bytes, if there are enough of them and not too many.
    ///
    /// # Errors
    /// If there are fewer than 16 or more than 512.
    pub fn checked(&self) -> Result<&[u8], InvalidSecret> {
        if BYTES.contains(&self.0.len()) {
            Ok(self.0.as_bytes())
        } else {
            Err(InvalidSecret(self.0.len()))
        }
    }
}

impl InvalidSecret {
    /// The expected length, and the length found.
    pub fn expected(&self) -> String {
        format!("{} to {} bytes at random, found {}", BYTES.start(), BYTES.end(), self.0)
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}
