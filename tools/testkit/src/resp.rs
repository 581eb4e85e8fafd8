//! The smallest client that can talk to a server: one command, one reply, blocking.
//!
//! It shares no code with what it tests.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// How long a connection may take to open, and a reply to come.
const PATIENCE: Duration = Duration::from_secs(10);
/// The longest string and the longest array that are read, and how deep arrays may nest.
const LONGEST: usize = 64 << 20;
const DEEPEST: usize = 16;

/// What a server answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// Nothing there.
    Nil,
    /// A number.
    Int(i64),
    /// A status such as `OK`, or a string that is UTF-8.
    Text(String),
    /// A string that is not UTF-8.
    Bytes(Vec<u8>),
    /// The server refused; the text begins with a code such as `ERR` or `READONLY`.
    Error(String),
    /// Several of these.
    Array(Vec<Reply>),
}

impl Reply {
    /// The number.
    ///
    /// # Panics
    /// If it is something else.
    #[track_caller]
    pub fn int(&self) -> i64 {
        match self {
            Reply::Int(number) => *number,
            other => panic!("expected a number, found {other:?}"),
        }
    }

    /// The text.
    ///
    /// # Panics
    /// If it is something else.
    #[track_caller]
    pub fn text(&self) -> &str {
        match self {
            Reply::Text(text) => text,
            other => panic!("expected text, found {other:?}"),
        }
    }

    /// The parts.
    ///
    /// # Panics
    /// If it is not an array.
    #[track_caller]
    pub fn array(&self) -> &[Reply] {
        match self {
            Reply::Array(parts) => parts,
            other => panic!("expected an array, found {other:?}"),
        }
    }

    /// Whether the server refused.
    pub fn is_error(&self) -> bool {
        matches!(self, Reply::Error(_))
    }
}

/// A connection to a server.
#[derive(Debug)]
pub struct Client {
    stream: BufReader<Stream>,
}

impl Client {
    /// Connects to a port of 127.0.0.1.
    pub fn connect(port: u16) -> io::Result<Client> {
        let stream =
            TcpStream::connect_timeout(&SocketAddr::from((Ipv4Addr::LOCALHOST, port)), PATIENCE)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        Ok(Client { stream: BufReader::new(Stream::Tcp(stream)) })
    }

    /// Connects to a Unix socket.
    pub fn connect_unix(path: &Path) -> io::Result<Client> {
        let stream = UnixStream::connect(path)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        Ok(Client { stream: BufReader::new(Stream::Unix(stream)) })
    }

    /// Sends one command and waits for its reply, ten seconds at most.
    pub fn command(&mut self, words: &[impl AsRef<[u8]>]) -> io::Result<Reply> {
        self.send(words)?;
        self.receive()
    }

    /// Sends a command and does not wait.
    pub fn send(&mut self, words: &[impl AsRef<[u8]>]) -> io::Result<()> {
        let mut bytes = format!("*{}\r\n", words.len()).into_bytes();
        for word in words.iter().map(AsRef::as_ref) {
            bytes.extend_from_slice(format!("${}\r\n", word.len()).as_bytes());
            bytes.extend_from_slice(word);
            bytes.extend_from_slice(b"\r\n");
        }
        self.stream.get_mut().write_all(&bytes)
    }

    /// Waits for the next reply, ten seconds at most.
    pub fn receive(&mut self) -> io::Result<Reply> {
        self.reply(0)
    }

    fn reply(&mut self, depth: usize) -> io::Result<Reply> {
        let line = self.line()?;
        let (kind, rest) = line.split_at(1);
        match kind {
            "+" => Ok(Reply::Text(rest.to_owned())),
            "-" => Ok(Reply::Error(rest.to_owned())),
            ":" => Ok(Reply::Int(rest.parse().map_err(|_| wrong(&line))?)),
            "$" => match length(rest, &line)? {
                None => Ok(Reply::Nil),
                Some(length) => {
                    let mut bytes = vec![0; length + 2];
                    self.stream.read_exact(&mut bytes)?;
                    bytes.truncate(length);
                    Ok(String::from_utf8(bytes)
                        .map_or_else(|error| Reply::Bytes(error.into_bytes()), Reply::Text))
                }
            },
            "*" if depth < DEEPEST => match length(rest, &line)? {
                None => Ok(Reply::Nil),
                Some(length) => (0..length)
                    .map(|_| self.reply(depth + 1))
                    .collect::<io::Result<_>>()
                    .map(Reply::Array),
            },
            _ => Err(wrong(&line)),
        }
    }

    fn line(&mut self) -> io::Result<String> {
        // Nonsense need not have an end of the line, so it is not waited for.
        if let Some(first) =
            self.stream.fill_buf()?.first().filter(|first| !b"+-:$*".contains(first))
        {
            return Err(wrong(&first.escape_ascii().to_string()));
        }
        let mut line = Vec::new();
        (&mut self.stream).take(LONGEST as u64).read_until(b'\n', &mut line)?;
        match line.strip_suffix(b"\r\n") {
            Some(line) => Ok(String::from_utf8_lossy(line).into_owned()),
            None if line.is_empty() => Err(io::ErrorKind::UnexpectedEof.into()),
            None => Err(wrong(&String::from_utf8_lossy(&line))),
        }
    }
}

fn length(digits: &str, line: &str) -> io::Result<Option<usize>> {
    match digits.parse() {
        Ok(length) if length <= LONGEST => Ok(Some(length)),
        _ if digits == "-1" => Ok(None),
        _ => Err(wrong(line)),
    }
}

fn wrong(found: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("expected a reply, found {found:?}"))
}

#[derive(Debug)]
enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Read for Stream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Stream::Tcp(stream) => stream.read(buffer),
            Stream::Unix(stream) => stream.read(buffer),
        }
    }
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Stream::Tcp(stream) => stream.write(bytes),
            Stream::Unix(stream) => stream.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
