//! `MULTI` and `EXEC`, which clients wrap around a pipeline by default.
//!
//! Commands are queued as the bytes they came in. `EXEC` answers them as if they had arrived then,
//! in order, by the same code as any pipeline. They are not isolated: commands of other connections
//! can be decided between them.

use super::arity;
use super::command::Session;
use super::frame::{self, MAX_COMMAND_BYTES, Parsed, Words};
use super::reply::Replies;
use super::turn::{MAX_ANSWERS_BYTES, TURN, TurnResult, answer_commands};

/// The most commands of a transaction.
pub const MAX_QUEUED_COMMANDS: usize = 10_000;
/// The largest transaction, in bytes.
pub const MAX_QUEUED_BYTES: usize = 1 << 20;

/// The state of a transaction.
#[derive(Debug, Default)]
pub(crate) enum Transaction {
    /// No `MULTI` was sent.
    #[default]
    None,
    /// Commands are queued.
    Open(Queue),
    /// `EXEC` was sent. The queue, and how many bytes of it are answered.
    Running(Vec<u8>, usize),
}

impl Transaction {
    /// The memory that its queue takes, in bytes.
    pub(crate) fn capacity(&self) -> usize {
        match self {
            Transaction::None => 0,
            Transaction::Open(queue) => queue.bytes.capacity(),
            Transaction::Running(queued, _) => queued.capacity(),
        }
    }
}

/// The commands since `MULTI`.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    bytes: Vec<u8>,
    commands: usize,
    /// A command could not be queued, so `EXEC` runs none.
    is_aborted: bool,
}

impl Session {
    pub(crate) fn is_queueing(&self) -> bool {
        matches!(self.transaction, Transaction::Open(_))
    }

    /// Answers `MULTI`, `EXEC`, `DISCARD`, `WATCH` and `UNWATCH`.
    pub(crate) fn transact(&mut self, name: &[u8], out: &mut Replies) {
        match (name, std::mem::take(&mut self.transaction)) {
            (b"MULTI", Transaction::Open(queue)) => {
                self.transaction = Transaction::Open(queue);
                out.error("ERR MULTI calls can not be nested");
            }
            (b"MULTI", _) => {
                self.transaction = Transaction::Open(Queue::default());
                out.simple("OK");
            }
            (b"EXEC", Transaction::Open(queue)) if queue.is_aborted => {
                out.error("EXECABORT Transaction discarded because of previous errors.");
            }
            (b"EXEC", Transaction::Open(queue)) => {
                out.array(queue.commands);
                self.transaction = Transaction::Running(queue.bytes, 0);
            }
            (b"EXEC", _) => out.error("ERR EXEC without MULTI"),
            (b"DISCARD", Transaction::Open(_)) => out.simple("OK"),
            (b"DISCARD", _) => out.error("ERR DISCARD without MULTI"),
            (b"WATCH", Transaction::Open(queue)) => {
                self.transaction = Transaction::Open(queue);
                out.error("ERR WATCH inside MULTI is not allowed");
            }
            (b"WATCH", _) => out.error(
                "ERR WATCH is not supported: there are no keys to watch, and each command checks and charges in one step",
            ),
            (_, before) => {
                self.transaction = before;
                out.simple("OK");
            }
        }
    }

    /// Queues one turn of commands at the front of `bytes`, up to the end of the transaction.
    pub(crate) async fn queue_turn(&mut self, bytes: &[u8], out: &mut Replies) -> TurnResult {
        let (mut used, mut words) = (0, Words::new());
        for _ in 0..TURN {
            if !self.is_queueing() || self.closing || out.bytes.len() > MAX_ANSWERS_BYTES {
                break;
            }
            words.clear();
            let read = match frame::next(&bytes[used..], &mut words, MAX_COMMAND_BYTES) {
                Ok(Parsed::Unfinished) => return TurnResult { used, more: false },
                Ok(Parsed::Command(taken)) => {
                    self.queue(&words, &bytes[used..used + taken], out).await;
                    Ok(taken)
                }
                Ok(Parsed::Line(line, taken)) => match frame::split(line) {
                    Ok(typed) => {
                        let typed: Words<'_> = typed.iter().map(Vec::as_slice).collect();
                        self.queue(&typed, &written(&typed), out).await;
                        Ok(taken)
                    }
                    Err(broken) => Err(broken),
                },
                Err(broken) => Err(broken),
            };
            self.begun = None;
            match read {
                Ok(taken) => used += taken,
                Err(broken) => {
                    self.break_off(&broken, out);
                    used = bytes.len();
                }
            }
        }
        TurnResult {
            used,
            more: used < bytes.len() || matches!(self.transaction, Transaction::Running(..)),
        }
    }

    /// Queues one command. Commands that end or change the transaction are answered instead.
    async fn queue(&mut self, words: &[&[u8]], command: &[u8], out: &mut Replies) {
        let Some((name, rest)) = words.split_first() else { return };
        let name = name.to_ascii_uppercase();
        let Transaction::Open(queue) = &mut self.transaction else { return };
        if let Some(problem) = arity::problem(&name, rest.len()) {
            if name == b"EXEC" {
                self.transaction = Transaction::None;
                let problem = problem.trim_start_matches("ERR ");
                return out
                    .error(&format!("EXECABORT Transaction discarded because of: {problem}"));
            }
            queue.abort();
            return out.error(&problem);
        }
        if matches!(
            name.as_slice(),
            b"MULTI" | b"EXEC" | b"DISCARD" | b"WATCH" | b"RESET" | b"QUIT"
        ) {
            return self.answer(words, out).await;
        }
        if queue.is_aborted {
            return out.simple("QUEUED");
        }
        if queue.commands == MAX_QUEUED_COMMANDS
            || queue.bytes.len() + command.len() > MAX_QUEUED_BYTES
        {
            queue.abort();
            return out.error(&format!(
                "ERR a transaction has at most {MAX_QUEUED_COMMANDS} commands and {MAX_QUEUED_BYTES} bytes: send several, or a pipeline without MULTI (redis-py: pipeline(transaction=False))"
            ));
        }
        queue.bytes.extend_from_slice(command);
        queue.commands += 1;
        out.simple("QUEUED");
    }

    /// Answers one turn of the commands of a running transaction.
    pub(crate) async fn run_turn(&mut self, out: &mut Replies) -> TurnResult {
        if let Transaction::Running(queued, done) = std::mem::take(&mut self.transaction) {
            let done = done + answer_commands(&queued[done..], self, out).await.used;
            if done < queued.len() {
                self.transaction = Transaction::Running(queued, done);
            }
        }
        TurnResult { used: 0, more: true }
    }
}

impl Queue {
    /// Drops the queue: `EXEC` will run no command.
    fn abort(&mut self) {
        *self = Queue { is_aborted: true, ..Queue::default() };
    }
}

/// A typed line as the array that a client library would send.
fn written(words: &[&[u8]]) -> Vec<u8> {
    let mut bytes = format!("*{}\r\n", words.len()).into_bytes();
    for word in words {
        bytes.extend_from_slice(format!("${}\r\n", word.len()).as_bytes());
        bytes.extend_from_slice(word);
        bytes.extend_from_slice(b"\r\n");
    }
    bytes
}
