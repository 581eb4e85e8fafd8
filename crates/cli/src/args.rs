//! What can be said on the command line. Everything that can be wrong with it is found here.

use std::fmt;
use std::path::PathBuf;

use clap::{Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use tidegate_core::{Algorithm, Limit, Limits, Op, ParseError};
use tidegate_server::auth::Secret;
use tidegate_server::observe;
use tidegate_trace as trace;

/// An exact rate limiter: check keys, simulate limits before you enforce them, and understand what
/// a limit means.
#[derive(Parser, Debug)]
#[command(name = "tidegate", version, max_term_width = 110, after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) command: Command,
}

const EXAMPLES: &str = "\
Examples:
  tidegate limits '30/min burst 15'
      What does this limit mean, and what is the worst it lets through?

  tidegate simulate --limit '10/s' --limit '10/s window' --rate 20/s --pattern burst --for 10s
      How would a bucket and a fixed window have treated the same traffic?

  tidegate check user:7 --limit '10/s; 120/m' --cost 3 --json
      One decision, for a program to read.

  tidegate doctor --store redis://127.0.0.1
      Can limits be kept on this server, and how long does a decision take?

A limit is `amount/period [algorithm] [options]`, several joined by `;`:
  10/s                           a bucket that holds 10 and regrows 10 a second
  30/min burst 15                a bucket that holds 15
  240/h window                   a fixed window; also `window from first hit`
  240/h sliding step 1m          a window that slides in steps; also `lenient`
  1000/day estimate              two windows, the previous one weighted
  5/20s log                      every hit kept; also `count rejected`
  20 concurrent ttl 30s          leases in flight

Exit codes: 0 allowed or done, 1 denied or not as expected, 2 usage or error.";

#[derive(Subcommand, Debug)]
pub(crate) enum Command {
    Check(Check),
    Simulate(Box<Simulate>),
    Limits(Explain),
    Doctor(Doctor),
    Serve(Box<Serve>),
    Proxy(Box<Proxy>),
    Validate(Validate),
    Explain(ExplainRules),
    /// Print a completion script for your shell
    Completions {
        /// The shell to complete for
        shell: Shell,
    },
}

/// Decide one request and say why.
///
/// Without `--store` the state lives in this process, so a key starts fresh on every run: this
/// shows what a limit answers, and is denied only what the limit could never hold. With `--store`
/// it is kept in Redis or Valkey, and with `--server` a Tidegate server decides: the next run finds
/// less left.
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
    /// Whose budget: any text of 1 to 1024 bytes
    #[arg(value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub(crate) key: String,
    /// The limit, or several joined by `;` that must all allow it
    #[arg(short, long, value_name = "LIMIT", value_parser = limit, env = "TIDEGATE_LIMIT")]
    pub(crate) limit: LimitText,
    /// How many units the request takes; 0 only looks
    #[arg(short, long, value_name = "N", default_value_t = 1, value_parser = whole, allow_negative_numbers = true)]
    pub(crate) cost: u64,
    /// What to do
    #[arg(short, long, value_enum, value_name = "OP", ignore_case = true, default_value_t = OpName::Check)]
    pub(crate) op: OpName,
    /// Print one JSON object instead of sentences
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) store: OptionalStore,
    /// Keep the keys in Redis apart from those of others: letters, digits, `.`, `_` and `-`
    #[arg(long, value_name = "NAME", requires = "store", conflicts_with = "server", help_heading = KEPT)]
    pub(crate) namespace: Option<String>,
    #[command(flatten)]
    pub(crate) server: AtServer,
}

/// A Tidegate server that decides.
#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Another Tidegate decides")]
pub(crate) struct AtServer {
    /// Ask the server at http://HOST:PORT or https://HOST:PORT, which `tidegate serve` started;
    /// `--store` is then its own affair
    #[arg(long, value_name = "URL", env = "TIDEGATE_SERVER")]
    pub(crate) server: Option<String>,
    /// The token that it wants to hear
    #[arg(long, value_name = "TOKEN", env = "TIDEGATE_TOKEN", hide_env_values = true, value_parser = secret)]
    pub(crate) token: Option<Secret>,
    /// A file with that token, so that no list of processes shows it; it counts more than
    /// TIDEGATE_TOKEN
    #[arg(long, value_name = "FILE", env = "TIDEGATE_TOKEN_FILE")]
    pub(crate) token_file: Option<PathBuf>,
    /// Trust the certificate authorities in this file, in PEM, instead of those that the system
    /// trusts
    #[arg(long, value_name = "FILE", requires = "server")]
    pub(crate) ca: Option<PathBuf>,
}

impl AtServer {
    /// The token, read from its file if one is named.
    pub(crate) fn token(&self) -> anyhow::Result<Option<Secret>> {
        match &self.token_file {
            Some(file) => Secret::read(file)
                .map(Some)
                .map_err(|problem| anyhow::anyhow!("--token-file {problem}")),
            None => Ok(self.token.clone()),
        }
    }
}

/// Feed a trace through one or several limits and show what each would have done.
///
/// The trace is a file (`--trace`), or made up (`--rate`, `--pattern`, `--for`). Its clock starts
/// at the Unix epoch, so runs are reproducible and windows begin at 0. Every `--limit` gets the
/// same requests and a fresh state of its own.
///
/// With `--store` every request is decided by the script in Redis or Valkey, which is told the
/// trace's time: the answers are the same. Keys are in a namespace of their own, which is removed
/// at the end.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
A trace has one request per line: TIME [KEY [COST [OP]]]
  0                              at the start: key `-`, cost 1, a check
  499ms user:7                   times count from the start: 250us, 499ms, 1.5s, 2m, 1h, 1d
  1.5s  user:7 3                 costs 3 units
  2s    user:7 5 take            takes as much of 5 as fits
  # a comment
The operations: check (the default), peek, take, debit (may go into debt), refund, reset.

A transcript says what must be answered, and for which limits; `--verify` compares:
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
    /// A limit, or several joined by `;` that are decided together; repeat it to compare side by
    /// side. Without it, the `# limit:` lines at the top of the trace say it
    #[arg(short, long = "limit", value_name = "LIMIT", value_parser = limit)]
    pub(crate) limits: Vec<LimitText>,
    /// Read the requests from a file, or from standard input if it is `-`
    #[arg(short, long, value_name = "FILE", conflicts_with = "generated")]
    pub(crate) trace: Option<PathBuf>,
    /// How to show the result; a table unless `--verify` says enough
    #[arg(short, long, value_enum)]
    pub(crate) format: Option<Format>,
    /// Write the result to a file instead of standard output
    #[arg(long, value_name = "FILE")]
    pub(crate) out: Option<PathBuf>,
    /// Compare every answer with what the trace expects after `->`
    #[arg(long, requires = "trace")]
    pub(crate) verify: bool,
    #[command(flatten)]
    pub(crate) store: OptionalStore,
    #[command(flatten)]
    pub(crate) generated: Generated,
}

/// A trace that is made up.
#[derive(clap::Args, Debug)]
#[group(id = "generated", multiple = true)]
#[command(next_help_heading = "Traffic to make up")]
pub(crate) struct Generated {
    /// How many requests in how much time, on average
    #[arg(long, value_name = "N/PERIOD", value_parser = rate, default_value = "20/s")]
    pub(crate) rate: Rate,
    /// How they are spread over time
    #[arg(long, value_enum, default_value_t = Pattern::Constant)]
    pub(crate) pattern: Pattern,
    /// For how long: 500ms, 10s, 2m, 1h, 1d
    #[arg(long = "for", value_name = "TIME", value_parser = duration, default_value = "10s")]
    pub(crate) length_us: u64,
    /// Which of the random traces; the same seed gives the same trace on every machine
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = whole, allow_negative_numbers = true)]
    pub(crate) seed: u64,
    /// From how many keys: `user-1`, `user-2` …
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) keys: u64,
    /// What each request costs
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = whole, allow_negative_numbers = true)]
    pub(crate) cost: u64,
}

/// Explain a limit in plain words.
///
/// Prints the canonical form, a sentence that says what it means, how much it holds, the most it
/// lets through in one period, how soon it recovers, and the clock it is judged by.
#[derive(clap::Args, Debug)]
#[command(
    name = "limits",
    after_help = "\
Examples:
  tidegate limits '30/min burst 15'
  tidegate limits '10/s; 120/m; 240/h sliding step 1m' --json"
)]
pub(crate) struct Explain {
    /// A limit, or several joined by `;`
    #[arg(value_name = "LIMIT", value_parser = limit)]
    pub(crate) limit: LimitText,
    /// Print a JSON array instead of sentences
    #[arg(long)]
    pub(crate) json: bool,
}

/// Look at a Redis or Valkey server: can limits be kept there?
///
/// Looks at version, role, eviction, persistence, replicas, the state of a cluster, the rights of
/// the user and the clock, says what would go wrong and what to do about it, and measures how long
/// a decision takes. Nothing is changed.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  tidegate doctor --store redis://127.0.0.1
  TIDEGATE_STORE=rediss://limiter:s3cret@redis.example:6380 tidegate doctor --json
  tidegate doctor --store redis+cluster://10.0.0.1,10.0.0.2,10.0.0.3 --samples 2000
  tidegate doctor --store redis://redis.example --deadline-ms 50

Exit codes: 0 no problems, 1 problems found, 2 usage, or no server to look at.")]
pub(crate) struct Doctor {
    /// Which server: redis://, rediss://, redis+unix://, redis+sentinel:// or redis+cluster://
    #[arg(long, value_name = "URL", value_parser = StoreUrl::read, env = STORE, hide_env_values = true)]
    pub(crate) store: StoreUrl,
    /// The namespace of the store, if it has one: rights may depend on it
    #[arg(long, value_name = "NAME")]
    pub(crate) namespace: Option<String>,
    /// The deadline that decisions are compared with, in milliseconds: resilience.deadline_ms of
    /// the server [default: 15]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=10_000))]
    pub(crate) deadline_ms: Option<u64>,
    /// How many round trips and decisions to measure; 0 for none
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = clap::value_parser!(u32).range(0..=1_000_000))]
    pub(crate) samples: u32,
    /// Print one JSON object instead of lines
    #[arg(long)]
    pub(crate) json: bool,
}

const STORE: &str = "TIDEGATE_STORE";
const KEPT: &str = "Where the state is kept";

/// Where the state is kept, if not here.
#[derive(clap::Args, Debug)]
#[command(next_help_heading = KEPT)]
pub(crate) struct OptionalStore {
    /// `memory`: in this process, and nowhere afterwards. Or a server: redis://, rediss://,
    /// redis+unix://, redis+sentinel:// or redis+cluster://
    #[arg(long, value_name = "URL", value_parser = StoreUrl::read, env = STORE, hide_env_values = true)]
    #[arg(default_value = "memory", hide_default_value = true)]
    pub(crate) store: StoreUrl,
}

/// A URL that may have a password in it. It is read by whoever opens the store, because mistakes
/// found on the command line are shown together with what was written.
#[derive(Clone)]
pub(crate) struct StoreUrl(pub(crate) String);

impl StoreUrl {
    #[allow(clippy::unnecessary_wraps, reason = "a parser may fail")]
    fn read(text: &str) -> Result<Self, String> {
        Ok(StoreUrl(text.trim().to_owned()))
    }
}

impl fmt::Debug for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("StoreUrl(***)")
    }
}

/// Limits, and how they were written.
#[derive(Clone, Debug)]
pub(crate) struct LimitText {
    pub(crate) text: String,
    pub(crate) limits: Limits,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum OpName {
    /// Take the cost if it fits
    Check,
    /// Say what a check would, and take nothing
    Peek,
    /// Take as much of the cost as fits
    Take,
    /// Take the cost even if it does not fit, into debt
    Debit,
    /// Give the cost back
    Refund,
    /// Forget what was used
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

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Format {
    /// A table and a timeline, for the terminal
    Table,
    /// One JSON object for each request and limit, in order
    Jsonl,
    /// A picture
    Svg,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Pattern {
    /// Evenly, like a metronome
    Constant,
    /// Nothing for long, then two periods' worth at once, around every second end of the rate's
    /// period
    Burst,
    /// At random, each on its own, like many independent visitors
    Poisson,
    /// Evenly, and in the middle third one key more that sends ten times as much
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

/// So many requests in so much time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Rate {
    pub(crate) amount: u64,
    pub(crate) period_us: u64,
}

/// The most requests a made-up trace may have in one period of its rate: then its arithmetic is
/// exact.
pub(crate) const MAX_RATE: u64 = 1_000_000_000;

/// Reads limits; an error shows the text with a caret under the column.
pub(crate) fn limit(text: &str) -> Result<LimitText, String> {
    match text.parse() {
        Ok(limits) => Ok(LimitText { text: text.trim().to_owned(), limits }),
        Err(error) => Err(point_at(text, &error)),
    }
}

/// An error message, and under it the text with a caret where the problem is.
pub(crate) fn point_at(text: &str, error: &ParseError) -> String {
    let shown: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    // A long text is shown from a little before the problem.
    let skipped = error.column().saturating_sub(61);
    let shown: String = shown.chars().skip(skipped).take(100).collect();
    format!(
        "{error}\n\n  {shown}\n  {caret:>width$}",
        caret = '^',
        width = error.column() - skipped
    )
}

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

/// A token.
fn secret(text: &str) -> Result<Secret, String> {
    text.parse()
}

/// A whole number.
fn whole(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| "expected a whole number, 0 or more".to_string())
}

fn duration(text: &str) -> Result<u64, String> {
    match trace::duration(text.trim()) {
        Ok(0) => Err("expected more than nothing, as in 10s".into()),
        Ok(micros) => Ok(micros),
        Err(expected) => Err(format!("expected {expected}")),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Args::command().debug_assert();
    }

    #[test]
    fn the_caret_stands_under_the_problem() {
        assert!(limit("10/s; 5/x").unwrap_err().ends_with("\n\n  10/s; 5/x\n          ^"));
    }
}

/// Answer programs in any language: HTTP, Envoy, and any Redis client.
///
/// Without a file it starts with a few rules to try. The rules are read again when their file
/// changes, or on SIGHUP; a file with a mistake in it is refused, and the rules stay as they were.
/// What is said here or by an environment variable counts more than the file.
///
/// Listeners listen on this machine alone unless told otherwise, and beyond it only if they ask who
/// is there: by a token, or by certificates of clients.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  tidegate serve
      Loopback, state in this process, rules to try.
  tidegate serve --config tidegate.yaml --store redis://127.0.0.1/
      Your rules; state shared with every server that uses this Redis.
  tidegate serve --envoy-config ./config
      In place of envoyproxy/ratelimit, with its own files.
  tidegate serve --http 0.0.0.0:8443 --tls-cert cert.pem --tls-key key.pem --token-file token
      For others in your network, who say `Authorization: Bearer TOKEN`.
  tidegate serve --config tidegate.yaml --print-config
      What would count, with every default, as a file.

Every option has an environment variable: TIDEGATE_HTTP for --http, and so on.

Exit codes: 0 stopped by a signal with everything answered, 1 something was cut off, 2 usage or error.")]
pub(crate) struct Serve {
    /// The configuration, or `-` for standard input; see docs/configuration.md
    #[arg(short, long, value_name = "FILE", env = "TIDEGATE_CONFIG")]
    pub(crate) config: Option<PathBuf>,
    /// Where state is kept: `memory`, or the URL of a Redis or Valkey
    #[arg(short, long, value_name = "URL", env = "TIDEGATE_STORE", hide_env_values = true)]
    pub(crate) store: Option<String>,
    /// A file with 16 to 512 bytes at random that all servers of one store share, so that nobody
    /// else can choose the slots of keys
    #[arg(long, value_name = "FILE", env = "TIDEGATE_STORE_SECRET_FILE")]
    pub(crate) store_secret_file: Option<PathBuf>,
    /// How much memory state may take if it is kept here: a number of bytes such as 512MiB, or
    /// `auto`, half of what this process may have
    #[arg(long, value_name = "SIZE", env = "TIDEGATE_MAX_BYTES")]
    pub(crate) max_bytes: Option<tidegate_server::Bytes>,
    /// A file in which state is kept over a restart if it is kept here; written every second
    #[arg(long, value_name = "FILE", env = "TIDEGATE_SNAPSHOT_FILE")]
    pub(crate) snapshot_file: Option<PathBuf>,
    /// How many threads serve: a number, or `auto`, one for each core; see docs/operations.md
    #[arg(long, value_name = "N", env = "TIDEGATE_THREADS")]
    pub(crate) threads: Option<tidegate_server::Threads>,
    /// Print what counts, from file, environment and options, and stop
    #[arg(long)]
    pub(crate) print_config: bool,
    /// What is logged, and how: off, error, warn, info or debug; human or json; or one of each:
    /// `warn,json`
    #[arg(long, value_name = "LEVEL,FORMAT", env = "TIDEGATE_LOG", value_parser = log_words)]
    pub(crate) log: Option<LogWords>,
    /// Show keys as they are, in the log and among the most limited
    #[arg(long, env = "TIDEGATE_SHOW_KEYS")]
    pub(crate) show_keys: bool,
    /// Where HTTP listens, or `off`
    #[arg(long, value_name = "ADDR", env = "TIDEGATE_HTTP", value_parser = protocol, help_heading = LISTENERS)]
    pub(crate) http: Option<ListenAddress>,
    /// Where Envoy's rate limit service is answered over gRPC, or `off`
    #[arg(long, value_name = "ADDR", env = "TIDEGATE_GRPC", value_parser = protocol, help_heading = LISTENERS)]
    pub(crate) grpc: Option<ListenAddress>,
    /// The configuration of envoyproxy/ratelimit: a folder of YAML files, one domain each; see
    /// docs/grpc.md
    #[arg(long, value_name = "DIR", env = "TIDEGATE_ENVOY_CONFIG", help_heading = LISTENERS)]
    pub(crate) envoy_config: Option<PathBuf>,
    /// Where Redis clients are answered, or `off`
    #[arg(long, value_name = "ADDR", env = "TIDEGATE_RESP", value_parser = protocol, help_heading = LISTENERS)]
    pub(crate) resp: Option<ListenAddress>,
    /// Where HTTP listens for metrics and admin calls, which are then nowhere else
    #[arg(long, value_name = "ADDR", env = "TIDEGATE_ADMIN", value_parser = protocol, help_heading = LISTENERS)]
    pub(crate) admin: Option<ListenAddress>,
    /// What clients must say before they may check: `Authorization: Bearer TOKEN`, or AUTH
    #[arg(long, value_name = "TOKEN", env = "TIDEGATE_TOKEN", hide_env_values = true, value_parser = secret, conflicts_with = "token_file", help_heading = SECURITY)]
    pub(crate) token: Option<Secret>,
    /// A file with that token, so that no list of processes shows it
    #[arg(long, value_name = "FILE", env = "TIDEGATE_TOKEN_FILE", help_heading = SECURITY)]
    pub(crate) token_file: Option<PathBuf>,
    /// What clients must say before they may reset, or see rules and keys
    #[arg(long, value_name = "TOKEN", env = "TIDEGATE_ADMIN_TOKEN", hide_env_values = true, value_parser = secret, conflicts_with = "admin_token_file", help_heading = SECURITY)]
    pub(crate) admin_token: Option<Secret>,
    /// A file with that token
    #[arg(long, value_name = "FILE", env = "TIDEGATE_ADMIN_TOKEN_FILE", help_heading = SECURITY)]
    pub(crate) admin_token_file: Option<PathBuf>,
    /// The certificate of every listener, in PEM; read again when it changes
    #[arg(long, value_name = "FILE", env = "TIDEGATE_TLS_CERT", requires = "tls_key", help_heading = SECURITY)]
    pub(crate) tls_cert: Option<PathBuf>,
    /// Its key
    #[arg(long, value_name = "FILE", env = "TIDEGATE_TLS_KEY", requires = "tls_cert", help_heading = SECURITY)]
    pub(crate) tls_key: Option<PathBuf>,
    /// The authority that has signed the certificates of clients, who need one then
    #[arg(long, value_name = "FILE", env = "TIDEGATE_TLS_CLIENT_CA", help_heading = SECURITY)]
    pub(crate) tls_client_ca: Option<PathBuf>,
    /// Allow listeners that accept any client from other machines
    #[arg(long, env = "TIDEGATE_INSECURE", help_heading = SECURITY)]
    pub(crate) insecure: bool,
}

/// Put limits in front of a web service: a reverse proxy.
///
/// Requests that the limits let pass go to the upstream as they came, whatever their size; the
/// others are answered with 429 and when to try again. HTTP/1.1, HTTP/2 and WebSocket come in, with
/// TLS if there is a certificate; HTTP/1.1 goes out, or HTTP/2 if the upstream is written as
/// h2c://.
///
/// A limit is `LIMIT by WHAT`: ip, path, method, host, bearer (a token), header.NAME, cookie.NAME,
/// query.NAME, or several of them, each combination with a budget of its own. More can be said in a
/// file: see docs/proxy.md.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  tidegate proxy --upstream http://127.0.0.1:3000 --limit '10/s by ip'
      Then: curl -i http://127.0.0.1:8000/
  tidegate proxy --upstream http://app:3000 --listen 0.0.0.0:80 --limit '10/s; 1000/h by ip' --limit '5/min by ip, path'
      Both limits must let a request pass.
  tidegate proxy --upstream http://app:3000 --limit '100/min by header.x-api-key' --store redis://127.0.0.1/
      One budget for each key, shared by all proxies that use this Redis.
  tidegate proxy --upstream http://app:3000 --limit '10/s by ip' --trust 10.0.0.0/8
      Behind a load balancer, whose X-Forwarded-For is believed.
  tidegate proxy --upstream h2c://grpc:50051 --listen 0.0.0.0:443 --tls-cert cert.pem --tls-key key.pem --limit '50/s by bearer'
  tidegate proxy --config tidegate.yaml
      Rules with conditions, tiers, costs by outcome or size.

Exit codes: 0 stopped by a signal with everything answered, 1 something was cut off, 2 usage or error.")]
pub(crate) struct Proxy {
    /// Where requests go: http://HOST:PORT, or h2c://HOST:PORT for HTTP/2 without TLS
    #[arg(short, long, value_name = "URL", env = "TIDEGATE_UPSTREAM")]
    pub(crate) upstream: Option<tidegate_server::proxy::Upstream>,
    /// Where to listen; 127.0.0.1:8000 unless said
    #[arg(long, value_name = "ADDR", env = "TIDEGATE_PROXY")]
    pub(crate) listen: Option<std::net::SocketAddr>,
    /// A limit, and by what: '10/s by ip'. Several must all let a request pass
    #[arg(short, long = "limit", value_name = "LIMIT by WHAT", value_parser = tidegate_server::rules::Rule::in_one_line)]
    pub(crate) limits: Vec<tidegate_server::rules::Rule>,
    /// Rules and settings, or `-` for standard input; see docs/proxy.md
    #[arg(short, long, value_name = "FILE", env = "TIDEGATE_CONFIG")]
    pub(crate) config: Option<PathBuf>,
    /// Where state is kept: `memory`, or the URL of a Redis or Valkey
    #[arg(short, long, value_name = "URL", env = "TIDEGATE_STORE", hide_env_values = true)]
    pub(crate) store: Option<String>,
    /// Proxies that are believed who the client is: networks, addresses, `loopback` or `private`,
    /// separated by commas
    #[arg(long, value_name = "NETWORKS", env = "TIDEGATE_TRUST")]
    pub(crate) trust: Option<tidegate::http::TrustedProxies>,
    /// Where HTTP listens for metrics and admin calls; nowhere unless said
    #[arg(long, value_name = "ADDR", env = "TIDEGATE_ADMIN", value_parser = protocol)]
    pub(crate) admin: Option<ListenAddress>,
    /// How much memory state may take if it is kept here: a number of bytes such as 512MiB, or
    /// `auto`, half of what this process may have
    #[arg(long, value_name = "SIZE", env = "TIDEGATE_MAX_BYTES")]
    pub(crate) max_bytes: Option<tidegate_server::Bytes>,
    /// A file in which state is kept over a restart if it is kept here; written every second
    #[arg(long, value_name = "FILE", env = "TIDEGATE_SNAPSHOT_FILE")]
    pub(crate) snapshot_file: Option<PathBuf>,
    /// How many threads serve: a number, or `auto`, one for each core; see docs/operations.md
    #[arg(long, value_name = "N", env = "TIDEGATE_THREADS")]
    pub(crate) threads: Option<tidegate_server::Threads>,
    /// Print what counts, from file, environment and options, and stop
    #[arg(long)]
    pub(crate) print_config: bool,
    /// What is logged, and how: off, error, warn, info or debug; human or json; or one of each:
    /// `warn,json`
    #[arg(long, value_name = "LEVEL,FORMAT", env = "TIDEGATE_LOG", value_parser = log_words)]
    pub(crate) log: Option<LogWords>,
    /// The certificate, in PEM; read again when it changes
    #[arg(long, value_name = "FILE", env = "TIDEGATE_TLS_CERT", requires = "tls_key", help_heading = SECURITY)]
    pub(crate) tls_cert: Option<PathBuf>,
    /// Its key
    #[arg(long, value_name = "FILE", env = "TIDEGATE_TLS_KEY", requires = "tls_cert", help_heading = SECURITY)]
    pub(crate) tls_key: Option<PathBuf>,
}

const LISTENERS: &str = "Listeners";
const SECURITY: &str = "Security";

/// How much is logged, and in which form; what is not said stays.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LogWords {
    pub(crate) level: Option<observe::Level>,
    pub(crate) format: Option<observe::Format>,
}

fn log_words(text: &str) -> Result<LogWords, String> {
    let mut words = LogWords::default();
    for word in text.split(',').map(str::trim) {
        match (word.parse(), word.parse()) {
            (Ok(level), _) if words.level.is_none() => words.level = Some(level),
            (_, Ok(format)) if words.format.is_none() => words.format = Some(format),
            _ => {
                return Err(format!(
                    "{word:?}: expected off, error, warn, info or debug, and human or json, such as `warn,json`"
                ));
            }
        }
    }
    Ok(words)
}

/// An address to listen on, or none.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ListenAddress(pub(crate) Option<std::net::SocketAddr>);

fn protocol(text: &str) -> Result<ListenAddress, String> {
    match text {
        "off" => Ok(ListenAddress(None)),
        address => address
            .parse()
            .map(|at| ListenAddress(Some(at)))
            .map_err(|_| tidegate_server::config::expected_address(address)),
    }
}

/// Check a configuration file, or a folder with the configuration of envoyproxy/ratelimit, before
/// it is used.
///
/// Everything that is found is printed at once, by line and column, with what to write. The files
/// that a configuration names are read, and its store is called, without charging anything to a
/// key. Errors are what `tidegate serve` refuses. Warnings are what works, but is hardly meant;
/// `serve` logs them when it starts and when it reads the file again.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  tidegate validate tidegate.yaml
  tidegate validate --strict --offline tidegate.yaml     # for CI: no secrets, no store

Exit codes: 0 no errors, 2 errors.")]
pub(crate) struct Validate {
    /// The configuration file, or the folder
    pub(crate) file: PathBuf,
    /// Warnings are errors
    #[arg(long)]
    pub(crate) strict: bool,
    /// Look at the text alone: neither at the files that it names (tokens, certificates, secrets,
    /// folders) nor at the store
    #[arg(long)]
    pub(crate) offline: bool,
}

/// Show which rules apply to a request and why, whose budgets it draws on, and what they would
/// answer.
///
/// Attributes are given as NAME=VALUE: `ip=192.0.2.7 method=POST path=/v1/search`. Nothing is
/// charged.
///
/// With `--server` a running server answers, by its own rules and state. With `--config` the rules
/// of the file are explained by the state in the Redis or Valkey that the file names. A store in
/// memory is inside the server: without `--server`, only which rules apply is shown then.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  tidegate explain --server http://127.0.0.1:8080 --token-file admin-token ip=192.0.2.7 path=/v1/search
      By the rules and the state of a running server.
  tidegate explain --config tidegate.yaml ip=192.0.2.7 method=POST path=/v1/search api_key=acme
      By the rules of a file, and the state in the store that it names.

Exit codes: 0 it would pass, 1 it would be denied, 2 usage or error, 3 only which rules apply is known.")]
pub(crate) struct ExplainRules {
    /// The rules file, whose store is asked, too
    #[arg(short, long, value_name = "FILE", env = "TIDEGATE_CONFIG")]
    pub(crate) config: Option<PathBuf>,
    /// Ask this store instead of the one that the file names: the URL of a Redis or Valkey
    #[arg(short, long, value_name = "URL", env = "TIDEGATE_STORE", hide_env_values = true)]
    pub(crate) store: Option<String>,
    #[command(flatten)]
    pub(crate) server: AtServer,
    /// What the request costs by itself
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = whole, allow_negative_numbers = true)]
    pub(crate) cost: u64,
    /// What is known about the request
    #[arg(value_name = "NAME=VALUE", value_parser = attribute)]
    pub(crate) attributes: Vec<(String, String)>,
}

fn attribute(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.into(), value.into())),
        _ => Err(format!("{text:?}: expected NAME=VALUE, such as ip=192.0.2.7")),
    }
}
