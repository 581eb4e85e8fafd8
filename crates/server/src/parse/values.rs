//! How values that several settings have in common are read and written.
//!
//! Each function reads (`fn name<D: Deserializer>`) or writes (`fn as_name<S: Serializer>`) one
//! field; a module does both, for `#[serde(with = "…")]`. A value out of range is an error when it
//! is read, so the settings hold valid values only.

use std::fmt::Display;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use serde::de::{Deserialize, Deserializer, Error};
use serde::ser::{Serialize, Serializer};
use tidegate::http::ClientIp;

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

/// A number from `LEAST` to `MOST`.
#[derive(Debug, Clone, Copy, serde::Serialize)]
pub(crate) struct Within<const LEAST: u32, const MOST: u32>(pub(crate) u32);

impl<'de, const LEAST: u32, const MOST: u32> Deserialize<'de> for Within<LEAST, MOST> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        match u32::deserialize(from)? {
            number if (LEAST..=MOST).contains(&number) => Ok(Within(number)),
            number => Err(D::Error::custom(format!("{number}: expected {LEAST} to {MOST}"))),
        }
    }
}

/// Reads a number from `LEAST` to `MOST`.
pub(crate) fn within<
    'de,
    const LEAST: u32,
    const MOST: u32,
    T: TryFrom<u32>,
    D: Deserializer<'de>,
>(
    from: D,
) -> Result<T, D::Error> {
    let number = Within::<LEAST, MOST>::deserialize(from)?.0;
    T::try_from(number).map_err(|_| D::Error::custom(format!("{number}: too large")))
}

/// Reads a number of things: 1 to 1000000.
pub(crate) fn count<'de, D: Deserializer<'de>>(from: D) -> Result<usize, D::Error> {
    Ok(Within::<1, 1_000_000>::deserialize(from)?.0 as usize)
}

/// Reads a whole number of milliseconds.
pub(crate) fn millis<'de, const LEAST: u32, const MOST: u32, D: Deserializer<'de>>(
    from: D,
) -> Result<Duration, D::Error> {
    Ok(Duration::from_millis(Within::<LEAST, MOST>::deserialize(from)?.0.into()))
}

/// Writes a duration in milliseconds.
pub(crate) fn as_millis<S: Serializer>(time: &Duration, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_u64(u64::try_from(time.as_millis()).unwrap_or(u64::MAX))
}

/// Reads a whole number of seconds.
pub(crate) fn secs<'de, const LEAST: u32, const MOST: u32, D: Deserializer<'de>>(
    from: D,
) -> Result<Duration, D::Error> {
    Ok(Duration::from_secs(Within::<LEAST, MOST>::deserialize(from)?.0.into()))
}

/// Writes a duration in seconds.
pub(crate) fn as_secs<S: Serializer>(time: &Duration, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_u64(time.as_secs())
}

/// Reads a number from `LEAST` to `MOST`, or `auto`.
pub(crate) fn auto_or<'de, const LEAST: u32, const MOST: u32, D: Deserializer<'de>>(
    from: D,
) -> Result<Option<u32>, D::Error> {
    let text = Text::deserialize(from)?.0;
    match text.parse::<u32>() {
        _ if text == "auto" => Ok(None),
        Ok(number) if (LEAST..=MOST).contains(&number) => Ok(Some(number)),
        _ => Err(D::Error::custom(format!(
            "{text:?}: expected auto, or a number from {LEAST} to {MOST}"
        ))),
    }
}

/// Writes a number, or `auto`.
pub(crate) fn as_auto<S: Serializer>(number: &Option<u32>, to: S) -> Result<S::Ok, S::Error> {
    match number {
        Some(number) => to.serialize_u32(*number),
        None => to.serialize_str("auto"),
    }
}

/// Reads a path.
pub(crate) fn path<'de, D: Deserializer<'de>>(from: D) -> Result<PathBuf, D::Error> {
    Ok(Text::deserialize(from)?.0.into())
}

/// Reads a path that may be left out.
pub(crate) fn some_path<'de, D: Deserializer<'de>>(from: D) -> Result<Option<PathBuf>, D::Error> {
    Ok(Option::<Text>::deserialize(from)?.map(|text| text.0.into()))
}

/// Reads the name of a header, into lower case.
pub(crate) fn header_name<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    let name = Text::deserialize(from)?.0;
    let clients = ClientIp::of_peer().header(&name).map_err(D::Error::custom)?;
    Ok(clients.header_name().into())
}

/// Reads a list of names of headers, into lower case.
pub(crate) fn header_names<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<String>, D::Error> {
    #[derive(serde::Deserialize)]
    struct Name(#[serde(deserialize_with = "header_name")] String);
    Ok(Vec::<Name>::deserialize(from)?.into_iter().map(|name| name.0).collect())
}

/// A value with a notation of its own: `FromStr` reads it and `Display` writes it.
pub(crate) mod text {
    use super::*;

    pub(crate) fn deserialize<'de, T, D>(from: D) -> Result<T, D::Error>
    where
        T: FromStr<Err: Display>,
        D: Deserializer<'de>,
    {
        Text::deserialize(from)?.0.parse().map_err(D::Error::custom)
    }

    /// Writes text; without quotation marks if it is a number.
    pub(crate) fn serialize<T: Display, S: Serializer>(
        value: &T,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        let text = value.to_string();
        match text.parse::<u64>() {
            Ok(number) => to.serialize_u64(number),
            Err(_) => to.serialize_str(&text),
        }
    }
}

/// The same for a value that may be left out.
pub(crate) mod some_text {
    use super::*;

    pub(crate) fn deserialize<'de, T, D>(from: D) -> Result<Option<T>, D::Error>
    where
        T: FromStr<Err: Display>,
        D: Deserializer<'de>,
    {
        let text = Option::<Text>::deserialize(from)?;
        text.map(|text| text.0.parse()).transpose().map_err(D::Error::custom)
    }

    pub(crate) fn serialize<T: Display, S: Serializer>(
        value: &Option<T>,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        match value {
            Some(value) => text::serialize(value, to),
            None => to.serialize_none(),
        }
    }
}

/// The same for a value one word of which is `off`, which some dialects of YAML write as `false`.
pub(crate) mod text_or_off {
    pub(crate) use super::text::serialize;
    use super::*;

    pub(crate) fn deserialize<'de, T, D>(from: D) -> Result<T, D::Error>
    where
        T: FromStr<Err: Display>,
        D: Deserializer<'de>,
    {
        let text = Text::deserialize(from)?.0;
        let text = if text == "false" { "off" } else { &text };
        text.parse().map_err(D::Error::custom)
    }
}

/// `on` or `off`, which some dialects of YAML write as truth values.
pub(crate) mod on_off {
    use super::*;

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<bool, D::Error> {
        match Text::deserialize(from)?.0.as_str() {
            "on" | "true" => Ok(true),
            "off" | "false" => Ok(false),
            other => Err(D::Error::custom(format!("{other:?}: expected on or off"))),
        }
    }

    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes fields by reference")]
    pub(crate) fn serialize<S: Serializer>(is_on: &bool, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(if *is_on { "on" } else { "off" })
    }
}

/// The overflow policy of the library, which has no serde of its own.
#[derive(serde::Deserialize, serde::Serialize)]
#[serde(remote = "tidegate::memory::Overflow", rename_all = "snake_case")]
pub(crate) enum Overflow {
    SharedBucket,
    DenyNew,
    AllowNew,
}

/// An overflow policy that may be left out.
pub(crate) mod some_overflow {
    use super::*;

    #[derive(serde::Deserialize, serde::Serialize)]
    struct Policy(#[serde(with = "super::Overflow")] tidegate::memory::Overflow);

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Option<tidegate::memory::Overflow>, D::Error> {
        Ok(Option::<Policy>::deserialize(from)?.map(|policy| policy.0))
    }

    pub(crate) fn serialize<S: Serializer>(
        policy: &Option<tidegate::memory::Overflow>,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        policy.map(Policy).serialize(to)
    }
}
