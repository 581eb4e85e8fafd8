//! What is wrong with a text that should be a limit.

use alloc::borrow::Cow;
use alloc::string::String;
use core::fmt;

use crate::limit::LimitError;

/// What is wrong with a text that should be a limit, where, and what was expected there.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ParseError {
    pub(super) column: usize,
    pub(super) kind: Kind,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    Unexpected { expected: Cow<'static, str>, found: Option<String> },
    Invalid(LimitError),
}

impl ParseError {
    /// The column, counted in characters from 1, at which the problem stands.
    pub fn column(&self) -> usize {
        self.column
    }

    /// The parameter outside the exact domain, if that is the problem.
    pub fn limit_error(&self) -> Option<&LimitError> {
        match &self.kind {
            Kind::Invalid(error) => Some(error),
            Kind::Unexpected { .. } => None,
        }
    }
}

impl fmt::Display for ParseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "column {}: ", self.column)?;
        match &self.kind {
            Kind::Invalid(error) => write!(f, "{error}"),
            Kind::Unexpected { expected, found: None } => write!(f, "expected {expected}, found the end"),
            Kind::Unexpected { expected, found: Some(found) } => write!(f, "expected {expected}, found {found:?}"),
        }
    }
}

impl core::error::Error for ParseError {
    fn source(&self) -> Option<&(dyn core::error::Error + 'static)> {
        match &self.kind {
            Kind::Invalid(error) => Some(error),
            Kind::Unexpected { .. } => None,
        }
    }
}
