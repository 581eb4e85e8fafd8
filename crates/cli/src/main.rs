//! The command `tidegate`. Parses, runs, exits; everything else is in its own room.

mod allocator;
mod args;
mod commands;
mod output;

use std::io;
use std::process::ExitCode;

use clap::Parser;

/// Usage mistakes and errors; 0 and 1 are answers.
const ERROR: u8 = 2;
/// What a shell says of a program that Ctrl-C has ended.
const INTERRUPTED: i32 = 130;

fn main() -> ExitCode {
    allocator::take_large_pieces();
    match commands::run(args::Args::parse()) {
        Ok(outcome) => ExitCode::from(outcome.exit_code()),
        // Whoever reads our output has seen enough: `tidegate … | head`.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}", told(&error));
            ExitCode::from(ERROR)
        }
    }
}

/// Ends the program after somebody has pressed Ctrl-C and everything is tidied up.
fn interrupted() -> ! {
    std::process::exit(INTERRUPTED)
}

/// The error and its causes, each once: many an error has the text of its cause in its own.
fn told(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if text.is_empty() {
            text = cause;
        } else if !text.contains(&cause) {
            text += &format!(": {cause}");
        }
    }
    without_numbers(text)
}

/// Without the numbers that the operating system has for its errors: `(os error 2)`.
fn without_numbers(mut text: String) -> String {
    while let Some(at) = text.find(" (os error ") {
        let Some(end) = text[at..].find(')') else { break };
        text.replace_range(at..=at + end, "");
    }
    text
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let io = error.chain().find_map(|cause| cause.downcast_ref::<io::Error>());
    io.is_some_and(|io| io.kind() == io::ErrorKind::BrokenPipe)
}
