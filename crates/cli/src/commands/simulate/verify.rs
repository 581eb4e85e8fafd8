//! Compares answers with what a transcript expects.

use std::io::Write;

use anyhow::{Result, bail};
use tidegate_core::Decision;

use super::contender::Contender;
use super::{Event, Outcome};
use crate::output;

/// The most differences that are shown.
const MOST_SHOWN: u64 = 100;

pub(super) struct Verifier {
    limits: usize,
    compared: u64,
    differ: u64,
}

impl Verifier {
    pub(super) fn new(limits: usize) -> Self {
        Verifier { limits, compared: 0, differ: 0 }
    }

    pub(super) fn compare(&mut self, event: &Event, contender: &Contender, decision: &Decision) {
        let Some(expect) = &event.expect else { return };
        self.compared += 1;
        if let Err(mismatch) = expect.compare(decision) {
            self.differ += 1;
            if self.differ <= MOST_SHOWN {
                eprintln!("line {}: {}: {mismatch}", event.number, contender.text());
            }
        }
    }

    /// Prints the outcome, to standard output unless the result is there.
    pub(super) fn finish(self, stdout_taken: bool) -> Result<Outcome> {
        let Verifier { limits, compared, differ } = self;
        if compared == 0 {
            bail!(
                "nothing to verify: no line says what to expect, as in `0 user:7 -> allow remaining 9`"
            );
        }
        if differ > MOST_SHOWN {
            eprintln!("… and {} more", differ - MOST_SHOWN);
        }
        let answers = format!("{compared} {}", if compared == 1 { "answer" } else { "answers" });
        let limits = format!("{limits} {}", if limits == 1 { "limit" } else { "limits" });
        if differ > 0 {
            let are = if differ == 1 { "is" } else { "are" };
            eprintln!("{differ} of {answers} by {limits} {are} not as expected");
            return Ok(Outcome::No);
        }
        let sentence = format!("{answers} by {limits}: all as expected");
        if stdout_taken {
            eprintln!("{sentence}");
        } else {
            let mut out = output::stdout();
            writeln!(out, "{sentence}")?;
            out.flush()?;
        }
        Ok(Outcome::Yes)
    }
}
