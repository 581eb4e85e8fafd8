//! The normal form of paths and hosts.
//!
//! One resource has many spellings, and `/v1/%73earch`, `//v1/search` or `/v1/x/../search` would
//! bypass a limit that compares text. So rules match normal forms, and keys contain normal forms.

use std::borrow::Cow;

/// The longest path, in bytes.
pub const MAX_PATH_BYTES: usize = 8192;
/// The longest host with its port, in bytes.
pub const MAX_HOST_BYTES: usize = 512;

/// A path or host is too long: refuse the request.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("a {what} of {bytes} bytes: expected at most {longest}")]
pub struct TargetTooLong {
    /// `path` or `host`.
    pub what: &'static str,
    /// The length in bytes.
    pub bytes: usize,
    /// The longest valid length in bytes.
    pub longest: usize,
}

/// The normal form of a path.
///
/// - `?`, `#` and what follows are removed. An empty path is `/`, and a path without a leading slash
///   gets one; `*` stays.
/// - A character has one spelling: letters, digits and ``-._~!$&'()*+,=:@`` are literal, everything
///   else is `%XX` in capitals. So `%73` is `s`, `%3a` is `:`, and `é` is `%C3%A9`. A
///   `%` that starts no escape is `%25`.
/// - An encoded slash stays encoded, because it is not a slash. Nothing is decoded twice: `%252e`
///   stays. [`PathPolicy`](super::PathPolicy) refuses what servers read in different ways.
/// - `;` or `%3B` and what follows in a segment are removed, because some servers ignore them.
/// - Several slashes are one. Then `.` and `..` are resolved, which never leaves the root. A slash
///   at the end stays.
/// - Upper and lower case differ, as on most servers.
///
/// A normal form is its own normal form.
///
/// # Errors
/// If the path is longer than [`MAX_PATH_BYTES`].
///
/// ```
/// use tidegate::http::normal_path;
/// assert_eq!(normal_path("/v1//x/%2e%2e/%73earch;v=1?q=2")?, "/v1/search");
/// assert_eq!(normal_path("/v1/search")?, "/v1/search");
/// # Ok::<(), tidegate::http::TargetTooLong>(())
/// ```
pub fn normal_path(path: &str) -> Result<Cow<'_, str>, TargetTooLong> {
    let path = path.split(['?', '#']).next().unwrap_or_default();
    if path.len() > MAX_PATH_BYTES {
        return Err(TargetTooLong { what: "path", bytes: path.len(), longest: MAX_PATH_BYTES });
    }
    if path == "*" || is_normal(path) {
        return Ok(Cow::Borrowed(path));
    }
    let mut out = String::with_capacity(path.len() + 1);
    let mut ends_with_slash = false;
    for segment in path.split('/') {
        ends_with_slash = true;
        let start = out.len();
        out.push('/');
        spell(without_parameters(segment), &mut out);
        match &out[start + 1..] {
            "" | "." => out.truncate(start),
            ".." => {
                out.truncate(start);
                out.truncate(out.rfind('/').unwrap_or(0));
            }
            _ => ends_with_slash = false,
        }
    }
    if ends_with_slash {
        out.push('/');
    }
    Ok(Cow::Owned(out))
}

/// A segment up to `;`, in either spelling.
pub(super) fn without_parameters(segment: &str) -> &str {
    let bytes = segment.as_bytes();
    let starts = |index: &usize| bytes[*index] == b';' || escaped(bytes, *index) == Some(b';');
    (0..bytes.len()).find(starts).map_or(segment, |end| &segment[..end])
}

/// Whether a path is in normal form already, so that it needs no copy.
pub(super) fn is_normal(path: &str) -> bool {
    let mut before = b' ';
    for byte in path.bytes() {
        // A slash or a dot after a slash needs normalising, and so do `%` and `;` anywhere.
        let plain = stands_for_itself(byte) && !(byte == b'.' && before == b'/');
        if !(plain || byte == b'/' && before != b'/') {
            return false;
        }
        before = byte;
    }
    path.starts_with('/')
}

fn stands_for_itself(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"-._~!$&'()*+,=:@".contains(&byte)
}

/// Appends each character of a segment in its normal spelling.
fn spell(segment: &str, out: &mut String) {
    let bytes = segment.as_bytes();
    let mut index = 0;
    while let Some(&byte) = bytes.get(index) {
        let escaped = escaped(bytes, index);
        let byte = escaped.unwrap_or(byte);
        if stands_for_itself(byte) {
            out.push(char::from(byte));
        } else {
            const DIGITS: &[u8; 16] = b"0123456789ABCDEF";
            let [high, low] =
                [byte >> 4, byte & 15].map(|digit| char::from(DIGITS[usize::from(digit)]));
            out.extend(['%', high, low]);
        }
        index += if escaped.is_some() { 3 } else { 1 };
    }
}

/// The byte of the escape at this index.
pub(super) fn escaped(bytes: &[u8], index: usize) -> Option<u8> {
    match bytes.get(index..)? {
        [b'%', high, low, ..] => digit(*high).zip(digit(*low)).map(|(high, low)| high * 16 + low),
        _ => None,
    }
}

fn digit(byte: u8) -> Option<u8> {
    char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok())
}

/// The normal form of a host: in lower case, without port and without the dot at the end. An IPv6
/// address keeps its brackets.
///
/// # Errors
/// If it is longer than [`MAX_HOST_BYTES`].
///
/// ```
/// use tidegate::http::normal_host;
/// assert_eq!(normal_host("API.Example.com.:443")?, "api.example.com");
/// # Ok::<(), tidegate::http::TargetTooLong>(())
/// ```
pub fn normal_host(host: &str) -> Result<Cow<'_, str>, TargetTooLong> {
    if host.len() > MAX_HOST_BYTES {
        return Err(TargetTooLong { what: "host", bytes: host.len(), longest: MAX_HOST_BYTES });
    }
    let host = host.trim();
    // The port follows the last colon outside of brackets.
    let host = match host.rsplit_once(':') {
        Some((name, port))
            if port.bytes().all(|byte| byte.is_ascii_digit())
                && (!name.contains(':') || name.ends_with(']')) =>
        {
            name
        }
        _ => host,
    };
    let host = host.strip_suffix('.').unwrap_or(host);
    if host.bytes().any(|byte| byte.is_ascii_uppercase()) {
        return Ok(Cow::Owned(host.to_ascii_lowercase()));
    }
    Ok(Cow::Borrowed(host))
}
