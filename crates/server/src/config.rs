//! The rules file: YAML into a [`Config`] that is valid once read.
//!
//! Whatever is wrong is said with file, line and column, and what was expected. Unknown keys are errors, so that a misspelt one is not
//! silently a rule without a limit.

use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::de::{Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, de};
use tidegate::denial;
use tidegate::headers::Families;
use tidegate::http::{ClientIp, Network, TrustedProxies};
use tidegate::{Limits, Overflow, SyncMode};

use crate::door::Bounds;
use crate::door::tls::TlsFiles;
use crate::http::Manners;
use crate::memory::{Bytes, MemorySettings};
use crate::observe::{Format, Level, Settings};
use crate::proxy::ProxySettings;
use crate::proxy::settings::ProxyFile;
use crate::rules::envoy::Terms;
use crate::rules::{
    Budget, Condition, Cost, Failure, MAX_NAME_BYTES, MAX_RULES, Measure, Mode, Override, Pattern, Rule, Rules, Settle,
    outcome,
};
use crate::threads::Threads;

/// The largest file that is read, in bytes.
pub const MAX_FILE_BYTES: u64 = 1 << 20;
/// The longest a call to the store may take: an answer within ten milliseconds includes everything else.
pub const MAX_DEADLINE_MS: u32 = 8;

/// Everything the server can be told by a file.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where state is kept: `memory`, or the URL of a Redis or Valkey.
    pub store: String,
    /// A file with the secret that keeps others from choosing slots of a cluster; instead of one in the URL.
    pub store_secret_file: Option<PathBuf>,
    /// What a store in memory may keep.
    pub memory: MemorySettings,
    /// How many threads serve.
    pub threads: Threads,
    /// Where each door listens.
    pub listen: Listen,
    /// Who is the client of a request, and whose word about that is believed.
    pub clients: ClientIp,
    /// What to do when the store does not answer, unless a rule says otherwise.
    pub on_store_failure: Failure,
    /// What stands before a remote store.
    pub near: NearSettings,
    /// TLS at every door, if files are named.
    pub tls: Option<TlsFiles>,
    /// Files with tokens.
    pub tokens: TokenFiles,
    /// How many may come, and how slow they may be.
    pub bounds: Bounds,
    /// What is logged, and how.
    pub log: Settings,
    /// Doors may be open to everybody.
    pub insecure: bool,
    /// How requests in Envoy's protocol are answered.
    pub envoy: Envoy,
    /// How answers over HTTP are dressed.
    pub manners: Manners,
    /// Where the proxy leads, if there is one.
    pub proxy: Option<ProxySettings>,
    /// The rules.
    pub rules: Rules,
}

/// What stands before a remote store.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NearSettings {
    /// How long one call to the store may take.
    pub deadline: Duration,
    /// By how many nodes limits are divided; counted in the store, if nothing.
    pub nodes: Option<u32>,
    /// How many per cent of a limit all nodes together may have taken ahead.
    pub lease_error_percent: u32,
    /// How often what was let pass is charged.
    pub async_period: Duration,
    /// How many units of a key may be let pass and not yet charged; what [`tidegate::Near`] makes of it, if nothing.
    pub async_cap: Option<u32>,
    /// How many calls to the store may be under way.
    pub max_in_flight: u32,
}

impl Default for NearSettings {
    fn default() -> Self {
        NearSettings {
            deadline: tidegate::DEFAULT_DEADLINE,
            nodes: None,
            lease_error_percent: 1,
            async_period: Duration::from_millis(50),
            async_cap: None,
            max_in_flight: 1024,
        }
    }
}

/// What Envoy's rate limit service needs.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Envoy {
    /// The folder with the configuration of envoyproxy/ratelimit, if there is one.
    pub config: Option<PathBuf>,
    /// How requests are answered.
    pub terms: Terms,
}

/// Where tokens are read from.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct TokenFiles {
    /// The token for checks.
    pub checks: Option<PathBuf>,
    /// The token for everything.
    pub admin: Option<PathBuf>,
}

/// Where each door listens; `None` is closed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Listen {
    /// HTTP.
    pub http: Option<SocketAddr>,
    /// gRPC.
    pub grpc: Option<SocketAddr>,
    /// RESP.
    pub resp: Option<SocketAddr>,
    /// Metrics, dashboard and admin calls, if they shall have a door of their own.
    pub admin: Option<SocketAddr>,
    /// The proxy, if there is an upstream.
    pub proxy: Option<SocketAddr>,
}

impl Default for Listen {
    fn default() -> Self {
        let at = |port| Some(SocketAddr::from(([127, 0, 0, 1], port)));
        Listen { http: at(8080), grpc: at(8081), resp: at(6380), admin: None, proxy: at(8000) }
    }
}

/// What is wrong with a file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// It cannot be read.
    #[error("{file}: {source}")]
    Unreadable {
        /// The file.
        file: String,
        /// Why.
        source: std::io::Error,
    },
    /// It is too large.
    #[error("{file}: {bytes} bytes: expected at most {MAX_FILE_BYTES}")]
    TooLarge {
        /// The file.
        file: String,
        /// How large.
        bytes: u64,
    },
    /// It says something that cannot be.
    #[error("{file}:{problem}")]
    Invalid {
        /// The file.
        file: String,
        /// Line, column and what was expected.
        problem: String,
    },
}

impl Config {
    /// Reads a file.
    ///
    /// # Errors
    /// If it cannot be read or says something that cannot be.
    pub fn load(path: &Path) -> Result<Config, ConfigError> {
        let file = path.display().to_string();
        let unreadable = |source| ConfigError::Unreadable { file: file.clone(), source };
        let bytes = std::fs::metadata(path).map_err(unreadable)?.len();
        if bytes > MAX_FILE_BYTES {
            return Err(ConfigError::TooLarge { file, bytes });
        }
        let text = std::fs::read_to_string(path).map_err(unreadable)?;
        Self::parse(&text, &file)
    }

    /// Reads text; `file` is what errors call it.
    ///
    /// # Errors
    /// If it says something that cannot be.
    pub fn parse(text: &str, file: &str) -> Result<Config, ConfigError> {
        let invalid = |problem: String| ConfigError::Invalid { file: file.into(), problem };
        let read: File = serde_saphyr::from_str(text).map_err(|error| invalid(located(&error)))?;
        read.checked().map_err(|problem| invalid(format!(" {problem}")))
    }
}

/// `3:12: what is wrong`.
pub(crate) fn located(error: &serde_saphyr::Error) -> String {
    let text = error.without_snippet().to_string();
    match error.location() {
        Some(location) => format!("{}:{}: {text}", location.line(), location.column()),
        None => format!(" {text}"),
    }
}

#[derive(Deserialize, Debug)]
#[serde(deny_unknown_fields)]
struct File {
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
    near: NearFile,
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
        let networks: Vec<Network> = trusted.iter().flat_map(|proxies| proxies.0.networks()).copied().collect();
        let trusted = TrustedProxies::try_from(networks).map_err(|problem| format!("trusted_proxies: {problem}"))?;
        let mut clients = ClientIp::behind(trusted);
        if let Some(HeaderName(name)) = self.header {
            clients = clients.header(&name).map_err(|problem| format!("client_ip: {problem}"))?;
        }
        if let Some(Within(bits)) = self.ipv6_prefix {
            let bits = u8::try_from(bits).unwrap_or(u8::MAX);
            clients = clients.ipv6_prefix(bits).map_err(|problem| format!("client_ip: {problem}"))?;
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
    fn checked(self) -> Manners {
        let default = Manners::default();
        Manners {
            headers: self.headers.map_or(default.headers, |list| list.0.unwrap_or(Families::NONE)),
            denial: self.denial.map_or(default.denial, |word| word.0),
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
        let families = words.iter().try_fold(Families::NONE, |families, word| families.and(&word.0));
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
        Overrides(Terms::default().overrides)
    }
}

impl<'de> Deserialize<'de> for Overrides {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        match Text::deserialize(from)?.0.as_str() {
            "on" | "true" => Ok(Overrides::default()),
            "off" | "false" => Ok(Overrides(None)),
            number => number.parse().map(|most| Overrides(Some(most))).map_err(|_| {
                D::Error::custom(format!("{number:?}: expected on, off, or the most requests per unit such as 1000"))
            }),
        }
    }
}

impl EnvoyFile {
    fn checked(self) -> Envoy {
        let terms = Terms {
            count_rejected: self.compat.is_some_and(|CompatWord::CountRejected| true),
            overrides: self.overrides.0,
            headers: self.headers.0,
            body: self.body.is_some_and(|BodyWord::Problem| true),
        };
        Envoy { config: self.config.map(|folder| folder.0.into()), terms }
    }
}

#[derive(Deserialize, Debug, Default)]
#[serde(deny_unknown_fields)]
struct NearFile {
    deadline_ms: Option<Within<1, MAX_DEADLINE_MS>>,
    #[serde(default)]
    nodes: AutoOr<1, 10_000>,
    lease_error_percent: Option<Within<0, 100>>,
    async_period_ms: Option<Within<1, 10_000>>,
    #[serde(default)]
    async_cap: AutoOr<0, 1_000_000_000>,
    max_in_flight: Option<Within<1, 4096>>,
}

impl NearFile {
    fn checked(self) -> NearSettings {
        let default = NearSettings::default();
        let millis = |number: u32| Duration::from_millis(number.into());
        NearSettings {
            deadline: self.deadline_ms.map_or(default.deadline, |number| millis(number.0)),
            nodes: self.nodes.0,
            lease_error_percent: self.lease_error_percent.map_or(default.lease_error_percent, |number| number.0),
            async_period: self.async_period_ms.map_or(default.async_period, |number| millis(number.0)),
            async_cap: self.async_cap.0,
            max_in_flight: self.max_in_flight.map_or(default.max_in_flight, |number| number.0),
        }
    }
}

/// A number between two others.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Within<const LEAST: u32, const MOST: u32>(pub(crate) u32);

impl<'de, const LEAST: u32, const MOST: u32> Deserialize<'de> for Within<LEAST, MOST> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        match u32::deserialize(from)? {
            number if (LEAST..=MOST).contains(&number) => Ok(Within(number)),
            number => Err(D::Error::custom(format!("{number}: expected {LEAST} to {MOST}"))),
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
            _ => Err(D::Error::custom(format!("{text:?}: expected auto, or a number from {LEAST} to {MOST}"))),
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
    http: Option<Door>,
    grpc: Option<Door>,
    resp: Option<Door>,
    admin: Option<Door>,
    proxy: Option<Door>,
}

#[derive(Deserialize, Debug)]
#[serde(deny_unknown_fields)]
struct RuleFile {
    name: Name,
    #[serde(default)]
    when: Conditions,
    #[serde(default)]
    by: Names,
    limit: BudgetText,
    #[serde(default)]
    cost: CostFile,
    #[serde(default)]
    overrides: Vec<OverrideFile>,
    #[serde(default)]
    mode: ModeWord,
    #[serde(default)]
    refunds: OnOff,
    #[serde(default)]
    on_store_failure: Option<FailureWord>,
    #[serde(default)]
    sync: SyncWord,
    #[serde(default)]
    overflow: Option<OverflowWord>,
    #[serde(default)]
    charge_when: Conditions,
    #[serde(default)]
    settle: Option<SettleFile>,
}

#[derive(Deserialize, Debug)]
#[serde(deny_unknown_fields)]
struct OverrideFile {
    when: Conditions,
    limit: BudgetText,
}

impl File {
    fn checked(self) -> Result<Config, String> {
        if self.rules.len() > MAX_RULES {
            return Err(format!("{} rules: expected at most {MAX_RULES}", self.rules.len()));
        }
        let mut rules: Vec<Rule> = Vec::with_capacity(self.rules.len());
        for rule in self.rules {
            let name: Arc<str> = rule.name.0.into();
            if rules.iter().any(|earlier| earlier.name == name) {
                return Err(format!("two rules are called {name:?}: expected a name of its own for each"));
            }
            outcome::check(&rule.charge_when.0).map_err(|problem| format!("rule {name}: {problem}"))?;
            let overrides =
                rule.overrides.into_iter().map(|other| Override { when: other.when.0, budget: other.limit.0 });
            rules.push(Rule {
                name,
                when: rule.when.0,
                by: rule.by.0,
                budget: rule.limit.0,
                cost: rule.cost.0,
                overrides: overrides.collect(),
                mode: match rule.mode {
                    ModeWord::Enforce => Mode::Enforce,
                    ModeWord::Shadow => Mode::Shadow,
                },
                refunds: rule.refunds == OnOff::On,
                on_store_failure: rule.on_store_failure.map(Into::into),
                sync: rule.sync.into(),
                overflow: rule.overflow.map(Into::into),
                charge_when: rule.charge_when.0,
                settle: rule.settle.map(|settle| settle.0),
            });
        }
        let door = |said: Option<Door>, default: Option<SocketAddr>| said.map_or(default, |door| door.0);
        let default = Listen::default();
        Ok(Config {
            store: self.store.map_or_else(|| "memory".into(), |store| store.0),
            store_secret_file: self.store_secret_file.map(|file| file.0.into()),
            memory: self.memory.checked(),
            threads: self.threads.map_or_else(Threads::default, |word| word.0),
            listen: Listen {
                http: door(self.listen.http, default.http),
                grpc: door(self.listen.grpc, default.grpc),
                resp: door(self.listen.resp, default.resp),
                admin: door(self.listen.admin, default.admin),
                proxy: door(self.listen.proxy, default.proxy),
            },
            clients: self.client_ip.checked(self.trusted_proxies)?,
            on_store_failure: self.on_store_failure.map_or_else(Failure::default, Into::into),
            near: self.near.checked(),
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
            envoy: self.envoy.checked(),
            manners: self.http.checked(),
            proxy: self.proxy.map(ProxyFile::checked),
            rules: Rules::new(rules),
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
enum OverflowWord {
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
        let number = |said: Option<Positive>, default: usize| said.map_or(default, |number| number.0 as usize);
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
enum FailureWord {
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

#[derive(Deserialize, Debug, Clone, Copy, Default)]
#[serde(rename_all = "lowercase")]
enum SyncWord {
    #[default]
    Direct,
    Lease,
    Async,
}

impl From<SyncWord> for SyncMode {
    fn from(word: SyncWord) -> Self {
        match word {
            SyncWord::Direct => SyncMode::Direct,
            SyncWord::Lease => SyncMode::Lease,
            SyncWord::Async => SyncMode::Async,
        }
    }
}

#[derive(Deserialize, Debug, Clone, Copy, Default)]
#[serde(rename_all = "lowercase")]
enum ModeWord {
    #[default]
    Enforce,
    Shadow,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum OnOff {
    #[default]
    On,
    Off,
}

/// YAML reads `on` and `off` as truth values in some dialects: both are taken.
impl<'de> Deserialize<'de> for OnOff {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        match Text::deserialize(from)?.0.as_str() {
            "on" | "true" => Ok(OnOff::On),
            "off" | "false" => Ok(OnOff::Off),
            other => Err(D::Error::custom(format!("{other:?}: expected on or off"))),
        }
    }
}

/// Text that is not blank.
#[derive(Debug)]
pub(crate) struct Text(pub(crate) String);

impl<'de> Deserialize<'de> for Text {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let text = String::deserialize(from)?;
        if text.trim().is_empty() { Err(D::Error::custom("a blank value: expected text")) } else { Ok(Text(text)) }
    }
}

/// The name of a rule: letters, digits, `-`, `_`, `.`; it is shown in headers and metrics.
#[derive(Debug)]
struct Name(String);

impl<'de> Deserialize<'de> for Name {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let name = Text::deserialize(from)?.0;
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        if name.len() > MAX_NAME_BYTES || !name.bytes().all(plain) {
            let problem =
                format!("rule name {name:?}: expected 1 to {MAX_NAME_BYTES} letters, digits, `-`, `_` or `.`");
            return Err(D::Error::custom(problem));
        }
        Ok(Name(name))
    }
}

/// An address to listen on, or `off`.
#[derive(Debug)]
struct Door(Option<SocketAddr>);

impl<'de> Deserialize<'de> for Door {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let text = Text::deserialize(from)?.0;
        match text.as_str() {
            "off" | "false" => Ok(Door(None)),
            address => address.parse().map(|address| Door(Some(address))).map_err(|_| {
                D::Error::custom(format!("{address:?}: expected an address and port such as 127.0.0.1:8080, or off"))
            }),
        }
    }
}

/// `unlimited`, `deny`, or limits in the notation.
#[derive(Debug)]
struct BudgetText(Budget);

impl<'de> Deserialize<'de> for BudgetText {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let text = Text::deserialize(from)?.0;
        match text.trim().to_ascii_lowercase().as_str() {
            "unlimited" => Ok(BudgetText(Budget::Unlimited)),
            "deny" => Ok(BudgetText(Budget::Deny)),
            _ => match text.parse::<Limits>() {
                Ok(limits) => Ok(BudgetText(Budget::Limits(limits))),
                Err(error) => Err(D::Error::custom(format!("limit {text:?}: {error}; or write unlimited or deny"))),
            },
        }
    }
}

/// One name or several.
#[derive(Debug, Default)]
struct Names(Vec<Arc<str>>);

impl<'de> Deserialize<'de> for Names {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let names = from.deserialize_any(OneOrMany("an attribute such as ip, or a list of them"))?;
        Ok(Names(names.into_iter().map(Into::into).collect()))
    }
}

/// Attribute by attribute, what its value may look like: one pattern, or a list of which one must match.
#[derive(Debug, Default)]
struct Conditions(Vec<Condition>);

impl<'de> Deserialize<'de> for Conditions {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Map;
        impl<'de> Visitor<'de> for Map {
            type Value = Conditions;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("attributes and patterns such as { method: POST, path: /v1/* }")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Conditions, A::Error> {
                let mut conditions = Vec::new();
                while let Some(attribute) = map.next_key::<Text>()? {
                    let Patterns(any_of) = map.next_value()?;
                    conditions.push(Condition { attribute: attribute.0.into(), any_of });
                }
                Ok(Conditions(conditions))
            }
        }
        from.deserialize_map(Map)
    }
}

struct Patterns(Vec<Pattern>);

impl<'de> Deserialize<'de> for Patterns {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let texts = from.deserialize_any(OneOrMany("a pattern such as /v1/*, or a list of them"))?;
        texts
            .iter()
            .map(|text| text.parse::<Pattern>().map_err(D::Error::custom))
            .collect::<Result<_, _>>()
            .map(Patterns)
    }
}

/// Reads one text or a list of texts; numbers and truth values are taken as they are written.
struct OneOrMany(&'static str);

impl<'de> Visitor<'de> for OneOrMany {
    type Value = Vec<String>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Vec<String>, E> {
        if text.trim().is_empty() {
            return Err(E::custom(format!("a blank value: expected {}", self.0)));
        }
        Ok(vec![text.into()])
    }

    fn visit_u64<E: de::Error>(self, number: u64) -> Result<Vec<String>, E> {
        Ok(vec![number.to_string()])
    }

    fn visit_i64<E: de::Error>(self, number: i64) -> Result<Vec<String>, E> {
        Ok(vec![number.to_string()])
    }

    fn visit_bool<E: de::Error>(self, truth: bool) -> Result<Vec<String>, E> {
        Ok(vec![truth.to_string()])
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vec<String>, A::Error> {
        let mut texts = Vec::new();
        while let Some(text) = list.next_element::<Text>()? {
            texts.push(text.0);
        }
        if texts.is_empty() { Err(A::Error::custom(format!("an empty list: expected {}", self.0))) } else { Ok(texts) }
    }
}

/// A number, or where to read it from.
#[derive(Debug)]
struct CostFile(Cost);

impl Default for CostFile {
    fn default() -> Self {
        CostFile(Cost::Fixed(1))
    }
}

impl<'de> Deserialize<'de> for CostFile {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Either;
        impl<'de> Visitor<'de> for Either {
            type Value = CostFile;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a whole number, or { from: ATTRIBUTE, max: N }")
            }

            fn visit_u64<E: de::Error>(self, units: u64) -> Result<CostFile, E> {
                Ok(CostFile(Cost::Fixed(units)))
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<CostFile, A::Error> {
                #[derive(Deserialize)]
                #[serde(deny_unknown_fields)]
                struct From {
                    from: Text,
                    max: u64,
                }
                let From { from, max } = From::deserialize(de::value::MapAccessDeserializer::new(map))?;
                Ok(CostFile(Cost::From { attribute: from.0.into(), max }))
            }
        }
        from.deserialize_any(Either)
    }
}

/// `response_bytes`, `response_ms`, `header.NAME`; or one of these with how many of them are one unit.
#[derive(Debug)]
struct SettleFile(Settle);

impl<'de> Deserialize<'de> for SettleFile {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        fn read<E: de::Error>(text: &str, per: u64) -> Result<SettleFile, E> {
            let by = match text {
                "response_bytes" => Measure::Bytes,
                "response_ms" => Measure::Millis,
                _ => match text.strip_prefix("header.").filter(|name| !name.is_empty()) {
                    Some(name) => Measure::Header(name.to_ascii_lowercase().into()),
                    None => {
                        let problem = format!("{text:?}: expected response_bytes, response_ms or header.NAME");
                        return Err(E::custom(problem));
                    }
                },
            };
            if per == 0 { Err(E::custom("per: 0: expected at least 1")) } else { Ok(SettleFile(Settle { by, per })) }
        }
        struct Either;
        impl<'de> Visitor<'de> for Either {
            type Value = SettleFile;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("response_bytes, response_ms, header.NAME, or { by: …, per: N }")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<SettleFile, E> {
                read(text, 1)
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<SettleFile, A::Error> {
                #[derive(Deserialize)]
                #[serde(deny_unknown_fields)]
                struct Pair {
                    by: Text,
                    per: u64,
                }
                let Pair { by, per } = Pair::deserialize(de::value::MapAccessDeserializer::new(map))?;
                read(&by.0, per)
            }
        }
        from.deserialize_any(Either)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn the_page_of_the_design_is_read() {
        let config = Config::parse(PAGE, "tidegate.yaml").unwrap();
        assert_eq!(config.listen.grpc, None);
        let names: Vec<&str> = config.rules.iter().map(|rule| &*rule.name).collect();
        assert_eq!(names, ["per-ip", "search", "trial"]);
        let request = [("ip", "192.0.2.7"), ("method", "POST"), ("path", "/v1/search?q=x"), ("api_key", "acme")];
        let found = config.rules.matching(&request[..], 1).unwrap();
        let found: Vec<_> = found.iter().map(|one| (&*one.rule.name, one.key.as_slice(), one.cost)).collect();
        assert_eq!(found, [("per-ip", &b"192.0.2.7"[..], 1), ("search", b"acme", 5), ("trial", b"", 1)]);
    }

    #[test]
    fn terms_for_envoy_are_read() {
        let text = "envoy:\n  config: /etc/ratelimit\n  compat: count_rejected\n  overrides: 500\n  headers: [ietf]\n  body: problem\n";
        let terms = Terms { count_rejected: true, overrides: Some(500), headers: Some(Families::IETF), body: true };
        let envoy = Config::parse(text, "f").unwrap().envoy;
        assert_eq!(envoy, Envoy { config: Some("/etc/ratelimit".into()), terms });
        assert_eq!(Config::parse("envoy: { overrides: off }\n", "f").unwrap().envoy.terms.overrides, None);
        assert_eq!(Config::parse("", "f").unwrap().envoy, Envoy::default());
        assert!(Config::parse("envoy: { overrides: many }\n", "f").unwrap_err().to_string().starts_with("f:1:21: "));
    }

    #[test]
    fn whatever_is_wrong_is_said_with_its_place() {
        for (text, expected) in [
            ("rules:\n  - name: a\n    limit: 10/s\n    lmit: 3\n", "f:4:5: "),
            ("rules:\n  - name: a\n    limit: 10/fortnight\n", "f:3:12: "),
            ("rules:\n  - name: a\n    limit:\n", "f:3:"),
            ("rules:\n  - name: a b\n    limit: 1/s\n", "f:2:11: "),
            ("listen: { http: nowhere }\n", "f:1:17: "),
            ("threads: 0\n", "f:1:10: threads \"0\": expected auto, or a number from 1 to 1024"),
            ("memory: { max_bytes: 5 }\n", "f:1:22: \"5\": expected auto, or a number of bytes such as 512MiB"),
            ("memory: { max_keys: 0 }\n", "f:1:21: 0: expected 1 to 4000000000"),
            (
                "memory: { overflow: drop }\n",
                "f:1:21: unknown variant `drop`, expected one of shared_bucket, deny_new, allow_new",
            ),
            ("threads: many\n", "f:1:10: threads \"many\": expected auto, or a number from 1 to 1024"),
            ("rules:\n  - name: a\n    limit: 1/s\n    when: { path: '' }\n", "f:4:"),
            ("rules:\n  - name: a\n    limit: 1/s\n    mode: maybe\n", "f:4:11: "),
            ("rules:\n  - { name: a, limit: 1/s }\n  - { name: a, limit: 2/s }\n", "f: two rules are called \"a\""),
            ("trusted_proxies: [10.0.0.0/99]\n", "f:1:19: network \"10.0.0.0/99\": expected a prefix of 0 to 32 bits"),
            ("client_ip: { header: 'a b' }\n", "f:1:22: header \"a b\": expected a name"),
            ("client_ip: { ipv6_prefix: 8 }\n", "f:1:27: 8: expected 32 to 128"),
            ("near: { deadline_ms: 9 }\n", "f:1:22: 9: expected 1 to 8"),
            ("near: { nodes: many }\n", "f:1:16: \"many\": expected auto, or a number from 1 to 10000"),
            ("near: { lease_error_percent: 101 }\n", "f:1:30: 101: expected 0 to 100"),
            ("rules:\n  - name: a\n    limit: 1/s\n    sync: never\n", "f:4:11: "),
            ("rules:\n  - name: a\n    limit: 1/s\n    cost: -3\n", "f:4:5: "),
            ("rules:\n  - name: a\n    limit: 1/s\n    settle: bytes\n", "f:4:13: \"bytes\": expected response_bytes"),
            ("rules:\n  - name: a\n    limit: 1/s\n    settle: { by: response_ms, per: 0 }\n", "f:4:"),
            (
                "rules:\n  - name: a\n    limit: 1/s\n    charge_when: { path: /x }\n",
                "f: rule a: charge_when: \"path\": expected status or header.NAME",
            ),
            ("proxy: { upstream: 'https://x' }\n", "f:1:20: upstream \"https://x\": TLS towards"),
            ("proxy: { answer_secs: 3 }\n", "f:1:"),
        ] {
            let error = Config::parse(text, "f").unwrap_err().to_string();
            assert!(error.starts_with(expected), "{text}\nsays {error}");
        }
    }
}
