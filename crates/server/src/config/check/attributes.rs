//! Names of attributes that no protocol supplies.

use axum::http::HeaderName;

use super::super::Config;
use crate::findings::Finding;
use crate::nearest::nearest;
use crate::parse::messages;

/// Attributes that every request over HTTP has.
const ALWAYS_SUPPLIED: [&str; 4] = ["ip", "method", "path", "host"];
/// Attributes of HTTP without a prefix.
const PLAIN: [&str; 5] = ["ip", "method", "path", "host", "bearer"];
/// Prefixes of attributes of HTTP.
const PREFIXES: [&str; 4] = ["header", "query", "cookie", "bearer"];
/// Attributes of HTTP, for messages.
const SUPPLIED: [&str; 9] = [
    "ip",
    "method",
    "path",
    "host",
    "bearer",
    "bearer.CLAIM",
    "header.NAME",
    "query.NAME",
    "cookie.NAME",
];
/// Names of these attributes in other programs.
const OTHER_PREFIXES: [(&str, &str); 11] = [
    ("headers", "header"),
    ("cookies", "cookie"),
    ("queries", "query"),
    ("param", "query"),
    ("params", "query"),
    ("args", "query"),
    ("jwt", "bearer"),
    ("claim", "bearer"),
    ("claims", "bearer"),
    ("token", "bearer"),
    ("tokens", "bearer"),
];
const OTHER_NAMES: [(&str, &str); 12] = [
    ("ip_address", "ip"),
    ("ipaddress", "ip"),
    ("client_ip", "ip"),
    ("remote_ip", "ip"),
    ("remote_addr", "ip"),
    ("uri", "path"),
    ("url", "path"),
    ("hostname", "host"),
    ("verb", "method"),
    ("http_method", "method"),
    ("user_agent", "header.user-agent"),
    ("user-agent", "header.user-agent"),
];

impl Config {
    /// Whether rules apply to requests over HTTP: in the proxy, or for a gateway.
    pub(super) fn judges_http(&self) -> bool {
        self.proxy.is_some() || (self.listen.http.is_some() && !self.trusted_proxies.is_empty())
    }

    /// Whether all attributes come from requests over HTTP, because no listener accepts others.
    fn judges_http_alone(&self) -> bool {
        let listen = &self.listen;
        self.proxy.is_some()
            && listen.http.is_none()
            && listen.grpc.is_none()
            && listen.resp.is_none()
    }

    /// Whether every request has this attribute: only HTTP supplies some by itself.
    pub(super) fn is_always_supplied(&self, attribute: &str) -> bool {
        (self.proxy.is_some() || self.listen.http.is_some()) && ALWAYS_SUPPLIED.contains(&attribute)
    }

    /// An attribute of a request that no protocol supplies.
    pub(super) fn check_attribute(&self, label: &str, name: &str, place: &str) -> Option<Finding> {
        let lower = name.to_ascii_lowercase();
        if let Some((prefix, rest)) = name.split_once('.') {
            let low = prefix.to_ascii_lowercase();
            let other =
                OTHER_PREFIXES.iter().find(|(other, _)| *other == low).map(|(_, right)| *right);
            let right = other.or_else(|| nearest(prefix, PREFIXES));
            return match right {
                Some(right) if right == prefix => self
                    .dropped(label, prefix, rest, place)
                    .or_else(|| named(label, prefix, rest, place)),
                Some(right) => {
                    let rest =
                        if right == "header" { rest.to_ascii_lowercase() } else { rest.into() };
                    let message =
                        format!("{label} {name}: no request has it: did you mean {right}.{rest}?");
                    Some(Finding::error(place, message))
                }
                None => self.unknown(label, name, place),
            };
        }
        if PLAIN.contains(&name) {
            return None;
        }
        if name.contains(',') {
            let names: Vec<&str> = name.split(',').map(str::trim).collect();
            let message = format!(
                "{label} {name:?}: this is one attribute with a comma: write [{}]",
                names.join(", ")
            );
            return Some(Finding::error(place, message));
        }
        let prefixed =
            |prefix: &&str| lower == **prefix || lower.starts_with(&format!("{prefix}_"));
        if let Some(prefix) = ["header", "query", "cookie"].into_iter().find(prefixed) {
            let rest = lower
                .strip_prefix(prefix)
                .and_then(|rest| rest.strip_prefix('_'))
                .unwrap_or("NAME");
            let message =
                format!("{label} {name}: no request has it: did you mean {prefix}.{rest}?");
            return Some(Finding::warning(place, message));
        }
        if PLAIN.contains(&lower.as_str()) {
            let message = format!("{label} {name}: names are lower case: did you mean {lower}?");
            return Some(Finding::warning(place, message));
        }
        if self.judges_http()
            && let Some((_, right)) = OTHER_NAMES.iter().find(|(other, _)| *other == lower)
        {
            let message = format!(
                "{label} {name}: requests over HTTP do not have it, only callers that bring it: did you mean {right}?"
            );
            return Some(Finding::warning(place, message));
        }
        if name == "status" {
            let message = format!(
                "{label} status: a request has none: conditions on the status of the response belong into charge_when"
            );
            return Some(Finding::warning(place, message));
        }
        self.unknown(label, name, place)
    }

    /// A header that no request has because its name has a `_`.
    fn dropped(&self, label: &str, prefix: &str, rest: &str, place: &str) -> Option<Finding> {
        let is_dropped =
            prefix == "header" && rest.contains('_') && !self.headers.keeps_underscores;
        (is_dropped && self.judges_http()).then(|| {
            let right = rest.replace('_', "-");
            let message = format!(
                "{label} header.{rest}: headers with `_` in their names are dropped: write header.{right}, or set headers.underscores: keep"
            );
            Finding::warning(place, message)
        })
    }

    /// A name that only callers can supply, if a listener accepts them.
    fn unknown(&self, label: &str, name: &str, place: &str) -> Option<Finding> {
        self.judges_http_alone().then(|| {
            let hint = match nearest(name, PLAIN) {
                Some(right) => format!("did you mean {right}?"),
                None => format!("expected {}", messages::one_of(&SUPPLIED)),
            };
            Finding::warning(
                place,
                format!(
                    "{label} {name}: only the proxy listens, and it does not supply it: {hint}"
                ),
            )
        })
    }
}

/// The name after a known prefix.
fn named(label: &str, prefix: &str, rest: &str, place: &str) -> Option<Finding> {
    let name = format!("{prefix}.{rest}");
    if rest.is_empty() {
        return Some(Finding::error(
            place,
            format!("{label} {name}: expected a name after the dot"),
        ));
    }
    let is_token = HeaderName::from_bytes(rest.as_bytes()).is_ok();
    match prefix {
        "header" | "cookie" if !is_token => {
            let example = if prefix == "header" { "header.x-api-key" } else { "cookie.session" };
            let message = format!(
                "{label} {name}: no {prefix} can have this name: expected letters, digits, - and _, such as {example}"
            );
            Some(Finding::error(place, message))
        }
        "header" if rest.bytes().any(|byte| byte.is_ascii_uppercase()) => {
            let right = rest.to_ascii_lowercase();
            let message = format!(
                "{label} {name}: names of headers are lower case, and callers of the check API give them exactly so: write header.{right}"
            );
            Some(Finding::warning(place, message))
        }
        _ => None,
    }
}

/// An attribute that no response has.
pub(super) fn of_response(label: &str, name: &str, place: &str) -> Option<Finding> {
    match name.split_once('.') {
        None if name == "status" => None,
        Some(("header", rest)) => named(label, "header", rest, place).filter(Finding::is_error),
        _ => {
            let hint = match name.to_ascii_lowercase().split_once('.') {
                Some(("headers" | "header", rest)) => format!("did you mean header.{rest}?"),
                _ => messages::hint(name, &["status", "header.NAME"]),
            };
            Some(Finding::error(
                place,
                format!("{label} {name}: a response does not have it: {hint}"),
            ))
        }
    }
}
