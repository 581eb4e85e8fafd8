//! Parses a [`RedisUrl`] part by part. Errors name the part, and the value found unless it could be
//! a secret.

use std::path::PathBuf;
use std::str::FromStr;

use super::{Host, Login, Protocol, RedisUrl, RedisUrlError, Secret, Servers, TlsFiles};

const SERVER_PORT: u16 = 6379;
const SENTINEL_PORT: u16 = 26379;
/// The most hosts in one URL.
const MAX_HOSTS: usize = 64;

/// A suggestion for a text without a scheme: empty, unless the text is only a host, which is no
/// secret.
fn with_scheme(text: &str) -> String {
    let is_host = !text.is_empty()
        && text.len() < 64
        && text.contains(['.', ':'])
        && text.chars().all(|char| char.is_ascii_alphanumeric() || ".-:[]".contains(char));
    if read_scheme(text).is_ok() {
        return format!(": write {text}://127.0.0.1:6379");
    }
    if !is_host {
        return String::new();
    }
    // A scheme without its slashes.
    match text.split_once(':') {
        Some((scheme, rest)) if read_scheme(scheme).is_ok() => format!(": write {scheme}://{rest}"),
        _ => format!(": write redis://{text}"),
    }
}

impl FromStr for RedisUrl {
    type Err = RedisUrlError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let error = RedisUrlError::new;
        let Some((scheme, rest)) = text.split_once("://") else {
            // Without a scheme a password could be anywhere, so nothing is shown.
            return Err(RedisUrlError::new(
                "no scheme",
                None,
                format!("redis://HOST:PORT{}", with_scheme(text)),
            ));
        };
        let (valkey, tls, kind) = read_scheme(scheme)?;

        let (before_query, query) =
            rest.split_once('?').map_or((rest, ""), |(before, query)| (before, query));
        let (login, hosts_and_path) = match before_query.rsplit_once('@') {
            Some((login, rest)) if kind != Kind::Unix => (read_login(login)?, rest),
            _ => (Login::default(), before_query),
        };
        // A later @ may mean that a password has an unescaped question mark, and so may a password
        // among the options an unescaped ampersand. Then errors show nothing of the rest.
        let in_query = ["secret=", "password=", "pass="].iter().any(|name| query.contains(name));
        let secret = query.contains('@') || rest.contains('#') || in_query;
        let show = Show { secret };

        let mut options = Options::read(query, show)?;
        let protocol = match options.take("protocol")?.as_deref() {
            None => None,
            Some("2") => Some(Protocol::Resp2),
            Some("3") => Some(Protocol::Resp3),
            Some(other) => return Err(error("protocol", show.this(other), "2 or 3")),
        };
        let secret = options.take("secret")?.map(Secret::new);
        if let Some(Err(invalid)) = secret.as_ref().map(Secret::checked) {
            return Err(error("secret", None, &invalid.expected()));
        }
        let tls = if tls { Some(read_tls(&mut options, show)?) } else { None };

        let url = if kind == Kind::Unix {
            let path = percent_decoded("path", before_query)?;
            if !path.starts_with('/') {
                return Err(error(
                    "path",
                    show.this(&path),
                    "an absolute path: redis+unix:///path/to/socket",
                ));
            }
            let database = match options.take("db")? {
                None => 0,
                Some(text) => read_database(&text, show)?,
            };
            // Other clients call it `pass`.
            let password = options.take("password")?.or(options.take("pass")?);
            let login = Login { user: options.take("user")?, password };
            check_login(&login)?;
            RedisUrl {
                servers: Servers::Unix(path.into()),
                login,
                database,
                protocol,
                tls,
                secret,
                valkey,
            }
        } else {
            let (hosts, path) = hosts_and_path.split_once('/').unwrap_or((hosts_and_path, ""));
            let port = if kind == Kind::Sentinel { SENTINEL_PORT } else { SERVER_PORT };
            let mut hosts = read_hosts(hosts, port, show)?;
            let (servers, database) = match kind {
                Kind::One if hosts.len() > 1 => {
                    let expected =
                        "one host; several are for redis+sentinel:// or redis+cluster://";
                    return Err(error("host", show.this(hosts_and_path), expected));
                }
                Kind::One => (Servers::One(hosts.swap_remove(0)), path),
                Kind::Cluster => (Servers::Cluster(hosts), path),
                _ => {
                    let (service, database) = path.split_once('/').unwrap_or((path, ""));
                    let service = percent_decoded("service", service)?;
                    if service.is_empty() {
                        return Err(error(
                            "service",
                            None,
                            "its name after the hosts: redis+sentinel://host/service",
                        ));
                    }
                    let (user, password) =
                        (options.take("sentinel_user")?, options.take("sentinel_password")?);
                    let login = Login { user, password };
                    check_login(&login)?;
                    (Servers::Sentinel { sentinels: hosts, service, login }, database)
                }
            };
            let database = if database.is_empty() { 0 } else { read_database(database, show)? };
            RedisUrl { servers, login, database, protocol, tls, secret, valkey }
        };
        options.finish(show)?;
        Ok(url)
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    One,
    Unix,
    Sentinel,
    Cluster,
}

/// Whether it is spelled valkey, whether it uses TLS, and its kind.
fn read_scheme(scheme: &str) -> Result<(bool, bool, Kind), RedisUrlError> {
    let lower = scheme.to_ascii_lowercase();
    let (base, kind) = match lower.split_once('+') {
        None if lower == "unix" => ("redis", Kind::Unix),
        None => (lower.as_str(), Kind::One),
        Some((base, "unix")) => (base, Kind::Unix),
        Some((base, "sentinel")) => (base, Kind::Sentinel),
        Some((base, "cluster")) => (base, Kind::Cluster),
        Some(_) => ("", Kind::One),
    };
    let (valkey, tls) = match base {
        "redis" => (false, false),
        "rediss" => (false, true),
        "valkey" => (true, false),
        "valkeys" => (true, true),
        _ => (false, true),
    };
    if !matches!(base, "redis" | "rediss" | "valkey" | "valkeys") || (kind == Kind::Unix && tls) {
        let expected = "redis, rediss, redis+unix, redis+sentinel, rediss+sentinel, redis+cluster or rediss+cluster, or the same with valkey";
        return Err(RedisUrlError::new("scheme", Some(scheme), expected));
    }
    Ok((valkey, tls, kind))
}

fn read_login(text: &str) -> Result<Login, RedisUrlError> {
    let (user, password) = match text.split_once(':') {
        Some((user, password)) => (user, Some(password)),
        None => (text, None),
    };
    let user = percent_decoded("user", user)?;
    let password = password.map(|text| percent_decoded("password", text)).transpose()?;
    let login = Login {
        user: (!user.is_empty()).then_some(user),
        password: password.filter(|text| !text.is_empty()),
    };
    check_login(&login)?;
    Ok(login)
}

fn check_login(login: &Login) -> Result<(), RedisUrlError> {
    if login.user.is_some() && login.password.is_none() {
        return Err(RedisUrlError::new(
            "password",
            None,
            "one, because there is a user; write :password@ for a password alone",
        ));
    }
    Ok(())
}

fn read_hosts(text: &str, default_port: u16, show: Show) -> Result<Vec<Host>, RedisUrlError> {
    let error = RedisUrlError::new;
    let mut hosts = Vec::new();
    for item in text.split(',') {
        let (name, port) = if let Some(bracketed) = item.strip_prefix('[') {
            let Some((name, after)) = bracketed.split_once(']') else {
                return Err(error(
                    "host",
                    show.this(item),
                    "a closing bracket after an IPv6 address: [::1]:6379",
                ));
            };
            if name.parse::<std::net::Ipv6Addr>().is_err() {
                return Err(error("host", show.this(item), "an IPv6 address between the brackets"));
            }
            match after.strip_prefix(':') {
                Some(port) => (name.to_owned(), Some(port)),
                None if after.is_empty() => (name.to_owned(), None),
                None => {
                    return Err(error(
                        "host",
                        show.this(item),
                        "a colon and a port after the bracket, or nothing",
                    ));
                }
            }
        } else {
            let (name, port) = match item.split_once(':') {
                Some((name, port)) => (name, Some(port)),
                None => (item, None),
            };
            if port.is_some_and(|port| port.contains(':')) {
                // Shown only if it can only be an address: `user:pass:word` looks alike.
                let address = |text: &&str| {
                    text.bytes().all(|byte| byte.is_ascii_hexdigit() || b":.".contains(&byte))
                };
                let item = Some(item).filter(address).and_then(|text| show.this(text));
                return Err(error("host", item, "an IPv6 address in brackets: [::1]:6379"));
            }
            (percent_decoded("host", name)?, port)
        };
        let plain =
            |byte: u8| byte.is_ascii_alphanumeric() || b".-_:%".contains(&byte) || byte >= 0x80;
        if name.is_empty() {
            return Err(error("host", None, "a name or an address"));
        }
        if !name.bytes().all(plain) {
            let item = item.split(':').next().and_then(|text| show.this(text));
            return Err(error(
                "host",
                item,
                "a name or an address; in a password ?, # and @ are written %3F, %23 and %40",
            ));
        }
        let port = match port {
            None => default_port,
            Some(text) => match text.parse::<u16>() {
                Ok(port) if port > 0 && text.bytes().all(|byte| byte.is_ascii_digit()) => port,
                // Text that is not a number may be a password without its @host.
                _ => {
                    let number =
                        Some(text).filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()));
                    return Err(error(
                        "port",
                        number.and_then(|text| show.this(text)),
                        "a number from 1 to 65535",
                    ));
                }
            },
        };
        hosts.push(Host { name: name.into(), port });
        if hosts.len() > MAX_HOSTS {
            return Err(RedisUrlError::new("host", None, format!("at most {MAX_HOSTS} of them")));
        }
    }
    Ok(hosts)
}

fn read_database(text: &str, show: Show) -> Result<u32, RedisUrlError> {
    match text.parse() {
        Ok(number) if text.bytes().all(|byte| byte.is_ascii_digit()) => Ok(number),
        _ => Err(RedisUrlError::new("database", show.this(text), "a number")),
    }
}

fn read_tls(options: &mut Options<'_>, show: Show) -> Result<TlsFiles, RedisUrlError> {
    let error = RedisUrlError::new;
    let ca = options.take("ca")?.map(PathBuf::from);
    let identity = match (options.take("cert")?, options.take("key")?) {
        (None, None) => None,
        (Some(cert), Some(key)) => Some((cert.into(), key.into())),
        (Some(_), None) => {
            return Err(error("key", None, "the file of the key, because there is a cert"));
        }
        (None, Some(_)) => {
            return Err(error("cert", None, "the file of the certificate, because there is a key"));
        }
    };
    let insecure = match options.raw("insecure") {
        None | Some("false") => false,
        Some("true") => true,
        Some(other) => return Err(error("insecure", show.this(other), "true or false")),
    };
    Ok(TlsFiles { ca, identity, insecure })
}

/// The options after the question mark. Each is taken out; one left at the end is a mistake.
struct Options<'a> {
    pairs: Vec<(&'a str, &'a str)>,
}

impl<'a> Options<'a> {
    fn read(query: &'a str, show: Show) -> Result<Self, RedisUrlError> {
        let mut pairs: Vec<(&str, &str)> = Vec::new();
        for item in query.split('&').filter(|item| !item.is_empty()) {
            let (name, value) = item.split_once('=').unwrap_or((item, ""));
            if value.is_empty() {
                return Err(RedisUrlError::new("option", show.this(name), "a value: name=value"));
            }
            if pairs.iter().any(|(other, _)| *other == name) {
                return Err(RedisUrlError::new("option", show.this(name), "it once"));
            }
            pairs.push((name, value));
        }
        Ok(Options { pairs })
    }

    fn raw(&mut self, name: &str) -> Option<&'a str> {
        let at = self.pairs.iter().position(|(other, _)| *other == name)?;
        Some(self.pairs.swap_remove(at).1)
    }

    fn take(&mut self, name: &'static str) -> Result<Option<String>, RedisUrlError> {
        self.raw(name).map(|text| percent_decoded(name, text)).transpose()
    }

    fn finish(self, show: Show) -> Result<(), RedisUrlError> {
        let Some((name, _)) = self.pairs.first() else { return Ok(()) };
        let expected = match *name {
            "ca" | "cert" | "key" | "insecure" => {
                "it only with TLS: rediss://, rediss+sentinel:// or rediss+cluster://"
            }
            "sentinel_user" | "sentinel_password" => "it only with redis+sentinel://",
            "db" | "user" | "password" | "pass" => {
                "it only with redis+unix://; elsewhere redis://user:password@host/db"
            }
            _ => {
                "protocol, secret, ca, cert, key, insecure, sentinel_user, sentinel_password, db, user or password"
            }
        };
        Err(RedisUrlError::new("option", show.this(name), expected))
    }
}

/// Decodes percent signs. An error does not show the text: it may be a password.
fn percent_decoded(part: &'static str, text: &str) -> Result<String, RedisUrlError> {
    let error =
        || RedisUrlError::new(part, None, "percent-encoded UTF-8: %XX with two hexadecimal digits");
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'%' => {
                let mut digit = || rest.next().and_then(|byte| char::from(byte).to_digit(16));
                let (Some(high), Some(low)) = (digit(), digit()) else { return Err(error()) };
                u8::try_from(high * 16 + low).map_err(|_| error())?
            }
            byte => byte,
        });
    }
    match String::from_utf8(bytes) {
        // A NUL would cut off a path or a name.
        Ok(text) if !text.contains('\0') => Ok(text),
        _ => Err(error()),
    }
}

/// Whether errors may show the value found.
#[derive(Clone, Copy)]
struct Show {
    secret: bool,
}

impl Show {
    fn this(self, text: &str) -> Option<&str> {
        (!self.secret).then_some(text)
    }
}
