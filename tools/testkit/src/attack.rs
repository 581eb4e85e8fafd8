//! Counts the cases of attacks that held, for the table of `cargo xtask attack`.

use std::fs::OpenOptions;
use std::io::Write;

/// The file to which cases are reported, if a table is wanted.
const REPORT: &str = "TIDEGATE_ATTACK_REPORT";
/// How many times as many random cases as usual.
const TIMES: &str = "TIDEGATE_ATTACK_TIMES";

/// Reports that so many cases of a class held: call it behind the last assertion.
///
/// # Panics
/// If the report cannot be written.
pub fn attacks_held(class: &str, cases: usize) {
    let Some(file) = std::env::var_os(REPORT) else { return };
    let mut report =
        OpenOptions::new().create(true).append(true).open(file).expect("the report can be opened");
    // One write for a line, so that concurrent tests do not mix theirs.
    report.write_all(format!("{class}\t{cases}\n").as_bytes()).expect("the report can be written");
}

/// How many random cases to try: `usual`, or a multiple of it in a long run.
pub fn attack_cases(usual: usize) -> usize {
    let times = std::env::var(TIMES).ok().and_then(|times| times.parse().ok()).unwrap_or(1);
    usual.saturating_mul(times)
}
