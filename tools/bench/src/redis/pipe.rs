//! A client that costs the server as little as can be: commands written beforehand, 64 to a write.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::time::Duration;

use tidegate_testkit::Server;

use super::recorder::Command;

/// Commands in one write.
pub const DEPTH: usize = 64;

/// Commands in the bytes of the protocol, `DEPTH` to a batch.
pub struct Batches {
    batches: Vec<Vec<u8>>,
    next: usize,
}

impl Batches {
    /// What does not fill a batch is left out.
    pub fn of(commands: &[Command]) -> Batches {
        let batches: Vec<Vec<u8>> = commands
            .chunks_exact(DEPTH)
            .map(|batch| batch.iter().flat_map(bytes).collect())
            .collect();
        assert!(!batches.is_empty(), "at least {DEPTH} commands");
        Batches { batches, next: 0 }
    }
}

fn bytes(command: &Command) -> Vec<u8> {
    let mut bytes = format!("*{}\r\n", command.len()).into_bytes();
    for word in command {
        bytes.extend_from_slice(format!("${}\r\n", word.len()).as_bytes());
        bytes.extend_from_slice(word);
        bytes.extend_from_slice(b"\r\n");
    }
    bytes
}

/// A connection.
pub struct Pipe {
    stream: BufReader<TcpStream>,
    line: Vec<u8>,
}

impl Pipe {
    pub fn to(server: &Server) -> Pipe {
        let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, server.port())).expect("the server");
        stream.set_nodelay(true).expect("a socket");
        stream.set_read_timeout(Some(Duration::from_secs(10))).expect("a socket");
        Pipe { stream: BufReader::with_capacity(1 << 16, stream), line: Vec::new() }
    }

    /// Sends the next `count` batches, each when the one before is answered.
    pub fn send(&mut self, batches: &mut Batches, count: usize) {
        for _ in 0..count {
            let batch = &batches.batches[batches.next % batches.batches.len()];
            batches.next += 1;
            self.stream.get_mut().write_all(batch).expect("the server listens");
            for _ in 0..DEPTH {
                self.reply();
            }
        }
    }

    /// Passes over a reply. An error ends the measurement: it would be of something else.
    fn reply(&mut self) {
        self.line.clear();
        self.stream.read_until(b'\n', &mut self.line).expect("a reply");
        let text = String::from_utf8_lossy(&self.line).trim_end().to_owned();
        let number = || text[1..].parse::<i64>().expect("a number");
        match self.line.first() {
            Some(b'+' | b':') => {}
            Some(b'$') if number() < 0 => {}
            Some(b'$') => {
                let length = u64::try_from(number()).expect("a length") + 2;
                let copied =
                    std::io::copy(&mut (&mut self.stream).take(length), &mut std::io::sink());
                assert_eq!(copied.expect("a reply"), length);
            }
            Some(b'*') => (0..number()).for_each(|_| self.reply()),
            _ => panic!("expected a reply that is no error, found {text:?}"),
        }
    }
}

/// Nanoseconds of CPU that a process has had, all threads together, once it rests.
pub fn cpu_ns(pid: u32) -> u64 {
    let read = || -> u64 {
        let tasks =
            std::fs::read_dir(format!("/proc/{pid}/task")).expect("linux, and a process that runs");
        let first = |task: std::fs::DirEntry| -> Option<u64> {
            std::fs::read_to_string(task.path().join("schedstat"))
                .ok()?
                .split(' ')
                .next()?
                .parse()
                .ok()
        };
        tasks.filter_map(|task| first(task.ok()?)).sum()
    };
    // A process that is running has its time counted at the next tick only; one that waits has all
    // of it.
    let mut before = read();
    for _ in 0..50 {
        std::thread::sleep(Duration::from_millis(1));
        let now = read();
        let rests = now - before < 20_000;
        before = now;
        if rests {
            break;
        }
    }
    before
}
