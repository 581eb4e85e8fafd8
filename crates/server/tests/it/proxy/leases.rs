//! Leases of `concurrent` limits: each ends with its response, however that ends, and not with its
//! ttl.

use std::future::Future;
use std::io::{BufRead, Read, Write};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use axum::body::{Body, Bytes};
use axum::http::{Request, Response, StatusCode};
use http_body_util::BodyExt;
use hyper::body::{Body as HttpBody, Frame, Incoming};
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tidegate_testkit::{Flavor, Server, wait_until};
use tokio::sync::Semaphore;

use super::http2::{HEADERS, OPENING, RESET, fields, frame};
use super::upgrades::{begin, echo, frame as websocket_frame, read_frame};
use super::{Client, LONG, Stage, Upstream, bare, read_message};

const ONE: &str = "rules: [{ name: one, limit: 1 concurrent ttl 10m }]\n";

/// A body of two lines; the second needs a permit of `go`.
struct TwoLines {
    first: Option<&'static str>,
    second: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
}

impl HttpBody for TwoLines {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        if let Some(first) = self.first.take() {
            return Poll::Ready(Some(Ok(Frame::data(first.into()))));
        }
        let Some(second) = &mut self.second else { return Poll::Ready(None) };
        ready!(second.as_mut().poll(context));
        self.second = None;
        Poll::Ready(Some(Ok(Frame::data("end\n".into()))))
    }
}

/// Answers by the path; `/held` and `/held/length` send the rest of their body for a permit of
/// `go`.
fn upstream(go: &Arc<Semaphore>) -> Upstream {
    let go = Arc::clone(go);
    Upstream::answering(move |request: Request<Incoming>| {
        let go = Arc::clone(&go);
        async move {
            let wait = async move { go.acquire_owned().await.unwrap().forget() };
            let held =
                || Body::new(TwoLines { first: Some("begun\n"), second: Some(Box::pin(wait)) });
            let mut response = Response::new(Body::from("ok"));
            match request.uri().path() {
                "/held" => *response.body_mut() = held(),
                "/held/length" => {
                    *response.body_mut() = held();
                    response.headers_mut().insert("content-length", 10.into());
                }
                "/never" => std::future::pending().await,
                "/chunked" => {
                    *response.body_mut() =
                        Body::new(TwoLines { first: Some("all\n"), second: None })
                }
                "/large" => *response.body_mut() = Body::from(vec![b'x'; 1 << 20]),
                "/none" => {
                    *response.status_mut() = StatusCode::NO_CONTENT;
                    *response.body_mut() = Body::empty();
                }
                "/empty" => *response.body_mut() = Body::empty(),
                "/failed" => *response.status_mut() = StatusCode::INTERNAL_SERVER_ERROR,
                _ => {}
            }
            response
        }
    })
}

/// State in memory, and in a real Redis.
fn stores() -> (Server, [String; 2]) {
    let server = Server::start(Flavor::Redis7);
    let redis = format!("store: {}\nresilience: {{ nodes: 1, deadline_ms: 5000 }}\n", server.url());
    (server, [String::new(), redis])
}

/// Sends a request and reads the first line of the body.
fn begin_held(stage: &Stage, path: &str) -> Client {
    let mut client = stage.connect();
    client.send(format!("GET {path} HTTP/1.1\r\nHost: a\r\nX-Tier: free\r\n\r\n"));
    let mut line = String::new();
    while !line.ends_with("begun\n") {
        line.clear();
        assert_ne!(
            client.stream.read_line(&mut line).unwrap(),
            0,
            "the response of {path} ended early"
        );
    }
    client
}

fn status(stage: &Stage, path: &str) -> u16 {
    stage.connect().get(path, "").status
}

/// How many requests were allowed so far.
fn allowed(stage: &Stage) -> u64 {
    stage.metric(r#"tidegate_decisions_total{protocol="proxy",outcome="allowed"}"#)
}

fn wait_for_the_lease(stage: &Stage, why: &str) {
    wait_until(why, LONG, || status(stage, "/") == 200);
}

#[test]
fn requests_one_after_the_other_hold_one_lease_at_a_time() {
    let (_server, stores) = stores();
    let upstream = upstream(&Arc::new(Semaphore::new(0)));
    for store in &stores {
        for (out, limit) in [
            (upstream.http(), "5 concurrent ttl 10m"),
            (upstream.http(), "1 concurrent ttl 10m"),
            (upstream.h2c(), "1 concurrent ttl 10m"),
        ] {
            let stage =
                Stage::before(&out, &format!("{store}rules: [{{ name: all, limit: {limit} }}]\n"));
            let mut kept = stage.connect();
            for (path, expected) in
                [("/", 200), ("/chunked", 200), ("/large", 200), ("/empty", 200), ("/failed", 500)]
            {
                for _ in 0..7 {
                    assert_eq!(kept.get(path, "").status, expected, "{store}{out} {limit} {path}");
                    assert_eq!(
                        status(&stage, path),
                        expected,
                        "{store}{out} {limit} {path} on a new connection"
                    );
                }
            }
            for _ in 0..7 {
                kept.send("GET /none HTTP/1.1\r\nHost: a\r\n\r\n");
                assert_eq!(kept.read().unwrap().status, 204, "{store}{out} {limit}");
                kept.send("HEAD / HTTP/1.1\r\nHost: a\r\n\r\n");
                let mut head = String::new();
                while !head.ends_with("\r\n\r\n") {
                    kept.stream.read_line(&mut head).unwrap();
                }
                assert!(head.starts_with("HTTP/1.1 200 "), "{store}{out} {limit}: {head}");
            }
        }
    }
}

#[test]
fn a_lease_is_held_while_the_body_is_sent() {
    let (_server, stores) = stores();
    let go = Arc::new(Semaphore::new(0));
    let upstream = upstream(&go);
    for store in &stores {
        let stage = Stage::before(&upstream.http(), &format!("{store}{ONE}"));
        for path in ["/held", "/held/length"] {
            let mut client = begin_held(&stage, path);
            let denied = stage.connect().get("/", "");
            assert_eq!(denied.status, 429, "{store}{path}: {}", denied.body);
            go.add_permits(1);
            let mut rest = String::new();
            while !rest.ends_with("end\n") {
                client.stream.read_line(&mut rest).unwrap();
            }
            wait_for_the_lease(&stage, "the body was sent");
        }
    }
}

#[test]
fn a_client_that_disconnects_ends_its_lease() {
    let (_server, stores) = stores();
    let upstream = upstream(&Arc::new(Semaphore::new(0)));
    for store in &stores {
        let stage = Stage::before(&upstream.http(), &format!("{store}{ONE}"));
        for path in ["/held", "/held/length"] {
            let client = begin_held(&stage, path);
            assert_eq!(status(&stage, "/"), 429, "{store}{path}");
            drop(client);
            wait_for_the_lease(&stage, "the client went in the middle of the body");
        }
        let (mut client, before) = (stage.connect(), allowed(&stage));
        client.send("GET /never HTTP/1.1\r\nHost: a\r\n\r\n");
        wait_until("the request was allowed", LONG, || allowed(&stage) > before);
        assert_eq!(status(&stage, "/"), 429, "{store}");
        drop(client);
        wait_for_the_lease(&stage, "the client went before the response");
    }
}

#[test]
fn a_lease_ends_with_an_upstream_that_fails() {
    let upstream = bare(|mut stream| {
        let Some((head, _)) = read_message(&mut stream) else { return };
        let answer: &[u8] = match head.split(' ').nth(1) {
            Some("/length") => b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nshort",
            Some("/chunked") => {
                b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nshort\r\n"
            }
            Some("/closed") => b"",
            Some("/nonsense") => b"nonsense\r\n\r\n",
            Some("/silent") => {
                let _ = stream.read_to_end(&mut Vec::new());
                return;
            }
            _ => b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok",
        };
        let _ = stream.get_mut().write_all(answer);
    });
    let (_server, stores) = stores();
    for store in &stores {
        let settings = ", answer_secs: 1, keep: 0";
        let stage = Stage::with(&format!("http://{upstream}"), settings, &format!("{store}{ONE}"));
        for path in ["/length", "/chunked"] {
            let mut client = stage.connect();
            client.send(format!("GET {path} HTTP/1.1\r\nHost: a\r\n\r\n"));
            let mut all = Vec::new();
            let _ = client.stream.read_to_end(&mut all);
            assert!(all.starts_with(b"HTTP/1.1 200 OK\r\n"), "{}", String::from_utf8_lossy(&all));
            wait_for_the_lease(&stage, "the upstream broke off");
        }
        for (path, expected) in [("/closed", 502), ("/nonsense", 502), ("/silent", 504)] {
            assert_eq!(status(&stage, path), expected, "{store}{path}");
            assert_eq!(status(&stage, "/"), 200, "{store}after {path}");
        }
    }
    let unused = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let stage = Stage::before(&format!("http://{unused}"), ONE);
    for _ in 0..3 {
        assert_eq!(status(&stage, "/"), 502, "no connection, and no lease");
    }
}

#[test]
fn a_stream_of_http_2_ends_its_lease_when_it_ends_or_is_reset() {
    let (_server, stores) = stores();
    let upstream = upstream(&Arc::new(Semaphore::new(0)));
    for store in &stores {
        for out in [upstream.http(), upstream.h2c()] {
            let stage = Stage::before(&out, &format!("{store}{ONE}"));
            stage.runtime.block_on(async {
                let stream = tokio::net::TcpStream::connect(stage.at).await.unwrap();
                let (mut sender, connection) =
                    http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
                tokio::spawn(connection);
                for path in ["/", "/chunked", "/empty", "/none", "/large"].repeat(5) {
                    let request =
                        Request::get(format!("http://a{path}")).body(Body::empty()).unwrap();
                    let response = sender.send_request(request).await.unwrap();
                    assert!(
                        response.status().is_success(),
                        "{store}{out} {path}: {}",
                        response.status()
                    );
                    response.into_body().collect().await.unwrap();
                }
            });
            let request = |path| {
                fields(&[
                    (":method", "GET"),
                    (":scheme", "http"),
                    (":authority", "a"),
                    (":path", path),
                ])
            };
            let mut client = stage.connect();
            client.send(OPENING);
            let begin = |client: &mut Client, number, path| {
                let before = allowed(&stage);
                client.send(frame(HEADERS, 5, number, &request(path)));
                wait_until("the request was allowed", LONG, || allowed(&stage) > before);
                assert_eq!(status(&stage, "/"), 429, "{store}{out} {path}");
            };
            for (number, path) in [(1, "/held"), (3, "/never"), (5, "/held/length")] {
                begin(&mut client, number, path);
                client.send(frame(RESET, 0, number, &8_u32.to_be_bytes()));
                wait_for_the_lease(&stage, "the stream was reset");
            }
            // The connection, with a stream on it.
            begin(&mut client, 7, "/held");
            drop(client);
            wait_for_the_lease(&stage, "the connection is over");
        }
    }
}

/// Starts a WebSocket session, and reads its first frame.
fn open_session(stage: &Stage) -> Client {
    let mut client = stage.connect();
    assert_eq!(begin(&mut client).status, 101);
    assert_eq!(read_frame(&mut client.stream), Some((1, b"welcome".to_vec())));
    client
}

#[test]
fn a_session_after_an_upgrade_holds_its_lease_until_it_is_over() {
    let (_server, stores) = stores();
    for store in &stores {
        let stage = Stage::before(&format!("http://{}", echo()), &format!("{store}{ONE}"));
        let next = |why: &str| {
            wait_until(why, LONG, || {
                let mut client = stage.connect();
                let status = begin(&mut client).status;
                assert!([101, 429].contains(&status), "{status}");
                status == 101
            });
        };
        let mut client = open_session(&stage);
        assert_eq!(begin(&mut stage.connect()).status, 429, "{store}one session at a time");
        client.send(websocket_frame(1, b"hello", true));
        assert_eq!(read_frame(&mut client.stream), Some((1, b"hello".to_vec())));
        assert_eq!(begin(&mut stage.connect()).status, 429, "{store}it goes on");
        client.send(websocket_frame(8, &[3, 232], true));
        assert_eq!(read_frame(&mut client.stream), Some((8, vec![3, 232])));
        assert!(client.is_over());
        drop(client);
        next("the session was closed");
        next("the one that found that out is over");
    }
}

/// A client that leaves unread bytes behind resets its connection.
#[test]
fn a_session_whose_client_resets_its_connection_is_over() {
    let stage = Stage::before(&format!("http://{}", echo()), ONE);
    let mut client = stage.connect();
    client.send("GET /chat HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n");
    wait_until("the first frame is here", LONG, || {
        let mut bytes = [0; 1024];
        let read = client.stream.get_ref().peek(&mut bytes).unwrap();
        bytes[..read].ends_with(b"welcome")
    });
    drop(client);
    wait_until("its lease has ended", LONG, || begin(&mut stage.connect()).status == 101);
}

#[test]
fn rules_beside_a_concurrent_one_keep_what_they_took() {
    let upstream = upstream(&Arc::new(Semaphore::new(0)));
    let rules = "rules:
  - { name: slots, limit: 1 concurrent ttl 10m }
  - { name: both, limit: 1 concurrent ttl 10m; 5/h, charge_when: { status: 200 } }
  - { name: tiers, limit: 100/h, overrides: [{ when: { header.x-tier: free }, limit: 1 concurrent ttl 10m }] }
  - { name: rate, limit: 4/h, missing: share }
  - { name: trial, mode: shadow, limit: 1 concurrent ttl 10m }
";
    let stage = Stage::before(&upstream.http(), rules);
    let mut client = stage.connect();
    let mut get = |path: &str| client.get(path, "X-Tier: free\r\n");
    for (path, expected) in [("/", 200), ("/failed", 500), ("/", 200)] {
        assert_eq!(get(path).status, expected, "{path}");
    }
    let held = begin_held(&stage, "/held");
    let denied = get("/").body;
    assert!(
        denied.contains(
            r#""violated-policies":["slots","both 1 concurrent ttl 10m","tiers","rate"]"#
        ),
        "{denied}"
    );
    drop(held);
    // `rate` has charged four, and the fifth request takes no lease.
    wait_until("the leases have ended", LONG, || {
        get("/").body.contains(r#""violated-policies":["rate"]"#)
    });
}

#[test]
fn a_shadow_rule_counts_leases_as_if_it_were_enforced() {
    let upstream = upstream(&Arc::new(Semaphore::new(0)));
    let rules = "rules: [{ name: trial, mode: shadow, limit: 1 concurrent ttl 10m }]\n";
    let stage = Stage::before(&upstream.http(), rules);
    let denied =
        || stage.metric("tidegate_shadow_decisions_total{rule=\"trial\",outcome=\"denied\"}");
    let held = begin_held(&stage, "/held");
    assert_eq!((status(&stage, "/"), denied()), (200, 1));
    drop(held);
    wait_until("the lease has ended", LONG, || {
        let before = denied();
        assert_eq!(status(&stage, "/"), 200);
        denied() == before
    });
}

/// Leases that the store granted end even if it is unavailable at that moment.
#[test]
fn leases_that_end_during_an_outage_are_released_afterwards() {
    let server = Server::start(Flavor::Redis7);
    let go = Arc::new(Semaphore::new(0));
    let upstream = upstream(&go);
    let store = |deadline| {
        format!(
            "store: {}\nresilience: {{ nodes: 1, deadline_ms: {deadline} }}\n{ONE}",
            server.url()
        )
    };
    let stage = Stage::before(&upstream.http(), &store(50));
    // Another node, which has no leases of its own and waits for the store's decisions.
    let other = Stage::before(&upstream.http(), &store(5000));
    let mut client = wait_until_held(&stage, &other);
    server.stop_signal();
    go.add_permits(1);
    let mut rest = String::new();
    while !rest.ends_with("end\n") {
        client.stream.read_line(&mut rest).unwrap();
    }
    let missed = || stage.metric(r#"tidegate_store_missed_total{reason="no_answer"}"#);
    wait_until("the release had no answer", LONG, || missed() > 0);
    server.continue_signal();
    wait_for_the_lease(&other, "the release arrived");
}

/// A response in flight whose lease is in the store.
fn wait_until_held(stage: &Stage, other: &Stage) -> Client {
    let mut held = None;
    wait_until("the store granted the lease", LONG, || {
        held = Some(begin_held(stage, "/held"));
        status(other, "/") == 429
    });
    held.unwrap()
}
