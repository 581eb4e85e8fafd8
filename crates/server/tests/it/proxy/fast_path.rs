//! The fast path and the general path give the same answers, and send the same requests upstream.

use std::io::Write;
use std::sync::{Arc, Mutex};

use super::{Client, Stage, bare, read_message};

/// The responses that a client received: heads and bodies, `None` if the connection ended.
type Responses = Vec<Option<(String, String)>>;

/// Requests as text, each sent in one write.
fn requests() -> Vec<String> {
    let heads = [
        "GET /plain HTTP/1.1\r\nHost: a.example\r\n",
        "GET /plain?x=1&y=%20 HTTP/1.1\r\nhOsT: A.example:81\r\nConnection: Keep-Alive\r\nKeep-Alive: timeout=5\r\n",
        "GET /plain HTTP/1.1\r\nHost: a\r\nX-Forwarded-For: 192.0.2.1\r\nX-Forwarded-Proto: https\r\nForwarded: for=192.0.2.1\r\nX-Real-IP: 192.0.2.1\r\nX-Forwarded-Port: 1\r\n",
        "GET /plain HTTP/1.1\r\nHost: a\r\nCookie: a=1\r\nX-One: 1\r\nCookie: b=2\r\nx-one: 2\r\nVia: 1.0 other\r\nAuthorization: Bearer x\r\nX-Odd: \u{fc}\r\nX-Empty:\r\n",
        "GET /plain HTTP/1.1\r\nHost:\r\nProxy-Authorization: Basic x\r\nUser-Agent: u\r\nAccept: */*\r\nAccept-Encoding: gzip\r\nAccept-Language: de\r\nReferer: http://a/\r\nIf-None-Match: \"x\"\r\nX-A: 1\r\nX-B: 2\r\nX-C: 3\r\n",
        "OPTIONS * HTTP/1.1\r\nHost: a\r\n",
        "OPTIONS /plain HTTP/1.1\r\nHost: a\r\n",
        "DELETE /plain HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n",
        "POST /plain HTTP/1.1\r\nHost: a\r\n",
        "PURGE /a/../%2e%2e/./b//c HTTP/1.1\r\nHost: a\r\n",
        "GET http://b.example/plain HTTP/1.1\r\nHost: a\r\n",
        "GET /plain HTTP/1.1\r\nHost: a\r\nHost: a\r\n",
        "GET /plain HTTP/1.1\r\nHost: a b\r\n",
        "GET /plain HTTP/1.1\r\n",
        "GET /plain HTTP/1.0\r\nHost: a\r\n",
        "GET /plain HTTP/1.1\r\nHost: a\r\nConnection: close\r\n",
        "GET /plain HTTP/1.1\r\nHost: a\r\nConnection: x-own\r\nX-Own: 1\r\n",
        "GET /plain HTTP/1.1\r\nHost: a\r\nTE: trailers\r\n",
        "GET /plain HTTP/1.1\r\nHost: a\r\nUpgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: x\r\n",
        "GET /plain HTTP/1.1\r\nHost: a\r\nVia: 1.1 tidegate, 1.1 tidegate, 1.1 tidegate, 1.1 tidegate\r\nVia: 1.1 tidegate, 1.1 tidegate, 1.1 tidegate, 1.1 tidegate\r\n",
        "GET /plain HTTP/1.1\r\nHost: a\r\nX-Limited: yes\r\n",
        "GET /plain HTTP/1.1\r\nHost: a\r\nX-Limited: yes\r\nAccept: text/plain\r\n",
        "GET /plain HTTP/1.1\r\nHost: a\r\nX-Limited: yes\r\nAccept: application/json\r\n",
    ];
    let mut all: Vec<String> = heads.iter().map(|head| format!("{head}\r\n")).collect();
    all.extend([
        "POST /plain HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nContent-Type: text/plain\r\n\r\nhello".to_string(),
        format!("PUT /plain HTTP/1.1\r\nHost: a\r\nContent-Length: 6000\r\n\r\n{}", "x".repeat(6000)),
        format!("PUT /plain HTTP/1.1\r\nHost: a\r\nContent-Length: 60000\r\n\r\n{}", "x".repeat(60_000)),
        "POST /plain HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n".to_string(),
        format!("GET /{} HTTP/1.1\r\nHost: a\r\n\r\n", "x".repeat(9000)),
    ]);
    all.extend(RESPONSES.iter().map(|(path, _)| format!("GET {path} HTTP/1.1\r\nHost: a\r\n\r\n")));
    all.extend(
        ["/204", "/304", "/plain"]
            .map(|path| format!("POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nhi")),
    );
    all
}

const DATE: &str = "Date: Sun, 06 Nov 1994 08:49:37 GMT\r\n";

/// The upstream's response to each path, in pieces. Unless the last one is `stay`, it closes the
/// connection.
const RESPONSES: &[(&str, &[&str])] = &[
    (
        "/plain",
        &["HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Type: text/plain\r\n\r\nhello", "stay"],
    ),
    ("/dated", &["HTTP/1.1 200 OK\r\nDATE\r\nContent-Length: 5\r\n\r\nhello", "stay"]),
    (
        "/empty",
        &[
            "HTTP/1.1 200 OK\r\nContent-Length: 0\r\nX-RateLimit-Limit: 7\r\nRateLimit: x\r\n\r\n",
            "stay",
        ],
    ),
    ("/words", &["HTTP/1.1 404 Nothing of the kind\r\nContent-Length: 2\r\n\r\nno", "stay"]),
    ("/wordless", &["HTTP/1.1 299 \r\nContent-Length: 2\r\n\r\nno", "stay"]),
    ("/bare", &["HTTP/1.1 500\r\nContent-Length: 2\r\n\r\nno", "stay"]),
    (
        "/cookies",
        &[
            "HTTP/1.1 200 OK\r\nSet-Cookie: a=1\r\nContent-Length: 2\r\nSet-Cookie: b=2\r\nServer: s\r\nX-Odd: \u{fc}\r\n\r\nok",
            "stay",
        ],
    ),
    (
        "/stays",
        &[
            "HTTP/1.1 200 OK\r\nConnection: keep-alive\r\nKeep-Alive: timeout=5\r\nContent-Length: 2\r\n\r\nok",
            "stay",
        ],
    ),
    ("/closes", &["HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok"]),
    (
        "/own",
        &[
            "HTTP/1.1 200 OK\r\nConnection: x-own\r\nX-Own: 1\r\nContent-Length: 2\r\n\r\nok",
            "stay",
        ],
    ),
    ("/204", &["HTTP/1.1 204 No Content\r\nX-A: 1\r\n\r\n", "stay"]),
    ("/304", &["HTTP/1.1 304 Not Modified\r\nETag: \"x\"\r\n\r\n", "stay"]),
    ("/304-long", &["HTTP/1.1 304 Not Modified\r\nContent-Length: 100\r\n\r\n", "stay"]),
    (
        "/chunked",
        &[
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n1;x=y\r\n!\r\n0\r\n\r\n",
            "stay",
        ],
    ),
    (
        "/trailers",
        &[
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: x-sum\r\n\r\n5\r\nhello\r\n0\r\nX-Sum: 7\r\n\r\n",
            "stay",
        ],
    ),
    ("/pieces", &["HTTP/1.1 200 OK\r\nConte", "nt-Length: 10\r\n\r\nhel", "lo", "hello", "stay"]),
    ("/later", &["HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n", "hello", "hello", "stay"]),
    ("/large", &["HTTP/1.1 200 OK\r\nContent-Length: 300000\r\n\r\n", "LARGE", "stay"]),
    (
        "/first",
        &[
            "HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
            "stay",
        ],
    ),
    (
        "/more",
        &[
            "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokHTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil",
            "stay",
        ],
    ),
    ("/short", &["HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhello"]),
    ("/old", &["HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok"]),
    (
        "/101",
        &["HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n", "stay"],
    ),
    ("/twice", &["HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\nok"]),
    ("/two", &["HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nok"]),
    (
        "/both",
        &[
            "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
        ],
    ),
    ("/signed", &["HTTP/1.1 200 OK\r\nContent-Length: +2\r\n\r\nok"]),
    ("/nonsense", &["this is not HTTP\r\n\r\n"]),
    ("/folded", &["HTTP/1.1 200 OK\r\nX-A: 1\r\n b\r\nContent-Length: 2\r\n\r\nok"]),
    ("/nothing", &[]),
];

/// What a client and the upstream receive, with or without the fast path.
fn exchanged(has_fast_path: bool) -> (Responses, Vec<(String, String)>) {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let noted = Arc::clone(&seen);
    let at = bare(move |mut stream| {
        while let Some((head, body)) = read_message(&mut stream) {
            let path = head
                .split(' ')
                .nth(1)
                .unwrap_or_default()
                .split('?')
                .next()
                .unwrap_or_default()
                .to_string();
            noted.lock().unwrap().push((head, String::from_utf8_lossy(&body).into_owned()));
            let known = RESPONSES.iter().find(|(own, _)| *own == path);
            let pieces = known.map_or(RESPONSES[0].1, |(_, pieces)| pieces);
            for piece in pieces.iter().filter(|piece| **piece != "stay") {
                let piece = piece.replace("DATE\r\n", DATE).replace("LARGE", &"x".repeat(300_000));
                if stream.get_mut().write_all(piece.as_bytes()).is_err() {
                    return;
                }
            }
            if pieces.last() != Some(&"stay") {
                return;
            }
        }
    });
    let rules = "rules: [{ name: all, limit: 1000/day }, { name: few, when: { header.x-limited: yes }, limit: 1/h }]\n";
    let stage = Stage::on_path(has_fast_path, &format!("http://{at}"), "", rules);
    let mut all = Responses::new();
    for request in requests() {
        // One connection each: a connection that took the general path stays on it.
        let mut client = stage.connect();
        client.send(&request);
        let answer = client.read();
        let ends = answer.as_ref().is_none_or(|answer| answer.field("connection") == Some("close"));
        all.push(answer.map(|answer| {
            (
                steady(&answer.head),
                if answer.status == 429 { steady(&answer.body) } else { answer.body },
            )
        }));
        if ends {
            assert!(client.is_over(), "{request}");
        } else if !request.contains("HTTP/1.0") && !request.contains("Connection: close") {
            // The client's connection stays open. An upstream that closes without notice may do so
            // while the next request is being sent, which gives 502.
            let path = request.split([' ', '?']).nth(1).unwrap_or_default();
            let closes = RESPONSES
                .iter()
                .any(|(own, pieces)| *own == path && pieces.last() != Some(&"stay"));
            let status = client.get("/plain?again", "").status;
            assert!(status == 200 || closes && status == 502, "{status} after {request}");
        }
    }
    // Whether the upstream saw a request sent while it closed depends on timing.
    let seen = seen
        .lock()
        .unwrap()
        .iter()
        .filter(|(head, _)| !head.starts_with("GET /plain?again"))
        .cloned()
        .collect();
    (all, seen)
}

/// Replaces the digits of lines that depend on the time.
fn steady(text: &str) -> String {
    let timed = ["date:", "ratelimit:", "x-ratelimit-reset:", "retry-after:", "{"];
    let line = |line: &str| match timed.iter().any(|own| line.starts_with(own)) {
        true if line.starts_with("date: Sun, 06 Nov 1994") => line.to_string(),
        true if line.starts_with("date:") => "date:\r\n".to_string(),
        true => line
            .replace(|one: char| one.is_ascii_digit(), "#")
            .replace("##", "#")
            .replace("##", "#"),
        false => line.to_string(),
    };
    text.split_inclusive('\n').map(line).collect()
}

#[test]
fn both_paths_exchange_the_same_messages() {
    let ((fast, fast_seen), (general, general_seen)) = (exchanged(true), exchanged(false));
    let mut differ = String::new();
    for ((request, fast), general) in
        requests().iter().zip(&fast).zip(&general).filter(|((_, fast), general)| fast != general)
    {
        let shown = |text: &str| text.chars().take(1000).collect::<String>();
        differ += &format!(
            "{}{}\n{}\n",
            shown(request),
            shown(&format!("{fast:?}")),
            shown(&format!("{general:?}"))
        );
    }
    assert_eq!(differ, "", "to the client");
    assert_eq!(fast_seen, general_seen, "to the upstream");
    assert!(fast_seen.len() > 40, "{}", fast_seen.len());
}

#[test]
fn pipelined_requests_are_answered_in_order() {
    let (at, seen) = super::noting();
    for has_fast_path in [true, false] {
        let stage = Stage::on_path(has_fast_path, &format!("http://{at}"), "", super::FREE);
        let mut client = Client::to(stage.at);
        let one = "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nhi";
        // Three requests for the fast path, then one that needs the general path.
        client
            .send(format!("{one}{one}{one}GET / HTTP/1.1\r\nHost: a\r\nTE: trailers\r\n\r\n{one}"));
        for _ in 0..5 {
            assert_eq!(client.read().unwrap().body, "ok");
        }
        assert_eq!(seen.lock().unwrap().drain(..).filter(|(_, body)| body == b"hi").count(), 4);
    }
}
