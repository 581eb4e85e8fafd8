//! The model of Redis beside real servers: the same commands, and the product's own calls, must be
//! answered by the same bytes.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use parking_lot::Mutex;
use tidegate::redis::{Connect, Connecting, Link};
use tidegate::{Check, Id, Limits, ManualClock, Op, Store, Timestamp};
use tidegate_sim::random::Random;
use tidegate_sim::redis::{Client, Redis, parse, write};
use tidegate_testkit::{Flavor, Server};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// A connection to a real server that says words and hears the bytes of one reply.
struct Real(TcpStream);

impl Real {
    fn new(server: &Server) -> Self {
        let stream = TcpStream::connect(("127.0.0.1", server.port())).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        Real(stream)
    }

    fn ask(&mut self, words: &[Vec<u8>]) -> Vec<u8> {
        let mut bytes = format!("*{}\r\n", words.len()).into_bytes();
        for word in words {
            bytes.extend_from_slice(format!("${}\r\n", word.len()).as_bytes());
            bytes.extend_from_slice(word);
            bytes.extend_from_slice(b"\r\n");
        }
        self.0.write_all(&bytes).unwrap();
        let mut reply = Vec::new();
        self.element(&mut reply);
        reply
    }

    fn line(&mut self, reply: &mut Vec<u8>) -> String {
        let from = reply.len();
        while !reply[from..].ends_with(b"\r\n") {
            let mut byte = [0];
            self.0.read_exact(&mut byte).unwrap();
            reply.push(byte[0]);
        }
        String::from_utf8_lossy(&reply[from..reply.len() - 2]).into_owned()
    }

    fn element(&mut self, reply: &mut Vec<u8>) {
        let line = self.line(reply);
        let length: i64 = line[1..].parse().unwrap_or(0);
        match line.as_bytes()[0] {
            b'$' if length >= 0 => {
                let mut body = vec![0; usize::try_from(length).unwrap() + 2];
                self.0.read_exact(&mut body).unwrap();
                reply.extend_from_slice(&body);
            }
            b'*' => (0..length).for_each(|_| self.element(reply)),
            _ => {}
        }
    }
}

fn model(redis: &mut Redis, client: &mut Client, words: &[Vec<u8>]) -> Vec<u8> {
    let reply = redis.command(client, words);
    let mut bytes = Vec::new();
    write(&reply, client, &mut bytes);
    bytes
}

/// A reply for people to compare. Of an error only its first word, which is what programs look at:
/// the rest differs from version to version.
fn shown(reply: &[u8]) -> String {
    let text = String::from_utf8_lossy(reply);
    let word = text.split([' ', '\r']).next().unwrap_or_default();
    if text.starts_with('-') { word.into() } else { text.into_owned() }
}

/// How long the first reply is.
fn length_of(bytes: &[u8]) -> usize {
    let line = bytes.windows(2).position(|two| two == b"\r\n").expect("a whole line") + 2;
    match bytes[0] {
        b'$' => {
            let size: i64 = String::from_utf8_lossy(&bytes[1..line - 2]).parse().expect("a length");
            line + usize::try_from(size + 2).unwrap_or(0) * usize::from(size >= 0)
        }
        _ => line,
    }
}

fn words(text: &str) -> Vec<Vec<u8>> {
    text.split(' ')
        .map(|word| if word == "''" { Vec::new() } else { word.as_bytes().to_vec() })
        .collect()
}

#[test]
fn commands_are_answered_as_by_real_servers() {
    Flavor::on_all(|flavor| {
        let server = Server::start(flavor);
        let (mut real, mut redis, mut client) =
            (Real::new(&server), Redis::new(), Client::default());
        redis.set_time(1_700_000_000_000_000, 0);
        let mut random = Random::new(7, "commands");
        for step in 0..4000 {
            let key = random.pick(&["a", "b", "c"]);
            let (from, to) = (random.between(0, 12) as i64 - 6, random.between(0, 12) as i64 - 6);
            let value = random.pick(&["''", "x", "hello", "0123456789"]);
            let text = match random.below(16) {
                0 | 1 => format!("SET {key} {value} PX {}", random.between(1_000_000, 9_000_000)),
                2 => format!("SET {key} {value}"),
                3 | 4 => format!("GET {key}"),
                5 => format!("STRLEN {key}"),
                6 | 7 => format!("GETRANGE {key} {from} {to}"),
                8 => format!("SETRANGE {key} {} {value}", random.below(15)),
                9 => format!("APPEND {key} {value}"),
                10 => format!("PEXPIRE {key} {}", random.pick(&["5000000", "0", "-5", "nothing"])),
                11 => format!("DEL {key}"),
                12 => random
                    .pick(&[
                        "GET",
                        "SET a x PX 0",
                        "SET a x PX y",
                        "PING",
                        "DBSIZE",
                        "SETRANGE a -1 x",
                    ])
                    .into(),
                13 => "SCRIPT EXISTS 0123456789012345678901234567890123456789".into(),
                14 => "EVALSHA 0123456789012345678901234567890123456789 0".into(),
                _ => format!("DEL a b {key}"),
            };
            let (expected, found) =
                (real.ask(&words(&text)), model(&mut redis, &mut client, &words(&text)));
            assert_eq!(shown(&found), shown(&expected), "{flavor:?}, step {step}: {text}");
        }
    });
}

#[test]
fn scripts_are_run_as_by_real_servers() {
    let scripts = [
        "return redis.call('SET', KEYS[1], ARGV[1], 'PX', 100000.0)",
        "return redis.call('GET', KEYS[1])",
        "return {redis.call('STRLEN', KEYS[1]), redis.call('GETRANGE', KEYS[1], 1, -2)}",
        "return struct.pack('>BI7I7c3', 200, 9007199254740991, 1, 'abc')",
        "local a, b, c, d = struct.unpack('>BI4c2', 'x\\1\\2\\3\\4yz'); return {a, b, c, d}",
        "return {struct.unpack('>I7I7', 'ab\\0\\0\\0\\0\\1\\2\\0\\0\\0\\0\\0\\7', 1)}",
        "return redis.call('PEXPIRE', KEYS[1], math.max(5000 / 2, 3600000))",
        "return redis.call('APPEND', KEYS[1], string.rep('z', 3))",
        "return redis.call('DEL', KEYS[1], KEYS[2])",
        "return redis.pcall('PEXPIRE', KEYS[1], 'x') and 1",
        "return {1, 2.9, 'three', false, 5}",
        "return redis.call('GET', KEYS[2]) == false",
        "return {#ARGV, #KEYS, 10 ^ 2, math.fmod(9007199254740991, 1000), math.ceil(7 / 2)}",
    ];
    Flavor::on_all(|flavor| {
        let server = Server::start(flavor);
        let (mut real, mut redis, mut client) =
            (Real::new(&server), Redis::new(), Client::default());
        redis.set_time(1_700_000_000_000_000, 0);
        for (round, script) in scripts.iter().cycle().take(scripts.len() * 3).enumerate() {
            let text = ["EVAL", script, "2", "k", "l", "value", "more"]
                .map(|word| word.as_bytes().to_vec());
            let (expected, found) = (real.ask(&text), model(&mut redis, &mut client, &text));
            assert_eq!(shown(&found), shown(&expected), "{flavor:?}, round {round}: {script}");
        }
    });
}

/// Connects to a real server, and takes down what is said.
#[derive(Clone)]
struct Tap {
    port: u16,
    said: Arc<Mutex<(Vec<u8>, Vec<u8>)>>,
}

struct Tapped {
    stream: tokio::net::TcpStream,
    said: Arc<Mutex<(Vec<u8>, Vec<u8>)>>,
}

impl Connect for Tap {
    fn connect(&self, _address: &str) -> Connecting {
        let (port, said) = (self.port, Arc::clone(&self.said));
        Box::pin(async move {
            let stream = tokio::net::TcpStream::connect(("127.0.0.1", port)).await?;
            Ok(Box::new(Tapped { stream, said }) as Box<dyn Link>)
        })
    }
}

impl AsyncRead for Tapped {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        let before = buffer.filled().len();
        let result = Pin::new(&mut self.stream).poll_read(context, buffer);
        self.said.lock().1.extend_from_slice(&buffer.filled()[before..]);
        result
    }
}

impl AsyncWrite for Tapped {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        let result = Pin::new(&mut self.stream).poll_write(context, bytes);
        if let Poll::Ready(Ok(count)) = &result {
            self.said.lock().0.extend_from_slice(&bytes[..*count]);
        }
        result
    }

    fn poll_flush(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

const LIMITS: &[&str] = &[
    "10/s",
    "7/s window",
    "20/m sliding",
    "10/s estimate",
    "5/s log",
    "4 concurrent ttl 10s",
    "1000/s burst 50",
];

#[test]
fn calls_of_the_product_are_answered_as_by_real_servers() {
    Flavor::on_all(|flavor| {
        let server = Server::start(flavor);
        let tap = Tap { port: server.port(), said: Arc::default() };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let clock = ManualClock::new();
            clock.set(Timestamp::from_secs(1_700_000_000));
            let url = "redis://server/?protocol=2".parse().unwrap();
            let builder =
                tidegate::redis::Redis::builder(url).connector(tap.clone()).clock(clock.clone());
            let store = builder.timeout(Duration::from_secs(10)).build().unwrap();
            let mut random = Random::new(11, "calls");
            let limits: Vec<Limits> = LIMITS.iter().map(|limit| limit.parse().unwrap()).collect();
            for _ in 0..1500 {
                clock.advance(Duration::from_micros(
                    random.pick(&[0, 1, 999, 50_000, 300_000, 2_000_000]),
                ));
                let op = random.pick(&[
                    Op::Check,
                    Op::Check,
                    Op::Check,
                    Op::Peek,
                    Op::Take,
                    Op::Debit,
                    Op::Refund,
                    Op::Reset,
                    Op::Settle,
                    Op::Release,
                ]);
                let cost = random.below(4);
                let (first, second) = (random.pick(&limits), random.pick(&limits));
                let mut check = Check::of(op).charge_named("a", "key", &first, cost);
                if random.once_in(3) {
                    check = check.charge_named("b", "key", &second, cost);
                }
                check = check.reserving(2);
                if random.once_in(2) {
                    check = check.with_id(Id(random.between(1, 20)));
                }
                let _ = store.decide(&check).await.unwrap();
            }
        });
        let (asked, heard) = tap.said.lock().clone();
        let (mut redis, mut client) = (Redis::new(), Client::default());
        redis.set_time(1_700_000_000_000_000, 0);
        let (mut asked, mut heard, mut calls) = (&asked[..], &heard[..], 0);
        while let Some((words, length)) = parse(asked) {
            asked = &asked[length..];
            calls += 1;
            let (expected, rest) = heard.split_at(length_of(heard));
            heard = rest;
            let found = model(&mut redis, &mut client, &words);
            assert_eq!(shown(&found), shown(expected), "{flavor:?}, call {calls}: {words:?}");
            assert!(
                expected[0] == b'-' || found == expected,
                "{flavor:?}, call {calls}: {words:?}"
            );
        }
        assert_eq!((asked.len(), heard.len()), (0, 0));
        assert!(calls > 1500);
    });
}
