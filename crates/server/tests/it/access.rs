//! Who may: web pages in browsers, tokens that are guessed, and calls of administrators.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use hyper_util::rt::{TokioExecutor, TokioIo};
use tidegate_server::auth::Auth;
use tidegate_server::config::Config;
use tidegate_server::{Options, Running, start};
use tidegate_testkit::wait_until;
use tokio::runtime::Runtime;

/// Long enough for a busy machine.
const LONG: Duration = Duration::from_secs(20);
const CHECK: &str = r#"{"key":"k","limit":"1000000/s"}"#;

struct Served {
    runtime: Runtime,
    running: Option<Running>,
}

fn serve(text: &str, auth: Auth) -> Served {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let listen = "{ http: 127.0.0.1:0, resp: 127.0.0.1:0, grpc: 127.0.0.1:0, admin: off }";
    let listen =
        if text.contains("listen:") { String::new() } else { format!("listen: {listen}\n") };
    let config =
        Config::parse(&format!("{listen}log: {{ level: error }}\n{text}"), "test").unwrap();
    let running = runtime.block_on(start(config, Options { auth, ..Options::default() })).unwrap();
    Served { runtime, running: Some(running) }
}

impl Served {
    fn running(&self) -> &Running {
        self.running.as_ref().unwrap()
    }

    fn http(&self) -> SocketAddr {
        self.running().http.unwrap()
    }

    fn resp(&self) -> SocketAddr {
        self.running().resp.unwrap()
    }

    /// Sends a request over HTTP/2; the status and the headers of the answer.
    fn second(
        &self,
        at: SocketAddr,
        request: axum::http::request::Builder,
        body: &'static str,
    ) -> (u16, String) {
        let request = request.body(http_body_util::Full::<&[u8]>::from(body.as_bytes())).unwrap();
        self.runtime.block_on(async move {
            let stream = TokioIo::new(tokio::net::TcpStream::connect(at).await.unwrap());
            let (mut sender, connection) =
                hyper::client::conn::http2::handshake(TokioExecutor::new(), stream).await.unwrap();
            tokio::spawn(connection);
            let response = sender.send_request(request).await.unwrap();
            (response.status().as_u16(), format!("{:?}", response.headers()))
        })
    }

    fn refused(&self, listener: &str, reason: &str) -> u64 {
        let engine = self.running().engine();
        let text = engine.observer().metrics().text(engine.store(), 0);
        let line =
            format!("tidegate_refused_total{{protocol=\"{listener}\",reason=\"{reason}\"}} ");
        text.lines()
            .find_map(|own| own.strip_prefix(&line))
            .expect("it is counted")
            .parse()
            .unwrap()
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let stopped = self.runtime.block_on(self.running.take().unwrap().stop());
        assert!(stopped || std::thread::panicking(), "every request was answered");
    }
}

fn connect(at: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(at).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    stream
}

fn all(stream: &mut impl Read) -> String {
    let mut bytes = Vec::new();
    let _ = stream.read_to_end(&mut bytes);
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Sends a request with exactly these headers, in one piece; the status of the answer, and all of
/// it.
fn send(at: SocketAddr, request: &str, headers: &str, body: &str) -> (u16, String) {
    let mut stream = connect(at);
    let length =
        if body.is_empty() { String::new() } else { format!("Content-Length: {}\r\n", body.len()) };
    let lines: String = headers.lines().map(|line| format!("{line}\r\n")).collect();
    stream
        .write_all(format!("{request} HTTP/1.1\r\n{lines}{length}\r\n{body}").as_bytes())
        .unwrap();
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    let text = all(&mut stream);
    let status = text.split(' ').nth(1).and_then(|status| status.parse().ok());
    (status.unwrap_or_else(|| panic!("{request} was answered with {text:?}")), text)
}

/// What Chromium 148 sends with `fetch(url, { method, body, mode: "no-cors" })` from a page of
/// another origin.
const FOREIGN: &str = r#"Connection: keep-alive
sec-ch-ua-platform: "Linux"
User-Agent: Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko) HeadlessChrome/148.0.0.0 Safari/537.36
sec-ch-ua: "Not/A)Brand";v="99", "Chromium";v="148"
sec-ch-ua-mobile: ?0
Accept: */*
Origin: http://evil.example
Sec-Fetch-Site: cross-site
Sec-Fetch-Mode: no-cors
Sec-Fetch-Dest: empty
Referer: http://evil.example/
Accept-Encoding: gzip, deflate, br, zstd
Accept-Language: en-US,en;q=0.9"#;

/// What it sends to a name that its page has pointed at this machine: over plain HTTP it trusts
/// only loopback, by address or as localhost.
const REBOUND: &str = "Connection: keep-alive
User-Agent: Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko) HeadlessChrome/148.0.0.0 Safari/537.36
Accept: */*
Referer: http://evil.example/
Accept-Encoding: gzip, deflate
Accept-Language: en-US,en;q=0.9";

/// Every call that changes or shows something, with a body that is right.
const CALLS: [(&str, &str); 16] = [
    ("POST /v1/check", CHECK),
    ("POST /v1/check", r#"{"checks":[{"key":"k","limit":"1000000/s"}]}"#),
    ("POST /v1/peek", CHECK),
    ("POST /v1/take", CHECK),
    ("POST /v1/debit", CHECK),
    ("POST /v1/refund", CHECK),
    ("POST /v1/reset", CHECK),
    ("POST /v1/reserve", CHECK),
    ("POST /v1/lease", r#"{"key":"k","limit":"5 concurrent ttl 1s"}"#),
    ("POST /v1/settle", r#"{"key":"k","limit":"1000000/s","id":7}"#),
    ("POST /v1/release", r#"{"key":"k","limit":"5 concurrent ttl 1s","id":7}"#),
    ("POST /v1/explain", r#"{"attributes":{"ip":"192.0.2.7"}}"#),
    ("POST /json", r#"{"domain":"d","descriptors":[{"entries":[{"key":"a","value":"b"}]}]}"#),
    ("GET /v1/rules", ""),
    ("GET /v1/top", ""),
    ("GET /metrics", ""),
];

#[test]
fn pages_of_another_origin_are_refused_at_every_call_and_programs_are_served() {
    let served = serve("", Auth::default());
    let at = served.http();
    for (call, body) in CALLS {
        let kind = if body.is_empty() { "" } else { "Content-Type: text/plain;charset=UTF-8\n" };
        let from_page = format!("Host: {at}\n{kind}{FOREIGN}");
        let (status, text) = send(at, call, &from_page, body);
        assert_eq!(status, 403, "{call}: {text}");
        assert!(
            text.contains("Origin is \\\"http://evil.example\\\"") && text.contains("--token-file"),
            "{text}"
        );
        assert!(text.contains("\r\nx-content-type-options: nosniff\r\n"), "{text}");
        assert!(!text.to_ascii_lowercase().contains("access-control-"), "{text}");

        // Without Origin, as with images, scripts and links.
        let linked: String = from_page
            .lines()
            .filter(|line| !line.starts_with("Origin"))
            .map(|l| l.to_owned() + "\n")
            .collect();
        let (status, text) = send(at, call, &linked, body);
        assert!(
            status == 403 && text.contains("Sec-Fetch-Site is \\\"cross-site\\\""),
            "{call}: {text}"
        );

        let rebound = format!("Host: evil.example:{}\n{kind}{REBOUND}", at.port());
        let (status, text) = send(at, call, &rebound, body);
        assert_eq!(status, 403, "{call}: {text}");
        assert!(
            text.contains("Host is \\\"evil.example:") && text.contains("http.hosts"),
            "{text}"
        );

        // curl, a program without Host, and a page that this server has sent.
        let curl = format!(
            "Host: {at}\nUser-Agent: curl/8.5.0\nAccept: */*\nContent-Type: application/x-www-form-urlencoded"
        );
        let own = format!("Host: {at}\nOrigin: http://{at}\nSec-Fetch-Site: same-origin");
        for headers in [curl, String::new(), own, format!("Host: localhost:{}", at.port())] {
            let (status, text) = send(at, call, &headers, body);
            // There are no leases and reservations 7, and no domain.
            assert!(
                matches!(status, 200 | 404) || (call.ends_with("e") && status == 400),
                "{call}: {status} {text}"
            );
            assert!(text.contains("\r\nx-content-type-options: nosniff\r\n"), "{text}");
        }
    }
    assert_eq!(served.refused("http", "browser"), 3 * CALLS.len() as u64);
    tidegate_testkit::attacks_held("access", 1);
}

#[test]
fn a_page_asks_first_and_gets_no_leave() {
    let served = serve("", Auth::default());
    let at = served.http();
    let asked = format!(
        "Host: {at}\nAccess-Control-Request-Method: POST\nAccess-Control-Request-Headers: content-type\n{FOREIGN}"
    );
    let (status, text) = send(at, "OPTIONS /v1/reset", &asked, "");
    assert!(status == 403 && !text.to_ascii_lowercase().contains("access-control-"), "{text}");
}

#[test]
fn load_balancers_ask_under_any_name_and_pages_learn_one_word() {
    let text = "store: redis://127.0.0.1:1\non_store_failure: open\n";
    let served = serve(text, Auth::default());
    let at = served.http();
    for call in ["GET /healthz", "GET /openapi.json"] {
        let (status, _) = send(at, call, "Host: tidegate.internal", "");
        assert_eq!(status, 200, "{call}");
    }
    let (status, whole) = send(at, "GET /readyz", &format!("Host: {at}"), "");
    assert!(status == 200 && whole.contains("\r\n\r\ndegraded\nstore: "), "{whole}");
    for headers in ["Host: tidegate.internal", &format!("Host: {at}\n{FOREIGN}")] {
        let (status, brief) = send(at, "GET /readyz", headers, "");
        assert!(status == 200 && brief.ends_with("\r\n\r\ndegraded\n"), "{brief}");
    }
}

#[test]
fn names_in_the_configuration_are_known_and_change_without_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("tidegate.yaml");
    let write = |hosts: &str| {
        let text = format!(
            "listen: {{ http: 127.0.0.1:0, resp: off, grpc: off, admin: 127.0.0.1:0 }}\nlog: {{ level: error }}\nhttp: {{ hosts: [{hosts}] }}\nrules: []\n"
        );
        std::fs::write(&file, text).unwrap();
    };
    write("tidegate, '*.example.com'");
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let config = Config::load(&file).unwrap();
    let options = Options { rules_file: Some(file.clone()), ..Options::default() };
    let running = runtime.block_on(start(config, options)).unwrap();
    let (http, admin) = (running.http.unwrap(), running.admin.unwrap());
    let status =
        |at: SocketAddr, call: &str, host: &str| send(at, call, &format!("Host: {host}"), "{}").0;
    for (host, is_known) in [
        ("tidegate:8080", true),
        ("a.example.com", true),
        ("example.com", false),
        ("other", false),
        ("[::1]:1", true),
    ] {
        assert_eq!(status(http, "POST /v1/check", host) != 403, is_known, "{host}");
        assert_eq!(status(admin, "GET /v1/rules", host) != 403, is_known, "{host}");
    }
    write("other");
    wait_until("the file is in force", LONG, || status(http, "POST /v1/check", "other") != 403);
    assert_eq!(status(http, "POST /v1/check", "tidegate"), 403);
    assert!(runtime.block_on(running.stop()));
}

#[test]
fn a_right_token_passes_under_any_name_and_from_any_page() {
    let auth = Auth { checks: Some("check-me".into()), admin: None };
    let served = serve("", auth);
    let page = format!("Host: evil.example\n{FOREIGN}");
    assert_eq!(send(served.http(), "POST /v1/check", &page, CHECK).0, 401);
    let with = format!("{page}\nAuthorization: Bearer check-me");
    assert_eq!(send(served.http(), "POST /v1/check", &with, CHECK).0, 200);
    // The fast path, which has no headers of browsers.
    let with = "Host: evil.example\nAuthorization: Bearer check-me";
    assert_eq!(send(served.http(), "POST /v1/check", with, CHECK).0, 200);
    // With an admin token alone, checks need none, and pages must not send them.
    let served = serve("", Auth { checks: None, admin: Some("admin-me".into()) });
    assert_eq!(send(served.http(), "POST /v1/check", "Host: localhost", CHECK).0, 200);
    assert_eq!(send(served.http(), "POST /v1/check", &page, CHECK).0, 403);
    assert_eq!(send(served.http(), "POST /v1/check", "Host: evil.example", CHECK).0, 403);
    let with = "Host: evil.example\nAuthorization: Bearer admin-me";
    assert_eq!(send(served.http(), "POST /v1/reset", with, CHECK).0, 200);
}

/// A gateway passes on what its client sent: the page of another origin is the client's own affair.
#[test]
fn gateways_ask_for_clients_of_any_origin() {
    let served = serve(
        "trusted_proxies: [loopback]\nrules: [{ name: all, limit: 1000/s }]\n",
        Auth::default(),
    );
    let about = "X-Forwarded-Method: POST\nX-Forwarded-Uri: /\nX-Forwarded-Host: shop.example\nX-Forwarded-For: 192.0.2.7";
    let (status, text) =
        send(served.http(), "GET /v1/auth", &format!("Host: shop.example\n{about}\n{FOREIGN}"), "");
    assert_eq!(status, 204, "{text}");
}

#[test]
fn http_over_http_2_is_held_to_the_same() {
    let served = serve("", Auth::default());
    let at = served.http();
    let call = |authority: &str, headers: &[(&str, &str)]| {
        let mut request = axum::http::Request::post(format!("http://{authority}/v1/check"));
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        served.second(at, request, CHECK).0
    };
    assert_eq!(call(&at.to_string(), &[]), 200);
    assert_eq!(call("evil.example", &[]), 403);
    assert_eq!(call(&at.to_string(), &[("origin", "http://evil.example")]), 403);
    assert_eq!(call(&at.to_string(), &[("sec-fetch-site", "cross-site")]), 403);
    assert_eq!(call(&at.to_string(), &[("origin", &format!("http://{at}"))]), 200);
}

/// A browser that posts to the port of Redis clients: its lines must not be taken for commands.
#[test]
fn requests_over_http_end_a_connection_of_redis_clients() {
    let served = serve("", Auth::default());
    let attack = "TG.DEBIT k 10/s COST 10\r\nTG.CHECK k 10/s COST 10\r\n";
    let host = format!("Host: 127.0.0.1:{}\r\n", served.resp().port());
    let array = "*3\r\n$8\r\nTG.CHECK\r\n$1\r\nk\r\n$4\r\n10/s\r\n";
    const NO: &str = "-ERR Protocol error: this is not HTTP\r\n";
    for (name, sent, before) in [
        ("POST", format!("POST / HTTP/1.1\r\n{host}Content-Length: 50\r\n\r\n{attack}"), ""),
        ("POST without a version", format!("POST /\r\n{attack}"), ""),
        ("GET", format!("GET / HTTP/1.1\r\n{host}\r\n{attack}"), ""),
        ("OPTIONS", format!("OPTIONS / HTTP/1.1\r\n{host}\r\n{attack}"), ""),
        ("a method of its own", format!("PING HTTP/1.1\r\n{host}{attack}"), ""),
        ("Host alone", format!("{host}{attack}"), ""),
        ("within MULTI", format!("MULTI\r\n{host}{attack}EXEC\r\n"), "+OK\r\n"),
        ("arrays behind it", format!("POST / HTTP/1.1\r\n{}{attack}", array.repeat(3)), ""),
    ] {
        let mut stream = connect(served.resp());
        stream.write_all(sent.as_bytes()).unwrap();
        assert_eq!(all(&mut stream), format!("{before}{NO}"), "{name}");
    }
    let mut stream = connect(served.resp());
    stream.write_all(b"TG.PEEK k 10/s\r\nQUIT\r\n").unwrap();
    assert_eq!(
        all(&mut stream),
        "*5\r\n:1\r\n:10\r\n:10\r\n:0\r\n:0\r\n+OK\r\n",
        "nothing was taken"
    );
    assert_eq!(served.refused("resp", "browser"), 8);
    tidegate_testkit::attacks_held("access", 1);
}

#[test]
fn calls_of_administrators_leave_the_other_listeners() {
    let listen = "listen: { http: 127.0.0.1:0, resp: 127.0.0.1:0, grpc: off, admin: 127.0.0.1:0 }\nrules: [{ name: all, by: [user], missing: skip, limit: 10/s }]\n";
    let served = serve(listen, Auth::default());
    let mut stream = connect(served.resp());
    stream
        .write_all(b"TG.CHECK k 10/m\r\nTG.RESET k 10/m\r\nTG.RESETRULE all user a\r\nTG.RESETRULES user a\r\nTG.PEEK k 10/m\r\nMULTI\r\nTG.RESET k 10/m\r\nEXEC\r\nQUIT\r\n")
        .unwrap();
    let text = all(&mut stream);
    let errors: Vec<&str> = text.lines().filter(|line| line.starts_with('-')).collect();
    let expected = |name: &str| {
        format!("-NOPERM {name} is at the admin address (listen.admin): use POST /v1/reset there")
    };
    let names = ["TG.RESET", "TG.RESETRULE", "TG.RESETRULES", "TG.RESET"];
    assert_eq!(errors, names.map(expected), "{text}");
    let peeked = text.split("\r\n").filter(|line| *line == ":9").count();
    assert_eq!(peeked, 2, "what was charged is not reset: {text}");
    let admin = served.running().admin.unwrap();
    assert_eq!(
        send(admin, "POST /v1/reset", "Host: localhost", r#"{"key":"k","limit":"10/m"}"#).0,
        200
    );
}

/// One connection after the other, several at a time, as fast as they go.
fn guess_for(time: Duration, guess: impl Fn(u32) -> bool + Sync) -> (u32, u32) {
    let (sent, looked_at, over) = (AtomicU32::new(0), AtomicU32::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    let number = sent.fetch_add(1, Ordering::Relaxed);
                    looked_at.fetch_add(u32::from(guess(number)), Ordering::Relaxed);
                }
            });
        }
        let begin = Instant::now();
        wait_until("enough was tried", LONG, || {
            begin.elapsed() > time && sent.load(Ordering::Relaxed) > 500
        });
        over.store(true, Ordering::Relaxed);
    });
    (sent.load(Ordering::Relaxed), looked_at.load(Ordering::Relaxed))
}

#[test]
fn guessing_is_limited_over_http_resp_and_grpc_together() {
    let auth = Auth { checks: Some("check-me-0123456789".into()), admin: None };
    let served = serve("", auth);
    // Connections that have shown the token before.
    let mut kept = connect(served.http());
    let ask = |stream: &mut TcpStream| {
        let check = "POST /v1/check HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer check-me-0123456789\r\n";
        write!(stream, "{check}Content-Length: {}\r\n\r\n{CHECK}", CHECK.len()).unwrap();
        let mut head = [0; 12];
        stream.read_exact(&mut head).unwrap();
        let mut rest = Vec::new();
        while !rest.ends_with(b"\"source\":\"store\"}") {
            let mut byte = [0; 1];
            stream.read_exact(&mut byte).unwrap();
            rest.push(byte[0]);
        }
        String::from_utf8(head.to_vec()).unwrap()
    };
    assert_eq!(ask(&mut kept), "HTTP/1.1 200");
    let mut redis = connect(served.resp());
    redis.write_all(b"AUTH check-me-0123456789\r\n").unwrap();
    redis.read_exact(&mut [0; 5]).unwrap();

    let begin = Instant::now();
    let (sent, looked_at) = guess_for(Duration::from_secs(1), |number| {
        if number % 2 == 0 {
            let headers = format!("Host: localhost\nAuthorization: Bearer guess-{number}");
            let (status, text) = send(served.http(), "POST /v1/check", &headers, CHECK);
            assert_eq!(status, 401, "{text}");
            let is_limited = text.contains("too many wrong tokens");
            assert_eq!(is_limited, text.contains("\r\nretry-after: "), "{text}");
            return !is_limited;
        }
        let mut stream = connect(served.resp());
        let command = if number % 4 == 1 { "AUTH" } else { "HELLO 3 AUTH default" };
        write!(stream, "{command} guess-{number}\r\nQUIT\r\n").unwrap();
        let text = all(&mut stream);
        assert!(text.starts_with("-WRONGPASS "), "{text}");
        !text.contains("too many wrong tokens")
    });
    // Ten, and one for every six seconds.
    let most = 10 + u32::try_from(begin.elapsed().as_secs() / 6 + 1).unwrap();
    assert!(
        (10..=most).contains(&looked_at),
        "{looked_at} of {sent} were looked at, {most} expected at most"
    );
    // The right one on a new connection is not looked at either, over gRPC neither; it was guessed
    // a moment before.
    let right = "Host: localhost\nAuthorization: Bearer check-me-0123456789";
    guess_for(Duration::ZERO, |number| {
        send(
            served.http(),
            "POST /v1/check",
            &format!("Host: localhost\nAuthorization: Bearer again-{number}"),
            CHECK,
        );
        false
    });
    let (status, text) = send(served.http(), "POST /v1/check", right, CHECK);
    assert!(status == 401 && text.contains("send it again in "), "{text}");
    let grpc = served.running().grpc.unwrap();
    let method = "envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";
    let request = axum::http::Request::post(format!("http://{grpc}/{method}"));
    let (_, refused) =
        served.second(grpc, request.header("authorization", "Bearer grpc-guess"), "");
    assert!(
        refused.contains("\"grpc-status\": \"16\"")
            && refused.contains("too%20many%20wrong%20tokens"),
        "{refused}"
    );
    // Connections that showed it before go on.
    assert_eq!(ask(&mut kept), "HTTP/1.1 200");
    redis.write_all(b"AUTH check-me-0123456789\r\nTG.PEEK k 1/s\r\n").unwrap();
    let mut answer = [0; 9];
    redis.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"+OK\r\n*5\r\n");
    // A client that waits for `retry-after` is admitted.
    wait_until("the token is looked at again", LONG, || {
        send(served.http(), "POST /v1/check", right, CHECK).0 == 200
    });
    assert!(served.refused("http", "guessing") > 0 && served.refused("resp", "guessing") > 0);
    assert_eq!(served.refused("grpc", "guessing"), 1);
    // A client with an old token sends it with every request, and costs the others nothing.
    for _ in 0..100 {
        send(
            served.http(),
            "POST /v1/check",
            "Host: localhost\nAuthorization: Bearer guess-0",
            CHECK,
        );
    }
    assert_eq!(send(served.http(), "POST /v1/check", right, CHECK).0, 200);
    tidegate_testkit::attacks_held("access", 3);
}
