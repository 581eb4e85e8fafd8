//! Values that several settings have in common.

use serde::Deserialize;
use serde::de::{Deserializer, Error as _};

/// Text that is not blank.
#[derive(Debug)]
pub(crate) struct Text(pub(crate) String);

impl<'de> Deserialize<'de> for Text {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let text = String::deserialize(from)?;
        if text.trim().is_empty() {
            Err(D::Error::custom("a blank value: expected text"))
        } else {
            Ok(Text(text))
        }
    }
}

/// A number between two others.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Within<const LEAST: u32, const MOST: u32>(pub(crate) u32);

impl<'de, const LEAST: u32, const MOST: u32> Deserialize<'de> for Within<LEAST, MOST> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        match u32::deserialize(from)? {
            number if (LEAST..=MOST).contains(&number) => Ok(Within(number)),
            number => Err(D::Error::custom(format!("{number}: expected {LEAST} to {MOST}"))),
        }
    }
}
