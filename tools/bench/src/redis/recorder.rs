//! What the library really sends: a relay before the server that keeps every command.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use tidegate_testkit::Server;

/// A command as its words.
pub type Command = Vec<Vec<u8>>;

/// A relay on a port of its own. Its threads end with the connections they serve.
pub struct Recorder {
    url: String,
    heard: Arc<Mutex<Vec<u8>>>,
}

impl Recorder {
    pub fn before(server: &Server) -> Recorder {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
        let url = format!("redis://{}", listener.local_addr().expect("a bound port"));
        let heard = Arc::new(Mutex::new(Vec::new()));
        let (port, kept) = (server.port(), Arc::clone(&heard));
        std::thread::spawn(move || {
            // The library is configured to keep one connection, and no other process knows the
            // port.
            let (from, _) = listener.accept().expect("a connection");
            let to = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).expect("the server");
            let (replies, back) =
                (to.try_clone().expect("a socket"), from.try_clone().expect("a socket"));
            std::thread::spawn(move || relay(replies, back, |_| ()));
            relay(from, to, |bytes| kept.lock().expect("no panic").extend_from_slice(bytes));
        });
        Recorder { url, heard }
    }

    pub fn url(&self) -> &str {
        &self.url
    }

    /// The calls of scripts since the last call of this.
    pub fn calls(&self) -> Vec<Command> {
        let bytes = std::mem::take(&mut *self.heard.lock().expect("no panic"));
        commands(&bytes).into_iter().filter(|command| command[0] == b"EVALSHA").collect()
    }
}

fn relay(mut from: TcpStream, mut to: TcpStream, keep: impl Fn(&[u8])) {
    let (_, _) = (from.set_nodelay(true), to.set_nodelay(true));
    let mut buffer = vec![0; 1 << 16];
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        keep(&buffer[..count]);
        if to.write_all(&buffer[..count]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Both);
}

/// The commands that these bytes are; once the replies have arrived, all commands have.
fn commands(mut bytes: &[u8]) -> Vec<Command> {
    let mut commands = Vec::new();
    while !bytes.is_empty() {
        let count = number(&mut bytes, b'*');
        let mut words = Vec::with_capacity(count);
        for _ in 0..count {
            let length = number(&mut bytes, b'$');
            words.push(bytes[..length].to_vec());
            bytes = &bytes[length + 2..];
        }
        commands.push(words);
    }
    commands
}

fn number(bytes: &mut &[u8], kind: u8) -> usize {
    let end = bytes.iter().position(|byte| *byte == b'\r').expect("a whole line");
    assert_eq!(bytes[0], kind, "a command as an array of strings");
    let number = std::str::from_utf8(&bytes[1..end]).ok().and_then(|digits| digits.parse().ok());
    *bytes = &bytes[end + 2..];
    number.expect("a length")
}
