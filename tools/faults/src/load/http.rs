//! The smallest client for HTTP/1.1: connections that are kept, one request on each at a time.

use std::cell::RefCell;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::TcpStream as Blocking;
use std::rc::Rc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;

use super::record::{Outcome, Source};

/// Connections to one node; a listener lets in 1024 from one address.
const CONNECTIONS: usize = 600;
/// A request that waits longer counts as not answered.
const PATIENCE: Duration = Duration::from_secs(4);

/// A request as bytes.
pub(super) fn post(path: &str, body: &str) -> Rc<[u8]> {
    let length = body.len();
    format!("POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {length}\r\n\r\n{body}")
        .into_bytes()
        .into()
}

/// Idle connections to a node.
pub(crate) struct Pool {
    address: String,
    idle: RefCell<Vec<Connection>>,
    places: Semaphore,
}

struct Connection {
    stream: TcpStream,
    read: Vec<u8>,
}

impl Pool {
    pub(super) fn new(address: &str) -> Pool {
        Pool {
            address: address.to_owned(),
            idle: RefCell::default(),
            places: Semaphore::new(CONNECTIONS),
        }
    }

    /// Opens so many connections, and asks on each.
    pub(super) async fn open(self: &Rc<Self>, connections: usize, request: &Rc<[u8]>) {
        let mut opening = tokio::task::JoinSet::new();
        for _ in 0..connections {
            let (pool, request) = (Rc::clone(self), Rc::clone(request));
            opening.spawn_local(async move { pool.ask(&request).await });
        }
        while opening.join_next().await.is_some() {}
    }

    pub(super) async fn ask(&self, request: &[u8]) -> (Outcome, Option<Source>) {
        let _place = self.places.acquire().await.expect("it is never closed");
        let idle = self.idle.borrow_mut().pop();
        let talk = async {
            let mut connection = match idle {
                Some(connection) => connection,
                None => Connection::open(&self.address).await.map_err(|_| Outcome::Refused)?,
            };
            let answer = connection.ask(request).await.map_err(|_| Outcome::Broken)?;
            Ok((connection, answer))
        };
        match tokio::time::timeout(PATIENCE, talk).await {
            Ok(Ok((connection, answer))) => {
                self.idle.borrow_mut().push(connection);
                answer
            }
            Ok(Err(outcome)) => {
                // The others to this node have most likely ended with it.
                self.idle.borrow_mut().clear();
                (outcome, None)
            }
            Err(_) => (Outcome::Silent, None),
        }
    }
}

impl Connection {
    async fn open(address: &str) -> io::Result<Connection> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        Ok(Connection { stream, read: Vec::with_capacity(4096) })
    }

    async fn ask(&mut self, request: &[u8]) -> io::Result<(Outcome, Option<Source>)> {
        self.stream.write_all(request).await?;
        self.read.clear();
        loop {
            if self.stream.read_buf(&mut self.read).await? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            if let Some(whole) = whole(&self.read) {
                let status = self
                    .read
                    .get(9..12)
                    .and_then(|digits| std::str::from_utf8(digits).ok()?.parse().ok());
                return Ok((Outcome::of(status.unwrap_or(0)), source(&self.read[..whole])));
            }
        }
    }
}

/// How long the answer is, if all of it is here.
fn whole(bytes: &[u8]) -> Option<usize> {
    let head = bytes.windows(4).position(|end| end == b"\r\n\r\n")? + 4;
    let text = std::str::from_utf8(&bytes[..head]).ok()?;
    let length: usize =
        text.lines().find_map(|line| line.strip_prefix("content-length: "))?.parse().ok()?;
    (bytes.len() >= head + length).then_some(head + length)
}

/// It stands at the end.
fn source(bytes: &[u8]) -> Option<Source> {
    const NAME: &[u8] = b"\"source\":\"";
    let tail = &bytes[bytes.len().saturating_sub(200)..];
    let at = tail.windows(NAME.len()).rposition(|part| part == NAME)? + NAME.len();
    match tail.get(at)? {
        b's' => Some(Source::Store),
        b'l' => Some(Source::Local),
        b'f' => Some(Source::Fallback),
        _ => None,
    }
}

/// A single connection that waits, for questions beside the load: metrics, health, single checks.
pub(crate) struct Http(BufReader<Blocking>);

impl Http {
    pub(crate) fn connect(address: &str) -> io::Result<Http> {
        let stream = Blocking::connect(address)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(Duration::from_secs(10)))?;
        Ok(Http(BufReader::new(stream)))
    }

    pub(crate) fn get(&mut self, path: &str) -> io::Result<(u16, String)> {
        self.talk(format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n").as_bytes())
    }

    pub(crate) fn post(&mut self, path: &str, body: &str) -> io::Result<(u16, String)> {
        self.talk(&post(path, body))
    }

    fn talk(&mut self, request: &[u8]) -> io::Result<(u16, String)> {
        self.0.get_mut().write_all(request)?;
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            if self.0.read_line(&mut head)? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        let wrong = || io::Error::new(io::ErrorKind::InvalidData, head.clone());
        let length = head
            .lines()
            .find_map(|line| line.strip_prefix("content-length: "))
            .ok_or_else(wrong)?;
        let mut body = vec![0; length.parse().map_err(|_| wrong())?];
        self.0.read_exact(&mut body)?;
        let status =
            head.split(' ').nth(1).and_then(|status| status.parse().ok()).ok_or_else(wrong)?;
        Ok((status, String::from_utf8_lossy(&body).into_owned()))
    }
}
