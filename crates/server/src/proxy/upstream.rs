//! The upstream: sends requests and waits for the heads of responses.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::http::header::{CONNECTION, CONTENT_LENGTH, HOST, TE, TRANSFER_ENCODING, UPGRADE};
use axum::http::{HeaderValue, Request, Response, StatusCode, Uri, Version, request, uri};
use hyper::body::{Body, Incoming};
use tokio::time::timeout;

use super::body::{Progress, ReadingConnection, RequestBody, ResponseBody};
use super::head;
use super::http1::{Http1Connection, Pool, SendError};
use super::http2::{self, SharedConnection};
use super::in_flight::{ClientShare, InFlight, Slot};
use super::settings::{ProxySettings, UpstreamProtocol};
use super::socket::Socket;
use crate::listen::UpstreamFiles;
use crate::observe::metrics::Refusal;

/// How many connections are tried for a request of which no byte was sent.
pub(super) const TRIES: usize = 3;

/// A request that the fast path sent already, with its connection and its slot.
#[derive(Debug)]
pub(super) struct SentRequest {
    pub(super) http1: Http1Connection,
    pub(super) slot: Slot,
}

/// The connections to the upstream, and the limits on them.
#[derive(Debug)]
pub(super) struct Upstreams {
    pub(super) settings: ProxySettings,
    pub(super) pool: Pool,
    shared: SharedConnection,
    pub(super) in_flight: InFlight,
    pub(super) files: UpstreamFiles,
}

/// Why a request has no response from the upstream.
#[derive(Debug, thiserror::Error)]
pub(super) enum ForwardError {
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
    #[error("the body of the request stalled for too long")]
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

impl ForwardError {
    pub(super) fn status(&self) -> StatusCode {
        match self {
            ForwardError::Busy => StatusCode::SERVICE_UNAVAILABLE,
            ForwardError::BusyForClient(_) => StatusCode::TOO_MANY_REQUESTS,
            ForwardError::ConnectTimeout(_) | ForwardError::AnswerTimeout(_) => {
                StatusCode::GATEWAY_TIMEOUT
            }
            ForwardError::BodyTimeout | ForwardError::BodySlow(_) => StatusCode::REQUEST_TIMEOUT,
            ForwardError::BodyLost | ForwardError::Target => StatusCode::BAD_REQUEST,
            ForwardError::Connect(_)
            | ForwardError::Closed
            | ForwardError::NotHttp
            | ForwardError::Lost(_) => StatusCode::BAD_GATEWAY,
        }
    }

    /// Whether the upstream failed, rather than the client or a limit of the proxy.
    pub(super) fn is_upstreams(&self) -> bool {
        use ForwardError::{BodyLost, BodySlow, BodyTimeout, BusyForClient, Target};
        !matches!(self, BusyForClient(_) | BodyTimeout | BodySlow(_) | BodyLost | Target)
    }

    /// The metric that counts it, if the client failed.
    pub(super) fn refusal(&self) -> Option<Refusal> {
        match self {
            ForwardError::BusyForClient(_) => Some(Refusal::FullForAddress),
            ForwardError::BodyTimeout | ForwardError::BodySlow(_) => Some(Refusal::Slow),
            _ => None,
        }
    }
}

/// A response of the upstream.
pub(super) enum UpstreamResponse {
    /// An HTTP response.
    Http(Response<ResponseBody>),
    /// A switch to another protocol on this connection.
    Upgraded(Response<()>, Http1Connection),
}

impl Upstreams {
    pub(super) fn new(settings: ProxySettings) -> Self {
        let pool = Pool::new(settings.keep, settings.keep_idle);
        let in_flight = InFlight::new(settings.max_in_flight, settings.max_in_flight_per_client);
        let files = UpstreamFiles::reserve(settings.most_connections());
        Upstreams { settings, pool, shared: SharedConnection::default(), in_flight, files }
    }

    /// Whether HTTP/1.1 requests may take the fast path.
    pub(super) fn has_fast_path(&self) -> bool {
        self.settings.has_fast_path && self.settings.upstream.protocol == UpstreamProtocol::Http1
    }

    /// Adapts a prepared request to the upstream's HTTP version and sends it. If the fast path sent
    /// it already, only waits for the response.
    pub(super) async fn send(
        self: &Arc<Self>,
        mut head: request::Parts,
        body: Incoming,
        host: Option<&HeaderValue>,
        upgrade: Option<HeaderValue>,
        sent_request: Option<SentRequest>,
        share: &Arc<ClientShare>,
    ) -> Result<UpstreamResponse, ForwardError> {
        let target =
            head::target(&head.uri, &self.settings.upstream.base).ok_or(ForwardError::Target)?;
        let (mut sent, progress) =
            RequestBody::new(body, self.settings.idle, self.settings.min_body_rate);
        if head.headers.contains_key(CONTENT_LENGTH) {
            // One length, of the body that is sent: HTTP/2 lets a client repeat the header.
            match sent.size_hint().exact() {
                Some(length) => _ = head.headers.insert(CONTENT_LENGTH, length.into()),
                None => _ = head.headers.remove(CONTENT_LENGTH),
            }
        }
        let (http1, slot) = match sent_request {
            Some(SentRequest { http1, slot }) => (Some(http1), slot),
            None => {
                // If both sides speak HTTP/2, the client may wait for the upstream to begin.
                let is_dialogue = head.version == Version::HTTP_2
                    && self.settings.upstream.protocol == UpstreamProtocol::Http2
                    && sent.size_hint().exact().is_none();
                if !is_dialogue && !sent.is_end_stream() {
                    sent.begin().await?;
                }
                (None, self.in_flight.slot(share, self.settings.connect).await?)
            }
        };
        match self.settings.upstream.protocol {
            UpstreamProtocol::Http1 => {
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
                self.send_http1(Request::from_parts(head, sent), &progress, slot, upgrades, http1)
                    .await
            }
            UpstreamProtocol::Http2 => {
                let authority =
                    host.and_then(|host| host.to_str().ok()?.parse::<uri::Authority>().ok());
                let uri = Uri::builder().scheme("http").path_and_query(target);
                let own = || self.settings.upstream.authority();
                head.uri = uri
                    .authority(authority.map_or_else(own, |it| it.to_string()))
                    .build()
                    .map_err(|_| ForwardError::Target)?;
                head.version = Version::HTTP_2;
                head.headers.remove(HOST);
                self.send_http2(Request::from_parts(head, sent), &progress, slot).await
            }
        }
    }

    async fn send_http1(
        self: &Arc<Self>,
        mut request: Request<RequestBody>,
        progress: &Progress,
        slot: Slot,
        upgrades: bool,
        mut resumed: Option<Http1Connection>,
    ) -> Result<UpstreamResponse, ForwardError> {
        for _ in 0..TRIES {
            let mut http1 = match resumed.take() {
                Some(http1) => http1,
                None => match self.pool.take() {
                    Some(kept) => kept.into_hyper().await?,
                    None => Http1Connection::on(self.connect().await?).await?,
                },
            };
            let answered = self.in_time(http1.send(request), progress).await?;
            if answered.is_ok() {
                progress.set_answered();
            }
            match answered {
                Ok(response) if response.status() == StatusCode::SWITCHING_PROTOCOLS => {
                    if !upgrades {
                        return Err(ForwardError::NotHttp);
                    }
                    return Ok(UpstreamResponse::Upgraded(response.map(|_| ()), http1));
                }
                Ok(response) => {
                    let home = Arc::clone(self);
                    let body = |body| {
                        ResponseBody::from_http1(
                            body,
                            ReadingConnection { http1, home, slot },
                            self.settings.idle,
                        )
                    };
                    return Ok(UpstreamResponse::Http(response.map(body)));
                }
                // The upstream closed it while it was idle; no byte of the request was sent.
                Err(SendError { request: Some(unsent), .. }) => request = unsent,
                Err(SendError { error, request: None }) => return Err(why(error, progress)),
            }
        }
        Err(ForwardError::Closed)
    }

    async fn send_http2(
        self: &Arc<Self>,
        mut request: Request<RequestBody>,
        progress: &Progress,
        slot: Slot,
    ) -> Result<UpstreamResponse, ForwardError> {
        for _ in 0..TRIES {
            // All requests wait for one connection, each with its own timeout.
            let sender = timeout(self.settings.connect, self.shared.sender(self.connect())).await;
            let mut sender =
                sender.map_err(|_| ForwardError::ConnectTimeout(self.settings.connect))??;
            let answered = self.in_time(http2::send(&mut sender, request), progress).await?;
            if answered.is_ok() {
                progress.set_answered();
            }
            match answered {
                Ok(response) => {
                    return Ok(UpstreamResponse::Http(
                        response
                            .map(|body| ResponseBody::from_http2(body, slot, self.settings.idle)),
                    ));
                }
                Err(SendError { request: Some(unsent), .. }) => request = unsent,
                Err(SendError { error, request: None }) => return Err(why(error, progress)),
            }
        }
        Err(ForwardError::Closed)
    }

    pub(super) async fn connect(&self) -> Result<Socket, ForwardError> {
        let (upstream, within) = (&self.settings.upstream, self.settings.connect);
        let file = timeout(within, self.files.take()).await.map_err(|_| ForwardError::Busy)?;
        let socket =
            timeout(within, Socket::connect((upstream.host.as_str(), upstream.port), file)).await;
        socket.map_err(|_| ForwardError::ConnectTimeout(within))?.map_err(ForwardError::Connect)
    }

    /// Waits for `answer` with the response timeout, which restarts with each piece sent.
    async fn in_time<T>(
        &self,
        answer: impl Future<Output = T>,
        progress: &Progress,
    ) -> Result<T, ForwardError> {
        let mut answer = std::pin::pin!(answer);
        loop {
            let before = progress.pieces();
            match timeout(self.settings.answer, answer.as_mut()).await {
                Ok(answer) => return Ok(answer),
                Err(_) if progress.pieces() != before => {}
                Err(_) => return Err(ForwardError::AnswerTimeout(self.settings.answer)),
            }
        }
    }
}

/// Why a request that was sent at least in part has no response.
fn why(error: hyper::Error, progress: &Progress) -> ForwardError {
    if let Some(late) = progress.late() {
        late
    } else if error.is_user() {
        ForwardError::BodyLost
    } else if error.is_parse() {
        ForwardError::NotHttp
    } else if error.is_incomplete_message() || error.is_canceled() || error.is_closed() {
        ForwardError::Closed
    } else {
        ForwardError::Lost(error)
    }
}
