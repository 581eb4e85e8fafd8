//! The command `tidegate`: parses the arguments, runs a command, exits.

mod allocator;
mod args;
mod commands;
mod output;

use std::io;
use std::process::ExitCode;

use clap::Parser;

/// The exit code of usage mistakes and errors; 0 and 1 are results.
const ERROR: u8 = 2;
/// The exit code of a program that Ctrl-C ended, as shells report it.
const INTERRUPTED: i32 = 130;

fn main() -> ExitCode {
    allocator::take_large_pieces();
    match commands::run(args::Args::parse()) {
        Ok(outcome) => ExitCode::from(outcome.exit_code()),
        // The reader closed the pipe: `tidegate … | head`.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}", message(&error));
            ExitCode::from(ERROR)
        }
    }
}

/// Exits after Ctrl-C and the cleanup that follows it.
fn interrupted() -> ! {
    std::process::exit(INTERRUPTED)
}

/// The error and its causes, each once: some errors repeat the text of their cause.
fn message(error: &anyhow::Error) -> String {
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

/// Removes error numbers of the operating system: `(os error 2)`.
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
