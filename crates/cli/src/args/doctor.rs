//! Arguments of `tidegate doctor`.

use clap::value_parser;

use super::values::{STORE_VARIABLE, StoreUrl};

/// Inspect a Redis or Valkey server: can it keep limits?
///
/// Checks version, role, eviction, persistence, replicas, the state of a cluster, the rights of the
/// user and the clock, says what would go wrong and how to fix it, and measures how long a decision
/// takes. It changes nothing on the server.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  tidegate doctor --store redis://127.0.0.1
  TIDEGATE_STORE=rediss://limiter:s3cret@redis.example:6380 tidegate doctor --json
  tidegate doctor --store redis+cluster://10.0.0.1,10.0.0.2,10.0.0.3 --samples 2000
  tidegate doctor --store redis://redis.example --deadline-ms 50

Exit codes: 0 no problems, 1 problems found, 2 usage, or the server is unreachable.")]
pub(crate) struct Doctor {
    /// The server: redis://, rediss://, redis+unix://, redis+sentinel:// or redis+cluster://
    #[arg(long, value_name = "URL", value_parser = StoreUrl::read)]
    #[arg(env = STORE_VARIABLE, hide_env_values = true)]
    pub(crate) store: StoreUrl,
    /// The namespace of the store, if it has one: rights may depend on it
    #[arg(long, value_name = "NAME")]
    pub(crate) namespace: Option<String>,
    /// The deadline to compare decisions with, in milliseconds: resilience.deadline_ms of the
    /// server [default: 15]
    #[arg(long, value_name = "N", value_parser = value_parser!(u64).range(1..=10_000))]
    pub(crate) deadline_ms: Option<u64>,
    /// How many round trips and decisions to measure; 0 for none
    #[arg(long, value_name = "N", default_value_t = 200)]
    #[arg(value_parser = value_parser!(u32).range(0..=1_000_000))]
    pub(crate) samples: u32,
    /// Print one JSON object instead of lines
    #[arg(long)]
    pub(crate) json: bool,
}
