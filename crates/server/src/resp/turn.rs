//! Answers the commands that have arrived, a bounded number per turn, so that one connection does not
//! delay the others.

use super::command::{Command, Session};
use super::fast_path::AnsweredCommands;
use super::frame::{self, LastCommand, MAX_COMMAND_BYTES, MAX_UNKNOWN_BYTES, Parsed, Words};
use super::reply::Replies;
use super::transaction::Transaction;
use crate::auth::May;
use crate::observe::metrics::Refusal;
use crate::protocol::Protocol;

/// Bytes of answers after which a turn ends, so that they are written.
pub(crate) const MAX_ANSWERS_BYTES: usize = 64 << 10;
/// Commands per turn.
pub(crate) const TURN: usize = 64;

/// The result of one turn.
pub(crate) struct TurnResult {
    /// Bytes that the answered commands took.
    pub(crate) used: usize,
    /// Whether another complete command may be there.
    pub(crate) more: bool,
}

/// Capacity for words that a connection keeps between turns: a turn of commands of six words.
const MAX_KEPT_WORDS: usize = TURN * 6;

/// Answers one turn of complete commands at the front of `bytes`, or of a running transaction.
pub(crate) async fn answer_turn(
    bytes: &[u8],
    session: &mut Session,
    out: &mut Replies,
) -> TurnResult {
    match session.transaction {
        Transaction::None => answer_commands(bytes, session, out).await,
        Transaction::Open(_) => session.queue_turn(bytes, out).await,
        Transaction::Running(..) => session.run_turn(out).await,
    }
}

/// Answers commands outside a transaction, up to a `MULTI`.
pub(crate) async fn answer_commands(
    bytes: &[u8],
    session: &mut Session,
    out: &mut Replies,
) -> TurnResult {
    let fast = session.answer_fast(bytes, TURN, out);
    if fast.bytes == bytes.len() || fast.commands == TURN {
        return TurnResult { used: fast.bytes, more: fast.bytes < bytes.len() };
    }
    let mut words = emptied(std::mem::take(&mut session.words));
    let mut group = Group { ends: std::mem::take(&mut session.ends), ..Group::default() };
    let turn = answer_some(bytes, fast, (&mut words, &mut group), session, out).await;
    session.ends = group.ends;
    if words.capacity() <= MAX_KEPT_WORDS {
        session.words = emptied(words);
    }
    turn
}

/// The same allocation for words that borrow from other bytes.
fn emptied<'a>(mut words: Words<'_>) -> Words<'a> {
    words.clear();
    words.into_iter().map(|_| &[][..]).collect()
}

/// Answers the commands behind those that are `done`, by the general path.
async fn answer_some<'a>(
    bytes: &'a [u8],
    done: AnsweredCommands,
    (words, group): (&mut Words<'a>, &mut Group<'a>),
    session: &mut Session,
    out: &mut Replies,
) -> TurnResult {
    let AnsweredCommands { bytes: mut used, commands: mut answered } = done;
    while answered < TURN {
        // Before authentication, the size limit of a command depends on the command before it.
        let unknown = session.may == May::Nothing;
        let (most, count) =
            if unknown { (MAX_UNKNOWN_BYTES, 1) } else { (MAX_COMMAND_BYTES, TURN) };
        words.clear();
        group.read(&bytes[used..], words, &mut session.known, most, count);
        // Commands that were already answered in a batch with one before them.
        let mut ahead = 0;
        for (at, command) in group.each(words).enumerate() {
            if ahead > 0 {
                (ahead, used, answered) = (ahead - 1, used + command.bytes, answered + 1);
                continue;
            }
            if session.has_to_pause(out) {
                break;
            }
            session.begun = None;
            let rest = group.each(words).skip(at).take_while(|_| at + 1 < group.commands);
            let checks: Vec<_> =
                rest.map_while(|command| session.batchable(command.words)).collect();
            if checks.len() > 1 {
                session.answer_all(&checks, out).await;
                ahead = checks.len() - 1;
            } else {
                session.answer(command.words, out).await;
            }
            used += command.bytes;
            answered += 1;
        }
        if session.has_to_pause(out) {
            break;
        }
        let taken = match group.behind.take() {
            None => {
                let fast = session.answer_fast(&bytes[used..], TURN.saturating_sub(answered), out);
                (used, answered) = (used + fast.bytes, answered + fast.commands);
                continue;
            }
            Some(Ok(Parsed::Line(line, taken))) => match frame::split(line) {
                Ok(words) => {
                    session.begun = None;
                    session.answer(&words.iter().map(Vec::as_slice).collect::<Vec<_>>(), out).await;
                    answered += 1;
                    Ok(taken)
                }
                Err(broken) => Err(broken),
            },
            Some(Ok(_)) => return TurnResult { used, more: false },
            Some(Err(broken)) => Err(broken),
        };
        match taken {
            Ok(taken) => used += taken,
            Err(broken) => {
                session.break_off(&broken, out);
                used = bytes.len();
            }
        }
    }
    TurnResult { used, more: used < bytes.len() }
}

impl Session {
    /// Whether the turn ends before the next command.
    fn has_to_pause(&self, out: &Replies) -> bool {
        self.closing || self.is_queueing() || out.bytes.len() > MAX_ANSWERS_BYTES
    }

    /// Answers bytes that are not a command with an error, and closes the connection.
    pub(crate) fn break_off(&mut self, broken: &frame::FrameError, out: &mut Replies) {
        if *broken == frame::FrameError::Http {
            // Any web page can make a browser send this.
            let observer = self.engine.observer();
            observer.metrics().refused(Protocol::Resp, Refusal::Browser);
            observer.foreign(
                Protocol::Resp,
                &"HTTP where a command was expected: this is the RESP listener",
            );
        }
        out.error(&format!("ERR {broken}"));
        self.closing = true;
    }
}

/// Commands that were parsed together.
#[derive(Default)]
struct Group<'a> {
    commands: usize,
    ends: Vec<CommandEnd>,
    /// The item behind them, if it is not an array command.
    behind: Option<Result<Parsed<'a>, frame::FrameError>>,
}

/// The end of a command: the index behind its last word, and its length in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CommandEnd {
    words: usize,
    bytes: usize,
}

impl<'a> Group<'a> {
    /// Parses up to `count` commands at the front of `bytes`; `known` becomes the last of them.
    fn read(
        &mut self,
        bytes: &'a [u8],
        words: &mut Words<'a>,
        known: &mut LastCommand,
        most: usize,
        count: usize,
    ) {
        let mut at = 0;
        (self.commands, self.behind) = (0, None);
        self.ends.clear();
        for _ in 0..count {
            let (rest, first) = (&bytes[at..], words.len());
            let taken = match frame::next(rest, words, most) {
                Ok(Parsed::Command(taken)) => taken,
                other => {
                    self.behind = Some(other);
                    return;
                }
            };
            known.remember(rest, taken, &words[first..]);
            self.ends.push(CommandEnd { words: words.len(), bytes: taken });
            at += taken;
            self.commands += 1;
        }
    }

    fn each<'b>(&'b self, words: &'b [&'a [u8]]) -> impl Iterator<Item = Command<'b, 'a>> {
        let mut from = 0;
        self.ends.iter().map(move |end| {
            let own = &words[from..end.words];
            from = end.words;
            Command { words: own, bytes: end.bytes }
        })
    }
}

/// For tests: answers one command at a time and forgets the one before, so that each takes the
/// general path. Returns the bytes of an unfinished command.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) async fn answer_one_by_one<'a>(
    mut bytes: &'a [u8],
    session: &mut Session,
    out: &mut Replies,
) -> &'a [u8] {
    while !session.closing && !bytes.is_empty() {
        let taken = match frame::next(bytes, &mut Words::new(), MAX_COMMAND_BYTES) {
            Ok(Parsed::Command(taken) | Parsed::Line(_, taken)) => taken,
            Ok(Parsed::Unfinished) => break,
            Err(_) => bytes.len(),
        };
        session.known.forget();
        let turn = answer_turn(&bytes[..taken], session, out).await;
        assert_eq!(turn.used, taken, "a complete command");
        if let Transaction::Running(queued, _) = &mut session.transaction {
            let queued = std::mem::take(queued);
            session.transaction = Transaction::None;
            assert!(
                Box::pin(answer_one_by_one(&queued, session, out)).await.is_empty(),
                "complete commands"
            );
        }
        bytes = &bytes[taken..];
    }
    bytes
}
