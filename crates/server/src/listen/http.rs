//! The HTTP server of every protocol over HTTP: HTTP/1.1 and HTTP/2, time limits, tokens, panics and
//! the orderly end.
//!
//! ```text
//! let application = Application::new(router, |_path| May::Check.into());
//! let server = HttpServer::new(application, Protocol::Http, guard, bounds, observer);
//! listener.serve(shutdown.clone(), move |connection| server.clone().serve(connection, shutdown.clone())).await
//! ```

use std::borrow::Cow;
use std::convert::Infallible;
use std::future::{Future, poll_fn};
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::{HeaderName, HeaderValue, Request, Response, StatusCode, header};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use hyper_util::server::conn::auto;
use hyper_util::server::graceful::GracefulConnection;
use tidegate::http::bearer_token;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::watch;
use tokio::time::{Instant, sleep};
use tower_service::Service;

use super::progress::{Movement, Progress, Tracked, TrackedBody};
use super::scheduler::{RequestQueue, RequestScheduler};
use super::{Bounds, Connection, ConnectionSlot, SharedBounds};
use crate::auth::{Admission, Caller, Guard, May};
use crate::browser::{self, Foreign, Hosts};
use crate::guesses::seconds;
use crate::observe::Observer;
use crate::observe::metrics::Refusal;
use crate::panics::caught;
use crate::problem::mistake;
use crate::protocol::Protocol;

/// The largest head of a request, in bytes. A larger one gets 431.
pub const MAX_HEAD_BYTES: usize = 32 << 10;
/// The longest target of a request, in bytes. A longer one gets 414.
pub const MAX_TARGET_BYTES: usize = 8 << 10;
/// Concurrent requests on one HTTP/2 connection.
pub const MAX_STREAMS: u32 = 256;
/// Requests that the client reset and that are not yet cleaned up; more of them end the connection.
const MAX_TAKEN_BACK: usize = 20;
/// Requests that the server reset because of errors; more of them end the connection. A client that
/// starts twice the allowed number is accepted, as it may not have read the setting yet.
const MAX_MISTAKEN: usize = MAX_STREAMS as usize;
/// Bytes buffered for one stream.
const MAX_ANSWERS_BYTES: usize = 64 << 10;
/// How long an idle connection is kept after shutdown has begun, in case a request is on its way.
/// That request is answered and is the last.
const LAST_CALL: Duration = Duration::from_millis(300);

/// Keeps browsers from guessing the type of a body.
pub(crate) const NO_SNIFF: (HeaderName, HeaderValue) =
    (header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));

/// The header with the token of a gateway, whose `Authorization` is that of its client.
pub(crate) const TOKEN: HeaderName = HeaderName::from_static("x-tidegate-token");

/// The address of the peer, in the extensions of a request by a gateway.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PeerAddress(pub(crate) IpAddr);

/// What a protocol over HTTP brings to an [`HttpServer`].
#[derive(Clone)]
pub struct Application {
    /// Answers requests.
    pub router: Router,
    /// What a request for this path needs.
    pub access: fn(&str) -> Access,
    /// Answers a request that is not served, with the status that HTTP has for the reason.
    pub refusal: fn(StatusCode, &str) -> Response<Body>,
}

impl Application {
    /// An application whose refusals are problems in JSON.
    pub fn new(router: Router, access: fn(&str) -> Access) -> Self {
        Application { router, access, refusal: mistake }
    }
}

/// What a request for a path needs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Access {
    /// What the token must allow, where there are tokens.
    pub may: May,
    /// The caller is a gateway, which forwards what its client sent. Its token is in
    /// `X-Tidegate-Token`, and headers that browsers set are not about this request.
    pub by_gateway: bool,
}

impl From<May> for Access {
    fn from(may: May) -> Self {
        Access { may, by_gateway: false }
    }
}

/// Serves connections with an [`Application`]. Cheap to clone.
#[derive(Clone)]
pub struct HttpServer {
    inner: Arc<HttpServerInner>,
}

impl std::fmt::Debug for HttpServer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HttpServer").field("listener", &self.inner.protocol).finish_non_exhaustive()
    }
}

struct HttpServerInner {
    application: Application,
    protocol: Protocol,
    guard: Arc<Guard>,
    bounds: SharedBounds,
    observer: Observer,
}

impl HttpServer {
    /// Serves this application at a listener of this protocol.
    pub fn new(
        application: Application,
        protocol: Protocol,
        guard: Arc<Guard>,
        bounds: impl Into<SharedBounds>,
        observer: Observer,
    ) -> Self {
        let bounds = bounds.into();
        HttpServer {
            inner: Arc::new(HttpServerInner { application, protocol, guard, bounds, observer }),
        }
    }

    /// The time limits of this listener.
    pub(crate) fn bounds(&self) -> Arc<Bounds> {
        Arc::clone(&self.inner.bounds.get())
    }

    pub(crate) fn refuse(&self, why: Refusal) {
        self.inner.observer.metrics().refused(self.inner.protocol, why);
    }

    /// Serves a connection to its end.
    pub async fn serve(self, connection: Connection, shutdown: watch::Receiver<bool>) {
        let Connection { stream, peer, slot, .. } = connection;
        let caller = Arc::new(Caller::at(peer.ip()));
        self.serve_stream(stream, caller, slot, shutdown).await;
    }

    /// Serves a stream to its end.
    pub(crate) async fn serve_stream<S>(
        self,
        stream: S,
        caller: Arc<Caller>,
        slot: ConnectionSlot,
        mut shutdown: watch::Receiver<bool>,
    ) where
        S: AsyncRead + AsyncWrite + AsFd + Unpin + Send + 'static,
    {
        let (patience, idle) = {
            let bounds = self.inner.bounds.get();
            (bounds.patience, bounds.idle)
        };
        let progress = Arc::new(Progress::default());
        let service = {
            let (server, progress) = (self.clone(), Arc::clone(&progress));
            service_fn(move |request| {
                let (server, progress, caller) =
                    (server.clone(), Arc::clone(&progress), Arc::clone(&caller));
                async move { Ok::<_, Infallible>(server.answer(request, &caller, &progress).await) }
            })
        };
        let io = TokioIo::new(Tracked::new(stream, Arc::clone(&progress)));
        let waits = Timeouts { patience, unread: patience, idle };
        let queue = RequestQueue::default();
        let (builder, mut scheduler) =
            (builder(self.inner.protocol, queue.clone()), RequestScheduler::of(queue));
        let left = {
            let connection = pin!(builder.serve_connection(io, service));
            drive(connection, &mut scheduler, &progress, waits, &mut shutdown).await
        };
        // Open requests end with the connection.
        scheduler.end().await;
        if left == Ending::TooSlow {
            self.refuse(Refusal::Slow);
        }
        if progress.was_flooded() {
            self.refuse(Refusal::Flood);
        }
        if let Some(socket) = progress.abused_socket() {
            slot.hold(socket, &mut shutdown).await;
        }
    }

    async fn answer(
        &self,
        mut request: Request<Incoming>,
        caller: &Caller,
        progress: &Arc<Progress>,
    ) -> Response<Body> {
        let _answering = progress.request();
        let is_grpc = self.inner.protocol == Protocol::Grpc;
        let by_gateway = (self.inner.application.access)(request.uri().path()).by_gateway;
        if by_gateway {
            request.extensions_mut().insert(PeerAddress(caller.ip()));
        }
        let target = request.uri().path_and_query().map_or("", |target| target.as_str());
        let said = if by_gateway {
            // `Authorization` is that of the gateway's client: it must not count as a guess at a
            // token of this server.
            request
                .headers()
                .get(TOKEN)
                .map_or(Credentials::Nothing, |token| Credentials::Token(token.as_bytes()))
        } else {
            Credentials::by(request.headers().get(header::AUTHORIZATION).map(HeaderValue::as_bytes))
        };
        // gRPC needs HTTP/2: without TLS no browser speaks it, and with TLS a browser only calls
        // the names in the certificate.
        let foreign = |hosts: &Hosts| {
            browser::foreign(Some(hosts).filter(|_| !is_grpc), request.uri(), request.headers())
        };
        let mut response = match self.refused(target, said, caller, foreign) {
            Some(refused) => self.refusal(refused),
            None => {
                let router = self.inner.application.router.clone();
                self.unless_it_panics(route(router, request)).await
            }
        };
        if !is_grpc {
            let (name, value) = NO_SNIFF;
            response.headers_mut().insert(name, value);
        }
        if progress.is_http2() {
            return response.map(|body| TrackedBody::of(body, progress));
        }
        if progress.last.load(Ordering::Relaxed) {
            response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        response
    }

    /// The response, or 500 if the future panics.
    pub(crate) async fn unless_it_panics(
        &self,
        answer: impl Future<Output = Response<Body>>,
    ) -> Response<Body> {
        match caught(answer).await {
            Some(response) => response,
            None => {
                self.inner.observer.metrics().panicked();
                self.inner
                    .observer
                    .log()
                    .error("a request panicked", &[("listener", &self.inner.protocol.name())]);
                let refused = Rejection::new(
                    StatusCode::INTERNAL_SERVER_ERROR,
                    "internal error; the request itself may be valid",
                );
                self.written(&refused)
            }
        }
    }

    /// Counts and answers a rejected request.
    pub(crate) fn refusal(&self, refused: Rejection) -> Response<Body> {
        self.refuse(refused.counted_as);
        self.written(&refused)
    }

    fn written(&self, refused: &Rejection) -> Response<Body> {
        let mut response = (self.inner.application.refusal)(refused.status, &refused.detail);
        if self.inner.protocol == Protocol::Grpc {
            return response;
        }
        if refused.status == StatusCode::UNAUTHORIZED {
            response
                .headers_mut()
                .insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if let Some(wait) = refused.retry_after {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds(wait)));
        }
        response
    }

    /// Why a request for this target is rejected, if it is. `foreign` checks whether a web page
    /// sent it; only a request without a token depends on it.
    pub(crate) fn refused(
        &self,
        target: &str,
        said: Credentials<'_>,
        caller: &Caller,
        foreign: impl FnOnce(&Hosts) -> Option<Foreign>,
    ) -> Option<Rejection> {
        if target.len() > MAX_TARGET_BYTES {
            let detail =
                format!("a target of {} bytes: expected at most {MAX_TARGET_BYTES}", target.len());
            return Some(Rejection::new(StatusCode::URI_TOO_LONG, detail));
        }
        let guard = &self.inner.guard;
        let path = target.split_once('?').map_or(target, |(path, _)| path);
        let Access { may: needs, by_gateway } = (self.inner.application.access)(path);
        if needs == May::Nothing {
            return None;
        }
        let may = match said {
            _ if !guard.has_tokens() => May::Everything,
            Credentials::Nothing => guard.without_token(),
            Credentials::Token(token) => match guard.admit(caller, token) {
                Admission::May(may) if may >= needs => return None,
                Admission::May(_) => {
                    return Some(Rejection::new(
                        StatusCode::FORBIDDEN,
                        "this needs the admin token",
                    ));
                }
                Admission::Wrong => return Some(Rejection::unknown("this token is not known")),
                Admission::Limited(wait) => {
                    self.inner.observer.guessed(self.inner.protocol, caller.ip());
                    return Some(Rejection::guessing(wait));
                }
            },
            Credentials::Something => {
                return Some(Rejection::unknown("expected the header Authorization: Bearer TOKEN"));
            }
        };
        if may < needs {
            let header =
                if by_gateway { "X-Tidegate-Token: TOKEN" } else { "Authorization: Bearer TOKEN" };
            return Some(Rejection::unknown(format!(
                "this needs a token: expected the header {header}"
            )));
        }
        if by_gateway {
            return None;
        }
        let foreign = foreign(&guard.hosts())?;
        self.inner.observer.foreign(self.inner.protocol, &foreign);
        let refused = Rejection::new(StatusCode::FORBIDDEN, foreign.to_string());
        Some(Rejection { counted_as: Refusal::Browser, ..refused })
    }
}

async fn route(mut router: Router, request: Request<Incoming>) -> Response<Body> {
    let Ok(response) = router.call(request.map(Body::new)).await;
    response
}

/// Why a request is rejected.
#[derive(Debug)]
pub(crate) struct Rejection {
    status: StatusCode,
    detail: Cow<'static, str>,
    counted_as: Refusal,
    retry_after: Option<Duration>,
}

impl Rejection {
    fn new(status: StatusCode, detail: impl Into<Cow<'static, str>>) -> Self {
        Rejection { status, detail: detail.into(), counted_as: Refusal::Token, retry_after: None }
    }

    fn unknown(detail: impl Into<Cow<'static, str>>) -> Self {
        Self::new(StatusCode::UNAUTHORIZED, detail)
    }

    /// 401, not 429: a 429 is a decision.
    fn guessing(wait: Duration) -> Self {
        let refused = Self::unknown(crate::guesses::advice(wait));
        Rejection { counted_as: Refusal::Guessing, retry_after: Some(wait), ..refused }
    }
}

/// The time limits of a connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Timeouts {
    /// For the rest of a head that has begun to arrive.
    pub(crate) patience: Duration,
    /// For reading more of a response.
    pub(crate) unread: Duration,
    /// Without a request.
    pub(crate) idle: Duration,
}

/// How a connection ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Ending {
    /// It was closed in order.
    Done,
    /// It was closed because it stalled.
    TooSlow,
}

/// Serves a connection until it ends, stalls, or shutdown begins.
pub(crate) async fn drive<C: GracefulConnection>(
    mut connection: Pin<&mut C>,
    scheduler: &mut RequestScheduler,
    progress: &Progress,
    waits: Timeouts,
    shutdown: &mut watch::Receiver<bool>,
) -> Ending {
    let Timeouts { patience, unread, idle } = waits;
    // Two snapshots without progress are at most `patience` apart from its start.
    let tick = patience / 2;
    let mut timer = pin!(sleep(tick));
    let (mut seen, mut down, mut closing) = (progress.snapshot(), false, false);
    let (mut quiet, mut full) = (Duration::ZERO, Duration::ZERO);
    loop {
        tokio::select! {
            _ = poll_fn(|context| {
                progress.begin_turn();
                scheduler.poll(connection.as_mut(), context)
            }) => return Ending::Done,
            () = timer.as_mut() => {
                let now = progress.snapshot();
                let moved = now.since(seen);
                full = if moved == Movement::Unread { full + tick } else { Duration::ZERO };
                quiet = if moved == Movement::Idle { quiet + tick } else { Duration::ZERO };
                // A connection that stalls has done so since the last snapshot.
                if moved == Movement::Stuck || full > Duration::ZERO && full + tick >= unread {
                    return Ending::TooSlow;
                }
                if closing && quiet > tick {
                    return Ending::Done;
                }
                if !closing && (down || quiet >= idle) {
                    connection.as_mut().graceful_shutdown();
                    closing = true;
                }
                seen = now;
                timer.as_mut().reset(Instant::now() + tick);
            }
            _ = shutdown.wait_for(|down| *down), if !down => {
                down = true;
                progress.last.store(true, Ordering::Relaxed);
                timer.as_mut().reset(Instant::now() + LAST_CALL.min(tick));
            }
        }
    }
}

/// The hyper builder of a listener.
pub(crate) fn builder(protocol: Protocol, queue: RequestQueue) -> auto::Builder<RequestQueue> {
    let mut builder = auto::Builder::new(queue);
    // `drive` has the time limits. 100 headers is the limit of hyper.
    builder.http1().half_close(true).header_read_timeout(None).max_buf_size(MAX_HEAD_BYTES);
    builder
        .http2()
        .max_concurrent_streams(MAX_STREAMS)
        .max_header_list_size(u32::try_from(MAX_HEAD_BYTES).unwrap_or(u32::MAX))
        .max_pending_accept_reset_streams(MAX_TAKEN_BACK)
        .max_local_error_reset_streams(MAX_MISTAKEN)
        .max_send_buf_size(MAX_ANSWERS_BYTES);
    if protocol == Protocol::Proxy {
        // A client that has closed does not wait for its response, so the upstream request is
        // dropped.
        builder.http1().half_close(false);
    }
    if protocol == Protocol::Grpc { builder.http2_only() } else { builder }
}

/// The credentials of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Credentials<'a> {
    Nothing,
    Token(&'a [u8]),
    /// Not a bearer token.
    Something,
}

impl<'a> Credentials<'a> {
    /// The credentials in an `Authorization` header.
    pub(crate) fn by(authorization: Option<&'a [u8]>) -> Self {
        match authorization {
            None => Credentials::Nothing,
            Some(value) => bearer_token(value).map_or(Credentials::Something, Credentials::Token),
        }
    }
}
