//! Why a text is not a limit.

use alloc::borrow::Cow;
use alloc::string::String;
use core::fmt;

use super::hint::hint;
use crate::limit::LimitError;

/// Why a text is not a limit: the place, and what was expected there.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ParseError {
    pub(super) column: usize,
    pub(super) kind: Kind,
    /// What to write instead, if that is known.
    pub(super) hint: Option<String>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    Unexpected {
        expected: Cow<'static, str>,
        found: Option<String>,
    },
    /// Words that are right in another place.
    Misplaced(String),
    Invalid(LimitError),
}

impl ParseError {
    pub(super) fn new(column: usize, kind: Kind) -> Self {
        ParseError { column, kind, hint: None }
    }

    /// Adds what the author of `text` most likely meant.
    pub(super) fn hinted(mut self, text: &str) -> Self {
        if matches!(self.kind, Kind::Unexpected { .. }) {
            self.hint = hint(text, self.column);
        }
        self
    }

    /// The column of the problem, counted in characters from 1.
    pub fn column(&self) -> usize {
        self.column
    }

    /// The parameter outside the exact domain, if that is the problem.
    pub fn limit_error(&self) -> Option<&LimitError> {
        match &self.kind {
            Kind::Invalid(error) => Some(error),
            Kind::Unexpected { .. } | Kind::Misplaced(_) => None,
        }
    }
}

impl fmt::Display for ParseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "column {}: ", self.column)?;
        match &self.kind {
            Kind::Invalid(error) => write!(f, "{error}"),
            Kind::Misplaced(message) => f.write_str(message),
            Kind::Unexpected { expected, found: None } => {
                write!(f, "expected {expected}, found the end")
            }
            Kind::Unexpected { expected, found: Some(found) } => {
                write!(f, "expected {expected}, found {found:?}")
            }
        }?;
        match &self.hint {
            Some(hint) => write!(f, ": {hint}"),
            None => Ok(()),
        }
    }
}

impl core::error::Error for ParseError {
    fn source(&self) -> Option<&(dyn core::error::Error + 'static)> {
        match &self.kind {
            Kind::Invalid(error) => Some(error),
            Kind::Unexpected { .. } | Kind::Misplaced(_) => None,
        }
    }
}
