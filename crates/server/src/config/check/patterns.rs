//! Patterns that can never match, or probably do not match what was intended.

use std::net::IpAddr;

use tidegate::http::{Network, normal_host, normal_path};

use super::super::Config;
use crate::findings::Finding;
use crate::nearest::nearest;
use crate::parse::messages;
use crate::rules::Pattern;
use crate::rules::regex::{self, NOTATION, PatternContext};

/// Known methods.
const METHODS: [&str; 18] = [
    "GET",
    "HEAD",
    "POST",
    "PUT",
    "DELETE",
    "CONNECT",
    "OPTIONS",
    "TRACE",
    "PATCH",
    "QUERY",
    "PURGE",
    "PROPFIND",
    "PROPPATCH",
    "MKCOL",
    "COPY",
    "MOVE",
    "LOCK",
    "UNLOCK",
];
const STATUSES: std::ops::RangeInclusive<u16> = 100..=599;

impl Config {
    /// A pattern on an attribute of a request.
    pub(super) fn check_pattern(
        &self,
        label: &str,
        attribute: &str,
        pattern: &Pattern,
        place: &str,
    ) -> Option<Finding> {
        let label = format!("{label}: {attribute} {:?}", pattern.text());
        let about = match attribute {
            "path" => PatternContext::Path,
            "method" => PatternContext::Method,
            _ => PatternContext::Other,
        };
        if let Some(rewritten) = regex::rewritten(pattern.text(), about) {
            return Some(like_a_regex(&label, &rewritten, place));
        }
        match attribute {
            "ip" => address(&label, pattern, place),
            "method" => method(&label, pattern, place),
            "path" => {
                path(&label, pattern, place).or_else(|| self.refused_path(&label, pattern, place))
            }
            "host" | "header.host" => host(&label, pattern, place),
            _ => None,
        }
    }

    /// A path that no request has because such targets are refused or rewritten.
    fn refused_path(&self, label: &str, pattern: &Pattern, place: &str) -> Option<Finding> {
        let path = pattern.exact().filter(|_| self.judges_http())?;
        if matches!(self.paths.read(path), Ok(target) if target.path == path) {
            return None;
        }
        let message = format!(
            "{label} never matches a request over HTTP: paths with an escaped slash, a backslash or NUL are refused: write another path, or see paths.escaped_slashes"
        );
        Some(Finding::warning(place, message))
    }
}

fn method(label: &str, pattern: &Pattern, place: &str) -> Option<Finding> {
    let Some(method) = pattern.exact() else {
        let body = pattern.body();
        let upper = body.to_ascii_uppercase();
        return (upper != body).then(|| {
            let message = format!(
                "{label} never matches a request over HTTP: methods are upper case: write {upper:?}"
            );
            Finding::warning(place, message)
        });
    };
    let upper = method.to_ascii_uppercase();
    let message = if METHODS.contains(&method) {
        return None;
    } else if METHODS.contains(&upper.as_str()) {
        format!("{label} never matches a request over HTTP: methods are upper case: write {upper}")
    } else if method.contains([',', ' ']) {
        let methods: Vec<&str> = method.split([',', ' ']).filter(|one| !one.is_empty()).collect();
        format!("{label} never matches: a method is one word: write [{}]", methods.join(", "))
    } else if let Some(right) = nearest(method, METHODS) {
        format!("{label}: unknown method: did you mean {right}?")
    } else {
        format!("{label}: unknown method: expected {}", messages::one_of(&METHODS[..9]))
    };
    Some(Finding::warning(place, message))
}

fn like_a_regex(label: &str, rewritten: &regex::Rewritten, place: &str) -> Finding {
    let advice = rewritten.advice();
    Finding::warning(
        place,
        format!(
            "{label} looks like a regular expression: {NOTATION}: {advice}; or put \\ before characters that stand for themselves"
        ),
    )
}

/// A condition on an address.
fn address(label: &str, pattern: &Pattern, place: &str) -> Option<Finding> {
    let body = pattern.body();
    let outcome = if pattern.is_negated() { "always matches" } else { "never matches" };
    if pattern.network().is_some() {
        return host_bits(body).map(|advice| Finding::warning(place, format!("{label}: {advice}")));
    }
    if body.contains('/') {
        let problem = match body.parse::<Network>() {
            Err(error) => error.to_string(),
            Ok(_) => return None,
        };
        return Some(Finding::error(place, format!("{label} {outcome}: {problem}")));
    }
    let Some(text) = pattern.exact() else {
        let strange =
            body.chars().find(|char| !(char.is_ascii_hexdigit() || ".:*?".contains(*char)));
        if let Some(char) = strange {
            let message = format!(
                "{label} {outcome}: no address has {char:?}: expected a network such as 10.0.0.0/8, or an address"
            );
            return Some(Finding::error(place, message));
        }
        if let Some(part) = impossible_part(body) {
            let message = format!(
                "{label} {outcome}: {part}: expected a network such as 10.0.0.0/8, or an address with * such as 10.0.*"
            );
            return Some(Finding::error(place, message));
        }
        let lower = body.to_ascii_lowercase();
        return (lower != body).then(|| {
            Finding::warning(
                place,
                format!("{label} {outcome}: addresses are written in lower case: write {lower:?}"),
            )
        });
    };
    match text.parse::<IpAddr>().map(|ip| ip.to_canonical().to_string()) {
        Ok(canonical) if canonical == text => None,
        Ok(canonical) => {
            let message = format!(
                "{label} {outcome} a request over HTTP: this address is written {canonical}: write that"
            );
            Some(Finding::warning(place, message))
        }
        Err(_) => {
            let advice = match text {
                "localhost" => "ip is an address, never a name: write 127.0.0.0/8 and \"::1\"",
                "loopback" | "private" => {
                    "this word is for trusted_proxies: write networks such as 127.0.0.0/8 or 10.0.0.0/8"
                }
                _ => {
                    "it is not an address: expected an address such as 192.0.2.7, or a network such as 10.0.0.0/8"
                }
            };
            Some(Finding::error(place, format!("{label} {outcome}: {advice}")))
        }
    }
}

/// Why no IPv4 address looks like this pattern, if it has dots and none does.
fn impossible_part(body: &str) -> Option<String> {
    if body.contains(':') || !body.contains('.') {
        return None;
    }
    let parts: Vec<&str> = body.split('.').collect();
    if parts.len() > 4 {
        return Some(format!("an address has four numbers, not {}", parts.len()));
    }
    let number = parts.iter().find(|part| part.parse::<u16>().is_ok_and(|number| number > 255))?;
    Some(format!("no address has the number {number}"))
}

/// What to write instead of a network that has bits after its prefix.
pub(super) fn host_bits(text: &str) -> Option<String> {
    let network: Network = text.parse().ok()?;
    let (address, _) = text.split_once('/')?;
    let address: IpAddr = address.parse().ok()?;
    let is_base = address.to_canonical() == network.address() || address == network.address();
    (!is_base).then(|| {
        format!("it has bits after its prefix and means {network}: write that, or {address} for this address alone")
    })
}

fn path(label: &str, pattern: &Pattern, place: &str) -> Option<Finding> {
    let body = pattern.body();
    if let Some(text) = pattern.exact() {
        if !text.starts_with('/') && text != "*" {
            let message = format!(
                "{label} never matches a request over HTTP: paths start with /: write \"/{text}\""
            );
            return Some(Finding::warning(place, message));
        }
        return match normal_path(text) {
            Ok(normal) if normal == text => None,
            Ok(normal) => {
                let message = format!(
                    "{label} never matches a request over HTTP: rules see paths in one spelling: write {:?}",
                    &*normal
                );
                Some(Finding::warning(place, message))
            }
            Err(error) => Some(Finding::error(place, format!("{label}: {error}"))),
        };
    }
    if !body.starts_with(['/', '*', '?', '\\']) {
        let message = format!(
            "{label} never matches a request over HTTP: paths start with /: write \"/{body}\" or \"*/{body}\""
        );
        return Some(Finding::warning(place, message));
    }
    // `/search?q=*`: the query is not part of the path.
    let (before, query) = body.split_once('?')?;
    let (name, _) = query.split_once('=')?;
    let message = format!(
        "{label}: a path has no query, and ? stands for one character: write path {before:?}, and query.{name} for the rest"
    );
    Some(Finding::warning(place, message))
}

fn host(label: &str, pattern: &Pattern, place: &str) -> Option<Finding> {
    let body = pattern.body();
    if let Some((_, rest)) = body.split_once("://") {
        let right = rest.split('/').next().unwrap_or(rest);
        let message =
            format!("{label} never matches: a host has no scheme and no path: write {right:?}");
        return Some(Finding::warning(place, message));
    }
    let normal = match pattern.exact() {
        Some(text) => normal_host(text).ok()?.into_owned(),
        None => body.to_ascii_lowercase(),
    };
    (normal != body).then(|| {
        let message = format!(
            "{label} never matches a request over HTTP: hosts are lower case and without a port: write {normal:?}"
        );
        Finding::warning(place, message)
    })
}

/// A pattern on an attribute of a response.
pub(super) fn of_response(
    label: &str,
    attribute: &str,
    pattern: &Pattern,
    place: &str,
) -> Option<Finding> {
    let label = format!("{label}: {attribute} {:?}", pattern.text());
    if let Some(rewritten) = regex::rewritten(pattern.text(), PatternContext::Other) {
        return Some(like_a_regex(&label, &rewritten, place));
    }
    let is_possible = || {
        STATUSES.map(|status| status.to_string()).any(|status| {
            // A negation that excludes nothing is wrong, too.
            pattern.matches(&status) != pattern.is_negated()
        })
    };
    (attribute == "status" && !is_possible()).then(|| {
        let outcome = if pattern.is_negated() { "always matches" } else { "never matches" };
        let message = format!(
            "{label} {outcome}: expected a status from {} to {}, or a class such as 4xx",
            STATUSES.start(),
            STATUSES.end()
        );
        Finding::error(place, message)
    })
}
