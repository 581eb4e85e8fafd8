//! A request over HTTP as attributes: `ip method path host header.* query.* cookie.* bearer
//! bearer.*`.
//!
//! Forward-auth and the proxy describe a request with this type, so that a rule means the same in
//! both. Path and host are normalized, and the caller has found the client's address. Everything
//! else is looked up when a rule needs it.

mod decode;

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

use self::decode::{Plus, cookie_value, decoded};
use super::{Attributes, HeaderPolicy, Named};

/// The longest target with its query, in bytes.
pub const MAX_URI_BYTES: usize = 16 << 10;
/// The longest method, in bytes.
pub const MAX_METHOD_BYTES: usize = 32;
/// The longest payload of a token that is read for claims, in bytes; a longer one has no claims.
pub const MAX_CLAIMS_BYTES: usize = 8 << 10;

/// The headers of a request, in any representation.
pub trait HeaderLines: fmt::Debug + Sync {
    /// The value of a line of this header; its lines are counted from 0.
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

/// Why a request is refused before rules apply.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HttpRequestError {
    /// The path or host is too long.
    #[error(transparent)]
    TooLong(#[from] TargetTooLong),
    /// The method is invalid.
    #[error("method {0:?}: expected 1 to {MAX_METHOD_BYTES} letters such as GET")]
    Method(String),
    /// The target is not one that a client sends to a server.
    #[error("target {0:?}: expected a path such as /v1/search?q=1")]
    Target(String),
    /// The target can be read as several paths.
    #[error(transparent)]
    Path(RefusedPath),
    /// The host is invalid.
    #[error("host {0:?}: expected one host such as api.example.com:443")]
    Host(String),
    /// An attribute of a rule occurs more than once.
    #[error(transparent)]
    Repeated(#[from] Repeated),
}

/// A header, cookie or query parameter of a rule that occurs more than once in a request. Services
/// differ in which one they read.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{kind} {name} is there more than once: expected it once")]
pub struct Repeated {
    kind: &'static str,
    name: String,
}

impl HttpRequestError {
    /// Whether something is too long.
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
    /// Reads the target of a request line: `/path?query`, or `*`.
    ///
    /// # Errors
    /// If it is too long, invalid, or can be read as several paths.
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
    /// If a part of it is too long or invalid.
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

    /// Checks that headers, cookies and parameters of rules occur at most once. A list header may
    /// have several lines.
    ///
    /// # Errors
    /// The name that occurs more than once.
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

    /// The values of all lines of a header, as one list.
    fn header(&self, name: &str) -> Option<Cow<'_, str>> {
        if name.eq_ignore_ascii_case("host") {
            // The header of the connection may be the gateway's.
            return Some(Cow::Borrowed(&*self.host));
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

    /// Names and values of cookies, one by one: an invalid one does not hide the others.
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

    /// A claim of a JSON Web Token: text, a number or a truth value. Its
    /// signature is not verified.
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

/// The claims of a JSON Web Token, if it is one.
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

/// The part of it that an error repeats.
fn shown(text: &str) -> String {
    text.chars().take(64).collect()
}

#[cfg(test)]
mod tests;
