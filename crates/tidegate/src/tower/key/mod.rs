//! The key of a request, which selects its budget.
//!
//! A key contains its kind: `ip:192.0.2.7`, `x-api-key:abc`. So a client cannot use the budget of
//! another one's address by writing that address into a header.

mod write;

use std::fmt::{self, Display, Write};
use std::sync::Arc;

use ::http::HeaderName;
use ::http::header::{AUTHORIZATION, HOST};

use super::head::RequestHead;
use super::per_request::BoxFuture;
use super::text::KeyText;
use crate::http::{ClientIp, bearer_token, group, normal_host};
pub(super) use write::digest_if_long;
use write::{digest, join, push_group};

/// Selects the budget of a request: by address, by header, by path, or by a function.
///
/// Requests without a key, because the header is missing for example, share one budget, unless the
/// rule has [another setting](super::Rule::missing).
///
/// ```
/// use tidegate::tower::{Key, RateLimitLayer, key};
/// let per_customer_and_path: Key = key::header("x-api-key").or(key::peer_ip()).and(key::path());
/// let layer = RateLimitLayer::new("10/s".parse()?, per_customer_and_path);
/// # Ok::<(), tidegate::ParseError>(())
/// ```
#[derive(Clone)]
pub struct Key(KeyKind);

#[derive(Clone)]
enum KeyKind {
    Value(Arc<str>),
    /// The peer's address; IPv6 by a network of this prefix length.
    Peer(u8),
    Function(Arc<FindKey>),
    /// The path, or a function that may read the path.
    PathFunction(Arc<FindKey>),
    Async(Arc<dyn Fn(&RequestHead<'_>) -> BoxFuture<Option<String>> + Send + Sync>),
    All(Vec<Key>),
    First(Vec<Key>),
}

type FindKey = dyn Fn(&RequestHead<'_>, &mut KeyText) -> KeyResult + Send + Sync;

/// The result of looking for the key of a request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum KeyResult {
    /// The key was written.
    Found,
    /// Some parts of the key are missing.
    Partial,
    /// There is no key.
    Missing,
    /// The program is not set up for this key, and this is how to fix it.
    Misconfigured(&'static str),
    /// The request is ambiguous, for this reason.
    Invalid(Arc<str>),
}

impl KeyResult {
    /// Whether it decides about the request, whatever the other parts of the key are.
    fn is_final(&self) -> bool {
        matches!(self, KeyResult::Misconfigured(_) | KeyResult::Invalid(_))
    }
}

/// One budget for all requests.
pub fn global() -> Key {
    Key(KeyKind::Value("global".into()))
}

/// The peer's IP address. Behind a proxy that is the address of the proxy; see [`client_ip`].
///
/// The server must provide the address. In axum, use the feature `axum` and serve
/// `app.into_make_service_with_connect_info::<SocketAddr>()`. In tonic, use the feature `tonic`.
/// Elsewhere, put a [`Peer`](super::Peer) into the request's extensions. Without an address, the
/// response is 500 with this advice.
pub fn peer_ip() -> Key {
    client_ip(ClientIp::of_peer())
}

/// The IP address of the client behind trusted proxies; IPv6 by its network. See [`ClientIp`].
pub fn client_ip(clients: ClientIp) -> Key {
    // Without trusted proxies the client is the peer.
    if clients.trusted().is_empty() {
        return Key(KeyKind::Peer(clients.prefix()));
    }
    Key::write(move |head, out| {
        let Some(peer) = head.peer() else { return KeyResult::Misconfigured(NO_PEER) };
        push_group(clients.find_in(peer, head.headers).group(), out);
        KeyResult::Found
    })
}

/// Writes the peer's address; IPv6 by a network of this prefix length.
#[inline]
pub(super) fn push_peer(head: &RequestHead<'_>, ipv6_prefix: u8, out: &mut KeyText) -> KeyResult {
    let Some(peer) = head.peer() else { return KeyResult::Misconfigured(NO_PEER) };
    push_group(group(peer, ipv6_prefix), out);
    KeyResult::Found
}

const NO_PEER: &str = "the peer's address is not known: with axum, serve \
     `app.into_make_service_with_connect_info::<SocketAddr>()` and turn on tidegate's feature \
     `axum`; with tonic its feature `tonic`; otherwise put `tidegate::tower::Peer` into the \
     request's extensions";

/// The value of a header, such as an API key, without the white space around it.
///
/// A client can invent values, and each value has a budget of its own: verify the header before, or
/// limit by address, too. A request with several lines of the header gets 400, because services
/// differ in which of them they read.
///
/// # Panics
/// If `name` is not a valid header name.
pub fn header(name: &str) -> Key {
    let name = HeaderName::from_bytes(name.as_bytes())
        .unwrap_or_else(|_| panic!("header {name:?}: expected a name such as x-api-key"));
    let (begin, line) = (format!("{name}:"), SingleHeader::of(name));
    Key::write(move |head, out| {
        let value = match line.read(head) {
            Ok(value) if !value.is_empty() => value,
            Ok(_) => return KeyResult::Missing,
            Err(invalid) => return invalid,
        };
        out.push_str(&begin);
        match str::from_utf8(value) {
            Ok(value) => out.push_str(value),
            Err(_) => out.push_str(&String::from_utf8_lossy(value)),
        }
        KeyResult::Found
    })
}

/// A header that may occur once.
struct SingleHeader {
    name: HeaderName,
    /// The error for a request with several lines of it.
    repeated: Arc<str>,
}

impl SingleHeader {
    fn of(name: HeaderName) -> Self {
        let repeated = format!("header {name} is there more than once: expected it once").into();
        SingleHeader { name, repeated }
    }

    /// The value without the white space around it; empty if there is none.
    fn read<'a>(&self, head: &RequestHead<'a>) -> Result<&'a [u8], KeyResult> {
        let mut lines =
            head.headers.get_all(&self.name).iter().map(|value| value.as_bytes().trim_ascii());
        match (lines.next(), lines.next()) {
            (line, None) => Ok(line.unwrap_or_default()),
            _ => Err(KeyResult::Invalid(Arc::clone(&self.repeated))),
        }
    }
}

/// The token of `Authorization: Bearer`, as a digest. The token itself is not kept.
pub fn bearer() -> Key {
    let line = SingleHeader::of(AUTHORIZATION);
    Key::write(move |head, out| {
        let value = match line.read(head) {
            Ok(value) => value,
            Err(invalid) => return invalid,
        };
        let Some(token) = bearer_token(value) else { return KeyResult::Missing };
        let _ = write!(out, "bearer:{}", digest(token));
        KeyResult::Found
    })
}

/// The normalized path. Targets that services read as different paths are
/// [refused](super::RateLimitLayer::paths).
///
/// A client can invent paths, and each path has a budget of its own; [`matched_path`] has one
/// budget for each route.
pub fn path() -> Key {
    Key::write_by_path(|head, out| {
        out.push_str("path:");
        out.push_str(&head.path());
        KeyResult::Found
    })
}

/// The route that axum has matched, such as `/users/{id}`. The layer must be on that route or its
/// router; a layer around the router finds no route.
#[cfg(feature = "axum")]
pub fn matched_path() -> Key {
    Key::write(|head, out| {
        let Some(path) = head.extension::<axum::extract::MatchedPath>() else {
            return KeyResult::Missing;
        };
        out.push_str("route:");
        out.push_str(path.as_str());
        KeyResult::Found
    })
}

/// The method.
pub fn method() -> Key {
    Key::write(|head, out| {
        out.push_str("method:");
        out.push_str(head.method.as_str());
        KeyResult::Found
    })
}

/// The requested host, without its port.
pub fn host() -> Key {
    let line = SingleHeader::of(HOST);
    Key::write(move |head, out| {
        let header = match line.read(head) {
            Ok(value) => str::from_utf8(value).ok().filter(|host| !host.is_empty()),
            Err(invalid) => return invalid,
        };
        let Some(host) = head.uri.host().or(header) else { return KeyResult::Missing };
        out.push_str("host:");
        match normal_host(host) {
            Ok(host) => out.push_str(&host),
            Err(_) => out.push_str("too long"),
        }
        KeyResult::Found
    })
}

/// A value that another layer has put into the extensions, such as the authenticated user.
///
/// ```
/// # use tidegate::tower::key;
/// #[derive(Clone)]
/// struct User { id: u64 }
/// let by_user = key::extension(|user: &User| user.id).or(key::peer_ip());
/// ```
pub fn extension<T, D>(text: impl Fn(&T) -> D + Send + Sync + 'static) -> Key
where
    T: Clone + Send + Sync + 'static,
    D: Display,
{
    Key::write(move |head, out| {
        let Some(found) = head.extension::<T>() else { return KeyResult::Missing };
        let _ = write!(out, "extension:{}", text(found));
        KeyResult::Found
    })
}

/// A function of the request. `None` means that there is no key.
///
/// ```
/// # use tidegate::tower::key;
/// let by_tenant = key::per_request(|head| head.path().split('/').nth(1).map(str::to_owned));
/// ```
pub fn per_request<D: Display>(
    text: impl Fn(&RequestHead<'_>) -> Option<D> + Send + Sync + 'static,
) -> Key {
    Key::write_by_path(move |head, out| {
        let Some(text) = text(head) else { return KeyResult::Missing };
        let _ = write!(out, "of:{text}");
        KeyResult::Found
    })
}

/// An async function of the request. The function copies what it needs from the head and returns a
/// future.
///
/// ```
/// # use tidegate::tower::key;
/// # async fn customer_of(token: Option<String>) -> Option<u64> { Some(7) }
/// let by_customer = key::per_request_async(|head| {
///     let token = head.header("authorization").map(str::to_owned);
///     customer_of(token)
/// });
/// ```
pub fn per_request_async<F, D>(text: impl Fn(&RequestHead<'_>) -> F + Send + Sync + 'static) -> Key
where
    F: Future<Output = Option<D>> + Send + 'static,
    D: Display,
{
    Key(KeyKind::Async(Arc::new(move |head| {
        let text = text(head);
        Box::pin(async move { text.await.map(|text| format!("of:{text}")) })
    })))
}

impl Key {
    fn write(
        write: impl Fn(&RequestHead<'_>, &mut KeyText) -> KeyResult + Send + Sync + 'static,
    ) -> Self {
        Key(KeyKind::Function(Arc::new(write)))
    }

    fn write_by_path(
        write: impl Fn(&RequestHead<'_>, &mut KeyText) -> KeyResult + Send + Sync + 'static,
    ) -> Self {
        Key(KeyKind::PathFunction(Arc::new(write)))
    }

    /// Whether it may read the path.
    pub(super) fn uses_path(&self) -> bool {
        match &self.0 {
            KeyKind::Value(_) | KeyKind::Peer(_) | KeyKind::Function(_) => false,
            KeyKind::PathFunction(_) | KeyKind::Async(_) => true,
            KeyKind::All(keys) | KeyKind::First(keys) => keys.iter().any(Key::uses_path),
        }
    }

    /// One budget for each pair of this key and the other one.
    pub fn and(self, other: Key) -> Key {
        match self.0 {
            KeyKind::All(mut keys) => {
                keys.push(other);
                Key(KeyKind::All(keys))
            }
            kind => Key(KeyKind::All(vec![Key(kind), other])),
        }
    }

    /// The other key for requests without this one.
    pub fn or(self, other: Key) -> Key {
        match self.0 {
            KeyKind::First(mut keys) => {
                keys.push(other);
                Key(KeyKind::First(keys))
            }
            kind => Key(KeyKind::First(vec![Key(kind), other])),
        }
    }

    /// The prefix length for IPv6, if the key is the peer's address.
    pub(super) fn peer_prefix(&self) -> Option<u8> {
        match self.0 {
            KeyKind::Peer(ipv6_prefix) => Some(ipv6_prefix),
            _ => None,
        }
    }

    /// Whether it has an async function.
    pub(super) fn is_async(&self) -> bool {
        match &self.0 {
            KeyKind::Value(_)
            | KeyKind::Peer(_)
            | KeyKind::Function(_)
            | KeyKind::PathFunction(_) => false,
            KeyKind::Async(_) => true,
            KeyKind::All(keys) | KeyKind::First(keys) => keys.iter().any(Key::is_async),
        }
    }

    /// Writes the key into `out`, which is empty. The key must have no async function.
    pub(super) fn find(&self, head: &RequestHead<'_>, out: &mut KeyText) -> KeyResult {
        let found = self.push(head, out);
        if let Some(digest) = digest_if_long(out.as_bytes()) {
            out.replace(&digest);
        }
        found
    }

    fn push(&self, head: &RequestHead<'_>, out: &mut KeyText) -> KeyResult {
        match &self.0 {
            KeyKind::Value(text) => {
                out.push_str(text);
                KeyResult::Found
            }
            KeyKind::Peer(ipv6_prefix) => push_peer(head, *ipv6_prefix, out),
            KeyKind::Function(write) | KeyKind::PathFunction(write) => write(head, out),
            KeyKind::Async(_) => KeyResult::Missing,
            KeyKind::First(keys) => {
                let found = keys
                    .iter()
                    .map(|key| key.push(head, out))
                    .find(|found| *found != KeyResult::Missing);
                found.unwrap_or(KeyResult::Missing)
            }
            KeyKind::All(keys) => {
                let mut pieces = Vec::with_capacity(keys.len());
                for key in keys {
                    let mut piece = KeyText::new();
                    let found = key.push(head, &mut piece);
                    if found.is_final() {
                        return found;
                    }
                    pieces.push(piece.into_string());
                }
                join(&pieces, out)
            }
        }
    }

    /// The future of the key.
    pub(super) fn find_async(&self, head: &RequestHead<'_>) -> BoxFuture<(KeyResult, String)> {
        match &self.0 {
            KeyKind::Async(text) => {
                let text = text(head);
                Box::pin(async move {
                    match text.await.filter(|text| !text.is_empty()) {
                        Some(text) => (KeyResult::Found, text),
                        None => (KeyResult::Missing, String::new()),
                    }
                })
            }
            KeyKind::First(keys) if self.is_async() => {
                let keys: Vec<_> = keys.iter().map(|key| key.find_async(head)).collect();
                Box::pin(async move {
                    for key in keys {
                        let found = key.await;
                        if found.0 != KeyResult::Missing {
                            return found;
                        }
                    }
                    (KeyResult::Missing, String::new())
                })
            }
            KeyKind::All(keys) if self.is_async() => {
                let keys: Vec<_> = keys.iter().map(|key| key.find_async(head)).collect();
                Box::pin(async move {
                    let mut pieces = Vec::with_capacity(keys.len());
                    for key in keys {
                        let (found, piece) = key.await;
                        if found.is_final() {
                            return (found, piece);
                        }
                        pieces.push(piece);
                    }
                    let mut out = KeyText::new();
                    (join(&pieces, &mut out), out.into_string())
                })
            }
            _ => {
                let mut out = KeyText::new();
                let found = self.push(head, &mut out);
                Box::pin(std::future::ready((found, out.into_string())))
            }
        }
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match &self.0 {
            KeyKind::Value(_) => "Key(value)",
            KeyKind::Peer(_) => "Key(peer)",
            KeyKind::Function(_) | KeyKind::PathFunction(_) => "Key(function)",
            KeyKind::Async(_) => "Key(async function)",
            KeyKind::All(_) => "Key(all)",
            KeyKind::First(_) => "Key(first)",
        })
    }
}

#[cfg(test)]
mod tests;
