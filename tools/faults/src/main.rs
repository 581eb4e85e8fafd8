//! `cargo xtask faults`.

use std::process::ExitCode;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    tidegate_faults::run(&args)
}
