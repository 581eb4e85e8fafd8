//! Attacks on the real server that HTTP/2 makes cheap, and connection floods: memory is bounded,
//! other clients are served, and the attacker is disconnected.

#![allow(clippy::print_stdout, reason = "figures for runs with --nocapture")]

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use tidegate_testkit::{attacks_held, wait_until};

/// Long enough for a busy machine.
const LONG: Duration = Duration::from_secs(30);
/// How long an attack lasts, unless the server ends it.
const ATTACK: Duration = Duration::from_secs(2);
/// The most memory that an attack may add.
const MAX_GROWTH_KIB: u64 = 64 << 10;
/// The most memory of an idle connection.
const MAX_IDLE_KIB: f64 = 40.0;

struct Server {
    child: Child,
    http: SocketAddr,
    grpc: SocketAddr,
    /// The listener after these, if there is one.
    third: Option<SocketAddr>,
    _config: tempfile::NamedTempFile,
}

impl Server {
    fn start(config: &str) -> Server {
        Self::with_resp("off", config)
    }

    /// Like `start`, with a RESP listener, which is the first of the others.
    fn with_resp(resp: &str, config: &str) -> Server {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(&file, config).unwrap();
        let mut child = Command::new(env!("CARGO_BIN_EXE_tidegate"))
            .args([
                "serve",
                "--http",
                "127.0.0.1:0",
                "--grpc",
                "127.0.0.1:0",
                "--resp",
                resp,
                "--config",
            ])
            .arg(file.path())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
        let mut listeners = Vec::new();
        for line in lines.by_ref() {
            match line.split_whitespace().nth(1).and_then(|at| at.parse().ok()) {
                Some(at) => listeners.push(at),
                None if line == "ready" => break,
                None => {}
            }
        }
        thread::spawn(move || lines.for_each(drop));
        let [http, grpc, ref rest @ ..] = listeners[..] else {
            panic!("{listeners:?}: expected the listeners for HTTP and gRPC")
        };
        Server { child, http, grpc, third: rest.first().copied(), _config: file }
    }

    fn resident_kib(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().trim_end_matches(" kB").parse().unwrap()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill().and_then(|()| self.child.wait());
    }
}

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const GOAWAY: u8 = 7;
const CONTINUATION: u8 = 9;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;
/// `GET /` of `x`, as HPACK: from the static table, and one literal.
const GET: &[u8] = &[0x82, 0x86, 0x84, 0x01, 0x01, b'x'];
const POST: &[u8] = &[0x83, 0x86, 0x84, 0x01, 0x01, b'x'];

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let mut bytes = u32::try_from(payload.len()).unwrap().to_be_bytes()[1..].to_vec();
    bytes.extend([kind, flags]);
    bytes.extend(stream.to_be_bytes());
    bytes.extend(payload);
    bytes
}

fn connect(at: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(at).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    stream.set_write_timeout(Some(LONG)).unwrap();
    stream
}

/// Sends an HTTP/2 request on a new connection; returns the time until the response.
fn ask(at: SocketAddr) -> Duration {
    let began = Instant::now();
    let mut stream = connect(at);
    let request =
        [PREFACE, &frame(SETTINGS, 0, 0, &[]), &frame(HEADERS, END_STREAM | END_HEADERS, 1, GET)]
            .concat();
    stream.write_all(&request).unwrap();
    loop {
        let mut head = [0; 9];
        stream.read_exact(&mut head).expect("a response to a well-behaved client");
        let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
        std::io::copy(&mut (&mut stream).take(length.into()), &mut std::io::sink()).unwrap();
        match head[3] {
            HEADERS => return began.elapsed(),
            kind => assert_ne!(kind, GOAWAY, "a well-behaved client is not disconnected"),
        }
    }
}

/// Sends `begin`, then the output of `next`, until the server ends the connection or the time is
/// over. Returns whether the server ended it, or announced that it will.
fn attack(at: SocketAddr, begin: &[u8], reads: bool, mut next: impl FnMut(u32) -> Vec<u8>) -> bool {
    let mut stream = connect(at);
    stream.set_write_timeout(Some(Duration::from_millis(200))).unwrap();
    stream.write_all(&[PREFACE, begin].concat()).unwrap();
    let gone = Arc::new(AtomicBool::new(false));
    let reader = reads.then(|| {
        let (mut stream, gone) = (stream.try_clone().unwrap(), Arc::clone(&gone));
        thread::spawn(move || {
            let mut head = [0; 9];
            while stream.read_exact(&mut head).is_ok() && head[3] != GOAWAY {
                let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
                let _ = std::io::copy(&mut (&mut stream).take(length.into()), &mut std::io::sink());
            }
            gone.store(true, Ordering::Relaxed);
        })
    });
    let began = Instant::now();
    let mut round = 0;
    while began.elapsed() < ATTACK && !gone.load(Ordering::Relaxed) {
        let mut bytes = Vec::new();
        while bytes.len() < 16 << 10 {
            bytes.extend(next(round));
            round += 1;
        }
        match stream.write_all(&bytes) {
            Ok(()) => {}
            // The server stopped reading, which counts as an end.
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                break;
            }
            Err(_) => {
                gone.store(true, Ordering::Relaxed);
            }
        }
    }
    let was_ended = gone.load(Ordering::Relaxed);
    let _ = stream.shutdown(std::net::Shutdown::Both);
    if let Some(reader) = reader {
        reader.join().unwrap();
    }
    was_ended
}

/// One kind of attack: how it begins, how it continues, and whether the server must end the
/// connection.
type Attack = (&'static str, Vec<u8>, fn(u32) -> Vec<u8>, bool);

fn odd(round: u32) -> u32 {
    round * 2 + 1
}

#[test]
fn what_http_2_makes_cheap_costs_others_nothing() {
    let (upstream, file) =
        (crate::proxy::ok(), "log: { level: off }\nconnections: { max: 64, max_per_ip: 64 }\n");
    let server = Server::start(&format!(
        "{file}listen: {{ proxy: 127.0.0.1:0 }}\nproxy: {{ upstream: \"{upstream}\" }}\n"
    ));
    let settings = frame(SETTINGS, 0, 0, &[]);
    let unfinished = [settings.clone(), frame(HEADERS, 0, 1, GET)].concat();
    let attacks: [Attack; 7] = [
        (
            "rapid reset",
            settings.clone(),
            |round| {
                [
                    frame(HEADERS, END_HEADERS, odd(round), POST),
                    frame(RST_STREAM, 0, odd(round), &[0, 0, 0, 8]),
                ]
                .concat()
            },
            true,
        ),
        (
            "mistakes that the server has to reset",
            settings.clone(),
            // `connection: close` is forbidden in HTTP/2.
            |round| {
                let wrong = [GET, &[0x00, 10], b"connection", &[5], b"close"].concat();
                frame(HEADERS, END_HEADERS | END_STREAM, odd(round), &wrong)
            },
            true,
        ),
        (
            "continuations without an end",
            unfinished.clone(),
            |_| frame(CONTINUATION, 0, 1, &[]),
            true,
        ),
        (
            "a list of headers without an end",
            unfinished,
            // A literal header that is not put into the table: sixty bytes each time.
            |_| frame(CONTINUATION, 0, 1, &[&[0x00, 4], &b"many"[..], &[54], &[b'x'; 54]].concat()),
            true,
        ),
        ("settings", settings.clone(), |_| frame(SETTINGS, 0, 0, &[0, 4, 0, 1, 0, 0]), false),
        (
            "pings",
            settings.clone(),
            |round| frame(PING, 0, 0, &u64::from(round).to_be_bytes()),
            false,
        ),
        (
            "empty data",
            [settings, frame(HEADERS, END_HEADERS, 1, POST)].concat(),
            |_| frame(DATA, 0, 1, &[]),
            false,
        ),
    ];
    for at in [server.http, server.grpc, server.third.expect("it is configured")] {
        (0..20).for_each(|_| _ = ask(at));
        let mut quiet: Vec<Duration> = (0..100).map(|_| ask(at)).collect();
        quiet.sort();
        for (name, begin, next, ends) in &attacks {
            for reads in [true, false] {
                let before = server.resident_kib();
                let (under_attack, most, ended) = thread::scope(|scope| {
                    let attacker = scope.spawn(|| attack(at, begin, reads, next));
                    let (mut times, mut most) = (Vec::new(), 0);
                    while !attacker.is_finished() || times.len() < 20 {
                        times.push(ask(at));
                        most = most.max(server.resident_kib());
                    }
                    times.sort();
                    (times, most, attacker.join().unwrap())
                });
                let grown = most.saturating_sub(before);
                let p99 = |times: &[Duration]| times[times.len() * 99 / 100];
                println!(
                    "{name}, {}: ended {ended}, {grown} KiB more, p99 of others {:?} (without it {:?})",
                    if reads { "reading" } else { "not reading" },
                    p99(&under_attack),
                    p99(&quiet)
                );
                assert!(grown <= MAX_GROWTH_KIB, "{name}: {grown} KiB more");
                assert!(ended || !ends || !reads, "{name}: the server ends the connection");
                // The median of other clients, which load on the machine hardly moves: a response
                // within a second.
                assert!(
                    under_attack[under_attack.len() / 2] < Duration::from_secs(1),
                    "{name}: {under_attack:?}"
                );
            }
        }
    }
    attacks_held("floods", 3 * 2 * attacks.len());
}

/// Responses without a flow-control window are dropped before the connection counts as idle.
#[test]
fn clients_that_open_no_window_are_disconnected() {
    let server = Server::start("log: { level: off }\nconnections: { idle_secs: 600 }\n");
    let before = server.resident_kib();
    let mut stream = connect(server.http);
    let mut bytes = PREFACE.to_vec();
    bytes.extend(frame(SETTINGS, 0, 0, &[0, 4, 0, 0, 0, 0])); // a window of 0 for every stream
    for round in 0..200 {
        bytes.extend(frame(HEADERS, END_STREAM | END_HEADERS, odd(round), GET));
    }
    stream.write_all(&bytes).unwrap();
    let _ = ask(server.http);
    // Reads everything that needs no window until the server closes; a slow read is an error.
    let mut read = Vec::new();
    let end = (&mut stream).take(1 << 20).read_to_end(&mut read);
    assert!(read.len() < 1 << 20);
    if let Err(error) = end {
        assert_eq!(error.kind(), ErrorKind::ConnectionReset, "it is disconnected: {error}");
    }
    assert!(server.resident_kib().saturating_sub(before) <= MAX_GROWTH_KIB);
    attacks_held("floods", 1);
}

/// `TIDEGATE_CONNECTIONS=20000` is the full number, and needs files: `prlimit --nofile=65536 cargo
/// test -p tidegate-cli --test it floods`.
#[test]
fn many_connections_are_bounded_and_cheap() {
    let many: usize = std::env::var("TIDEGATE_CONNECTIONS")
        .ok()
        .and_then(|many| many.parse().ok())
        .unwrap_or(1200);
    let (most, most_per_address) = (many / 2, many / 12);
    let server = Server::start(&format!(
        "log: {{ level: off }}\nconnections: {{ max: {most}, max_per_ip: {most_per_address}, idle_secs: 600 }}\n"
    ));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let http = server.http;
    // One address opens many, then eleven others: the first gets its share, and all together get
    // every connection.
    let connect = |host: u8| {
        runtime.block_on(async {
            let socket = tokio::net::TcpSocket::new_v4().unwrap();
            socket.bind(([127, 0, 1, host], 0).into()).unwrap();
            let stream = socket.connect(http).await.unwrap().into_std().unwrap();
            stream.set_nonblocking(false).unwrap();
            stream.set_read_timeout(Some(LONG)).unwrap();
            stream
        })
    };
    let body = r#"{"key":"k","limit":"1000/s"}"#;
    let question = format!(
        "POST /v1/check HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    let served = |stream: &mut TcpStream| {
        let mut some = [0; 2048];
        stream.write_all(question.as_bytes()).is_ok() && matches!(stream.read(&mut some), Ok(1..))
    };
    drop(connect(1));
    let before = server.resident_kib();
    let mut here = Vec::new();
    for host in 1..=12 {
        let mut own = 0;
        for _ in 0..many / 12 + 10 {
            let mut stream = connect(host);
            if served(&mut stream) {
                own += 1;
                here.push(stream);
            }
        }
        assert!(
            own <= most_per_address,
            "{own} from one address: expected at most {most_per_address}"
        );
        assert!(
            host > 1 || own == most_per_address,
            "{own} from the first: expected {most_per_address}"
        );
        assert!(here.len() <= most, "{} in all: expected at most {most}", here.len());
    }
    assert_eq!(here.len(), most);
    let each = server.resident_kib().saturating_sub(before) as f64 / most as f64;
    println!("{most} idle connections: {each:.1} KiB each");
    assert!(
        each <= MAX_IDLE_KIB,
        "{each:.1} KiB of each idle connection: expected at most {MAX_IDLE_KIB}"
    );
    assert!(here.iter_mut().rev().take(50).all(served), "who is here is served");
    here.truncate(most / 2);
    wait_until("others find a place", LONG, || served(&mut connect(13)));
    attacks_held("floods", 1);
}

/// Incomplete commands on many connections: their memory is bounded, and other clients are served.
#[test]
fn unfinished_commands_of_many_connections_are_bounded() {
    const CONNECTIONS: usize = 900;
    let server = Server::with_resp("127.0.0.1:0", "log: { level: off }\n");
    let at = server.third.unwrap();
    let ping = || {
        let mut stream = connect(at);
        let mut pong = [0; 7];
        stream.write_all(b"PING\r\n").unwrap();
        stream.read_exact(&mut pong).unwrap();
        assert_eq!(&pong, b"+PONG\r\n");
    };
    ping();
    let before = server.resident_kib();
    let unfinished = [b"*2\r\n$4\r\nECHO\r\n$130000\r\n", &[b'x'; 120_000][..]].concat();
    let mut most = 0;
    let mut here = Vec::new();
    for _ in 0..CONNECTIONS {
        let mut stream = connect(at);
        let _ = stream.write_all(&unfinished);
        here.push(stream);
        most = most.max(server.resident_kib());
    }
    ping();
    // Each ends, with an error or after five seconds.
    let refused = here.into_iter().filter_map(|mut stream| {
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        most = most.max(server.resident_kib());
        (!answer.is_empty()).then(|| String::from_utf8(answer).unwrap())
    });
    let refused: Vec<String> = refused.collect();
    assert!(
        refused
            .iter()
            .all(|answer| answer.starts_with("-ERR all connections together hold 67108864 bytes"))
    );
    let grown = most.saturating_sub(before) >> 10;
    println!(
        "{CONNECTIONS} unfinished commands of 120000 bytes: {} refused, {grown} MiB more",
        refused.len()
    );
    assert!(!refused.is_empty());
    // 64 MiB for all, and 64 KiB for each: a buffer of 16 KiB, a task, and allocator overhead.
    assert!(grown <= 64 + ((CONNECTIONS as u64 * 64) >> 10), "{grown} MiB");
    ping();
    attacks_held("floods", 1);
}

/// Leases on ever new keys, beyond the limit of the store: resident memory grows by that limit and
/// the memory of requests.
#[test]
fn a_flood_of_keys_under_concurrent_stays_within_max_bytes() {
    const MIB: u64 = 1 << 10;
    const MAX_MIB: u64 = 16;
    // The store's own constant, and what a process takes for requests of 64 KiB.
    const BESIDE_MIB: u64 = 4 + 8;
    let server =
        Server::start("log: { level: off }\nmemory: { max_bytes: 16MiB, overflow: deny_new }\n");
    let mut stream = TcpStream::connect(server.http).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    let mut before = None;
    let mut denied = 0;
    for number in 0..200 {
        let checks: Vec<String> = (0..1000)
            .map(|key| format!(r#"{{"key":"{number}:{key}","limit":"5 concurrent ttl 1h"}}"#))
            .collect();
        let body = format!(r#"{{"checks":[{}]}}"#, checks.join(","));
        let head = "POST /v1/check HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: ";
        stream.write_all(format!("{head}{}\r\n\r\n{body}", body.len()).as_bytes()).unwrap();
        let mut reader = BufReader::new(&stream);
        let mut line = String::new();
        let mut length = 0;
        while line != "\r\n" {
            line.clear();
            assert!(reader.read_line(&mut line).unwrap() > 0, "it went away");
            if let Some(text) = line.to_ascii_lowercase().strip_prefix("content-length:") {
                length = text.trim().parse().unwrap();
            }
        }
        let mut answer = vec![0; length];
        reader.read_exact(&mut answer).unwrap();
        let text = String::from_utf8(answer).unwrap();
        denied += text.matches(r#""allowed":false"#).count();
        before.get_or_insert_with(|| server.resident_kib());
    }
    let grown = server.resident_kib().saturating_sub(before.unwrap());
    println!("{denied} of 200000 keys found no room, {grown} KiB more");
    assert!(denied > 50_000, "{denied}: the store was not filled");
    assert!(grown < (MAX_MIB + BESIDE_MIB) * MIB, "{grown} KiB");
    attacks_held("keys", 200_000);
}
