//! Patterns of attribute values: text, a glob, a network, or a negation.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use tidegate::http::Network;

/// A condition on one value.
///
/// `*` stands for any run of characters, `?` for exactly one, `\` takes the next character as it
/// is. `10.0.0.0/8` is a network and matches addresses in any spelling. A leading `!` negates.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Pattern {
    text: Box<str>,
    not: bool,
    kind: PatternKind,
}

#[derive(Clone, PartialEq, Eq, Debug)]
enum PatternKind {
    Exact(Box<str>),
    Glob(Vec<PatternPiece>),
    Network(Network),
}

#[derive(Clone, PartialEq, Eq, Debug)]
enum PatternPiece {
    Char(char),
    One,
    Any,
}

/// The longest pattern, in bytes.
pub const MAX_PATTERN_BYTES: usize = 1024;

/// What is wrong with a pattern.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum PatternError {
    /// It is blank.
    #[error(
        "a blank pattern: expected text, a glob such as /v1/*, or a network such as 10.0.0.0/8; write '*' for any value"
    )]
    Blank,
    /// It is too long.
    #[error("a pattern of {0} bytes: expected at most {MAX_PATTERN_BYTES}")]
    TooLong(usize),
    /// It ends with a backslash.
    #[error("pattern {0:?} ends with a backslash: expected a character after it")]
    Unfinished(String),
}

impl Pattern {
    /// A pattern in which only `*` means something.
    ///
    /// # Errors
    /// If it is blank or too long.
    pub fn stars(text: &str) -> Result<Pattern, PatternError> {
        if text.len() > MAX_PATTERN_BYTES {
            return Err(PatternError::TooLong(text.len()));
        }
        let mut pieces: Vec<PatternPiece> = Vec::new();
        for char in text.chars() {
            match char {
                '*' if pieces.last() == Some(&PatternPiece::Any) => {}
                '*' => pieces.push(PatternPiece::Any),
                char => pieces.push(PatternPiece::Char(char)),
            }
        }
        if pieces.is_empty() {
            return Err(PatternError::Blank);
        }
        Ok(Pattern { text: text.into(), not: false, kind: PatternKind::Glob(pieces) })
    }

    /// As it was written.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The status of a response: `4xx` stands for 400 to 499, anything else for what it stands for
    /// elsewhere.
    ///
    /// # Errors
    /// As for any pattern.
    pub fn of_status(text: &str) -> Result<Pattern, PatternError> {
        let (not, body) = text.strip_prefix('!').map_or((false, text), |body| (true, body));
        match body.as_bytes() {
            [class @ b'0'..=b'9', b'x' | b'X', b'x' | b'X'] => {
                let kind = PatternKind::Glob(vec![
                    PatternPiece::Char(char::from(*class)),
                    PatternPiece::One,
                    PatternPiece::One,
                ]);
                Ok(Pattern { text: text.into(), not, kind })
            }
            _ => text.parse(),
        }
    }

    /// As it was written, without the `!`.
    pub(crate) fn body(&self) -> &str {
        if self.not { &self.text[1..] } else { &self.text }
    }

    /// Whether it begins with `!`.
    pub(crate) fn is_negated(&self) -> bool {
        self.not
    }

    /// The one value that it is about, if it is about one.
    pub(crate) fn exact(&self) -> Option<&str> {
        match &self.kind {
            PatternKind::Exact(text) => Some(text),
            _ => None,
        }
    }

    /// The network that it is about, if it is about one.
    pub(crate) fn network(&self) -> Option<&Network> {
        match &self.kind {
            PatternKind::Network(network) => Some(network),
            _ => None,
        }
    }

    /// Whether it matches every value that `other` matches. False where that is not certain.
    pub(crate) fn covers(&self, other: &Pattern) -> bool {
        if self == other
            || matches!((self.not, &self.kind), (false, PatternKind::Glob(pieces)) if pieces[..] == [PatternPiece::Any])
        {
            return true;
        }
        match (self.not, other.not) {
            (false, false) => self.includes(other),
            (true, false) => Pattern { not: false, ..self.clone() }.excludes(other),
            // What is not in the larger is not in the smaller.
            (true, true) => {
                let (own, other) = (
                    Pattern { not: false, ..self.clone() },
                    Pattern { not: false, ..other.clone() },
                );
                other.covers(&own)
            }
            (false, true) => false,
        }
    }

    /// The same for two that are not negated.
    fn includes(&self, other: &Pattern) -> bool {
        match (&self.kind, &other.kind) {
            (_, PatternKind::Exact(text)) => self.matches(text),
            (PatternKind::Network(wide), PatternKind::Network(narrow)) => {
                wide.prefix() <= narrow.prefix() && wide.contains(narrow.address())
            }
            // Of globs those are known that end with a star, and of which the other is a
            // continuation.
            (PatternKind::Glob(pieces), PatternKind::Glob(others)) => match pieces.split_last() {
                Some((PatternPiece::Any, before)) => others.starts_with(before),
                _ => false,
            },
            _ => false,
        }
    }

    /// Whether no value matches both. False where that is not certain.
    pub(crate) fn excludes(&self, other: &Pattern) -> bool {
        if let (PatternKind::Exact(text), false) = (&other.kind, other.not) {
            return !self.matches(text);
        }
        if let (PatternKind::Exact(text), false) = (&self.kind, self.not) {
            return !other.matches(text);
        }
        match (self.not, other.not) {
            (false, false) => match (&self.kind, &other.kind) {
                (PatternKind::Network(one), PatternKind::Network(two)) => {
                    !one.contains(two.address()) && !two.contains(one.address())
                }
                (PatternKind::Glob(one), PatternKind::Glob(two)) => {
                    let letters = one.iter().zip(two).take_while(|(one, two)| {
                        **one != PatternPiece::Any && **two != PatternPiece::Any
                    });
                    letters.into_iter().any(|pair| matches!(pair, (PatternPiece::Char(one), PatternPiece::Char(two)) if one != two))
                }
                _ => false,
            },
            (true, false) => Pattern { not: false, ..self.clone() }.covers(other),
            (false, true) => Pattern { not: false, ..other.clone() }.covers(self),
            (true, true) => false,
        }
    }

    /// Whether `value` is such a value.
    pub fn matches(&self, value: &str) -> bool {
        let matches = match &self.kind {
            PatternKind::Exact(text) => **text == *value,
            PatternKind::Glob(pieces) => glob(pieces, value),
            PatternKind::Network(network) => {
                value.parse::<IpAddr>().is_ok_and(|ip| network.contains(ip))
            }
        };
        matches != self.not
    }
}

/// Linear in the value for each `*`: goes back to the last one only.
fn glob(pieces: &[PatternPiece], value: &str) -> bool {
    let (mut piece, mut rest) = (0, value.chars());
    let mut retry: Option<(usize, std::str::Chars<'_>)> = None;
    loop {
        if let Some(PatternPiece::Any) = pieces.get(piece) {
            piece += 1;
            retry = Some((piece, rest.clone()));
            continue;
        }
        let fits = match (pieces.get(piece), rest.next()) {
            (None, None) => return true,
            (Some(PatternPiece::One), Some(_)) => true,
            (Some(PatternPiece::Char(expected)), Some(found)) => *expected == found,
            (Some(_), None) => return false,
            _ => false,
        };
        if fits {
            piece += 1;
            continue;
        }
        let Some((at, mut from)) = retry.take() else { return false };
        if from.next().is_none() {
            return false;
        }
        (piece, rest) = (at, from.clone());
        retry = Some((at, from));
    }
}

impl FromStr for Pattern {
    type Err = PatternError;

    fn from_str(text: &str) -> Result<Self, PatternError> {
        if text.len() > MAX_PATTERN_BYTES {
            return Err(PatternError::TooLong(text.len()));
        }
        let (not, body) = match text.strip_prefix('!') {
            Some(body) => (true, body),
            None => (false, text),
        };
        if body.trim().is_empty() {
            return Err(PatternError::Blank);
        }
        // An address alone is text like any other.
        if body.contains('/')
            && let Ok(network) = body.parse()
        {
            return Ok(Pattern { text: text.into(), not, kind: PatternKind::Network(network) });
        }
        let mut pieces = Vec::new();
        let mut chars = body.chars();
        while let Some(char) = chars.next() {
            match char {
                '*' if pieces.last() == Some(&PatternPiece::Any) => {}
                '*' => pieces.push(PatternPiece::Any),
                '?' => pieces.push(PatternPiece::One),
                '\\' => match chars.next() {
                    Some(next) => pieces.push(PatternPiece::Char(next)),
                    None => return Err(PatternError::Unfinished(text.into())),
                },
                char => pieces.push(PatternPiece::Char(char)),
            }
        }
        let exact: Option<String> = pieces
            .iter()
            .map(|piece| match piece {
                PatternPiece::Char(char) => Some(*char),
                _ => None,
            })
            .collect();
        let kind = match exact {
            Some(exact) => PatternKind::Exact(exact.into()),
            None => PatternKind::Glob(pieces),
        };
        Ok(Pattern { text: text.into(), not, kind })
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_what_they_say() {
        for (pattern, value, expected) in [
            ("POST", "POST", true),
            ("POST", "post", false),
            ("/v1/*", "/v1/search", true),
            ("/v1/*", "/v1/", true),
            ("/v1/*", "/v2/search", false),
            ("*", "", true),
            ("*/x*", "/a/x/b", true),
            ("a*b*c", "a-b-b-c", true),
            ("a*b*c", "a-b-b-", false),
            ("a?c", "abc", true),
            ("a?c", "ac", false),
            ("a\\*", "a*", true),
            ("a\\*", "ab", false),
            ("!GET", "POST", true),
            ("!GET", "GET", false),
            ("10.0.0.0/8", "10.1.2.3", true),
            ("10.0.0.0/8", "::ffff:10.1.2.3", true),
            ("10.0.0.0/8", "11.1.2.3", false),
            ("10.0.0.0/8", "not an address", false),
            ("2001:db8::/32", "2001:db8:1::1", true),
            ("!10.0.0.0/8", "11.0.0.1", true),
            ("ä*", "äöü", true),
        ] {
            assert_eq!(
                pattern.parse::<Pattern>().unwrap().matches(value),
                expected,
                "{pattern} on {value}"
            );
        }
    }

    #[test]
    fn a_glob_full_of_stars_is_not_slow() {
        let pattern: Pattern = format!("{}b", "*a".repeat(500)).parse().unwrap();
        assert!(!pattern.matches(&"a".repeat(100_000)));
    }

    #[test]
    fn only_a_star_means_something_where_only_stars_do() {
        for (pattern, value, expected) in [
            ("/a/*", "/a/b", true),
            ("a?*", "abc", false),
            ("a?*", "a?c", true),
            ("!a*", "b", false),
            ("!a*", "!ab", true),
            ("a**b", "a-b", true),
        ] {
            assert_eq!(
                Pattern::stars(pattern).unwrap().matches(value),
                expected,
                "{pattern} on {value}"
            );
        }
        assert!(
            Pattern::stars("**").unwrap().covers(&Pattern::stars("a*").unwrap()),
            "two stars are one"
        );
        assert!(Pattern::stars(&"x".repeat(MAX_PATTERN_BYTES)).is_ok());
        assert_eq!(Pattern::stars(&"x".repeat(1025)).unwrap_err(), PatternError::TooLong(1025));
        assert_eq!(Pattern::stars("").unwrap_err(), PatternError::Blank);
    }

    #[test]
    fn a_class_of_status_is_a_hundred_of_them() {
        for (pattern, value, expected) in [
            ("4xx", "404", true),
            ("4XX", "499", true),
            ("4xx", "500", false),
            ("4xx", "4040", false),
            ("!4xx", "404", false),
            ("!4xx", "200", true),
            ("200", "200", true),
            ("200", "201", false),
            ("20?", "201", true),
        ] {
            assert_eq!(
                Pattern::of_status(pattern).unwrap().matches(value),
                expected,
                "{pattern} on {value}"
            );
        }
    }

    #[test]
    fn a_pattern_says_what_it_is_about() {
        for (text, body, is_negated, exact, network) in [
            ("POST", "POST", false, Some("POST"), None),
            ("!a\\*", "a\\*", true, Some("a*"), None),
            ("/v1/*", "/v1/*", false, None, None),
            ("!10.1.0.0/8", "10.1.0.0/8", true, None, Some("10.0.0.0/8")),
        ] {
            let pattern: Pattern = text.parse().unwrap();
            assert_eq!((pattern.text(), pattern.body()), (text, body));
            assert_eq!((pattern.to_string(), pattern.is_negated()), (text.into(), is_negated));
            assert_eq!(pattern.exact(), exact, "{text}");
            assert_eq!(
                pattern.network().map(|network| network.to_string()).as_deref(),
                network,
                "{text}"
            );
        }
    }

    #[test]
    fn bad_patterns_say_what_was_expected() {
        assert!("".parse::<Pattern>().unwrap_err().to_string().contains("blank"));
        assert!("!".parse::<Pattern>().unwrap_err().to_string().contains("blank"));
        assert!("a\\".parse::<Pattern>().unwrap_err().to_string().contains("backslash"));
        assert!("x".repeat(MAX_PATTERN_BYTES).parse::<Pattern>().is_ok());
        assert!(
            "x".repeat(2000).parse::<Pattern>().unwrap_err().to_string().contains("2000 bytes")
        );
    }
}
