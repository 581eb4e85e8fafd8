//! Carrying the bytes of one connection, each way.
//!
//! A way has two threads: one reads and notes when, the other waits, spoils and writes. With one
//! for both, a piece that comes while another is being delayed would be late twice.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use super::{Connection, Fault, Shared, Way, connect};
use tidegate_trace::Random;

/// The longest piece, and how many may wait; a sender that is faster has to wait, as on any line.
const PIECE: usize = 16 << 10;
const WAITING: usize = 64;

/// Some bytes that were read in one piece, and when.
struct Piece {
    came: Instant,
    bytes: Vec<u8>,
}

/// Carries everything until either side or the proxy ends.
pub(super) fn run(shared: &Shared, connection: &Connection, mut random: Random) {
    let _ = connection.client.set_nodelay(true);
    if let Ok(server) = connect(shared.target) {
        let server = connection.server.get_or_init(|| server);
        let (for_requests, for_replies) =
            (Random::of_stream(random.next(), 0), Random::of_stream(random.next(), 1));
        let client = &connection.client;
        thread::scope(|scope| {
            // It may have been cut before there was a server to cut; then all four find the end in
            // once.
            if connection.has_ended() {
                connection.cut();
            }
            let (sender, requests) = sync_channel(WAITING);
            scope.spawn(move || read(client, &sender));
            let (sender, replies) = sync_channel(WAITING);
            scope.spawn(move || read(server, &sender));
            scope.spawn(move || {
                Pump { shared, connection, way: Way::Request, to: server }
                    .write(&requests, for_requests)
            });
            Pump { shared, connection, way: Way::Reply, to: client }.write(&replies, for_replies);
        });
    }
    connection.cut();
}

fn read(mut from: &TcpStream, pieces: &SyncSender<Piece>) {
    let mut buffer = vec![0; PIECE];
    while let Ok(length @ 1..) = from.read(&mut buffer) {
        let piece = Piece { came: Instant::now(), bytes: buffer[..length].to_vec() };
        if pieces.send(piece).is_err() {
            break;
        }
    }
}

struct Pump<'c> {
    shared: &'c Shared,
    connection: &'c Connection,
    way: Way,
    to: &'c TcpStream,
}

impl Pump<'_> {
    fn write(&self, pieces: &Receiver<Piece>, mut random: Random) {
        for piece in pieces {
            let fault = self.shared.fault(self.way, &mut random, self.connection);
            if !fault.is_some_and(|fault| self.deliver(piece, fault, &mut random)) {
                self.end();
                return;
            }
        }
        // The sender has nothing more to say. The receiver hears that, and may still answer.
        let _ = self.to.shutdown(Shutdown::Write);
        if self.way == Way::Reply {
            self.end();
        }
    }

    /// Closes the connection, and wakes the threads that wait for it.
    fn end(&self) {
        self.connection.cut();
        self.shared.wake();
    }

    /// Whether the connection is to go on.
    fn deliver(&self, mut piece: Piece, fault: Fault, random: &mut Random) -> bool {
        match fault {
            Fault::Pass | Fault::StallRequests | Fault::StallReplies | Fault::Refuse => {
                self.put(&piece.bytes)
            }
            Fault::Delay { request, reply, jitter } => {
                let delay = if self.way == Way::Request { request } else { reply };
                self.wait(piece.came + delay + up_to(jitter, random)) && self.put(&piece.bytes)
            }
            Fault::SwallowReplies => true,
            Fault::CutBeforeRequest | Fault::CutAfterRequest => false,
            Fault::CutInReply { bytes } => {
                self.put(&piece.bytes[..bytes.min(piece.bytes.len())]);
                false
            }
            Fault::Drip { bytes, pause } => piece
                .bytes
                .chunks(bytes.max(1))
                .all(|crumb| self.put(crumb) && self.wait(Instant::now() + pause)),
            Fault::Garbage => {
                piece.bytes.fill_with(|| random.next().to_le_bytes()[0]);
                // No reply begins with a byte that is not ASCII.
                piece.bytes[0] |= 0x80;
                self.put(&piece.bytes)
            }
        }
    }

    fn put(&self, bytes: &[u8]) -> bool {
        // Counted first: a test that has read the bytes may look at the count immediately.
        self.counter().fetch_add(bytes.len() as u64, Ordering::SeqCst);
        (&mut &*self.to).write_all(bytes).is_ok()
    }

    fn counter(&self) -> &AtomicU64 {
        match self.way {
            Way::Request => &self.shared.counters.request_bytes,
            Way::Reply => &self.shared.counters.reply_bytes,
        }
    }

    fn wait(&self, then: Instant) -> bool {
        self.shared.wait_until(then, self.connection)
    }
}

/// From nothing to all of it, to the microsecond.
fn up_to(most: Duration, random: &mut Random) -> Duration {
    let most_us = u64::try_from(most.as_micros()).unwrap_or(u64::MAX - 1);
    Duration::from_micros(random.below(most_us + 1))
}
