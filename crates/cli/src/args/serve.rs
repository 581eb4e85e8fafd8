//! Arguments of `tidegate serve`.

use std::path::PathBuf;

use tidegate_server::auth::Secret;

use super::values::{LISTENERS, ListenAddress, LogArgs, SECURITY, address, log, secret};

/// Answer programs in any language: HTTP, Envoy, and any Redis client.
///
/// Without a configuration file the server starts with a few example rules. It reads the rules
/// again when their file changes, or on SIGHUP; a file with errors is refused, and the old rules
/// stay. Options override environment variables, and both override the file.
///
/// Listeners are on loopback by default. A listener on another address needs authentication: a
/// token, or client certificates.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  tidegate serve
      Loopback, state in this process, example rules.
  tidegate serve --config tidegate.yaml --store redis://127.0.0.1/
      Your rules; state shared with every server that uses this Redis.
  tidegate serve --envoy-config ./config
      In place of envoyproxy/ratelimit, with its own files.
  tidegate serve --http 0.0.0.0:8443 --tls-cert cert.pem --tls-key key.pem --token-file token
      For clients in your network that send `Authorization: Bearer TOKEN`.
  tidegate serve --config tidegate.yaml --print-config
      The effective configuration, with every default, as a file.

Every option has an environment variable: TIDEGATE_HTTP for --http, and so on.

Exit codes: 0 stopped by a signal with everything answered, 1 something was cut off, 2 usage or error.")]
pub(crate) struct Serve {
    /// The configuration file, or `-` for standard input; see docs/configuration.md
    #[arg(short, long, value_name = "FILE", env = "TIDEGATE_CONFIG")]
    pub(crate) config: Option<PathBuf>,
    /// The store: `memory`, or the URL of a Redis or Valkey [default: memory]
    #[arg(short, long, value_name = "URL", env = "TIDEGATE_STORE", hide_env_values = true)]
    pub(crate) store: Option<String>,
    /// A file with 16 to 512 random bytes that all servers of one store share, so that clients
    /// cannot choose the slots of their keys
    #[arg(long, value_name = "FILE", env = "TIDEGATE_STORE_SECRET_FILE")]
    pub(crate) store_secret_file: Option<PathBuf>,
    /// The most memory for the memory store: a number of bytes such as 512MiB, or `auto`, half of
    /// the memory of this process [default: auto]
    #[arg(long, value_name = "SIZE", env = "TIDEGATE_MAX_BYTES")]
    pub(crate) max_bytes: Option<tidegate_server::Bytes>,
    /// A file that keeps the memory store over a restart; written every second
    #[arg(long, value_name = "FILE", env = "TIDEGATE_SNAPSHOT_FILE")]
    pub(crate) snapshot_file: Option<PathBuf>,
    /// The number of threads, or `auto`, one for each core; see docs/operations.md
    #[arg(long, value_name = "N", env = "TIDEGATE_THREADS")]
    pub(crate) threads: Option<tidegate_server::Threads>,
    /// Print the effective configuration, from file, environment and options, and exit
    #[arg(long)]
    pub(crate) print_config: bool,
    /// The log level (off, error, warn, info, debug), the format (human, json), or both:
    /// `warn,json`
    #[arg(long, value_name = "LEVEL,FORMAT", env = "TIDEGATE_LOG", value_parser = log)]
    pub(crate) log: Option<LogArgs>,
    /// Show keys unmasked, in the log and among the most limited keys
    #[arg(long, env = "TIDEGATE_SHOW_KEYS")]
    pub(crate) show_keys: bool,
    /// The address of the HTTP listener, or `off` [default: 127.0.0.1:8080]
    #[arg(long, value_name = "ADDR", env = "TIDEGATE_HTTP", value_parser = address)]
    #[arg(help_heading = LISTENERS)]
    pub(crate) http: Option<ListenAddress>,
    /// The address of Envoy's rate limit service over gRPC, or `off` [default: 127.0.0.1:8081]
    #[arg(long, value_name = "ADDR", env = "TIDEGATE_GRPC", value_parser = address)]
    #[arg(help_heading = LISTENERS)]
    pub(crate) grpc: Option<ListenAddress>,
    /// The configuration of envoyproxy/ratelimit: a folder of YAML files, one domain each; see
    /// docs/grpc.md
    #[arg(long, value_name = "DIR", env = "TIDEGATE_ENVOY_CONFIG", help_heading = LISTENERS)]
    pub(crate) envoy_config: Option<PathBuf>,
    /// The address of the listener for Redis clients, or `off` [default: 127.0.0.1:6380]
    #[arg(long, value_name = "ADDR", env = "TIDEGATE_RESP", value_parser = address)]
    #[arg(help_heading = LISTENERS)]
    pub(crate) resp: Option<ListenAddress>,
    /// The address of a separate HTTP listener for metrics and admin calls, which the other
    /// listener then refuses
    #[arg(long, value_name = "ADDR", env = "TIDEGATE_ADMIN", value_parser = address)]
    #[arg(help_heading = LISTENERS)]
    pub(crate) admin: Option<ListenAddress>,
    /// The token that clients need for checks: `Authorization: Bearer TOKEN`, or AUTH
    #[arg(long, value_name = "TOKEN", env = "TIDEGATE_TOKEN", hide_env_values = true)]
    #[arg(value_parser = secret, conflicts_with = "token_file", help_heading = SECURITY)]
    pub(crate) token: Option<Secret>,
    /// A file with the token, which keeps it out of process lists
    #[arg(long, value_name = "FILE", env = "TIDEGATE_TOKEN_FILE", help_heading = SECURITY)]
    pub(crate) token_file: Option<PathBuf>,
    /// The token that clients need to reset keys, and to see rules and keys
    #[arg(long, value_name = "TOKEN", env = "TIDEGATE_ADMIN_TOKEN", hide_env_values = true)]
    #[arg(value_parser = secret, conflicts_with = "admin_token_file", help_heading = SECURITY)]
    pub(crate) admin_token: Option<Secret>,
    /// A file with the admin token
    #[arg(long, value_name = "FILE", env = "TIDEGATE_ADMIN_TOKEN_FILE", help_heading = SECURITY)]
    pub(crate) admin_token_file: Option<PathBuf>,
    /// The certificate of every listener, in PEM; read again when it changes
    #[arg(long, value_name = "FILE", env = "TIDEGATE_TLS_CERT", requires = "tls_key")]
    #[arg(help_heading = SECURITY)]
    pub(crate) tls_cert: Option<PathBuf>,
    /// The private key of the certificate
    #[arg(long, value_name = "FILE", env = "TIDEGATE_TLS_KEY", requires = "tls_cert")]
    #[arg(help_heading = SECURITY)]
    pub(crate) tls_key: Option<PathBuf>,
    /// The authority that signs client certificates, which clients then need
    #[arg(long, value_name = "FILE", env = "TIDEGATE_TLS_CLIENT_CA", help_heading = SECURITY)]
    pub(crate) tls_client_ca: Option<PathBuf>,
    /// Allow listeners beyond loopback without authentication: any client can use them
    #[arg(long, env = "TIDEGATE_INSECURE", help_heading = SECURITY)]
    pub(crate) insecure: bool,
}
