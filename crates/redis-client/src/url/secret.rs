//! A word that all processes of a store share and nobody else knows, so that nobody else can tell
//! which slot a key falls into.

use std::fmt;

/// The shortest and the longest secret, in bytes: 16 at random cannot be guessed.
const BYTES: std::ops::RangeInclusive<usize> = 16..=512;

/// A secret, not checked yet. `Debug` does not show it.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

/// A secret that cannot be used. It is not shown, only its length.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected {}", self.expected())]
pub struct InvalidSecret(usize);

impl Secret {
    /// A secret of any length; [`Secret::checked`] checks it.
    pub fn new(text: impl Into<String>) -> Self {
        Secret(text.into())
    }

    /// The bytes to make a key of.
    pub fn checked(&self) -> Result<&[u8], InvalidSecret> {
        if BYTES.contains(&self.0.len()) {
            Ok(self.0.as_bytes())
        } else {
            Err(InvalidSecret(self.0.len()))
        }
    }
}

impl InvalidSecret {
    /// What can be used.
    pub fn expected(&self) -> String {
        format!("{} to {} bytes at random, found {}", BYTES.start(), BYTES.end(), self.0)
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}
