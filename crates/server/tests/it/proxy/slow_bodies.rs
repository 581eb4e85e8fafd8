//! Slow request bodies: they do not block other clients, and they time out.

use std::io::{Read, Write};
use std::time::{Duration, Instant};

use tidegate_testkit::wait_until;

use super::{Client, FREE, LONG, Stage, bare, noting, read_message};

const ALLOWED: &str = r#"tidegate_decisions_total{protocol="proxy",outcome="allowed"}"#;
const FULL: &str = r#"tidegate_refused_total{protocol="proxy",reason="full_for_address"}"#;
const SLOW: &str = r#"tidegate_refused_total{protocol="proxy",reason="slow"}"#;

/// The head of a request with a body of so many bytes.
fn post(bytes: usize) -> String {
    format!("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: {bytes}\r\n\r\n")
}

#[test]
fn one_client_with_slow_bodies_does_not_block_others() {
    let (at, _) = noting();
    let stage = Stage::with(
        &format!("http://{at}"),
        ", max_in_flight: 8, connect_ms: 200, body_grace_secs: 5",
        FREE,
    );
    let mut greedy: Vec<Client> = (0..40).map(|_| stage.connect_from(2)).collect();
    // Each has sent part of its body, so the proxy has something to send.
    greedy.iter_mut().for_each(|client| client.send(post(1000) + "x"));
    wait_until("38 found no slot: a quarter of 8 is 2", LONG, || stage.metric(FULL) == 38);
    for host in [1, 3, 4] {
        let mut other = stage.connect_from(host);
        assert_eq!(other.get("/", "").status, 200, "127.0.0.{host}");
        assert_eq!(other.ask(post(5) + "hello").status, 200, "127.0.0.{host}");
    }
    assert_eq!(stage.metric(SLOW), 0);
    let answers: Vec<_> = greedy.iter_mut().map(|client| client.read().unwrap()).collect();
    let refused: Vec<_> = answers.iter().filter(|answer| answer.status == 429).collect();
    for answer in &refused {
        assert_eq!(answer.field("retry-after"), Some("1"));
        assert!(
            answer.body.contains("this client has 2 requests at the upstream already"),
            "{}",
            answer.body
        );
    }
    let slow = answers.iter().filter(|answer| answer.status == 408).count();
    assert_eq!((refused.len(), slow), (38, 2));
    tidegate_testkit::attacks_held("slow", 1);
}

#[test]
fn the_share_of_one_client_is_configurable() {
    let silent = bare(|mut stream| _ = stream.read_to_end(&mut Vec::new()));
    let settings =
        ", max_in_flight: 8, max_in_flight_per_client: 5, connect_ms: 200, answer_secs: 60";
    let stage = Stage::with(&format!("http://{silent}"), settings, FREE);
    let mut held: Vec<Client> = (0..5).map(|_| stage.connect_from(2)).collect();
    held.iter_mut().for_each(|client| client.send("GET / HTTP/1.1\r\nHost: a\r\n\r\n"));
    wait_until("they are at the upstream", LONG, || stage.metric(ALLOWED) == 5);
    assert_eq!(stage.connect_from(2).get("/", "").status, 429);
    // The rest is for other clients. When no slot is left, the status is 503 for all of them.
    let mut others: Vec<Client> = (0..3).map(|_| stage.connect_from(3)).collect();
    others.iter_mut().for_each(|client| client.send("GET / HTTP/1.1\r\nHost: a\r\n\r\n"));
    wait_until("they are at the upstream", LONG, || stage.metric(ALLOWED) == 9);
    assert_eq!(stage.connect_from(2).get("/", "").status, 503);
    assert_eq!(stage.connect_from(4).get("/", "").status, 503);
    assert_eq!(stage.metric(FULL), 1);
    drop((held, others));
}

#[test]
fn a_request_whose_body_has_not_begun_takes_no_slot() {
    let (at, seen) = noting();
    let stage = Stage::with(&format!("http://{at}"), ", max_in_flight: 1, connect_ms: 200", FREE);
    let mut slow: Vec<Client> = (0..5).map(|_| stage.connect_from(2)).collect();
    slow.iter_mut().for_each(|client| client.send(post(5)));
    let mut chunked = stage.connect_from(2);
    chunked.send("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n");
    wait_until("the rules have seen them", LONG, || stage.metric(ALLOWED) == 6);
    assert_eq!(stage.connect_from(1).get("/", "").status, 200);
    for client in &mut slow {
        assert_eq!(client.ask("hello").status, 200);
    }
    assert_eq!(chunked.ask("3\r\nabc\r\n0\r\n\r\n").status, 200);
    // The part read before there was a slot is sent once.
    let seen: Vec<(String, Vec<u8>)> = seen.lock().unwrap().drain(..).skip(1).collect();
    assert_eq!(seen.len(), 6);
    for (head, body) in &seen[..5] {
        assert_eq!(
            (head.contains("content-length: 5\r\n"), &body[..]),
            (true, &b"hello"[..]),
            "{head}"
        );
    }
    let (head, body) = &seen[5];
    assert_eq!(
        (head.contains("transfer-encoding: chunked\r\n"), &body[..]),
        (true, &b"abc"[..]),
        "{head}"
    );
}

#[test]
fn a_body_below_the_minimum_rate_is_cut_off() {
    let (at, _) = noting();
    let settings = ", body_grace_secs: 1, min_body_bytes_per_second: 1000";
    let stage = Stage::with(&format!("http://{at}"), settings, FREE);
    // Before the first byte of the body, and after it.
    for begin in ["", "0123456789"] {
        let (mut client, began) = (stage.connect(), Instant::now());
        let answer = client.ask(post(10_000) + begin);
        assert_eq!(answer.status, 408, "{}", answer.body);
        assert!(
            answer.body.contains("came too slowly: expected at least 1000 bytes a second"),
            "{}",
            answer.body
        );
        assert!((Duration::from_secs(1)..LONG).contains(&began.elapsed()), "{:?}", began.elapsed());
        assert!(client.is_over());
    }
    assert_eq!(stage.metric(SLOW), 2);
    // 3000 bytes extend the deadline by three seconds.
    let (mut client, began) = (stage.connect(), Instant::now());
    assert_eq!(client.ask(post(10_000) + &"x".repeat(3000)).status, 408);
    assert!(began.elapsed() >= Duration::from_secs(4), "{:?}", began.elapsed());
    tidegate_testkit::attacks_held("slow", 1);
}

#[test]
fn without_a_minimum_a_body_may_be_slow() {
    let (at, _) = noting();
    let settings = ", body_grace_secs: 1, min_body_bytes_per_second: 0, idle_secs: 2";
    let stage = Stage::with(&format!("http://{at}"), settings, FREE);
    let answer = stage.connect().ask(post(10_000) + "x");
    assert_eq!(answer.status, 408, "{}", answer.body);
    assert!(answer.body.contains("stalled"), "{}", answer.body);
}

#[test]
fn time_that_the_upstream_takes_does_not_count() {
    const BYTES: usize = 16 << 20;
    let (go, gone) = std::sync::mpsc::channel::<()>();
    let gone = std::sync::Arc::new(std::sync::Mutex::new(gone));
    let at = bare(move |mut stream| {
        let mut head = [0; 16];
        stream.read_exact(&mut head).unwrap();
        gone.lock().unwrap().recv().unwrap();
        // The rest of the head has no length of its own to look for.
        let mut rest = std::io::Cursor::new(head.to_vec()).chain(stream);
        let (_, body) = read_message(&mut rest).unwrap();
        let mut stream = rest.into_inner().1;
        write!(stream.get_mut(), "HTTP/1.1 200 OK\r\ncontent-length: 8\r\n\r\n{:08}", body.len())
            .unwrap();
    });
    let settings = ", body_grace_secs: 1, min_body_bytes_per_second: 1000000000";
    let stage = Stage::with(&format!("http://{at}"), settings, FREE);
    let mut client = stage.connect();
    let mut writer = client.stream.get_ref().try_clone().unwrap();
    let began = Instant::now();
    let sending =
        std::thread::spawn(move || writer.write_all((post(BYTES) + &"x".repeat(BYTES)).as_bytes()));
    wait_until("more than the grace has passed", LONG, || {
        began.elapsed() > Duration::from_millis(1500)
    });
    go.send(()).unwrap();
    let answer = client.read().unwrap();
    assert_eq!((answer.status, answer.body), (200, format!("{BYTES:08}")));
    sending.join().unwrap().unwrap();
}
