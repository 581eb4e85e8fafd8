//! Leases before axum and tonic, over real connections and stores: each ends with its response,
//! however that ends.

use std::convert::Infallible;
use std::future::pending;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{Request, Response, StatusCode};
use axum::routing::get;
use axum::{Router, ServiceExt};
use http_body::Frame;
use tidegate::store::Deciding;
use tidegate::tower::{RateLimitLayer, Rule, key};
use tidegate::{Check, Clock, Limiter, ManualClock, Memory, Op, Store, StoreError};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tower::{Layer, ServiceExt as _, service_fn};

use crate::{answer, request, still};

const ONE: &str = "1 concurrent ttl 10m";
/// Long enough for a busy machine.
const LONG: Duration = Duration::from_secs(20);

fn one() -> RateLimitLayer {
    RateLimitLayer::rules([Rule::new("one", ONE.parse().unwrap(), key::global())])
}

/// Some lines, and then an end, an error, a panic, or nothing more.
struct Lines {
    left: usize,
    then: Then,
}

#[derive(Clone, Copy)]
enum Then {
    End,
    Error,
    Panic,
    Nothing,
}

impl http_body::Body for Lines {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        if self.left > 0 {
            self.left -= 1;
            return Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(b"line\n")))));
        }
        match self.then {
            Then::End => Poll::Ready(None),
            Then::Error => Poll::Ready(Some(Err(std::io::Error::other("broken")))),
            Then::Panic => panic!("a body panics on purpose"),
            Then::Nothing => Poll::Pending,
        }
    }
}

/// Handlers that end in every way.
fn router() -> Router {
    let lines = |then| move || async move { Body::new(Lines { left: 3, then }) };
    Router::new()
        .route("/", get(|| async { "hello" }))
        .route("/empty", get(|| async { StatusCode::NO_CONTENT }))
        .route("/large", get(|| async { "x".repeat(1 << 20) }))
        .route("/lines", get(lines(Then::End)))
        .route("/error", get(lines(Then::Error)))
        .route("/body-panic", get(lines(Then::Panic)))
        .route("/endless", get(lines(Then::Nothing)))
        .route("/stuck", get(|| async { pending::<()>().await }))
        .route("/panic", get(async || -> &'static str { panic!("a handler panics on purpose") }))
}

/// A server whose routes are behind the layer, and one with the layer around the whole router.
async fn serve(layer: &RateLimitLayer) -> [SocketAddr; 2] {
    let listeners = [
        TcpListener::bind("127.0.0.1:0").await.unwrap(),
        TcpListener::bind("127.0.0.1:0").await.unwrap(),
    ];
    let at = listeners.each_ref().map(|listener| listener.local_addr().unwrap());
    let [first, second] = listeners;
    let routes = router().layer(layer.clone());
    tokio::spawn(async move { axum::serve(first, routes).await });
    let around = layer.clone().axum().layer(router());
    let around = ServiceExt::<Request<Body>>::into_make_service(around);
    tokio::spawn(async move { axum::serve(second, around).await });
    at
}

/// What comes back for a request, until the connection ends.
async fn ask(at: SocketAddr, method: &str, path: &str) -> String {
    let mut connection = TcpStream::connect(at).await.unwrap();
    let request =
        format!("{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
    connection.write_all(request.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    // A response that breaks off may end in an error.
    let _ = connection.read_to_end(&mut answer).await;
    String::from_utf8(answer).unwrap()
}

async fn wait_until_free(at: SocketAddr, why: &str) {
    let free = async { while !ask(at, "GET", "/").await.starts_with("HTTP/1.1 200") {} };
    tokio::time::timeout(LONG, free)
        .await
        .unwrap_or_else(|_| panic!("the lease is still held: {why}"));
}

/// Begins a request and reads a line that is in its response.
async fn begin(at: SocketAddr, path: &str, until: &str) -> BufReader<TcpStream> {
    let mut connection = BufReader::new(TcpStream::connect(at).await.unwrap());
    let request = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n");
    connection.get_mut().write_all(request.as_bytes()).await.unwrap();
    let mut line = String::new();
    while !line.starts_with(until) {
        line.clear();
        assert_ne!(connection.read_line(&mut line).await.unwrap(), 0, "{path} ended early");
    }
    connection
}

async fn leases_end_with_their_responses(layer: RateLimitLayer) {
    for at in serve(&layer).await {
        for (method, path, expected) in [
            ("GET", "/", "HTTP/1.1 200"),
            ("HEAD", "/", "HTTP/1.1 200"),
            ("GET", "/empty", "HTTP/1.1 204"),
            ("GET", "/large", "HTTP/1.1 200"),
            ("GET", "/lines", "HTTP/1.1 200"),
            ("GET", "/nowhere", "HTTP/1.1 404"),
        ] {
            for _ in 0..7 {
                let answer = ask(at, method, path).await;
                assert!(answer.starts_with(expected), "{method} {path}: {answer:.200}");
            }
        }
        for path in ["/error", "/body-panic"] {
            let answer = ask(at, "GET", path).await;
            assert!(!answer.starts_with("HTTP/1.1 429"), "{path}: {answer}");
            wait_until_free(at, path).await;
        }
        assert_eq!(ask(at, "GET", "/panic").await, "", "the connection ends with the panic");
        wait_until_free(at, "/panic").await;

        let connection = begin(at, "/endless", "line").await;
        assert!(ask(at, "GET", "/").await.starts_with("HTTP/1.1 429"), "one at a time");
        drop(connection);
        wait_until_free(at, "the client went in the middle of the body").await;
    }
}

#[tokio::test]
async fn leases_in_memory_end_with_their_responses() {
    leases_end_with_their_responses(one().memory(still().1)).await;
}

#[cfg(feature = "redis")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leases_in_redis_end_with_their_responses() {
    use tidegate::redis::Redis;
    use tidegate::resilience::Resilient;
    use tidegate_testkit::{Flavor, Server};

    let server = Server::start(Flavor::Redis7);
    let store = |namespace: &str| {
        let redis =
            Redis::builder(server.url().parse().unwrap()).namespace(namespace).timeout(LONG);
        redis.build().unwrap()
    };
    leases_end_with_their_responses(one().redis(store("bare"))).await;
    let resilient =
        Resilient::builder(store("near")).nodes(1).deadline(Duration::from_secs(10)).build();
    leases_end_with_their_responses(one().resilient(resilient)).await;
}

#[tokio::test]
async fn a_client_that_disconnects_before_the_response_ends_its_lease() {
    let entered = Arc::new(tokio::sync::Semaphore::new(0));
    let seen = Arc::clone(&entered);
    let stuck = move || {
        seen.add_permits(1);
        pending::<&'static str>()
    };
    let app = Router::new().route("/", get(|| async { "hello" })).route("/stuck", get(stuck));
    let app = app.layer(one().memory(still().1));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let at = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, app).await });
    let mut connection = TcpStream::connect(at).await.unwrap();
    connection.write_all(b"GET /stuck HTTP/1.1\r\nhost: localhost\r\n\r\n").await.unwrap();
    entered.acquire().await.unwrap().forget();
    assert!(ask(at, "GET", "/").await.starts_with("HTTP/1.1 429"));
    drop(connection);
    wait_until_free(at, "the client went").await;
}

/// Where `1 concurrent` has room.
fn is_free(memory: &Memory) -> bool {
    let limits: tidegate::Limits = ONE.parse().unwrap();
    memory.decide(&Check::of(Op::Peek).charge_named("one", "global", &limits, 1)).unwrap().allowed()
}

#[tokio::test]
async fn a_panic_of_the_service_ends_the_lease() {
    let (_clock, memory) = still();
    let at_once =
        service_fn(|_: Request<Body>| -> std::future::Ready<Result<Response<Body>, Infallible>> {
            panic!("a service panics on purpose")
        });
    let service = one().memory(memory.clone()).layer(at_once);
    assert!(tokio::spawn(service.oneshot(request("192.0.2.7", "/"))).await.unwrap_err().is_panic());
    assert!(is_free(&memory));
}

#[tokio::test]
async fn a_lease_ends_before_the_last_frame_of_its_body() {
    use http_body_util::BodyExt;
    let (_clock, memory) = still();
    let service = one().memory(memory.clone()).layer(service_fn(|_: Request<Body>| async {
        Ok::<_, Infallible>(Response::new(Body::from("all of it")))
    }));
    let mut response = service.oneshot(request("192.0.2.7", "/")).await.unwrap();
    assert!(!is_free(&memory));
    response.body_mut().frame().await.unwrap().unwrap();
    assert!(is_free(&memory), "although the response is still there");
}

#[tokio::test]
async fn shadow_rules_and_rules_beside_them_keep_what_they_took() {
    let (_clock, memory) = still();
    let rules = [
        Rule::new("one", ONE.parse().unwrap(), key::global()).shadow(),
        Rule::new("both", "1 concurrent ttl 10m; 5/h".parse().unwrap(), key::global()),
        Rule::new("rate", "3/h".parse().unwrap(), key::global()),
    ];
    let denied = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&denied);
    let layer = RateLimitLayer::rules(rules).memory(memory.clone()).observe(move |seen| {
        count.fetch_add(usize::from(seen.shadow && !seen.decision.allowed()), Ordering::SeqCst);
    });
    let service = layer.layer(service_fn(|_: Request<Body>| async {
        Ok::<_, Infallible>(Response::new(Body::new(Lines { left: 2, then: Then::End })))
    }));
    for status in [200, 200, 200, 429, 429] {
        let answer =
            answer(service.clone().oneshot(request("192.0.2.7", "/")).await.unwrap()).await;
        assert_eq!(answer.status, status, "{}", answer.body);
    }
    assert!(is_free(&memory));
    assert_eq!(denied.load(Ordering::SeqCst), 0);
}

/// A remote store with outages, during which a call is applied or not.
#[derive(Clone)]
struct Away {
    memory: Memory,
    is_away: Arc<AtomicBool>,
    calls: Arc<AtomicUsize>,
}

impl Store for Away {
    fn decide<'a>(&'a self, check: &'a Check<'a>) -> Deciding<'a> {
        Box::pin(async move {
            tokio::task::yield_now().await;
            self.calls.fetch_add(1, Ordering::SeqCst);
            if self.is_away.load(Ordering::SeqCst) {
                return Err(StoreError::Unavailable("away".into()));
            }
            Ok(self.memory.decide(check)?)
        })
    }
}

fn away() -> (ManualClock, Away) {
    let (clock, memory) = still();
    (clock, Away { memory, is_away: Arc::default(), calls: Arc::default() })
}

/// Time is the runtime's: a test does not wait for it.
#[tokio::test(start_paused = true)]
async fn a_release_without_an_answer_is_retried() {
    let (clock, store) = away();
    let layer = one().store(store.clone(), Clock::from(clock.clone()));
    let limiter = Limiter::builder(ONE.parse().unwrap())
        .name("one")
        .store(store.clone(), Clock::from(clock))
        .build();
    let service = layer.layer(service_fn(|_: Request<Body>| async {
        Ok::<_, Infallible>(Response::new(Body::empty()))
    }));
    for by_layer in [true, false] {
        let (response, lease) = if by_layer {
            (Some(service.clone().oneshot(request("192.0.2.7", "/")).await.unwrap()), None)
        } else {
            (None, Some(limiter.lease("global").await.unwrap()))
        };
        assert!(!is_free(&store.memory));
        store.is_away.store(true, Ordering::SeqCst);
        drop((response, lease));
        tokio::time::sleep(Duration::from_secs(10)).await;
        assert!(!is_free(&store.memory));
        store.is_away.store(false, Ordering::SeqCst);
        tokio::time::sleep(Duration::from_secs(2)).await;
        assert!(is_free(&store.memory), "the layer: {by_layer}");
        let calls = store.calls.load(Ordering::SeqCst);
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert_eq!(
            store.calls.load(Ordering::SeqCst),
            calls,
            "what was released is not released again"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn a_release_is_retried_until_the_ttl() {
    let (clock, store) = away();
    let limiter = Limiter::builder(ONE.parse().unwrap())
        .store(store.clone(), Clock::from(clock.clone()))
        .build();
    let lease = limiter.lease("k").await.unwrap();
    store.is_away.store(true, Ordering::SeqCst);
    drop(lease);
    tokio::time::sleep(Duration::from_secs(10)).await;
    clock.advance(Duration::from_secs(600));
    tokio::time::sleep(Duration::from_secs(10)).await;
    let calls = store.calls.load(Ordering::SeqCst);
    assert!((3..=20).contains(&calls), "{calls}");
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(store.calls.load(Ordering::SeqCst), calls);
}
