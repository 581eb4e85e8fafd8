//! Arguments of `tidegate simulate`.

use std::path::PathBuf;

use clap::ValueEnum;
use tidegate_core::{Algorithm, Limit};
use tidegate_trace as trace;

use super::values::{LimitText, StoreArgs, limit, number, point_at};

/// Run a trace through one or several limits and show what each would have done.
///
/// The trace is a file (`--trace`) or generated (`--rate`, `--pattern`, `--for`). Its clock starts
/// at the Unix epoch, so runs are reproducible and windows begin at 0. Every `--limit` gets the
/// same requests and a fresh state of its own.
///
/// With `--store` the script in Redis or Valkey decides every request, at the time of the trace:
/// the answers are the same. The keys are in a namespace of their own, which is removed at the end.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
A trace has one request per line: TIME [KEY [COST [OP]]]
  0                              at the start: key `-`, cost 1, a check
  499ms user:7                   times count from the start: 250us, 499ms, 1.5s, 2m, 1h, 1d
  1.5s  user:7 3                 costs 3 units
  2s    user:7 5 take            takes as much of 5 as fits
  # a comment
The operations: check (the default), peek, take, debit (may go into debt), refund, reset.

A transcript also has the limits and the expected answers; `--verify` compares:
  # limit: 2/s
  0 user:7 2 -> allow remaining 0
  0 user:7   -> deny retry 500ms reset 1s

Examples:
  tidegate simulate --limit 10/s --limit '10/s window' --rate 20/s --pattern burst --for 10s
  tidegate simulate --limit '10/s; 120/m' --trace access.txt --format jsonl | jq 'select(.allowed | not)'
  tidegate simulate --limit 100/s --rate 150/s --pattern poisson --seed 7 --for 1m --format svg --out poisson.svg
  tidegate simulate --trace funnel.txt --verify
  tidegate simulate --trace funnel.txt --verify --store redis://127.0.0.1

Exit codes: 0 done, 1 an expectation does not hold (with --verify), 2 usage or error.")]
pub(crate) struct Simulate {
    /// A limit, or several joined by `;` that decide together; repeat the option to compare limits
    /// side by side [default: the `# limit:` lines at the top of the trace]
    #[arg(short, long = "limit", value_name = "LIMIT", value_parser = limit)]
    pub(crate) limits: Vec<LimitText>,
    /// Read the requests from a file, or from standard input if it is `-`
    #[arg(short, long, value_name = "FILE", conflicts_with = "generated")]
    pub(crate) trace: Option<PathBuf>,
    /// How to show the result [default: table, or nothing with --verify]
    #[arg(short, long, value_enum)]
    pub(crate) format: Option<Format>,
    /// Write the result to a file instead of standard output
    #[arg(long, value_name = "FILE")]
    pub(crate) out: Option<PathBuf>,
    /// Compare every answer with the one that the trace expects after `->`
    #[arg(long, requires = "trace")]
    pub(crate) verify: bool,
    #[command(flatten)]
    pub(crate) store: StoreArgs,
    #[command(flatten)]
    pub(crate) generated: Generated,
}

/// A generated trace.
#[derive(clap::Args, Debug)]
#[group(id = "generated", multiple = true)]
#[command(next_help_heading = "Generated traffic")]
pub(crate) struct Generated {
    /// How many requests per period, on average
    #[arg(long, value_name = "N/PERIOD", value_parser = rate, default_value = "20/s")]
    pub(crate) rate: Rate,
    /// How the requests are spread over time
    #[arg(long, value_enum, default_value_t = Pattern::Constant)]
    pub(crate) pattern: Pattern,
    /// The length of the trace: 500ms, 10s, 2m, 1h, 1d
    #[arg(long = "for", value_name = "TIME", value_parser = duration, default_value = "10s")]
    pub(crate) length_us: u64,
    /// The seed of random patterns; the same seed gives the same trace on every machine
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = number)]
    #[arg(allow_negative_numbers = true)]
    pub(crate) seed: u64,
    /// The number of keys: `user-1`, `user-2` …
    #[arg(long, value_name = "N", default_value_t = 1)]
    #[arg(value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) keys: u64,
    /// The cost of each request
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = number)]
    #[arg(allow_negative_numbers = true)]
    pub(crate) cost: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Format {
    /// A table and a timeline, for the terminal
    Table,
    /// One JSON object for each request and limit, in order
    Jsonl,
    /// An SVG chart
    Svg,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Pattern {
    /// Evenly spaced
    Constant,
    /// Pauses, then two periods' worth in one burst, around every second end of the rate's period
    Burst,
    /// At random and independent of each other, like the requests of many clients
    Poisson,
    /// Evenly spaced, and in the middle third one more key that sends ten times as much
    Attack,
}

impl Pattern {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Pattern::Constant => "constant",
            Pattern::Burst => "burst",
            Pattern::Poisson => "poisson",
            Pattern::Attack => "attack",
        }
    }
}

/// A number of requests per period.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Rate {
    pub(crate) amount: u64,
    pub(crate) period_us: u64,
}

/// The most requests that a generated trace may have in one period of its rate, so that its
/// arithmetic is exact.
pub(crate) const MAX_RATE: u64 = 1_000_000_000;

fn rate(text: &str) -> Result<Rate, String> {
    let limit: Limit = text.parse().map_err(|error| point_at(text, &error))?;
    match limit.algorithm() {
        Algorithm::Bucket(bucket)
            if bucket.capacity == bucket.amount && !limit.counts_rejected() =>
        {
            if bucket.amount > MAX_RATE {
                return Err(format!("expected at most {MAX_RATE} requests in a period"));
            }
            Ok(Rate { amount: bucket.amount, period_us: bucket.period })
        }
        _ => Err("expected a number and a period and no more, as in 20/s".into()),
    }
}

fn duration(text: &str) -> Result<u64, String> {
    match trace::duration(text.trim()) {
        Ok(0) => Err("expected more than nothing, as in 10s".into()),
        Ok(micros) => Ok(micros),
        Err(expected) => Err(format!("expected {expected}")),
    }
}
