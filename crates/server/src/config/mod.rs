//! The configuration: a YAML file becomes a [`Config`], which is valid once it is read.
//!
//! Errors have the file, line and column, and what was expected. Unknown keys are errors, so that a
//! misspelt one is never silently a rule without a limit.

pub(crate) mod changes;
mod check;
mod print;
mod settings;

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize};
use tidegate::http::{ClientIp, PathPolicy, TrustedProxies};

pub use self::settings::{
    ClientIpSettings, Envoy, HttpSettings, Listen, MAX_DEADLINE_MS, ResilienceSettings, TokenFiles,
    expected_address,
};
use crate::findings::Finding;
pub use crate::findings::{ConfigError, MAX_FILE_BYTES};
use crate::listen::Bounds;
use crate::listen::tls::TlsFiles;
use crate::memory::MemorySettings;
use crate::observe::LogSettings;
use crate::parse::outline::Outline;
use crate::parse::values::{self, Text};
use crate::parse::yaml;
use crate::proxy::ProxySettings;
use crate::rules::{Failure, HeaderPolicy, RequestPolicy, Rules};
use crate::threads::Threads;

/// The effective configuration of a server: its file, overridden by options. Each field is a key of
/// the file.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Where state is kept: `memory`, or the URL of a Redis or Valkey.
    #[serde(deserialize_with = "store", serialize_with = "print::as_shown_store")]
    pub store: String,
    /// The file with the secret that protects the slots of a cluster; an alternative to a secret in
    /// the URL.
    #[serde(deserialize_with = "values::some_path", skip_serializing_if = "Option::is_none")]
    pub store_secret_file: Option<PathBuf>,
    /// The store in memory.
    pub memory: MemorySettings,
    /// The number of threads.
    #[serde(with = "values::text")]
    pub threads: Threads,
    /// The address of each listener.
    pub listen: Listen,
    /// Proxies that may state the address of a client.
    #[serde(with = "settings::trusted_proxies")]
    pub trusted_proxies: TrustedProxies,
    /// How the address of a client is found.
    pub client_ip: ClientIpSettings,
    /// What happens when the store does not answer, unless a rule has its own policy.
    pub on_store_failure: Failure,
    /// The layer before a remote store.
    pub resilience: ResilienceSettings,
    /// TLS at every listener, if files are named.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls: Option<TlsFiles>,
    /// Files with tokens.
    pub tokens: TokenFiles,
    /// Bounds of connections.
    #[serde(rename = "connections")]
    pub bounds: Bounds,
    /// What is logged, and how.
    pub log: LogSettings,
    /// Whether listeners may be open to other machines without a token.
    pub insecure: bool,
    /// Envoy's rate limit service.
    pub envoy: Envoy,
    /// Responses over HTTP, and the names of the HTTP listeners.
    pub http: HttpSettings,
    /// Paths that servers read in different ways.
    #[serde(with = "settings::Paths")]
    pub paths: PathPolicy,
    /// Headers of requests.
    pub headers: HeaderPolicy,
    /// The proxy, if there is an upstream.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub proxy: Option<ProxySettings>,
    /// The rules.
    pub rules: Rules,
    /// Whether an option or a variable supplies the token for checks.
    #[serde(skip)]
    pub is_given_token: bool,
    /// The place of every value in the file.
    #[serde(skip)]
    pub(crate) outline: Outline,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            store: "memory".into(),
            store_secret_file: None,
            memory: MemorySettings::default(),
            threads: Threads::default(),
            listen: Listen::default(),
            trusted_proxies: TrustedProxies::none(),
            client_ip: ClientIpSettings::default(),
            on_store_failure: Failure::default(),
            resilience: ResilienceSettings::default(),
            tls: None,
            tokens: TokenFiles::default(),
            bounds: Bounds::default(),
            log: LogSettings::default(),
            insecure: false,
            envoy: Envoy::default(),
            http: HttpSettings::default(),
            paths: PathPolicy::default(),
            headers: HeaderPolicy::default(),
            proxy: None,
            rules: Rules::default(),
            is_given_token: false,
            outline: Outline::default(),
        }
    }
}

/// Reads the URL of a store.
fn store<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    Ok(Text::deserialize(from)?.0)
}

impl Config {
    /// Reads a file.
    ///
    /// # Errors
    /// If the file cannot be read or has an error.
    pub fn load(path: &Path) -> Result<Config, ConfigError> {
        let (config, findings) = Self::examine(path)?;
        config.unless_refused(findings)
    }

    /// Reads a file, and returns its errors and warnings, sorted by place.
    ///
    /// # Errors
    /// If the file cannot be read as a configuration.
    pub fn examine(path: &Path) -> Result<(Config, Vec<Finding>), ConfigError> {
        let file = path.display().to_string();
        let unreadable = |why| ConfigError::Unreadable { file: file.clone(), why };
        let bytes = std::fs::metadata(path).map_err(unreadable)?.len();
        if bytes > MAX_FILE_BYTES {
            return Err(ConfigError::TooLarge { file, bytes });
        }
        let text =
            tidegate_bounded::files::read_text_file(path, MAX_FILE_BYTES).map_err(unreadable)?;
        Self::examine_text(&text, &file)
    }

    /// The configuration without a file: the defaults. It has no findings.
    pub fn without_file() -> Config {
        Self::parse("", "").expect("an empty file is a configuration")
    }

    /// Reads text; errors name it `file`.
    ///
    /// # Errors
    /// If the text has an error.
    pub fn parse(text: &str, file: &str) -> Result<Config, ConfigError> {
        let (config, findings) = Self::examine_text(text, file)?;
        config.unless_refused(findings)
    }

    fn unless_refused(self, findings: Vec<Finding>) -> Result<Config, ConfigError> {
        if findings.iter().any(Finding::is_error) {
            Err(ConfigError::Refused(findings))
        } else {
            Ok(self)
        }
    }

    fn examine_text(text: &str, file: &str) -> Result<(Config, Vec<Finding>), ConfigError> {
        let invalid = |problem: String| ConfigError::Invalid { file: file.into(), problem };
        let outline = Outline::of(text, file);
        let mut config: Config = serde_saphyr::from_str(text).map_err(|error| {
            let line = error.location().map_or(0, |location| location.line());
            if outline.has_blank_setting(line) {
                ConfigError::Refused(check::blanks(&outline))
            } else {
                invalid(yaml::located(&error, text))
            }
        })?;
        config.outline = outline;
        let ipv6_prefix = config.clients().prefix();
        config.rules = config.rules.with_ipv6_prefix(ipv6_prefix);
        let findings = config.findings();
        Ok((config, findings))
    }

    /// How the address of a client is found.
    pub fn clients(&self) -> ClientIp {
        self.client_ip.behind(self.trusted_proxies.clone())
    }

    /// What is refused or changed before rules see a request.
    pub fn requests(&self) -> RequestPolicy {
        RequestPolicy { paths: self.paths, headers: self.headers.clone() }
    }
}

/// The options of the command line, which override the file each time it is read.
#[derive(Clone, Default)]
pub struct Overlay(Option<Arc<Overlaying>>);

type Overlaying = dyn Fn(&mut Config) -> Result<(), String> + Send + Sync;

impl Overlay {
    /// An overlay that changes a configuration, or returns why it cannot.
    pub fn new(change: impl Fn(&mut Config) -> Result<(), String> + Send + Sync + 'static) -> Self {
        Overlay(Some(Arc::new(change)))
    }

    /// Applies the options to a configuration.
    ///
    /// # Errors
    /// If the options and the file contradict each other.
    pub fn apply(&self, config: &mut Config) -> Result<(), String> {
        self.0.as_ref().map_or(Ok(()), |change| change(config))
    }
}

impl fmt::Debug for Overlay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Overlay")
    }
}

#[cfg(test)]
mod tests {
    use tidegate::http::headers::HeaderFamilies;

    use super::*;
    use crate::rules::envoy::EnvoyOptions;

    const PAGE: &str = "\
store: memory
listen: { http: 127.0.0.1:8080, grpc: off, resp: 127.0.0.1:6380 }
trusted_proxies: [10.0.0.0/8]
on_store_failure: local
rules:
  - name: per-ip
    by: [ip]
    limit: 10/s; 120/m
  - name: search
    when: { method: POST, path: /v1/search* }
    by: [api_key]
    limit: 100/min burst 20
    cost: 5
    overrides:
      - when: { api_key: acme }
        limit: 10000/min
  - name: trial
    mode: shadow
    by: user
    limit: 5/s
    cost: { from: header.x-cost, max: 100 }
";

    #[test]
    fn a_complete_file_is_read() {
        let config = Config::parse(PAGE, "tidegate.yaml").unwrap();
        assert_eq!(config.listen.grpc, None);
        let names: Vec<&str> = config.rules.iter().map(|rule| &*rule.name).collect();
        assert_eq!(names, ["per-ip", "search", "trial"]);
        let request = [
            ("ip", "192.0.2.7"),
            ("method", "POST"),
            ("path", "/v1/search?q=x"),
            ("api_key", "acme"),
        ];
        let found = config.rules.matching(&request[..], 1).unwrap();
        let found: Vec<_> =
            found.iter().map(|one| (&*one.rule.name, one.key.as_slice(), one.cost)).collect();
        assert_eq!(
            found,
            [("per-ip", &b"192.0.2.7"[..], 1), ("search", b"acme", 5), ("trial", b"", 1)]
        );
    }

    #[test]
    fn options_for_envoy_are_read() {
        let text = "envoy:\n  config: /etc/ratelimit\n  compat: count_rejected\n  overrides: 500\n  headers: [ietf]\n  body: problem\n";
        let options = EnvoyOptions {
            count_rejected: true,
            overrides: Some(500),
            headers: Some(HeaderFamilies::IETF),
            body: true,
        };
        let envoy = Config::parse(text, "f").unwrap().envoy;
        assert_eq!(envoy, Envoy { config: Some("/etc/ratelimit".into()), options });
        assert_eq!(
            Config::parse("envoy: { overrides: off }\n", "f").unwrap().envoy.options.overrides,
            None
        );
        assert_eq!(Config::parse("", "f").unwrap().envoy, Envoy::default());
        assert!(
            Config::parse("envoy: { overrides: many }\n", "f")
                .unwrap_err()
                .to_string()
                .starts_with("f:1:21: ")
        );
    }

    #[test]
    fn errors_have_a_place() {
        for (text, expected) in [
            ("rules:\n  - name: a\n    limit: 10/s\n    lmit: 3\n", "f:4:5: "),
            ("rules:\n  - name: a\n    limit: 10/fortnight\n", "f:3:12: "),
            ("rules:\n  - name: a\n    limit:\n", "f:3:"),
            ("rules:\n  - name: a b\n    limit: 1/s\n", "f:2:11: "),
            ("listen: { http: nowhere }\n", "f:1:17: "),
            ("threads: 0\n", "f:1:10: threads \"0\": expected auto, or a number from 1 to 1024"),
            (
                "memory: { max_bytes: 5 }\n",
                "f:1:22: max_bytes: \"5\": expected auto, or a number of bytes such as 512MiB",
            ),
            ("memory: { max_keys: 0 }\n", "f:1:21: max_keys: 0: expected 1 to 4000000000"),
            (
                "memory: { overflow: drop }\n",
                "f:1:21: overflow: \"drop\": expected shared_bucket, deny_new or allow_new",
            ),
            (
                "threads: many\n",
                "f:1:10: threads \"many\": expected auto, or a number from 1 to 1024",
            ),
            ("rules:\n  - name: a\n    limit: 1/s\n    when: { path: '' }\n", "f:4:"),
            ("rules:\n  - name: a\n    limit: 1/s\n    mode: maybe\n", "f:4:11: "),
            (
                "rules:\n  - { name: a, limit: 1/s }\n  - { name: a, limit: 2/s }\n",
                "f:3:13: two rules are called \"a\"",
            ),
            (
                "trusted_proxies: [10.0.0.0/99]\n",
                "f:1:19: network \"10.0.0.0/99\": expected a prefix of 0 to 32 bits",
            ),
            ("client_ip: { header: 'a b' }\n", "f:1:22: header \"a b\": expected a name"),
            ("client_ip: { ipv6_prefix: 8 }\n", "f:1:27: ipv6_prefix: 8: expected 32 to 128"),
            (
                "resilience: { deadline_ms: 10001 }\n",
                "f:1:28: deadline_ms: 10001: expected 1 to 10000",
            ),
            (
                "resilience: { nodes: many }\n",
                "f:1:22: nodes: \"many\": expected auto, or a number from 1 to 10000",
            ),
            (
                "resilience: { lease_error_percent: 101 }\n",
                "f:1:36: lease_error_percent: 101: expected 0 to 100",
            ),
            ("rules:\n  - name: a\n    limit: 1/s\n    sync: never\n", "f:4:11: "),
            ("rules:\n  - name: a\n    limit: 1/s\n    cost: -3\n", "f:4:5: "),
            (
                "rules:\n  - name: a\n    limit: 1/s\n    settle: bytes\n",
                "f:4:13: settle: \"bytes\": expected response_bytes",
            ),
            (
                "rules:\n  - name: a\n    limit: 1/s\n    settle: { by: response_ms, per: 0 }\n",
                "f:4:",
            ),
            (
                "rules:\n  - name: a\n    limit: 1/s\n    charge_when: { path: /x }\n",
                "f:4:20: rule a: charge_when path: a response does not have it: expected status or header.NAME",
            ),
            (
                "paths: { escaped_slashes: merge }\n",
                "f:1:27: escaped_slashes \"merge\": expected one of reject, decode, keep",
            ),
            (
                "paths: { dot_segments: remove }\n",
                "f:1:24: dot_segments \"remove\": expected one of reject, resolve, keep",
            ),
            ("headers: { underscores: pass }\n", "f:1:"),
            ("headers: { lists: ['a b'] }\n", "f:1:20: header \"a b\": expected a name"),
            (
                "rules:\n  - name: a\n    limit: 9/s\n    cost: { from: header.x-cost, min: 5, max: 3 }\n",
                "f:4:39: rule a: cost: min: 5 is more than max: 3: expected at most 3",
            ),
            (
                "http: { hosts: [a, 'b:8080'] }\n",
                "f:1:20: host \"b:8080\": expected a name without a port, such as tidegate.internal or *.example.com",
            ),
            ("http: { hosts: ['*'] }\n", "f:1:17: host \"*\": expected a name without a port"),
            (
                "proxy: { upstream: 'https://x' }\n",
                "f:1:20: upstream \"https://x\": TLS to the upstream",
            ),
            ("proxy: { answer_secs: 3 }\n", "f:1:"),
        ] {
            let error = Config::parse(text, "f").unwrap_err().to_string();
            assert!(error.starts_with(expected), "{text}\nsays {error}");
        }
    }
}
