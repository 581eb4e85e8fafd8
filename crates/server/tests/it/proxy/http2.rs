//! HTTP/2 from clients and to upstreams.

use std::io::{Read, Write};
use std::sync::Arc;

use axum::body::Body;
use axum::http::{Request, Response};
use http_body_util::BodyExt;
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tidegate_testkit::{attacks_held, wait_until};

use super::{Client, FREE, LONG, Stage, Upstream, bare, noting};

#[test]
fn http_2_is_supported_on_both_sides() {
    let upstream = Upstream::echoing();
    for (out, version) in [(upstream.http(), "HTTP/1.1"), (upstream.h2c(), "HTTP/2.0")] {
        let stage = Stage::before(&out, FREE);
        let echo = stage.runtime.block_on(async {
            let stream = tokio::net::TcpStream::connect(stage.at).await.unwrap();
            let (sender, connection) =
                http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
            tokio::spawn(connection);
            let mut asked = tokio::task::JoinSet::new();
            for number in 0..100 {
                let mut sender = sender.clone();
                let request =
                    Request::post(format!("http://a.example/{number}")).header("te", "trailers");
                let request = request.body(Body::from(number.to_string().repeat(10_000))).unwrap();
                asked.spawn(async move {
                    let response = sender.send_request(request).await.unwrap();
                    assert_eq!(response.status(), 200);
                    assert!(response.headers().contains_key("ratelimit"));
                    let body = response.into_body().collect().await.unwrap().to_bytes();
                    (number, String::from_utf8(body.to_vec()).unwrap())
                });
            }
            asked.join_all().await
        });
        for (number, echo) in echo {
            let target = if version == "HTTP/2.0" {
                format!("http://a.example/{number}")
            } else {
                format!("/{number}")
            };
            assert!(echo.starts_with(&format!("POST {target} {version}\n")), "{}", &echo[..200]);
            assert!(
                echo.contains("\nvia: 2.0 tidegate\n") && echo.contains("\nte: trailers\n"),
                "{}",
                &echo[..400]
            );
            assert_eq!(echo.contains("\nhost: a.example\n"), version == "HTTP/1.1");
            assert!(echo.ends_with(&number.to_string().repeat(10_000)));
        }
        // A client over HTTP/1.1 as well.
        assert!(stage.connect().get("/x", "").body.contains(&format!("/x {version}\n")));
    }
}

/// An HTTP/2 frame.
pub(super) fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// A header block without table references.
pub(super) fn fields(fields: &[(&str, &str)]) -> Vec<u8> {
    let mut out = Vec::new();
    for (name, value) in fields {
        out.push(0);
        for text in [name, value] {
            out.push(u8::try_from(text.len()).unwrap());
            out.extend(text.bytes());
        }
    }
    out
}

pub(super) const OPENING: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
pub(super) const DATA: u8 = 0;
pub(super) const HEADERS: u8 = 1;
pub(super) const RESET: u8 = 3;
const GOAWAY: u8 = 7;

/// The proxy's answer to one request: a status, a reset of the stream, or the end of the
/// connection.
pub(super) fn said(client: &mut Client) -> String {
    loop {
        let mut head = [0; 9];
        if client.stream.read_exact(&mut head).is_err() {
            return "over".into();
        }
        let mut payload = vec![0; usize::from(head[1]) << 8 | usize::from(head[2])];
        client.stream.read_exact(&mut payload).unwrap();
        match head[3] {
            HEADERS => return if payload[0] == 0x88 { "200".into() } else { "not 200".into() },
            RESET => return "reset".into(),
            GOAWAY => return "over".into(),
            _ => {}
        }
    }
}

#[test]
fn over_http_2_on_both_sides_the_upstream_may_answer_before_the_body_begins() {
    let upstream = Upstream::answering(|_| async { Response::new(Body::from("first")) });
    let stage = Stage::with(&upstream.h2c(), ", body_grace_secs: 3600", FREE);
    let mut client = stage.connect();
    let request = [(":method", "POST"), (":scheme", "http"), (":authority", "a"), (":path", "/")];
    client.send([OPENING, &frame(HEADERS, 4, 1, &fields(&request))].concat());
    assert_eq!(said(&mut client), "200");
}

#[test]
fn invalid_http_2_requests_are_not_forwarded() {
    let usual = [(":method", "GET"), (":scheme", "http"), (":authority", "a"), (":path", "/")];
    let with = |more: &[(&'static str, &'static str)]| [&usual[..], more].concat();
    let without =
        |name: &str| usual.iter().filter(|(own, _)| *own != name).copied().collect::<Vec<_>>();
    let (at, seen) = noting();
    let stage = Stage::before(&format!("http://{at}"), FREE);
    let cases = [
        ("a request", with(&[]), true),
        ("with te", with(&[("te", "trailers")]), true),
        ("host as well", with(&[("host", "a")]), true),
        ("connection", with(&[("connection", "close")]), false),
        ("keep-alive", with(&[("keep-alive", "1")]), false),
        ("proxy-connection", with(&[("proxy-connection", "close")]), false),
        ("upgrade", with(&[("upgrade", "websocket")]), false),
        ("transfer-encoding", with(&[("transfer-encoding", "chunked")]), false),
        ("te of another kind", with(&[("te", "gzip")]), false),
        ("capitals", with(&[("X-Own", "1")]), false),
        ("a line end in a value", with(&[("x-own", "1\r\nx-smuggled: 1")]), false),
        ("a line end in a name", with(&[("x-own: 1\r\nx", "1")]), false),
        (
            "a line end in the path",
            vec![usual[0], usual[1], usual[2], (":path", "/ HTTP/1.1\r\nx: y")],
            false,
        ),
        ("a space in the path", vec![usual[0], usual[1], usual[2], (":path", "/a b")], false),
        ("no method", without(":method"), false),
        ("no path", without(":path"), false),
        ("an empty path", vec![usual[0], usual[1], usual[2], (":path", "")], false),
        ("two methods", with(&[(":method", "POST")]), false),
        ("two paths", with(&[(":path", "/b")]), false),
        ("of a response", with(&[(":status", "200")]), false),
        ("unknown", with(&[(":own", "1")]), false),
        ("after a header", vec![usual[0], usual[1], usual[2], ("x", "1"), usual[3]], false),
        ("another host", with(&[("host", "b")]), false),
        ("a user", vec![usual[0], usual[1], (":authority", "u@a"), usual[3]], false),
        ("a length that is not", with(&[("content-length", "5")]), false),
        ("two lengths", with(&[("content-length", "0"), ("content-length", "1")]), false),
        ("a tunnel", vec![(":method", "CONNECT"), (":authority", "a:80")], false),
    ];
    let count = cases.len();
    for (name, request, fine) in cases {
        let before = seen.lock().unwrap().len();
        let mut client = stage.connect();
        client.send(OPENING);
        client.send(frame(HEADERS, 5, 1, &fields(&request)));
        let said = said(&mut client);
        assert_eq!(said == "200", fine, "{name}: {said}");
        let reached = seen.lock().unwrap().len() - before;
        assert!(reached == 0 || fine, "{name} reached the upstream");
    }
    attacks_held("http2", count);
    for (head, _) in seen.lock().unwrap().iter() {
        assert!(head.starts_with("GET / HTTP/1.1\r\n") && !head.contains("smuggled"), "{head}");
    }
}

#[test]
fn a_body_of_the_wrong_length_is_cut_off() {
    let (at, seen) = noting();
    let stage = Stage::before(&format!("http://{at}"), FREE);
    let request = [
        (":method", "POST"),
        (":scheme", "http"),
        (":authority", "a"),
        (":path", "/"),
        ("content-length", "3"),
    ];
    for body in ["ab", "abcd", "abGET /smuggled HTTP/1.1\r\nhost: a\r\n\r\n"] {
        let mut client = stage.connect();
        client.send(OPENING);
        client.send(frame(HEADERS, 4, 1, &fields(&request)));
        client.send(frame(DATA, 1, 1, body.as_bytes()));
        assert_ne!(said(&mut client), "200");
    }
    assert!(seen.lock().unwrap().iter().all(|(head, _)| !head.contains("smuggled")));
    attacks_held("http2", 3);
}

#[test]
fn a_client_that_resets_request_after_request_is_disconnected() {
    let (at, _) = noting();
    let stage = Stage::before(&format!("http://{at}"), FREE);
    let request =
        fields(&[(":method", "GET"), (":scheme", "http"), (":authority", "a"), (":path", "/")]);
    let mut attack = Vec::from(OPENING);
    for number in 0..20_000 {
        let stream = number * 2 + 1;
        attack.extend(frame(HEADERS, 5, stream, &request));
        attack.extend(frame(RESET, 0, stream, &8u32.to_be_bytes()));
    }
    let mut client = stage.connect();
    let mut own = client.stream.get_ref().try_clone().unwrap();
    // The proxy may close the connection before everything is sent.
    let sending = std::thread::spawn(move || _ = own.write_all(&attack));
    let mut bystander = stage.connect();
    for _ in 0..100 {
        assert_eq!(bystander.get("/", "").status, 200);
    }
    while !["over"].contains(&said(&mut client).as_str()) {}
    sending.join().unwrap();
    assert_eq!(bystander.get("/", "").status, 200);
    attacks_held("floods", 1);
}

/// After misuse, a connection keeps its slot at the listener for a while, but none at the upstream.
#[test]
fn requests_in_flight_end_with_a_misused_connection() {
    let unresponsive = bare(|mut stream| _ = stream.read_to_end(&mut Vec::new()));
    let stage = Stage::with(
        &format!("http://{unresponsive}"),
        ", max_in_flight: 1, connect_ms: 200, answer_secs: 1",
        FREE,
    );
    let head =
        fields(&[(":method", "GET"), (":scheme", "http"), (":authority", "a"), (":path", "/")]);
    let mut client = stage.connect();
    client.send([OPENING, &frame(HEADERS, 5, 1, &head)].concat());
    let busy = r#"tidegate_decisions_total{protocol="proxy",outcome="allowed"}"#;
    wait_until("it is at the upstream", LONG, || stage.metric(busy) == 1);
    let resets = (1..200).flat_map(|n| {
        [frame(HEADERS, 5, 2 * n + 1, &head), frame(RESET, 0, 2 * n + 1, &8_u32.to_be_bytes())]
    });
    client.send(resets.flatten().collect::<Vec<u8>>());
    let misuse = r#"tidegate_refused_total{protocol="proxy",reason="misuse"}"#;
    wait_until("the listener ends the connection", LONG, || stage.metric(misuse) == 1);
    let answer = stage.connect().get("/", "");
    assert_eq!(
        answer.status, 504,
        "a slot is free at the upstream, which does not answer: {}",
        answer.body
    );
    attacks_held("floods", 1);
}

/// Requests start a few at a time until responses are read, but many slow requests are all in
/// flight soon.
#[test]
fn many_requests_that_wait_for_each_other_are_all_in_flight() {
    let all = Arc::new(tokio::sync::Barrier::new(200));
    let upstream = Upstream::answering(move |_| {
        let all = Arc::clone(&all);
        async move {
            all.wait().await;
            Response::new(Body::from("at last"))
        }
    });
    let stage = Stage::before(&upstream.http(), FREE);
    let echo = stage.runtime.block_on(async {
        let stream = tokio::net::TcpStream::connect(stage.at).await.unwrap();
        let (sender, connection) =
            http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        let mut asked = tokio::task::JoinSet::new();
        for _ in 0..200 {
            let mut sender = sender.clone();
            asked.spawn(async move {
                let request = Request::get("http://a.example/").body(Body::empty()).unwrap();
                let response = sender.send_request(request).await.unwrap();
                response.into_body().collect().await.unwrap().to_bytes()
            });
        }
        asked.join_all().await
    });
    assert!(echo.len() == 200 && echo.iter().all(|echo| echo == "at last"), "{echo:?}");
}
