//! Requests and responses through the proxy.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::io::{BufRead, Read, Write};
use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::{Body, Bytes};
use axum::http::Response;
use http_body_util::BodyExt;
use hyper::body::{Body as HttpBody, Frame};
use tidegate_testkit::Certs;

use super::{FREE, LONG, Stage, Upstream, noting};

#[test]
fn requests_are_forwarded_and_responses_relayed() {
    let upstream = Upstream::echoing();
    let stage = Stage::before(&upstream.http(), FREE);
    let mut client = stage.connect();
    let answer = client.ask(
        "POST /a%20b//c;d?x=/../%2F HTTP/1.1\r\nHost: a.example:81\r\nX-Forwarded-For: 192.0.2.1\r\nConnection: close-not, X-Own\r\nX-Own: 1\r\n\
         Keep-Alive: 1\r\nTE: trailers\r\nX-Kept: yes\r\nContent-Length: 5\r\n\r\nhello",
    );
    assert_eq!(answer.status, 200, "{}", answer.head);
    let echo = &answer.body;
    assert!(
        echo.starts_with("POST /a%20b//c;d?x=/../%2F HTTP/1.1\n"),
        "the target goes on as it came: {echo}"
    );
    for line in [
        "host: a.example:81",
        "x-kept: yes",
        "content-length: 5",
        "te: trailers",
        "x-forwarded-for: 127.0.0.1",
        "x-forwarded-proto: http",
        "x-forwarded-host: a.example:81",
        "forwarded: for=127.0.0.1;host=\"a.example:81\";proto=http",
        "via: 1.1 tidegate",
    ] {
        assert!(echo.contains(&format!("\n{line}\n")), "{line} is missing in {echo}");
    }
    for name in ["x-own", "keep-alive"] {
        assert!(!echo.contains(&format!("\n{name}:")), "{name} is in {echo}");
    }
    assert!(echo.ends_with("\nhello"), "{echo}");
    // Both connections stay open.
    assert_eq!(client.get("/again", "").status, 200);
    assert_eq!(client.get("/", "Connection: close\r\n").status, 200);
    assert!(client.is_over(), "as the client requested");
}

#[test]
fn denied_requests_do_not_reach_the_upstream() {
    let (at, seen) = noting();
    let rules = "rules: [{ name: per-key, by: [header.x-api-key, path], limit: 2/h }]\n";
    let stage = Stage::before(&format!("http://{at}"), rules);
    let mut client = stage.connect();
    for left in [1, 0] {
        let answer = client.get("/v1/search?q=1", "X-API-Key: k\r\n");
        assert_eq!(answer.status, 200);
        assert_eq!(answer.field("x-ratelimit-remaining"), Some(left.to_string().as_str()));
        assert_eq!(answer.field("ratelimit-policy"), Some("\"per-key\";q=2;w=3600"));
    }
    // Other spellings of a path count as that path.
    let answer = client.get("/v1//%73earch;v=1", "X-API-Key: k\r\n");
    assert_eq!(answer.status, 429, "{}", answer.head);
    assert_eq!(answer.field("content-type"), Some("application/problem+json"));
    assert_eq!(answer.field("cache-control"), Some("no-store"));
    let retry: u64 = answer.field("retry-after").unwrap().parse().unwrap();
    assert!((1..=1800).contains(&retry));
    assert!(answer.body.contains(r#""violated-policies":["per-key"]"#), "{}", answer.body);
    assert_eq!(client.get("/v1/other", "X-API-Key: k\r\n").status, 200);
    assert_eq!(client.get("/v1/search", "X-API-Key: l\r\n").status, 200);
    assert_eq!(seen.lock().unwrap().len(), 4);
    assert_eq!(stage.metric(r#"tidegate_decisions_total{protocol="proxy",outcome="denied"}"#), 1);
}

#[test]
fn the_client_is_found_behind_trusted_proxies() {
    let (at, seen) = noting();
    let rules = "rules: [{ name: per-ip, by: ip, limit: 1/h }]\n";
    let spoofing = Stage::before(&format!("http://{at}"), rules);
    let behind =
        Stage::before(&format!("http://{at}"), &format!("trusted_proxies: [loopback]\n{rules}"));
    for (stage, expected) in [(&spoofing, [200, 429]), (&behind, [200, 200])] {
        let ask = |ip: &str| {
            stage
                .connect()
                .get("/", &format!("X-Forwarded-For: {ip}\r\nForwarded: for={ip}\r\n"))
                .status
        };
        assert_eq!([ask("192.0.2.1"), ask("192.0.2.2")], expected);
    }
    let heads: Vec<String> = seen.lock().unwrap().iter().map(|(head, _)| head.clone()).collect();
    assert!(heads[0].contains("x-forwarded-for: 127.0.0.1\r\n"), "{}", heads[0]);
    assert!(heads[1].contains("x-forwarded-for: 192.0.2.1, 127.0.0.1\r\n"), "{}", heads[1]);
    assert!(
        heads[1].contains("forwarded: for=192.0.2.1, for=127.0.0.1;host=a.example;proto=http\r\n"),
        "{}",
        heads[1]
    );
}

#[test]
fn bodies_of_unknown_length_and_trailers_are_streamed_both_ways() {
    let upstream = Upstream::answering(|request| async {
        let body = request.into_body().collect().await.unwrap();
        let sum = body.trailers().and_then(|trailers| trailers.get("x-sum").cloned());
        let echo = body.to_bytes();
        let trailers = [("x-answer".parse().unwrap(), sum.unwrap_or("none".parse().unwrap()))]
            .into_iter()
            .collect();
        let frames = [Frame::data(echo), Frame::trailers(trailers)].into();
        let mut response = Response::new(Body::new(Frames(frames)));
        response.headers_mut().insert("trailer", "x-answer".parse().unwrap());
        response
    });
    for out in [upstream.http(), upstream.h2c()] {
        let stage = Stage::before(&out, FREE);
        let chunks = "TE: trailers\r\nTrailer: x-sum\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2;ext=1\r\nde\r\n0\r\nX-Sum: 7\r\n\r\n";
        for method in ["POST", "GET"] {
            let answer = stage.connect().ask(format!("{method} / HTTP/1.1\r\nHost: a\r\n{chunks}"));
            assert_eq!(answer.status, 200, "{}", answer.head);
            assert_eq!(answer.body, "abcde\ntrailer x-answer: 7", "{method} {out} {}", answer.head);
        }
    }
}

/// A body of these frames.
struct Frames(VecDeque<Frame<Bytes>>);

impl HttpBody for Frames {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Ready(self.0.pop_front().map(Ok))
    }
}

#[test]
fn responses_are_unchanged() {
    let upstream = Upstream::answering(|request| async move {
        let mut response = Response::new(match request.uri().path() {
            "/empty" | "/none" => Body::empty(),
            _ => Body::from("body"),
        });
        match request.uri().path() {
            "/none" => *response.status_mut() = axum::http::StatusCode::NO_CONTENT,
            "/same" => *response.status_mut() = axum::http::StatusCode::NOT_MODIFIED,
            "/old" => *response.version_mut() = axum::http::Version::HTTP_10,
            _ => {}
        }
        for (name, value) in [
            ("connection", "x-own"),
            ("x-own", "1"),
            ("set-cookie", "a=1"),
            ("x-ratelimit-limit", "7"),
        ] {
            response.headers_mut().append(name, value.parse().unwrap());
        }
        response.headers_mut().append("set-cookie", "b=2".parse().unwrap());
        response
    });
    let stage = Stage::before(&upstream.http(), FREE);
    let mut client = stage.connect();
    let answer = client.get("/", "");
    assert_eq!((answer.status, answer.body.as_str()), (200, "body"));
    assert_eq!(answer.head.matches("set-cookie").count(), 2, "{}", answer.head);
    assert_eq!(answer.field("x-own").or(answer.field("connection")), None, "{}", answer.head);
    assert_eq!(
        answer.field("x-ratelimit-limit"),
        Some("1000000"),
        "ours stands in place of theirs"
    );
    assert_eq!(client.get("/empty", "").field("content-length"), Some("0"));
    let old = client.get("/old", "");
    assert!(
        old.head.starts_with("HTTP/1.1 200 ") && old.body == "body",
        "the version of a message is its sender's: {}",
        old.head
    );
    client.send("GET /none HTTP/1.1\r\nHost: a\r\n\r\n");
    assert_eq!(client.read().unwrap().status, 204);
    assert_eq!(client.get("/", "").body, "body");
    // The length of the GET response, and no body.
    client.send("HEAD / HTTP/1.1\r\nHost: a\r\n\r\nGET /empty HTTP/1.1\r\nHost: a\r\n\r\n");
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        client.stream.read_line(&mut head).unwrap();
    }
    assert!(head.contains("content-length: 4\r\n"), "{head}");
    assert_eq!(client.read().unwrap().field("content-length"), Some("0"));
}

#[test]
fn expect_100_continue_is_answered_or_denied() {
    let (at, seen) = noting();
    let stage = Stage::before(&format!("http://{at}"), "rules: [{ name: all, limit: 1/h }]\n");
    let head = "POST / HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n";
    let mut client = stage.connect();
    assert_eq!(client.ask(head).status, 100);
    assert_eq!(client.ask("hi").status, 200);
    assert!(!seen.lock().unwrap()[0].0.contains("expect"));
    assert_eq!(stage.connect().ask(head).status, 429, "without a body having been sent");
}

#[test]
fn clients_may_use_tls() {
    use tokio_rustls::rustls::pki_types::pem::PemObject;
    use tokio_rustls::rustls::{
        ClientConfig, ClientConnection, RootCertStore, StreamOwned, crypto::ring,
    };
    let certs = Certs::new();
    let upstream = Upstream::echoing();
    let tls = format!(
        "tls: {{ cert: {}, key: {} }}\n",
        certs.server_cert().display(),
        certs.server_key().display()
    );
    let stage = Stage::before(&upstream.http(), &format!("{tls}{FREE}"));
    let mut roots = RootCertStore::empty();
    roots
        .add(tokio_rustls::rustls::pki_types::CertificateDer::from_pem_file(certs.ca()).unwrap())
        .unwrap();
    let config = ClientConfig::builder_with_provider(ring::default_provider().into())
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let stream = std::net::TcpStream::connect(stage.at).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    let session = ClientConnection::new(config.into(), "localhost".try_into().unwrap()).unwrap();
    let mut stream = StreamOwned::new(session, stream);
    stream.write_all(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    let _ = stream.read_to_string(&mut answer);
    assert!(answer.contains("x-forwarded-proto: https\n"), "{answer}");
}
