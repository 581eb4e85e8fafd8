//! Charges that are settled after the response, and after a disconnect.

use std::convert::Infallible;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{Request, Response};
use http_body_util::BodyExt;
use tidegate::store::Deciding;
use tidegate::tower::{Meter, RateLimit, RateLimitLayer, Rule, key};
use tidegate::{Check, Clock, Limit, Memory, Op, Store};
use tower::{Layer, Service, ServiceExt, service_fn};

use crate::{answer, request, still};

/// The units left under a rule with the global key.
fn left(memory: &Memory, rule: &str, limit: &str) -> u64 {
    let limit: Limit = limit.parse().unwrap();
    let check = Check::of(Op::Peek).charge_named(rule, "global", [&limit], 1);
    memory.decide(&check).unwrap().remaining()
}

/// Answers with the status that the path names.
fn statuses()
-> impl Service<Request<Body>, Response = Response<Body>, Error = Infallible, Future: Send> + Clone
{
    service_fn(|request: Request<Body>| async move {
        let status: u16 = request.uri().path()[1..].parse().unwrap();
        let mut response = Response::new(Body::from("body"));
        *response.status_mut() = status.try_into().unwrap();
        Ok(response)
    })
}

#[tokio::test]
async fn only_what_is_due_is_charged() {
    let (_clock, memory) = still();
    let rule = Rule::new("logins", "3/h".parse().unwrap(), key::global())
        .charge_when(|response| response.status == 401);
    let service = RateLimitLayer::rules([rule]).memory(memory.clone()).layer(statuses());
    let ask = async |path: &str| {
        answer(service.clone().oneshot(request("192.0.2.7", path)).await.unwrap()).await
    };
    for _ in 0..10 {
        let passed = ask("/200").await;
        assert_eq!(
            (passed.status, passed.header("ratelimit")),
            (200, r#""logins";r=3"#),
            "nothing is taken, as the headers show"
        );
    }
    for remaining in ["2", "1", "0"] {
        let failed = ask("/401").await;
        assert_eq!(failed.status, 401);
        assert!(
            failed.header("ratelimit").contains(&format!("r={remaining};")),
            "{}",
            failed.header("ratelimit")
        );
    }
    assert_eq!(ask("/200").await.status, 429, "the right password does not help any more");
    assert_eq!(left(&memory, "logins", "3/h"), 0);
}

#[tokio::test]
async fn concurrent_requests_cannot_exceed_the_limit() {
    let (_clock, memory) = still();
    let rule = Rule::new("logins", "3/h".parse().unwrap(), key::global())
        .charge_when(|response| response.status == 401);
    let slow = service_fn(|_: Request<Body>| async move {
        tokio::task::yield_now().await;
        let mut response = Response::new(Body::empty());
        *response.status_mut() = 401.try_into().unwrap();
        Ok::<_, Infallible>(response)
    });
    let service = RateLimitLayer::rules([rule]).memory(memory).layer(slow);
    let asks: Vec<_> =
        (0..20).map(|_| tokio::spawn(service.clone().oneshot(request("192.0.2.7", "/")))).collect();
    let mut tried = 0;
    for ask in asks {
        tried += usize::from(ask.await.unwrap().unwrap().status() == 401);
    }
    assert_eq!(tried, 3);
}

#[tokio::test]
async fn the_cost_can_come_from_the_response() {
    let (_clock, memory) = still();
    let rule = Rule::new("tokens", "1000/h".parse().unwrap(), key::global())
        .cost(400)
        .settle(|response| response.number("x-tokens"));
    let model = service_fn(|request: Request<Body>| async move {
        let mut response = Response::new(Body::empty());
        if let Some(tokens) = request.headers().get("x-use") {
            response.headers_mut().insert("x-tokens", tokens.clone());
        }
        Ok::<_, Infallible>(response)
    });
    let service = RateLimitLayer::rules([rule]).memory(memory.clone()).layer(model);
    let ask = async |used: Option<&str>| {
        let mut request = request("192.0.2.7", "/");
        if let Some(used) = used {
            request.headers_mut().insert("x-use", used.parse().unwrap());
        }
        answer(service.clone().oneshot(request).await.unwrap()).await
    };
    assert!(ask(Some("150")).await.header("ratelimit").contains("r=850;"), "250 are given back");
    assert!(ask(Some("500")).await.header("ratelimit").contains("r=350;"), "100 more are taken");
    assert_eq!(ask(None).await.status, 429, "an estimate of 400 does not fit");
    assert_eq!(left(&memory, "tokens", "1000/h"), 350);
}

/// A body of pieces of 1000 bytes.
struct Pieces(usize);

impl http_body::Body for Pieces {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<http_body::Frame<Bytes>, Infallible>>> {
        if self.0 == 0 {
            return Poll::Ready(None);
        }
        self.0 -= 1;
        Poll::Ready(Some(Ok(http_body::Frame::data(Bytes::from(vec![b'x'; 1000])))))
    }
}

fn pieces()
-> impl Service<Request<Body>, Response = Response<Pieces>, Error = Infallible, Future: Send> + Clone
{
    service_fn(|_: Request<Body>| async { Ok(Response::new(Pieces(4))) })
}

fn by_bytes(memory: &Memory) -> RateLimitLayer {
    let rule =
        Rule::new("bytes", "100/h".parse().unwrap(), key::global()).cost(20).settle_bytes(100);
    RateLimitLayer::rules([rule]).memory(memory.clone())
}

#[tokio::test]
async fn bytes_are_counted_while_they_are_sent() {
    let (_clock, memory) = still();
    let service = by_bytes(&memory).layer(pieces());
    let response = service.clone().oneshot(request("192.0.2.7", "/")).await.unwrap();
    assert_eq!(left(&memory, "bytes", "100/h"), 80, "the estimate is taken");
    let body = answer(response).await.body;
    assert_eq!(
        (body.len(), left(&memory, "bytes", "100/h")),
        (4000, 60),
        "4000 bytes are 40 units"
    );
}

#[tokio::test]
async fn a_body_dropped_half_way_costs_half() {
    let (_clock, memory) = still();
    let service = by_bytes(&memory).layer(pieces());
    let mut response = service.clone().oneshot(request("192.0.2.7", "/")).await.unwrap();
    for _ in 0..3 {
        response.body_mut().frame().await.unwrap().unwrap();
    }
    drop(response);
    assert_eq!(left(&memory, "bytes", "100/h"), 70);
    // One that was never read at all costs nothing.
    drop(service.clone().oneshot(request("192.0.2.7", "/")).await.unwrap());
    assert_eq!(left(&memory, "bytes", "100/h"), 70);
}

/// Never answers.
fn stuck()
-> impl Service<Request<Body>, Response = Response<Body>, Error = Infallible, Future: Send> + Clone
{
    service_fn(|_: Request<Body>| std::future::pending::<Result<Response<Body>, Infallible>>())
}

/// Asks, and goes away before there is a response.
fn ask_and_go<S>(service: &RateLimit<S>)
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible> + Clone,
{
    let mut asking = pin!(service.clone().oneshot(request("192.0.2.7", "/")));
    assert!(asking.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
}

#[tokio::test]
async fn a_client_that_disconnects_before_the_response_leaves_nothing_open() {
    // Bytes: none were sent. Time: so much as went by. A verdict on the response: there is none, so
    // what was taken stays taken.
    let (clock, memory) = still();
    ask_and_go(&by_bytes(&memory).layer(stuck()));
    assert_eq!(left(&memory, "bytes", "100/h"), 100);

    let rule = Rule::new("logins", "3/h".parse().unwrap(), key::global())
        .charge_when(|response| response.status == 401);
    ask_and_go(&RateLimitLayer::rules([rule]).memory(memory.clone()).layer(stuck()));
    assert_eq!(left(&memory, "logins", "3/h"), 2);

    let rule = Rule::new("time", "100/h window".parse().unwrap(), key::global())
        .settle_time(Duration::from_millis(100));
    let service = RateLimitLayer::rules([rule]).memory(memory.clone()).layer(stuck());
    {
        let mut asking = pin!(service.clone().oneshot(request("192.0.2.7", "/")));
        assert!(asking.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        clock.advance(Duration::from_millis(950));
    }
    assert_eq!(left(&memory, "time", "100/h window"), 90, "950 ms are ten times 100 ms");
}

#[tokio::test]
async fn leases_end_with_the_body_however_it_ends() {
    let (_clock, memory) = still();
    let rule = Rule::new("slots", "1 concurrent ttl 1h".parse().unwrap(), key::global());
    let layer = RateLimitLayer::rules([rule]).memory(memory.clone());
    let service = layer.layer(pieces());
    let ask = || service.clone().oneshot(request("192.0.2.7", "/"));

    let first = ask().await.unwrap();
    assert_eq!(ask().await.unwrap().status(), 429, "one at a time");
    answer(first).await; // read to its end
    let second = ask().await.unwrap();
    assert_eq!(second.status(), 200);
    drop(second); // dropped unread
    assert_eq!(ask().await.unwrap().status(), 200);

    ask_and_go(&layer.layer(stuck()));
    assert_eq!(ask().await.unwrap().status(), 200, "a dropped request ends its lease");

    let failing = service_fn(|_: Request<Body>| async {
        Err::<Response<Body>, _>(std::io::Error::other("broken"))
    });
    let failing = layer.layer(failing);
    assert!(failing.oneshot(request("192.0.2.7", "/")).await.is_err());
    assert_eq!(ask().await.unwrap().status(), 200, "so does a service that fails");
}

#[tokio::test]
async fn a_meter_is_read_when_the_response_is_over() {
    let (_clock, memory) = still();
    let rule =
        Rule::new("tokens", "1000/h".parse().unwrap(), key::global()).cost(100).settle_metered();
    let model = service_fn(|request: Request<Body>| async move {
        let meter = request.extensions().get::<Meter>().unwrap().clone();
        Ok::<_, Infallible>(Response::new(Metered { meter, pieces: 3 }))
    });
    let service = RateLimitLayer::rules([rule]).memory(memory.clone()).layer(model);
    let response = service.clone().oneshot(request("192.0.2.7", "/")).await.unwrap();
    assert_eq!(left(&memory, "tokens", "1000/h"), 900);
    answer(response).await;
    assert_eq!(left(&memory, "tokens", "1000/h"), 970, "three pieces of ten tokens");
    let mut response = service.clone().oneshot(request("192.0.2.7", "/")).await.unwrap();
    response.body_mut().frame().await.unwrap().unwrap();
    drop(response);
    assert_eq!(
        left(&memory, "tokens", "1000/h"),
        960,
        "a client that stops reading is charged for the bytes so far"
    );
    drop(service.clone().oneshot(request("192.0.2.7", "/")).await.unwrap());
    assert_eq!(left(&memory, "tokens", "1000/h"), 860, "nothing was written: the estimate stays");
}

/// A stream that costs ten tokens a piece.
struct Metered {
    meter: Meter,
    pieces: usize,
}

impl http_body::Body for Metered {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<http_body::Frame<Bytes>, Infallible>>> {
        if self.pieces == 0 {
            return Poll::Ready(None);
        }
        self.pieces -= 1;
        self.meter.add(10);
        Poll::Ready(Some(Ok(http_body::Frame::data(Bytes::from_static(b"token ")))))
    }
}

/// A remote store: its futures are pending first.
struct Remote(Memory);

impl Store for Remote {
    fn decide<'a>(&'a self, check: &'a Check<'a>) -> Deciding<'a> {
        Box::pin(async move {
            tokio::task::yield_now().await;
            Ok(self.0.decide(check)?)
        })
    }
}

#[tokio::test]
async fn a_remote_store_is_settled_like_memory() {
    let (clock, memory) = still();
    let rules = [
        Rule::new("logins", "30/h".parse().unwrap(), key::global())
            .charge_when(|response| response.status == 401),
        Rule::new("bytes", "100/h".parse().unwrap(), key::global()).cost(20).settle_bytes(1),
        Rule::new("slots", "1 concurrent ttl 1h".parse().unwrap(), key::global()),
    ];
    let layer = RateLimitLayer::rules(rules).store(Remote(memory.clone()), Clock::from(clock));
    let service = layer.layer(statuses());
    let passed = service.clone().oneshot(request("192.0.2.7", "/200")).await.unwrap();
    let told = passed.headers()["ratelimit"].to_str().unwrap();
    assert!(told.starts_with(r#""logins";r=30, "bytes";r=80;"#), "{told}");
    assert_eq!(answer(passed).await.body, "body");
    // The settlement runs in the background.
    let settled = || {
        left(&memory, "bytes", "100/h") == 96 && left(&memory, "slots", "1 concurrent ttl 1h") == 1
    };
    for _ in 0..1000 {
        if settled() {
            break;
        }
        tokio::task::yield_now().await;
    }
    assert!(settled(), "{} bytes left", left(&memory, "bytes", "100/h"));

    // A request that is dropped at any moment leaves no lease behind.
    for polls in 0..6 {
        {
            let mut asking = pin!(service.clone().oneshot(request("192.0.2.7", "/200")));
            let mut poll = || asking.as_mut().poll(&mut Context::from_waker(Waker::noop()));
            let _ = (0..polls).map(|_| poll()).find(Poll::is_ready);
        }
        for _ in 0..1000 {
            if left(&memory, "slots", "1 concurrent ttl 1h") == 1 {
                break;
            }
            tokio::task::yield_now().await;
        }
        assert_eq!(left(&memory, "slots", "1 concurrent ttl 1h"), 1, "after {polls} polls");
    }
}

#[tokio::test]
async fn shadow_rules_are_settled_too() {
    let (_clock, memory) = still();
    let rule = Rule::new("trial", "1000/h".parse().unwrap(), key::global())
        .cost(5)
        .settle_bytes(1)
        .shadow();
    let service = RateLimitLayer::rules([rule]).memory(memory.clone()).layer(statuses());
    answer(service.oneshot(request("192.0.2.7", "/200")).await.unwrap()).await;
    assert_eq!(left(&memory, "trial", "1000/h"), 996);
}
