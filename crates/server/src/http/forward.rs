//! `/v1/auth` (forward-auth): a gateway asks for a decision on a request of its client.
//!
//! The gateway describes the request in headers. It also forwards headers of its client, so none of
//! these may be left to the client to fill in: method, target, host and address must all be
//! present, each once or always the same, and are accepted from trusted peers only. A gateway that
//! omits one of them gets 400 for every request, so the mistake shows when it is set up, not when a
//! client exploits it.

use std::borrow::Cow;
use std::net::IpAddr;

use axum::Extension;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode, header};
use tidegate::Op;
use tidegate::http::{ClientIp, normal_host};

use super::HttpState;
use super::reply::{denial, pass, unanswered};
use crate::listen::http::{PeerAddress, TOKEN};
use crate::observe::metrics::Refusal;
use crate::problem::mistake;
use crate::rules::{HeaderPolicy, HttpRequest, HttpRequestError, Named};

/// The path that gateways call.
pub(super) const PATH: &str = "/v1/auth";
/// The headers with the target, as nginx, Caddy and Traefik name them.
const TARGETS: [&str; 3] = ["x-forwarded-uri", "x-original-uri", "x-original-url"];
const METHODS: [&str; 2] = ["x-forwarded-method", "x-original-method"];
const HOSTS: [&str; 1] = ["x-forwarded-host"];

/// Handles any method of `/v1/auth`; the method of the client is in a header. A body is ignored.
pub(super) async fn auth(
    State(state): State<HttpState>,
    Extension(PeerAddress(peer)): Extension<PeerAddress>,
    mut headers: HeaderMap,
) -> Response<Body> {
    headers.remove(TOKEN);
    let observer = state.engine.observer();
    if !state.engine.settings().clients().trusts(peer) {
        // Gateways show this response to their clients, which need not know the address of the
        // gateway.
        let detail = "may not say what others ask for: expected a peer in trusted_proxies";
        observer.metrics().refused(state.engine.protocol(), Refusal::Untrusted);
        observer.misasked(&format!("{peer} {detail}"));
        return mistake(
            StatusCode::FORBIDDEN,
            &format!("this peer {detail}; the log of Tidegate has its address"),
        );
    }
    match ruling(&state, peer, &headers).await {
        Ok(response) => response,
        Err(problem) => {
            observer.misasked(&problem);
            mistake(StatusCode::BAD_REQUEST, &problem)
        }
    }
}

async fn ruling(
    state: &HttpState,
    peer: IpAddr,
    headers: &HeaderMap,
) -> Result<Response<Body>, String> {
    let (told, client) = {
        let clients = state.engine.settings().clients();
        (OriginalRequest::by(headers, &clients)?, clients.find_in(peer, headers))
    };
    let policy = state.engine.settings().requests().paths;
    let target = match HttpRequest::target(&told.target, &policy) {
        Ok(target) => target,
        // A mistake of the client, not of the gateway.
        Err(error @ HttpRequestError::Path(_)) => {
            return Ok(mistake(StatusCode::BAD_REQUEST, &error.to_string()));
        }
        Err(problem) => return Err(problem.to_string()),
    };
    let request = HttpRequest::new(client, &told.method, &target, &told.host, headers);
    let request = request.map_err(|problem| problem.to_string())?;
    if let Err(problem) =
        state.engine.check_repeated(&request).map_err(|repeated| repeated.to_string())
    {
        return Ok(mistake(StatusCode::BAD_REQUEST, &problem));
    }
    if let Some(problem) = state.engine.with_rules(|_, rules| {
        ambiguous(headers, rules.named(), &state.engine.settings().requests().headers)
    }) {
        return Ok(mistake(StatusCode::BAD_REQUEST, &problem));
    }
    let ruling = match state.engine.matching(&request, 1) {
        Ok(matches) => state.engine.check_rules(Op::Check, matches, None).await,
        Err(error) => Err(error.into()),
    };
    Ok(match ruling {
        Err(error) => unanswered(&error),
        Ok(ruling) if ruling.allowed => {
            pass(&ruling, state.engine.settings().response_options().headers)
        }
        // The gateway forwards the `Accept` of its client, and the response is for that client.
        Ok(ruling) => {
            denial(&state.engine, &ruling, headers.get(header::ACCEPT).map(HeaderValue::as_bytes))
        }
    })
}

/// A header that a rule looks at and that the service may read in another way than Tidegate, which
/// cannot change what the gateway sends on: one that `Connection` names, which some gateways take
/// out, and one that has another name with `_`, which CGI-like services read as the same.
fn ambiguous(headers: &HeaderMap, named: &Named, policy: &HeaderPolicy) -> Option<String> {
    let looked_at = |name: &[u8]| {
        let same = |own: &str| {
            let same = |(own, other): (u8, &u8)| {
                own == other.to_ascii_lowercase() || own == b'-' && *other == b'_'
            };
            own.len() == name.len() && own.bytes().zip(name).all(same)
        };
        named.headers.iter().find(|own| same(own))
    };
    if !policy.keeps_underscores
        && let Some((other, name)) =
            headers.keys().map(HeaderName::as_str).filter(|name| name.contains('_')).find_map(
                |other| {
                    looked_at(other.as_bytes())
                        .filter(|name| !name.contains('_'))
                        .map(|name| (other, name))
                },
            )
    {
        return Some(format!("header {other} is {name} to some services: expected {name} alone"));
    }
    let lines = headers.get_all(header::CONNECTION).iter();
    let mut words =
        lines.flat_map(|line| line.as_bytes().split(|byte| *byte == b',')).map(<[u8]>::trim_ascii);
    let name = words.find_map(looked_at)?;
    Some(format!("header Connection names {name}: expected that it stays in the request"))
}

/// The request of a client, as its gateway describes it.
#[derive(PartialEq, Eq, Debug)]
struct OriginalRequest<'a> {
    method: Cow<'a, str>,
    target: Cow<'a, str>,
    host: Cow<'a, str>,
}

impl<'a> OriginalRequest<'a> {
    fn by(headers: &'a HeaderMap, clients: &ClientIp) -> Result<Self, String> {
        if !headers.contains_key(clients.header_name()) {
            return Err(format!(
                "{} is missing: expected the address of the client",
                clients.header_name()
            ));
        }
        let method = the_one(said(headers, &METHODS))?
            .ok_or_else(|| missing(METHODS[0], "the method", "POST"))?
            .1;
        let mut hosts = said(headers, &HOSTS);
        let mut targets = said(headers, &TARGETS);
        for (name, target) in &mut targets {
            if let Some((host, path)) = absolute(target) {
                hosts.push((name, Cow::Owned(host.to_owned())));
                *target = Cow::Owned(path);
            }
        }
        let target =
            the_one(targets)?.ok_or_else(|| missing(TARGETS[0], "the path", "/v1/search?q=1"))?.1;
        for (_, host) in &mut hosts {
            *host =
                Cow::Owned(normal_host(host).map_err(|problem| problem.to_string())?.into_owned());
        }
        let host =
            the_one(hosts)?.ok_or_else(|| missing(HOSTS[0], "the host", "api.example.com"))?.1;
        Ok(OriginalRequest { method, target, host })
    }
}

/// The values of these headers, with their names.
type Said<'a> = Vec<(&'static str, Cow<'a, str>)>;

/// All lines of all headers of these names.
fn said<'a>(headers: &'a HeaderMap, names: &[&'static str]) -> Said<'a> {
    let lines = |name: &&'static str| {
        let name = *name;
        headers
            .get_all(name)
            .iter()
            .map(move |value| (name, String::from_utf8_lossy(value.as_bytes())))
    };
    names.iter().flat_map(lines).collect()
}

/// The one value of these headers. A gateway that sets one and forwards another from its client
/// cannot be told from a gateway that sets both, so different values are an error.
fn the_one(said: Said<'_>) -> Result<Option<(&'static str, Cow<'_, str>)>, String> {
    let mut said = said.into_iter();
    let Some(first) = said.next() else { return Ok(None) };
    match said.find(|other| other.1 != first.1) {
        None => Ok(Some(first)),
        Some(other) => Err(format!(
            "{} is {:?} and {} is {:?}: expected that the gateway sets one and removes the other",
            first.0,
            shown(&first.1),
            other.0,
            shown(&other.1)
        )),
    }
}

/// Host and the rest of `https://host/path?query`.
fn absolute(target: &str) -> Option<(&str, String)> {
    let (scheme, rest) = target.split_once("://")?;
    if !(scheme.eq_ignore_ascii_case("http") || scheme.eq_ignore_ascii_case("https")) {
        return None;
    }
    let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
    let (host, path) = rest.split_at(end);
    let host = host.rsplit_once('@').map_or(host, |(_, host)| host);
    Some((host, if path.starts_with('/') { path.to_owned() } else { format!("/{path}") }))
}

fn missing(name: &str, what: &str, example: &str) -> String {
    format!(
        "{name} is missing: expected {what} of the request that the gateway was sent, such as {example}"
    )
}

fn shown(text: &str) -> String {
    text.chars().take(64).collect()
}

/// For fuzzing: what a gateway with these headers is answered, as a status.
#[cfg(feature = "fuzzing")]
pub(crate) async fn answer_to(
    engine: &crate::engine::Engine,
    clients: ClientIp,
    peer: IpAddr,
    headers: HeaderMap,
) -> u16 {
    let (health, patience) =
        (crate::supervise::Health::default(), std::time::Duration::from_secs(1));
    engine.settings().set_clients(clients);
    let guard = std::sync::Arc::new(crate::auth::Guard::new(crate::auth::Auth::default()));
    let state = HttpState { engine: engine.clone(), guard, health, patience };
    auth(State(state), Extension(PeerAddress(peer)), headers).await.status().as_u16()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(lines: &str) -> Result<String, String> {
        let mut headers = HeaderMap::new();
        for (name, value) in lines.lines().filter_map(|line| line.trim().split_once(": ")) {
            let name = HeaderName::from_bytes(name.as_bytes()).unwrap();
            headers.append(name, HeaderValue::from_str(value).unwrap());
        }
        let told = OriginalRequest::by(&headers, &ClientIp::of_peer())?;
        Ok(format!("{} {} {}", told.method, told.host, told.target))
    }

    #[test]
    fn every_gateway_in_its_own_words() {
        for (lines, expected) in [
            (
                "X-Forwarded-For: a\nX-Forwarded-Method: POST\nX-Forwarded-Uri: /a?b\nX-Forwarded-Host: h",
                "POST h /a?b",
            ),
            (
                "X-Forwarded-For: a\nX-Original-Method: GET\nX-Original-URI: /a\nX-Forwarded-Host: H:80",
                "GET h /a",
            ),
            (
                "X-Forwarded-For: a\nX-Original-Method: GET\nX-Original-URL: https://u@H:443/a?b",
                "GET h /a?b",
            ),
            ("X-Forwarded-For: a\nX-Original-Method: GET\nX-Original-URL: http://h", "GET h /"),
            ("X-Forwarded-For: a\nX-Original-Method: GET\nX-Original-URL: http://h?q", "GET h /?q"),
            // Both headers, with the same value.
            (
                "X-Forwarded-For: a\nX-Original-Method: GET\nX-Forwarded-Method: GET\nX-Original-URL: http://h/a\nX-Original-URI: /a\nX-Forwarded-Host: h",
                "GET h /a",
            ),
        ] {
            assert_eq!(told(lines).as_deref(), Ok(expected), "{lines}");
        }
    }

    #[test]
    fn what_is_missing_or_said_twice_is_named() {
        let whole = "X-Forwarded-For: a\nX-Forwarded-Method: POST\nX-Forwarded-Uri: /a\nX-Forwarded-Host: h";
        for (line, name) in
            whole.lines().zip(["x-forwarded-for", "the method", "the path", "the host"])
        {
            let problem = told(&whole.replace(line, "")).unwrap_err();
            assert!(
                problem.contains(name) && problem.contains("is missing: expected"),
                "{problem}"
            );
        }
        for line in [
            "X-Forwarded-Method: GET",
            "X-Original-Method: GET",
            "X-Forwarded-Uri: /free",
            "X-Original-URI: /free",
            "X-Original-URL: http://h/free",
            "X-Original-URL: http://other/a",
            "X-Forwarded-Host: other",
        ] {
            let problem = told(&format!("{whole}\n{line}")).unwrap_err();
            assert!(
                problem.contains("expected that the gateway sets one and removes the other"),
                "{problem}"
            );
        }
    }
}
