//! Whose budget a request draws on.
//!
//! A key says what it is as well as whose: `ip:192.0.2.7`, `x-api-key:abc`. So nobody can write a
//! victim's address into a header and be taken for it.

use std::fmt::{self, Display, Write};
use std::net::Ipv4Addr;
use std::sync::Arc;

use ::http::HeaderName;
use ::http::header::{AUTHORIZATION, HOST};

use super::head::Head;
use super::of::Later;
use super::text::Text;
use crate::http::{ClientIp, Group, bearer_token, group, normal_host};

/// Keys that are longer are kept as a digest: some tokens are longer than a key may be.
const MAX_PLAIN_BYTES: usize = 256;

/// Finds out whose budget a request draws on.
///
/// A request for which nothing is found, because the header is missing, say, shares one budget with
/// all others like it, unless the rule says [otherwise](super::Rule::missing).
#[derive(Clone)]
pub struct Key(Kind);

#[derive(Clone)]
enum Kind {
    Value(Arc<str>),
    /// The other end of the connection; IPv6 by a network of so many bits.
    Peer(u8),
    Now(Arc<Finding>),
    /// The path, or a function, which may look at the path.
    OfPath(Arc<Finding>),
    Later(Arc<dyn Fn(&Head<'_>) -> Later<Option<String>> + Send + Sync>),
    All(Vec<Key>),
    First(Vec<Key>),
}

type Finding = dyn Fn(&Head<'_>, &mut Text) -> Found + Send + Sync;

/// What came of looking for a key.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Found {
    Key,
    /// A key of several parts, of which at least one is missing.
    Partial,
    Nothing,
    /// The program is not set up for it: whoever runs it should hear of that.
    Mistake(&'static str),
    /// The request cannot be judged: what it is by is there more than once.
    Unfit(Arc<str>),
}

impl Found {
    /// Whether it is known what becomes of the request, whatever else is found.
    fn is_final(&self) -> bool {
        matches!(self, Found::Mistake(_) | Found::Unfit(_))
    }
}

/// Everybody draws on one budget.
pub fn everybody() -> Key {
    Key(Kind::Value("everybody".into()))
}

/// The other end of the connection. Behind a proxy that is the proxy: see [`client_ip`].
///
/// The server must tell who it is. In axum: `axum::serve(listener,
/// app.into_make_service_with_connect_info::<SocketAddr>())`, and the feature `axum`. Tonic does by
/// itself; it needs the feature `tonic`. Elsewhere, put a [`Peer`](super::Peer) into the request's
/// extensions. Without it, requests are answered with 500 and this advice.
pub fn peer_ip() -> Key {
    client_ip(ClientIp::of_peer())
}

/// The client behind proxies that are trusted; IPv6 by its network. See [`ClientIp`].
pub fn client_ip(clients: ClientIp) -> Key {
    // Most trust nobody, and then there is nothing to find.
    if clients.trusted().is_empty() {
        return Key(Kind::Peer(clients.prefix()));
    }
    Key::write(move |head, out| {
        let Some(peer) = head.peer() else { return Found::Mistake(NO_PEER) };
        push_group(clients.find_in(peer, head.headers).group(), out);
        Found::Key
    })
}

/// The other end; IPv6 by a network of so many bits.
#[inline]
pub(super) fn push_peer(head: &Head<'_>, ipv6_prefix: u8, out: &mut Text) -> Found {
    let Some(peer) = head.peer() else { return Found::Mistake(NO_PEER) };
    push_group(group(peer, ipv6_prefix), out);
    Found::Key
}

#[inline]
fn push_group(group: Group, out: &mut Text) {
    out.push_str("ip:");
    match group {
        Group::V4(v4) => out.push_some(|letters| write_v4(v4, letters)),
        Group::V6(..) => {
            let _ = write!(out, "{group}");
        }
    }
}

const NO_PEER: &str = "the peer's address is not known: with axum, serve `app.into_make_service_with_connect_info::<SocketAddr>()` and \
     turn on tidegate's feature `axum`; with tonic its feature `tonic`; otherwise put `tidegate::tower::Peer` into the request's extensions";

/// The value of a header, without white space around it: an API key, say. It is not shown anywhere,
/// but names a budget, so anybody can make up new ones: check it before, or limit by address as
/// well. A request with several lines of it is answered with 400, for services differ in which of
/// them they read.
///
/// # Panics
/// If it is not the name of a header.
pub fn header(name: &str) -> Key {
    let name = HeaderName::from_bytes(name.as_bytes())
        .unwrap_or_else(|_| panic!("header {name:?}: expected a name such as x-api-key"));
    let (begin, line) = (format!("{name}:"), Line::of(name));
    Key::write(move |head, out| {
        let value = match line.read(head) {
            Ok(value) if !value.is_empty() => value,
            Ok(_) => return Found::Nothing,
            Err(unfit) => return unfit,
        };
        out.push_str(&begin);
        match str::from_utf8(value) {
            Ok(value) => out.push_str(value),
            Err(_) => out.push_str(&String::from_utf8_lossy(value)),
        }
        Found::Key
    })
}

/// A header of which there is one line, at most.
struct Line {
    name: HeaderName,
    /// What is said of a request that has several.
    repeated: Arc<str>,
}

impl Line {
    fn of(name: HeaderName) -> Self {
        let repeated = format!("header {name} is there more than once: expected it once").into();
        Line { name, repeated }
    }

    /// Its value without white space around it; empty, if there is none.
    fn read<'a>(&self, head: &Head<'a>) -> Result<&'a [u8], Found> {
        let mut lines =
            head.headers.get_all(&self.name).iter().map(|value| value.as_bytes().trim_ascii());
        match (lines.next(), lines.next()) {
            (line, None) => Ok(line.unwrap_or_default()),
            _ => Err(Found::Unfit(Arc::clone(&self.repeated))),
        }
    }
}

/// The token of `Authorization: Bearer`, as a digest: the token itself is not kept.
pub fn bearer() -> Key {
    let line = Line::of(AUTHORIZATION);
    Key::write(move |head, out| {
        let value = match line.read(head) {
            Ok(value) => value,
            Err(unfit) => return unfit,
        };
        let Some(token) = bearer_token(value) else { return Found::Nothing };
        let _ = write!(out, "bearer:{}", digest(token));
        Found::Key
    })
}

/// The path, in its one spelling. Targets that services read as different paths are
/// [refused](super::RateLimitLayer::paths). There are as many budgets as paths that anybody thinks
/// of: [`matched_path`] has as many as there are routes.
pub fn path() -> Key {
    Key::write_by_path(|head, out| {
        out.push_str("path:");
        out.push_str(&head.path());
        Found::Key
    })
}

/// The route that axum has found: `/users/{id}`. The layer must be one of the route or of the
/// router that has it; nothing is found in one around it.
#[cfg(feature = "axum")]
pub fn matched_path() -> Key {
    Key::write(|head, out| {
        let Some(path) = head.extension::<axum::extract::MatchedPath>() else {
            return Found::Nothing;
        };
        out.push_str("route:");
        out.push_str(path.as_str());
        Found::Key
    })
}

/// The method.
pub fn method() -> Key {
    Key::write(|head, out| {
        out.push_str("method:");
        out.push_str(head.method.as_str());
        Found::Key
    })
}

/// The host that was asked, without its port.
pub fn host() -> Key {
    let line = Line::of(HOST);
    Key::write(move |head, out| {
        let header = match line.read(head) {
            Ok(value) => str::from_utf8(value).ok().filter(|host| !host.is_empty()),
            Err(unfit) => return unfit,
        };
        let Some(host) = head.uri.host().or(header) else { return Found::Nothing };
        out.push_str("host:");
        match normal_host(host) {
            Ok(host) => out.push_str(&host),
            Err(_) => out.push_str("too long"),
        }
        Found::Key
    })
}

/// Something that another layer has put into the extensions: the user who has signed in, say.
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
        let Some(found) = head.extension::<T>() else { return Found::Nothing };
        let _ = write!(out, "extension:{}", text(found));
        Found::Key
    })
}

/// A function of the request.
///
/// ```
/// # use tidegate::tower::key;
/// let by_tenant = key::of(|head| head.path().split('/').nth(1).map(str::to_owned));
/// ```
pub fn of<D: Display>(text: impl Fn(&Head<'_>) -> Option<D> + Send + Sync + 'static) -> Key {
    Key::write_by_path(move |head, out| {
        let Some(text) = text(head) else { return Found::Nothing };
        let _ = write!(out, "of:{text}");
        Found::Key
    })
}

/// An async function of the request: it takes what it needs out of the head, and returns a future.
pub fn of_async<F, D>(text: impl Fn(&Head<'_>) -> F + Send + Sync + 'static) -> Key
where
    F: Future<Output = Option<D>> + Send + 'static,
    D: Display,
{
    Key(Kind::Later(Arc::new(move |head| {
        let text = text(head);
        Box::pin(async move { text.await.map(|text| format!("of:{text}")) })
    })))
}

impl Key {
    fn write(write: impl Fn(&Head<'_>, &mut Text) -> Found + Send + Sync + 'static) -> Self {
        Key(Kind::Now(Arc::new(write)))
    }

    fn write_by_path(
        write: impl Fn(&Head<'_>, &mut Text) -> Found + Send + Sync + 'static,
    ) -> Self {
        Key(Kind::OfPath(Arc::new(write)))
    }

    /// Whether it may depend on the path.
    pub(super) fn is_of_path(&self) -> bool {
        match &self.0 {
            Kind::Value(_) | Kind::Peer(_) | Kind::Now(_) => false,
            Kind::OfPath(_) | Kind::Later(_) => true,
            Kind::All(keys) | Kind::First(keys) => keys.iter().any(Key::is_of_path),
        }
    }

    /// Both together: one budget for each pair.
    pub fn and(self, other: Key) -> Key {
        match self.0 {
            Kind::All(mut keys) => {
                keys.push(other);
                Key(Kind::All(keys))
            }
            kind => Key(Kind::All(vec![Key(kind), other])),
        }
    }

    /// The other one, where nothing is found for this.
    pub fn or(self, other: Key) -> Key {
        match self.0 {
            Kind::First(mut keys) => {
                keys.push(other);
                Key(Kind::First(keys))
            }
            kind => Key(Kind::First(vec![Key(kind), other])),
        }
    }

    /// If it is nothing but the other end of the connection: how many bits of IPv6 count.
    pub(super) fn peer(&self) -> Option<u8> {
        match self.0 {
            Kind::Peer(ipv6_prefix) => Some(ipv6_prefix),
            _ => None,
        }
    }

    /// Whether it takes an async function to find it.
    pub(super) fn is_later(&self) -> bool {
        match &self.0 {
            Kind::Value(_) | Kind::Peer(_) | Kind::Now(_) | Kind::OfPath(_) => false,
            Kind::Later(_) => true,
            Kind::All(keys) | Kind::First(keys) => keys.iter().any(Key::is_later),
        }
    }

    /// Finds it, if no function is async, and writes it into `out`, which is empty.
    pub(super) fn now(&self, head: &Head<'_>, out: &mut Text) -> Found {
        let found = self.push(head, out);
        if let Some(digest) = bounded(out.as_bytes()) {
            out.replace(&digest);
        }
        found
    }

    fn push(&self, head: &Head<'_>, out: &mut Text) -> Found {
        match &self.0 {
            Kind::Value(text) => {
                out.push_str(text);
                Found::Key
            }
            Kind::Peer(ipv6_prefix) => push_peer(head, *ipv6_prefix, out),
            Kind::Now(write) | Kind::OfPath(write) => write(head, out),
            Kind::Later(_) => Found::Nothing,
            Kind::First(keys) => {
                let found = keys
                    .iter()
                    .map(|key| key.push(head, out))
                    .find(|found| *found != Found::Nothing);
                found.unwrap_or(Found::Nothing)
            }
            Kind::All(keys) => {
                let mut pieces = Vec::with_capacity(keys.len());
                for key in keys {
                    let mut piece = Text::new();
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

    /// Finds it, however long it takes.
    pub(super) fn later(&self, head: &Head<'_>) -> Later<(Found, String)> {
        match &self.0 {
            Kind::Later(text) => {
                let text = text(head);
                Box::pin(async move {
                    match text.await.filter(|text| !text.is_empty()) {
                        Some(text) => (Found::Key, text),
                        None => (Found::Nothing, String::new()),
                    }
                })
            }
            Kind::First(keys) if self.is_later() => {
                let keys: Vec<_> = keys.iter().map(|key| key.later(head)).collect();
                Box::pin(async move {
                    for key in keys {
                        let found = key.await;
                        if found.0 != Found::Nothing {
                            return found;
                        }
                    }
                    (Found::Nothing, String::new())
                })
            }
            Kind::All(keys) if self.is_later() => {
                let keys: Vec<_> = keys.iter().map(|key| key.later(head)).collect();
                Box::pin(async move {
                    let mut pieces = Vec::with_capacity(keys.len());
                    for key in keys {
                        let (found, piece) = key.await;
                        if found.is_final() {
                            return (found, piece);
                        }
                        pieces.push(piece);
                    }
                    let mut out = Text::new();
                    (join(&pieces, &mut out), out.into_string())
                })
            }
            _ => {
                let mut out = Text::new();
                let found = self.push(head, &mut out);
                Box::pin(std::future::ready((found, out.into_string())))
            }
        }
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match &self.0 {
            Kind::Value(_) => "Key(value)",
            Kind::Peer(_) => "Key(peer)",
            Kind::Now(_) | Kind::OfPath(_) => "Key(function)",
            Kind::Later(_) => "Key(async function)",
            Kind::All(_) => "Key(all)",
            Kind::First(_) => "Key(first)",
        })
    }
}

/// Writes pieces so that no two lists of pieces look the same; a missing one is empty.
fn join(pieces: &[String], out: &mut Text) -> Found {
    for (index, piece) in pieces.iter().enumerate() {
        if index > 0 {
            out.push_str("|");
        }
        for char in piece.chars() {
            match char {
                '%' => out.push_str("%25"),
                '|' => out.push_str("%7C"),
                char => out.push_str(char.encode_utf8(&mut [0; 4])),
            }
        }
    }
    let empty = pieces.iter().filter(|piece| piece.is_empty()).count();
    match empty {
        0 => Found::Key,
        all if all == pieces.len() => Found::Nothing,
        _ => Found::Partial,
    }
}

/// What stands in the place of a key that is too long for one: its digest. No other key looks like
/// that: all have a colon, or are `everybody`.
pub(super) fn bounded(key: &[u8]) -> Option<String> {
    (key.len() > MAX_PLAIN_BYTES).then(|| format!("#{}", digest(key)))
}

/// Writes it as it is displayed, and says how long that is. Most addresses are of this kind, and
/// there is one in every request.
#[inline]
fn write_v4(v4: Ipv4Addr, letters: &mut [u8; 16]) -> usize {
    let mut length = 0;
    for octet in v4.octets() {
        let digit = |unit: u8| b'0' + octet / unit % 10;
        let (digits, more) = if octet < 10 {
            ([digit(1), b'.', 0, 0], 2)
        } else if octet < 100 {
            ([digit(10), digit(1), b'.', 0], 3)
        } else {
            ([digit(100), digit(10), digit(1), b'.'], 4)
        };
        // There is room for all, four times.
        if let Some(room) = letters.get_mut(length..length + 4) {
            room.copy_from_slice(&digits);
        }
        length += more;
    }
    // Without the last dot.
    length - 1
}

/// For telling apart, not for keeping secret.
fn digest(bytes: &[u8]) -> String {
    sha1_smol::Sha1::from(bytes).digest().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_written_as_they_are_displayed() {
        for octet in 0..=255 {
            for v4 in [[octet, 255 - octet, octet / 2, octet / 7], [octet; 4]].map(Ipv4Addr::from) {
                let mut out = Text::new();
                push_group(Group::V4(v4), &mut out);
                assert_eq!(out.into_string(), format!("ip:{v4}"));
            }
        }
    }
}
