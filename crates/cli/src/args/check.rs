//! Arguments of `tidegate check`.

use clap::ValueEnum;
use clap::builder::NonEmptyStringValueParser;
use tidegate_core::Op;

use super::values::{LimitText, STORE_HEADING, ServerArgs, StoreArgs, limit, number};

/// Decide one request and explain the decision.
///
/// Without `--store` the state is in this process, so every run starts with a fresh key, and a
/// check is denied only if its cost exceeds the capacity of the limit. With `--store` the state is
/// in Redis or Valkey, and with `--server` a Tidegate server decides: then the next run finds less
/// left.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  tidegate check user:7 --limit '10/s; 120/m'
  tidegate check user:7 --limit 30/min --cost 31; echo $?     # 1: costs more than it can ever hold
  tidegate check user:7 --limit 100/s --op take --cost 500 --json
  tidegate check user:7 --limit 5/min --store redis://127.0.0.1
  tidegate check user:7 --limit 5/min --server http://127.0.0.1:8080

Exit codes: 0 allowed, 1 denied, 2 usage or error.")]
pub(crate) struct Check {
    /// The key whose budget is used: any text of 1 to 1024 bytes
    #[arg(value_parser = NonEmptyStringValueParser::new())]
    pub(crate) key: String,
    /// The limit, or several joined by `;` that must all allow the request
    #[arg(short, long, value_name = "LIMIT", value_parser = limit, env = "TIDEGATE_LIMIT")]
    pub(crate) limit: LimitText,
    /// How many units the request costs; 0 charges nothing
    #[arg(short, long, value_name = "N", default_value_t = 1, value_parser = number)]
    #[arg(allow_negative_numbers = true)]
    pub(crate) cost: u64,
    /// The operation
    #[arg(short, long, value_enum, value_name = "OP", ignore_case = true)]
    #[arg(default_value_t = OpName::Check)]
    pub(crate) op: OpName,
    /// Print one JSON object instead of sentences
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) store: StoreArgs,
    /// Separate the keys in the store from those of other users: letters, digits, `.`, `_` and `-`
    #[arg(long, value_name = "NAME", requires = "store", conflicts_with = "server")]
    #[arg(help_heading = STORE_HEADING)]
    pub(crate) namespace: Option<String>,
    #[command(flatten)]
    pub(crate) server: ServerArgs,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum OpName {
    /// Charge the cost if it fits
    Check,
    /// Answer like `check`, and charge nothing
    Peek,
    /// Charge as much of the cost as fits
    Take,
    /// Charge the cost even if it does not fit, as debt
    Debit,
    /// Return the cost
    Refund,
    /// Delete the state of the key
    Reset,
}

impl OpName {
    pub(crate) fn op(self) -> Op {
        match self {
            OpName::Check => Op::Check,
            OpName::Peek => Op::Peek,
            OpName::Take => Op::Take,
            OpName::Debit => Op::Debit,
            OpName::Refund => Op::Refund,
            OpName::Reset => Op::Reset,
        }
    }
}
