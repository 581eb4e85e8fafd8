//! The fast path of gRPC: a call whose only message has arrived completely, uncompressed.
//!
//! The message is decoded, decided and framed without the boxes and buffers that streams of any
//! length need. Everything else, invalid calls included, goes to tonic as if nothing had been read.
//! Decision record 0018 has the figures.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Request, Response, header};
use hyper::body::{Body as HttpBody, Bytes, Frame};
use prost::Message;
use tokio::time::timeout;
use tonic::Status;

use super::message::{RateLimitRequest, RateLimitResponse};
use super::{MAX_MESSAGE_BYTES, SHOULD_RATE_LIMIT, decide, late};
use crate::engine::Engine;

/// The length of the prefix of a message: whether it is compressed, and four bytes of length.
const FRAME_BYTES: usize = 5;
const GRPC: HeaderValue = HeaderValue::from_static("application/grpc");
const GRPC_ENCODING: HeaderName = HeaderName::from_static("grpc-encoding");
const GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");
const FINE: HeaderValue = HeaderValue::from_static("0");

/// Answers a call whose message has arrived.
pub(crate) struct GrpcFastPath {
    engine: Engine,
    patience: Duration,
}

impl GrpcFastPath {
    pub(crate) fn new(engine: Engine, patience: Duration) -> Self {
        GrpcFastPath { engine, patience }
    }

    /// The response, or the request if tonic must answer it.
    pub(crate) async fn answer<B>(
        &self,
        request: Request<B>,
    ) -> Result<Response<Body>, Request<Body>>
    where
        B: HttpBody<Data = Bytes> + Send + Unpin + 'static,
        B::Error: Into<axum::BoxError> + Send + Unpin,
    {
        if request.uri().path() != SHOULD_RATE_LIMIT
            || request.headers().contains_key(GRPC_ENCODING)
        {
            return Err(request.map(Body::new));
        }
        let (head, body) = request.into_parts();
        let arrived = ArrivedBody::now(body).await;
        let Some(message) = arrived.message() else {
            return Err(Request::from_parts(head, Body::new(arrived)));
        };
        Ok(match timeout(self.patience, decide::decide(&self.engine, &message)).await {
            Ok(Ok(answer)) => framed_response(&answer),
            Ok(Err(problem)) => Status::from(problem).into_http(),
            Err(_) => late(),
        })
    }
}

fn framed_response(answer: &RateLimitResponse) -> Response<Body> {
    let bytes = answer.encoded_len();
    let mut framed = Vec::with_capacity(FRAME_BYTES + bytes);
    framed.push(0);
    framed.extend_from_slice(&u32::try_from(bytes).unwrap_or(u32::MAX).to_be_bytes());
    // Encoding into a vector cannot fail.
    let _ = answer.encode(&mut framed);
    let mut response = Response::new(Body::new(UnaryBody::Message(framed.into())));
    response.headers_mut().insert(header::CONTENT_TYPE, GRPC);
    response
}

/// A message, then the trailers of success.
enum UnaryBody {
    Message(Bytes),
    Status,
    End,
}

impl HttpBody for UnaryBody {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let (frame, next) = match std::mem::replace(&mut *self, UnaryBody::End) {
            UnaryBody::Message(bytes) => (Frame::data(bytes), UnaryBody::Status),
            UnaryBody::Status => {
                let mut trailers = HeaderMap::with_capacity(1);
                trailers.insert(GRPC_STATUS, FINE);
                (Frame::trailers(trailers), UnaryBody::End)
            }
            UnaryBody::End => return Poll::Ready(None),
        };
        *self = next;
        Poll::Ready(Some(Ok(frame)))
    }

    fn is_end_stream(&self) -> bool {
        matches!(self, UnaryBody::End)
    }
}

/// The part of a body that has arrived. It still yields the complete body.
struct ArrivedBody<B: HttpBody> {
    data: Bytes,
    /// The frame behind it.
    next: Option<Result<Frame<Bytes>, B::Error>>,
    rest: B,
    whole: bool,
}

impl<B: HttpBody<Data = Bytes> + Unpin> ArrivedBody<B> {
    /// Reads one data frame and the end of the body, without waiting.
    async fn now(rest: B) -> Self {
        let mut arrived = ArrivedBody { data: Bytes::new(), next: None, rest, whole: false };
        poll_fn(|context| {
            while let Poll::Ready(polled) = Pin::new(&mut arrived.rest).poll_frame(context) {
                let Some(frame) = polled else {
                    arrived.whole = true;
                    break;
                };
                match frame.map(Frame::into_data) {
                    Ok(Ok(data)) if arrived.data.is_empty() => arrived.data = data,
                    Ok(Ok(data)) if data.is_empty() => {}
                    Ok(Ok(data)) => arrived.next = Some(Ok(Frame::data(data))),
                    Ok(Err(frame)) => arrived.next = Some(Ok(frame)),
                    Err(error) => arrived.next = Some(Err(error)),
                }
                if arrived.next.is_some() {
                    break;
                }
            }
            Poll::Ready(())
        })
        .await;
        arrived
    }

    /// The message, if it is the complete body.
    fn message(&self) -> Option<RateLimitRequest> {
        let (&[0, a, b, c, d], message) = self.data.split_first_chunk::<FRAME_BYTES>()? else {
            return None;
        };
        let length = u32::from_be_bytes([a, b, c, d]);
        let fits = message.len() <= MAX_MESSAGE_BYTES && u32::try_from(message.len()) == Ok(length);
        (self.whole && fits).then(|| RateLimitRequest::decode(message).ok())?
    }
}

impl<B: HttpBody<Data = Bytes> + Unpin> HttpBody for ArrivedBody<B>
where
    B::Error: Unpin,
{
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        if !self.data.is_empty() {
            return Poll::Ready(Some(Ok(Frame::data(std::mem::take(&mut self.data)))));
        }
        match self.next.take() {
            Some(frame) => Poll::Ready(Some(frame)),
            None if self.whole => Poll::Ready(None),
            None => Pin::new(&mut self.rest).poll_frame(context),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::io;

    use http_body_util::BodyExt;
    use tidegate::{ManualClock, Memory, Timestamp};
    use tokio::sync::watch;
    use tower_service::Service;

    use super::super::message::{Descriptor, Entry, Override};
    use super::super::{SERVICE, Services};
    use super::*;
    use crate::backend::Backend;
    use crate::protocol::Protocol;
    use crate::rules::Rules;
    use crate::rules::envoy::{Domains, EnvoyOptions};
    use crate::supervise::Health;

    const PATIENCE: Duration = Duration::from_secs(10);
    const EDGE: &str = "\
domain: edge
descriptors:
  - { key: user, rate_limit: { unit: minute, requests_per_unit: 2, name: few } }
  - { key: vip, rate_limit: { unlimited: true } }
  - { key: banned, rate_limit: { unit: hour, requests_per_unit: 0 } }
  - { key: trial, shadow_mode: true, rate_limit: { unit: minute, requests_per_unit: 1 } }
  - { key: quota, quota_mode: true, rate_limit: { unit: minute, requests_per_unit: 1 } }
  - { key: told, metadata: { to: blue }, rate_limit: { unit: minute, requests_per_unit: 1 } }
  - { key: api, rate_limit: { limit: 30/min burst 2; 5/7d window } }
";

    fn engine(options: EnvoyOptions) -> Engine {
        let clock = ManualClock::new();
        clock.set(Timestamp::from_secs(1_700_000_000));
        let engine =
            Engine::new(Backend::Memory(Memory::builder().clock(clock).build()), Rules::default())
                .for_protocol(Protocol::Grpc);
        let mut domains = Domains::default();
        domains.add(EDGE, "test").unwrap();
        engine.set_domains(domains);
        engine.settings().set_envoy_options(options);
        engine
    }

    /// What arrives of a body, one after the other.
    #[derive(Clone)]
    enum Piece {
        Data(Vec<u8>),
        Trailers,
        /// Nothing yet.
        Later,
        Broken,
    }
    use Piece::{Broken, Data, Later, Trailers};

    struct Pieces(VecDeque<Piece>);

    impl HttpBody for Pieces {
        type Data = Bytes;
        type Error = io::Error;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            context: &mut Context<'_>,
        ) -> Poll<Option<io::Result<Frame<Bytes>>>> {
            Poll::Ready(match self.0.pop_front() {
                None => None,
                Some(Data(bytes)) => Some(Ok(Frame::data(bytes.into()))),
                Some(Trailers) => {
                    Some(Ok(Frame::trailers(HeaderMap::from_iter([(header::ETAG, FINE)]))))
                }
                Some(Broken) => Some(Err(io::Error::other("broken"))),
                Some(Later) => {
                    context.waker().wake_by_ref();
                    return Poll::Pending;
                }
            })
        }
    }

    fn framed(flag: u8, length: usize, message: &[u8]) -> Vec<u8> {
        let length = u32::try_from(length).unwrap().to_be_bytes();
        [&[flag], &length[..], message].concat()
    }

    fn one(entries: &[(&str, &str)]) -> Descriptor {
        let entries =
            entries.iter().map(|(key, value)| Entry { key: (*key).into(), value: (*value).into() });
        Descriptor { entries: entries.collect(), ..Descriptor::default() }
    }

    fn message(domain: &str, descriptors: Vec<Descriptor>) -> Vec<u8> {
        let message =
            RateLimitRequest { domain: domain.into(), descriptors, hits_addend: 0 }.encode_to_vec();
        framed(0, message.len(), &message)
    }

    fn request(path: &str, encoding: &'static str, pieces: &[Piece]) -> Request<Pieces> {
        let mut request =
            Request::post(path).body(Pieces(pieces.iter().cloned().collect())).unwrap();
        if !encoding.is_empty() {
            request.headers_mut().insert(GRPC_ENCODING, HeaderValue::from_static(encoding));
        }
        request
    }

    /// An answer, frame by frame.
    async fn shown(response: Response<Body>) -> String {
        let (head, mut body) = response.into_parts();
        let mut text = format!("{} {:?} {:?}", head.status, head.headers, body.size_hint());
        while let Some(frame) = body.frame().await {
            text += &format!("\n{:?} then {}", frame.unwrap(), body.is_end_stream());
        }
        text
    }

    /// What was counted, without how long it took.
    fn counted(engine: &Engine) -> String {
        let text = engine.observer().metrics().text(engine.store(), 0);
        let counts = ["tidegate_decisions_total", "tidegate_rule_", "tidegate_shadow_"];
        text.lines()
            .filter(|line| counts.iter().any(|name| line.starts_with(name)))
            .collect::<Vec<_>>()
            .join("\n")
    }

    #[tokio::test]
    async fn both_ways_answer_the_same() {
        let usual = |descriptors| (true, vec![Data(message("edge", descriptors))]);
        let user = || message("edge", vec![one(&[("user", "x")])]);
        let (start, end) = (user()[..9].to_vec(), user()[9..].to_vec());
        let bare = &user()[FRAME_BYTES..];
        let back =
            Descriptor { is_negative_hits: true, hits_addend: Some(1), ..one(&[("user", "a")]) };
        let limited = |unit| Descriptor {
            limit: Some(Override { requests_per_unit: 7, unit }),
            ..one(&[("user", "a")])
        };
        let table = [
            usual(vec![one(&[("user", "a")])]),
            usual(vec![one(&[("user", "a")])]),
            usual(vec![one(&[("user", "a")])]),
            usual(vec![back]),
            usual(vec![Descriptor { hits_addend: Some(0), ..one(&[("user", "a")]) }]),
            usual(vec![Descriptor { hits_addend: Some(u64::MAX), ..one(&[("user", "a")]) }]),
            usual(vec![one(&[("user", "a")]), one(&[("user", "b")])]),
            usual(vec![one(&[("user", "c")]), one(&[("nothing", "b")])]),
            usual(vec![one(&[("nothing", "b")])]),
            usual(vec![one(&[("vip", "a")])]),
            usual(vec![one(&[("banned", "a")])]),
            usual(vec![one(&[("trial", "a")])]),
            usual(vec![one(&[("trial", "a")])]),
            usual(vec![one(&[("quota", "a")])]),
            usual(vec![one(&[("quota", "a")])]),
            usual(vec![one(&[("told", "a")])]),
            usual(vec![one(&[("told", "a")])]),
            usual(vec![one(&[("api", "a")])]),
            usual(vec![limited(2)]),
            usual(vec![limited(9)]),
            usual(vec![]),
            usual(vec![one(&[("user", &"long".repeat(256))])]),
            usual(vec![one(&[("user", &"long".repeat(257))])]),
            (true, vec![Data(message("", vec![one(&[("user", "a")])]))]),
            (true, vec![Data(message("other", vec![one(&[("user", "ä")])]))]),
            (true, vec![Data(Vec::new()), Data(user()), Data(Vec::new())]),
            (false, vec![]),
            (false, vec![Data(user()[..3].to_vec())]),
            (false, vec![Data(start.clone())]),
            (false, vec![Data(start.clone()), Data(end.clone())]),
            (false, vec![Data(start), Later, Data(end)]),
            (false, vec![Later, Data(user())]),
            (false, vec![Data(user()), Later]),
            (false, vec![Data(user()), Trailers]),
            (false, vec![Data(user()), Broken]),
            (false, vec![Broken]),
            (false, vec![Data(user()), Data(user())]),
            (false, vec![Data([user(), user()].concat())]),
            (false, vec![Data(framed(1, bare.len(), bare))]),
            (false, vec![Data(framed(2, bare.len(), bare))]),
            (false, vec![Data(framed(0, bare.len() - 1, bare))]),
            (false, vec![Data(framed(0, 3, b"\xff\xff\xff"))]),
            (false, vec![Data(framed(0, MAX_MESSAGE_BYTES + 1, &vec![0; MAX_MESSAGE_BYTES + 1]))]),
        ];
        let all = EnvoyOptions {
            headers: Some(tidegate::http::headers::HeaderFamilies::ALL),
            body: true,
            ..EnvoyOptions::default()
        };
        for options in [
            EnvoyOptions::default(),
            all,
            EnvoyOptions { count_rejected: true, ..EnvoyOptions::default() },
        ] {
            let (one_engine, other_engine) = (engine(options), engine(options));
            let unary = GrpcFastPath::new(one_engine.clone(), PATIENCE);
            let services = |engine: &Engine| {
                Services::new(engine.clone(), Health::default(), PATIENCE, watch::channel(false).1)
                    .unwrap()
            };
            let (mut behind, mut alone) = (services(&one_engine), services(&other_engine));
            let mut both =
                async |short: bool, path: &str, encoding: &'static str, pieces: &[Piece]| {
                    let (way, answer) = match unary.answer(request(path, encoding, pieces)).await {
                        Ok(answer) => ("short", answer),
                        Err(request) => ("long", behind.call(request).await.unwrap()),
                    };
                    assert_eq!(way, if short { "short" } else { "long" });
                    let expected =
                        alone.call(request(path, encoding, pieces).map(Body::new)).await.unwrap();
                    assert_eq!(shown(answer).await, shown(expected).await);
                };
            for (short, pieces) in &table {
                both(*short, SHOULD_RATE_LIMIT, "", pieces).await;
            }
            for encoding in ["identity", "gzip", "new"] {
                both(false, SHOULD_RATE_LIMIT, encoding, &[Data(user())]).await;
            }
            for path in [
                format!("/{SERVICE}/Other"),
                "/other".into(),
                "/grpc.health.v1.Health/Check".into(),
            ] {
                both(false, &path, "", &[Data(user())]).await;
            }
            assert_eq!(counted(&one_engine), counted(&other_engine));
        }
    }
}
