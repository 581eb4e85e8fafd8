//! Escapes in queries and cookies.

use std::borrow::Cow;

/// The value of a cookie as services read it: some remove quotes and the escapes in them, and some
/// decode `%41`. Spellings that any of them reads as the same value are the same here.
pub(super) fn cookie_value(value: &[u8]) -> Cow<'_, str> {
    let inner = value.strip_prefix(b"\"").and_then(|value| value.strip_suffix(b"\""));
    match inner {
        Some(inner) if inner.contains(&b'\\') => {
            Cow::Owned(decoded(&without_backslashes(inner), Plus::IsPlus).into_owned())
        }
        inner => decoded(inner.unwrap_or(value), Plus::IsPlus),
    }
}

/// The inside of a quoted value, without its escapes: `\"`, and `\101` in octal digits.
fn without_backslashes(text: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text;
    while let [first, tail @ ..] = rest {
        let (byte, used) = match (first, tail) {
            (b'\\', [high @ b'0'..=b'3', middle @ b'0'..=b'7', low @ b'0'..=b'7', ..]) => {
                ((high - b'0') * 64 + (middle - b'0') * 8 + (low - b'0'), 4)
            }
            (b'\\', [escaped, ..]) => (*escaped, 2),
            (plain, _) => (*plain, 1),
        };
        out.push(byte);
        rest = &rest[used..];
    }
    out
}

/// What `+` stands for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Plus {
    IsPlus,
    IsSpace,
}

/// A piece of a query or a cookie without its escapes.
pub(super) fn decoded(text: &[u8], plus: Plus) -> Cow<'_, str> {
    if !text.iter().any(|byte| *byte == b'%' || *byte == b'+' && plus == Plus::IsSpace) {
        return String::from_utf8_lossy(text);
    }
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text;
    while let [first, tail @ ..] = rest {
        let escaped = match (first, tail) {
            (b'%', [high, low, ..]) => digit(*high).zip(digit(*low)),
            _ => None,
        };
        match (first, escaped) {
            (_, Some((high, low))) => out.push(high * 16 + low),
            (b'+', None) if plus == Plus::IsSpace => out.push(b' '),
            (byte, None) => out.push(*byte),
        }
        rest = if escaped.is_some() { &tail[2..] } else { tail };
    }
    match String::from_utf8(out) {
        Ok(text) => Cow::Owned(text),
        Err(error) => Cow::Owned(String::from_utf8_lossy(error.as_bytes()).into_owned()),
    }
}

fn digit(byte: u8) -> Option<u8> {
    char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok())
}
