//! The settings of the proxy.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::parse::values::{self, Within};

/// The upstream of the proxy, its timeouts and its limits.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize, Serialize)]
#[serde(from = "ProxyFile", into = "ProxyFile")]
pub struct ProxySettings {
    /// The upstream that requests are forwarded to.
    pub upstream: Upstream,
    /// The timeout for connecting to the upstream, and for a slot among the requests in flight.
    pub connect: Duration,
    /// The timeout for the head of a response, once the request is sent.
    pub answer: Duration,
    /// How long a body may stall, in either direction.
    pub idle: Duration,
    /// How long an upgraded connection may be idle.
    pub upgraded_idle: Duration,
    /// The minimum rate of a request body, until the response begins.
    pub min_body_rate: MinRate,
    /// The most concurrent requests at the upstream.
    pub max_in_flight: usize,
    /// The most concurrent requests of one client: an IPv4 address, or the /64 of an IPv6 address.
    pub max_in_flight_per_client: usize,
    /// The most idle connections to the upstream that are kept for reuse.
    pub keep: usize,
    /// How long an idle connection is kept.
    pub keep_idle: Duration,
    /// Whether HTTP/1.1 exchanges may take the fast path. It changes only the cost of a request; no
    /// configuration key sets it.
    pub has_fast_path: bool,
}

impl ProxySettings {
    /// The default settings for an upstream.
    pub fn to(upstream: Upstream) -> Self {
        ProxySettings {
            upstream,
            connect: Duration::from_secs(5),
            answer: Duration::from_secs(60),
            idle: Duration::from_secs(60),
            upgraded_idle: Duration::from_secs(3600),
            min_body_rate: MinRate::default(),
            max_in_flight: 4096,
            max_in_flight_per_client: part_of(4096),
            keep: 256,
            keep_idle: Duration::from_secs(30),
            has_fast_path: true,
        }
    }
}

/// The default share of one client: a quarter of all slots.
const fn part_of(max_in_flight: usize) -> usize {
    max_in_flight.div_ceil(4)
}

/// The minimum rate of a request body. Only time spent waiting for the client counts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MinRate {
    /// Bytes a second; 0 for no minimum.
    pub bytes_per_second: u32,
    /// Extra time that every body gets.
    pub grace: Duration,
}

impl Default for MinRate {
    fn default() -> Self {
        MinRate { bytes_per_second: 500, grace: Duration::from_secs(10) }
    }
}

impl MinRate {
    /// The longest time that so many bytes may take; `None` if there is no minimum.
    pub(super) fn longest(self, bytes: u64) -> Option<Duration> {
        let micros = u128::from(bytes) * 1_000_000 / u128::from(self.bytes_per_second.max(1));
        let more = Duration::from_micros(u64::try_from(micros).unwrap_or(u64::MAX));
        (self.bytes_per_second > 0).then(|| self.grace.saturating_add(more))
    }
}

/// The HTTP version of the upstream.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum UpstreamProtocol {
    /// HTTP/1.1.
    Http1,
    /// HTTP/2 without TLS, with prior knowledge.
    Http2,
}

/// Where requests go: `http://HOST[:PORT][/PATH]`, or `h2c://…` for HTTP/2 without TLS.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Upstream {
    pub(super) protocol: UpstreamProtocol,
    /// An address without brackets, or a name to resolve.
    pub(super) host: String,
    pub(super) port: u16,
    /// The prefix of every path, without a slash at the end.
    pub(super) base: String,
}

/// A URL that cannot be an upstream.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "upstream {url:?}: {problem}: expected http://HOST:PORT, or h2c://HOST:PORT for HTTP/2 without TLS"
)]
pub struct InvalidUpstream {
    url: String,
    problem: &'static str,
}

impl FromStr for Upstream {
    type Err = InvalidUpstream;

    fn from_str(url: &str) -> Result<Self, InvalidUpstream> {
        let wrong = |problem| InvalidUpstream { url: url.chars().take(128).collect(), problem };
        let parsed: axum::http::Uri = url.trim().parse().map_err(|_| wrong("not a URL"))?;
        let protocol = match parsed.scheme_str() {
            Some("http") => UpstreamProtocol::Http1,
            Some("h2c") => UpstreamProtocol::Http2,
            Some("https") => return Err(wrong("TLS to the upstream is not supported")),
            Some(_) => return Err(wrong("unknown scheme")),
            None => return Err(wrong("no scheme, such as the http:// of http://127.0.0.1:3000")),
        };
        let authority = parsed.authority().ok_or_else(|| wrong("no host"))?;
        if authority.as_str().contains('@') {
            return Err(wrong("it has a user before the host"));
        }
        if parsed.query().is_some() {
            return Err(wrong("it has a query after the path"));
        }
        let host = authority.host().trim_start_matches('[').trim_end_matches(']');
        if host.is_empty() {
            return Err(wrong("no host"));
        }
        let port = match authority.port_u16() {
            Some(port) if port > 0 => port,
            None if authority.as_str() == authority.host() => 80,
            _ => return Err(wrong("not a port")),
        };
        Ok(Upstream {
            protocol,
            host: host.into(),
            port,
            base: parsed.path().trim_end_matches('/').into(),
        })
    }
}

impl Upstream {
    /// Host and port as in a URL.
    pub(super) fn authority(&self) -> String {
        let (open, close) = if self.host.contains(':') { ("[", "]") } else { ("", "") };
        format!("{open}{}{close}:{}", self.host, self.port)
    }
}

impl fmt::Display for Upstream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.protocol == UpstreamProtocol::Http1 { "http" } else { "h2c" };
        write!(f, "{scheme}://{}{}", self.authority(), self.base)
    }
}

/// The section `proxy` of the file. Not the type above, because the default of one setting depends
/// on another one, and the file has no level for the minimum rate.
#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct ProxyFile {
    #[serde(with = "values::text")]
    upstream: Upstream,
    connect_ms: Option<Within<1, 600_000>>,
    answer_secs: Option<Within<1, 86_400>>,
    idle_secs: Option<Within<1, 86_400>>,
    upgraded_idle_secs: Option<Within<1, 604_800>>,
    min_body_bytes_per_second: Option<Within<0, 1_000_000_000>>,
    body_grace_secs: Option<Within<1, 3600>>,
    max_in_flight: Option<Within<1, 1_000_000>>,
    max_in_flight_per_client: Option<Within<1, 1_000_000>>,
    keep: Option<Within<0, 100_000>>,
    keep_secs: Option<Within<1, 3600>>,
}

impl From<ProxySettings> for ProxyFile {
    fn from(settings: ProxySettings) -> Self {
        fn some<const LEAST: u32, const MOST: u32>(
            number: impl TryInto<u32>,
        ) -> Option<Within<LEAST, MOST>> {
            number.try_into().ok().map(Within)
        }
        ProxyFile {
            upstream: settings.upstream,
            connect_ms: some(settings.connect.as_millis()),
            answer_secs: some(settings.answer.as_secs()),
            idle_secs: some(settings.idle.as_secs()),
            upgraded_idle_secs: some(settings.upgraded_idle.as_secs()),
            min_body_bytes_per_second: some(settings.min_body_rate.bytes_per_second),
            body_grace_secs: some(settings.min_body_rate.grace.as_secs()),
            max_in_flight: some(settings.max_in_flight),
            max_in_flight_per_client: some(settings.max_in_flight_per_client),
            keep: some(settings.keep),
            keep_secs: some(settings.keep_idle.as_secs()),
        }
    }
}

impl From<ProxyFile> for ProxySettings {
    fn from(file: ProxyFile) -> Self {
        let default = ProxySettings::to(file.upstream);
        let secs = |number: u32| Duration::from_secs(number.into());
        let max_in_flight =
            file.max_in_flight.map_or(default.max_in_flight, |number| number.0 as usize);
        let min_rate = default.min_body_rate;
        ProxySettings {
            connect: file
                .connect_ms
                .map_or(default.connect, |number| Duration::from_millis(number.0.into())),
            answer: file.answer_secs.map_or(default.answer, |number| secs(number.0)),
            idle: file.idle_secs.map_or(default.idle, |number| secs(number.0)),
            upgraded_idle: file
                .upgraded_idle_secs
                .map_or(default.upgraded_idle, |number| secs(number.0)),
            min_body_rate: MinRate {
                bytes_per_second: file
                    .min_body_bytes_per_second
                    .map_or(min_rate.bytes_per_second, |number| number.0),
                grace: file.body_grace_secs.map_or(min_rate.grace, |number| secs(number.0)),
            },
            max_in_flight,
            max_in_flight_per_client: file
                .max_in_flight_per_client
                .map_or(part_of(max_in_flight), |number| (number.0 as usize).min(max_in_flight)),
            keep: file.keep.map_or(default.keep, |number| number.0 as usize),
            keep_idle: file.keep_secs.map_or(default.keep_idle, |number| secs(number.0)),
            has_fast_path: default.has_fast_path,
            upstream: default.upstream,
        }
    }
}

impl ProxySettings {
    /// The most open connections to the upstream, in use and idle.
    pub(super) fn most_connections(&self) -> usize {
        match self.upstream.protocol {
            UpstreamProtocol::Http1 => self.max_in_flight.saturating_add(self.keep),
            // One for all requests, and a second one while it is replaced.
            UpstreamProtocol::Http2 => 2,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn upstreams_are_read() {
        for (url, shown) in [
            ("http://127.0.0.1:3000", "http://127.0.0.1:3000"),
            ("http://app", "http://app:80"),
            ("h2c://[::1]:50051/", "h2c://[::1]:50051"),
            ("http://app:8080/base/", "http://app:8080/base"),
        ] {
            assert_eq!(url.parse::<Upstream>().unwrap().to_string(), shown);
        }
        for url in [
            "",
            "app:80",
            "https://app",
            "http://",
            "http://a:99999",
            "http://u@a",
            "http://a/?x=1",
            "ftp://a",
        ] {
            let error = url.parse::<Upstream>().unwrap_err().to_string();
            assert!(error.contains("expected http://HOST:PORT"), "{error}");
        }
    }
}
