//! The URL of a store: one form for every topology; credentials are never shown.
//!
//! ```text
//! redis://[user[:password]@]host[:port][/db]           rediss:// over TLS
//! redis+unix:///path?db=1&user=…&password=…            also unix://
//! redis+sentinel://[user:pass@]h1[:p],h2,h3/service[/db]   rediss+sentinel://
//! redis+cluster://[user:pass@]h1[:p],h2,h3             rediss+cluster://
//! ```
//! `valkey` stands for `redis` everywhere. Options follow a `?`; see [`RedisUrl`].

mod read;
mod secret;

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

pub use self::secret::InvalidSecret;
pub use self::secret::Secret;

/// The address of a Redis or Valkey server, of a service watched by Sentinel, or of a cluster.
///
/// | URL | |
/// | --- | --- |
/// | `redis://host:6379/0` | one server; `rediss://` over TLS |
/// | `redis+unix:///path/to/socket?db=0` | one server on this machine; also `unix://` |
/// | `redis+sentinel://h1,h2,h3/service/0` | the primary of a service, found through Sentinel; `rediss+sentinel://` |
/// | `redis+cluster://h1,h2,h3` | a cluster, found through any of its nodes; `rediss+cluster://` |
///
/// `valkey` stands for `redis` everywhere. `user:password@` goes before the hosts, percent-encoded
/// where it has to be. Options: `protocol=2` or `3` (otherwise 3, or 2 where the server knows no
/// other); with TLS `ca=FILE`, `cert=FILE` with `key=FILE`, and `insecure=true`, which trusts any
/// certificate; for Sentinel its own `sentinel_user` and `sentinel_password`; for unix sockets
/// `db`, `user` and `password`; and `secret`, a text that only the processes sharing the store
/// know, from which the store derives slots.
///
/// Neither `Display` nor `Debug` shows the user, a password or the secret.
///
/// ```
/// # use tidegate_redis_client::RedisUrl;
/// let url: RedisUrl = "rediss://limiter:s3cret@redis.example:6380/2".parse()?;
/// assert_eq!(url.to_string(), "rediss://***@redis.example:6380/2");
/// # Ok::<(), tidegate_redis_client::RedisUrlError>(())
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct RedisUrl {
    pub(super) servers: Servers,
    pub(super) login: Login,
    pub(super) database: u32,
    pub(super) protocol: Option<Protocol>,
    pub(super) tls: Option<TlsFiles>,
    /// Keeps clients from choosing slots; see `Secret`.
    secret: Option<Secret>,
    /// Spelled `valkey`, as the caller did.
    valkey: bool,
}

/// The servers that a URL names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Servers {
    One(Host),
    Unix(PathBuf),
    Sentinel { sentinels: Vec<Host>, service: String, login: Login },
    Cluster(Vec<Host>),
}

/// A name or address, and a port.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Host {
    pub(super) name: Arc<str>,
    pub(super) port: u16,
}

/// Credentials. `Debug` does not show them.
#[derive(Clone, Default, PartialEq, Eq)]
pub(super) struct Login {
    pub(super) user: Option<String>,
    pub(super) password: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Protocol {
    Resp2,
    Resp3,
}

/// The files of TLS, and whether certificates are verified.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct TlsFiles {
    pub(super) ca: Option<PathBuf>,
    /// The client certificate and its key.
    pub(super) identity: Option<(PathBuf, PathBuf)>,
    pub(super) insecure: bool,
}

/// A [`RedisUrl`] that cannot be used. It never shows a password or a secret.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("store URL: {part}{found}: expected {expected}")]
pub struct RedisUrlError {
    part: &'static str,
    /// The value found, quoted; empty where it is missing or could be a secret.
    found: String,
    expected: String,
}

impl RedisUrlError {
    fn new(part: &'static str, found: Option<&str>, expected: impl Into<String>) -> Self {
        let found = found.map(|text| format!(" {:?}", shortened(text))).unwrap_or_default();
        RedisUrlError { part, found, expected: expected.into() }
    }
}

fn shortened(text: &str) -> String {
    let mut short: String = text.chars().take(64).collect();
    if short.len() < text.len() {
        short.push_str("...");
    }
    short
}

impl RedisUrl {
    /// Whether it has the option `secret`.
    pub fn has_secret(&self) -> bool {
        self.secret.is_some()
    }

    /// The secret of the option `secret`, if there is one.
    pub fn secret(&self) -> Option<&Secret> {
        self.secret.as_ref()
    }
}

impl Login {
    pub(super) fn is_empty(&self) -> bool {
        self.user.is_none() && self.password.is_none()
    }
}

impl fmt::Debug for Login {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_empty() { "none" } else { "***" })
    }
}

impl Host {
    /// A host that a server names, if it can be a name or an address.
    pub(super) fn announced(name: &str, port: u16) -> Option<Host> {
        const LONGEST: usize = 255;
        let is_plain = name.chars().all(|char| char.is_alphanumeric() || ".-_:%".contains(char));
        (is_plain && !name.is_empty() && name.len() <= LONGEST && port > 0)
            .then(|| Host { name: name.into(), port })
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.name.contains(':') {
            write!(f, "[{}]:{}", self.name, self.port)
        } else {
            write!(f, "{}:{}", self.name, self.port)
        }
    }
}

impl fmt::Display for RedisUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.valkey { "valkey" } else { "redis" })?;
        if self.tls.is_some() {
            f.write_str("s")?;
        }
        let masked = if self.login.is_empty() { "" } else { "***@" };
        let list = |hosts: &[Host]| hosts.iter().map(Host::to_string).collect::<Vec<_>>().join(",");
        let mut database = self.database;
        match &self.servers {
            Servers::One(host) => write!(f, "://{masked}{host}")?,
            Servers::Unix(path) => {
                write!(f, "+unix://{}", encoded(&path.to_string_lossy(), b"/"))?;
                if database > 0 {
                    write!(f, "?db={database}")?;
                }
                database = 0;
            }
            Servers::Sentinel { sentinels, service, .. } => {
                write!(f, "+sentinel://{masked}{}/{}", list(sentinels), encoded(service, b""))?;
            }
            Servers::Cluster(hosts) => write!(f, "+cluster://{masked}{}", list(hosts))?,
        }
        if database > 0 {
            write!(f, "/{database}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for RedisUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RedisUrl({self})")
    }
}

fn encoded(text: &str, keep: &[u8]) -> String {
    let mut out = String::new();
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) || keep.contains(&byte) {
            out.push(char::from(byte));
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
    }
    out
}
