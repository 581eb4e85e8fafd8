//! The files of `examples/gateways/` with the real nginx, Caddy, HAProxy, Traefik and Envoy: what
//! their clients see.
//!
//! Clients have addresses of their own (127.0.0.2 and so on; all of 127.0.0.0/8 is this machine).
//! The gateway is at 127.0.0.1, which alone is trusted.

mod failures;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use tidegate_testkit::{Envoy, Gateway, GatewayKind};

use crate::listeners::Listeners;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/gateways")
}

/// Tidegate with the file that is the example for it, on free ports.
fn tidegate() -> Listeners {
    let text = std::fs::read_to_string(folder().join("tidegate.yaml")).unwrap();
    Listeners::as_told(&text.replace(":8080", ":0").replace(":8081", ":0"))
}

/// A service that answers every request with what it was sent, and counts.
struct App {
    at: SocketAddr,
    served: Arc<AtomicUsize>,
}

impl App {
    fn start() -> App {
        App::answering("200 OK")
    }

    fn answering(status: &'static str) -> App {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (at, served) = (listener.local_addr().unwrap(), Arc::new(AtomicUsize::new(0)));
        let count = Arc::clone(&served);
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let count = Arc::clone(&count);
                thread::spawn(move || serve(BufReader::new(stream), status, &count));
            }
        });
        App { at, served }
    }

    fn served(&self) -> usize {
        self.served.load(Ordering::SeqCst)
    }
}

fn serve(mut reader: BufReader<TcpStream>, status: &str, count: &AtomicUsize) {
    loop {
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            if reader.read_line(&mut head).unwrap_or(0) == 0 {
                return;
            }
        }
        let length = head.to_ascii_lowercase();
        let length = length
            .lines()
            .find_map(|line| line.strip_prefix("content-length: ")?.trim().parse().ok());
        let mut body = vec![0; length.unwrap_or(0)];
        if reader.read_exact(&mut body).is_err() {
            return;
        }
        count.fetch_add(1, Ordering::SeqCst);
        let answer = format!("{head}{} bytes", body.len());
        let length = answer.len();
        let head = format!(
            "HTTP/1.1 {status}\r\ncontent-type: text/plain\r\ncontent-length: {length}\r\n\r\n"
        );
        if reader.get_mut().write_all((head + &answer).as_bytes()).is_err() {
            return;
        }
    }
}

/// What a client was answered.
#[derive(Debug)]
struct Seen {
    status: u16,
    head: String,
    body: String,
    /// How long the first byte took. (Envoy keeps a connection open for a second after an answer of
    /// its own.)
    took: Duration,
}

impl Seen {
    fn header(&self, name: &str) -> Option<&str> {
        header(&self.head, name)
    }

    /// A header that Tidegate added to an allowed request's answer. Traefik adds it to the request
    /// instead, which the service of these tests repeats in its body.
    fn allowed(&self, kind: GatewayKind, name: &str) -> Option<&str> {
        let text = if kind == GatewayKind::Traefik { &self.body } else { &self.head };
        header(text, name)
    }
}

fn header<'t>(head: &'t str, name: &str) -> Option<&'t str> {
    head.lines().find_map(|line| {
        let (own, value) = line.split_once(':')?;
        own.eq_ignore_ascii_case(name).then(|| value.trim())
    })
}

/// A client at 127.0.0.`client` sends a request: a first line without the version, headers in
/// lines, and a body.
fn send(gateway: SocketAddr, client: u8, line: &str, headers: &str, body: &str) -> Seen {
    let from = SocketAddr::from((Ipv4Addr::new(127, 0, 0, client), 0));
    let stream = connect(from, gateway);
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let mut text = format!("{line} HTTP/1.1\r\nconnection: close\r\n");
    if !headers.to_ascii_lowercase().contains("host:") {
        text += "host: example.com\r\n";
    }
    for header in headers.lines() {
        text = text + header.trim() + "\r\n";
    }
    if !body.is_empty() {
        text += &format!("content-length: {}\r\n", body.len());
    }
    let mut stream = BufReader::new(stream);
    let start = Instant::now();
    // A gateway may answer before it has read the body, and close.
    let _ = stream.get_mut().write_all((text + "\r\n" + body).as_bytes());
    let mut bytes = Vec::new();
    let _ = stream.fill_buf();
    let took = start.elapsed();
    let _ = stream.read_to_end(&mut bytes);
    let text = String::from_utf8_lossy(&bytes);
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{line}: {text:?}"));
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
    Seen {
        status: status.unwrap_or_else(|| panic!("{head}")),
        head: head.into(),
        body: body.into(),
        took,
    }
}

/// Connects from an address of our choice.
fn connect(from: SocketAddr, to: SocketAddr) -> TcpStream {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build().unwrap();
    runtime.block_on(async {
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.bind(from).unwrap();
        let stream = socket.connect(to).await.unwrap().into_std().unwrap();
        stream.set_nonblocking(false).unwrap();
        stream
    })
}

/// With the file of this folder as it is, but for the ports.
fn gateway(
    kind: GatewayKind,
    folder: &Path,
    tidegate: SocketAddr,
    app: &App,
    more: &[(&str, &str)],
) -> Gateway {
    let (to_tidegate, to_app) = (format!(":{}", tidegate.port()), format!(":{}", app.at.port()));
    Gateway::start(
        kind,
        folder,
        &[&[(":8080", to_tidegate.as_str()), (":9000", &to_app)], more].concat(),
    )
}

/// On a busy machine a tenth of a second may pass without an answer.
const PATIENT: [(&str, &str); 5] = [
    ("proxy_connect_timeout 100ms", "proxy_connect_timeout 10s"),
    ("proxy_read_timeout    100ms", "proxy_read_timeout 10s"),
    ("dial_timeout 100ms", "dial_timeout 10s"),
    ("response_header_timeout 100ms", "response_header_timeout 10s"),
    ("TIDEGATE_TIMEOUT_MS 100", "TIDEGATE_TIMEOUT_MS 10000"),
];

/// What must hold before every service, whichever gateway it is. `after` says what happens without
/// Tidegate.
fn limits(kind: GatewayKind, after: u16) {
    let (listeners, app) = (tidegate(), App::start());
    let gateway = gateway(kind, &folder(), listeners.http, &app, &PATIENT);
    let at = gateway.address();
    let get = |client: u8, headers: &str| send(at, client, "GET /page?q=1", headers, "");

    // Allowed: the answer is the service's, with what is left.
    let seen = get(5, "");
    assert_eq!(seen.status, 200, "{seen:?}\n{}", gateway.log());
    assert!(
        seen.body.starts_with("GET /page?q=1 HTTP/1.") && seen.body.ends_with("0 bytes"),
        "{seen:?}"
    );
    let allowed = |seen: &Seen, name: &str| seen.allowed(kind, name).map(str::to_owned);
    for (name, value) in [
        ("ratelimit-policy", "\"per-ip\";q=5;w=60"),
        ("ratelimit", "\"per-ip\";r=4;t=12"),
        ("x-ratelimit-limit", "5"),
        ("x-ratelimit-remaining", "4"),
    ] {
        assert_eq!(allowed(&seen, name).as_deref(), Some(value), "{seen:?}");
    }
    assert!(
        allowed(&seen, "x-ratelimit-reset").is_some() && seen.header("retry-after").is_none(),
        "{seen:?}"
    );
    for left in (0..4).rev() {
        assert_eq!(allowed(&get(5, ""), "x-ratelimit-remaining"), Some(left.to_string()));
    }

    // Denied: 429, when to come back, and a body; the service hears nothing of it.
    let before = app.served();
    let seen = get(5, "");
    assert_eq!(
        (seen.status, seen.header("retry-after")),
        (429, Some("12")),
        "{seen:?}\n{}",
        gateway.log()
    );
    assert_eq!(seen.header("ratelimit-policy"), Some("\"per-ip\";q=5;w=60"), "{seen:?}");
    assert_eq!(seen.header("ratelimit"), Some("\"per-ip\";r=0;t=12"), "{seen:?}");
    assert_eq!(
        (seen.header("x-ratelimit-remaining"), seen.header("cache-control")),
        (Some("0"), Some("no-store"))
    );
    assert_eq!(seen.header("content-type"), Some("application/problem+json"), "{seen:?}");
    is_short(kind, &seen, "per-ip", 12);
    assert_eq!(send(at, 5, "HEAD /", "", "").status, 429);
    let whole =
        listeners.http().post("/v1/check", r#"{"attributes":{"ip":"127.0.0.5","path":"/trial"}}"#);
    assert!(
        whole.status == 429 && whole.body.contains(r#""shadow":[{"rule":"trial","allowed":true}]"#),
        "{whole:?}"
    );

    // Who is charged cannot be talked about.
    for made_up in [
        "X-Forwarded-For: 203.0.113.9",
        "X-Forwarded-For: 203.0.113.9\nX-Forwarded-For: 127.0.0.6",
        "X-Real-IP: 203.0.113.9\nForwarded: for=203.0.113.9\nTrue-Client-IP: 203.0.113.9",
        "X-Forwarded-For: 127.0.0.1",
        "X-Forwarded-For: ,",
    ] {
        assert_eq!(get(5, made_up).status, 429, "{made_up}");
    }
    assert_eq!(app.served(), before, "who is denied does not reach the service");
    listeners.clock.advance(Duration::from_secs(12));
    assert_eq!(
        (get(5, "").status, get(5, "").status),
        (200, 429),
        "one comes back in twelve seconds"
    );
    assert_eq!(
        allowed(&get(6, ""), "x-ratelimit-remaining").as_deref(),
        Some("4"),
        "others have a budget of their own"
    );

    // Path, method and headers matter, in whatever spelling; and a body arrives.
    let body = "x".repeat(100_000);
    let seen = send(at, 10, "POST /search?q=1", "X-Api-Key: k", &body);
    assert!(
        seen.status == 200 && seen.body.ends_with("100000 bytes"),
        "{seen:?}\n{}",
        gateway.log()
    );
    assert_eq!(send(at, 11, "POST //%73earch", "X-Api-Key: k", "").status, 200);
    for (client, line, headers) in [
        (12, "POST /search", "X-Api-Key: k"),
        (13, "POST /search/a?b", "X-Api-Key: k"),
        (14, "POST //search", "X-Api-Key: k"),
        (15, "POST /%73earch;v=1", "X-Api-Key: k"),
    ] {
        let seen = send(at, client, line, headers, "");
        assert_eq!(seen.status, 429, "{line}: {seen:?}");
        assert_eq!(seen.header("ratelimit"), Some("\"search\";r=0;t=30"), "{seen:?}");
        assert_eq!(seen.header("ratelimit-policy"), Some("\"search\";q=2;w=60"), "{seen:?}");
        is_short(kind, &seen, "search", 30);
        assert!(
            !format!("{seen:?}").contains("per-ip"),
            "nothing about a rule that did not deny: {seen:?}"
        );
    }
    // What the service could read in another way than the rules is refused, also by the gateway.
    let before = app.served();
    for (line, headers) in [
        ("POST /%2fsearch", "X-Api-Key: k"),
        ("POST /x/..%2fsearch", "X-Api-Key: k"),
        ("POST /x/..;/search", "X-Api-Key: k"),
        ("POST /search", "X-Api-Key: k\nX-Api-Key: r17"),
    ] {
        let seen = send(at, 19, line, headers, "");
        assert_eq!(seen.status, 400, "{line} {headers}: {seen:?}");
    }
    assert_eq!(app.served(), before, "none of them reaches the service");
    assert_eq!(send(at, 16, "POST /search", "X-Api-Key: other", "").status, 200);
    assert_eq!(send(at, 17, "GET /search", "X-Api-Key: k", "").status, 200, "another method");
    // Nor can what is asked for be talked about.
    for made_up in [
        "X-Original-URI: /free",
        "X-Original-URL: http://example.com/free",
        "X-Forwarded-Uri: /free",
        "X-Forwarded-Method: GET",
        "X-Original-Method: GET",
        "X-HTTP-Method-Override: GET",
        "X-Tidegate-Token: guess",
    ] {
        let seen = send(at, 18, "POST /search", &format!("X-Api-Key: k\n{made_up}"), "");
        assert_ne!(seen.status, 200, "{made_up}: {seen:?}");
    }

    // The host, too; what nobody may reach has no time at which to come back, and is about no
    // budget.
    let seen = send(at, 19, "GET /", "Host: internal.example.com", "");
    assert_eq!((seen.status, seen.header("retry-after")), (403, None), "{seen:?}");
    assert!(!seen.head.to_ascii_lowercase().contains("ratelimit"), "{seen:?}");
    assert_eq!(seen.header("content-type"), Some("application/problem+json"), "{seen:?}");
    assert!(seen.body.contains(FORBIDDEN) && !seen.body.contains("per-ip"), "{seen:?}");
    assert_eq!(send(at, 19, "GET /", "Host: INTERNAL.example.com:8000", "").status, 403);
    assert_ne!(
        send(at, 19, "GET /", "Host: internal.example.com\nX-Forwarded-Host: example.com", "")
            .status,
        200
    );
    assert_eq!(send(at, 19, "GET /", "Host: other.example.com", "").status, 200);

    // What costs more, and what is only tried.
    let export = |client: u8| send(at, client, "GET /export", "X-Api-Key: e", "").status;
    assert_eq!((export(20), export(21), export(22)), (200, 200, 429));
    let trial = |client: u8| send(at, client, "GET /trial", "", "").status;
    assert_eq!((trial(23), trial(24)), (200, 200));

    if kind == GatewayKind::Nginx {
        assert!(
            !gateway.log().contains("[error]"),
            "who is denied is no error:\n{}",
            gateway.log()
        );
    }

    // Without Tidegate.
    drop(listeners);
    for client in 30..33 {
        let seen = send(at, client, "POST /search", "X-Api-Key: k", "0123456789");
        assert_eq!(seen.status, after, "{seen:?}\n{}", gateway.log());
        assert!(after != 200 || seen.body.ends_with("10 bytes"), "{seen:?}");
    }
}

/// What everybody reads who may not pass at all.
const FORBIDDEN: &str = r#""type":"about:blank","title":"Forbidden","status":403,"detail":"This request is not allowed.""#;

/// A denial that says which policy denied and when to try again, and nothing else. nginx drops the
/// body of the answer and writes its own.
fn is_short(kind: GatewayKind, seen: &Seen, policy: &str, secs: u64) {
    let start = format!(
        r#"{{"type":"https://iana.org/assignments/http-problem-types#quota-exceeded","title":"Request cannot be satisfied as assigned quota has been exceeded","status":429,"detail":"Too many requests. Try again in {secs} seconds.""#
    );
    let end = match kind {
        GatewayKind::Nginx => "}".into(),
        _ => format!(r#","violated-policies":["{policy}"],"retry_after_secs":{secs}}}"#),
    };
    assert_eq!(seen.body, start + &end, "{kind:?}");
}

/// Where no rule applies, there is nothing to tell, and every request passes.
fn says_nothing_without_a_limit(kind: GatewayKind) {
    let rules = "rules:\n  - { name: search, when: { path: /search }, limit: 1/min }\n";
    let listeners = Listeners::as_told(&format!(
        "listen: {{ http: 127.0.0.1:0, grpc: off, resp: off }}\ntrusted_proxies: [127.0.0.1]\n{rules}"
    ));
    let app = App::start();
    let gateway = gateway(kind, &folder(), listeners.http, &app, &PATIENT);
    for _ in 0..3 {
        let seen = send(gateway.address(), 5, "GET /", "", "");
        assert_eq!(seen.status, 200, "{seen:?}\n{}", gateway.log());
        assert!(!seen.head.to_ascii_lowercase().contains("ratelimit"), "{seen:?}");
    }
}

/// A request for another protocol is asked about as every request is; the service, which speaks
/// none, gives its usual answer.
fn asks_about_upgrades(kind: GatewayKind) {
    let (listeners, app) = (tidegate(), App::start());
    let gateway = gateway(kind, &folder(), listeners.http, &app, &PATIENT);
    let ask = || {
        let mut stream =
            BufReader::new(connect(SocketAddr::from(([127, 0, 0, 5], 0)), gateway.address()));
        stream.get_ref().set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let wanted = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==";
        write!(stream.get_mut(), "GET /ws HTTP/1.1\r\nHost: example.com\r\n{wanted}\r\n\r\n")
            .unwrap();
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            assert_ne!(stream.read_line(&mut head).unwrap(), 0, "{head:?}\n{}", gateway.log());
        }
        head.split(' ').nth(1).unwrap().parse::<u16>().unwrap()
    };
    assert_eq!(
        [1, 2, 3, 4, 5, 6].map(|_| ask()),
        [200, 200, 200, 200, 200, 429],
        "{kind:?}\n{}",
        gateway.log()
    );
}

#[test]
fn nginx_limits() {
    limits(GatewayKind::Nginx, 200);
}

#[test]
fn caddy_limits() {
    limits(GatewayKind::Caddy, 502);
}

#[test]
fn haproxy_limits() {
    limits(GatewayKind::Haproxy, 200);
}

#[test]
fn where_no_rule_applies_nothing_is_said() {
    for kind in GATEWAYS {
        says_nothing_without_a_limit(kind);
    }
}

#[test]
fn upgrades_are_asked_about() {
    for kind in GATEWAYS {
        asks_about_upgrades(kind);
    }
}

/// All that ask Tidegate over HTTP.
const GATEWAYS: [GatewayKind; 4] =
    [GatewayKind::Nginx, GatewayKind::Caddy, GatewayKind::Haproxy, GatewayKind::Traefik];

/// The first block of a page of `docs/` that is marked as this language.
fn shortest(page: &str, language: &str) -> String {
    block(page, language, 1)
}

fn block(page: &str, language: &str, which: usize) -> String {
    let text = std::fs::read_to_string(folder().join("../../docs").join(page)).unwrap();
    let block = text.split(&format!("```{language}\n")).nth(which);
    block
        .unwrap_or_else(|| panic!("{page} has no {language}"))
        .split("```")
        .next()
        .unwrap()
        .to_string()
}

/// A folder with this text as the configuration, and what a user copies beside it.
fn only(kind: GatewayKind, text: &str) -> tempfile::TempDir {
    let own = tempfile::tempdir().unwrap();
    std::fs::write(own.path().join(kind.file()), text).unwrap();
    std::fs::copy(folder().join("tidegate.lua"), own.path().join("tidegate.lua")).unwrap();
    own
}

/// Five pass, the sixth does not, and a client cannot choose its address.
fn is_enough(kind: GatewayKind, text: &str, statuses_of_liars: &[u16]) {
    let own = only(kind, text);
    let (listeners, app) = (tidegate(), App::start());
    let gateway = gateway(kind, own.path(), listeners.http, &app, &PATIENT);
    let get = |client: u8, headers: &str| send(gateway.address(), client, "GET /", headers, "");
    for _ in 0..5 {
        assert_eq!(get(5, "").status, 200, "{}", gateway.log());
    }
    let seen = get(5, "X-Forwarded-For: 203.0.113.9");
    assert_eq!(
        (seen.status, seen.header("retry-after")),
        (429, Some("12")),
        "{seen:?}\n{}",
        gateway.log()
    );
    let liar = send(
        gateway.address(),
        6,
        "GET /",
        "Host: internal.example.com\nX-Original-URI: /free",
        "",
    )
    .status;
    assert!(statuses_of_liars.contains(&liar), "{liar}");
}

/// The short form of nginx's page in a whole file.
fn short_nginx() -> String {
    let inner = shortest("nginx.md", "nginx");
    format!("events {{}}\nhttp {{\nserver {{\nlisten 127.0.0.1:8000;\n{inner}}}\n}}\n")
}

/// The short form of Caddy's page, without certificates.
fn short_caddy() -> String {
    let site =
        shortest("caddy.md", "caddyfile").replace("example.com {", ":8000 {\n\tbind 127.0.0.1");
    format!("{{\n\tadmin off\n\tauto_https off\n}}\n{site}")
}

/// The short form of HAProxy's page in a whole file.
fn short_haproxy() -> String {
    let inner = shortest("haproxy.md", "haproxy");
    let times =
        "defaults\n    timeout connect 1s\n    timeout client 30s\n    timeout server 30s\n";
    format!("{times}{inner}\nbackend app\n    mode http\n    server app 127.0.0.1:9000\n")
}

#[test]
fn the_shortest_form_for_nginx_is_enough() {
    is_enough(GatewayKind::Nginx, &short_nginx(), &[403]);
}

#[test]
fn the_shortest_form_for_caddy_is_enough() {
    // What the client wrote and what Caddy wrote are not the same.
    is_enough(GatewayKind::Caddy, &short_caddy(), &[400]);
    let text = std::fs::read_to_string(folder().join("Caddyfile")).unwrap();
    let told: Vec<&str> =
        text.lines().filter_map(|line| line.strip_prefix("#   ")).map(str::trim).collect();
    let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    let page = words(&shortest("caddy.md", "caddyfile"));
    assert!(page.contains(&words(&told.join(" "))), "the file and the page say the same: {told:?}");
}

#[test]
fn the_shortest_form_for_haproxy_is_enough() {
    let patient = "    setenv TIDEGATE_TIMEOUT_MS 10000\n    lua-load";
    is_enough(GatewayKind::Haproxy, &short_haproxy().replace("    lua-load", patient), &[403]);
}

#[test]
fn caddy_lets_pass_without_tidegate_if_it_is_told_so() {
    let site = short_caddy();
    let (errors, log) = (block("caddy.md", "caddyfile", 2), block("caddy.md", "caddyfile", 3));
    let site = site.replacen("{\n", &format!("{{\n{log}"), 1);
    let own = only(
        GatewayKind::Caddy,
        &format!("{}\n{errors}\n}}\n", site.trim_end().strip_suffix('}').unwrap()),
    );
    let (listeners, app) = (tidegate(), App::start());
    let caddy = gateway(GatewayKind::Caddy, own.path(), listeners.http, &app, &PATIENT);
    let get = || send(caddy.address(), 5, "POST /", "", "0123456789");
    assert_eq!(
        [1, 2, 3, 4, 5, 6].map(|_| get().status),
        [200, 200, 200, 200, 200, 429],
        "{}",
        caddy.log()
    );
    drop(listeners);
    let seen = get();
    assert!(seen.status == 200 && seen.body.ends_with("10 bytes"), "{seen:?}\n{}", caddy.log());
    assert!(caddy.log().contains("connect: connection refused"), "{}", caddy.log());
}

/// The short form of Traefik's page in a whole file.
fn short_traefik() -> String {
    let middlewares = shortest("traefik.md", "yaml");
    let service =
        "services: { app: { loadBalancer: { servers: [{ url: 'http://127.0.0.1:9000' }] } } }";
    format!(
        "{middlewares}  routers:\n    app: {{ rule: 'PathPrefix(`/`)', middlewares: [tidegate], service: app }}\n  {service}\n"
    )
}

#[test]
fn traefik_limits() {
    limits(GatewayKind::Traefik, 500);
}

#[test]
fn the_shortest_form_for_traefik_is_enough() {
    // What the client wrote and what Traefik wrote are not the same.
    is_enough(GatewayKind::Traefik, &short_traefik(), &[400]);
}

#[test]
fn envoy_limits() {
    let (listeners, app) = (tidegate(), App::start());
    let text = std::fs::read_to_string(folder().join("envoy.yaml")).unwrap();
    let text = text.replace("port_value: 8000", "port_value: 0");
    let text = text.replace("port_value: 8081", &format!("port_value: {}", listeners.grpc));
    let text = text.replace("port_value: 9000", &format!("port_value: {}", app.at.port()));
    // On a busy machine a tenth of a second may pass without an answer, and then everything is let
    // through.
    let envoy = Envoy::start(&text.replace(" timeout: 0.1s  ", " timeout: 10s  "));
    let at = envoy.address();
    let get = |client: u8, headers: &str| send(at, client, "GET /page?q=1", headers, "");
    let seen = get(5, "");
    assert!(
        seen.status == 200 && seen.body.starts_with("GET /page?q=1 HTTP/1.1\r\n"),
        "{seen:?}\n{}",
        envoy.log()
    );
    assert_eq!(seen.header("ratelimit"), Some("\"per-ip\";r=4;t=12"), "{seen:?}");
    assert_eq!(
        (seen.header("x-ratelimit-remaining"), seen.header("x-ratelimit-reset")),
        (Some("4"), Some("12"))
    );
    for _ in 0..4 {
        assert_eq!(get(5, "").status, 200);
    }
    let seen = get(5, "X-Forwarded-For: 203.0.113.9");
    assert_eq!((seen.status, seen.header("retry-after")), (429, Some("12")), "{seen:?}");
    assert_eq!(
        (seen.header("x-ratelimit-remaining"), seen.header("x-envoy-ratelimited")),
        (Some("0"), Some("true"))
    );
    assert_eq!(seen.header("content-type"), Some("application/problem+json"), "{seen:?}");
    assert!(seen.body.contains(r#""detail":"Too many requests. Try again in 12 seconds.","violated-policies":["per-ip"],"retry_after_secs":12}"#), "{seen:?}");
    assert_eq!(get(6, "").status, 200);

    let search = |client: u8, line: &str| send(at, client, line, "X-Api-Key: k", "").status;
    assert_eq!(search(10, "POST /search"), 200);
    let seen = send(at, 11, "POST //x/%2e%2e/%73earch;v=1?q=1", "X-Api-Key: k", "");
    assert!(seen.status == 200 && seen.body.starts_with("POST /search;v=1?q=1 HTTP"), "{seen:?}");
    assert_eq!((search(12, "POST /search"), search(13, "POST //search")), (429, 429));
    let seen = send(at, 12, "POST /search", "X-Api-Key: k", "");
    assert_eq!(seen.header("ratelimit"), Some("\"search\";r=0;t=30"), "{seen:?}");
    assert!(
        !format!("{seen:?}").contains("per-ip"),
        "nothing about a rule that did not deny: {seen:?}"
    );
    assert_eq!(
        (search(14, "GET /search"), send(at, 15, "POST /search", "", "").status),
        (200, 200)
    );
    let seen = send(at, 16, "GET /", "Host: internal.example.com", "");
    assert_eq!((seen.status, seen.header("retry-after")), (403, None), "{seen:?}\n{}", envoy.log());
    assert_eq!(seen.header("content-type"), Some("application/problem+json"), "{seen:?}");
    assert!(
        seen.body.contains(r#""title":"Forbidden""#) && seen.body.contains(r#""status":403"#),
        "{seen:?}"
    );
    assert!(!format!("{seen:?}").contains("per-ip"), "{seen:?}");
    assert_eq!(
        (send(at, 17, "GET /trial", "", "").status, send(at, 18, "GET /trial", "", "").status),
        (200, 200)
    );
    // Two hits of fifty each, of a hundred.
    let export = |client: u8| send(at, client, "GET /export", "X-Api-Key: e", "");
    let seen = export(20);
    assert_eq!((seen.status, seen.header("x-ratelimit-remaining")), (200, Some("0")), "{seen:?}");
    assert_eq!(export(21).status, 429);
    assert_eq!(envoy.counter("cluster.app.ratelimit.error"), 0);

    drop(listeners);
    assert_eq!(get(5, "").status, 200, "it fails open");
    assert_eq!(envoy.counter("cluster.app.ratelimit.failure_mode_allowed"), 1);
}
