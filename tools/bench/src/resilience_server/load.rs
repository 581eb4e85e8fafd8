//! Requests at a fixed rate, whatever the answers do, over RESP or HTTP.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::OwnedWriteHalf;

use super::Failure;

/// Over RESP requests follow each other on few connections, as those of a client that shares one
/// do; over HTTP each connection has one request at a time, so there are more of them.
const CONNECTIONS: [usize; 2] = [16, 256];
/// So many requests may wait on one connection; a client that has more gives up.
const MOST_WAITING: usize = 64;
/// How often requests are sent.
const PACE: Duration = Duration::from_micros(200);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Protocol {
    Resp,
    Http,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    Store,
    Alone,
    Error,
}

/// One answer: when it was requested, how long it took, and its source.
#[derive(Clone, Copy)]
pub(super) struct ServerAnswer {
    pub(super) asked: Instant,
    pub(super) took: Duration,
    pub(super) kind: Kind,
}

impl Protocol {
    pub(super) fn connections(self) -> usize {
        CONNECTIONS[usize::from(self == Protocol::Http)]
    }

    /// A request about nothing.
    pub(super) fn nothing(self) -> Vec<u8> {
        match self {
            Protocol::Resp => b"*1\r\n$4\r\nPING\r\n".to_vec(),
            Protocol::Http => b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n".to_vec(),
        }
    }

    pub(super) fn question(self, number: u64) -> Vec<u8> {
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

/// When the requests without an answer were sent: so many at each moment.
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

    /// When the first one was sent, which is answered now.
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
pub(super) struct Load {
    pub(super) answers: Vec<ServerAnswer>,
    pub(super) unsent: u64,
}

/// A connection, and those who wait on it.
type Line = (OwnedWriteHalf, Waiting);

/// Sends what is due. It sleeps on a thread of its own: tokio's clock counts in
/// milliseconds, and would send twenty requests in a burst.
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
        // over HTTP each on an idle connection.
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

/// Sends `rate` requests a second for so long, taking `questions` in turns.
pub(super) async fn load(
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
                    answers.push(ServerAnswer { asked, took: now - asked, kind });
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
