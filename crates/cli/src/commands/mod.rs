//! The commands, one file each.

mod check;
mod client;
mod doctor;
mod explain;
mod greeting;
mod limits;
mod proxy;
mod rules;
mod serve;
mod simulate;
mod store;

use std::io::Write;

use anyhow::Result;
use clap::CommandFactory;
use tidegate_core::Verdict;

use crate::args::{Args, Command};
use crate::output;

/// How a command ended, if it did not fail.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Outcome {
    /// Done, or allowed.
    Yes,
    /// Denied, or not as expected, or with problems.
    No,
    /// The input is invalid, and the findings were printed.
    Wrong,
    /// Not known, because the state is elsewhere.
    Unknown,
}

impl Outcome {
    pub(crate) fn exit_code(self) -> u8 {
        match self {
            Outcome::Yes => 0,
            Outcome::No => 1,
            Outcome::Wrong => crate::ERROR,
            Outcome::Unknown => 3,
        }
    }
}

/// Runs the command.
pub(crate) fn run(args: Args) -> Result<Outcome> {
    match args.command {
        Command::Check(args) => check::run(&args),
        Command::Simulate(args) => simulate::run(*args),
        Command::Limits(args) => limits::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Serve(args) => serve::run(*args),
        Command::Proxy(args) => proxy::run(*args),
        Command::Validate(args) => rules::validate(&args),
        Command::Explain(args) => explain::run(&args),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Args::command(), "tidegate", &mut script);
            let mut stdout = output::stdout();
            stdout.write_all(&script)?;
            stdout.flush()?;
            Ok(Outcome::Yes)
        }
    }
}

/// Text as a JSON string.
fn json_string(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// Writes the numbers of a verdict as JSON members, in the order of every JSON output. Written by
/// hand, because a simulation writes millions of them.
fn write_numbers(out: &mut dyn Write, allowed: bool, verdict: &Verdict) -> std::io::Result<()> {
    write!(
        out,
        r#""allowed":{allowed},"granted":{},"remaining":{}"#,
        verdict.granted, verdict.remaining
    )?;
    match verdict.retry.micros() {
        Some(micros) => write!(out, r#","retry_after_us":{micros}"#)?,
        None => out.write_all(br#","retry_after_us":null"#)?,
    }
    write!(
        out,
        r#","reset_after_us":{},"next_after_us":{}"#,
        verdict.reset_after_us, verdict.next_after_us
    )
}
