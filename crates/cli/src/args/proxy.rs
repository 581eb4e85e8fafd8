//! Arguments of `tidegate proxy`.

use std::net::SocketAddr;
use std::path::PathBuf;

use tidegate::http::TrustedProxies;
use tidegate_server::proxy::Upstream;
use tidegate_server::rules::Rule;

use super::values::{ListenAddress, LogArgs, SECURITY, address, log};

/// Put limits in front of a web service: a reverse proxy.
///
/// Requests that the limits allow are streamed to the upstream, whatever their size; the others get
/// 429 and the time to try again. Clients may use HTTP/1.1, HTTP/2 and WebSocket, with TLS if there
/// is a certificate. The upstream gets HTTP/1.1, or HTTP/2 if its URL begins with h2c://.
///
/// A limit is `LIMIT by WHAT`: ip, path, method, host, bearer (a token), header.NAME, cookie.NAME,
/// query.NAME, or several of them, and each combination has its own budget. A configuration file
/// can say more: see docs/proxy.md.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  tidegate proxy --upstream http://127.0.0.1:3000 --limit '10/s by ip'
      Then: curl -i http://127.0.0.1:8000/
  tidegate proxy --upstream http://app:3000 --listen 0.0.0.0:80 --limit '10/s; 1000/h by ip' --limit '5/min by ip, path'
      Both limits must allow a request.
  tidegate proxy --upstream http://app:3000 --limit '100/min by header.x-api-key' --store redis://127.0.0.1/
      One budget for each key, shared by all proxies that use this Redis.
  tidegate proxy --upstream http://app:3000 --limit '10/s by ip' --trust 10.0.0.0/8
      Behind a load balancer, whose X-Forwarded-For is trusted.
  tidegate proxy --upstream h2c://grpc:50051 --listen 0.0.0.0:443 --tls-cert cert.pem --tls-key key.pem --limit '50/s by bearer'
  tidegate proxy --config tidegate.yaml
      Rules with conditions, tiers, costs by outcome or size.

Exit codes: 0 stopped by a signal with everything answered, 1 something was cut off, 2 usage or error.")]
pub(crate) struct Proxy {
    /// The upstream: http://HOST:PORT, or h2c://HOST:PORT for HTTP/2 without TLS
    #[arg(short, long, value_name = "URL", env = "TIDEGATE_UPSTREAM")]
    pub(crate) upstream: Option<Upstream>,
    /// The address to listen on [default: 127.0.0.1:8000]
    #[arg(long, value_name = "ADDR", env = "TIDEGATE_PROXY")]
    pub(crate) listen: Option<SocketAddr>,
    /// A limit and its key: '10/s by ip'. If there are several, all must allow a request
    #[arg(short, long = "limit", value_name = "LIMIT by WHAT", value_parser = Rule::in_one_line)]
    pub(crate) limits: Vec<Rule>,
    /// The configuration file with rules and settings, or `-` for standard input; see docs/proxy.md
    #[arg(short, long, value_name = "FILE", env = "TIDEGATE_CONFIG")]
    pub(crate) config: Option<PathBuf>,
    /// The store: `memory`, or the URL of a Redis or Valkey [default: memory]
    #[arg(short, long, value_name = "URL", env = "TIDEGATE_STORE", hide_env_values = true)]
    pub(crate) store: Option<String>,
    /// Trusted proxies, which may name the client: networks, addresses, `loopback` or `private`,
    /// separated by commas
    #[arg(long, value_name = "NETWORKS", env = "TIDEGATE_TRUST")]
    pub(crate) trust: Option<TrustedProxies>,
    /// The address of an HTTP listener for metrics and admin calls, or `off` [default: off]
    #[arg(long, value_name = "ADDR", env = "TIDEGATE_ADMIN", value_parser = address)]
    pub(crate) admin: Option<ListenAddress>,
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
    /// The certificate, in PEM; read again when it changes
    #[arg(long, value_name = "FILE", env = "TIDEGATE_TLS_CERT", requires = "tls_key")]
    #[arg(help_heading = SECURITY)]
    pub(crate) tls_cert: Option<PathBuf>,
    /// The private key of the certificate
    #[arg(long, value_name = "FILE", env = "TIDEGATE_TLS_KEY", requires = "tls_cert")]
    #[arg(help_heading = SECURITY)]
    pub(crate) tls_key: Option<PathBuf>,
}
