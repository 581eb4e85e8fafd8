//! The HTTP server of every protocol over HTTP: HTTP/1.1 and HTTP/2, time limits, tokens, panics and
//! the orderly end.
//!
//! ```text
//! let application = Application::new(router, |_path| May::Check.into());
//! let server = HttpServer::new(application, Protocol::Http, guard, bounds, observer);
//! entrance.receive(shutdown.clone(), move |visitor| server.clone().serve(visitor, shutdown.clone())).await
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

use super::pace::{Awaited, Moved, Pace, Paced};
use super::turns::{Rounds, Turns};
use super::{Bounds, Place, SharedBounds, Visitor};
use crate::auth::{Admission, Caller, Guard, May};
use crate::browser::{self, Foreign, Hosts};
use crate::guesses::seconds;
use crate::observe::Observer;
use crate::observe::metrics::Refusal;
use crate::panics::caught;
use crate::problem::mistake;
use crate::protocol::Protocol;

/// The largest head of a request, in bytes; more is answered with 431.
pub const MAX_HEAD_BYTES: usize = 32 << 10;
/// The longest target of a request, in bytes; more is answered with 414.
pub const MAX_TARGET_BYTES: usize = 8 << 10;
/// Requests at once on one connection of HTTP/2.
pub const MAX_STREAMS: u32 = 256;
/// Requests that the other side took back and that still wait to be noticed; more of them end the
/// connection.
const MAX_TAKEN_BACK: usize = 20;
/// Requests that we took back because of mistakes; more of them end the connection. Whoever asks
/// for twice as much at once as he may is forgiven, as he may not have read yet how much that is.
const MAX_MISTAKEN: usize = MAX_STREAMS as usize;
/// Bytes of answers that wait on one stream.
const MAX_ANSWERS_BYTES: usize = 64 << 10;
/// How long after the order to stop a connection without a request is kept, in case one is on its
/// way. It gets an answer, and the connection ends with it.
const LAST_CALL: Duration = Duration::from_millis(300);

/// Browsers must not guess what kind of thing a body is.
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
    pub async fn serve(self, visitor: Visitor, shutdown: watch::Receiver<bool>) {
        let Visitor { stream, peer, place, .. } = visitor;
        let caller = Arc::new(Caller::at(peer.ip()));
        self.serve_stream(stream, caller, place, shutdown).await;
    }

    /// Serves a stream to its end.
    pub(crate) async fn serve_stream<S>(
        self,
        stream: S,
        caller: Arc<Caller>,
        place: Place,
        mut shutdown: watch::Receiver<bool>,
    ) where
        S: AsyncRead + AsyncWrite + AsFd + Unpin + Send + 'static,
    {
        let (patience, idle) = {
            let bounds = self.inner.bounds.get();
            (bounds.patience, bounds.idle)
        };
        let pace = Arc::new(Pace::default());
        let service = {
            let (server, pace) = (self.clone(), Arc::clone(&pace));
            service_fn(move |request| {
                let (server, pace, caller) =
                    (server.clone(), Arc::clone(&pace), Arc::clone(&caller));
                async move { Ok::<_, Infallible>(server.answer(request, &caller, &pace).await) }
            })
        };
        let io = TokioIo::new(Paced::new(stream, Arc::clone(&pace)));
        let waits = Waits { patience, unread: patience, idle };
        let turns = Turns::default();
        let (builder, mut rounds) =
            (builder(self.inner.protocol, turns.clone()), Rounds::of(turns));
        let left = {
            let connection = pin!(builder.serve_connection(io, service));
            attend(connection, &mut rounds, &pace, waits, &mut shutdown).await
        };
        // Whatever is under way ends with the connection.
        rounds.end().await;
        if left == Left::TooSlow {
            self.refuse(Refusal::Slow);
        }
        if pace.was_flooded() {
            self.refuse(Refusal::Flood);
        }
        if let Some(socket) = pace.misused() {
            place.hold(socket, &mut shutdown).await;
        }
    }

    async fn answer(
        &self,
        mut request: Request<Incoming>,
        caller: &Caller,
        pace: &Arc<Pace>,
    ) -> Response<Body> {
        let _answering = pace.request();
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
                .map_or(Said::Nothing, |token| Said::Token(token.as_bytes()))
        } else {
            Said::by(request.headers().get(header::AUTHORIZATION).map(HeaderValue::as_bytes))
        };
        // Without TLS no browser speaks what gRPC needs, and with it none calls a server by a name
        // that is not in its certificate.
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
        if pace.is_second() {
            return response.map(|body| Awaited::of(body, pace));
        }
        if pace.last.load(Ordering::Relaxed) {
            response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        response
    }

    /// The answer; if there is none because of a mistake of ours, that.
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
                let refused = Refused::new(
                    StatusCode::INTERNAL_SERVER_ERROR,
                    "this is our mistake, not yours",
                );
                self.written(&refused)
            }
        }
    }

    /// Counts a request that is not served, and answers it.
    pub(crate) fn refusal(&self, refused: Refused) -> Response<Body> {
        self.refuse(refused.counted_as);
        self.written(&refused)
    }

    fn written(&self, refused: &Refused) -> Response<Body> {
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

    /// Why a request for this target is not served, if so. `foreign` says whether a web page sent
    /// it; without a token, that decides.
    pub(crate) fn refused(
        &self,
        target: &str,
        said: Said<'_>,
        caller: &Caller,
        foreign: impl FnOnce(&Hosts) -> Option<Foreign>,
    ) -> Option<Refused> {
        if target.len() > MAX_TARGET_BYTES {
            let detail =
                format!("a target of {} bytes: expected at most {MAX_TARGET_BYTES}", target.len());
            return Some(Refused::new(StatusCode::URI_TOO_LONG, detail));
        }
        let guard = &self.inner.guard;
        let path = target.split_once('?').map_or(target, |(path, _)| path);
        let Access { may: needs, by_gateway } = (self.inner.application.access)(path);
        if needs == May::Nothing {
            return None;
        }
        let may = match said {
            _ if !guard.has_tokens() => May::Everything,
            Said::Nothing => guard.without_token(),
            Said::Token(token) => match guard.admit(caller, token) {
                Admission::May(may) if may >= needs => return None,
                Admission::May(_) => {
                    return Some(Refused::new(StatusCode::FORBIDDEN, "this needs the admin token"));
                }
                Admission::Wrong => return Some(Refused::unknown("this token is not known")),
                Admission::Limited(wait) => {
                    self.inner.observer.guessed(self.inner.protocol, caller.ip());
                    return Some(Refused::guessing(wait));
                }
            },
            Said::Something => {
                return Some(Refused::unknown("expected the header Authorization: Bearer TOKEN"));
            }
        };
        if may < needs {
            let header =
                if by_gateway { "X-Tidegate-Token: TOKEN" } else { "Authorization: Bearer TOKEN" };
            return Some(Refused::unknown(format!(
                "this needs a token: expected the header {header}"
            )));
        }
        if by_gateway {
            return None;
        }
        let foreign = foreign(&guard.hosts())?;
        self.inner.observer.foreign(self.inner.protocol, &foreign);
        let refused = Refused::new(StatusCode::FORBIDDEN, foreign.to_string());
        Some(Refused { counted_as: Refusal::Browser, ..refused })
    }
}

async fn route(mut router: Router, request: Request<Incoming>) -> Response<Body> {
    let Ok(response) = router.call(request.map(Body::new)).await;
    response
}

/// A request that is not served.
#[derive(Debug)]
pub(crate) struct Refused {
    status: StatusCode,
    detail: Cow<'static, str>,
    counted_as: Refusal,
    retry_after: Option<Duration>,
}

impl Refused {
    fn new(status: StatusCode, detail: impl Into<Cow<'static, str>>) -> Self {
        Refused { status, detail: detail.into(), counted_as: Refusal::Token, retry_after: None }
    }

    fn unknown(detail: impl Into<Cow<'static, str>>) -> Self {
        Self::new(StatusCode::UNAUTHORIZED, detail)
    }

    /// Not 429, which is a decision.
    fn guessing(wait: Duration) -> Self {
        let refused = Self::unknown(crate::guesses::advice(wait));
        Refused { counted_as: Refusal::Guessing, retry_after: Some(wait), ..refused }
    }
}

/// How long whoever is connected may take.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Waits {
    /// For a head that has begun.
    pub(crate) patience: Duration,
    /// To take more of an answer.
    pub(crate) unread: Duration,
    /// Without a request.
    pub(crate) idle: Duration,
}

/// How a connection ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Left {
    /// In order.
    Done,
    /// It was cut off, because it took too long.
    TooSlow,
}

/// Lets a connection be served to its end: in order, or because it stands still, or because the
/// house closes.
pub(crate) async fn attend<C: GracefulConnection>(
    mut connection: Pin<&mut C>,
    rounds: &mut Rounds,
    pace: &Pace,
    waits: Waits,
    shutdown: &mut watch::Receiver<bool>,
) -> Left {
    let Waits { patience, unread, idle } = waits;
    // Two looks without a move are at most `patience` apart from its beginning.
    let tick = patience / 2;
    let mut bell = pin!(sleep(tick));
    let (mut seen, mut down, mut closing) = (pace.look(), false, false);
    let (mut quiet, mut full) = (Duration::ZERO, Duration::ZERO);
    loop {
        tokio::select! {
            _ = poll_fn(|context| {
                pace.begin_turn();
                rounds.poll(connection.as_mut(), context)
            }) => return Left::Done,
            () = bell.as_mut() => {
                let now = pace.look();
                let moved = now.since(seen);
                full = if moved == Moved::Unread { full + tick } else { Duration::ZERO };
                quiet = if moved == Moved::Idle { quiet + tick } else { Duration::ZERO };
                // What is seen to stand still has done so since the last look.
                if moved == Moved::Stuck || full > Duration::ZERO && full + tick >= unread {
                    return Left::TooSlow;
                }
                if closing && quiet > tick {
                    return Left::Done;
                }
                if !closing && (down || quiet >= idle) {
                    connection.as_mut().graceful_shutdown();
                    closing = true;
                }
                seen = now;
                bell.as_mut().reset(Instant::now() + tick);
            }
            _ = shutdown.wait_for(|down| *down), if !down => {
                down = true;
                pace.last.store(true, Ordering::Relaxed);
                bell.as_mut().reset(Instant::now() + LAST_CALL.min(tick));
            }
        }
    }
}

/// How connections are served at a listener.
pub(crate) fn builder(protocol: Protocol, turns: Turns) -> auto::Builder<Turns> {
    let mut builder = auto::Builder::new(turns);
    // How long things may take is watched here. At most a hundred headers is hyper's own bound.
    builder.http1().half_close(true).header_read_timeout(None).max_buf_size(MAX_HEAD_BYTES);
    builder
        .http2()
        .max_concurrent_streams(MAX_STREAMS)
        .max_header_list_size(u32::try_from(MAX_HEAD_BYTES).unwrap_or(u32::MAX))
        .max_pending_accept_reset_streams(MAX_TAKEN_BACK)
        .max_local_error_reset_streams(MAX_MISTAKEN)
        .max_send_buf_size(MAX_ANSWERS_BYTES);
    if protocol == Protocol::Proxy {
        // Whoever has gone does not wait for an answer: the upstream need not go on with it.
        builder.http1().half_close(false);
    }
    if protocol == Protocol::Grpc { builder.http2_only() } else { builder }
}

/// What somebody says to be let in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Said<'a> {
    Nothing,
    Token(&'a [u8]),
    /// Something else than a token.
    Something,
}

impl<'a> Said<'a> {
    /// What `Authorization` says.
    pub(crate) fn by(authorization: Option<&'a [u8]>) -> Self {
        match authorization {
            None => Said::Nothing,
            Some(value) => bearer_token(value).map_or(Said::Something, Said::Token),
        }
    }
}
