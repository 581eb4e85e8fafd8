//! The file as it is written: what serde reads before it becomes a [`Config`].

use std::net::SocketAddr;
use std::time::Duration;

use serde::Deserialize;
use serde::de::{Deserializer, Error as _};
use tidegate::http::denial::{self, DenyStatus};
use tidegate::http::headers::Families;
use tidegate::http::{ClientIp, DotSegments, EscapedSlashes, Network, PathPolicy, TrustedProxies};
use tidegate::memory::Overflow;

use super::rule_file::RuleFile;
use super::{Config, Envoy, Listen, MAX_DEADLINE_MS, ResilienceSettings, TokenFiles};
use crate::browser::{HostName, Hosts};
use crate::listen::Bounds;
use crate::listen::tls::TlsFiles;
use crate::memory::{Bytes, MemorySettings};
use crate::observe::{Format, Level, Settings};
use crate::parse::outline::Outline;
use crate::parse::values::{Text, Within};
use crate::proxy::settings::ProxyFile;
use crate::response_options::ResponseOptions;
use crate::rules::envoy::EnvoyOptions;
use crate::rules::{Failure, HeaderPolicy, MAX_RULES, RequestPolicy, Rule, Rules};
use crate::threads::Threads;

#[derive(Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub(super) struct File {
    #[serde(default)]
    store: Option<Text>,
    #[serde(default)]
    store_secret_file: Option<Text>,
    #[serde(default)]
    memory: MemoryFile,
    #[serde(default)]
    threads: Option<Word<Threads>>,
    #[serde(default)]
    listen: ListenFile,
    #[serde(default)]
    trusted_proxies: Vec<Proxies>,
    #[serde(default)]
    client_ip: ClientIpFile,
    #[serde(default)]
    on_store_failure: Option<FailureWord>,
    #[serde(default)]
    resilience: ResilienceFile,
    #[serde(default)]
    tls: Option<TlsFile>,
    #[serde(default)]
    tokens: TokensFile,
    #[serde(default)]
    connections: ConnectionsFile,
    #[serde(default)]
    log: LogFile,
    #[serde(default)]
    insecure: bool,
    #[serde(default)]
    envoy: EnvoyFile,
    #[serde(default)]
    http: HttpFile,
    #[serde(default)]
    paths: PathsFile,
    #[serde(default)]
    headers: HeadersFile,
    #[serde(default)]
    proxy: Option<ProxyFile>,
    #[serde(default)]
    rules: Vec<RuleFile>,
}

/// A network, an address, `loopback` or `private`.
#[derive(Debug)]
struct Proxies(TrustedProxies);

impl<'de> Deserialize<'de> for Proxies {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let text = Text::deserialize(from)?.0;
        TrustedProxies::read([text]).map(Proxies).map_err(D::Error::custom)
    }
}

/// The name of a header.
#[derive(Debug)]
struct HeaderName(String);

impl<'de> Deserialize<'de> for HeaderName {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let name = Text::deserialize(from)?.0;
        ClientIp::of_peer().header(&name).map_err(D::Error::custom)?;
        Ok(HeaderName(name))
    }
}

#[derive(Deserialize, Debug, Default)]
#[serde(deny_unknown_fields)]
struct ClientIpFile {
    header: Option<HeaderName>,
    ipv6_prefix: Option<Within<32, 128>>,
}

impl ClientIpFile {
    fn checked(self, trusted: Vec<Proxies>) -> Result<ClientIp, String> {
        let networks: Vec<Network> =
            trusted.iter().flat_map(|proxies| proxies.0.networks()).copied().collect();
        let trusted = TrustedProxies::try_from(networks)
            .map_err(|problem| format!("trusted_proxies: {problem}"))?;
        let mut clients = ClientIp::behind(trusted);
        if let Some(HeaderName(name)) = self.header {
            clients = clients.header(&name).map_err(|problem| format!("client_ip: {problem}"))?;
        }
        if let Some(Within(bits)) = self.ipv6_prefix {
            let bits = u8::try_from(bits).unwrap_or(u8::MAX);
            clients =
                clients.ipv6_prefix(bits).map_err(|problem| format!("client_ip: {problem}"))?;
        }
        Ok(clients)
    }
}

#[derive(Deserialize, Debug, Default)]
#[serde(deny_unknown_fields)]
struct EnvoyFile {
    config: Option<Text>,
    compat: Option<CompatWord>,
    #[serde(default)]
    overrides: Overrides,
    #[serde(default)]
    headers: FamilyList,
    body: Option<BodyWord>,
}

#[derive(Deserialize, Debug, Clone, Copy)]
#[serde(rename_all = "snake_case")]
enum CompatWord {
    CountRejected,
}

#[derive(Deserialize, Debug, Default)]
#[serde(deny_unknown_fields)]
struct HttpFile {
    headers: Option<FamilyList>,
    denial: Option<DenialWord>,
    deny_status: Option<DenyStatusWord>,
    #[serde(default)]
    hosts: Vec<Host>,
}

/// A name under which the HTTP listeners are called.
#[derive(Debug)]
struct Host(HostName);

impl<'de> Deserialize<'de> for Host {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        Text::deserialize(from)?.0.parse().map(Host).map_err(D::Error::custom)
    }
}

/// `403` or `429`.
#[derive(Debug)]
pub(super) struct DenyStatusWord(pub(super) DenyStatus);

impl<'de> Deserialize<'de> for DenyStatusWord {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        Text::deserialize(from)?.0.parse().map(DenyStatusWord).map_err(D::Error::custom)
    }
}

/// `problem`, `json` or `text`.
#[derive(Debug)]
struct DenialWord(denial::Body);

impl<'de> Deserialize<'de> for DenialWord {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        Text::deserialize(from)?.0.parse().map(DenialWord).map_err(D::Error::custom)
    }
}

impl HttpFile {
    fn checked(self) -> (ResponseOptions, Hosts) {
        let default = ResponseOptions::default();
        let response_options = ResponseOptions {
            headers: self.headers.map_or(default.headers, |list| list.0.unwrap_or(Families::NONE)),
            denial: self.denial.map_or(default.denial, |word| word.0),
            deny_status: self.deny_status.map_or(default.deny_status, |word| word.0),
        };
        (response_options, self.hosts.into_iter().map(|host| host.0).collect())
    }
}

/// Paths that servers read in different ways.
#[derive(Deserialize, Debug, Default)]
#[serde(deny_unknown_fields)]
struct PathsFile {
    escaped_slashes: Option<Word<EscapedSlashes>>,
    dot_segments: Option<Word<DotSegments>>,
}

impl PathsFile {
    fn checked(self) -> PathPolicy {
        PathPolicy {
            escaped_slashes: self.escaped_slashes.map_or_else(Default::default, |word| word.0),
            dot_segments: self.dot_segments.map_or_else(Default::default, |word| word.0),
        }
    }
}

/// Headers of requests.
#[derive(Deserialize, Debug, Default)]
#[serde(deny_unknown_fields)]
struct HeadersFile {
    underscores: Option<UnderscoresWord>,
    #[serde(default)]
    lists: Vec<HeaderName>,
}

#[derive(Deserialize, Debug, Clone, Copy)]
#[serde(rename_all = "lowercase")]
enum UnderscoresWord {
    Drop,
    Keep,
}

impl HeadersFile {
    fn checked(self) -> HeaderPolicy {
        HeaderPolicy {
            keeps_underscores: matches!(self.underscores, Some(UnderscoresWord::Keep)),
            lists: self.lists.into_iter().map(|name| name.0.to_ascii_lowercase()).collect(),
        }
    }
}

/// A list of families, each once or more often.
#[derive(Debug, Default)]
struct FamilyList(Option<Families>);

impl<'de> Deserialize<'de> for FamilyList {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let words = Vec::<Text>::deserialize(from)?;
        if words.is_empty() {
            return Ok(FamilyList(None));
        }
        let families =
            words.iter().try_fold(Families::NONE, |families, word| families.and(&word.0));
        families.map(|families| FamilyList(Some(families))).map_err(D::Error::custom)
    }
}

#[derive(Deserialize, Debug, Clone, Copy)]
#[serde(rename_all = "lowercase")]
enum BodyWord {
    Problem,
}

/// `on`, `off`, or the most that is believed.
#[derive(Debug)]
struct Overrides(Option<u32>);

impl Default for Overrides {
    fn default() -> Self {
        Overrides(EnvoyOptions::default().overrides)
    }
}

impl<'de> Deserialize<'de> for Overrides {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        match Text::deserialize(from)?.0.as_str() {
            "on" | "true" => Ok(Overrides::default()),
            "off" | "false" => Ok(Overrides(None)),
            number => number.parse().map(|most| Overrides(Some(most))).map_err(|_| {
                D::Error::custom(format!(
                    "{number:?}: expected on, off, or the most requests per unit such as 1000"
                ))
            }),
        }
    }
}

impl EnvoyFile {
    fn checked(self) -> Envoy {
        let options = EnvoyOptions {
            count_rejected: self.compat.is_some_and(|CompatWord::CountRejected| true),
            overrides: self.overrides.0,
            headers: self.headers.0,
            body: self.body.is_some_and(|BodyWord::Problem| true),
        };
        Envoy { config: self.config.map(|folder| folder.0.into()), options }
    }
}

#[derive(Deserialize, Debug, Default)]
#[serde(deny_unknown_fields)]
struct ResilienceFile {
    deadline_ms: Option<Within<1, MAX_DEADLINE_MS>>,
    #[serde(default)]
    nodes: AutoOr<1, 10_000>,
    lease_error_percent: Option<Within<0, 100>>,
    async_period_ms: Option<Within<1, 10_000>>,
    #[serde(default)]
    async_cap: AutoOr<0, 1_000_000_000>,
    max_in_flight: Option<Within<1, 4096>>,
}

impl ResilienceFile {
    fn checked(self) -> ResilienceSettings {
        let default = ResilienceSettings::default();
        let millis = |number: u32| Duration::from_millis(number.into());
        ResilienceSettings {
            deadline: self.deadline_ms.map_or(default.deadline, |number| millis(number.0)),
            nodes: self.nodes.0,
            lease_error_percent: self
                .lease_error_percent
                .map_or(default.lease_error_percent, |number| number.0),
            async_period: self
                .async_period_ms
                .map_or(default.async_period, |number| millis(number.0)),
            async_cap: self.async_cap.0,
            max_in_flight: self.max_in_flight.map_or(default.max_in_flight, |number| number.0),
        }
    }
}

/// A number between two others, or `auto`.
#[derive(Debug, Clone, Copy, Default)]
struct AutoOr<const LEAST: u32, const MOST: u32>(Option<u32>);

impl<'de, const LEAST: u32, const MOST: u32> Deserialize<'de> for AutoOr<LEAST, MOST> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let text = Text::deserialize(from)?.0;
        match text.parse::<u32>() {
            _ if text == "auto" => Ok(AutoOr(None)),
            Ok(number) if (LEAST..=MOST).contains(&number) => Ok(AutoOr(Some(number))),
            _ => Err(D::Error::custom(format!(
                "{text:?}: expected auto, or a number from {LEAST} to {MOST}"
            ))),
        }
    }
}

#[derive(Deserialize, Debug)]
#[serde(deny_unknown_fields)]
struct TlsFile {
    cert: Text,
    key: Text,
    client_ca: Option<Text>,
}

#[derive(Deserialize, Debug, Default)]
#[serde(deny_unknown_fields)]
struct TokensFile {
    check_file: Option<Text>,
    admin_file: Option<Text>,
}

#[derive(Deserialize, Debug, Default)]
#[serde(deny_unknown_fields)]
struct ConnectionsFile {
    max: Option<Positive>,
    max_per_ip: Option<Positive>,
    idle_secs: Option<Positive>,
}

#[derive(Deserialize, Debug, Default)]
#[serde(deny_unknown_fields)]
struct LogFile {
    level: Option<Word<Level>>,
    format: Option<Word<Format>>,
    denials_per_second: Option<u32>,
    show_keys: Option<bool>,
}

/// A word with few choices.
#[derive(Debug)]
struct Word<T>(T);

impl<'de, T: std::str::FromStr<Err = String>> Deserialize<'de> for Word<T> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        // `off` is a truth value in some dialects.
        let text = Text::deserialize(from)?.0;
        let text = if text == "false" { "off" } else { &text };
        text.parse().map(Word).map_err(D::Error::custom)
    }
}

/// A number above nothing, that is a number of things at once.
#[derive(Debug, Clone, Copy)]
struct Positive(u32);

impl<'de> Deserialize<'de> for Positive {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        match u32::deserialize(from)? {
            number @ 1..=1_000_000 => Ok(Positive(number)),
            number => Err(D::Error::custom(format!("{number}: expected 1 to 1000000"))),
        }
    }
}

#[derive(Deserialize, Debug, Default)]
#[serde(deny_unknown_fields)]
struct ListenFile {
    http: Option<Protocol>,
    grpc: Option<Protocol>,
    resp: Option<Protocol>,
    admin: Option<Protocol>,
    proxy: Option<Protocol>,
}

impl File {
    pub(super) fn checked(self) -> Result<Config, String> {
        if self.rules.len() > MAX_RULES {
            return Err(format!("{} rules: expected at most {MAX_RULES}", self.rules.len()));
        }
        let mut rules: Vec<Rule> = Vec::with_capacity(self.rules.len());
        for rule in self.rules {
            rules.push(rule.checked()?);
        }
        let clients = self.client_ip.checked(self.trusted_proxies)?;
        let (response_options, hosts) = self.http.checked();
        let protocol = |said: Option<Protocol>, default: Option<SocketAddr>| {
            said.map_or(default, |protocol| protocol.0)
        };
        let default = Listen::default();
        Ok(Config {
            store: self.store.map_or_else(|| "memory".into(), |store| store.0),
            store_secret_file: self.store_secret_file.map(|file| file.0.into()),
            memory: self.memory.checked(),
            threads: self.threads.map_or_else(Threads::default, |word| word.0),
            listen: Listen {
                http: protocol(self.listen.http, default.http),
                grpc: protocol(self.listen.grpc, default.grpc),
                resp: protocol(self.listen.resp, default.resp),
                admin: protocol(self.listen.admin, default.admin),
                proxy: protocol(self.listen.proxy, default.proxy),
            },
            on_store_failure: self.on_store_failure.map_or_else(Failure::default, Into::into),
            resilience: self.resilience.checked(),
            tls: self.tls.map(|files| TlsFiles {
                cert: files.cert.0.into(),
                key: files.key.0.into(),
                client_ca: files.client_ca.map(|file| file.0.into()),
            }),
            tokens: TokenFiles {
                checks: self.tokens.check_file.map(|file| file.0.into()),
                admin: self.tokens.admin_file.map(|file| file.0.into()),
            },
            bounds: self.connections.checked(),
            log: self.log.checked(),
            insecure: self.insecure,
            is_given_token: false,
            envoy: self.envoy.checked(),
            response_options,
            hosts,
            requests: RequestPolicy {
                paths: self.paths.checked(),
                headers: self.headers.checked(),
            },
            proxy: self.proxy.map(ProxyFile::checked),
            rules: Rules::new(rules).with_ipv6_prefix(clients.prefix()),
            clients,
            outline: Outline::default(),
        })
    }
}

#[derive(Deserialize, Debug, Default)]
#[serde(deny_unknown_fields)]
struct MemoryFile {
    max_keys: Option<Within<1, 4_000_000_000>>,
    max_bytes: Option<Word<Bytes>>,
    overflow: Option<OverflowWord>,
    snapshot_file: Option<Text>,
    snapshot_secs: Option<Positive>,
}

#[derive(Deserialize, Debug, Clone, Copy)]
#[serde(rename_all = "snake_case")]
pub(super) enum OverflowWord {
    SharedBucket,
    DenyNew,
    AllowNew,
}

impl From<OverflowWord> for Overflow {
    fn from(word: OverflowWord) -> Self {
        match word {
            OverflowWord::SharedBucket => Overflow::SharedBucket,
            OverflowWord::DenyNew => Overflow::DenyNew,
            OverflowWord::AllowNew => Overflow::AllowNew,
        }
    }
}

impl MemoryFile {
    fn checked(self) -> MemorySettings {
        let default = MemorySettings::default();
        MemorySettings {
            max_keys: self.max_keys.map_or(default.max_keys, |keys| keys.0 as usize),
            max_bytes: self.max_bytes.map_or(default.max_bytes, |bytes| bytes.0),
            overflow: self.overflow.map_or(default.overflow, Into::into),
            snapshot_file: self.snapshot_file.map(|file| file.0.into()),
            snapshot_every: self
                .snapshot_secs
                .map_or(default.snapshot_every, |secs| Duration::from_secs(secs.0.into())),
        }
    }
}

impl ConnectionsFile {
    fn checked(self) -> Bounds {
        let default = Bounds::default();
        let number = |said: Option<Positive>, default: usize| {
            said.map_or(default, |number| number.0 as usize)
        };
        Bounds {
            max_connections: number(self.max, default.max_connections),
            max_connections_per_ip: number(self.max_per_ip, default.max_connections_per_ip),
            idle: self.idle_secs.map_or(default.idle, |secs| Duration::from_secs(secs.0.into())),
            ..default
        }
    }
}

impl LogFile {
    fn checked(self) -> Settings {
        let default = Settings::default();
        Settings {
            level: self.level.map_or(default.level, |word| word.0),
            format: self.format.map_or(default.format, |word| word.0),
            denials_per_second: self.denials_per_second.unwrap_or(default.denials_per_second),
            show_keys: self.show_keys.unwrap_or(default.show_keys),
        }
    }
}

#[derive(Deserialize, Debug, Clone, Copy)]
#[serde(rename_all = "lowercase")]
pub(super) enum FailureWord {
    Open,
    Closed,
    Local,
}

impl From<FailureWord> for Failure {
    fn from(word: FailureWord) -> Self {
        match word {
            FailureWord::Open => Failure::Open,
            FailureWord::Closed => Failure::Closed,
            FailureWord::Local => Failure::Local,
        }
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
#[derive(Debug)]
struct Protocol(Option<SocketAddr>);

impl<'de> Deserialize<'de> for Protocol {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let text = Text::deserialize(from)?.0;
        match text.as_str() {
            "off" | "false" => Ok(Protocol(None)),
            address => address.parse().map(|address| Protocol(Some(address))).map_err(|_| {
                D::Error::custom(format!("{address:?}: {}", expected_address(address)))
            }),
        }
    }
}
