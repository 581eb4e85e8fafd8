//! The queue of a connection: commands to send, and an entry for each call that waits for a reply.

use std::collections::VecDeque;
use std::mem;
use std::task::Waker;

use tokio::time::Instant;

use crate::outcome::Failure;
use crate::resp::Value;

/// The result of a call on one connection.
#[derive(Debug)]
pub(crate) enum Reply {
    /// A value.
    Value(Value),
    /// The server answered with an error, over the connection of this number.
    Error { text: String, epoch: u64 },
    /// There is no reply.
    Failed { failure: Failure, stage: Stage },
}

/// How far a call without a reply got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// It was not queued: there is no connection, or the queue is full.
    Refused,
    /// It was queued. No byte of it reached the socket.
    Queued,
    /// At least one byte of it was written to the socket.
    Begun,
}

/// The replies that a command expects.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    /// How many replies the server sends; the caller receives the last.
    pub(crate) replies: u8,
    /// Whether `max_command_reply` bounds the reply, not `max_script_reply`.
    pub(crate) large: bool,
}

impl Shape {
    pub(crate) const SCRIPT: Shape = Shape { replies: 1, large: false };
    pub(crate) const COMMAND: Shape = Shape { replies: 1, large: true };
}

/// Queued and unanswered calls, in order.
pub(super) struct CallQueue {
    pub(super) state: State,
    /// Commands that have not been written to the socket.
    pub(super) bytes: Vec<u8>,
    /// The entries of those commands.
    pub(super) queued: VecDeque<Queued>,
    /// How many of them were cancelled by their callers.
    pub(super) cancelled: usize,
    pub(super) entries: Vec<Entry>,
    pub(super) free: Vec<u32>,
    /// Entries whose command has no reply yet.
    pub(super) waiting: usize,
    /// Wakes the driver, when it has nothing to do.
    pub(super) driver: Option<Waker>,
    /// A call has arrived since the last attempt to connect.
    pub(super) demand: bool,
    /// Counts the connections made, so that an error of one does not retire the next.
    pub(super) epoch: u64,
    /// When the last one was made.
    pub(super) since: Instant,
}

pub(super) enum State {
    /// There is no driver; the first call starts it.
    Idle,
    /// The first attempt, or the first after a break. Calls wait for it.
    Connecting,
    Up,
    /// The server is the wrong one. Calls already sent are still answered; the others wait for the
    /// next connection.
    Retiring,
    /// The last attempt failed. Calls fail immediately; the driver keeps trying.
    Down(Failure),
    Closed,
}

/// A command in the buffer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Queued {
    pub(crate) entry: u32,
    pub(crate) len: usize,
    pub(crate) shape: Shape,
}

pub(super) enum Entry {
    Free,
    /// The command is in the buffer.
    Queued(Waker),
    /// The command was written to the socket, or is being written.
    Sent(Waker),
    /// The call was cancelled; its command is in the buffer and must not be sent.
    Cancelled,
    /// The call was cancelled after it was sent; its reply is still to come.
    Left,
    Done(Reply),
}

impl CallQueue {
    pub(super) fn new() -> Self {
        CallQueue {
            state: State::Idle,
            bytes: Vec::new(),
            queued: VecDeque::new(),
            cancelled: 0,
            entries: Vec::new(),
            free: Vec::new(),
            waiting: 0,
            driver: None,
            demand: false,
            epoch: 0,
            since: Instant::now(),
        }
    }

    /// Fails every waiting call. Returns the wakers of their tasks.
    pub(super) fn fail_all(&mut self, state: State, failure: &Failure) -> Vec<Waker> {
        self.state = state;
        self.bytes.clear();
        self.queued.clear();
        self.cancelled = 0;
        self.waiting = 0;
        let mut woken = Vec::new();
        for (index, entry) in self.entries.iter_mut().enumerate() {
            let (waker, stage) = match mem::replace(entry, Entry::Free) {
                Entry::Queued(waker) => (waker, Stage::Queued),
                Entry::Sent(waker) => (waker, Stage::Begun),
                Entry::Cancelled | Entry::Left => {
                    self.free.push(u32::try_from(index).expect("entries are numbered by u32"));
                    continue;
                }
                other @ (Entry::Done(_) | Entry::Free) => {
                    *entry = other;
                    continue;
                }
            };
            *entry = Entry::Done(Reply::Failed { failure: failure.clone(), stage });
            woken.push(waker);
        }
        woken
    }

    /// Removes the commands of cancelled calls from the buffer.
    pub(super) fn clear_cancelled(&mut self) {
        if self.cancelled == 0 {
            return;
        }
        let (mut from, mut to) = (0, 0);
        let CallQueue { bytes, queued, entries, free, waiting, .. } = self;
        queued.retain(|command| {
            let range = from..from + command.len;
            from = range.end;
            let entry = &mut entries[command.entry as usize];
            if matches!(entry, Entry::Cancelled) {
                *entry = Entry::Free;
                free.push(command.entry);
                *waiting -= 1;
                return false;
            }
            bytes.copy_within(range, to);
            to += command.len;
            true
        });
        bytes.truncate(to);
        self.cancelled = 0;
    }
}
