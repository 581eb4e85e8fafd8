//! `cargo run --release -- memory`: decisions in memory, Tidegate beside governor and beside the bound of the machine.
//!
//! Every contender is measured in turns within one run, many short rounds each, and the median round counts: on a noisy
//! machine the ratio of medians is worth more than any single number.

mod contenders;
mod memory;
mod wire;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let mut words = args.iter().map(String::as_str);
    match words.next() {
        Some("memory") => memory::run(&words.collect::<Vec<_>>()),
        Some("bytes") => memory::bytes(&words.collect::<Vec<_>>()),
        Some("slowest") => memory::slowest(),
        Some("parts") => memory::parts(),
        Some("wire") => wire::run(&words.collect::<Vec<_>>()),
        Some("instructions") => memory::instructions(&words.collect::<Vec<_>>()),
        _ => {
            eprintln!(
                "usage: bench memory [KEYS…] | bytes CONTENDER KEYS | slowest | parts | wire [CALLERS…] | instructions CONTENDER"
            );
            std::process::exit(2);
        }
    }
}
