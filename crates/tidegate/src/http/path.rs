//! The policy for ambiguous paths: rules match only targets that every server reads as the same path.
//!
//! A rule must match the path that the service will see. Servers differ: nginx, Flask and Go read
//! `/v1%2fsearch` as `/v1/search`, Node reads `/v1\search` and Tomcat `/v1/chat/..;/search` as that
//! path, and others do not. An ambiguous target is refused, or rewritten to the one reading that is
//! left.

use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;

use super::target::{
    MAX_PATH_BYTES, TargetTooLong, escaped, is_normal, normal_path, without_parameters,
};

/// What happens to a path with an escaped slash, `%2F`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum EscapedSlashes {
    /// The request is refused.
    #[default]
    Reject,
    /// `%2F` becomes `/`, for the rules and for the service.
    Decode,
    /// `%2F` stays, and so does `%5C`. The service must not read it as a slash.
    Keep,
}

/// What happens to a path with a segment `.` or `..`, also escaped or with parameters (`..;a=1`).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum DotSegments {
    /// The request is refused.
    #[default]
    Reject,
    /// The segments are resolved, for the rules and for the service.
    Resolve,
    /// The segments stay. Rules see the resolved path, and the service must resolve it in the same
    /// way.
    Keep,
}

/// Which targets are refused or rewritten because servers read them as different paths.
///
/// A backslash and an escaped NUL are always refused; `%5C` is, unless escaped slashes are kept.
///
/// ```
/// use tidegate::http::{EscapedSlashes, PathPolicy};
/// let policy = PathPolicy::default();
/// assert!(policy.read("/v1%2fsearch").is_err() && policy.read("/x/../v1/search").is_err());
/// let policy = PathPolicy { escaped_slashes: EscapedSlashes::Decode, ..policy };
/// let target = policy.read("/v1%2f%73earch?q=1")?;
/// assert_eq!((&*target.sent, &*target.path), ("/v1/%73earch?q=1", "/v1/search"));
/// # Ok::<(), tidegate::http::RefusedPath>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct PathPolicy {
    /// The policy for `%2F`.
    pub escaped_slashes: EscapedSlashes,
    /// The policy for `.` and `..`.
    pub dot_segments: DotSegments,
}

/// A target that rules can match.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Target<'a> {
    /// The target with its query, as it must be sent to the service.
    pub sent: Cow<'a, str>,
    /// The [normal form](normal_path) of its path, for the rules.
    pub path: Cow<'a, str>,
}

/// Why a path is refused.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RefusedPath {
    /// The path is longer than [`MAX_PATH_BYTES`].
    #[error(transparent)]
    TooLong(#[from] TargetTooLong),
    /// The path has an escaped slash.
    #[error(
        "path {0:?} has an escaped slash (%2F), which some servers read as a slash: expected a path without one"
    )]
    EscapedSlash(String),
    /// The path has a backslash, escaped or not.
    #[error(
        "path {0:?} has a backslash, which some servers read as a slash: expected a path without one"
    )]
    Backslash(String),
    /// The path has an escaped NUL.
    #[error("path {0:?} has a NUL (%00), at which some servers end: expected a path without one")]
    Nul(String),
    /// The path has a segment `.` or `..`.
    #[error("path {0:?} has a segment \".\" or \"..\": expected the path that it leads to")]
    DotSegment(String),
}

/// The ambiguous parts of a path.
#[derive(Default)]
struct Ambiguities {
    escaped_slash: bool,
    backslash: bool,
    escaped_backslash: bool,
    nul: bool,
}

impl PathPolicy {
    /// The policy that keeps every target unchanged. The service must read paths in their normal
    /// form, as the rules do.
    pub const KEEP: PathPolicy =
        PathPolicy { escaped_slashes: EscapedSlashes::Keep, dot_segments: DotSegments::Keep };

    /// Reads the target of a request line: `/path?query`, or `*`. Several slashes at its start become
    /// one, because some servers read `//host/path` as a host.
    ///
    /// # Errors
    /// If its path is refused, or longer than [`MAX_PATH_BYTES`].
    pub fn read<'a>(&self, target: &'a str) -> Result<Target<'a>, RefusedPath> {
        let end = target.find(['?', '#']).unwrap_or(target.len());
        let (path, rest) = target.split_at(end);
        if path.len() > MAX_PATH_BYTES {
            return Err(
                TargetTooLong { what: "path", bytes: path.len(), longest: MAX_PATH_BYTES }.into()
            );
        }
        if is_normal(path) || path == "*" {
            return Ok(Target { sent: Cow::Borrowed(target), path: Cow::Borrowed(path) });
        }
        let Cow::Owned(sent) = self.rewritten(path)? else {
            return Ok(Target { sent: Cow::Borrowed(target), path: normal_path(path)? });
        };
        let path = Cow::Owned(normal_path(&sent)?.into_owned());
        Ok(Target { sent: Cow::Owned(sent + rest), path })
    }

    /// The path to send to the service.
    fn rewritten<'a>(&self, path: &'a str) -> Result<Cow<'a, str>, RefusedPath> {
        let seen = Ambiguities::of(path);
        let keeps = self.escaped_slashes == EscapedSlashes::Keep;
        if seen.backslash || seen.escaped_backslash && !keeps {
            return Err(RefusedPath::Backslash(shown(path)));
        }
        if seen.nul {
            return Err(RefusedPath::Nul(shown(path)));
        }
        let mut sent = Cow::Borrowed(path);
        match self.escaped_slashes {
            EscapedSlashes::Reject if seen.escaped_slash => {
                return Err(RefusedPath::EscapedSlash(shown(path)));
            }
            EscapedSlashes::Decode if seen.escaped_slash => sent = Cow::Owned(with_slashes(path)),
            _ => {}
        }
        match self.dot_segments {
            DotSegments::Reject if segments(&sent).any(is_dots) => {
                return Err(RefusedPath::DotSegment(shown(path)));
            }
            DotSegments::Resolve if segments(&sent).any(is_dots) => {
                // After an escaped slash that stays, their target is ambiguous.
                let resolved = resolved(&sent);
                if segments(&resolved).any(is_dots) {
                    return Err(RefusedPath::DotSegment(shown(path)));
                }
                sent = Cow::Owned(resolved);
            }
            _ => {}
        }
        if sent.starts_with("//") {
            sent = Cow::Owned(format!("/{}", sent.trim_start_matches('/')));
        }
        Ok(sent)
    }
}

impl Ambiguities {
    fn of(path: &str) -> Self {
        let (bytes, mut seen) = (path.as_bytes(), Ambiguities::default());
        for (index, byte) in bytes.iter().enumerate() {
            match (byte, escaped(bytes, index)) {
                (b'\\', _) => seen.backslash = true,
                (0, _) | (_, Some(0)) => seen.nul = true,
                (_, Some(b'\\')) => seen.escaped_backslash = true,
                (_, Some(b'/')) => seen.escaped_slash = true,
                _ => {}
            }
        }
        seen
    }
}

/// The segments of a path for a server that reads every kind of slash as a slash.
fn segments(path: &str) -> impl Iterator<Item = &str> {
    let mut rest = Some(path);
    std::iter::from_fn(move || {
        let text = rest?;
        let bytes = text.as_bytes();
        for index in 0..bytes.len() {
            let width = match (bytes[index], escaped(bytes, index)) {
                (b'/', _) => 1,
                (_, Some(b'/' | b'\\')) => 3,
                _ => continue,
            };
            rest = Some(&text[index + width..]);
            return Some(&text[..index]);
        }
        rest = None;
        Some(text)
    })
}

/// Whether a segment without its parameters is `.` or `..` after one decoding.
fn is_dots(segment: &str) -> bool {
    let segment = without_parameters(segment).as_bytes();
    let (mut index, mut dots) = (0, 0);
    while let Some(byte) = segment.get(index) {
        let escape = escaped(segment, index);
        if escape.unwrap_or(*byte) != b'.' {
            return false;
        }
        index += if escape.is_some() { 3 } else { 1 };
        dots += 1;
    }
    matches!(dots, 1 | 2)
}

/// The path with `/` for every `%2F`.
fn with_slashes(path: &str) -> String {
    path.replace("%2F", "/").replace("%2f", "/")
}

/// The path with `.` and `..` resolved as in its normal form, and all other segments unchanged.
fn resolved(path: &str) -> String {
    let mut kept: Vec<&str> = Vec::new();
    let mut ends_with_slash = false;
    for segment in path.split('/') {
        ends_with_slash = segment.is_empty() || is_dots(segment);
        match segment {
            "" => {}
            dots if is_dots(dots) => {
                if is_parent(dots) {
                    kept.pop();
                }
            }
            segment => kept.push(segment),
        }
    }
    let mut out = String::with_capacity(path.len());
    for segment in kept {
        out.push('/');
        out.push_str(segment);
    }
    if ends_with_slash {
        out.push('/');
    }
    out
}

/// Whether dots are `..`.
fn is_parent(dots: &str) -> bool {
    let dots = without_parameters(dots);
    dots.matches('.').count() + dots.matches('%').count() == 2
}

/// The part of a path that an error repeats.
fn shown(path: &str) -> String {
    path.chars().take(64).collect()
}

macro_rules! words {
    ($kind:ty, $what:literal, $($word:literal => $value:path),+) => {
        impl fmt::Display for $kind {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self { $($value => $word),+ })
            }
        }

        impl FromStr for $kind {
            type Err = String;

            fn from_str(text: &str) -> Result<Self, String> {
                match text {
                    $($word => Ok($value),)+
                    other => Err(format!("{} {other:?}: expected one of {}", $what, [$($word),+].join(", "))),
                }
            }
        }
    };
}

words!(EscapedSlashes, "escaped_slashes",
    "reject" => EscapedSlashes::Reject, "decode" => EscapedSlashes::Decode, "keep" => EscapedSlashes::Keep);
words!(DotSegments, "dot_segments",
    "reject" => DotSegments::Reject, "resolve" => DotSegments::Resolve, "keep" => DotSegments::Keep);

#[cfg(test)]
mod tests {
    use super::*;

    fn read(slashes: &str, dots: &str, target: &str) -> String {
        let policy = PathPolicy {
            escaped_slashes: slashes.parse().unwrap(),
            dot_segments: dots.parse().unwrap(),
        };
        match policy.read(target) {
            Ok(target) => format!("{} {}", target.sent, target.path),
            Err(RefusedPath::TooLong(_)) => "too long".into(),
            Err(RefusedPath::EscapedSlash(_)) => "slash".into(),
            Err(RefusedPath::Backslash(_)) => "backslash".into(),
            Err(RefusedPath::Nul(_)) => "nul".into(),
            Err(RefusedPath::DotSegment(_)) => "dots".into(),
        }
    }

    #[test]
    fn each_policy_refuses_or_rewrites_as_the_table_says() {
        for (target, reject, decode_resolve, keep_resolve, keep) in [
            ("/v1/search?q=/../%2f", "=", "=", "=", "="),
            ("/v1/%73earch", "/v1/%73earch /v1/search", "=", "=", "="),
            ("*", "* *", "=", "=", "="),
            ("/%2flogin", "slash", "/login /login", "/%2flogin /%2Flogin", "/%2flogin /%2Flogin"),
            ("/x/..%2flogin", "slash", "/login /login", "dots", "/x/..%2flogin /x/..%2Flogin"),
            (
                "/v1%2Fsearch?a",
                "slash",
                "/v1/search?a /v1/search",
                "/v1%2Fsearch?a /v1%2Fsearch",
                "=",
            ),
            ("/v1/chat/..;/x", "dots", "/v1/x /v1/x", "/v1/x /v1/x", "/v1/chat/..;/x /v1/x"),
            (
                "/v1/chat/%2e%2E%3bq/x",
                "dots",
                "/v1/x /v1/x",
                "/v1/x /v1/x",
                "/v1/chat/%2e%2E%3bq/x /v1/x",
            ),
            ("/a/./b/.", "dots", "/a/b/ /a/b/", "/a/b/ /a/b/", "/a/./b/. /a/b/"),
            ("/a//../b", "dots", "/b /b", "/b /b", "/a//../b /b"),
            ("/../../a", "dots", "/a /a", "/a /a", "/../../a /a"),
            ("/..", "dots", "/ /", "/ /", "/.. /"),
            ("/v1\\search", "backslash", "backslash", "backslash", "backslash"),
            ("/v1%5csearch", "backslash", "backslash", "/v1%5csearch /v1%5Csearch", "="),
            ("/a%00b", "nul", "nul", "nul", "nul"),
            ("//host/a", "/host/a /host/a", "=", "=", "="),
            ("/a//b", "/a//b /a/b", "=", "=", "="),
            ("/.well-known/...", "/.well-known/... /.well-known/...", "=", "=", "="),
            ("/a%252fb/%252e%252e", "/a%252fb/%252e%252e /a%252fb/%252e%252e", "=", "=", "="),
            ("/a;v=1/b", "/a;v=1/b /a/b", "=", "=", "="),
        ] {
            let mut expected = String::from("/v1/search?q=/../%2f /v1/search");
            let found = [
                ("reject", "reject"),
                ("decode", "resolve"),
                ("keep", "resolve"),
                ("keep", "keep"),
            ];
            for ((slashes, dots), row) in
                found.into_iter().zip([reject, decode_resolve, keep_resolve, keep])
            {
                // An empty column repeats the one before.
                if row != "=" {
                    expected = row.into();
                }
                assert_eq!(
                    read(slashes, dots, target),
                    expected,
                    "{target} with {slashes}, {dots}"
                );
            }
        }
        let longest = "/x".repeat(MAX_PATH_BYTES / 2);
        assert_eq!(read("reject", "reject", &longest), format!("{longest} {longest}"));
        assert_eq!(read("reject", "reject", &format!("{longest}y")), "too long");
    }

    #[test]
    fn a_refusal_names_the_path_and_what_was_expected() {
        let error = PathPolicy::default().read("/v1%2fsearch?q=1").unwrap_err().to_string();
        assert!(
            error.starts_with("path \"/v1%2fsearch\" has an escaped slash")
                && error.contains("expected"),
            "{error}"
        );
        let error = "merge".parse::<EscapedSlashes>().unwrap_err();
        assert_eq!(error, "escaped_slashes \"merge\": expected one of reject, decode, keep");
    }
}
