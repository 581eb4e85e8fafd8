//! Bytes into answers, a bounded number of commands at a time: what has arrived is read in groups,
//! and each group is answered the fastest way it can be.

use super::command::{Command, Session};
use super::fast_path::Answered;
use super::frame::{self, Known, MAX_COMMAND_BYTES, MAX_UNKNOWN_BYTES, Next, Words};
use super::reply::Replies;
use super::transaction::Transaction;
use crate::auth::May;
use crate::observe::metrics::Refusal;
use crate::protocol::Protocol;

/// Answers that may wait to be written before more is read.
pub(crate) const MAX_ANSWERS_BYTES: usize = 64 << 10;
/// Commands answered before others get their turn.
pub(crate) const TURN: usize = 64;

/// What one turn did.
pub(crate) struct Turn {
    /// How many bytes the answered commands took.
    pub(crate) used: usize,
    /// There may be another complete command.
    pub(crate) more: bool,
}

/// The most room for words that a connection keeps between two turns: a turn of commands of six.
const MAX_KEPT_WORDS: usize = TURN * 6;

/// Answers complete commands at the front of `bytes`, or of a transaction that runs, one turn of
/// them.
pub(crate) async fn answer_turn(bytes: &[u8], session: &mut Session, out: &mut Replies) -> Turn {
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
) -> Turn {
    let alike = session.answer_alike(bytes, TURN, out);
    if alike.bytes == bytes.len() || alike.commands == TURN {
        return Turn { used: alike.bytes, more: alike.bytes < bytes.len() };
    }
    let mut words = emptied(std::mem::take(&mut session.words));
    let mut group = Group { ends: std::mem::take(&mut session.ends), ..Group::default() };
    let turn = answer_some(bytes, alike, (&mut words, &mut group), session, out).await;
    session.ends = group.ends;
    if words.capacity() <= MAX_KEPT_WORDS {
        session.words = emptied(words);
    }
    turn
}

/// The same room for words of other bytes.
fn emptied<'a>(mut words: Words<'_>) -> Words<'a> {
    words.clear();
    words.into_iter().map(|_| &[][..]).collect()
}

/// The rest of them, behind those that were `done`.
async fn answer_some<'a>(
    bytes: &'a [u8],
    done: Answered,
    (words, group): (&mut Words<'a>, &mut Group<'a>),
    session: &mut Session,
    out: &mut Replies,
) -> Turn {
    let Answered { bytes: mut used, commands: mut answered } = done;
    while answered < TURN {
        // How long a command may be depends on the one before, as long as nobody has said who he
        // is.
        let unknown = session.may == May::Nothing;
        let (most, count) =
            if unknown { (MAX_UNKNOWN_BYTES, 1) } else { (MAX_COMMAND_BYTES, TURN) };
        words.clear();
        group.read(&bytes[used..], words, &mut session.known, most, count);
        // Commands that were answered together with one before them.
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
            let questions: Vec<_> =
                rest.map_while(|command| session.question(command.words)).collect();
            if questions.len() > 1 {
                session.answer_all(&questions, out).await;
                ahead = questions.len() - 1;
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
                let alike =
                    session.answer_alike(&bytes[used..], TURN.saturating_sub(answered), out);
                (used, answered) = (used + alike.bytes, answered + alike.commands);
                continue;
            }
            Some(Ok(Next::Line(line, taken))) => match frame::split(line) {
                Ok(words) => {
                    session.begun = None;
                    session.answer(&words.iter().map(Vec::as_slice).collect::<Vec<_>>(), out).await;
                    answered += 1;
                    Ok(taken)
                }
                Err(broken) => Err(broken),
            },
            Some(Ok(_)) => return Turn { used, more: false },
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
    Turn { used, more: used < bytes.len() }
}

impl Session {
    /// The commands behind this one are not answered in the same turn.
    fn has_to_pause(&self, out: &Replies) -> bool {
        self.closing || self.is_queueing() || out.bytes.len() > MAX_ANSWERS_BYTES
    }

    /// Answers bytes that are no command, and ends the connection.
    pub(crate) fn break_off(&mut self, broken: &frame::Broken, out: &mut Replies) {
        if *broken == frame::Broken::Http {
            // A browser can be made to send this by any web page.
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

/// A few commands that were read one after the other.
#[derive(Default)]
struct Group<'a> {
    commands: usize,
    ends: Vec<End>,
    /// What comes behind them, if it is not a command of the same kind.
    behind: Option<Result<Next<'a>, frame::Broken>>,
}

/// Where the words of a command end, and how many bytes it takes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct End {
    words: usize,
    bytes: usize,
}

impl<'a> Group<'a> {
    /// Reads up to `count` commands from the front of `bytes`. `known` is the one before them.
    fn read(
        &mut self,
        bytes: &'a [u8],
        words: &mut Words<'a>,
        known: &mut Known,
        most: usize,
        count: usize,
    ) {
        let mut at = 0;
        (self.commands, self.behind) = (0, None);
        self.ends.clear();
        for _ in 0..count {
            let (rest, first) = (&bytes[at..], words.len());
            let taken = match frame::next(rest, words, most) {
                Ok(Next::Command(taken)) => taken,
                other => {
                    self.behind = Some(other);
                    return;
                }
            };
            known.remember(rest, taken, &words[first..]);
            self.ends.push(End { words: words.len(), bytes: taken });
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

/// For tests: what is answered to all of this, one command at a time, with nothing known of the one
/// before, so that each goes the way that all can go. What is left is the beginning of a command.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) async fn answer_one_by_one<'a>(
    mut bytes: &'a [u8],
    session: &mut Session,
    out: &mut Replies,
) -> &'a [u8] {
    while !session.closing && !bytes.is_empty() {
        let taken = match frame::next(bytes, &mut Words::new(), MAX_COMMAND_BYTES) {
            Ok(Next::Command(taken) | Next::Line(_, taken)) => taken,
            Ok(Next::Unfinished) => break,
            Err(_) => bytes.len(),
        };
        session.known.forget();
        let turn = answer_turn(&bytes[..taken], session, out).await;
        assert_eq!(turn.used, taken, "it is a whole command");
        if let Transaction::Running(queued, _) = &mut session.transaction {
            let queued = std::mem::take(queued);
            session.transaction = Transaction::None;
            assert!(
                Box::pin(answer_one_by_one(&queued, session, out)).await.is_empty(),
                "all of them are whole"
            );
        }
        bytes = &bytes[taken..];
    }
    bytes
}
