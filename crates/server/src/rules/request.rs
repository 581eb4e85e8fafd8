//! A request over HTTP as attributes: `ip method path host header.* query.* cookie.* bearer
//! bearer.*`.
//!
//! Forward-auth and the proxy describe a request with this type, so that a rule means the same in
//! both. Path and host are normalized, and the caller has found the client's address. Everything
//! else is looked up when a rule needs it.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::OnceLock;

use axum::http::{HeaderMap, HeaderValue, header};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde_json::Value;
use tidegate::http::{
    Client, PathPolicy, RefusedPath, Target, TargetTooLong, bearer_token, normal_host,
};

use super::{Attributes, HeaderPolicy, Named};

/// The longest target with its query, in bytes.
pub const MAX_URI_BYTES: usize = 16 << 10;
/// The longest method, in bytes.
pub const MAX_METHOD_BYTES: usize = 32;
/// The longest middle of a token that is looked into for claims, in bytes; of a longer one nothing
/// is known.
pub const MAX_CLAIMS_BYTES: usize = 8 << 10;

/// The headers of a request, wherever they are kept.
pub trait HeaderLines: fmt::Debug + Sync {
    /// The value of one line of this name; those of one name are counted from 0.
    fn line(&self, name: &str, index: usize) -> Option<&[u8]>;
}

impl HeaderLines for HeaderMap {
    fn line(&self, name: &str, index: usize) -> Option<&[u8]> {
        self.get_all(name).iter().nth(index).map(HeaderValue::as_bytes)
    }
}

/// A request over HTTP.
#[derive(Debug)]
pub struct HttpRequest<'a> {
    client: Client,
    method: Cow<'a, str>,
    path: Cow<'a, str>,
    query: &'a str,
    host: Cow<'a, str>,
    headers: &'a dyn HeaderLines,
    claims: OnceLock<BTreeMap<String, Value>>,
}

/// What cannot be described, and so must not pass.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HttpRequestError {
    /// The path or host is too long.
    #[error(transparent)]
    TooLong(#[from] TargetTooLong),
    /// The method is none.
    #[error("method {0:?}: expected 1 to {MAX_METHOD_BYTES} letters such as GET")]
    Method(String),
    /// The target is not one that a client sends to a server.
    #[error("target {0:?}: expected a path such as /v1/search?q=1")]
    Target(String),
    /// The target can be read as several paths.
    #[error(transparent)]
    Path(RefusedPath),
    /// The host is none.
    #[error("host {0:?}: expected one host such as api.example.com:443")]
    Host(String),
    /// Something that a rule looks at is there several times.
    #[error(transparent)]
    Repeated(#[from] Repeated),
}

/// A header, cookie or query parameter that a rule looks at and that a request has several times.
/// Services differ in which of them they read.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{kind} {name} is there more than once: expected it once")]
pub struct Repeated {
    kind: &'static str,
    name: String,
}

impl HttpRequestError {
    /// Whether something is too long, and not wrong otherwise.
    pub(crate) fn is_too_long(&self) -> bool {
        matches!(self, HttpRequestError::TooLong(_))
    }
}

impl From<RefusedPath> for HttpRequestError {
    fn from(refused: RefusedPath) -> Self {
        match refused {
            RefusedPath::TooLong(long) => HttpRequestError::TooLong(long),
            refused => HttpRequestError::Path(refused),
        }
    }
}

impl<'a> HttpRequest<'a> {
    /// Reads a target as it stands in the first line of a request: `/path?query`, or `*`.
    ///
    /// # Errors
    /// If it is too long, or not what it should be, or can be read as several paths.
    pub fn target<'t>(
        target: &'t str,
        policy: &PathPolicy,
    ) -> Result<Target<'t>, HttpRequestError> {
        if target.len() > MAX_URI_BYTES {
            return Err(TargetTooLong {
                what: "target",
                bytes: target.len(),
                longest: MAX_URI_BYTES,
            }
            .into());
        }
        if !(target.starts_with('/') || target == "*") {
            return Err(HttpRequestError::Target(shown(target)));
        }
        Ok(policy.read(target)?)
    }

    /// A request of `client`, for a [target](HttpRequest::target), with these headers.
    ///
    /// # Errors
    /// If something in it is too long, or not what it should be.
    pub fn new(
        client: Client,
        method: &'a str,
        target: &'a Target<'_>,
        host: &'a str,
        headers: &'a dyn HeaderLines,
    ) -> Result<Self, HttpRequestError> {
        let token = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
        if method.is_empty() || method.len() > MAX_METHOD_BYTES || !method.bytes().all(token) {
            return Err(HttpRequestError::Method(shown(method)));
        }
        let strange = |byte: u8| byte.is_ascii_control() || b" ,/@?#\\".contains(&byte);
        if host.is_empty() || host.bytes().any(strange) {
            return Err(HttpRequestError::Host(shown(host)));
        }
        // Who asks for `post` is answered by some services as if it were `POST`.
        let upper = method.bytes().any(|byte| byte.is_ascii_lowercase());
        let method =
            if upper { Cow::Owned(method.to_ascii_uppercase()) } else { Cow::Borrowed(method) };
        let (path, host) = (Cow::Borrowed(&*target.path), normal_host(host)?);
        let sent: &'a str = &target.sent;
        let query = sent
            .split('#')
            .next()
            .and_then(|target| target.split_once('?'))
            .map_or("", |(_, query)| query);
        Ok(HttpRequest { client, method, path, query, host, headers, claims: OnceLock::new() })
    }

    /// Whether there is once, at most, what rules look at by name. A list header may have several
    /// lines.
    ///
    /// # Errors
    /// What is there more than once.
    pub fn check_repeated(&self, named: &Named, policy: &HeaderPolicy) -> Result<(), Repeated> {
        let repeated = |kind, name: &str| Err(Repeated { kind, name: name.into() });
        for name in &named.headers {
            if self.headers.line(name, 1).is_some() && !policy.is_list(name) {
                return repeated("header", name);
            }
        }
        for name in &named.cookies {
            if self.cookies().filter(|(own, _)| *own == name.as_bytes()).nth(1).is_some() {
                return repeated("cookie", name);
            }
        }
        for name in &named.parameters {
            if self
                .parameters()
                .filter(|(own, _)| decoded(own.as_bytes(), Plus::IsSpace) == **name)
                .nth(1)
                .is_some()
            {
                return repeated("query parameter", name);
            }
        }
        Ok(())
    }

    /// The values of all lines of a header, without white space around them.
    fn lines(&self, name: &str) -> impl Iterator<Item = &[u8]> {
        (0..).map_while(move |index| self.headers.line(name, index)).map(<[u8]>::trim_ascii)
    }

    /// The values of all lines of a header; as the standard says, they are one list.
    fn header(&self, name: &str) -> Option<Cow<'_, str>> {
        if name.eq_ignore_ascii_case("host") {
            return Some(Cow::Borrowed(&*self.host)); // the header of the connection may be the gateway's
        }
        let between = if name.eq_ignore_ascii_case("cookie") { "; " } else { ", " };
        let mut lines = self.lines(name).map(String::from_utf8_lossy);
        let first = lines.next()?;
        Some(lines.fold(first, |all, line| Cow::Owned(format!("{all}{between}{line}"))))
    }

    /// Names and values in the query, with their escapes.
    fn parameters(&self) -> impl Iterator<Item = (&str, &str)> {
        let pairs = self.query.split('&').filter(|pair| !pair.is_empty());
        pairs.map(|pair| pair.split_once('=').unwrap_or((pair, "")))
    }

    /// The value of this name in the query.
    fn query(&self, name: &str) -> Option<Cow<'_, str>> {
        let own = |(own, _): &(&str, &str)| decoded(own.as_bytes(), Plus::IsSpace) == name;
        self.parameters().find(own).map(|(_, value)| decoded(value.as_bytes(), Plus::IsSpace))
    }

    /// Names and values of cookies, one by one: what is strange in one of them does not hide the
    /// others.
    fn cookies(&self) -> impl Iterator<Item = (&[u8], &[u8])> {
        let cookies =
            self.lines(header::COOKIE.as_str()).flat_map(|line| line.split(|byte| *byte == b';'));
        cookies.map(<[u8]>::trim_ascii).filter(|cookie| !cookie.is_empty()).map(|cookie| {
            let mut parts = cookie.splitn(2, |byte| *byte == b'=');
            let (name, value) =
                (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
            (name.trim_ascii(), value.trim_ascii())
        })
    }

    /// The cookie of this name.
    fn cookie(&self, name: &str) -> Option<Cow<'_, str>> {
        self.cookies()
            .find(|(own, _)| *own == name.as_bytes())
            .map(|(_, value)| cookie_value(value))
    }

    /// The token of `Authorization: Bearer`.
    fn bearer(&self) -> Option<&[u8]> {
        bearer_token(self.lines(header::AUTHORIZATION.as_str()).next()?)
    }

    /// A claim of a JSON Web Token: text, a number or a truth value. Nobody has looked at its
    /// signature.
    fn claim(&self, name: &str) -> Option<Cow<'_, str>> {
        let claims = self.claims.get_or_init(|| self.bearer().and_then(claims).unwrap_or_default());
        match claims.get(name)? {
            Value::String(text) => Some(Cow::Borrowed(text)),
            value @ (Value::Number(_) | Value::Bool(_)) => Some(Cow::Owned(value.to_string())),
            _ => None,
        }
    }
}

impl Attributes for HttpRequest<'_> {
    fn get(&self, name: &str) -> Option<Cow<'_, str>> {
        match name {
            "ip" => Some(Cow::Owned(self.client.ip().to_string())),
            "method" => Some(Cow::Borrowed(&*self.method)),
            "path" => Some(Cow::Borrowed(&*self.path)),
            "host" => Some(Cow::Borrowed(&*self.host)),
            "bearer" => self
                .bearer()
                .map(|token| Cow::Owned(sha1_smol::Sha1::from(token).digest().to_string())),
            name => match name.split_once('.')? {
                ("header", name) => self.header(name),
                ("query", name) => self.query(name),
                ("cookie", name) => self.cookie(name),
                ("bearer", name) => self.claim(name),
                _ => None,
            },
        }
    }
}

/// What a token claims, if it is one that claims anything.
fn claims(token: &[u8]) -> Option<BTreeMap<String, Value>> {
    let mut parts = token.split(|byte| *byte == b'.');
    let (Some(_), Some(middle), Some(_), None) =
        (parts.next(), parts.next(), parts.next(), parts.next())
    else {
        return None;
    };
    if middle.len() > MAX_CLAIMS_BYTES {
        return None;
    }
    serde_json::from_slice(&URL_SAFE_NO_PAD.decode(middle).ok()?).ok()
}

/// The value of a cookie as services read it: some take quotes off, with what is escaped within
/// them, and some decode `%41`. All spellings that one of them reads as the same value are one
/// here.
fn cookie_value(value: &[u8]) -> Cow<'_, str> {
    let inner = value.strip_prefix(b"\"").and_then(|value| value.strip_suffix(b"\""));
    match inner {
        Some(inner) if inner.contains(&b'\\') => {
            Cow::Owned(decoded(&without_backslashes(inner), Plus::IsPlus).into_owned())
        }
        inner => decoded(inner.unwrap_or(value), Plus::IsPlus),
    }
}

/// The inside of a quoted value, without its escapes: `\"`, and `\101` in octal digits.
fn without_backslashes(text: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text;
    while let [first, tail @ ..] = rest {
        let (byte, used) = match (first, tail) {
            (b'\\', [high @ b'0'..=b'3', middle @ b'0'..=b'7', low @ b'0'..=b'7', ..]) => {
                ((high - b'0') * 64 + (middle - b'0') * 8 + (low - b'0'), 4)
            }
            (b'\\', [escaped, ..]) => (*escaped, 2),
            (plain, _) => (*plain, 1),
        };
        out.push(byte);
        rest = &rest[used..];
    }
    out
}

/// What `+` stands for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Plus {
    IsPlus,
    IsSpace,
}

/// A piece of a query or a cookie without its escapes.
fn decoded(text: &[u8], plus: Plus) -> Cow<'_, str> {
    if !text.iter().any(|byte| *byte == b'%' || *byte == b'+' && plus == Plus::IsSpace) {
        return String::from_utf8_lossy(text);
    }
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text;
    while let [first, tail @ ..] = rest {
        let escaped = match (first, tail) {
            (b'%', [high, low, ..]) => digit(*high).zip(digit(*low)),
            _ => None,
        };
        match (first, escaped) {
            (_, Some((high, low))) => out.push(high * 16 + low),
            (b'+', None) if plus == Plus::IsSpace => out.push(b' '),
            (byte, None) => out.push(*byte),
        }
        rest = if escaped.is_some() { &tail[2..] } else { tail };
    }
    match String::from_utf8(out) {
        Ok(text) => Cow::Owned(text),
        Err(error) => Cow::Owned(String::from_utf8_lossy(error.as_bytes()).into_owned()),
    }
}

fn digit(byte: u8) -> Option<u8> {
    char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok())
}

/// As much of it as an error repeats.
fn shown(text: &str) -> String {
    text.chars().take(64).collect()
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;
    use tidegate::http::ClientIp;

    use super::*;

    fn headers(lines: &[(&'static str, &str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in lines {
            headers.append(*name, HeaderValue::from_bytes(value.as_bytes()).unwrap());
        }
        headers
    }

    fn target(target: &str) -> Target<'_> {
        HttpRequest::target(target, &PathPolicy::KEEP).unwrap()
    }

    fn client(ip: &str) -> Client {
        ClientIp::of_peer().find(ip.parse().unwrap(), [])
    }

    #[test]
    fn what_rules_may_ask_for() {
        // {"sub":"ann","tier":2,"paid":true,"roles":["a"]}
        let token = "eyJhbGciOiJub25lIn0.eyJzdWIiOiJhbm4iLCJ0aWVyIjoyLCJwYWlkIjp0cnVlLCJyb2xlcyI6WyJhIl19.x";
        let headers = headers(&[
            ("x-key", "a"),
            ("x-key", "b"),
            ("host", "limiter"),
            ("cookie", "a=1; session=s e"),
            ("cookie", "b = 2"),
            ("authorization", &format!("bearer {token}")),
        ]);
        let target = target("/v1//x/%2e%2e/%73earch;v=1?q=a%20b+c&%75ser=ann&user=bob&flag&e=#f?g");
        let request =
            HttpRequest::new(client("192.0.2.7"), "post", &target, "API.Example.com:443", &headers)
                .unwrap();
        for (name, value) in [
            ("ip", "192.0.2.7"),
            ("method", "POST"),
            ("path", "/v1/search"),
            ("host", "api.example.com"),
            ("header.x-key", "a, b"),
            ("header.X-Key", "a, b"),
            ("header.host", "api.example.com"),
            ("query.q", "a b c"),
            ("query.user", "ann"),
            ("query.flag", ""),
            ("query.e", ""),
            ("cookie.session", "s e"),
            ("cookie.b", "2"),
            ("bearer.sub", "ann"),
            ("bearer.tier", "2"),
            ("bearer.paid", "true"),
        ] {
            assert_eq!(request.get(name).as_deref(), Some(value), "{name}");
        }
        for name in [
            "user",
            "header.none",
            "query.Q",
            "query.g",
            "cookie.q",
            "bearer.roles",
            "bearer.none",
            "x.y",
        ] {
            assert_eq!(request.get(name), None, "{name}");
        }
        let digest = request.get("bearer").unwrap();
        assert!(digest.len() == 40 && !digest.contains("eyJ"), "{digest}");
    }

    #[test]
    fn what_cannot_be_described_is_an_error() {
        let headers = HeaderMap::new();
        let long = format!("/{}", "a".repeat(9000));
        let longer = format!("/?{}", "a".repeat(MAX_URI_BYTES));
        for (method, target, host) in [
            ("", "/", "a"),
            ("GET /", "/", "a"),
            ("G\u{e9}T", "/", "a"),
            ("ABCDEFGHIJKLMNOPQRSTUVWXYZABCDEFG", "/", "a"),
            ("GET", "", "a"),
            ("GET", "v1/search", "a"),
            ("GET", "http://a/", "a"),
            ("GET", "**", "a"),
            ("GET", &long, "a"),
            ("GET", &longer, "a"),
            ("GET", "/", ""),
            ("GET", "/", "a, b"),
            ("GET", "/", "a/b"),
            ("GET", "/", &"a".repeat(600)),
        ] {
            let request = HttpRequest::target(target, &PathPolicy::KEEP).and_then(|target| {
                HttpRequest::new(client("192.0.2.7"), method, &target, host, &headers).map(drop)
            });
            assert!(request.is_err(), "{method} {host}");
        }
    }

    #[test]
    fn strange_tokens_claim_nothing() {
        for token in
            ["", "a", "a.b", "a.b.c.d", "a.!!.c", "a.bnVsbA.c", "..", "a.eyJzdWIiOiJhbm4i.c"]
        {
            let headers = headers(&[("authorization", &format!("Bearer {token}"))]);
            let target = target("/");
            let request =
                HttpRequest::new(client("192.0.2.7"), "GET", &target, "a", &headers).unwrap();
            assert_eq!(request.get("bearer.sub"), None, "{token}");
        }
    }

    #[test]
    fn cookies_are_read_one_by_one_and_in_one_spelling() {
        for (line, expected) in [
            ("session=S", Some("S")),
            ("session=\"S\"", Some("S")),
            ("session=\"\\123\"", Some("S")),
            ("session=\"a\\\"b\"", Some("a\"b")),
            ("session=\"\\053\\303\\251\"", Some("+\u{e9}")),
            ("session=\"\\400\"", Some("400")),
            ("session=%53+a", Some("S+a")),
            ("session=%53", Some("S")),
            ("a=\u{e9}; session=S", Some("S")),
            ("\u{e9}; session = S ; x", Some("S")),
            ("session=a+b=c", Some("a+b=c")),
            ("session", Some("")),
            ("Session=S; xsession=S", None),
        ] {
            let (headers, target) = (headers(&[("cookie", line)]), target("/"));
            let request =
                HttpRequest::new(client("192.0.2.7"), "GET", &target, "a", &headers).unwrap();
            assert_eq!(request.get("cookie.session").as_deref(), expected, "{line}");
        }
    }

    /// Most values are as they should be.
    #[test]
    fn what_has_no_escapes_is_not_copied() {
        for value in [&b"S"[..], b"\"S\"", b"a+b", b"\"a+b\""] {
            assert!(matches!(cookie_value(value), Cow::Borrowed(_)), "{value:?}");
        }
        assert!(matches!(decoded(b"abc", Plus::IsSpace), Cow::Borrowed("abc")));
        assert_eq!(decoded(b"a+b", Plus::IsSpace), "a b");
    }

    #[test]
    fn only_a_bearer_is_a_bearer() {
        for (line, expected) in [
            ("Bearer t", true),
            ("BEARER  t", true),
            ("Bearer ", false),
            ("Bearer", false),
            ("Basic dDp0", false),
            ("Digest t=1", false),
            ("t", false),
        ] {
            let (headers, target) = (headers(&[("authorization", line)]), target("/"));
            let request =
                HttpRequest::new(client("192.0.2.7"), "GET", &target, "a", &headers).unwrap();
            assert_eq!(request.get("bearer").is_some(), expected, "{line}");
        }
    }

    #[test]
    fn claims_are_read_up_to_a_length() {
        for (bytes, expected) in
            [(MAX_CLAIMS_BYTES / 4 * 3, Some("ann")), (MAX_CLAIMS_BYTES / 4 * 3 + 3, None)]
        {
            let (start, end) = ("{\"sub\":\"ann\",\"x\":\"", "\"}");
            let json = format!("{start}{}{end}", "x".repeat(bytes - start.len() - end.len()));
            let line = format!("Bearer a.{}.c", URL_SAFE_NO_PAD.encode(&json));
            let (headers, target) = (headers(&[("authorization", &line)]), target("/"));
            let request =
                HttpRequest::new(client("192.0.2.7"), "GET", &target, "a", &headers).unwrap();
            assert_eq!(request.get("bearer.sub").as_deref(), expected, "{bytes} bytes");
        }
    }

    #[test]
    fn what_is_refused_is_named_and_cut() {
        let problem = |method: &str, text: &str, host: &str| {
            let headers = HeaderMap::new();
            let read = HttpRequest::target(text, &PathPolicy::default());
            let read = read.and_then(|target| {
                HttpRequest::new(client("192.0.2.7"), method, &target, host, &headers).map(drop)
            });
            read.map_err(|error| (error.is_too_long(), error.to_string()))
        };
        let longest = format!("/?{}", "q".repeat(MAX_URI_BYTES - 2));
        assert_eq!(problem("GET", &longest, "a"), Ok(()));
        for (method, target, host, is_long, expected) in [
            (
                "GET",
                &*format!("{longest}q"),
                "a",
                true,
                "a target of 16385 bytes: expected at most 16384",
            ),
            (
                "GET",
                &format!("/{}", "a".repeat(8192)),
                "a",
                true,
                "a path of 8193 bytes: expected at most 8192",
            ),
            ("GET", "/", &"a".repeat(513), true, "a host of 513 bytes: expected at most 512"),
            ("G(T", "/", "a", false, "method \"G(T\": expected 1 to 32 letters such as GET"),
            (
                "GET",
                "v1/search",
                "a",
                false,
                "target \"v1/search\": expected a path such as /v1/search?q=1",
            ),
            (
                "GET",
                "/",
                "a b",
                false,
                "host \"a b\": expected one host such as api.example.com:443",
            ),
            ("GET", "/a%2fb", "a", false, "path \"/a%2fb\" has an escaped slash"),
        ] {
            let (long, message) = problem(method, target, host).unwrap_err();
            assert!(long == is_long && message.starts_with(expected), "{message}");
        }
        let (_, message) = problem(&"(".repeat(5000), "/", "a").unwrap_err();
        assert!(message.len() < 200 && message.contains(&"(".repeat(64)), "{message}");
    }

    #[test]
    fn white_space_around_a_value_is_no_part_of_it() {
        let headers = headers(&[("x-key", " \tKEY\t "), ("authorization", "  Bearer t ")]);
        let target = target("/");
        let request = HttpRequest::new(client("192.0.2.7"), "GET", &target, "a", &headers).unwrap();
        assert_eq!(request.get("header.x-key").as_deref(), Some("KEY"));
        assert!(request.get("bearer").is_some());
    }

    #[test]
    fn what_a_rule_looks_at_is_there_once() {
        let names = ["header.x-key", "header.accept", "cookie.session", "query.k", "bearer"];
        let names: Vec<std::sync::Arc<str>> = names.iter().map(|name| (*name).into()).collect();
        let named = Named::among(names.iter());
        let policy = HeaderPolicy { lists: vec!["accept".into()], ..HeaderPolicy::default() };
        let problem = |text: &str, lines: &[(&'static str, &str)]| {
            let (headers, target) = (headers(lines), target(text));
            let request =
                HttpRequest::new(client("192.0.2.7"), "GET", &target, "a", &headers).unwrap();
            request.check_repeated(&named, &policy).map_err(|repeated| repeated.to_string())
        };
        assert_eq!(
            problem("/?k=1&q=1&q=2", &[("x-key", "a"), ("x-other", "a"), ("x-other", "b")]),
            Ok(())
        );
        assert_eq!(
            problem(
                "/",
                &[("accept", "a"), ("accept", "b"), ("cookie", "a=1"), ("cookie", "session=1")]
            ),
            Ok(())
        );
        for (text, lines, expected) in [
            (
                "/",
                &[("x-key", "a"), ("x-key", "a")][..],
                "header x-key is there more than once: expected it once",
            ),
            (
                "/",
                &[("authorization", "Bearer a"), ("authorization", "Bearer b")],
                "header authorization is",
            ),
            ("/", &[("cookie", "session=r1; session=S")], "cookie session is"),
            (
                "/",
                &[("cookie", "session=r1"), ("cookie", "a=\u{e9};session=\"S\"")],
                "cookie session is",
            ),
            ("/", &[("cookie", "session; session=S")], "cookie session is"),
            ("/?k=r1&k=K", &[], "query parameter k is"),
            ("/?%6b=r1&a&k", &[], "query parameter k is"),
        ] {
            let problem = problem(text, lines).unwrap_err();
            assert!(problem.starts_with(expected), "{problem}");
        }
    }
}
