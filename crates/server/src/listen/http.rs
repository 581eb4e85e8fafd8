//! The hall behind a listener that speaks HTTP: its bounds, tokens, panics, and the end.
//!
//! [`Hall::talk`] serves one visitor with a router, HTTP/1.1 or HTTP/2 as the visitor speaks. gRPC
//! is HTTP/2 and uses it, too:
//!
//! ```text
//! let hall = Hall::new(routes.into_axum_router(), Protocol::Grpc, guard, bounds, observer, |_| May::Check);
//! entrance.receive(shutdown.clone(), move |visitor| hall.clone().talk(visitor, shutdown.clone())).await
//! ```

use std::borrow::Cow;
use std::convert::Infallible;
use std::future::{Future, poll_fn};
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
use tokio::sync::watch;
use tokio::time::{Instant, sleep};
use tower_service::Service;

use super::pace::{Awaited, Moved, Pace, Paced};
use super::quick::Begun;
use super::turns::{Rounds, Turns};
use super::{SharedBounds, Visitor};
use crate::auth::{Admission, Caller, Guard, May};
use crate::browser::{self, Foreign, Hosts};
use crate::engine::Engine;
use crate::grpc::Unary;
use crate::guesses::seconds;
use crate::http::{AUTH_PATH, Brief, Peer, READY_PATH, TOKEN, Verb, decide, mistake};
use crate::observe::Observer;
use crate::observe::metrics::Refusal;
use crate::panics::caught;
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

/// Serves visitors with a router. Cheap to clone.
#[derive(Clone)]
pub struct Hall {
    inner: Arc<Inner>,
}

impl std::fmt::Debug for Hall {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Hall").field("listener", &self.inner.protocol).finish_non_exhaustive()
    }
}

struct Inner {
    router: Router,
    protocol: Protocol,
    guard: Arc<Guard>,
    bounds: SharedBounds,
    observer: Observer,
    needs: fn(&str) -> May,
    /// Whom questions are asked that go the [short way](super::quick), if any do.
    desk: Option<Engine>,
    /// Who answers the usual call of gRPC before the router is asked.
    unary: Option<Unary>,
}

impl Hall {
    /// A hall; `needs` says what somebody must be allowed who asks for a path.
    pub fn new(
        router: Router,
        protocol: Protocol,
        guard: Arc<Guard>,
        bounds: impl Into<SharedBounds>,
        observer: Observer,
        needs: fn(&str) -> May,
    ) -> Self {
        let bounds = bounds.into();
        Hall {
            inner: Arc::new(Inner {
                router,
                protocol,
                guard,
                bounds,
                observer,
                needs,
                desk: None,
                unary: None,
            }),
        }
    }

    /// The same hall, in which the usual call of gRPC goes a shorter way.
    pub(crate) fn with_unary(mut self, unary: Unary) -> Self {
        if let Some(inner) = Arc::get_mut(&mut self.inner) {
            inner.unary = Some(unary);
        }
        self
    }

    /// The same hall, in which questions to this gate go a shorter way.
    pub(crate) fn with_short_way(mut self, engine: Engine) -> Self {
        if let Some(inner) = Arc::get_mut(&mut self.inner) {
            inner.desk = Some(engine);
        }
        self
    }

    /// What the engine says to a question.
    pub(super) async fn ask(
        &self,
        verb: Verb,
        body: &[u8],
        accept: Option<&[u8]>,
    ) -> Response<Body> {
        match &self.inner.desk {
            Some(engine) => decide(engine, verb, body, accept).await,
            None => mistake(StatusCode::NOT_FOUND, "no such path"),
        }
    }

    pub(super) fn refuse(&self, why: Refusal) {
        self.inner.observer.metrics().refused(self.inner.protocol, why);
    }

    /// Serves one visitor to the end.
    pub async fn talk(self, visitor: Visitor, mut shutdown: watch::Receiver<bool>) {
        let Visitor { mut stream, peer, place, .. } = visitor;
        let (patience, idle) = {
            let bounds = self.inner.bounds.get();
            (bounds.patience, bounds.idle)
        };
        let caller = Arc::new(Caller::at(peer.ip()));
        let bytes = match self.inner.desk {
            None => Vec::new(),
            Some(_) => {
                match self.talk_briefly(&mut stream, &caller, (patience, idle), &mut shutdown).await
                {
                    Some(bytes) => bytes,
                    None => return,
                }
            }
        };
        let stream = Begun { bytes, at: 0, stream };
        let pace = Arc::new(Pace::default());
        let service = {
            let (hall, pace) = (self.clone(), Arc::clone(&pace));
            service_fn(move |request| {
                let (hall, pace, caller) = (hall.clone(), Arc::clone(&pace), Arc::clone(&caller));
                async move { Ok::<_, Infallible>(hall.answer(request, &caller, &pace).await) }
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
        let speaks_for_others = !is_grpc && request.uri().path() == AUTH_PATH;
        if speaks_for_others {
            request.extensions_mut().insert(Peer(caller.ip()));
        }
        let target = request.uri().path_and_query().map_or("", |target| target.as_str());
        let said = if speaks_for_others {
            // What the gateway was sent as authorization is no secret of ours, and must not be
            // taken for a guess at one.
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
                let is_brief = !is_grpc
                    && request.uri().path() == READY_PATH
                    && browser::foreign(
                        Some(&self.inner.guard.hosts()),
                        request.uri(),
                        request.headers(),
                    )
                    .is_some();
                if is_brief {
                    request.extensions_mut().insert(Brief);
                }
                self.unless_it_panics(self.serve(request)).await
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
    pub(super) async fn unless_it_panics(
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

    async fn serve(&self, request: Request<Incoming>) -> Response<Body> {
        let request = match &self.inner.unary {
            None => request.map(Body::new),
            Some(unary) => match unary.answer(request).await {
                Ok(response) => return response,
                Err(request) => request,
            },
        };
        let Ok(response) = self.inner.router.clone().call(request).await;
        response
    }

    /// Counts a request that is not served, and answers it.
    pub(super) fn refusal(&self, refused: Refused) -> Response<Body> {
        self.refuse(refused.counted_as);
        self.written(&refused)
    }

    /// Clients of gRPC do not look at the status of HTTP.
    fn written(&self, refused: &Refused) -> Response<Body> {
        if self.inner.protocol == Protocol::Grpc {
            return crate::grpc::refusal(refused.status, &refused.detail);
        }
        let mut response = mistake(refused.status, &refused.detail);
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
    pub(super) fn refused(
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
        let needs = (self.inner.needs)(path);
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
            let header = if path == AUTH_PATH {
                "X-Tidegate-Token: TOKEN"
            } else {
                "Authorization: Bearer TOKEN"
            };
            return Some(Refused::unknown(format!(
                "this needs a token: expected the header {header}"
            )));
        }
        if path == AUTH_PATH {
            // A gateway passes on what its client sent, and is known by its address.
            return None;
        }
        let foreign = foreign(&guard.hosts())?;
        self.inner.observer.foreign(self.inner.protocol, &foreign);
        let refused = Refused::new(StatusCode::FORBIDDEN, foreign.to_string());
        Some(Refused { counted_as: Refusal::Browser, ..refused })
    }
}

/// A request that is not served.
#[derive(Debug)]
pub(super) struct Refused {
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
pub(super) enum Said<'a> {
    Nothing,
    Token(&'a [u8]),
    /// Something else than a token.
    Something,
}

impl<'a> Said<'a> {
    /// What `Authorization` says.
    pub(super) fn by(authorization: Option<&'a [u8]>) -> Self {
        match authorization {
            None => Said::Nothing,
            Some(value) => bearer_token(value).map_or(Said::Something, Said::Token),
        }
    }
}
