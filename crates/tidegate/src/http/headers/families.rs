//! Which header families an answer carries, as text in configuration files.

use std::fmt;
use std::str::FromStr;

/// The draft of the IETF that `RateLimit-Policy` and `RateLimit` follow; both drafts use the same
/// names.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Draft {
    /// Draft 10: every limit by its name, with what remains and when more is available.
    Ten,
    /// Draft 7, which many clients still read: the binding limit, with what remains of it and when
    /// it is full again.
    Seven,
}

/// Which families of headers to send.
///
/// It displays as `draft-10 github` and parses from words with commas or spaces between them.
///
/// ```
/// use tidegate::http::headers::HeaderFamilies;
/// let families: HeaderFamilies = "draft-10, github".parse()?;
/// assert_eq!(families, HeaderFamilies::ALL);
/// # Ok::<(), tidegate::http::headers::HeaderFamiliesError>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HeaderFamilies {
    /// `RateLimit-Policy` and `RateLimit`, in this draft.
    pub ietf: Option<Draft>,
    /// `X-RateLimit-Limit`, `-Remaining`, `-Used`, `-Reset` and `-Resource`.
    pub github: bool,
}

impl HeaderFamilies {
    /// No family: denials carry `Retry-After` only.
    pub const NONE: HeaderFamilies = HeaderFamilies { ietf: None, github: false };
    /// Draft 10 of the IETF and the GitHub style.
    pub const ALL: HeaderFamilies = HeaderFamilies { ietf: Some(Draft::Ten), github: true };
    /// Draft 10 of the IETF only.
    pub const IETF: HeaderFamilies = HeaderFamilies { ietf: Some(Draft::Ten), github: false };
    /// Draft 7 of the IETF only.
    pub const DRAFT_7: HeaderFamilies = HeaderFamilies { ietf: Some(Draft::Seven), github: false };
    /// The GitHub style only.
    pub const GITHUB: HeaderFamilies = HeaderFamilies { ietf: None, github: true };

    /// Adds the family called `word`: `draft-10` (or `ietf`), `draft-7`, `github`, or `none`, which
    /// adds nothing.
    ///
    /// # Errors
    /// If `word` is no family, or the other draft is there already: both use the same names.
    pub fn with(self, word: &str) -> Result<HeaderFamilies, HeaderFamiliesError> {
        let draft = match word {
            "none" => return Ok(self),
            "github" => return Ok(HeaderFamilies { github: true, ..self }),
            "draft-10" | "ietf" => Draft::Ten,
            "draft-7" => Draft::Seven,
            _ => return Err(HeaderFamiliesError::Unknown(word.chars().take(40).collect())),
        };
        match self.ietf {
            Some(other) if other != draft => Err(HeaderFamiliesError::TwoDrafts),
            _ => Ok(HeaderFamilies { ietf: Some(draft), ..self }),
        }
    }
}

impl FromStr for HeaderFamilies {
    type Err = HeaderFamiliesError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut words = text.split([',', ' ']).filter(|word| !word.is_empty()).peekable();
        if words.peek().is_none() {
            return Err(HeaderFamiliesError::Unknown(String::new()));
        }
        words.try_fold(HeaderFamilies::NONE, HeaderFamilies::with)
    }
}

impl fmt::Display for HeaderFamilies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let draft = match self.ietf {
            Some(Draft::Ten) => "draft-10",
            Some(Draft::Seven) => "draft-7",
            None => "",
        };
        f.write_str(match (draft, self.github) {
            ("", false) => "none",
            ("", true) => "github",
            ("draft-10", true) => "draft-10 github",
            (_, true) => "draft-7 github",
            (draft, false) => draft,
        })
    }
}

/// Why a text is not [`HeaderFamilies`].
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum HeaderFamiliesError {
    /// A word is not the name of a family.
    Unknown(String),
    /// The text contains both drafts.
    TwoDrafts,
}

impl fmt::Display for HeaderFamiliesError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            HeaderFamiliesError::Unknown(word) => {
                write!(f, "{word:?}: expected draft-10 (or ietf), draft-7, github or none")
            }
            HeaderFamiliesError::TwoDrafts => {
                f.write_str("draft-10 and draft-7 have the same headers: expected one of the two")
            }
        }
    }
}

impl std::error::Error for HeaderFamiliesError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_parse_as_they_display() {
        for (text, expected) in [
            ("draft-10 github", HeaderFamilies::ALL),
            ("ietf,github", HeaderFamilies::ALL),
            ("github, draft-10", HeaderFamilies::ALL),
            ("draft-10", HeaderFamilies::IETF),
            ("draft-7", HeaderFamilies::DRAFT_7),
            ("draft-7 github", HeaderFamilies { ietf: Some(Draft::Seven), github: true }),
            ("github", HeaderFamilies::GITHUB),
            ("none", HeaderFamilies::NONE),
        ] {
            let read: HeaderFamilies = text.parse().unwrap();
            assert_eq!(read, expected, "{text}");
            assert_eq!(read.to_string().parse(), Ok(expected), "{text}");
        }
        assert_eq!("draft-7 ietf".parse::<HeaderFamilies>(), Err(HeaderFamiliesError::TwoDrafts));
        for wrong in ["", " ,", "draft-6", "GitHub"] {
            let error = wrong.parse::<HeaderFamilies>().unwrap_err();
            assert!(matches!(error, HeaderFamiliesError::Unknown(_)), "{wrong}");
            assert!(
                error.to_string().contains("expected draft-10 (or ietf), draft-7, github or none"),
                "{error}"
            );
        }
    }
}
