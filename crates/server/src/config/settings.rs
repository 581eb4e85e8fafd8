//! The sections of the file that no other module has a type for.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use serde::de::{Deserializer, Error as _};
use serde::{Deserialize, Serialize, Serializer};
use tidegate::http::denial::{self, DenyStatus};
use tidegate::http::headers::HeaderFamilies;
use tidegate::http::{
    ClientIp, DEFAULT_IPV6_PREFIX, DotSegments, EscapedSlashes, Network, PathPolicy, TrustedProxies,
};

use crate::browser::Hosts;
use crate::parse::values::{self, Text};
use crate::response_options::ResponseOptions;
use crate::rules::envoy::EnvoyOptions;

/// The longest deadline of a call to the store, in milliseconds.
pub const MAX_DEADLINE_MS: u32 = 10_000;

/// The section `resilience`: the layer before a remote store.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct ResilienceSettings {
    /// The deadline of one call to the store.
    #[serde(rename = "deadline_ms", deserialize_with = "values::millis::<1, MAX_DEADLINE_MS, _>")]
    #[serde(serialize_with = "values::as_millis")]
    pub deadline: Duration,
    /// The number of nodes by which limits are divided; counted in the store if `None`.
    #[serde(deserialize_with = "values::auto_or::<1, 10_000, _>")]
    #[serde(serialize_with = "values::as_auto")]
    pub nodes: Option<u32>,
    /// The part of a limit that all nodes together may hold in leases, in percent.
    #[serde(deserialize_with = "values::within::<0, 100, _, _>")]
    pub lease_error_percent: u32,
    /// The period in which locally allowed units are charged to the store.
    #[serde(rename = "async_period_ms", deserialize_with = "values::millis::<1, 10_000, _>")]
    #[serde(serialize_with = "values::as_millis")]
    pub async_period: Duration,
    /// The most units of a key that may be allowed and not yet charged; chosen by
    /// [`tidegate::resilience::Resilient`] if `None`.
    #[serde(deserialize_with = "values::auto_or::<0, 1_000_000_000, _>")]
    #[serde(serialize_with = "values::as_auto")]
    pub async_cap: Option<u32>,
    /// The most concurrent calls to the store.
    #[serde(deserialize_with = "values::within::<1, 4096, _, _>")]
    pub max_in_flight: u32,
}

impl Default for ResilienceSettings {
    fn default() -> Self {
        ResilienceSettings {
            deadline: tidegate::resilience::DEFAULT_DEADLINE,
            nodes: None,
            lease_error_percent: 1,
            async_period: Duration::from_millis(50),
            async_cap: None,
            max_in_flight: 1024,
        }
    }
}

/// The section `tokens`: the files that tokens are read from.
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct TokenFiles {
    /// The token for checks.
    #[serde(rename = "check_file", deserialize_with = "values::some_path")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub checks: Option<PathBuf>,
    /// The token for all calls, administration included.
    #[serde(rename = "admin_file", deserialize_with = "values::some_path")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub admin: Option<PathBuf>,
}

/// The section `listen`: the address of each listener; `None` is closed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Listen {
    /// HTTP.
    #[serde(with = "address")]
    pub http: Option<SocketAddr>,
    /// gRPC.
    #[serde(with = "address")]
    pub grpc: Option<SocketAddr>,
    /// RESP.
    #[serde(with = "address")]
    pub resp: Option<SocketAddr>,
    /// Metrics, dashboard and admin calls, if they have a listener of their own.
    #[serde(with = "address")]
    pub admin: Option<SocketAddr>,
    /// The proxy, if there is an upstream.
    #[serde(with = "address")]
    pub proxy: Option<SocketAddr>,
}

impl Listen {
    /// Whether other machines can reach a listener that requires tokens. The proxy requires none.
    pub(crate) fn is_beyond_loopback(&self) -> bool {
        let listeners = [self.http, self.grpc, self.resp, self.admin];
        listeners.into_iter().flatten().any(|address| !address.ip().is_loopback())
    }
}

impl Default for Listen {
    fn default() -> Self {
        let at = |port| Some(SocketAddr::from(([127, 0, 0, 1], port)));
        Listen { http: at(8080), grpc: at(8081), resp: at(6380), admin: None, proxy: at(8000) }
    }
}

/// What a listener expects instead of this text.
pub fn expected_address(text: &str) -> String {
    let (host, port) = text.rsplit_once(':').unwrap_or(("", text));
    match (host, port.parse::<u16>()) {
        ("", Ok(port)) => format!(
            "a port without an address: write 127.0.0.1:{port} for this machine alone, or off"
        ),
        (_, Ok(port)) => {
            format!(
                "a name, expected an IP address: write 127.0.0.1:{port} for this machine alone, or off"
            )
        }
        _ => "expected an IP address and port such as 127.0.0.1:8080, or off".into(),
    }
}

/// An address to listen on, or `off`.
mod address {
    use super::*;

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Option<SocketAddr>, D::Error> {
        let text = Text::deserialize(from)?.0;
        match text.as_str() {
            "off" | "false" => Ok(None),
            address => address.parse().map(Some).map_err(|_| {
                D::Error::custom(format!("{address:?}: {}", expected_address(address)))
            }),
        }
    }

    pub(super) fn serialize<S: Serializer>(
        address: &Option<SocketAddr>,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        match address {
            Some(address) => to.collect_str(address),
            None => to.serialize_str("off"),
        }
    }
}

/// `trusted_proxies`: a list of networks, addresses, `loopback` and `private`.
pub(super) mod trusted_proxies {
    use super::*;

    struct Proxies(TrustedProxies);

    impl<'de> Deserialize<'de> for Proxies {
        fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
            let text = Text::deserialize(from)?.0;
            TrustedProxies::read([text]).map(Proxies).map_err(D::Error::custom)
        }
    }

    pub(in crate::config) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<TrustedProxies, D::Error> {
        let list: Vec<Proxies> = Vec::deserialize(from)?;
        let networks: Vec<Network> =
            list.iter().flat_map(|proxies| proxies.0.networks()).copied().collect();
        TrustedProxies::try_from(networks)
            .map_err(|problem| D::Error::custom(format!("trusted_proxies: {problem}")))
    }

    pub(in crate::config) fn serialize<S: Serializer>(
        proxies: &TrustedProxies,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        to.collect_seq(proxies.networks().iter().map(ToString::to_string))
    }
}

/// The section `client_ip`: how the address of a client is found behind trusted proxies.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct ClientIpSettings {
    /// The header that trusted proxies write the address to.
    #[serde(deserialize_with = "values::header_name")]
    header: String,
    /// How many bits the IPv6 addresses of one client have in common.
    #[serde(deserialize_with = "values::within::<32, 128, _, _>")]
    ipv6_prefix: u8,
}

impl Default for ClientIpSettings {
    fn default() -> Self {
        let header = ClientIp::of_peer().header_name().into();
        ClientIpSettings { header, ipv6_prefix: DEFAULT_IPV6_PREFIX }
    }
}

impl ClientIpSettings {
    /// Finds clients behind these proxies.
    pub(super) fn behind(&self, trusted: TrustedProxies) -> ClientIp {
        let clients = ClientIp::behind(trusted).header(&self.header);
        let clients = clients.and_then(|clients| clients.ipv6_prefix(self.ipv6_prefix));
        clients.expect("both were checked when they were read")
    }
}

/// The section `http`: responses over HTTP, and the names of the HTTP listeners.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct HttpSettings {
    #[serde(with = "families")]
    headers: HeaderFamilies,
    #[serde(with = "values::text")]
    denial: denial::DenialFormat,
    #[serde(with = "values::text")]
    deny_status: DenyStatus,
    /// Names under which the HTTP listeners are called.
    pub hosts: Hosts,
}

impl Default for HttpSettings {
    fn default() -> Self {
        let ResponseOptions { headers, denial, deny_status } = ResponseOptions::default();
        HttpSettings { headers, denial, deny_status, hosts: Hosts::default() }
    }
}

impl HttpSettings {
    /// The format of responses.
    pub fn response_options(&self) -> ResponseOptions {
        let HttpSettings { headers, denial, deny_status, .. } = *self;
        ResponseOptions { headers, denial, deny_status }
    }
}

/// A list of header families; an empty list is none of them.
mod families {
    use super::*;

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<HeaderFamilies, D::Error> {
        let words: Vec<Text> = Vec::deserialize(from)?;
        let mut words = words.iter();
        words
            .try_fold(HeaderFamilies::NONE, |families, word| families.with(&word.0))
            .map_err(D::Error::custom)
    }

    pub(super) fn serialize<S: Serializer>(
        families: &HeaderFamilies,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        to.collect_seq(families.to_string().split(' '))
    }
}

/// The section `paths`: what is refused or changed of paths that servers read in different ways.
#[derive(Deserialize, Serialize)]
#[serde(remote = "PathPolicy", deny_unknown_fields)]
pub(super) struct Paths {
    #[serde(default, with = "values::text")]
    escaped_slashes: EscapedSlashes,
    #[serde(default, with = "values::text")]
    dot_segments: DotSegments,
}

/// The section `envoy`: Envoy's rate limit service.
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize, Serialize)]
#[serde(from = "EnvoyFile", into = "EnvoyFile")]
pub struct Envoy {
    /// The folder with the configuration of envoyproxy/ratelimit, if there is one.
    pub config: Option<PathBuf>,
    /// The format of responses.
    pub options: EnvoyOptions,
}

/// The section as it is written. Not the type above, because the options are one value for the
/// engine, and a flattened field would lose the places of its keys.
#[derive(Clone, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
struct EnvoyFile {
    #[serde(deserialize_with = "values::some_path", skip_serializing_if = "Option::is_none")]
    config: Option<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    compat: Option<Compat>,
    #[serde(with = "overrides")]
    overrides: Option<u32>,
    #[serde(with = "some_families")]
    headers: Option<HeaderFamilies>,
    #[serde(skip_serializing_if = "Option::is_none")]
    body: Option<DenialBody>,
}

#[derive(Clone, Copy, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
enum Compat {
    CountRejected,
}

#[derive(Clone, Copy, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
enum DenialBody {
    Problem,
}

impl Default for EnvoyFile {
    fn default() -> Self {
        Envoy::default().into()
    }
}

impl From<EnvoyFile> for Envoy {
    fn from(file: EnvoyFile) -> Self {
        let options = EnvoyOptions {
            count_rejected: file.compat.is_some(),
            overrides: file.overrides,
            headers: file.headers,
            body: file.body.is_some(),
        };
        Envoy { config: file.config, options }
    }
}

impl From<Envoy> for EnvoyFile {
    fn from(Envoy { config, options }: Envoy) -> Self {
        EnvoyFile {
            config,
            compat: options.count_rejected.then_some(Compat::CountRejected),
            overrides: options.overrides,
            headers: options.headers,
            body: options.body.then_some(DenialBody::Problem),
        }
    }
}

/// `on`, `off`, or the most requests per unit that a limit in a request may have.
mod overrides {
    use super::*;

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u32>, D::Error> {
        match Text::deserialize(from)?.0.as_str() {
            "on" | "true" => Ok(EnvoyOptions::default().overrides),
            "off" | "false" => Ok(None),
            number => number.parse().map(Some).map_err(|_| {
                D::Error::custom(format!(
                    "{number:?}: expected on, off, or the most requests per unit such as 1000"
                ))
            }),
        }
    }

    pub(super) fn serialize<S: Serializer>(most: &Option<u32>, to: S) -> Result<S::Ok, S::Error> {
        match *most {
            None => to.serialize_str("off"),
            Some(u32::MAX) => to.serialize_str("on"),
            Some(most) => to.serialize_u32(most),
        }
    }
}

/// A list of header families; an empty list is the same as no list.
mod some_families {
    use super::*;

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Option<HeaderFamilies>, D::Error> {
        let words: Vec<Text> = Vec::deserialize(from)?;
        let mut own = words.iter();
        let families = own.try_fold(HeaderFamilies::NONE, |families, word| families.with(&word.0));
        Ok((!words.is_empty()).then_some(families.map_err(D::Error::custom)?))
    }

    pub(super) fn serialize<S: Serializer>(
        families: &Option<HeaderFamilies>,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        let text = families.map_or(String::new(), |families| families.to_string());
        to.collect_seq(text.split(' ').filter(|word| !word.is_empty()))
    }
}
