//! The expected answer of a transcript line, and how a decision differs from it.

use std::fmt;

use super::duration::{Micros, duration};
use super::{Fields, TraceError};
use tidegate_core::{Decision, Retry};

/// The expected answer of a transcript line; fields without a value match anything.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Expectation {
    /// Whether the request is allowed.
    pub allowed: bool,
    /// The units that are left.
    pub remaining: Option<u64>,
    /// When the same request would be allowed.
    pub retry: Option<Retry>,
    /// Microseconds until all units are available again.
    pub reset_after_us: Option<u64>,
    /// Microseconds until one more unit is available.
    pub next_after_us: Option<u64>,
    /// The units that were charged or given back.
    pub granted: Option<u64>,
}

impl Expectation {
    pub(super) fn read(fields: &mut Fields<'_>, line: u64) -> Result<Self, TraceError> {
        const ANSWERS: &str = "allow or deny";
        let answer = fields.need(line, "answer", ANSWERS)?;
        let allowed = match answer.text {
            word if word.eq_ignore_ascii_case("allow") => true,
            word if word.eq_ignore_ascii_case("deny") => false,
            _ => return Err(answer.error(line, "answer", ANSWERS.into())),
        };
        let mut expect = Expectation { allowed, ..Expectation::default() };
        while let Some(name) = fields.next() {
            let twice = match name.text {
                word if word.eq_ignore_ascii_case("remaining") => {
                    let value = fields
                        .need(line, "remaining", "a whole number")?
                        .number(line, "remaining")?;
                    expect.remaining.replace(value).is_some()
                }
                word if word.eq_ignore_ascii_case("granted") => {
                    let value =
                        fields.need(line, "granted", "a whole number")?.number(line, "granted")?;
                    expect.granted.replace(value).is_some()
                }
                word if word.eq_ignore_ascii_case("retry") => {
                    let field = fields.need(line, "retry", "a duration such as 499ms, or never")?;
                    let retry = if field.text.eq_ignore_ascii_case("never") {
                        Retry::Never
                    } else {
                        match duration(field.text)
                            .map_err(|expected| field.error(line, "retry", expected))?
                        {
                            0 => Retry::Now,
                            micros => Retry::After(micros),
                        }
                    };
                    expect.retry.replace(retry).is_some()
                }
                word if word.eq_ignore_ascii_case("reset") => {
                    let field = fields.need(line, "reset", "a duration such as 499ms")?;
                    let micros = duration(field.text)
                        .map_err(|expected| field.error(line, "reset", expected))?;
                    expect.reset_after_us.replace(micros).is_some()
                }
                word if word.eq_ignore_ascii_case("next") => {
                    let field = fields.need(line, "next", "a duration such as 499ms")?;
                    let micros = duration(field.text)
                        .map_err(|expected| field.error(line, "next", expected))?;
                    expect.next_after_us.replace(micros).is_some()
                }
                _ => {
                    let expected = "remaining, retry, reset, next, granted or the end of the line";
                    return Err(name.error(line, "expectation", expected.into()));
                }
            };
            if twice {
                return Err(name.error(line, "expectation", "each word only once".into()));
            }
        }
        Ok(expect)
    }

    /// Compares `decision` with the expected answer.
    ///
    /// # Errors
    /// All differences, in words.
    pub fn compare(&self, decision: &Decision) -> Result<(), Mismatch> {
        let word = |allowed| if allowed { "allow" } else { "deny" };
        let mut found = String::new();
        let mut differ = |name: &str, expected: String, answer: String| {
            if expected != answer {
                let comma = if found.is_empty() { "" } else { ", " };
                found += &format!("{comma}expected {name}{expected} but got {answer}");
            }
        };
        let verdict = decision.binding();
        let retry = |retry: Retry| {
            retry.micros().map_or("never".to_string(), |micros| Micros(micros).to_string())
        };
        differ("", word(self.allowed).into(), word(decision.allowed()).into());
        if let Some(remaining) = self.remaining {
            differ("remaining ", remaining.to_string(), verdict.remaining.to_string());
        }
        if let Some(expected) = self.retry {
            differ("retry ", retry(expected), retry(verdict.retry));
        }
        if let Some(micros) = self.reset_after_us {
            differ(
                "reset ",
                Micros(micros).to_string(),
                Micros(verdict.reset_after_us).to_string(),
            );
        }
        if let Some(micros) = self.next_after_us {
            differ("next ", Micros(micros).to_string(), Micros(verdict.next_after_us).to_string());
        }
        if let Some(granted) = self.granted {
            differ("granted ", granted.to_string(), verdict.granted.to_string());
        }
        if found.is_empty() { Ok(()) } else { Err(Mismatch(found)) }
    }
}

/// The differences between a decision and the expected answer, in words.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Mismatch(String);

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Mismatch {}

impl fmt::Display for Expectation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.allowed { "allow" } else { "deny" })?;
        if let Some(remaining) = self.remaining {
            write!(f, " remaining {remaining}")?;
        }
        match self.retry.map(Retry::micros) {
            Some(Some(micros)) => write!(f, " retry {}", Micros(micros))?,
            Some(None) => f.write_str(" retry never")?,
            None => {}
        }
        if let Some(micros) = self.reset_after_us {
            write!(f, " reset {}", Micros(micros))?;
        }
        if let Some(micros) = self.next_after_us {
            write!(f, " next {}", Micros(micros))?;
        }
        if let Some(granted) = self.granted {
            write!(f, " granted {granted}")?;
        }
        Ok(())
    }
}
