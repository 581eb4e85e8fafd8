//! Arguments of `tidegate limits`.

use super::values::{LimitText, limit};

/// Explain a limit in plain words.
///
/// Prints the canonical form, a sentence that says what the limit means, its capacity, the most
/// that it allows in one period, how soon it recovers, and the precision of its clock.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  tidegate limits '30/min burst 15'
  tidegate limits '10/s; 120/m; 240/h sliding step 1m' --json")]
pub(crate) struct Limits {
    /// A limit, or several joined by `;`
    #[arg(value_name = "LIMIT", value_parser = limit)]
    pub(crate) limit: LimitText,
    /// Print a JSON array instead of sentences
    #[arg(long)]
    pub(crate) json: bool,
}
