//! `cargo xtask bench attack`: what other clients notice during an HTTP/2 attack or slow clients on
//! purpose, at the listener for HTTP; `attack proxy`: the same through the proxy, before an
//! upstream that answers immediately. `cargo xtask bench connections`: what 20 000 connections
//! take.
//!
//! The attacker reconnects as soon as it gets GOAWAY. Bystanders ask over HTTP/1.1, a few hundred
//! times a second each, and the slowest in a hundred of their answers is looked at, in turns: with
//! no other client, beside a client that asks properly as fast as it can, and during each attack.
//! The attacker has a core of its own, and server and bystanders share another, as if it were on
//! another machine; what its frames cost the server counts.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::cores::{CLIENTS, SERVERS, stay_on};
use crate::server::{Own, median, until_left_alone};

const ROUNDS: usize = 9;
const ROUND: Duration = Duration::from_millis(800);
/// What precedes a round and is counted apart: clients that come again and again are refused later.
const BEGINNING: Duration = Duration::from_millis(100);
const BYSTANDERS: usize = 4;
/// Between two questions of a bystander.
const PACE: Duration = Duration::from_millis(2);
/// Connections of an attack.
const ATTACKERS: usize = 4;

/// Connections that each thread of a slow attack drips bytes into, and how long it takes to go
/// round.
const SLOW: (usize, Duration) = (200, Duration::from_millis(50));

const ATTACKS: [&str; 8] =
    ["quiet", "busy", "reset", "unread", "ping", "settings", "continuation", "slow"];

pub fn run(args: &[&str]) {
    match args {
        [] | ["http"] => {
            stay_on(SERVERS);
            measure("HTTP", &Own::start_as(&["attack", "server"]));
        }
        ["proxy"] => {
            stay_on(SERVERS);
            let upstream = Own::start_as(&["server", "axum-page"]);
            measure("the proxy", &Own::start_as(&["proxy", "serve", &upstream.http.to_string()]));
        }
        // As many as there are unless said otherwise.
        ["server"] => crate::server::serve_tidegate(10_000, 1024, "auto"),
        ["as", kind, address] => attack(kind, address.parse().expect("an address")),
        _ => {
            eprintln!("attack {}: expected http or proxy", args.join(" "));
            std::process::exit(2);
        }
    }
}

fn measure(protocol: &str, own: &Own) {
    let mut slowest: Vec<Vec<f64>> = vec![Vec::new(); ATTACKS.len()];
    let mut beginning = slowest.clone();
    for round in 0..ROUNDS {
        let mut order: Vec<usize> = (0..ATTACKS.len()).collect();
        if round % 2 == 1 {
            order.reverse();
        }
        for index in order {
            let _attacker = (index > 0).then(|| Attacker::start(ATTACKS[index], own.http));
            // Until it is at full speed, or kept out.
            beginning[index].push(bystanders(own.http, BEGINNING));
            slowest[index].push(bystanders(own.http, ROUND));
        }
    }
    println!(
        "{protocol}, {BYSTANDERS} bystanders with a request every {PACE:?}, {ATTACKERS} connections of an attack: median of {ROUNDS} interleaved rounds"
    );
    for (index, kind) in ATTACKS.iter().enumerate() {
        let beside = |other: usize| {
            let ratios: Vec<f64> = slowest[index]
                .iter()
                .zip(&slowest[other])
                .map(|(own, other)| own / other)
                .collect();
            median(&ratios)
        };
        let p99 = median(&slowest[index]);
        println!(
            "  {kind:<14} p99 {p99:>8.0} us   {:>5.2}x of quiet   {:>5.2}x of busy   {:>8.0} us in the {BEGINNING:?} before",
            beside(0),
            beside(1),
            median(&beginning[index])
        );
    }
    println!("  the server takes {} KiB", resident(own.child.id()));
}

/// A process that attacks until this is dropped.
struct Attacker(Child);

impl Attacker {
    fn start(kind: &str, address: SocketAddr) -> Self {
        let program = std::env::current_exe().expect("this program");
        let mut command = Command::new("taskset");
        command.args(["-c", CLIENTS]).arg(program).args([
            "attack",
            "as",
            kind,
            &address.to_string(),
        ]);
        Attacker(command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().expect("taskset"))
    }
}

impl Drop for Attacker {
    fn drop(&mut self) {
        let _ = self.0.kill().and_then(|()| self.0.wait());
    }
}

/// The slowest in a hundred answers, in microseconds.
fn bystanders(address: SocketAddr, lasts: Duration) -> f64 {
    let one = move || -> Vec<f64> {
        let mut stream = connect(address);
        let request = question("bystander");
        let (end, mut took, mut bytes) = (Instant::now() + lasts, Vec::new(), [0; 4096]);
        while Instant::now() < end {
            std::thread::sleep(PACE);
            let began = Instant::now();
            stream.write_all(&request).expect("a connection");
            let count = stream.read(&mut bytes).expect("an answer");
            assert!(
                bytes[..count].starts_with(b"HTTP/1.1 200"),
                "{}",
                bytes[..count].escape_ascii()
            );
            took.push(began.elapsed().as_nanos() as f64 / 1e3);
        }
        took
    };
    let threads: Vec<_> = (0..BYSTANDERS).map(|_| std::thread::spawn(one)).collect();
    let mut took: Vec<f64> =
        threads.into_iter().flat_map(|thread| thread.join().expect("a bystander")).collect();
    took.sort_by(f64::total_cmp);
    took[took.len() * 99 / 100]
}

/// A check that is always allowed.
fn question(key: &str) -> Vec<u8> {
    let body = format!(r#"{{"key":"{key}","limit":"1000000/s"}}"#);
    format!(
        "POST /v1/check HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).expect("an open listener");
    stream.set_nodelay(true).expect("a socket");
    stream
}

/// A connection from an address that is this process's own: what is known of one who attacks is not
/// known of the next, nor of those who do not.
fn come(address: SocketAddr) -> std::io::Result<TcpStream> {
    let [.., high, low] = std::process::id().to_be_bytes();
    let own = SocketAddr::from(([127, 1 + high / 2, low, 2], 0));
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None)?;
    socket.bind(&own.into())?;
    socket.connect(&address.into())?;
    socket.set_tcp_nodelay(true)?;
    Ok(socket.into())
}

/// Attacks until it is ended.
fn attack(kind: &str, address: SocketAddr) {
    std::thread::scope(|scope| {
        for _ in 0..ATTACKERS {
            scope.spawn(|| {
                loop {
                    // A client whose connection is closed reconnects.
                    let _ = once(kind, address);
                }
            });
        }
    });
}

/// Begins requests on many connections and goes on with them a byte at a time.
fn drip(address: SocketAddr) -> std::io::Result<()> {
    let mut streams: Vec<(TcpStream, usize)> = Vec::new();
    let request = question(&"x".repeat(4000));
    loop {
        while streams.len() < SLOW.0 {
            streams.push((come(address)?, 0));
        }
        // A client whose connection is closed reconnects.
        let pause = SLOW.1 / u32::try_from(SLOW.0).expect("a few");
        streams.retain_mut(|(stream, at)| {
            std::thread::sleep(pause);
            *at += 1;
            stream.write(&request[*at - 1..*at]).is_ok()
        });
    }
}

fn once(kind: &str, address: SocketAddr) -> std::io::Result<()> {
    if kind == "slow" {
        return drip(address);
    }
    let mut stream = come(address)?;
    if kind == "busy" {
        let (request, mut bytes) = (question("busy"), [0; 4096]);
        loop {
            stream.write_all(&request)?;
            if stream.read(&mut bytes)? == 0 {
                return Ok(());
            }
        }
    }
    stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")?;
    // A client that does not read leaves no window for answers.
    let window: &[u8] = if kind == "unread" { &[0, 4, 0, 0, 0, 0] } else { &[] };
    stream.write_all(&frame(SETTINGS, 0, 0, window))?;
    stream.set_nonblocking(true)?;
    let (mut id, mut bytes, mut at, mut answers) = (1, Vec::new(), 0, vec![0; 64 << 10]);
    loop {
        if at == bytes.len() {
            (bytes, at) = (frames(kind, &mut id), 0);
        }
        match stream.write(&bytes[at..]) {
            Ok(count) => at += count,
            Err(error) if error.kind() == ErrorKind::WouldBlock => std::thread::yield_now(),
            Err(error) => return Err(error),
        }
        match stream.read(&mut answers) {
            Ok(0) => return Ok(()),
            // After GOAWAY, reconnect immediately and do not wait for the end.
            Ok(count) if says_go_away(&answers[..count]) => return Ok(()),
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
        if id > 1 << 30 {
            return Ok(());
        }
    }
}

/// Whether the last frame is a GOAWAY, with words or without.
fn says_go_away(bytes: &[u8]) -> bool {
    (17..=bytes.len().min(100)).any(|long| {
        let frame = &bytes[bytes.len() - long..];
        frame[..3] == [0, 0, u8::try_from(long - 9).expect("short")]
            && frame[3..9] == [7, 0, 0, 0, 0, 0]
    })
}

const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const CONTINUATION: u8 = 9;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;

/// A few frames of an attack.
fn frames(kind: &str, id: &mut u32) -> Vec<u8> {
    // GET /metrics, of a, by http.
    let head = b"\x82\x86\x01\x01a\x04\x08/metrics";
    let mut bytes = Vec::new();
    if kind == "continuation" && *id == 1 {
        bytes.extend(frame(HEADERS, 0, 1, head));
        *id = 3;
    }
    for _ in 0..64 {
        match kind {
            "reset" => {
                bytes.extend(frame(HEADERS, END_STREAM | END_HEADERS, *id, head));
                bytes.extend(frame(RST_STREAM, 0, *id, &8_u32.to_be_bytes()));
                *id += 2;
            }
            "unread" => {
                bytes.extend(frame(HEADERS, END_STREAM | END_HEADERS, *id, head));
                *id += 2;
            }
            "ping" => bytes.extend(frame(PING, 0, 0, &[0; 8])),
            "settings" => bytes.extend(frame(SETTINGS, 0, 0, &[])),
            // A header that means nothing, again and again.
            "continuation" => bytes.extend(frame(CONTINUATION, 0, 1, b"\x00\x01a\x01b")),
            _ => panic!("{kind}: expected one of {ATTACKS:?}"),
        }
    }
    bytes
}

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).expect("a short frame").to_be_bytes();
    let mut bytes = vec![length[1], length[2], length[3], kind, flags];
    bytes.extend(stream.to_be_bytes());
    bytes.extend(payload);
    bytes
}

/// How many KiB of a process are in memory.
fn resident(pid: u32) -> u64 {
    let status =
        std::fs::read_to_string(format!("/proc/{pid}/status")).expect("a process that runs");
    let line = status.lines().find(|line| line.starts_with("VmRSS")).expect("linux");
    line.split_whitespace().nth(1).and_then(|word| word.parse().ok()).expect("a number")
}

/// As many concurrent connections as the file limit of a server allows, from several processes.
pub fn connections(args: &[&str]) {
    match args {
        [] => connections_of(2, 9_500),
        ["server"] => crate::server::serve_tidegate(20_000, 20_000, "auto"),
        ["client", address, count] => {
            be_many(address.parse().expect("an address"), count.parse().expect("a number"))
        }
        _ => {
            connections_of(2, args.join(" ").parse::<usize>().expect("a number of connections") / 2)
        }
    }
}

fn connections_of(processes: usize, each: usize) {
    let own = Own::start_as(&["connections", "server"]);
    let mut probe = connect(own.resp);
    let mut answer = |count: usize| -> f64 {
        let mut took: Vec<f64> =
            (0..count).map(|_| micros(|| ping(&mut probe).expect("an answer"))).collect();
        took.sort_by(f64::total_cmp);
        took[took.len() * 99 / 100]
    };
    let (before, alone) = (resident(own.child.id()), answer(2_000));
    println!("alone: {before} KiB, p99 of a PING {alone:.0} us");
    let began = Instant::now();
    let address = own.resp.to_string();
    let (each_text, count) = (each.to_string(), processes * each);
    let clients: Vec<Own> = (0..processes)
        .map(|_| Own::start_as(&["connections", "client", &address, &each_text]))
        .collect();
    let (after, beside) = (resident(own.child.id()), answer(2_000));
    let per = (after - before) as f64 / count as f64;
    println!(
        "{count} connections, each answered, within {:.1?}: {after} KiB, {per:.1} KiB for each; p99 of a PING beside them {beside:.0} us",
        began.elapsed()
    );
    let began = Instant::now();
    for mut client in clients {
        // Left alone, it asks once more on every connection before it goes.
        drop(client.child.stdin.take());
        assert!(
            client.child.wait().is_ok_and(|status| status.success()),
            "every connection is to be answered"
        );
    }
    let gone = answer(2_000);
    println!(
        "each answered once more and gone within {:.1?}: {} KiB, p99 of a PING {gone:.0} us",
        began.elapsed(),
        resident(own.child.id())
    );
}

/// So many connections, each of which asks once, and once more before it ends.
fn be_many(address: SocketAddr, count: usize) {
    let ask = |number: usize, stream: &mut TcpStream| {
        ping(stream).unwrap_or_else(|error| {
            panic!("connection {number} of {count} has no answer: {error}")
        });
    };
    // Each is answered before the next one comes: more would wait to be accepted than the system
    // lets wait.
    let come = |number: usize| {
        let mut stream = connect(address);
        ask(number, &mut stream);
        stream
    };
    let mut streams: Vec<TcpStream> = (0..count).map(come).collect();
    until_left_alone(address, address);
    streams.iter_mut().enumerate().for_each(|(number, stream)| ask(number, stream));
}

fn ping(stream: &mut TcpStream) -> std::io::Result<()> {
    let mut answer = [0; 7];
    stream.write_all(b"PING\r\n")?;
    stream.read_exact(&mut answer)
}

fn micros(work: impl FnOnce()) -> f64 {
    let began = Instant::now();
    work();
    began.elapsed().as_nanos() as f64 / 1e3
}
