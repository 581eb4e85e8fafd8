//! `cargo xtask bench resilience-server [REQUESTS_PER_SECOND [fixed] [resp]]`: a server over a real
//! Redis that is stopped under load and goes on, asked through its listeners for RESP and HTTP; and
//! how much it still answers when it is asked for ten times as much as it can do.
//!
//! Requests are sent when they are due, whatever the answers do. At the same time, over connections
//! of their own, a tenth as many are about nothing, which shows what the machine itself adds. If
//! Redis cannot decide that many, fewer are asked for, unless the rate is `fixed`. With `resp` only
//! that listener is asked, and no more than that is measured. The server has a core of its own;
//! whoever asks and Redis share the other, where Redis goes first, as if it had a machine of its
//! own.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tidegate_server::config::Config;
use tidegate_server::{Options, start};
use tidegate_testkit::{AbsenceWatch, Absences, Awake, Flavor, Server};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::OwnedWriteHalf;

use crate::cores::{CLIENTS, SERVERS, go_first, stay_on};
use crate::server::{Own, until_left_alone};

type Failure = Box<dyn std::error::Error>;

/// Over RESP requests follow each other on few connections, as those of a client that shares one
/// do; over HTTP each connection has one request at a time, so there are more of them.
const CONNECTIONS: [usize; 2] = [16, 256];
/// So many requests may wait on one connection; a client that has more gives up.
const MOST_WAITING: usize = 64;
/// How often requests are sent.
const PACE: Duration = Duration::from_micros(200);
/// How long a server waits for Redis.
const DEADLINE: Duration = tidegate::resilience::DEFAULT_DEADLINE;
/// An answer that comes later is no use: the deadline and 5 ms.
const IN_TIME: Duration = Duration::from_millis(20);

pub fn run(args: &[&str]) {
    // Whoever asks has one core.
    let threads = if matches!(args, ["serve", _]) { 2 } else { 1 };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(threads)
        .enable_all()
        .build()
        .expect("a runtime");
    let done = match args {
        ["serve", url] => runtime.block_on(serve(url)),
        [] => runtime.block_on(all(20_000, false, true)),
        [rate, options @ ..] if options.iter().all(|option| ["fixed", "resp"].contains(option)) => {
            let (fixed, http) = (options.contains(&"fixed"), !options.contains(&"resp"));
            rate.parse()
                .map_err(Failure::from)
                .and_then(|rate| runtime.block_on(all(rate, fixed, http)))
        }
        _ => {
            Err("expected nothing, or how many requests a second, and perhaps fixed and resp"
                .into())
        }
    };
    if let Err(error) = done {
        eprintln!("resilience-server {}: {error}", args.join(" "));
        std::process::exit(1);
    }
}

/// The server, as a process of its own.
async fn serve(url: &str) -> Result<(), Failure> {
    let text = format!(
        "store: {url}\nresilience: {{ nodes: 1 }}\nlisten: {{ http: 127.0.0.1:0, resp: 127.0.0.1:0, grpc: off }}\nlog: {{ level: off }}\n"
    );
    let running = start(Config::parse(&text, "bench")?, Options::default()).await?;
    let (http, resp) = (running.http.ok_or("no listener")?, running.resp.ok_or("no listener")?);
    tokio::task::block_in_place(|| until_left_alone(http, resp));
    Ok(())
}

async fn all(rate: u64, fixed: bool, http: bool) -> Result<(), Failure> {
    // What it takes to wake a processor that the host gave to somebody else is not what is
    // measured.
    let _awake = Awake::keep();
    stay_on(CLIENTS);
    let redis = Server::start(Flavor::Redis7);
    go_first(redis.pid());
    stay_on(SERVERS);
    let own = Own::start_as(&["resilience-server", "serve", &redis.url()]);
    stay_on(CLIENTS);
    stopped(&redis, Protocol::Resp, own.resp, rate, fixed).await?;
    if !http {
        return Ok(());
    }
    stopped(&redis, Protocol::Http, own.http, rate, fixed).await?;
    goodput(own.resp).await
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Protocol {
    Resp,
    Http,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Store,
    Alone,
    Error,
}

/// One answer: when it was asked for, how long it took, and who gave it.
#[derive(Clone, Copy)]
struct Answer {
    asked: Instant,
    took: Duration,
    kind: Kind,
}

impl Protocol {
    fn connections(self) -> usize {
        CONNECTIONS[usize::from(self == Protocol::Http)]
    }

    /// A request about nothing.
    fn nothing(self) -> Vec<u8> {
        match self {
            Protocol::Resp => b"*1\r\n$4\r\nPING\r\n".to_vec(),
            Protocol::Http => b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n".to_vec(),
        }
    }

    fn question(self, number: u64) -> Vec<u8> {
        let key = format!("user:{:04}", number % 1000);
        match self {
            Protocol::Resp => {
                let words = ["CL.THROTTLE", &key, "1000000", "1000000", "1"];
                let words: String =
                    words.iter().map(|word| format!("${}\r\n{word}\r\n", word.len())).collect();
                format!("*5\r\n{words}").into_bytes()
            }
            Protocol::Http => {
                let body = format!(r#"{{"key":"{key}","limit":"1000000/s"}}"#);
                let length = body.len();
                let head =
                    "POST /v1/check HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json";
                format!("{head}\r\ncontent-length: {length}\r\n\r\n{body}").into_bytes()
            }
        }
    }

    /// The first answer among these bytes, and how long it is.
    fn answer(self, bytes: &[u8]) -> Option<(usize, Kind)> {
        let contains = |bytes: &[u8], part: &[u8]| bytes.windows(part.len()).any(|own| own == part);
        match self {
            Protocol::Resp => {
                // An answer is eight lines, of which the last is the mark; what is not about a
                // decision is one.
                let lines = if bytes.first()? == &b'*' { 8 } else { 1 };
                let end =
                    bytes.iter().enumerate().filter(|(_, byte)| **byte == b'\n').nth(lines - 1)?.0
                        + 1;
                let kind = match bytes[0] {
                    b'*' if bytes[..end].ends_with(b"fallback\r\n") => Kind::Alone,
                    b'*' | b'+' => Kind::Store,
                    _ => Kind::Error,
                };
                Some((end, kind))
            }
            Protocol::Http => {
                let head = bytes.windows(4).position(|four| four == b"\r\n\r\n")? + 4;
                let text = std::str::from_utf8(&bytes[..head]).ok()?.to_ascii_lowercase();
                let length = text
                    .split("content-length: ")
                    .nth(1)
                    .and_then(|rest| rest.lines().next()?.trim().parse().ok());
                let end = head + length.unwrap_or(0);
                let kind = match bytes.get(head..end)? {
                    _ if !text.starts_with("http/1.1 200") => Kind::Error,
                    body if contains(body, br#""source":"fallback""#) => Kind::Alone,
                    _ => Kind::Store,
                };
                Some((end, kind))
            }
        }
    }
}

/// When those were asked that have no answer yet: so many at each moment.
type Waiting = Arc<Mutex<Queue>>;

#[derive(Default)]
struct Queue {
    asked: VecDeque<(Instant, usize)>,
    length: usize,
}

impl Queue {
    fn push(&mut self, count: usize) {
        self.asked.push_back((Instant::now(), count));
        self.length += count;
    }

    /// When the first one was asked, which is answered now.
    fn pop(&mut self) -> Option<Instant> {
        let (asked, left) = self.asked.front_mut()?;
        let first = *asked;
        *left -= 1;
        if *left == 0 {
            self.asked.pop_front();
        }
        self.length -= 1;
        Some(first)
    }
}

/// Answers, and how many requests were not sent because too many waited.
struct Load {
    answers: Vec<Answer>,
    unsent: u64,
}

/// A connection, and those who wait on it.
type Line = (OwnedWriteHalf, Waiting);

/// Sends what is due. Whoever sleeps here has a thread of his own: tokio's clock counts in
/// milliseconds, and twenty requests at once are a crowd that there would not be.
fn send(
    protocol: Protocol,
    rate: u64,
    lasts: Duration,
    all: &[u8],
    length: usize,
    lines: Vec<Line>,
) -> Result<(Vec<Line>, u64), String> {
    let questions = all.len() / length;
    let (began, mut sent, mut unsent, mut next) = (Instant::now(), 0_u64, 0_u64, 0);
    while began.elapsed() < lasts {
        std::thread::sleep(PACE);
        let due = rate * u64::try_from(began.elapsed().as_micros()).unwrap_or(0) / 1_000_000;
        // Over RESP those that are due at one moment go out together, evenly over the connections;
        // over HTTP each to whoever has nothing to do.
        let at_once = match protocol {
            Protocol::Resp => usize::try_from(due - sent).unwrap_or(0).div_ceil(lines.len()),
            Protocol::Http => 1,
        };
        while sent < due {
            let first = usize::try_from(sent).unwrap_or(0) % questions;
            let count =
                at_once.min(usize::try_from(due - sent).unwrap_or(0)).min(questions - first);
            sent += count as u64;
            let idle = |at: &usize| protocol == Protocol::Resp || lines[*at].1.lock().length == 0;
            let Some(at) = (next..lines.len()).chain(0..next).find(idle) else {
                unsent += count as u64;
                continue;
            };
            next = (at + 1) % lines.len();
            let (writer, waiting) = &lines[at];
            let mut waiting = waiting.lock();
            let fits = count.min(MOST_WAITING - waiting.length);
            let bytes = &all[first * length..(first + fits) * length];
            let written = if fits > 0 { writer.try_write(bytes).unwrap_or(0) } else { 0 };
            if written % length > 0 {
                return Err("a request was cut in two: the socket was full".into());
            }
            let written = written / length;
            unsent += (count - written) as u64;
            if written > 0 {
                waiting.push(written);
            }
        }
    }
    Ok((lines, unsent))
}

/// Asks `rate` times a second for so long. `questions` are asked in turns.
async fn load(
    protocol: Protocol,
    at: SocketAddr,
    rate: u64,
    lasts: Duration,
    questions: &[Vec<u8>],
) -> Result<Load, Failure> {
    let answers = Arc::new(Mutex::new(Vec::new()));
    // All are of one length, so that some of them are a piece of all.
    let (all, length) = (questions.concat(), questions[0].len());
    assert!(questions.iter().all(|question| question.len() == length), "questions of one length");
    let (mut lines, mut readers) = (Vec::new(), tokio::task::JoinSet::new());
    for _ in 0..protocol.connections() {
        let mut stream = TcpStream::connect(at).await?;
        stream.set_nodelay(true)?;
        if protocol == Protocol::Resp {
            stream.write_all(b"TG.MARK ON\r\n").await?;
            let mut ok = [0; 5];
            stream.read_exact(&mut ok).await?;
        }
        let (mut reader, writer) = stream.into_split();
        let waiting = Waiting::default();
        let (own, answers) = (Arc::clone(&waiting), Arc::clone(&answers));
        readers.spawn(async move {
            let mut bytes = Vec::with_capacity(16 << 10);
            while matches!(reader.read_buf(&mut bytes).await, Ok(1..)) {
                let (now, mut used) = (Instant::now(), 0);
                let (mut own, mut answers) = (own.lock(), answers.lock());
                while let Some((length, kind)) = protocol.answer(&bytes[used..]) {
                    used += length;
                    let asked = own.pop().unwrap_or(now);
                    answers.push(Answer { asked, took: now - asked, kind });
                }
                bytes.drain(..used);
            }
        });
        lines.push((writer, waiting));
    }
    let (lines, unsent) =
        tokio::task::spawn_blocking(move || send(protocol, rate, lasts, &all, length, lines))
            .await
            .map_err(|e| e.to_string())??;
    let patience = Instant::now();
    while lines.iter().any(|(_, waiting)| waiting.lock().length > 0)
        && patience.elapsed() < Duration::from_secs(2)
    {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    readers.shutdown().await;
    let lost = lines.iter().map(|(_, waiting)| waiting.lock().length).sum::<usize>();
    if lost > 0 {
        println!("  {lost} requests were never answered");
    }
    let answers = std::mem::take(&mut *answers.lock());
    Ok(Load { answers, unsent })
}

/// How long they took; and how long without what the host did not let processors run meanwhile.
fn line(name: &str, answers: &[Answer], absences: &Absences) {
    let sorted = |of: &dyn Fn(&Answer) -> Duration| {
        let mut took: Vec<Duration> = answers.iter().map(of).collect();
        took.sort();
        took
    };
    let at = |took: &[Duration], per_mille: usize| {
        took.get((took.len() * per_mille / 1000).min(took.len().saturating_sub(1)))
            .copied()
            .unwrap_or_default()
    };
    let there = |answer: &Answer| {
        answer.took.saturating_sub(absences.within(answer.asked, answer.asked + answer.took))
    };
    let (took, less) = (sorted(&|answer| answer.took), sorted(&there));
    let alone = answers.iter().filter(|answer| answer.kind == Kind::Alone).count();
    println!(
        "  {name:<26} p50 {:>5.2}  p99 {:>5.2}  max {:>5.1} ms; while the machine ran p99 {:>5.2}  max {:>5.1} ms; of {}, {alone} without Redis",
        ms(at(&took, 500)),
        ms(at(&took, 990)),
        ms(at(&took, 1000)),
        ms(at(&less, 990)),
        ms(at(&less, 1000)),
        answers.len()
    );
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1000.0
}

async fn stopped(
    redis: &Server,
    protocol: Protocol,
    at: SocketAddr,
    rate: u64,
    fixed: bool,
) -> Result<(), Failure> {
    let second = Duration::from_secs(1);
    let questions: Vec<Vec<u8>> = (0..1000).map(|number| protocol.question(number)).collect();
    // As much as this machine can offer, and Redis decide.
    let mut rate = rate;
    loop {
        let tried = load(protocol, at, rate, second, &questions).await?;
        let by_store = |answer: &&Answer| answer.took <= IN_TIME && answer.kind == Kind::Store;
        let good = tried.answers.iter().filter(by_store).count();
        if fixed || good as u64 * 100 >= rate * 99 || rate < 2000 {
            break;
        }
        rate = rate * 3 / 4;
    }
    println!(
        "{protocol:?}, {rate} requests a second over {} connections; a tenth as many about nothing",
        protocol.connections()
    );
    let begin = |rate: u64, questions: Vec<Vec<u8>>| {
        tokio::spawn(async move {
            load(protocol, at, rate, 6 * second, &questions)
                .await
                .map_err(|error| error.to_string())
        })
    };
    let watch = AbsenceWatch::begin();
    let (loading, beside) = (begin(rate, questions), begin(rate / 10, vec![protocol.nothing()]));
    tokio::time::sleep(2 * second).await;
    let stop = Instant::now();
    tokio::task::block_in_place(|| redis.stop_signal());
    tokio::time::sleep(2 * second).await;
    let go_on = Instant::now();
    redis.continue_signal();
    let Load { answers, unsent } = loading.await??;
    let nothing = beside.await??.answers;
    let absences = watch.end();
    let between = |answers: &[Answer], from: Instant, to: Instant| -> Vec<Answer> {
        answers.iter().copied().filter(|answer| answer.asked >= from && answer.asked < to).collect()
    };
    let of = |from: Instant, to: Instant| between(&answers, from, to);
    let (open, far) = (stop + Duration::from_millis(100), go_on + 60 * second);
    for (name, from, to) in [
        ("Redis answers", stop - 60 * second, stop),
        ("stopped, all of it", stop, go_on),
        ("stopped, after 100 ms", open, go_on),
        ("after it goes on", go_on, far),
    ] {
        line(name, &of(from, to), &absences);
        line("  about nothing", &between(&nothing, from, to), &absences);
    }
    let errors = answers.iter().filter(|answer| answer.kind == Kind::Error).count();
    let after = of(go_on, far);
    let back = after
        .iter()
        .filter(|answer| answer.kind == Kind::Store)
        .map(|answer| answer.asked - go_on)
        .min();
    let last = after
        .iter()
        .filter(|answer| answer.kind == Kind::Alone)
        .map(|answer| answer.asked - go_on)
        .max();
    let alone =
        |answers: Vec<Answer>| answers.iter().filter(|answer| answer.kind == Kind::Alone).count();
    println!(
        "  without Redis: {} before the stop, {} later than 500 ms after it goes on",
        alone(of(stop - 60 * second, stop)),
        alone(of(go_on + second / 2, far))
    );
    // As `cargo xtask faults F1` has it: the end of the last twentieth of a second of which more
    // than a tenth was decided without Redis; and how many such there were while the machine let
    // requests about nothing wait as long as a call to Redis may take.
    let (slice, mut in_sync, mut busy) = (second / 20, Duration::ZERO, 0);
    for from in (0..40).map(|at| go_on + slice * at) {
        let of_slice = of(from, from + slice);
        let noise = between(&nothing, from, from + slice)
            .iter()
            .map(|answer| answer.took)
            .max()
            .unwrap_or_default();
        if alone(of_slice.clone()) * 10 > of_slice.len() {
            match noise >= DEADLINE && in_sync > Duration::ZERO {
                true => busy += 1,
                false => in_sync = from + slice - go_on,
            }
        }
    }
    println!(
        "  in sync {in_sync:?} after it goes on, beside {busy} twentieths of a second that the machine was busy"
    );
    println!(
        "  errors {errors}, not sent {unsent}; first answer of Redis {back:?} after it goes on, last one without it {last:?}"
    );
    Ok(())
}

async fn goodput(at: SocketAddr) -> Result<(), Failure> {
    println!("RESP, as much as it can do and ten times that; answers within 10 ms, a second");
    let protocol = Protocol::Resp;
    let questions: Vec<Vec<u8>> = (0..1000).map(|number| protocol.question(number)).collect();
    let lasts = Duration::from_secs(2);
    let measure = async |rate: u64| -> Result<(u64, u64), Failure> {
        let Load { answers, unsent } = load(protocol, at, rate, lasts, &questions).await?;
        let good = |of: &dyn Fn(&Answer) -> bool| {
            answers.iter().filter(|answer| answer.took <= IN_TIME && of(answer)).count() as u64
                / lasts.as_secs()
        };
        let (all, store) = (
            good(&|answer| answer.kind != Kind::Error),
            good(&|answer| answer.kind == Kind::Store),
        );
        println!(
            "  {rate:>7} offered   {all:>7} answered, {store:>6} of them by Redis; {} given up",
            unsent / lasts.as_secs()
        );
        Ok((all, store))
    };
    let (mut best, mut peak) = (0, (0, 0));
    for rate in [5_000, 10_000, 15_000, 20_000, 30_000, 40_000] {
        let (all, store) = measure(rate).await?;
        if store > peak.1 {
            best = rate;
        }
        peak = (peak.0.max(all), peak.1.max(store));
    }
    let (all, store) = measure(best * 10).await?;
    println!(
        "  at ten times {best}: {} % of the peak of all answers, {} % of those of Redis",
        100 * all / peak.0.max(1),
        100 * store / peak.1.max(1)
    );
    Ok(())
}
