//! Failing upstreams and slow clients.

use std::io::{BufRead, Read, Write};
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tidegate_testkit::wait_until;

use super::{FREE, LONG, Stage, bare, noting, read_message};

#[test]
fn each_failure_of_an_upstream_has_its_status_and_detail() {
    let unused = {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.local_addr().unwrap()
    };
    let unresponsive = bare(|mut stream| _ = stream.read_to_end(&mut Vec::new()));
    let closing = bare(|mut stream| _ = read_message(&mut stream));
    let babbling = bare(|mut stream| {
        let _ = read_message(&mut stream);
        let _ = stream.get_mut().write_all(b"SSH-2.0-babble\r\n\r\n");
    });
    let switching = bare(|mut stream| {
        let _ = read_message(&mut stream);
        let _ = stream.get_mut().write_all(
            b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
        );
        let _ = stream.read_to_end(&mut Vec::new());
    });
    let settings = ", answer_secs: 1, connect_ms: 2000";
    for (scheme, at, status, detail) in [
        ("http", unused, 502, "cannot connect to the upstream"),
        ("h2c", unused, 502, "cannot connect to the upstream"),
        ("http", unresponsive, 504, "did not begin to answer within 1 seconds"),
        ("http", closing, 502, "closed the connection without an answer"),
        ("http", babbling, 502, "not HTTP"),
        ("http", switching, 502, "not HTTP"),
    ] {
        let stage = Stage::with(&format!("{scheme}://{at}"), settings, FREE);
        let answer = stage.connect().get("/", "");
        assert_eq!(answer.status, status, "{}", answer.body);
        assert!(answer.body.contains(detail), "{}", answer.body);
        assert!(
            !answer.body.contains(&at.port().to_string()),
            "the address of the upstream is not shown: {}",
            answer.body
        );
        assert_eq!(answer.field("content-type"), Some("application/problem+json"));
        assert_eq!(
            stage.metric(r#"tidegate_refused_total{protocol="proxy",reason="upstream"}"#),
            1
        );
    }
}

#[test]
fn connections_that_the_upstream_closed_are_not_reused() {
    let closed = Arc::new(AtomicUsize::new(0));
    let noted = Arc::clone(&closed);
    let at = bare(move |mut stream| {
        // One request per connection, without `Connection: close`.
        if read_message(&mut stream).is_some() {
            let _ = stream.get_mut().write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok");
            drop(stream);
            noted.fetch_add(1, Ordering::SeqCst);
        }
    });
    let stage = Stage::before(&format!("http://{at}"), FREE);
    let mut client = stage.connect();
    for now in 1..=20 {
        assert_eq!(
            client.ask("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\n\r\nx").status,
            200
        );
        wait_until("it is closed", LONG, || closed.load(Ordering::SeqCst) == now);
    }
}

#[test]
fn upstream_connections_are_reused() {
    let connections = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&connections);
    let at = bare(move |mut stream| {
        count.fetch_add(1, Ordering::SeqCst);
        while read_message(&mut stream).is_some() {
            // In pieces, without a length.
            for piece in [
                "HTTP/1.1 200 OK\r\ntransfer-",
                "encoding: chunked\r\n\r\n2\r\n",
                "ok\r\n",
                "0\r\n\r\n",
            ] {
                stream.get_mut().write_all(piece.as_bytes()).unwrap();
            }
        }
    });
    let stage = Stage::before(&format!("http://{at}"), FREE);
    for _ in 0..50 {
        assert_eq!(stage.connect().get("/", "").body, "ok");
    }
    let used = connections.load(Ordering::SeqCst);
    assert!(used <= 5, "{used} connections for 50 requests, one after the other");
}

#[test]
fn an_incomplete_response_stays_incomplete() {
    let at = bare(|mut stream| {
        let _ = read_message(&mut stream);
        let _ =
            stream.get_mut().write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nonly this");
    });
    let stage = Stage::before(&format!("http://{at}"), FREE);
    let mut client = stage.connect();
    client.send("GET / HTTP/1.1\r\nHost: a\r\n\r\n");
    let mut text = Vec::new();
    let _ = client.stream.read_to_end(&mut text);
    let text = String::from_utf8(text).unwrap();
    assert!(text.contains("content-length: 100") && text.ends_with("only this"), "{text}");
}

#[test]
fn a_stalled_response_is_cut_off() {
    let at = bare(|mut stream| {
        let _ = read_message(&mut stream);
        let _ =
            stream.get_mut().write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nonly this");
        let _ = stream.read_to_end(&mut Vec::new());
    });
    let stage = Stage::with(&format!("http://{at}"), ", idle_secs: 1", FREE);
    let mut client = stage.connect();
    client.send("GET / HTTP/1.1\r\nHost: a\r\n\r\n");
    let mut text = Vec::new();
    let _ = client.stream.read_to_end(&mut text);
    assert!(text.ends_with(b"only this"));
}

#[test]
fn a_stalled_request_body_is_cut_off() {
    let (at, _) = noting();
    let stage = Stage::with(&format!("http://{at}"), ", idle_secs: 1", FREE);
    let mut client = stage.connect();
    let answer = client.ask("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\nonly this");
    assert_eq!(answer.status, 408, "{}", answer.body);
    assert!(client.is_over());
}

#[test]
fn the_upstream_connection_closes_when_the_client_disconnects() {
    let (notify, heard) = std::sync::mpsc::channel();
    let at = bare(move |mut stream| {
        let mut line = String::new();
        while !line.ends_with("\r\n\r\n") {
            stream.read_line(&mut line).unwrap();
        }
        notify.send("began").unwrap();
        let _ = stream.read_to_end(&mut Vec::new());
        notify.send("ended").unwrap();
    });
    let stage = Stage::before(&format!("http://{at}"), FREE);
    let mut client = stage.connect();
    client.send("GET / HTTP/1.1\r\nHost: a\r\n\r\n");
    assert_eq!(heard.recv_timeout(LONG), Ok("began"));
    drop(client);
    assert_eq!(heard.recv_timeout(LONG), Ok("ended"));
}

#[test]
fn requests_beyond_max_in_flight_wait_and_then_get_503() {
    let unresponsive = bare(|mut stream| _ = stream.read_to_end(&mut Vec::new()));
    let stage = Stage::with(
        &format!("http://{unresponsive}"),
        ", max_in_flight: 1, connect_ms: 200, answer_secs: 5",
        FREE,
    );
    let mut first = stage.connect();
    first.send("GET / HTTP/1.1\r\nHost: a\r\n\r\n");
    let busy = r#"tidegate_decisions_total{protocol="proxy",outcome="allowed"}"#;
    wait_until("the first is there", LONG, || stage.metric(busy) == 1);
    let answer = stage.connect().get("/", "");
    assert_eq!((answer.status, answer.field("retry-after")), (503, Some("1")));
    drop(first);
}

#[test]
fn slow_heads_are_cut_off_and_requests_in_flight_finish_on_shutdown() {
    let (at, _) = noting();
    let (begun, go) = (std::sync::mpsc::channel(), Arc::new(std::sync::Barrier::new(2)));
    let (notify, engine) = (begun.0, Arc::clone(&go));
    let slow = bare(move |mut stream| {
        let _ = read_message(&mut stream);
        notify.send(()).unwrap();
        engine.wait();
        let _ = stream.get_mut().write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok");
    });
    let stage = Stage::before(&format!("http://{at}"), FREE);
    let mut client = stage.connect();
    client.send("GET / HTTP/1.1\r\nHost: ");
    assert!(client.is_over(), "five seconds are enough for a head");
    drop(stage);
    let mut stage = Stage::before(&format!("http://{slow}"), FREE);
    let mut client = stage.connect();
    client.send("GET / HTTP/1.1\r\nHost: a\r\n\r\n");
    begun.1.recv_timeout(LONG).unwrap();
    let running = stage.running.take().unwrap();
    let stopped = stage.runtime.spawn(running.stop());
    let closed = || std::net::TcpStream::connect(stage.at).is_err();
    wait_until("the listener is closed", LONG, closed);
    go.wait();
    let answer = client.read().unwrap();
    assert_eq!((answer.status, answer.field("connection")), (200, Some("close")));
    assert!(stage.runtime.block_on(stopped).unwrap());
}
