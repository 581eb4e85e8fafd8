//! Requests that a web page has a browser send.
//!
//! A page of any origin can have a browser send requests to a server on the same machine, and read
//! the responses if its own name resolves to the address of the server (DNS rebinding). Such
//! requests have headers that a page cannot forge: `Origin`, `Sec-Fetch-Site` and `Host`. →
//! `docs/decisions/0047-browsers-and-guesses.md`

use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr};

use axum::http::{HeaderMap, HeaderName, Uri, header};
use serde::{Deserialize, Serialize};

use crate::parse::values::Text;

/// The header with the relation between a page and the server that it calls.
pub(crate) const SITE: HeaderName = HeaderName::from_static("sec-fetch-site");
/// The longest part of a header that an error repeats, in characters.
const MAX_SHOWN: usize = 64;
/// The longest name of a host, in bytes.
const MAX_NAME_BYTES: usize = 253;

/// Names under which the HTTP listeners are called, beside IP addresses and `localhost`.
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize, Serialize)]
pub struct Hosts(Vec<HostName>);

/// A name, or all names below one: `*.example.com`.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize, Serialize)]
#[serde(try_from = "Text", into = "String")]
pub struct HostName {
    /// In lower case, without the wildcard.
    name: String,
    is_wildcard: bool,
}

impl Hosts {
    /// The names, as they are written in a file.
    pub fn iter(&self) -> impl Iterator<Item = String> {
        self.0.iter().map(ToString::to_string)
    }

    /// Whether a request may have this `Host`.
    fn knows(&self, host: &str) -> bool {
        let name = without_port(host);
        let name = name.strip_suffix('.').unwrap_or(name);
        is_address(name) || is_localhost(name) || self.0.iter().any(|own| own.matches(name))
    }
}

impl FromIterator<HostName> for Hosts {
    fn from_iter<I: IntoIterator<Item = HostName>>(names: I) -> Self {
        Hosts(names.into_iter().collect())
    }
}

impl HostName {
    fn matches(&self, host: &str) -> bool {
        let (own, host) = (self.name.as_bytes(), host.as_bytes());
        if !self.is_wildcard {
            return host.eq_ignore_ascii_case(own);
        }
        host.len() > own.len() + 1 && {
            let (below, end) = host.split_at(host.len() - own.len());
            below.ends_with(b".") && end.eq_ignore_ascii_case(own)
        }
    }
}

impl TryFrom<Text> for HostName {
    type Error = String;

    fn try_from(text: Text) -> Result<Self, String> {
        text.0.parse()
    }
}

impl From<HostName> for String {
    fn from(name: HostName) -> String {
        name.to_string()
    }
}

impl fmt::Display for HostName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", if self.is_wildcard { "*." } else { "" }, self.name)
    }
}

impl std::str::FromStr for HostName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, is_wildcard) =
            text.strip_prefix("*.").map_or((text, false), |name| (name, true));
        let name = name.strip_suffix('.').unwrap_or(name);
        let is_label = |label: &str| {
            let fits =
                (1..=63).contains(&label.len()) && !label.starts_with('-') && !label.ends_with('-');
            fits && label
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_'))
        };
        if name.len() > MAX_NAME_BYTES || !name.split('.').all(is_label) {
            let expected =
                "expected a name without a port, such as tidegate.internal or *.example.com";
            return Err(format!("host {text:?}: {expected}"));
        }
        Ok(HostName { name: name.to_ascii_lowercase(), is_wildcard })
    }
}

/// Why a request is refused.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Foreign {
    /// A page of this origin sent it.
    Origin(String),
    /// A page with this relation to the server sent it.
    Site(String),
    /// It was sent to this name.
    Host(String),
}

impl fmt::Display for Foreign {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Foreign::Origin(origin) => write!(
                f,
                "Origin is {origin:?}: a web page of another origin needs a token (tokens.check_file or --token-file, and Authorization: Bearer TOKEN)"
            ),
            Foreign::Site(site) => write!(
                f,
                "Sec-Fetch-Site is {site:?}: a web page of another origin needs a token (tokens.check_file or --token-file, and Authorization: Bearer TOKEN)"
            ),
            Foreign::Host(host) => write!(
                f,
                "Host is {host:?}: expected an IP address, localhost or a name in http.hosts; add the name there, or send a token (Authorization: Bearer TOKEN)"
            ),
        }
    }
}

/// Why a request with this `Host` is refused, if so. Programs may leave it out, browsers never do.
pub(crate) fn foreign_host(hosts: &Hosts, host: Option<&[u8]>) -> Option<Foreign> {
    let host = host?;
    let known = std::str::from_utf8(host).is_ok_and(|host| hosts.knows(host.trim_ascii()));
    (!known).then(|| Foreign::Host(shown(host)))
}

/// Why a request with these headers is refused, if so; its `Host` is not looked at without `hosts`.
pub(crate) fn foreign(hosts: Option<&Hosts>, uri: &Uri, headers: &HeaderMap) -> Option<Foreign> {
    let authority = uri.authority().map(|authority| authority.as_str().as_bytes());
    if let Some(hosts) = hosts {
        let own = headers.get_all(header::HOST).iter().map(|host| host.as_bytes());
        if let Some(refused) =
            authority.into_iter().chain(own).find_map(|host| foreign_host(hosts, Some(host)))
        {
            return Some(refused);
        }
    }
    let host = authority.or_else(|| headers.get(header::HOST).map(|host| host.as_bytes()));
    let mut has_own_origin = false;
    for origin in headers.get_all(header::ORIGIN) {
        if !is_same(origin.as_bytes(), host.unwrap_or_default()) {
            return Some(Foreign::Origin(shown(origin.as_bytes())));
        }
        has_own_origin = true;
    }
    let is_foreign = |site: &[u8]| match site.trim_ascii() {
        b"same-origin" | b"none" => false,
        b"same-site" => !has_own_origin,
        _ => true,
    };
    let site = headers.get_all(SITE).iter().find(|site| is_foreign(site.as_bytes()))?;
    Some(Foreign::Site(shown(site.as_bytes())))
}

/// Whether an origin, such as `http://localhost:8080`, is that of the server that was called as
/// `host`.
fn is_same(origin: &[u8], host: &[u8]) -> bool {
    let (Ok(origin), Ok(host)) = (std::str::from_utf8(origin), std::str::from_utf8(host)) else {
        return false;
    };
    let Some((scheme, authority)) = origin.trim_ascii().split_once("://") else { return false };
    let default_port = match scheme {
        "http" => ":80",
        "https" => ":443",
        _ => return false,
    };
    let bare = |text: &str| text.strip_suffix(default_port).unwrap_or(text).to_ascii_lowercase();
    !host.is_empty() && bare(authority) == bare(host.trim_ascii())
}

/// `example.com` of `example.com:8080`, `[::1]` of `[::1]:8080`.
fn without_port(host: &str) -> &str {
    match host.rsplit_once(':') {
        Some((name, port))
            if !port.ends_with(']') && port.bytes().all(|byte| byte.is_ascii_digit()) =>
        {
            name
        }
        _ => host,
    }
}

fn is_address(name: &str) -> bool {
    match name.strip_prefix('[').and_then(|name| name.strip_suffix(']')) {
        Some(address) => address.parse::<Ipv6Addr>().is_ok(),
        None => name.parse::<Ipv4Addr>().is_ok(),
    }
}

/// `localhost` and every name below it, which are never looked up in DNS.
fn is_localhost(name: &str) -> bool {
    const LOCALHOST: &[u8] = b"localhost";
    let name = name.as_bytes();
    let Some(at) = name.len().checked_sub(LOCALHOST.len()) else { return false };
    name[at..].eq_ignore_ascii_case(LOCALHOST) && (at == 0 || name[at - 1] == b'.')
}

fn shown(value: &[u8]) -> String {
    String::from_utf8_lossy(value).chars().take(MAX_SHOWN).collect()
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    fn hosts(names: &[&str]) -> Hosts {
        names.iter().map(|name| name.parse::<HostName>().unwrap()).collect()
    }

    #[test]
    fn hosts_are_addresses_localhost_and_names_that_are_configured() {
        let own = hosts(&["Tidegate", "*.example.com"]);
        for host in [
            "127.0.0.1",
            "127.0.0.1:8080",
            "192.0.2.7:80",
            "[::1]",
            "[::1]:8080",
            "[2001:db8::7]:8080",
            "localhost",
            "LOCALHOST:8080",
            "localhost.:8080",
            "app.localhost:8080",
            "tidegate",
            "TIDEGATE:8080",
            "tidegate.",
            "a.example.com",
            "a.b.Example.com:443",
        ] {
            assert_eq!(foreign_host(&own, Some(host.as_bytes())), None, "{host}");
        }
        for host in [
            "",
            "example.com",
            "xexample.com",
            ".example.com",
            "evil.example",
            "evil.example:8080",
            "127.0.0.1.evil.example",
            "127.0.0.1@evil.example",
            "localhost.evil.example",
            "evillocalhost",
            "tidegate.evil.example",
            "::1",
            "[::1",
            "[evil.example]",
            "0x7f.1",
            "2130706433",
            "127.1",
            "a b",
            "\u{fc}",
        ] {
            let expected = Some(Foreign::Host(host.into()));
            assert_eq!(foreign_host(&own, Some(host.as_bytes())), expected, "{host}");
        }
        assert_eq!(foreign_host(&own, None), None);
        assert!(foreign_host(&Hosts::default(), Some(b"tidegate")).is_some());
    }

    #[test]
    fn what_is_no_name_of_a_host_is_refused() {
        let long = "a.".repeat(130);
        for text in [
            "", "*", "a:8080", "http://a", "a b", "a..b", "-a", "a-", "*.", "a.*.b", "\u{fc}",
            "[::1]", &long,
        ] {
            let error = text.parse::<HostName>().unwrap_err();
            assert!(error.contains("expected a name without a port, such as"), "{text}: {error}");
        }
        assert_eq!("*.Example.com.".parse::<HostName>().unwrap().to_string(), "*.example.com");
    }

    #[test]
    fn pages_of_another_origin_are_recognised() {
        let problem = |host: &str, lines: &[(&str, &str)]| {
            let mut headers = HeaderMap::new();
            headers.insert(header::HOST, HeaderValue::from_str(host).unwrap());
            for (name, value) in lines {
                let name = HeaderName::from_bytes(name.as_bytes()).unwrap();
                headers.append(name, HeaderValue::from_str(value).unwrap());
            }
            foreign(Some(&Hosts::default()), &Uri::from_static("/v1/check"), &headers)
        };
        for (host, lines) in [
            ("127.0.0.1:8080", &[][..]),
            ("127.0.0.1:8080", &[("sec-fetch-site", "none")]),
            ("127.0.0.1:8080", &[("sec-fetch-site", "same-origin")]),
            (
                "127.0.0.1:8080",
                &[("origin", "http://127.0.0.1:8080"), ("sec-fetch-site", "same-origin")],
            ),
            ("localhost:8080", &[("origin", "http://LOCALHOST:8080")]),
            ("localhost", &[("origin", "http://localhost:80")]),
            ("localhost:443", &[("origin", "https://localhost")]),
            ("[::1]:8080", &[("origin", "http://[::1]:8080")]),
            (
                "localhost:8080",
                &[("origin", "http://localhost:8080"), ("sec-fetch-site", "same-site")],
            ),
        ] {
            assert_eq!(problem(host, lines), None, "{host} {lines:?}");
        }
        for origin in [
            "http://evil.example",
            "http://localhost:3000",
            "http://localhost",
            "https://localhost",
            "http://127.0.0.1:8080",
            "null",
            "",
            "file://",
            "chrome-extension://abc",
            "localhost:8080",
        ] {
            let expected = Some(Foreign::Origin(origin.into()));
            assert_eq!(problem("localhost:8080", &[("origin", origin)]), expected, "{origin}");
        }
        let two = [("origin", "http://localhost:8080"), ("origin", "http://evil.example")];
        assert_eq!(
            problem("localhost:8080", &two),
            Some(Foreign::Origin("http://evil.example".into()))
        );
        for site in ["cross-site", "same-site", "", "none, cross-site", "something-new"] {
            let expected = Some(Foreign::Site(site.into()));
            assert_eq!(problem("localhost:8080", &[("sec-fetch-site", site)]), expected, "{site}");
        }
        let both = [("origin", "http://localhost:8080"), ("sec-fetch-site", "cross-site")];
        assert_eq!(problem("localhost:8080", &both), Some(Foreign::Site("cross-site".into())));
        let rebound = [("origin", "http://evil.example:8080"), ("sec-fetch-site", "same-origin")];
        assert_eq!(
            problem("evil.example:8080", &rebound),
            Some(Foreign::Host("evil.example:8080".into()))
        );
    }

    #[test]
    fn the_target_names_the_host_of_http_2() {
        let uri = Uri::from_static("http://evil.example:8080/v1/rules");
        let mut headers = HeaderMap::new();
        let known =
            |hosts: Option<&Hosts>, headers: &HeaderMap| foreign(hosts, &uri, headers).is_none();
        assert!(!known(Some(&Hosts::default()), &headers));
        assert!(known(None, &headers) && known(Some(&hosts(&["evil.example"])), &headers));
        headers.insert(header::ORIGIN, HeaderValue::from_static("http://evil.example:8080"));
        assert!(known(None, &headers));
        headers.insert(header::HOST, HeaderValue::from_static("other.example"));
        assert!(!known(Some(&hosts(&["evil.example"])), &headers));
    }
}
