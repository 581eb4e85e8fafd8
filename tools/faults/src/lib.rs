//! The faults that a limiter must live with, done to real processes under load: `cargo xtask faults
//! [ROW…]`.
//!
//! Each row is one fault. Its stage is real servers of Redis or Valkey and real `tidegate serve`
//! processes; a load asks at its own pace, whatever the answers do, and writes every answer down;
//! the fault is injected and lifted; and then the row is judged by what was written down: how much
//! passed beyond the limit, who waited how long, what failed, when all was well again, and what the
//! counters say.
//!
//! - `stage`: the processes, and networks of their own
//! - `load`: the clients, and what was answered
//! - `inject`: what is done to the processes
//! - `judge`: whether it was as it must be
//! - `rows`: the faults themselves
//!
//! `README.md` says how to run and read it.

mod args;
mod inject;
mod judge;
mod load;
mod report;
mod rows;
mod stage;

use std::process::ExitCode;
use std::time::Instant;

use args::{Args, Wish};

/// Runs what the arguments ask for. Fails if a row does, or if there is no such row.
pub fn run(args: &[String]) -> ExitCode {
    let args = match Args::parse(args) {
        Ok(args) => args,
        Err(problem) => {
            eprintln!("faults: {problem}");
            return ExitCode::from(2);
        }
    };
    match args.wish {
        Wish::Help => report::say(args::HELP),
        Wish::List => report::list(),
        Wish::Run => return all(&args),
    }
    ExitCode::SUCCESS
}

fn all(args: &Args) -> ExitCode {
    let began = Instant::now();
    let _awake = (args.strict && !args.inside).then(tidegate_testkit::Awake::keep);
    let mut failed = Vec::new();
    let mut well = 0;
    for row in args.rows() {
        let outcome = rows::play(row, args);
        report::outcome(&outcome, args.json);
        match outcome.verdict {
            judge::Verdict::Ok => well += 1,
            judge::Verdict::Failed => failed.push(row.name),
        }
    }
    // A row that runs in a network of its own is reported by the process that runs it, which has
    // only this one.
    if !args.json && !args.inside {
        let seconds = began.elapsed().as_secs();
        let failed = if failed.is_empty() {
            "none failed".into()
        } else {
            format!("failed: {}", failed.join(", "))
        };
        report::say(&format!("{well} rows ok, {failed}; {seconds} s, seed {}\n", args.seed));
    }
    if failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
