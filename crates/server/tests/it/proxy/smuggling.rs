//! Requests that two servers could read differently. The proxy refuses them, or rewrites them so
//! that they have one meaning.

use tidegate_testkit::attacks_held;

use super::{FREE, Stage, noting};

/// Sends bytes; returns the statuses of the responses, and the targets that reach the upstream.
fn through(bytes: &str) -> (Vec<u16>, Vec<String>, Vec<String>) {
    let (at, seen) = noting();
    let stage = Stage::before(&format!("http://{at}"), FREE);
    let mut client = stage.connect();
    client.send(bytes.as_bytes());
    let statuses = std::iter::from_fn(|| client.read()).map(|answer| answer.status).collect();
    let seen = seen.lock().unwrap();
    let targets =
        seen.iter().map(|(head, _)| head.split(' ').nth(1).unwrap().to_string()).collect();
    let bodies = seen.iter().map(|(_, body)| String::from_utf8(body.clone()).unwrap()).collect();
    (statuses, targets, bodies)
}

#[test]
fn ambiguous_requests_are_refused() {
    let cases = [
        (
            "two lengths",
            "POST /a HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
        ),
        ("two lengths in one", "POST /a HTTP/1.1\r\nHost: a\r\nContent-Length: 5, 6\r\n\r\nhello!"),
        (
            "the same length twice in one",
            "POST /a HTTP/1.1\r\nHost: a\r\nContent-Length: 5, 5\r\n\r\nhello",
        ),
        ("a length with a sign", "POST /a HTTP/1.1\r\nHost: a\r\nContent-Length: +5\r\n\r\nhello"),
        ("a length in hex", "POST /a HTTP/1.1\r\nHost: a\r\nContent-Length: 0x5\r\n\r\nhello"),
        ("a length of nothing", "POST /a HTTP/1.1\r\nHost: a\r\nContent-Length: \r\n\r\n"),
        ("a length with a tail", "POST /a HTTP/1.1\r\nHost: a\r\nContent-Length: 5 5\r\n\r\nhello"),
        (
            "a length beyond numbers",
            "POST /a HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999999999999\r\n\r\n",
        ),
        (
            "chunked and more",
            "POST /a HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        ),
        (
            "not chunked",
            "POST /a HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        ),
        (
            "identity",
            "POST /a HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: identity\r\nContent-Length: 5\r\n\r\nhello",
        ),
        (
            "chunked in 1.0",
            "POST /a HTTP/1.0\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        ),
        (
            "a space before the colon",
            "POST /a HTTP/1.1\r\nHost: a\r\nTransfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
        ),
        (
            "a space before a length",
            "POST /a HTTP/1.1\r\nHost: a\r\nContent-Length : 5\r\n\r\nhello",
        ),
        (
            "a folded line",
            "POST /a HTTP/1.1\r\nHost: a\r\nTransfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n",
        ),
        ("a folded first line", "GET /a HTTP/1.1\r\n Host: a\r\n\r\n"),
        (
            "a bare return in a value",
            "GET /a HTTP/1.1\r\nHost: a\r\nX: b\rTransfer-Encoding: chunked\r\n\r\n",
        ),
        ("nothing before the colon", "GET /a HTTP/1.1\r\nHost: a\r\n: x\r\n\r\n"),
        ("no colon", "GET /a HTTP/1.1\r\nHost: a\r\nnonsense\r\n\r\n"),
        ("a zero byte", "GET /a HTTP/1.1\r\nHost: a\r\nX: a\0b\r\n\r\n"),
        ("two hosts", "GET /a HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n"),
        ("no host", "GET /a HTTP/1.1\r\n\r\n"),
        ("a host with a path", "GET /a HTTP/1.1\r\nHost: a/b\r\n\r\n"),
        ("a host with a user", "GET /a HTTP/1.1\r\nHost: u@a\r\n\r\n"),
        ("a space in the target", "GET /a b HTTP/1.1\r\nHost: a\r\n\r\n"),
        ("version 1.2", "GET /a HTTP/1.2\r\nHost: a\r\n\r\n"),
        ("version 0.9", "GET /a\r\n\r\n"),
        ("a tunnel", "CONNECT a:80 HTTP/1.1\r\nHost: a:80\r\n\r\n"),
    ];
    let count = cases.len();
    for (name, bytes) in cases {
        let (statuses, targets, _) = through(bytes);
        assert_eq!(targets, [""; 0], "{name}: {statuses:?}");
        assert!(
            statuses.len() <= 1 && statuses.iter().all(|status| [400, 405, 505].contains(status)),
            "{name}: {statuses:?}"
        );
    }
    attacks_held("smuggling", count);
}

#[test]
fn invalid_chunks_end_the_connection() {
    let cases = [
        ("not a number", "zz\r\nab\r\n0\r\n\r\n"),
        ("a sign", "+2\r\nab\r\n0\r\n\r\n"),
        ("with 0x", "0x2\r\nab\r\n0\r\n\r\n"),
        ("longer than said", "2\r\nabc\r\n0\r\n\r\n"),
        ("no size", "\r\nab\r\n0\r\n\r\n"),
        ("beyond numbers", "fffffffffffffffff\r\nab\r\n0\r\n\r\n"),
        ("a bare line feed", "2\nab\r\n0\r\n\r\n"),
        ("a bare line feed in an extension", "2;a\nb\r\nab\r\n0\r\n\r\n"),
        ("a bare line feed after data", "2\r\nab\n0\r\n\r\n"),
        ("a return without a feed", "2\rXab\r\n0\r\n\r\n"),
    ];
    let count = cases.len();
    for (name, chunks) in cases {
        let smuggled = "GET /smuggled HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n";
        let bytes = format!(
            "POST /a HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n{chunks}{smuggled}"
        );
        let (statuses, targets, _) = through(&bytes);
        assert!(!targets.contains(&"/smuggled".into()), "{name}: {targets:?}");
        assert!(!statuses.contains(&200), "{name}: {statuses:?}");
    }
    attacks_held("smuggling", count);
}

#[test]
fn unambiguous_requests_are_normalized() {
    let post =
        |headers: &str, body: &str| format!("POST /a HTTP/1.1\r\nHost: a\r\n{headers}\r\n{body}");
    let next = "GET /next HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n";
    let cases = [
        // The length is ignored and the connection closes, so what follows is not parsed as a
        // request.
        ("length and chunked", post("Content-Length: 3\r\nTransfer-Encoding: chunked\r\n", "2\r\nab\r\n0\r\n\r\n") + next, &["/a"][..], &["ab"][..]),
        ("chunked and length", post("Transfer-Encoding: chunked\r\nContent-Length: 3\r\n", "2\r\nab\r\n0\r\n\r\n") + next, &["/a"], &["ab"]),
        ("the same length twice", post("Content-Length: 2\r\nContent-Length: 2\r\n", "ab") + next, &["/a", "/next"], &["ab", ""]),
        ("chunked in capitals", post("Transfer-Encoding: Chunked\r\n", "2\r\nab\r\n0\r\n\r\n") + next, &["/a", "/next"], &["ab", ""]),
        ("the length is named as ours alone", post("Connection: content-length\r\nContent-Length: 2\r\n", "ab") + next, &["/a", "/next"], &["ab", ""]),
        ("another host in the target", "GET http://b/x HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n".into(), &["/x"], &[""]),
        ("HTTP/2 is not begun", "GET /a HTTP/1.1\r\nHost: a\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\nConnection: close\r\n\r\n".into(), &["/a"], &[""]),
        // Bare line feeds are read as line ends, and rewritten as CRLF.
        ("bare line feeds", "GET /a HTTP/1.1\nHost: a\n\n".to_string() + next, &["/a", "/next"], &["", ""]),
        ("a body of GET", "GET /a HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: 37\r\n\r\nGET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n12".into(), &["/a"], &["GET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n12"]),
    ];
    let count = cases.len();
    for (name, bytes, targets, bodies) in cases {
        let (statuses, reached, sent) = through(&bytes);
        assert_eq!(reached, targets, "{name}: {statuses:?}");
        assert_eq!(sent, bodies, "{name}");
    }
    attacks_held("smuggling", count);
}

#[test]
fn the_host_of_the_target_overrides_the_header() {
    let (at, seen) = noting();
    let stage = Stage::before(
        &format!("http://{at}"),
        "rules: [{ name: b, when: { host: b }, limit: deny }]\n",
    );
    assert_eq!(stage.connect().ask("GET http://b/x HTTP/1.1\r\nHost: a\r\n\r\n").status, 403);
    assert_eq!(stage.connect().ask("GET http://c/x HTTP/1.1\r\nHost: b\r\n\r\n").status, 200);
    let head = seen.lock().unwrap()[0].0.clone();
    assert!(head.starts_with("GET /x HTTP/1.1\r\n") && head.contains("host: c\r\n"), "{head}");
}

#[test]
fn no_path_leaves_the_base() {
    let (at, seen) = noting();
    let upstream = format!("http://{at}/base");
    let keeping = Stage::before(&upstream, &format!("paths: {{ dot_segments: keep }}\n{FREE}"));
    let default = Stage::before(&upstream, FREE);
    for (path, status, by_default) in [
        ("/x", 200, 200),
        ("/x/../y", 200, 400),
        ("/../x", 400, 400),
        ("/%2e%2e/x", 400, 400),
        ("/..;/x", 400, 400),
        ("/", 200, 200),
    ] {
        assert_eq!(keeping.connect().get(path, "").status, status, "{path}");
        assert_eq!(default.connect().get(path, "").status, by_default, "{path}");
    }
    let seen = seen.lock().unwrap();
    assert!(seen.iter().all(|(head, _)| head.starts_with("GET /base/")), "{seen:?}");
}

#[test]
fn heads_are_bounded() {
    let (at, seen) = noting();
    let stage = Stage::before(&format!("http://{at}"), FREE);
    let long = "x".repeat(9000);
    assert_eq!(stage.connect().get(&format!("/{long}"), "").status, 414);
    let many: String = (0..120).map(|n| format!("X-{n}: 1\r\n")).collect();
    assert_eq!(stage.connect().get("/", &many).status, 431);
    let large = format!("X: {}\r\n", "y".repeat(40_000));
    assert_eq!(stage.connect().get("/", &large).status, 431);
    assert!(seen.lock().unwrap().is_empty());
}
