//! The layer before services: by itself, before axum over TCP, before tonic.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod axum;
mod headers;
mod keys;
mod leases;
mod outcome;
mod plain;
mod tonic;

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use ::axum::body::Body;
use ::axum::http::{HeaderMap, Request, Response};
use http_body_util::BodyExt;
use tidegate::tower::{RateLimit, RateLimitLayer};
use tidegate::{ManualClock, Memory};
use tower::{Layer, Service, ServiceExt, service_fn};

/// A clock that stands still, and a store that goes by it.
fn still() -> (ManualClock, Memory) {
    let clock = ManualClock::new();
    (clock.clone(), Memory::builder().clock(clock).build())
}

/// A request for `path` from `peer`.
fn request(peer: &str, path: &str) -> Request<Body> {
    let mut request = Request::builder().uri(path).body(Body::empty()).unwrap();
    request.extensions_mut().insert(tidegate::tower::Peer(peer.parse().unwrap()));
    request
}

/// What became of a request.
#[derive(Debug)]
struct Answer {
    status: u16,
    headers: HeaderMap,
    body: String,
}

impl Answer {
    fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |value| value.to_str().unwrap())
    }
}

async fn answer<B>(response: Response<B>) -> Answer
where
    B: BodyExt,
    B::Error: std::fmt::Debug,
{
    let (head, body) = response.into_parts();
    let body = body.collect().await.unwrap().to_bytes();
    Answer {
        status: head.status.as_u16(),
        headers: head.headers,
        body: String::from_utf8(body.into()).unwrap(),
    }
}

/// Counts how often it is called; answers with the path.
fn echo(
    calls: &Arc<AtomicUsize>,
) -> impl Service<Request<Body>, Response = Response<Body>, Error = Infallible, Future: Send>
+ Clone
+ use<> {
    let calls = Arc::clone(calls);
    service_fn(move |request: Request<Body>| {
        calls.fetch_add(1, Ordering::SeqCst);
        async move { Ok(Response::new(Body::from(request.uri().path().to_owned()))) }
    })
}

/// A service behind a layer, and how often it was called.
struct Behind<S> {
    service: RateLimit<S>,
    calls: Arc<AtomicUsize>,
}

fn behind(
    layer: &RateLimitLayer,
) -> Behind<
    impl Service<Request<Body>, Response = Response<Body>, Error = Infallible, Future: Send>
    + Clone
    + use<>,
> {
    let calls = Arc::new(AtomicUsize::new(0));
    Behind { service: layer.layer(echo(&calls)), calls }
}

impl<S> Behind<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible> + Clone,
{
    async fn ask(&self, request: Request<Body>) -> Answer {
        answer(self.service.clone().oneshot(request).await.unwrap()).await
    }

    fn calls(&self) -> usize {
        self.calls.load(Ordering::SeqCst)
    }
}
