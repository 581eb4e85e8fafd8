//! Findings about a configuration: errors, with which no server starts, and warnings, with which it
//! does.
//!
//! `validate` prints them, `serve` logs the warnings when it starts and when it reads the file
//! again. All of them go through this type, so that both say the same.

use std::fmt;

/// The largest file that is read, in bytes.
pub const MAX_FILE_BYTES: u64 = 1 << 20;

/// Whether a server starts in spite of a finding.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Severity {
    /// The configuration cannot work: `serve` refuses it.
    Error,
    /// The configuration works, but hardly does what its author meant.
    Warning,
    /// The configuration may be right, but that could not be found out.
    Note,
}

/// One thing that is wrong with a configuration, or looks wrong.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Finding {
    /// Whether a server starts in spite of it.
    pub severity: Severity,
    /// Where it is: `tidegate.yaml:3:12`, `tidegate.yaml`, or the option that says it.
    pub place: String,
    /// What is wrong, and what to write instead.
    pub message: String,
}

impl Severity {
    /// The word for it.
    pub const fn name(self) -> &'static str {
        match self {
            Severity::Error => "error",
            Severity::Warning => "warning",
            Severity::Note => "note",
        }
    }
}

impl Finding {
    /// Something that cannot work.
    pub fn error(place: impl Into<String>, message: impl Into<String>) -> Finding {
        Finding { severity: Severity::Error, place: place.into(), message: message.into() }
    }

    /// Something that works, but is hardly meant.
    pub fn warning(place: impl Into<String>, message: impl Into<String>) -> Finding {
        Finding { severity: Severity::Warning, place: place.into(), message: message.into() }
    }

    /// Something that could not be found out.
    pub fn note(place: impl Into<String>, message: impl Into<String>) -> Finding {
        Finding { severity: Severity::Note, place: place.into(), message: message.into() }
    }

    /// Whether no server starts with it.
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

/// What is wrong with a file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// It cannot be read.
    #[error("{file}: {}", tidegate_bounded::files::why_unreadable(why))]
    Unreadable {
        /// The file.
        file: String,
        /// Why.
        why: std::io::Error,
    },
    /// It is too large.
    #[error("{file}: {bytes} bytes: expected at most {MAX_FILE_BYTES}")]
    TooLarge {
        /// The file.
        file: String,
        /// How large.
        bytes: u64,
    },
    /// It says something that cannot be.
    #[error("{file}:{problem}")]
    Invalid {
        /// The file.
        file: String,
        /// Line, column and what was expected.
        problem: String,
    },
    /// It can be read, but cannot work.
    #[error("{}", lines(_0))]
    Refused(Vec<Finding>),
}

impl ConfigError {
    /// What is wrong or looks wrong, each by itself.
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
