//! What a rule sees of a request and of a response: everything but the body.

use std::borrow::Cow;
use std::net::{IpAddr, SocketAddr};

use ::http::{Extensions, HeaderMap, Method, Request, Response, StatusCode, Uri};

use crate::http::normal_path;

/// A request without its body.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Head<'a> {
    /// The method.
    pub method: &'a Method,
    /// The target, as it came.
    pub uri: &'a Uri,
    /// The headers.
    pub headers: &'a HeaderMap,
    /// What servers and other layers have put beside it.
    pub extensions: &'a Extensions,
}

/// The address of the other end, for servers that know it by another name: put it into the
/// request's extensions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Peer(pub IpAddr);

impl<'a> Head<'a> {
    pub(super) fn of<B>(request: &'a Request<B>) -> Self {
        Head {
            method: request.method(),
            uri: request.uri(),
            headers: request.headers(),
            extensions: request.extensions(),
        }
    }

    /// The first value of a header, if it is readable text and not empty; without white space
    /// around it. A service may read another line, if there are several:
    /// [`key::header`](super::key::header) refuses such requests.
    pub fn header(&self, name: &str) -> Option<&'a str> {
        self.headers.get(name)?.to_str().ok().map(str::trim).filter(|value| !value.is_empty())
    }

    /// The path in its [one spelling](crate::http::normal_path): what to compare, where
    /// `uri.path()` is what was sent.
    pub fn path(&self) -> Cow<'a, str> {
        normal_path(self.uri.path()).unwrap_or(Cow::Borrowed("too long"))
    }

    /// Something in the extensions: what another layer has found out.
    pub fn extension<T: Clone + Send + Sync + 'static>(&self) -> Option<&'a T> {
        self.extensions.get()
    }

    /// The address of the other end: from [`Peer`] or a `SocketAddr` in the extensions, from axum's
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

    /// Whether it is a call of gRPC.
    pub(super) fn is_grpc(&self) -> bool {
        let kind = self.headers.get(::http::header::CONTENT_TYPE);
        kind.is_some_and(|kind| kind.as_bytes().starts_with(b"application/grpc"))
    }
}

/// A response without its body.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct ResponseHead<'a> {
    /// The status. Of gRPC it is always 200: see [`grpc_status`](ResponseHead::grpc_status).
    pub status: StatusCode,
    /// The headers.
    pub headers: &'a HeaderMap,
    /// What the service has put beside it.
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

    /// The first value of a header, if it is readable text.
    pub fn header(&self, name: &str) -> Option<&'a str> {
        self.headers.get(name)?.to_str().ok()
    }

    /// The first value of a header, if it is a number.
    pub fn number(&self, name: &str) -> Option<u64> {
        self.header(name)?.trim().parse().ok()
    }

    /// Something in the extensions.
    pub fn extension<T: Clone + Send + Sync + 'static>(&self) -> Option<&'a T> {
        self.extensions.get()
    }

    /// The code of a gRPC call that failed before it had anything to say. One that says something
    /// tells its code only at its end.
    pub fn grpc_status(&self) -> Option<u64> {
        self.number("grpc-status")
    }
}
