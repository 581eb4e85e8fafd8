//! Heads of forwarded requests and responses: removes hop-by-hop headers, and adds `Via`,
//! `Forwarded` and `X-Forwarded-*`.

use std::fmt::Write;
use std::net::IpAddr;

use axum::http::header::{
    CONNECTION, CONTENT_LENGTH, COOKIE, EXPECT, FORWARDED, HOST, PROXY_AUTHENTICATE,
    PROXY_AUTHORIZATION, TE, TRANSFER_ENCODING, UPGRADE, VIA,
};
use axum::http::{
    HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Uri, Version, request, uri,
};
use parking_lot::Mutex;
use tidegate::http::ClientIp;

use super::fields::Headers;
use crate::rules::HeaderPolicy;

const KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");
const PROXY_CONNECTION: HeaderName = HeaderName::from_static("proxy-connection");
const HTTP2_SETTINGS: HeaderName = HeaderName::from_static("http2-settings");
const FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
const FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
const CLOSE: HeaderName = HeaderName::from_static("close");

/// Hop-by-hop headers, whether `Connection` names them or not.
const HOP_BY_HOP: [HeaderName; 8] = [
    KEEP_ALIVE,
    PROXY_CONNECTION,
    PROXY_AUTHENTICATE,
    PROXY_AUTHORIZATION,
    TE,
    TRANSFER_ENCODING,
    UPGRADE,
    HTTP2_SETTINGS,
];

/// The name of this proxy in `Via`.
const OWN_NAME: &str = "tidegate";
/// A request that has passed this proxy so often is in a loop.
const MAX_PASSES: usize = 8;

/// The peer of a client connection.
#[derive(Debug)]
pub(super) struct ConnectionPeer {
    pub(super) ip: IpAddr,
    /// The address as text, formatted once.
    shown: HeaderValue,
    pub(super) scheme: &'static str,
    /// The last requested host, and its `Forwarded` element. Most connections request one host
    /// only.
    hop: Mutex<Option<(Option<HeaderValue>, HeaderValue)>>,
}

/// The head of a request, for any [`Headers`].
#[derive(Debug)]
pub(super) struct RequestHead<'a, H> {
    pub(super) method: &'a str,
    /// Path and query; empty if there is only a host.
    pub(super) target: &'a str,
    /// The host of an absolute target.
    pub(super) authority: Option<&'a uri::Authority>,
    pub(super) version: Version,
    pub(super) headers: &'a mut H,
}

impl<'a> RequestHead<'a, HeaderMap> {
    pub(super) fn of(parts: &'a mut request::Parts) -> Self {
        let target = parts.uri.path_and_query().map_or("", |target| target.as_str());
        let (method, authority) = (parts.method.as_str(), parts.uri.authority());
        RequestHead {
            method,
            target,
            authority,
            version: parts.version,
            headers: &mut parts.headers,
        }
    }
}

impl ConnectionPeer {
    pub(super) fn new(ip: IpAddr, secure: bool) -> Self {
        let ip = ip.to_canonical();
        let shown = HeaderValue::try_from(ip.to_string()).expect("an address has plain characters");
        ConnectionPeer {
            ip,
            shown,
            scheme: if secure { "https" } else { "http" },
            hop: Mutex::default(),
        }
    }
}

/// Status and detail of a refused request.
pub(super) type RefusedRequest = (StatusCode, &'static str);

const NO_HOST: RefusedRequest =
    (StatusCode::BAD_REQUEST, "Host is not one: expected a name or address, perhaps with a port");

/// The host that a request is for. An absolute target, `:authority` and `Host` must agree.
pub(super) fn host(
    head: &RequestHead<'_, impl Headers>,
    peer: &ConnectionPeer,
) -> Result<Option<HeaderValue>, RefusedRequest> {
    let mut hosts = head.headers.lines(HOST);
    let (own, more) = (hosts.next(), hosts.next());
    if more.is_some() {
        return Err((StatusCode::BAD_REQUEST, "more than one Host: expected one"));
    }
    if let (None, Some(own), Some((Some(last), _))) =
        (head.authority, own, peer.hop.lock().as_ref())
        && last.as_bytes() == own
    {
        return Ok(Some(last.clone())); // validated before
    }
    let own = own.map(HeaderValue::from_bytes).transpose().map_err(|_| NO_HOST)?;
    if let Some(host) = &own
        && !host.is_empty()
        && host
            .to_str()
            .ok()
            .and_then(|host| host.parse::<uri::Authority>().ok())
            .is_none_or(|it| has_user(&it))
    {
        return Err(NO_HOST);
    }
    match (head.authority, own) {
        (Some(authority), _) if has_user(authority) => {
            Err((StatusCode::BAD_REQUEST, "the target has a user before the host: expected none"))
        }
        (Some(authority), Some(host))
            if head.version == Version::HTTP_2
                && !host.as_bytes().eq_ignore_ascii_case(authority.as_str().as_bytes()) =>
        {
            Err((StatusCode::BAD_REQUEST, ":authority and Host are not the same"))
        }
        // The host of an absolute target overrides the header.
        (Some(authority), _) => Ok(HeaderValue::try_from(authority.as_str()).ok()),
        (None, None) if head.version == Version::HTTP_11 => {
            Err((StatusCode::BAD_REQUEST, "no Host: expected one in HTTP/1.1"))
        }
        (None, own) => Ok(own),
    }
}

fn has_user(authority: &uri::Authority) -> bool {
    authority.as_str().contains('@')
}

/// The protocol that a client asks to upgrade to, if the proxy supports it: from HTTP/1.1 only, and
/// not to HTTP/2.
pub(super) fn upgrade(head: &request::Parts) -> Option<HeaderValue> {
    let wanted = head.headers.get(UPGRADE)?;
    let named = names(&head.headers).any(|name| name.eq_ignore_ascii_case(b"upgrade"));
    let second = wanted
        .as_bytes()
        .split(|byte| *byte == b',')
        .any(|one| one.trim_ascii().eq_ignore_ascii_case(b"h2c"));
    (head.version == Version::HTTP_11 && head.method != Method::CONNECT && named && !second)
        .then(|| wanted.clone())
}

/// The headers that `Connection` names.
fn names(headers: &impl Headers) -> impl Iterator<Item = &[u8]> {
    headers
        .lines(CONNECTION)
        .flat_map(|line| line.split(|byte| *byte == b','))
        .map(|name| name.trim_ascii())
}

/// The header name of a `Connection` option; the usual ones are constants.
fn name_of(name: &[u8]) -> Option<HeaderName> {
    match name {
        _ if name.eq_ignore_ascii_case(b"keep-alive") => Some(KEEP_ALIVE),
        _ if name.eq_ignore_ascii_case(b"close") => Some(CLOSE),
        _ => HeaderName::from_bytes(name).ok(),
    }
}

/// Removes hop-by-hop headers. `stays` is true of names that `Connection` cannot remove.
pub(super) fn strip(headers: &mut impl Headers, stays: impl Fn(&[u8]) -> bool) {
    if headers.has(&CONNECTION) {
        let named: Vec<HeaderName> = names(headers).filter_map(name_of).collect();
        for name in named {
            // `Connection` cannot remove the framing of a message or its host.
            if ![CONTENT_LENGTH, TRANSFER_ENCODING, HOST].contains(&name)
                && !stays(name.as_str().as_bytes())
            {
                headers.remove_lines(&name);
            }
        }
        headers.remove_lines(&CONNECTION);
    }
    // Most messages have none of them: one pass finds that out.
    if headers.any_name(|name| HOP_BY_HOP.iter().any(|own| own.as_str().as_bytes() == name)) {
        // The transfer coding framed the body and overrides a length beside it (RFC 9112, 6.3).
        if headers.has(&TRANSFER_ENCODING) {
            headers.remove_lines(&CONTENT_LENGTH);
        }
        HOP_BY_HOP.iter().for_each(|name| headers.remove_lines(name));
    }
}

/// Whether a client accepts trailers.
fn takes_trailers(headers: &impl Headers) -> bool {
    let mut words = headers.lines(TE).flat_map(|line| line.split(|byte| *byte == b','));
    words.any(|word| {
        word.split(|byte| *byte == b';').next().is_some_and(|word| word.trim_ascii() == b"trailers")
    })
}

/// Cleans the headers of a request before the rules see them and the upstream gets them: removes
/// hop-by-hop headers, headers that only a trusted proxy may set, and white space around values.
/// Returns whether the client accepts trailers.
pub(super) fn clean(
    headers: &mut impl Headers,
    peer: &ConnectionPeer,
    clients: &ClientIp,
    policy: &HeaderPolicy,
) -> bool {
    let trailers = takes_trailers(headers);
    // Otherwise a client could remove what a trusted proxy says about it.
    strip(headers, |name| names_client(name, clients));
    // The client has its `100 Continue` already.
    headers.remove_lines(&EXPECT);
    if !policy.keeps_underscores {
        headers.remove_lines_if(|name| name.contains(&b'_'));
    }
    if !clients.trusts(peer.ip) {
        headers.remove_lines_if(|name| names_client(name, clients));
    }
    headers.trim();
    join_cookies(headers);
    for name in &policy.lists {
        join(headers, name);
    }
    trailers
}

/// Whether a header identifies the client, which only a trusted proxy may do. CGI-like services
/// read `_` as `-`.
fn names_client(name: &[u8], clients: &ClientIp) -> bool {
    let is = |other: &str| {
        let same = |(own, other): (&u8, u8)| *own == other || *own == b'_' && other == b'-';
        name.iter().zip(other.bytes()).all(same)
    };
    name.len() > 12 && is("x-forwarded-")
        || ["forwarded", "x-real-ip", clients.header_name()]
            .iter()
            .any(|own| own.len() == name.len() && is(own))
}

/// Joins the lines of a list into one.
fn join(headers: &mut impl Headers, name: &str) {
    let Ok(name) = HeaderName::from_bytes(name.as_bytes()) else { return };
    if headers.lines(&name).nth(1).is_some()
        && let Ok(joined) =
            HeaderValue::from_bytes(&headers.lines(&name).collect::<Vec<_>>().join(&b", "[..]))
    {
        headers.put(name, joined);
    }
}

/// Adds the headers that the upstream gets from this proxy.
pub(super) fn prepare(
    head: &mut RequestHead<'_, impl Headers>,
    host: Option<&HeaderValue>,
    peer: &ConnectionPeer,
    trailers: bool,
) -> Result<(), RefusedRequest> {
    let headers = &mut *head.headers;
    if trailers {
        headers.put(TE, HeaderValue::from_static("trailers"));
    }
    via(headers, head.version)?;
    append(headers, FORWARDED_FOR, peer.shown.clone());
    if !headers.has(&FORWARDED_PROTO) {
        headers.put(FORWARDED_PROTO, HeaderValue::from_static(peer.scheme));
    }
    if let Some(host) = host
        && !headers.has(&FORWARDED_HOST)
    {
        headers.put(FORWARDED_HOST, host.clone());
    }
    if let Some(hop) = hop(peer, host) {
        append(headers, FORWARDED, hop);
    }
    Ok(())
}

/// Joins several `Cookie` lines into one. HTTP/2 lets clients split the header (RFC 9113, 8.2.3);
/// many HTTP/1.1 servers read only one line of it.
fn join_cookies(headers: &mut impl Headers) {
    if headers.lines(COOKIE).nth(1).is_none() {
        return;
    }
    let crumbs: Vec<&[u8]> =
        headers.lines(COOKIE).map(<[u8]>::trim_ascii).filter(|crumb| !crumb.is_empty()).collect();
    if let Ok(joined) = HeaderValue::from_bytes(&crumbs.join(&b"; "[..])) {
        headers.put(COOKIE, joined);
    }
}

/// Reduces a `Content-Length` that was repeated, as lines or as a list, to one number. hyper has
/// read them and refused those that differ.
pub(super) fn one_length(headers: &mut HeaderMap) {
    let mut lines = headers.get_all(CONTENT_LENGTH).iter();
    let (Some(first), more) = (lines.next(), lines.next().is_some()) else { return };
    if more || first.as_bytes().contains(&b',') {
        let number =
            first.as_bytes().split(|byte| *byte == b',').next().unwrap_or_default().trim_ascii();
        if let Ok(number) = HeaderValue::from_bytes(number) {
            headers.insert(CONTENT_LENGTH, number);
        }
    }
}

/// Appends a value to a list, on one line.
fn append(headers: &mut impl Headers, name: HeaderName, value: HeaderValue) {
    if !headers.has(&name) {
        return headers.put(name, value);
    }
    let mut joined = Vec::new();
    for line in headers.lines(&name) {
        joined.extend_from_slice(line);
        joined.extend_from_slice(b", ");
    }
    joined.extend_from_slice(value.as_bytes());
    if let Ok(joined) = HeaderValue::from_bytes(&joined) {
        headers.put(name, joined);
    }
}

/// The `Forwarded` element of this hop (RFC 7239).
fn hop(peer: &ConnectionPeer, host: Option<&HeaderValue>) -> Option<HeaderValue> {
    let mut last = peer.hop.lock();
    if let Some((of, hop)) = last.as_ref()
        && of.as_ref() == host
    {
        return Some(hop.clone());
    }
    let hop = new_hop(peer, host)?;
    *last = Some((host.cloned(), hop.clone()));
    Some(hop)
}

fn new_hop(peer: &ConnectionPeer, host: Option<&HeaderValue>) -> Option<HeaderValue> {
    let mut hop = String::with_capacity(96);
    let _ = match peer.ip {
        IpAddr::V4(v4) => write!(hop, "for={v4}"),
        IpAddr::V6(v6) => write!(hop, "for=\"[{v6}]\""),
    };
    if let Some(host) = host.and_then(|host| host.to_str().ok()).filter(|host| !host.is_empty()) {
        let token = host.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._".contains(&byte));
        // It was parsed as a host, so it has no quotes.
        let _ = if token { write!(hop, ";host={host}") } else { write!(hop, ";host=\"{host}\"") };
    }
    let _ = write!(hop, ";proto={}", peer.scheme);
    HeaderValue::try_from(hop).ok()
}

fn via(headers: &mut impl Headers, version: Version) -> Result<(), RefusedRequest> {
    let own = match version {
        Version::HTTP_2 => HeaderValue::from_static("2.0 tidegate"),
        Version::HTTP_10 => HeaderValue::from_static("1.0 tidegate"),
        _ => HeaderValue::from_static("1.1 tidegate"),
    };
    let lines = headers.lines(VIA).filter_map(|line| std::str::from_utf8(line).ok());
    let rounds = lines
        .flat_map(|line| line.split(','))
        .filter(|hop| hop.trim_end().ends_with(OWN_NAME))
        .count();
    if rounds >= MAX_PASSES {
        return Err((
            StatusCode::LOOP_DETECTED,
            "request loop: the upstream leads back to the proxy",
        ));
    }
    append(headers, VIA, own);
    Ok(())
}

/// The target for the upstream: the base path of its URL, then the client's target.
pub(super) fn target(uri: &Uri, base: &str) -> Option<uri::PathAndQuery> {
    match uri.path_and_query() {
        Some(own) if base.is_empty() || own == "*" => Some(own.clone()),
        None if base.is_empty() => Some(uri::PathAndQuery::from_static("/")),
        own => format!("{base}{}", own.map_or("/", |own| own.as_str())).parse().ok(),
    }
}

/// Adapts a prepared head to an HTTP/1.1 upstream.
pub(super) fn direct(
    head: &mut request::Parts,
    target: uri::PathAndQuery,
    host: Option<&HeaderValue>,
) {
    head.uri = Uri::from(target);
    head.version = Version::HTTP_11;
    head.headers.insert(HOST, host.cloned().unwrap_or_else(|| HeaderValue::from_static("")));
}

#[cfg(test)]
mod tests;
