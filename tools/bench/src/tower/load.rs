//! Connections that stay open and send concurrent requests, again and again: the same requests in
//! the same order for every contender.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// How many connections ask concurrently.
pub(super) const CONNECTIONS: usize = 50;

/// The request, and how the answer ends: nothing comes after it until there is another request.
#[derive(Clone)]
pub(super) struct Exchange {
    request: Vec<u8>,
    end: &'static [u8],
}

impl Exchange {
    /// With the service of this name.
    pub(super) fn with(what: &str) -> Exchange {
        let head = "host: 127.0.0.1\r\nx-api-key: user:0000007\r\n";
        if what.starts_with("json") {
            let body = r#"{"customer":"ada@example.org","items":[{"id":17,"amount":2},{"id":4711,"amount":1}],"note":"before noon"}"#;
            let length = body.len();
            let head = format!(
                "POST / HTTP/1.1\r\n{head}content-type: application/json\r\ncontent-length: {length}\r\n"
            );
            return Exchange {
                request: format!("{head}\r\n{body}").into(),
                end: br#""accepted":3,"note":"before noon"}"#,
            };
        }
        Exchange { request: format!("GET / HTTP/1.1\r\n{head}\r\n").into(), end: b"\r\n\r\nhello" }
    }
}

pub(super) struct Connections {
    exchange: Exchange,
    streams: Vec<TcpStream>,
    buffer: Vec<u8>,
}

impl Connections {
    pub(super) fn at(server: SocketAddr, exchange: &Exchange) -> Connections {
        let connect = |_| {
            let stream = TcpStream::connect(server).expect("the server");
            stream.set_nodelay(true).expect("a socket");
            stream.set_read_timeout(Some(Duration::from_secs(60))).expect("a socket");
            stream
        };
        Connections {
            exchange: exchange.clone(),
            streams: (0..CONNECTIONS).map(connect).collect(),
            buffer: vec![0; 4096],
        }
    }

    /// All ask so many times, each time when all have been answered.
    pub(super) fn ask(&mut self, times: usize) {
        for _ in 0..times {
            for stream in &mut self.streams {
                stream.write_all(&self.exchange.request).expect("the server listens");
            }
            for stream in &mut self.streams {
                answered(stream, &mut self.buffer, self.exchange.end);
            }
        }
    }
}

/// Reads an answer. One that is not what was expected ends the measurement: it would be of
/// something else.
fn answered(stream: &mut TcpStream, buffer: &mut [u8], end: &[u8]) {
    let mut length = 0;
    while !buffer[..length].ends_with(end) {
        let read = stream.read(&mut buffer[length..]).expect("an answer");
        length += read;
        let so_far = || String::from_utf8_lossy(&buffer[..length]);
        assert!(
            read > 0 && buffer.starts_with(b"HTTP/1.1 200 OK\r\n"),
            "expected another answer than {}",
            so_far()
        );
    }
}
