//! Arguments of `tidegate explain`.

use std::path::PathBuf;

use super::values::{ServerArgs, number};

/// Show which rules apply to a request and why, which budgets it uses, and what they would answer.
///
/// Attributes are given as NAME=VALUE: `ip=192.0.2.7 method=POST path=/v1/search`. Nothing is
/// charged.
///
/// With `--server` a running server answers, by its own rules and state. With `--config` the rules
/// of the file are explained by the state in the Redis or Valkey that the file names. A memory
/// store is inside the server: without `--server`, the command then shows only which rules apply.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  tidegate explain --server http://127.0.0.1:8080 --token-file admin-token ip=192.0.2.7 path=/v1/search
      By the rules and the state of a running server.
  tidegate explain --config tidegate.yaml ip=192.0.2.7 method=POST path=/v1/search api_key=acme
      By the rules of a file, and the state in the store that it names.

Exit codes: 0 it would be allowed, 1 it would be denied, 2 usage or error, 3 only which rules apply is known.")]
pub(crate) struct Explain {
    /// The configuration file with the rules and the store
    #[arg(short, long, value_name = "FILE", env = "TIDEGATE_CONFIG")]
    pub(crate) config: Option<PathBuf>,
    /// Read the state from this Redis or Valkey instead of the store that the file names
    #[arg(short, long, value_name = "URL", env = "TIDEGATE_STORE", hide_env_values = true)]
    pub(crate) store: Option<String>,
    #[command(flatten)]
    pub(crate) server: ServerArgs,
    /// The cost of the request
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = number)]
    #[arg(allow_negative_numbers = true)]
    pub(crate) cost: u64,
    /// The attributes of the request
    #[arg(value_name = "NAME=VALUE", value_parser = attribute)]
    pub(crate) attributes: Vec<(String, String)>,
}

fn attribute(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.into(), value.into())),
        _ => Err(format!("{text:?}: expected NAME=VALUE, such as ip=192.0.2.7")),
    }
}
