//! Findings about a configuration: errors, with which no server starts, and warnings, with which it
//! does.
//!
//! `validate` prints them, `serve` logs the warnings when it starts and when it reads the file
//! again. All of them go through this type, so that both say the same.

use std::fmt;

use crate::observe::Log;

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

/// `tidegate.yaml:3:12: what is wrong`, a line for each error.
pub(super) fn lines(findings: &[Finding]) -> String {
    let lines: Vec<String> = findings
        .iter()
        .filter(|one| one.is_error())
        .map(|one| format!("{}: {}", one.place, one.message))
        .collect();
    lines.join("\n")
}

/// Logs each finding: a line for each, at the level of its severity.
pub(crate) fn log(log: &Log, findings: &[Finding]) {
    for Finding { severity, place, message } in findings {
        match severity {
            Severity::Error => log.error("configuration", &[("place", place), ("error", message)]),
            Severity::Note => log.info("configuration", &[("place", place), ("note", message)]),
            Severity::Warning => {
                log.warn("configuration", &[("place", place), ("warning", message)])
            }
        }
    }
}
