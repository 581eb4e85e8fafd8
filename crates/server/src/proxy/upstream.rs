//! The upstream: a request goes there, and the head of a response comes back.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::http::header::{CONNECTION, HOST, TE, TRANSFER_ENCODING, UPGRADE};
use axum::http::{HeaderValue, Request, Response, StatusCode, Uri, Version, request, uri};
use hyper::body::{Body, Incoming};
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use super::body::{Progress, Reading, Returned, Sent};
use super::first::{Line, Pool, Unanswered};
use super::head;
use super::second::{self, Shared};
use super::settings::{ProxySettings, Speech};

/// How often a request that was not sent is tried anew, on another connection.
pub(super) const TRIES: usize = 3;

/// A request that was sent already, and its place among those that are under way.
#[derive(Debug)]
pub(super) struct Begun {
    pub(super) line: Line,
    pub(super) place: OwnedSemaphorePermit,
}

/// Everything that leads to the upstream.
#[derive(Debug)]
pub(super) struct Upstreams {
    pub(super) settings: ProxySettings,
    pub(super) pool: Pool,
    shared: Shared,
    places: Arc<Semaphore>,
}

/// Why there is no response.
#[derive(Debug, thiserror::Error)]
pub(super) enum Failed {
    #[error("too many requests are at the upstream already: try again in a moment")]
    Busy,
    #[error("cannot connect to the upstream: {0}")]
    Connect(io::Error),
    #[error("the upstream did not take the connection within {} ms", .0.as_millis())]
    ConnectTimeout(Duration),
    #[error("the upstream did not begin to answer within {} seconds", .0.as_secs())]
    AnswerTimeout(Duration),
    #[error("the body of the request stood still for too long")]
    BodyTimeout,
    #[error("the body of the request did not arrive whole")]
    BodyLost,
    #[error("the upstream has closed the connection without an answer")]
    Closed,
    #[error("the upstream answered with something that is not HTTP")]
    NotHttp,
    #[error("the target cannot be put behind the path of the upstream")]
    Target,
    #[error("the connection to the upstream failed: {0}")]
    Lost(#[from] hyper::Error),
}

impl Failed {
    pub(super) fn status(&self) -> StatusCode {
        match self {
            Failed::Busy => StatusCode::SERVICE_UNAVAILABLE,
            Failed::ConnectTimeout(_) | Failed::AnswerTimeout(_) => StatusCode::GATEWAY_TIMEOUT,
            Failed::BodyTimeout => StatusCode::REQUEST_TIMEOUT,
            Failed::BodyLost | Failed::Target => StatusCode::BAD_REQUEST,
            Failed::Connect(_) | Failed::Closed | Failed::NotHttp | Failed::Lost(_) => StatusCode::BAD_GATEWAY,
        }
    }

    /// Whether it is the upstream that failed.
    pub(super) fn is_upstreams(&self) -> bool {
        !matches!(self, Failed::BodyTimeout | Failed::BodyLost | Failed::Target)
    }
}

/// The head of a response, with what its body is read by.
pub(super) enum Answer {
    /// A response.
    Http(Response<Returned>),
    /// Something else is spoken from now on.
    Upgraded(Response<()>, Line),
}

impl Upstreams {
    pub(super) fn new(settings: ProxySettings) -> Self {
        let pool = Pool::new(settings.keep, settings.keep_idle);
        let places = Arc::new(Semaphore::new(settings.max_in_flight.min(Semaphore::MAX_PERMITS)));
        Upstreams { settings, pool, shared: Shared::default(), places }
    }

    /// Whether requests over HTTP/1.1 can go the short way.
    pub(super) fn are_near(&self) -> bool {
        self.settings.short_way && self.settings.upstream.speech == Speech::First
    }

    /// Sends a request whose head is ready but for what depends on the upstream; if it was sent already, waits for the response alone.
    pub(super) async fn ask(
        self: &Arc<Self>,
        mut head: request::Parts,
        body: Incoming,
        host: Option<&HeaderValue>,
        upgrade: Option<HeaderValue>,
        begun: Option<Begun>,
    ) -> Result<Answer, Failed> {
        let (line, place) = match begun {
            Some(Begun { line, place }) => (Some(line), place),
            None => (None, self.place().await?),
        };
        let target = head::target(&head.uri, &self.settings.upstream.base).ok_or(Failed::Target)?;
        let (sent, progress) = Sent::new(body, self.settings.idle);
        match self.settings.upstream.speech {
            Speech::First => {
                head::direct(&mut head, target, host);
                let headers = &mut head.headers;
                if headers.contains_key(TE) {
                    headers.insert(CONNECTION, HeaderValue::from_static("te"));
                }
                if !sent.is_end_stream() && sent.size_hint().exact().is_none() {
                    headers.insert(TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
                }
                let upgrades = upgrade.is_some();
                if let Some(protocol) = upgrade {
                    headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
                    headers.insert(UPGRADE, protocol);
                }
                self.ask_first(Request::from_parts(head, sent), &progress, place, upgrades, line).await
            }
            Speech::Second => {
                let authority = host.and_then(|host| host.to_str().ok()?.parse::<uri::Authority>().ok());
                let uri = Uri::builder().scheme("http").path_and_query(target);
                let own = || self.settings.upstream.authority();
                head.uri = uri
                    .authority(authority.map_or_else(own, |it| it.to_string()))
                    .build()
                    .map_err(|_| Failed::Target)?;
                head.version = Version::HTTP_2;
                head.headers.remove(HOST);
                self.ask_second(Request::from_parts(head, sent), &progress, place).await
            }
        }
    }

    /// A place, if there is one.
    pub(super) fn place_at_once(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.places).try_acquire_owned().ok()
    }

    async fn place(&self) -> Result<OwnedSemaphorePermit, Failed> {
        match self.place_at_once() {
            Some(place) => Ok(place),
            None => {
                let waited = timeout(self.settings.connect, Arc::clone(&self.places).acquire_owned()).await;
                waited.ok().and_then(Result::ok).ok_or(Failed::Busy)
            }
        }
    }

    async fn ask_first(
        self: &Arc<Self>,
        mut request: Request<Sent>,
        progress: &Progress,
        place: OwnedSemaphorePermit,
        upgrades: bool,
        mut begun: Option<Line>,
    ) -> Result<Answer, Failed> {
        for _ in 0..TRIES {
            let mut line = match begun.take() {
                Some(line) => line,
                None => match self.pool.take() {
                    Some(kept) => kept.into_line().await?,
                    None => Line::on(self.connect().await?).await?,
                },
            };
            match self.in_time(line.ask(request), progress).await? {
                Ok(response) if response.status() == StatusCode::SWITCHING_PROTOCOLS => {
                    if !upgrades {
                        return Err(Failed::NotHttp);
                    }
                    return Ok(Answer::Upgraded(response.map(|_| ()), line));
                }
                Ok(response) => {
                    let home = Arc::clone(self);
                    let body = |body| Returned::first(body, Reading { line, home, place }, self.settings.idle);
                    return Ok(Answer::Http(response.map(body)));
                }
                // It was closed while nobody looked; nothing of the request was sent.
                Err(Unanswered { request: Some(unsent), .. }) => request = unsent,
                Err(Unanswered { error, request: None }) => return Err(why(error, progress)),
            }
        }
        Err(Failed::Closed)
    }

    async fn ask_second(
        self: &Arc<Self>,
        mut request: Request<Sent>,
        progress: &Progress,
        place: OwnedSemaphorePermit,
    ) -> Result<Answer, Failed> {
        for _ in 0..TRIES {
            // All wait for one connection, nobody longer than for one of its own.
            let sender = timeout(self.settings.connect, self.shared.sender(self.connect())).await;
            let mut sender = sender.map_err(|_| Failed::ConnectTimeout(self.settings.connect))??;
            match self.in_time(second::ask(&mut sender, request), progress).await? {
                Ok(response) => {
                    return Ok(Answer::Http(response.map(|body| Returned::second(body, place, self.settings.idle))));
                }
                Err(Unanswered { request: Some(unsent), .. }) => request = unsent,
                Err(Unanswered { error, request: None }) => return Err(why(error, progress)),
            }
        }
        Err(Failed::Closed)
    }

    pub(super) async fn connect(&self) -> Result<TcpStream, Failed> {
        let upstream = &self.settings.upstream;
        let connecting = TcpStream::connect((upstream.host.as_str(), upstream.port));
        let stream = timeout(self.settings.connect, connecting).await;
        let stream = stream.map_err(|_| Failed::ConnectTimeout(self.settings.connect))?.map_err(Failed::Connect)?;
        let _ = stream.set_nodelay(true);
        Ok(stream)
    }

    /// An answer must begin in time, counted from when the last piece of the request was sent.
    async fn in_time<T>(&self, answer: impl Future<Output = T>, progress: &Progress) -> Result<T, Failed> {
        let mut answer = std::pin::pin!(answer);
        loop {
            let before = progress.pieces();
            match timeout(self.settings.answer, answer.as_mut()).await {
                Ok(answer) => return Ok(answer),
                Err(_) if progress.pieces() != before => {}
                Err(_) => return Err(Failed::AnswerTimeout(self.settings.answer)),
            }
        }
    }
}

/// Why a request that was sent, or was being sent, has no response.
fn why(error: hyper::Error, progress: &Progress) -> Failed {
    if progress.is_stalled() {
        Failed::BodyTimeout
    } else if error.is_user() {
        Failed::BodyLost
    } else if error.is_parse() {
        Failed::NotHttp
    } else if error.is_incomplete_message() || error.is_canceled() || error.is_closed() {
        Failed::Closed
    } else {
        Failed::Lost(error)
    }
}
