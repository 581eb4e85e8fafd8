//! Who is let in, and what those get who are too many, too slow or too long.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tidegate_server::auth::{Auth, Guard, May};
use tidegate_server::backend::Backend;
use tidegate_server::config::Config;
use tidegate_server::listen::http::{Application, HttpServer};
use tidegate_server::listen::{Bounds, Listener};
use tidegate_server::observe::Observer;
use tidegate_server::protocol::Protocol;
use tidegate_server::{Options, Running, start};
use tidegate_testkit::{Certs, Flavor, Server, attacks_held, wait_until};
use tokio::runtime::Runtime;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::{
    ClientConfig, ClientConnection, RootCertStore, StreamOwned, crypto::ring,
};

/// Long enough for a busy machine.
const LONG: Duration = Duration::from_secs(20);

struct Open {
    runtime: Runtime,
    running: Option<Running>,
    http: SocketAddr,
    resp: SocketAddr,
    grpc: SocketAddr,
}

/// Listeners for HTTP, RESP and gRPC; `change` changes what the text says.
fn open(text: &str, auth: Auth, change: impl FnOnce(&mut Config)) -> Open {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let text = format!(
        "listen: {{ http: 127.0.0.1:0, resp: 127.0.0.1:0, grpc: 127.0.0.1:0 }}\nlog: {{ level: error }}\n{text}"
    );
    let mut config = Config::parse(&text, "test").unwrap();
    change(&mut config);
    let running = runtime.block_on(start(config, Options { auth, ..Options::default() })).unwrap();
    let (http, resp, grpc) = (running.http.unwrap(), running.resp.unwrap(), running.grpc.unwrap());
    Open { runtime, running: Some(running), http, resp, grpc }
}

impl Open {
    fn metric(&self, line: &str) -> u64 {
        let engine = self.running.as_ref().unwrap().engine();
        let text = engine.observer().metrics().text(engine.store(), 0);
        let found = text.lines().find_map(|own| own.strip_prefix(line)?.strip_prefix(' '));
        found.unwrap_or_else(|| panic!("{line} is not in\n{text}")).parse().unwrap()
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        let Some(running) = self.running.take() else { return };
        let stopped = self.runtime.block_on(running.stop());
        assert!(stopped || std::thread::panicking(), "every request was answered");
    }
}

/// Everything that comes until the connection ends.
fn all(stream: &mut impl Read) -> String {
    let mut bytes = Vec::new();
    let _ = stream.read_to_end(&mut bytes);
    String::from_utf8_lossy(&bytes).into_owned()
}

fn connect(at: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(at).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    stream
}

/// The status of the answer, and all of it.
fn ask(at: SocketAddr, head: &str, headers: &str, body: &str) -> (u16, String) {
    let mut stream = connect(at);
    let length = body.len();
    let request = format!(
        "{head} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{headers}Content-Length: {length}\r\n\r\n{body}"
    );
    // A head that is too large is answered before all of it is written.
    let _ = stream.write_all(request.as_bytes());
    let text = all(&mut stream);
    let status = text.split(' ').nth(1).and_then(|status| status.parse().ok());
    (status.unwrap_or_else(|| panic!("{head} was answered with {text:?}")), text)
}

const CHECK: &str = r#"{"key":"k","limit":"1000/s"}"#;

#[test]
fn tokens_for_checks_and_for_everything_are_asked_for() {
    let auth = Auth { checks: Some("check-me".into()), admin: Some("admin-me".into()) };
    let open = open("", auth, |_| {});
    let bearer = |token: &str| format!("Authorization: Bearer {token}\r\n");
    // path, nobody, check token, admin token, wrong token
    for (head, body, expected) in [
        ("GET /healthz", "", [200, 200, 200, 200]),
        ("GET /readyz", "", [200, 200, 200, 200]),
        ("POST /v1/check", CHECK, [401, 200, 200, 401]),
        ("POST /v1/peek", CHECK, [401, 200, 200, 401]),
        ("POST /v1/refund", CHECK, [401, 200, 200, 401]),
        ("POST /v1/reset", CHECK, [401, 403, 200, 401]),
        ("POST /v1/explain", r#"{"attributes":{}}"#, [401, 403, 200, 401]),
        ("GET /v1/rules", "", [401, 403, 200, 401]),
        ("GET /v1/top", "", [401, 403, 200, 401]),
        ("GET /metrics", "", [401, 200, 200, 401]),
        ("GET /openapi.json", "", [200, 200, 200, 200]),
        ("GET /nowhere", "", [401, 404, 404, 401]),
    ] {
        let headers = [String::new(), bearer("check-me"), bearer("admin-me"), bearer("check-mf")];
        let answers = headers.map(|headers| ask(open.http, head, &headers, body).0);
        assert_eq!(answers, expected, "{head}");
    }
    let (_, text) = ask(open.http, "POST /v1/check", "", CHECK);
    assert!(text.to_ascii_lowercase().contains("www-authenticate: bearer"), "{text}");
    assert_eq!(ask(open.http, "POST /v1/check", "Authorization: Basic eDp5\r\n", CHECK).0, 401);
    assert_eq!(
        ask(open.http, "POST /v1/check", "authorization: bearer check-me\r\n", CHECK).0,
        200
    );

    let resp = |commands: &str| {
        let mut stream = connect(open.resp);
        write!(stream, "{commands}QUIT\r\n").unwrap();
        all(&mut stream)
    };
    assert!(resp("TG.PEEK k 1/s\r\n").starts_with("-NOAUTH"));
    assert!(resp("AUTH check-mf\r\n").starts_with("-WRONGPASS"));
    assert!(resp("AUTH check-me\r\nTG.RESET k 1/s\r\n").starts_with("+OK\r\n-NOPERM"));
    assert!(resp("AUTH admin-me\r\nTG.RESET k 1/s\r\n").starts_with("+OK\r\n*5"));
    // Commands that are read together are still answered one after the other: who has taken his
    // word back is nobody.
    let array = |words: &[&str]| {
        let strings: String =
            words.iter().map(|word| format!("${}\r\n{word}\r\n", word.len())).collect();
        format!("*{}\r\n{strings}", words.len())
    };
    let throttle = array(&["CL.THROTTLE", "k", "15", "30", "60"]);
    let answers = resp(
        &[array(&["AUTH", "check-me"]), throttle.clone(), array(&["RESET"]), throttle].concat(),
    );
    assert!(
        answers.starts_with("+OK\r\n*5\r\n:0\r\n:16\r\n:15\r\n:-1\r\n:2\r\n+RESET\r\n-NOAUTH"),
        "{answers}"
    );
    assert_eq!(open.metric(r#"tidegate_refused_total{protocol="resp",reason="token"}"#), 1);
    assert!(open.metric(r#"tidegate_refused_total{protocol="http",reason="token"}"#) >= 15);
}

#[test]
fn admin_calls_can_have_a_protocol_of_their_own() {
    let open =
        open("", Auth::default(), |config| config.listen.admin = Some(([127, 0, 0, 1], 0).into()));
    let admin = open.running.as_ref().unwrap().admin.unwrap();
    for (head, body, expected) in [
        ("GET /healthz", "", [200, 200]),
        ("POST /v1/check", CHECK, [200, 404]),
        ("POST /v1/reset", CHECK, [404, 200]),
        ("GET /v1/rules", "", [404, 200]),
        ("GET /metrics", "", [404, 200]),
    ] {
        assert_eq!([open.http, admin].map(|at| ask(at, head, "", body).0), expected, "{head}");
    }
}

#[test]
fn tokens_are_read_from_files() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("token");
    std::fs::write(&file, "from-a-file\n").unwrap();
    let open =
        open(&format!("tokens: {{ check_file: {} }}\n", file.display()), Auth::default(), |_| {});
    assert_eq!(ask(open.http, "POST /v1/check", "", CHECK).0, 401);
    assert_eq!(
        ask(open.http, "POST /v1/check", "Authorization: Bearer from-a-file\r\n", CHECK).0,
        200
    );
}

/// The secret of the store comes from a file, is the one that the library means, and mistakes do
/// not show it.
#[test]
fn the_secret_of_the_store_is_read_from_a_file() {
    const SECRET: &str = "open-sesame-0123456789";
    let server = Server::start(Flavor::Redis7);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("slots");
    let write = |text: &str| std::fs::write(&file, text).unwrap();
    let config = |url: &str| {
        let listeners =
            "listen: { http: 127.0.0.1:0, resp: off, grpc: off }\nlog: { level: error }\n";
        Config::parse(
            &format!("{listeners}store: {url}\nstore_secret_file: {}\n", file.display()),
            "test",
        )
        .unwrap()
    };
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let with = |query: &str| format!("{}?secret={query}", server.url());
    for (text, url, expected) in [
        ("sesame", server.url(), "expected 16 to 512 bytes at random, found 6"),
        (SECRET, with(SECRET), "the URL of the store brings a secret, too: expected one of them"),
    ] {
        write(text);
        let error =
            runtime.block_on(start(config(&url), Options::default())).err().unwrap().to_string();
        assert_eq!(error, format!("store_secret_file: {}: {expected}", file.display()));
    }

    write(&format!("{SECRET}\r\n"));
    let running = runtime.block_on(start(config(&server.url()), Options::default())).unwrap();
    let check = r#"{"key":"k","limit":"1/h"}"#; // it stays till the end of the test
    assert_eq!(ask(running.http.unwrap(), "POST /v1/check", "", check).0, 200);
    // Besides there are the keys by which nodes are counted and the store is probed; their scopes
    // have a space, which no rule has.
    let names = || {
        let all = server.command(&["KEYS", "tg1:*"]);
        all.array().iter().filter(|name| !name.text().contains("tidegate ")).count()
    };
    assert_eq!(names(), 1);
    assert!(runtime.block_on(running.stop()));
    // Who brings the same in the URL finds the same key; who brings none, another.
    for (url, status, keys) in [(with(SECRET), 429, 1), (server.url(), 200, 2)] {
        let mut config = config(&url);
        config.store_secret_file = None;
        let running = runtime.block_on(start(config, Options::default())).unwrap();
        assert_eq!(ask(running.http.unwrap(), "POST /v1/check", "", check).0, status, "{url}");
        assert_eq!(names(), keys, "{url}");
        assert!(runtime.block_on(running.stop()));
    }
}

#[test]
fn no_protocol_accepts_any_client_by_accident() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let certs = Certs::new();
    let tls = |ca: &str| {
        format!(
            "tls: {{ cert: {}, key: {}{ca} }}\n",
            certs.server_cert().display(),
            certs.server_key().display()
        )
    };
    let client_ca = tls(&format!(", client_ca: {}", certs.ca().display()));
    let word = |text: &str| Some(text.into());
    for (more, auth, may) in [
        (String::new(), Auth::default(), false),
        (tls(""), Auth::default(), false),
        (String::new(), Auth { checks: None, admin: word("admin-0123456789") }, false),
        (String::new(), Auth { checks: word("check-0123456789"), admin: None }, true),
        (client_ca, Auth::default(), true),
        ("insecure: true\n".into(), Auth::default(), true),
    ] {
        for protocol in ["http", "resp", "grpc", "admin"] {
            let mut listen = String::from("listen: { ");
            for other in ["http", "resp", "grpc", "admin"] {
                listen +=
                    &format!("{other}: {}, ", if other == protocol { "0.0.0.0:0" } else { "off" });
            }
            let config =
                Config::parse(&format!("{listen}}}\nlog: {{ level: off }}\n{more}"), "test")
                    .unwrap();
            let started = runtime
                .block_on(start(config, Options { auth: auth.clone(), ..Options::default() }));
            match started {
                Ok(running) => {
                    assert!(may, "{protocol} with {more:?} {auth:?}");
                    assert!(runtime.block_on(running.stop()));
                }
                Err(error) => {
                    let error = error.to_string();
                    assert!(
                        !may && error.starts_with(&format!("{protocol} on 0.0.0.0:0 would accept")),
                        "{error}"
                    );
                    assert!(
                        error.contains("--token-file") && error.contains("--insecure"),
                        "{error}"
                    );
                }
            }
        }
    }
}

fn secure(
    at: SocketAddr,
    certs: &Certs,
    with_identity: bool,
) -> StreamOwned<ClientConnection, TcpStream> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(certs.ca()).unwrap()).unwrap();
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots);
    let config = if with_identity {
        let chain = vec![CertificateDer::from_pem_file(certs.client_cert()).unwrap()];
        builder
            .with_client_auth_cert(chain, PrivateKeyDer::from_pem_file(certs.client_key()).unwrap())
            .unwrap()
    } else {
        builder.with_no_client_auth()
    };
    let name = "localhost".try_into().unwrap();
    StreamOwned::new(ClientConnection::new(Arc::new(config), name).unwrap(), connect(at))
}

/// What a listener answers through TLS: `healthz` or a PING, by whether it is HTTP.
fn secure_answer(at: SocketAddr, certs: &Certs, with_identity: bool, http: bool) -> String {
    let mut stream = secure(at, certs, with_identity);
    let question = if http {
        "GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    } else {
        "PING\r\nQUIT\r\n"
    };
    let _ = stream.write_all(question.as_bytes());
    all(&mut stream)
}

/// Whether the listener for gRPC greets through TLS: HTTP/2 begins with a frame of settings from
/// both sides.
fn greets(at: SocketAddr, certs: &Certs, with_identity: bool) -> bool {
    let mut stream = secure(at, certs, with_identity);
    let _ = stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0");
    let mut head = [0; 9];
    stream.read_exact(&mut head).is_ok() && head[3] == 4
}

#[test]
fn every_protocol_speaks_tls_and_can_ask_for_certificates() {
    let certs = Certs::new();
    let text = |ca: &str| {
        format!(
            "tls: {{ cert: {}, key: {}{ca} }}\n",
            certs.server_cert().display(),
            certs.server_key().display()
        )
    };
    {
        let open = open(&text(""), Auth::default(), |_| {});
        assert!(secure_answer(open.http, &certs, false, true).starts_with("HTTP/1.1 200"));
        assert_eq!(secure_answer(open.resp, &certs, false, false), "+PONG\r\n+OK\r\n");
        assert!(greets(open.grpc, &certs, false));
        // Whoever does not speak TLS is not answered.
        let mut plain = connect(open.resp);
        plain.write_all(b"PING\r\n").unwrap();
        assert!(!all(&mut plain).contains("PONG"));
        wait_until("it is counted", LONG, || {
            open.metric(r#"tidegate_refused_total{protocol="resp",reason="tls"}"#) == 1
        });
    }
    let open =
        open(&text(&format!(", client_ca: {}", certs.ca().display())), Auth::default(), |_| {});
    assert!(secure_answer(open.http, &certs, true, true).starts_with("HTTP/1.1 200"));
    assert_eq!(secure_answer(open.resp, &certs, true, false), "+PONG\r\n+OK\r\n");
    assert_eq!(secure_answer(open.http, &certs, false, true), "");
    assert_eq!(secure_answer(open.resp, &certs, false, false), "");
    assert!(greets(open.grpc, &certs, true) && !greets(open.grpc, &certs, false));
}

#[test]
fn certificates_change_without_dropping_anybody_and_bad_ones_change_nothing() {
    let (certs, next, folder) = (Certs::new(), Certs::new(), tempfile::tempdir().unwrap());
    let (cert, key) = (folder.path().join("cert.pem"), folder.path().join("key.pem"));
    let put = |from: &Certs| {
        std::fs::copy(from.server_key(), &key).unwrap();
        std::fs::copy(from.server_cert(), &cert).unwrap();
    };
    put(&certs);
    let text = format!(
        "tls: {{ cert: {}, key: {} }}\nlog: {{ level: off }}\n",
        cert.display(),
        key.display()
    );
    let open = open(&text.replace("log: { level: off }\n", ""), Auth::default(), |_| {});
    let mut old = secure(open.resp, &certs, false);
    old.write_all(b"PING\r\n").unwrap();
    let mut pong = [0; 7];
    old.read_exact(&mut pong).unwrap();

    put(&next);
    wait_until("the new certificate is shown", LONG, || {
        secure_answer(open.http, &next, false, true).starts_with("HTTP/1.1 200")
    });
    assert_eq!(secure_answer(open.resp, &next, false, false), "+PONG\r\n+OK\r\n");
    assert_eq!(
        secure_answer(open.http, &certs, false, true),
        "",
        "the old authority does not vouch for it"
    );
    old.write_all(b"PING\r\n").unwrap();
    old.read_exact(&mut pong).unwrap();
    assert_eq!(&pong, b"+PONG\r\n", "who was there is served on");

    std::fs::write(&cert, "not a certificate").unwrap();
    let failed = r#"tidegate_reloads_total{what="certificates",result="failed"}"#;
    wait_until("the bad file is noticed", LONG, || open.metric(failed) >= 1);
    assert!(
        secure_answer(open.http, &next, false, true).starts_with("HTTP/1.1 200"),
        "the last good one stays"
    );
    assert!(open.metric(r#"tidegate_reloads_total{what="certificates",result="ok"}"#) >= 1);
}

#[test]
fn heads_and_targets_have_a_size() {
    let open = open("", Auth::default(), |_| {});
    let target = |length: usize| ask(open.http, &format!("GET /{}", "a".repeat(length)), "", "").0;
    assert_eq!((target(1000), target(8191), target(8192)), (404, 404, 414));
    let header = |count: usize| ask(open.http, "GET /healthz", &"X-A: b\r\n".repeat(count), "").0;
    assert_eq!((header(90), header(101)), (200, 431));
    let long = |length: usize| {
        ask(open.http, "GET /healthz", &format!("X-A: {}\r\n", "b".repeat(length)), "").0
    };
    assert_eq!((long(20_000), long(40_000)), (200, 431));
}

#[test]
fn whoever_is_slow_is_let_go_and_others_are_served() {
    let open = open("", Auth::default(), |config| {
        config.bounds.patience = Duration::from_millis(400);
        config.bounds.idle = Duration::from_secs(2);
    });
    let begin = Instant::now();
    // A head that does not end, bytes that drip, a body that does not come, a command that does not
    // end.
    let mut head = connect(open.http);
    head.write_all(b"GET /healthz HTTP/1.1\r\nHost:").unwrap();
    let mut body = connect(open.http);
    body.write_all(b"POST /v1/check HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n{")
        .unwrap();
    let mut command = connect(open.resp);
    command.write_all(b"*1\r\n$4\r\nPI").unwrap();
    let mut drip = connect(open.http);
    let dripping = std::thread::spawn(move || {
        for byte in b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-A: "
            .iter()
            .chain(b"a".iter().cycle().take(10_000))
        {
            if drip.write_all(&[*byte]).is_err() {
                return true;
            }
            std::thread::park_timeout(Duration::from_millis(20));
        }
        false
    });
    assert_eq!(all(&mut head), "");
    let answered = all(&mut body);
    assert!(
        answered.starts_with("HTTP/1.1 408") && answered.contains("connection: close"),
        "{answered}"
    );
    assert!(!all(&mut command).contains("PONG"));
    assert!(dripping.join().unwrap(), "dripping bytes does not keep a connection");
    assert!(begin.elapsed() < LONG);
    wait_until("slow heads are counted", LONG, || {
        open.metric(r#"tidegate_refused_total{protocol="http",reason="slow"}"#) >= 3
    });

    // Who sends nothing at all is kept for a while, and then let go.
    let begin = Instant::now();
    let mut idle = connect(open.http);
    idle.write_all(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    let text = all(&mut idle);
    assert!(text.starts_with("HTTP/1.1 200") && begin.elapsed() > Duration::from_secs(1), "{text}");
    assert_eq!(ask(open.http, "POST /v1/check", "", CHECK).0, 200);
    attacks_held("slow", 5);
}

#[test]
fn a_head_of_http_2_and_its_preface_take_no_longer_than_a_head_of_http_1() {
    const OPENING: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
    let open = open("", Auth::default(), |config| {
        config.bounds.patience = Duration::from_millis(400);
        config.bounds.idle = Duration::from_secs(3600);
    });
    // HEADERS of stream 1: GET / of x. Without its last flag, more is to come in another frame.
    let head = |flags: u8| [0, 0, 6, 1, flags, 0, 0, 0, 1, 0x82, 0x86, 0x84, 0x01, 1, b'x'];
    let (whole, goes_on) = (head(5), head(1));
    let mut patient = connect(open.http);
    patient.write_all(OPENING).unwrap();
    let begun: [(&str, Vec<u8>); 7] = [
        ("a method that is the beginning of the preface", b"PRI ".to_vec()),
        (
            "a request whose method is PRI",
            b"PRI /x HTTP/1.1\r\nHost: x\r\nX-Long: aaaaaaaaaaaaaaaaa".to_vec(),
        ),
        ("most of the preface", OPENING[..23].to_vec()),
        ("a part of the first frame", OPENING[..OPENING.len() - 1].to_vec()),
        ("a part of HEADERS", [OPENING, &whole[..12]].concat()),
        ("HEADERS that go on", [OPENING, &goes_on].concat()),
        ("CONTINUATION that goes on", [OPENING, &goes_on, &[0, 0, 0, 9, 0, 0, 0, 0, 1]].concat()),
    ];
    let slow = r#"tidegate_refused_total{protocol="http",reason="slow"}"#;
    for (number, (name, bytes)) in (1..).zip(&begun) {
        let mut stream = connect(open.http);
        stream.write_all(bytes).unwrap();
        let ended = stream.read_to_end(&mut Vec::new());
        assert!(
            ended.is_ok()
                || ended.is_err_and(|error| error.kind() == std::io::ErrorKind::ConnectionReset),
            "{name}"
        );
        wait_until(name, LONG, || open.metric(slow) == number);
    }
    // Byte by byte, or an empty frame at a time, is no faster; nor is gRPC another matter.
    let long = [OPENING, &goes_on, &[0, 0, 0, 9, 0, 0, 0, 0, 1].repeat(10_000)].concat();
    for (at, piece) in [(open.http, 1), (open.grpc, 1), (open.http, 9), (open.grpc, 9)] {
        let mut drip = connect(at);
        let is_let_go = long.chunks(piece).any(|piece| {
            std::thread::park_timeout(Duration::from_millis(20));
            drip.write_all(piece).is_err()
        });
        assert!(is_let_go, "{piece} at a time");
    }
    // A connection that has finished what it began is kept.
    patient.write_all(&whole).unwrap();
    let mut kind = 0;
    while kind != 1 {
        let mut head = [0; 9];
        patient.read_exact(&mut head).unwrap();
        let length = u64::from(u32::from_be_bytes([0, head[0], head[1], head[2]]));
        std::io::copy(&mut (&mut patient).take(length), &mut std::io::sink()).unwrap();
        kind = head[3];
    }
    attacks_held("slow", 9);
}

#[test]
fn whoever_does_not_read_is_let_go() {
    let open =
        open("", Auth::default(), |config| config.bounds.patience = Duration::from_millis(400));
    let mut greedy = connect(open.http);
    greedy.set_write_timeout(Some(LONG)).unwrap();
    // Answers pile up until nothing can be sent; then nothing is read either, and in the end the
    // connection is closed.
    let many =
        "POST /v1/check HTTP/1.1\r\nHost: localhost\r\nContent-Length: 28\r\n\r\n{\"key\":\"k\",\"limit\":\"1000/s\"}"
            .repeat(100);
    while greedy.write_all(many.as_bytes()).is_ok() {}
    wait_until("it is counted", LONG, || {
        open.metric(r#"tidegate_refused_total{protocol="http",reason="slow"}"#) == 1
    });
    assert_eq!(ask(open.http, "POST /v1/check", "", CHECK).0, 200);
    attacks_held("slow", 1);
}

#[test]
fn whoever_sends_frames_about_nothing_waits_and_others_do_not() {
    let open = open("", Auth::default(), |_| {});
    let ping = [0, 0, 8, 6, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    // GET /healthz of x.
    let request =
        [&[0, 0, 15, 1, 5, 0, 0, 0, 1, 0x82, 0x86, 0x01, 1, b'x', 0x04, 8][..], b"/healthz"]
            .concat();
    let mut flood = connect(open.http);
    flood
        .write_all(
            &[
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0",
                &ping.repeat(2500)[..],
                &request,
            ]
            .concat(),
        )
        .unwrap();
    let begin = Instant::now();
    assert_eq!(ask(open.http, "POST /v1/check", "", CHECK).0, 200);
    let others = begin.elapsed();
    // Every ping is answered, at a thousand a second once a thousand have been answered, and then
    // the request.
    let (mut pongs, mut head) = (0, [0; 9]);
    loop {
        flood.read_exact(&mut head).unwrap();
        let length = u64::from(u32::from_be_bytes([0, head[0], head[1], head[2]]));
        std::io::copy(&mut (&mut flood).take(length), &mut std::io::sink()).unwrap();
        match head[3] {
            1 => break,
            6 => pongs += 1,
            _ => {}
        }
    }
    let took = begin.elapsed();
    assert_eq!(pongs, 2500);
    assert!(took > Duration::from_millis(1400), "it had to wait: {took:?}");
    assert!(others < took, "others had not: {others:?}");
    drop(flood);
    wait_until("it is counted", LONG, || {
        open.metric(r#"tidegate_refused_total{protocol="http",reason="flood"}"#) == 1
    });
}

/// Every request is taken back at once, until the server has enough of it.
#[test]
fn whoever_misuses_his_connection_is_told_and_keeps_his_place_for_a_while() {
    let open = open("", Auth::default(), |config| config.bounds.max_connections_per_ip = 4);
    // GET /healthz of x, and its end.
    let reset = |id: u8, high: u8| {
        let head = [0, 0, 15, 1, 5, 0, 0, high, id, 0x82, 0x86, 0x01, 1, b'x', 0x04, 8];
        [&head[..], b"/healthz", &[0, 0, 4, 3, 0, 0, 0, high, id, 0, 0, 0, 8]].concat()
    };
    let resets: Vec<u8> = (0..200_u16)
        .flat_map(|n| [2 * n + 1].map(u16::to_be_bytes))
        .flat_map(|[high, id]| reset(id, high))
        .collect();
    let misuse = || {
        let mut stream = connect(open.http);
        let _ = stream.write_all(
            &[b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0", &resets[..]].concat(),
        );
        let mut head = [0; 9];
        loop {
            stream.read_exact(&mut head).unwrap();
            let length = usize::from(head[1]) << 8 | usize::from(head[2]);
            let mut payload = vec![0; length];
            stream.read_exact(&mut payload).unwrap();
            if head[3] == 7 {
                assert_eq!(payload[4..8], [0, 0, 0, 11], "ENHANCE_YOUR_CALM");
                return stream;
            }
        }
    };
    let begin = Instant::now();
    let mut first = misuse();
    assert!(matches!(first.read(&mut [0; 64]), Ok(0) | Err(_)), "and then nothing");
    let took = begin.elapsed();
    assert!(took > Duration::from_millis(900), "it ended after a while: {took:?}");
    wait_until("its place is free", LONG, || {
        open.metric("tidegate_connections{protocol=\"http\"}") == 0
    });
    // Whoever does not wait has no place left, although he is no longer there.
    let mut here = connect(open.http);
    let ask = |stream: &mut TcpStream| {
        let asked = stream.write_all(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n");
        asked.is_ok() && matches!(stream.read(&mut [0; 512]), Ok(1..))
    };
    assert!(ask(&mut here));
    (0..3).for_each(|_| drop(misuse()));
    assert!(!ask(&mut connect(open.http)), "all places of this address are taken");
    assert!(ask(&mut here), "whoever is here is served");
    wait_until("one is free again", LONG, || ask(&mut connect(open.http)));
    assert_eq!(open.metric(r#"tidegate_refused_total{protocol="http",reason="misuse"}"#), 4);
}

#[test]
fn connections_are_bounded_and_those_who_are_here_are_served() {
    let open = open("", Auth::default(), |config| {
        config.bounds.max_connections = 8;
        config.bounds.max_connections_per_ip = 6;
    });
    for at in [open.http, open.resp] {
        let ask = |stream: &mut TcpStream| {
            let question: &[u8] = if at == open.http {
                b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
            } else {
                b"PING\r\n"
            };
            let mut byte = [0; 512];
            stream.write_all(question).is_ok() && matches!(stream.read(&mut byte), Ok(1..))
        };
        let mut here: Vec<TcpStream> = (0..6).map(|_| connect(at)).collect();
        assert!(here.iter_mut().all(ask));
        let mut more: Vec<TcpStream> = (0..10).map(|_| connect(at)).collect();
        assert!(!more.iter_mut().any(ask), "no more than six from one address");
        assert!(here.iter_mut().all(ask));
        drop((here, more));
        wait_until("others find a place", LONG, || ask(&mut connect(at)));
    }
    assert!(
        open.metric(r#"tidegate_refused_total{protocol="http",reason="full_for_address"}"#) >= 10
    );
}

#[test]
fn ambiguous_requests_are_refused() {
    let open = open("", Auth::default(), |_| {});
    for (name, head) in [
        (
            "two lengths",
            "POST /v1/check HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}}",
        ),
        (
            "an odd length",
            "POST /v1/check HTTP/1.1\r\nHost: localhost\r\nContent-Length: +2\r\n\r\n{}",
        ),
        ("a folded header", "GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-A: a\r\n b\r\n\r\n"),
        ("a space before the colon", "GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-A : a\r\n\r\n"),
        (
            "an unknown coding",
            "POST /v1/check HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip\r\n\r\n{}",
        ),
        (
            "a bad chunk",
            "POST /v1/check HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n",
        ),
        ("a NUL", "GET /healthz\0 HTTP/1.1\r\nHost: localhost\r\n\r\n"),
    ] {
        let mut stream = connect(open.http);
        stream.write_all(head.as_bytes()).unwrap();
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let text = all(&mut stream);
        assert!(
            text.is_empty() || text.starts_with("HTTP/1.1 400"),
            "{name} was answered with {text:?}"
        );
    }
    // A length beside chunks: the chunks count, and nothing after them is taken for a request.
    let mut stream = connect(open.http);
    stream
        .write_all(b"POST /v1/check HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        .unwrap();
    let _ = stream.shutdown(std::net::Shutdown::Write);
    assert!(!all(&mut stream).contains("\r\n\r\nok"), "no smuggling");
}

#[test]
fn a_request_that_panics_is_our_mistake_and_nobody_elses() {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let router = axum::Router::new()
        .route("/panic", axum::routing::get(|| async { panic!("on purpose") as &'static str }))
        .route("/", axum::routing::get(|| async { "fine" }));
    let observer = Observer::default();
    let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
    let at = listener.local_addr().unwrap();
    let listener =
        Listener::new(Protocol::Http, listener, None, Bounds::default(), observer.clone());
    let guard = Arc::new(Guard::new(Auth::default()));
    let application = Application::new(router, |_| May::Check.into());
    let server =
        HttpServer::new(application, Protocol::Http, guard, Bounds::default(), observer.clone());
    let (stop, stopped) = tokio::sync::watch::channel(false);
    let down = stopped.clone();
    let served = runtime
        .spawn(listener.serve(stopped, move |visitor| server.clone().serve(visitor, down.clone())));
    let mut stream = connect(at);
    stream
        .write_all(b"GET /panic HTTP/1.1\r\nHost: localhost\r\n\r\nGET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        .unwrap();
    let text = all(&mut stream);
    assert!(text.starts_with("HTTP/1.1 500") && text.ends_with("fine"), "{text}");
    let numbers = observer.metrics().text(&Backend::Memory(tidegate::Memory::new()), 0);
    assert!(numbers.contains("tidegate_panics_total 1\n"), "{numbers}");
    stop.send(true).unwrap();
    runtime.block_on(served).unwrap().unwrap();
}

#[test]
fn requests_that_have_arrived_are_answered_when_told_to_stop() {
    for _ in 0..20 {
        let mut open = open("", Auth::default(), |_| {});
        let mut kept = connect(open.http);
        kept.write_all(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
        let mut byte = [0; 1];
        kept.read_exact(&mut byte).unwrap();
        // One is on its way on a connection that was kept, one on a connection that was just made.
        let mut fresh = connect(open.http);
        for stream in [&mut kept, &mut fresh] {
            stream.write_all(b"POST /v1/check HTTP/1.1\r\nHost: localhost\r\nContent-Length: 28\r\n\r\n{\"key\":\"k\",\"limit\":\"1000/s\"}").unwrap();
        }
        let begin = Instant::now();
        assert!(open.runtime.block_on(open.running.take().unwrap().stop()));
        assert!(begin.elapsed() < Duration::from_secs(10));
        for stream in [&mut kept, &mut fresh] {
            let text = all(stream);
            assert!(text.contains("\"allowed\":true"), "{text}");
        }
        assert!(TcpStream::connect(open.http).is_err(), "nobody is let in any more");
    }
}
