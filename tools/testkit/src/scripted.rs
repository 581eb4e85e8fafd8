//! A TCP server that answers what a test says, whatever the request.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;

/// Answers each read of a connection with the next of its parts, and every later one with the last.
/// Ends with the process.
#[derive(Debug)]
pub struct ScriptedPeer {
    at: SocketAddr,
}

impl ScriptedPeer {
    /// Listens on a free port of this machine.
    ///
    /// # Panics
    /// If there is none.
    pub fn start(parts: Vec<Vec<u8>>) -> ScriptedPeer {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let at = listener.local_addr().expect("a socket that listens has an address");
        let parts: Arc<[Vec<u8>]> = parts.into();
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let parts = Arc::clone(&parts);
                thread::spawn(move || answer(stream, &parts));
            }
        });
        ScriptedPeer { at }
    }

    /// Where it listens, as the URL of a store.
    pub fn url(&self) -> String {
        format!("redis://{}", self.at)
    }
}

/// Until the client disconnects.
fn answer(mut stream: TcpStream, parts: &[Vec<u8>]) {
    let mut asked = [0; 4096];
    for number in 0.. {
        let Ok(1..) = stream.read(&mut asked) else { return };
        let Some(part) = parts.get(number).or(parts.last()) else { return };
        if stream.write_all(part).is_err() {
            return;
        }
    }
}
