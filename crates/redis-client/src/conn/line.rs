//! The line itself: what waits to be sent, and who waits for what.

use std::collections::VecDeque;
use std::mem;
use std::task::Waker;

use tokio::time::Instant;

use super::super::outcome::Failure;
use super::super::resp::Value;

/// What a call got.
#[derive(Debug)]
pub(in super::super) enum Reply {
    /// A value.
    Value(Value),
    /// The server answered with an error, over the connection of this number.
    Error { text: String, epoch: u64 },
    /// There is no answer.
    Failed { failure: Failure, stage: Stage },
}

/// How far a call came that was not answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum Stage {
    /// It was not taken: there is no connection, or no room.
    Refused,
    /// It was waiting to be sent. The server has never heard of it.
    Queued,
    /// A byte of it, at least, was given to the socket.
    Begun,
}

/// What a command expects.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Shape {
    /// How many replies it gets; the caller is given the last.
    pub(in super::super) replies: u8,
    /// Whether the reply may be large.
    pub(in super::super) large: bool,
}

impl Shape {
    pub(in super::super) const SCRIPT: Shape = Shape { replies: 1, large: false };
    pub(in super::super) const COMMAND: Shape = Shape { replies: 1, large: true };
}

/// Everybody who waits, in order.
pub(super) struct Line {
    pub(super) state: State,
    /// Commands that have not been given to the socket.
    pub(super) bytes: Vec<u8>,
    /// Whose commands those are.
    pub(super) queued: VecDeque<Queued>,
    /// How many of them were left by their callers.
    pub(super) cancelled: usize,
    pub(super) places: Vec<Place>,
    pub(super) free: Vec<u32>,
    /// Places whose command has not been answered.
    pub(super) waiting: usize,
    /// Wakes the driver, when it has nothing to do.
    pub(super) driver: Option<Waker>,
    /// Somebody has asked since the last attempt to connect.
    pub(super) demand: bool,
    /// Counts the connections that were made, so that what is said of one does not hit the next.
    pub(super) epoch: u64,
    /// When the last one was.
    pub(super) since: Instant,
}

pub(super) enum State {
    /// There is no driver; the first caller starts it.
    Idle,
    /// The first attempt, or the first after a break. Worth waiting for.
    Connecting,
    Up,
    /// The server is the wrong one. What was sent is still answered; everybody else waits for the
    /// next connection.
    Retiring,
    /// The last attempt failed. Callers are told at once; the driver tries on.
    Down(Failure),
    Closed,
}

/// A command in the buffer.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Queued {
    pub(in super::super) place: u32,
    pub(in super::super) len: usize,
    pub(in super::super) shape: Shape,
}

pub(super) enum Place {
    Free,
    /// The command is in the buffer.
    Queued(Waker),
    /// The command was given to the socket, or is just being.
    Sent(Waker),
    /// The caller has gone; the command is in the buffer and must not be sent.
    Cancelled,
    /// The caller has gone; the reply will still come.
    Left,
    Done(Reply),
}

impl Line {
    pub(super) fn new() -> Self {
        Line {
            state: State::Idle,
            bytes: Vec::new(),
            queued: VecDeque::new(),
            cancelled: 0,
            places: Vec::new(),
            free: Vec::new(),
            waiting: 0,
            driver: None,
            demand: false,
            epoch: 0,
            since: Instant::now(),
        }
    }

    /// Tells everybody who waits that there will be no reply. Those who must be woken are returned.
    pub(super) fn fail_all(&mut self, state: State, failure: &Failure) -> Vec<Waker> {
        self.state = state;
        self.bytes.clear();
        self.queued.clear();
        self.cancelled = 0;
        self.waiting = 0;
        let mut woken = Vec::new();
        for (index, place) in self.places.iter_mut().enumerate() {
            let (waker, stage) = match mem::replace(place, Place::Free) {
                Place::Queued(waker) => (waker, Stage::Queued),
                Place::Sent(waker) => (waker, Stage::Begun),
                Place::Cancelled | Place::Left => {
                    self.free.push(u32::try_from(index).expect("places are numbered by u32"));
                    continue;
                }
                other @ (Place::Done(_) | Place::Free) => {
                    *place = other;
                    continue;
                }
            };
            *place = Place::Done(Reply::Failed { failure: failure.clone(), stage });
            woken.push(waker);
        }
        woken
    }

    /// Takes the commands of those who left out of the buffer.
    pub(super) fn clear_cancelled(&mut self) {
        if self.cancelled == 0 {
            return;
        }
        let (mut from, mut to) = (0, 0);
        let Line { bytes, queued, places, free, waiting, .. } = self;
        queued.retain(|command| {
            let range = from..from + command.len;
            from = range.end;
            let place = &mut places[command.place as usize];
            if matches!(place, Place::Cancelled) {
                *place = Place::Free;
                free.push(command.place);
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
