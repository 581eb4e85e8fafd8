//! Findings about a configuration: errors, which prevent a start, and warnings.
//!
//! `validate` prints them; `serve` logs the warnings at the start and after a reload. Both use this
//! type, so that both report the same.

use std::fmt;

/// The largest file that is read, in bytes.
pub const MAX_FILE_BYTES: u64 = 1 << 20;

/// Whether a finding prevents a start.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Severity {
    /// The configuration cannot work: `serve` refuses it.
    Error,
    /// The configuration works, but probably not as intended.
    Warning,
    /// The configuration may be right, but that could not be checked.
    Note,
}

/// An error, a warning or a note about a configuration.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Finding {
    /// Whether it prevents a start.
    pub severity: Severity,
    /// Its place: `tidegate.yaml:3:12`, `tidegate.yaml`, or an option.
    pub place: String,
    /// What is wrong, and what to write instead.
    pub message: String,
}

impl Severity {
    /// The word that is printed.
    pub const fn name(self) -> &'static str {
        match self {
            Severity::Error => "error",
            Severity::Warning => "warning",
            Severity::Note => "note",
        }
    }
}

impl Finding {
    /// An error.
    pub fn error(place: impl Into<String>, message: impl Into<String>) -> Finding {
        Finding { severity: Severity::Error, place: place.into(), message: message.into() }
    }

    /// A warning.
    pub fn warning(place: impl Into<String>, message: impl Into<String>) -> Finding {
        Finding { severity: Severity::Warning, place: place.into(), message: message.into() }
    }

    /// A note.
    pub fn note(place: impl Into<String>, message: impl Into<String>) -> Finding {
        Finding { severity: Severity::Note, place: place.into(), message: message.into() }
    }

    /// Whether it prevents a start.
    pub fn is_error(&self) -> bool {
        self.severity == Severity::Error
    }
}

/// `warning: tidegate.yaml:3:12: what is wrong`.
impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}: {}", self.severity.name(), self.place, self.message)
    }
}

/// Sorts findings by their places: by file, line and column.
pub fn sort(findings: &mut [Finding]) {
    findings.sort_by_key(|finding| {
        let mut parts = finding.place.rsplitn(3, ':');
        let (column, line, file) = (parts.next(), parts.next(), parts.next());
        match (file, line.map(str::parse::<u64>), column.map(str::parse::<u64>)) {
            (Some(file), Some(Ok(line)), Some(Ok(column))) => (file.to_string(), line, column),
            _ => (finding.place.clone(), 0, 0),
        }
    });
}

/// Why a file is refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// It cannot be read.
    #[error("{file}: {}", tidegate_bounded::files::why_unreadable(why))]
    Unreadable {
        /// The file.
        file: String,
        /// The cause.
        why: std::io::Error,
    },
    /// It is too large.
    #[error("{file}: {bytes} bytes: expected at most {MAX_FILE_BYTES}")]
    TooLarge {
        /// The file.
        file: String,
        /// Its size.
        bytes: u64,
    },
    /// It has an error.
    #[error("{file}:{problem}")]
    Invalid {
        /// The file.
        file: String,
        /// Line, column and what was expected.
        problem: String,
    },
    /// It can be read, but has errors.
    #[error("{}", lines(_0))]
    Refused(Vec<Finding>),
}

impl ConfigError {
    /// The findings, one by one.
    pub fn findings(&self) -> Vec<Finding> {
        let (place, message) = match self {
            ConfigError::Refused(findings) => return findings.clone(),
            ConfigError::Unreadable { file, why } => {
                (file.clone(), tidegate_bounded::files::why_unreadable(why))
            }
            ConfigError::TooLarge { file, bytes } => {
                (file.clone(), format!("{bytes} bytes: expected at most {MAX_FILE_BYTES}"))
            }
            ConfigError::Invalid { file, problem } => match problem.strip_prefix(' ') {
                Some(message) => (file.clone(), message.into()),
                None => match problem.split_once(": ") {
                    Some((at, message)) => (format!("{file}:{at}"), message.into()),
                    None => (file.clone(), problem.clone()),
                },
            },
        };
        vec![Finding::error(place, message)]
    }
}

/// `tidegate.yaml:3:12: what is wrong`, a line for each error.
fn lines(findings: &[Finding]) -> String {
    let lines: Vec<String> = findings
        .iter()
        .filter(|one| one.is_error())
        .map(|one| format!("{}: {}", one.place, one.message))
        .collect();
    lines.join("\n")
}
