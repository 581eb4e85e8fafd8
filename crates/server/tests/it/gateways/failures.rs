//! What clients see when Tidegate is down, hangs, cannot be reached or is another server: with
//! files that were edited as their pages say, the real gateways, and what these log.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use tidegate_testkit::{Envoy, Gateway, GatewayKind, wait_until};
use tokio::net::TcpSocket;

use super::{App, PATIENT, Seen, block, folder, gateway, send, shortest, tidegate};
use crate::listeners::Listeners;

/// Nothing waits for seconds. The files say 100 ms; the rest is for a busy machine.
const SOON: Duration = Duration::from_secs(1);

/// What is at the address where Tidegate should be.
enum Absent {
    /// The port is taken and nobody listens: connections are refused.
    Down(SocketAddr, #[expect(dead_code, reason = "it holds the port")] TcpSocket),
    /// Connections are accepted by the system and nothing is ever read.
    Hangs(TcpListener),
    /// Packets that would open a connection are dropped.
    Unreachable(
        SocketAddr,
        #[expect(dead_code, reason = "they fill the queue")] Vec<TcpStream>,
        #[expect(dead_code, reason = "it has the queue")] tokio::net::TcpListener,
    ),
    /// Another server.
    Another(App),
}

impl Absent {
    fn down() -> Absent {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        Absent::Down(socket.local_addr().unwrap(), socket)
    }

    fn hangs() -> Absent {
        Absent::Hangs(TcpListener::bind("127.0.0.1:0").unwrap())
    }

    /// A listener whose queue is full. tokio wants a runtime to make it in.
    fn unreachable(runtime: &tokio::runtime::Runtime) -> Absent {
        let _entered = runtime.enter();
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        let listener = socket.listen(0).unwrap();
        let at = listener.local_addr().unwrap();
        let mut waiting = Vec::new();
        while let Ok(stream) = TcpStream::connect_timeout(&at, Duration::from_millis(200)) {
            waiting.push(stream);
        }
        Absent::Unreachable(at, waiting, listener)
    }

    fn at(&self) -> SocketAddr {
        match self {
            Absent::Down(at, _) | Absent::Unreachable(at, ..) => *at,
            Absent::Hangs(listener) => listener.local_addr().unwrap(),
            Absent::Another(app) => app.at,
        }
    }
}

/// What is expected of a request while Tidegate is not there.
struct Expected {
    absent: Absent,
    status: u16,
    /// Whether the service was asked.
    passes: bool,
    /// What the gateway logs.
    log: &'static str,
}

fn ask(at: SocketAddr, app: &App) -> (Seen, bool, Duration) {
    let before = app.served();
    let seen = send(at, 5, "GET /", "", "");
    let took = seen.took;
    (seen, app.served() > before, took)
}

/// `edits` are those of a user, in the configuration that the gateway is started with.
fn without_tidegate(
    kind: GatewayKind,
    folder: &Path,
    edits: &[(&str, &str)],
    expected: Vec<Expected>,
) {
    for Expected { absent, status, passes, log } in expected {
        let app = App::start();
        let gateway = gateway(kind, folder, absent.at(), &app, edits);
        let (seen, passed, took) = ask(gateway.address(), &app);
        let state = format!("{kind:?}, {log}: {seen:?} after {took:?}\n{}", gateway.log());
        assert_eq!((seen.status, passed), (status, passes), "{state}");
        assert!(took < SOON, "{state}");
        wait_until(&format!("this is logged: {state}"), SOON, || gateway.log().contains(log));
    }
}

fn all(
    runtime: &tokio::runtime::Runtime,
    expected: [(u16, bool, &'static str); 5],
) -> Vec<Expected> {
    let absent = [
        Absent::down(),
        Absent::hangs(),
        Absent::unreachable(runtime),
        Absent::Another(App::start()),
        Absent::Another(App::answering("404 Not Found")),
    ];
    let of = |(absent, (status, passes, log))| Expected { absent, status, passes, log };
    absent.into_iter().zip(expected).map(of).collect()
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

#[test]
fn haproxy_without_tidegate_does_what_the_line_says_and_logs_it() {
    let runtime = runtime();
    let open = [
        (
            200,
            true,
            "the connection was refused: requests pass without a limit (TIDEGATE_ON_FAILURE is open)",
        ),
        (200, true, "no answer within 100 ms: requests pass without a limit"),
        (200, true, "no answer within 100 ms: requests pass without a limit"),
        (200, true, "the answer is 200, which is not Tidegate's: requests pass without a limit"),
        (200, true, "the answer is 404, which is not Tidegate's: requests pass without a limit"),
    ];
    without_tidegate(GatewayKind::Haproxy, &folder(), &[], all(&runtime, open));
    let closed = [
        (
            503,
            false,
            "the connection was refused: requests get 503 (TIDEGATE_ON_FAILURE is closed)",
        ),
        (503, false, "no answer within 100 ms: requests get 503"),
        (503, false, "no answer within 100 ms: requests get 503"),
        (503, false, "the answer is 200, which is not Tidegate's: requests get 503"),
        (503, false, "the answer is 404, which is not Tidegate's: requests get 503"),
    ];
    let edits = [("TIDEGATE_ON_FAILURE open", "TIDEGATE_ON_FAILURE closed")];
    without_tidegate(GatewayKind::Haproxy, &folder(), &edits, all(&runtime, closed));
}

/// A way to Tidegate that can be closed: then every connection ends at once.
fn closable(to: SocketAddr) -> (SocketAddr, Arc<AtomicBool>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (at, is_open) = (listener.local_addr().unwrap(), Arc::new(AtomicBool::new(true)));
    let shared = Arc::clone(&is_open);
    thread::spawn(move || {
        for mut client in listener.incoming().flatten().filter(|_| shared.load(Ordering::SeqCst)) {
            let mut server = TcpStream::connect(to).unwrap();
            let (mut from, mut into) = (client.try_clone().unwrap(), server.try_clone().unwrap());
            thread::spawn(move || std::io::copy(&mut from, &mut into));
            let _ = std::io::copy(&mut server, &mut client);
        }
    });
    (at, is_open)
}

/// Tidegate answers, but its store does not, and a rule is `closed`: what the pages say, and
/// nothing about the store.
#[test]
fn without_a_store_a_closed_rule_lets_nothing_pass() {
    let text = "listen: { http: 127.0.0.1:0, grpc: off, resp: off }\ntrusted_proxies: [127.0.0.1]\nrules: [{ name: strict, limit: 5/min, on_store_failure: closed }]\n";
    for (kind, status) in [
        (GatewayKind::Nginx, 500),
        (GatewayKind::Caddy, 503),
        (GatewayKind::Haproxy, 503),
        (GatewayKind::Traefik, 503),
    ] {
        let (listeners, app) = (Listeners::without_store(text), App::start());
        let gateway = gateway(kind, &folder(), listeners.http, &app, &PATIENT);
        let (seen, passed, _) = ask(gateway.address(), &app);
        assert_eq!((seen.status, passed), (status, false), "{kind:?}: {seen:?}\n{}", gateway.log());
        assert!(
            !seen.body.contains("strict") && !seen.body.contains("127.0.0.1"),
            "{kind:?}: {seen:?}"
        );
    }
}

#[test]
fn haproxy_says_when_tidegate_is_back() {
    let (listeners, app) = (tidegate(), App::start());
    let (at, is_open) = closable(listeners.http);
    let patient = ("TIDEGATE_TIMEOUT_MS 100", "TIDEGATE_TIMEOUT_MS 10000");
    let haproxy = gateway(GatewayKind::Haproxy, &folder(), at, &app, &[patient]);
    let left = || ask(haproxy.address(), &app).0.header("x-ratelimit-remaining").map(str::to_owned);
    assert_eq!(left().as_deref(), Some("4"), "{}", haproxy.log());
    assert!(!haproxy.log().contains("Tidegate at"), "{}", haproxy.log());
    is_open.store(false, Ordering::SeqCst);
    assert_eq!((left(), left()), (None, None), "{}", haproxy.log());
    is_open.store(true, Ordering::SeqCst);
    assert_eq!(left().as_deref(), Some("3"), "{}", haproxy.log());
    let lines = [
        format!(
            "Tidegate at {at}: the connection was closed without an answer: requests pass without a limit (TIDEGATE_ON_FAILURE is open), 1 so far"
        ),
        format!("Tidegate at {at} answers again after 2 requests without an answer"),
    ];
    wait_until(&lines.join(" and "), SOON, || {
        lines.iter().all(|line| haproxy.log().contains(line))
    });
}

#[test]
fn haproxy_refuses_a_configuration_that_would_not_limit() {
    let check = |edits: &[(&str, &str)]| Gateway::check(GatewayKind::Haproxy, &folder(), edits);
    assert!(check(&[]).is_ok(), "{:?}", check(&[]));
    for (from, to, message) in [
        (
            "setenv TIDEGATE_ADDRESS 127.0.0.1:8080",
            "",
            "tidegate.lua: TIDEGATE_ADDRESS is missing: write `setenv TIDEGATE_ADDRESS 127.0.0.1:8080` in the section global, above lua-load",
        ),
        // What the page said before: 2.6 ignores the argument.
        (
            "setenv TIDEGATE_ADDRESS 127.0.0.1:8080",
            "lua-load tidegate.lua http://127.0.0.1:8080",
            "tidegate.lua: TIDEGATE_ADDRESS is missing: write `setenv TIDEGATE_ADDRESS 127.0.0.1:8080` in the section global, above lua-load",
        ),
        (
            "setenv TIDEGATE_ADDRESS 127.0.0.1:8080",
            "setenv TIDEGATE_ADDRESS tidegate:8080",
            "tidegate.lua: TIDEGATE_ADDRESS is `tidegate:8080`: write an IP address and a port, as 127.0.0.1:8080 or [::1]:8080; for a name or TLS see docs/haproxy.md",
        ),
        (
            "setenv TIDEGATE_ADDRESS 127.0.0.1:8080",
            "setenv TIDEGATE_ADDRESS http://127.0.0.1:8080",
            "tidegate.lua: TIDEGATE_ADDRESS is `http://127.0.0.1:8080`: write an IP address and a port, as 127.0.0.1:8080 or [::1]:8080; for a name or TLS see docs/haproxy.md",
        ),
        (
            "setenv TIDEGATE_ON_FAILURE open",
            "",
            "tidegate.lua: TIDEGATE_ON_FAILURE is missing: write `setenv TIDEGATE_ON_FAILURE open` in the section global, above lua-load",
        ),
        (
            "setenv TIDEGATE_ON_FAILURE open",
            "setenv TIDEGATE_ON_FAILURE pass",
            "tidegate.lua: TIDEGATE_ON_FAILURE is `pass`: write open (requests pass while Tidegate does not answer) or closed (they get 503)",
        ),
        (
            "TIDEGATE_TIMEOUT_MS 100",
            "TIDEGATE_TIMEOUT_MS 0.1",
            "tidegate.lua: TIDEGATE_TIMEOUT_MS is `0.1`: write whole milliseconds, as 100",
        ),
    ] {
        let printed = check(&[(from, to)]).expect_err(to);
        assert!(printed.contains(message), "{to}: {printed}");
    }
}

/// The section of the page that is for names, TLS and connections that are kept.
#[test]
fn haproxy_asks_through_a_server_line() {
    let own = tempfile::tempdir().unwrap();
    let text = std::fs::read_to_string(folder().join("haproxy.cfg")).unwrap();
    let listen = block("haproxy.md", "haproxy", 2);
    let text = text.replace("TIDEGATE_ADDRESS 127.0.0.1:8080", "TIDEGATE_ADDRESS 127.0.0.1:8079");
    // The gateway's own port, at another address of this machine.
    let text = format!("{text}\n{listen}").replace("127.0.0.1:8079", "127.0.0.79:8000");
    std::fs::write(own.path().join("haproxy.cfg"), text).unwrap();
    std::fs::copy(folder().join("tidegate.lua"), own.path().join("tidegate.lua")).unwrap();
    let (listeners, app) = (tidegate(), App::start());
    let patient = [
        ("TIDEGATE_TIMEOUT_MS 100", "TIDEGATE_TIMEOUT_MS 10000"),
        ("timeout server 100ms", "timeout server 10s"),
    ];
    let haproxy = gateway(GatewayKind::Haproxy, own.path(), listeners.http, &app, &patient);
    let statuses = [1, 2, 3, 4, 5, 6].map(|_| ask(haproxy.address(), &app).0.status);
    assert_eq!(statuses, [200, 200, 200, 200, 200, 429], "{}", haproxy.log());
    drop(listeners);
    let (seen, passed, took) = ask(haproxy.address(), &app);
    assert!(seen.status == 200 && passed && took < SOON, "{seen:?} {took:?}\n{}", haproxy.log());
    let log = "the answer is 503, which is not Tidegate's: requests pass without a limit";
    wait_until(log, SOON, || haproxy.log().contains(log));
}

#[test]
fn nginx_without_tidegate_does_what_the_map_says_and_logs_it() {
    let runtime = runtime();
    let open = [
        (200, true, "connect() failed (111: Connection refused) while connecting to upstream"),
        (
            200,
            true,
            "upstream timed out (110: Connection timed out) while reading response header from upstream",
        ),
        (200, true, "upstream timed out (110: Connection timed out) while connecting to upstream"),
        (502, false, "no live upstreams while connecting to upstream"),
        (500, false, "auth request unexpected status: 404"),
    ];
    without_tidegate(GatewayKind::Nginx, &folder(), &[], all(&runtime, open));
    let closed = [
        (502, false, "connect() failed (111: Connection refused) while connecting to upstream"),
        (
            502,
            false,
            "upstream timed out (110: Connection timed out) while reading response header from upstream",
        ),
        (502, false, "upstream timed out (110: Connection timed out) while connecting to upstream"),
        (502, false, "no live upstreams while connecting to upstream"),
        (500, false, "auth request unexpected status: 404"),
    ];
    let edits = [("~502$    app;", "~502$    refused;"), ("~504$    app;", "~504$    refused;")];
    without_tidegate(GatewayKind::Nginx, &folder(), &edits, all(&runtime, closed));
}

#[test]
fn caddy_without_tidegate_refuses_and_logs_it() {
    let runtime = runtime();
    let closed = [
        (502, false, "connect: connection refused"),
        (504, false, "timeout awaiting response headers"),
        (502, false, "i/o timeout"),
        // The other server's answer is the client's: the service is not asked.
        (200, false, ""),
        (404, false, ""),
    ];
    without_tidegate(GatewayKind::Caddy, &folder(), &[], all(&runtime, closed));
}

/// A Tidegate that hangs is not among these: Traefik waits 30 s for it, which no setting changes.
#[test]
fn traefik_without_tidegate_refuses_and_logs_it() {
    let expected = [
        (Absent::down(), 500, false, "connect: connection refused"),
        // Traefik takes any 2xx as leave to go on.
        (Absent::Another(App::start()), 200, true, ""),
        (Absent::Another(App::answering("404 Not Found")), 404, false, ""),
    ];
    let of = |(absent, status, passes, log)| Expected { absent, status, passes, log };
    let expected = expected.into_iter().map(of).collect();
    without_tidegate(GatewayKind::Traefik, &folder(), &[], expected);
}

/// The short forms of the pages do not wait either.
#[test]
fn the_shortest_forms_do_not_wait_for_a_tidegate_that_hangs() {
    for (kind, text, status, log) in [
        (GatewayKind::Nginx, super::short_nginx(), 500, "upstream timed out"),
        (GatewayKind::Caddy, super::short_caddy(), 504, "timeout awaiting response headers"),
        (GatewayKind::Haproxy, super::short_haproxy(), 200, "no answer within 100 ms"),
    ] {
        let own = super::only(kind, &text);
        let expected = Expected { absent: Absent::hangs(), status, passes: status == 200, log };
        without_tidegate(kind, own.path(), &[], vec![expected]);
    }
    assert!(shortest("haproxy.md", "haproxy").contains("TIDEGATE_ON_FAILURE open"));
}

#[test]
fn envoy_without_tidegate_does_what_failure_mode_deny_says_and_logs_it() {
    let runtime = runtime();
    for (deny, status) in [("failure_mode_deny: false", 200), ("failure_mode_deny: true", 500)] {
        for absent in [
            Absent::down(),
            Absent::hangs(),
            Absent::unreachable(&runtime),
            Absent::Another(App::start()),
        ] {
            let app = App::start();
            let text = std::fs::read_to_string(folder().join("envoy.yaml")).unwrap();
            let text = text
                .replace("failure_mode_deny: false", deny)
                .replace("port_value: 8000", "port_value: 0");
            let text =
                text.replace("port_value: 8081", &format!("port_value: {}", absent.at().port()));
            let envoy = Envoy::start(
                &text.replace("port_value: 9000", &format!("port_value: {}", app.at.port())),
            );
            let (seen, passed, took) = ask(envoy.address(), &app);
            let state = format!("{deny}: {seen:?} after {took:?}\n{}", envoy.log());
            assert_eq!((seen.status, passed), (status, status == 200), "{state}");
            assert!(took < SOON, "{state}");
            let logged = || envoy.log().contains("\"health_check_failure_event\"");
            wait_until(&format!("this is logged: {state}"), Duration::from_secs(10), logged);
        }
    }
}
