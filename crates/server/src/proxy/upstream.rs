//! The upstream: a request goes there, and the head of a response comes back.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::http::header::{CONNECTION, CONTENT_LENGTH, HOST, TE, TRANSFER_ENCODING, UPGRADE};
use axum::http::{HeaderValue, Request, Response, StatusCode, Uri, Version, request, uri};
use hyper::body::{Body, Incoming};
use tokio::time::timeout;

use super::body::{Progress, Reading, Returned, Sent};
use super::head;
use super::http1::{Line, Pool, Unanswered};
use super::http2::{self, Shared};
use super::in_flight::{ClientShare, InFlight, Slot};
use super::settings::{ProxySettings, Speech};
use super::socket::Socket;
use crate::listen::UpstreamFiles;
use crate::observe::metrics::Refusal;

/// How often a request that was not sent is tried anew, on another connection.
pub(super) const TRIES: usize = 3;

/// A request that was sent already, and its slot among those that are under way.
#[derive(Debug)]
pub(super) struct Begun {
    pub(super) line: Line,
    pub(super) slot: Slot,
}

/// Everything that leads to the upstream.
#[derive(Debug)]
pub(super) struct Upstreams {
    pub(super) settings: ProxySettings,
    pub(super) pool: Pool,
    shared: Shared,
    pub(super) in_flight: InFlight,
    pub(super) files: UpstreamFiles,
}

/// Why there is no response.
#[derive(Debug, thiserror::Error)]
pub(super) enum Failed {
    #[error("too many requests are at the upstream already: try again in a moment")]
    Busy,
    #[error(
        "this client has {0} requests at the upstream already, which is its part: try again in a moment"
    )]
    BusyForClient(usize),
    #[error("cannot connect to the upstream: {0}")]
    Connect(io::Error),
    #[error("the upstream did not take the connection within {} ms", .0.as_millis())]
    ConnectTimeout(Duration),
    #[error("the upstream did not begin to answer within {} seconds", .0.as_secs())]
    AnswerTimeout(Duration),
    #[error("the body of the request stood still for too long")]
    BodyTimeout,
    #[error("the body of the request came too slowly: expected at least {0} bytes a second")]
    BodySlow(u32),
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
            Failed::BusyForClient(_) => StatusCode::TOO_MANY_REQUESTS,
            Failed::ConnectTimeout(_) | Failed::AnswerTimeout(_) => StatusCode::GATEWAY_TIMEOUT,
            Failed::BodyTimeout | Failed::BodySlow(_) => StatusCode::REQUEST_TIMEOUT,
            Failed::BodyLost | Failed::Target => StatusCode::BAD_REQUEST,
            Failed::Connect(_) | Failed::Closed | Failed::NotHttp | Failed::Lost(_) => {
                StatusCode::BAD_GATEWAY
            }
        }
    }

    /// Whether it is the upstream that failed.
    pub(super) fn is_upstreams(&self) -> bool {
        use Failed::{BodyLost, BodySlow, BodyTimeout, BusyForClient, Target};
        !matches!(self, BusyForClient(_) | BodyTimeout | BodySlow(_) | BodyLost | Target)
    }

    /// As what it is counted, if it is the client that failed.
    pub(super) fn refusal(&self) -> Option<Refusal> {
        match self {
            Failed::BusyForClient(_) => Some(Refusal::FullForAddress),
            Failed::BodyTimeout | Failed::BodySlow(_) => Some(Refusal::Slow),
            _ => None,
        }
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
        let in_flight = InFlight::new(settings.max_in_flight, settings.max_in_flight_per_client);
        let files = UpstreamFiles::reserve(settings.most_connections());
        Upstreams { settings, pool, shared: Shared::default(), in_flight, files }
    }

    /// Whether requests over HTTP/1.1 can go the short way.
    pub(super) fn are_near(&self) -> bool {
        self.settings.short_way && self.settings.upstream.speech == Speech::First
    }

    /// Sends a request whose head is ready but for what depends on the upstream; if it was sent
    /// already, waits for the response alone.
    pub(super) async fn ask(
        self: &Arc<Self>,
        mut head: request::Parts,
        body: Incoming,
        host: Option<&HeaderValue>,
        upgrade: Option<HeaderValue>,
        begun: Option<Begun>,
        share: &Arc<ClientShare>,
    ) -> Result<Answer, Failed> {
        let target = head::target(&head.uri, &self.settings.upstream.base).ok_or(Failed::Target)?;
        let (mut sent, progress) = Sent::new(body, self.settings.idle, self.settings.min_body_rate);
        if head.headers.contains_key(CONTENT_LENGTH) {
            // One length, of the body that is sent: HTTP/2 lets a client repeat the header.
            match sent.size_hint().exact() {
                Some(length) => _ = head.headers.insert(CONTENT_LENGTH, length.into()),
                None => _ = head.headers.remove(CONTENT_LENGTH),
            }
        }
        let (line, slot) = match begun {
            Some(Begun { line, slot }) => (Some(line), slot),
            None => {
                // Where both sides speak HTTP/2, the client may wait for the upstream to begin.
                let is_dialogue = head.version == Version::HTTP_2
                    && self.settings.upstream.speech == Speech::Second
                    && sent.size_hint().exact().is_none();
                if !is_dialogue && !sent.is_end_stream() {
                    sent.begin().await?;
                }
                (None, self.in_flight.slot(share, self.settings.connect).await?)
            }
        };
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
                self.ask_first(Request::from_parts(head, sent), &progress, slot, upgrades, line)
                    .await
            }
            Speech::Second => {
                let authority =
                    host.and_then(|host| host.to_str().ok()?.parse::<uri::Authority>().ok());
                let uri = Uri::builder().scheme("http").path_and_query(target);
                let own = || self.settings.upstream.authority();
                head.uri = uri
                    .authority(authority.map_or_else(own, |it| it.to_string()))
                    .build()
                    .map_err(|_| Failed::Target)?;
                head.version = Version::HTTP_2;
                head.headers.remove(HOST);
                self.ask_second(Request::from_parts(head, sent), &progress, slot).await
            }
        }
    }

    async fn ask_first(
        self: &Arc<Self>,
        mut request: Request<Sent>,
        progress: &Progress,
        slot: Slot,
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
            let answered = self.in_time(line.ask(request), progress).await?;
            if answered.is_ok() {
                progress.set_answered();
            }
            match answered {
                Ok(response) if response.status() == StatusCode::SWITCHING_PROTOCOLS => {
                    if !upgrades {
                        return Err(Failed::NotHttp);
                    }
                    return Ok(Answer::Upgraded(response.map(|_| ()), line));
                }
                Ok(response) => {
                    let home = Arc::clone(self);
                    let body = |body| {
                        Returned::first(body, Reading { line, home, slot }, self.settings.idle)
                    };
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
        slot: Slot,
    ) -> Result<Answer, Failed> {
        for _ in 0..TRIES {
            // All wait for one connection, nobody longer than for one of its own.
            let sender = timeout(self.settings.connect, self.shared.sender(self.connect())).await;
            let mut sender =
                sender.map_err(|_| Failed::ConnectTimeout(self.settings.connect))??;
            let answered = self.in_time(http2::ask(&mut sender, request), progress).await?;
            if answered.is_ok() {
                progress.set_answered();
            }
            match answered {
                Ok(response) => {
                    return Ok(Answer::Http(
                        response.map(|body| Returned::second(body, slot, self.settings.idle)),
                    ));
                }
                Err(Unanswered { request: Some(unsent), .. }) => request = unsent,
                Err(Unanswered { error, request: None }) => return Err(why(error, progress)),
            }
        }
        Err(Failed::Closed)
    }

    pub(super) async fn connect(&self) -> Result<Socket, Failed> {
        let (upstream, within) = (&self.settings.upstream, self.settings.connect);
        let file = timeout(within, self.files.take()).await.map_err(|_| Failed::Busy)?;
        let socket =
            timeout(within, Socket::connect((upstream.host.as_str(), upstream.port), file)).await;
        socket.map_err(|_| Failed::ConnectTimeout(within))?.map_err(Failed::Connect)
    }

    /// An answer must begin in time, counted from when the last piece of the request was sent.
    async fn in_time<T>(
        &self,
        answer: impl Future<Output = T>,
        progress: &Progress,
    ) -> Result<T, Failed> {
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
    if let Some(late) = progress.late() {
        late
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
