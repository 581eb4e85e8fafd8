//! What rules see of a request and of a response: everything but the body.

use std::borrow::Cow;
use std::net::{IpAddr, SocketAddr};

use ::http::{Extensions, HeaderMap, Method, Request, Response, StatusCode, Uri};

use crate::http::normal_path;

/// A request without its body, as functions of rules get it.
///
/// ```
/// use tidegate::tower::{RequestHead, Rule, key, per_request};
/// fn is_internal(head: &RequestHead<'_>) -> bool {
///     head.header("x-internal").is_some() && head.path() == "/healthz"
/// }
/// let rule = Rule::new("all", "10/s".parse()?, key::peer_ip()).skip(per_request(is_internal));
/// # Ok::<(), tidegate::ParseError>(())
/// ```
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct RequestHead<'a> {
    /// The method.
    pub method: &'a Method,
    /// The target, as the client sent it.
    pub uri: &'a Uri,
    /// The headers.
    pub headers: &'a HeaderMap,
    /// Values that the server and other layers have added.
    pub extensions: &'a Extensions,
}

/// The address of the peer, in the request's extensions: for servers other than axum and tonic.
///
/// ```
/// use tidegate::tower::Peer;
/// let mut request = http::Request::new(());
/// request.extensions_mut().insert(Peer([192, 0, 2, 7].into()));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Peer(pub IpAddr);

impl<'a> RequestHead<'a> {
    pub(super) fn of<B>(request: &'a Request<B>) -> Self {
        RequestHead {
            method: request.method(),
            uri: request.uri(),
            headers: request.headers(),
            extensions: request.extensions(),
        }
    }

    /// The first value of a header without the white space around it, if it is visible ASCII and
    /// not empty. A service may read another line if there are several;
    /// [`key::header`](super::key::header) refuses such requests.
    pub fn header(&self, name: &str) -> Option<&'a str> {
        self.headers.get(name)?.to_str().ok().map(str::trim).filter(|value| !value.is_empty())
    }

    /// The [normalized](crate::http::normal_path) path, for comparisons; `uri.path()` is the path
    /// that was sent.
    pub fn path(&self) -> Cow<'a, str> {
        normal_path(self.uri.path()).unwrap_or(Cow::Borrowed("too long"))
    }

    /// A value in the extensions.
    pub fn extension<T: Clone + Send + Sync + 'static>(&self) -> Option<&'a T> {
        self.extensions.get()
    }

    /// The address of the peer: from [`Peer`] or a `SocketAddr` in the extensions, from axum's
    /// `ConnectInfo` with the feature `axum`, and from tonic's with the feature `tonic`.
    pub fn peer(&self) -> Option<IpAddr> {
        #[cfg(feature = "axum")]
        if let Some(axum::extract::ConnectInfo(peer)) =
            self.extension::<axum::extract::ConnectInfo<SocketAddr>>()
        {
            return Some(peer.ip());
        }
        #[cfg(feature = "tonic")]
        if let Some(info) = self.extension::<tonic::transport::server::TcpConnectInfo>() {
            return info.remote_addr().map(|peer| peer.ip());
        }
        if let Some(Peer(peer)) = self.extension() {
            return Some(*peer);
        }
        self.extension::<SocketAddr>().map(SocketAddr::ip)
    }

    /// Whether it is a gRPC call.
    pub(super) fn is_grpc(&self) -> bool {
        let kind = self.headers.get(::http::header::CONTENT_TYPE);
        kind.is_some_and(|kind| kind.as_bytes().starts_with(b"application/grpc"))
    }
}

/// A response without its body, as functions of rules get it.
///
/// ```
/// use tidegate::tower::{ResponseHead, Rule, key};
/// let tokens = |response: &ResponseHead<'_>| response.number("x-tokens-used");
/// let rule = Rule::new("tokens", "1000/min".parse()?, key::peer_ip()).cost(100).settle(tokens);
/// # Ok::<(), tidegate::ParseError>(())
/// ```
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct ResponseHead<'a> {
    /// The status. gRPC always has 200: see [`grpc_status`](ResponseHead::grpc_status).
    pub status: StatusCode,
    /// The headers.
    pub headers: &'a HeaderMap,
    /// Values that the service has added.
    pub extensions: &'a Extensions,
}

impl<'a> ResponseHead<'a> {
    pub(super) fn of<B>(response: &'a Response<B>) -> Self {
        ResponseHead {
            status: response.status(),
            headers: response.headers(),
            extensions: response.extensions(),
        }
    }

    /// The first value of a header, if it is visible ASCII.
    pub fn header(&self, name: &str) -> Option<&'a str> {
        self.headers.get(name)?.to_str().ok()
    }

    /// The first value of a header, if it is a number.
    pub fn number(&self, name: &str) -> Option<u64> {
        self.header(name)?.trim().parse().ok()
    }

    /// A value in the extensions.
    pub fn extension<T: Clone + Send + Sync + 'static>(&self) -> Option<&'a T> {
        self.extensions.get()
    }

    /// The status code of a gRPC call that failed without a message. A call with messages has its
    /// code in the trailers, which are not part of the head.
    pub fn grpc_status(&self) -> Option<u64> {
        self.number("grpc-status")
    }
}
