//! The RESP door: any Redis client is a client.
//!
//! One task per connection. It reads what there is, answers every complete command in it, and writes all answers at once. A client that does not read its
//! answers is not read from either; one that begins a command must end it soon.

mod alike;
mod command;
mod frame;
mod reply;
mod throttle;

use std::future::{Future, poll_fn};
use std::io;
use std::iter::repeat;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use self::alike::Answered;
use self::command::{Command, Session};
use self::frame::{Known, Next, Shape, Words};
pub use self::frame::{MAX_COMMAND_BYTES, MAX_LINE_BYTES, MAX_UNKNOWN_BYTES, MAX_WORDS};
use self::reply::Replies;
pub use crate::auth::Auth;
use crate::auth::{Guard, May};
use crate::door::room::Room;
use crate::door::{Bounds, Entrance, Visitor};
use crate::gate::{Door, Gate};
use crate::observe::metrics::Refusal;

/// Answers that may wait to be written before more is read.
const MAX_ANSWERS_BYTES: usize = 64 << 10;
/// How much is read at once: a pipeline of some two hundred commands.
const READ_BYTES: usize = 16 << 10;
/// The most room that a connection keeps when it has nothing to do.
const MAX_KEPT_BYTES: usize = 64 << 10;
/// How long after the order to stop commands are still read.
const LAST_CALL: Duration = Duration::from_secs(2);
/// How long the runtime may take to notice what has arrived.
const MOMENT: Duration = Duration::from_millis(50);
/// How long to wait at the end for the other side to have read everything.
const FAREWELL: Duration = Duration::from_millis(500);
/// Commands answered before others get their turn.
const TURN: usize = 64;

/// Bounds of the door.
#[derive(Clone, Debug)]
pub struct Settings {
    /// How long a connection may say nothing.
    pub idle: Duration,
    /// How long a command may take to arrive once it has begun, and answers to be taken.
    pub patience: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Settings { idle: Duration::from_secs(600), patience: Duration::from_secs(5) }
    }
}

/// Serves until `shutdown` says so, then answers what has arrived and returns. Without TLS, and with the bounds every door has.
///
/// # Errors
/// Never while it can accept at all: running out of files is waited out.
pub async fn serve(
    listener: TcpListener,
    gate: Gate,
    auth: Auth,
    settings: Settings,
    shutdown: watch::Receiver<bool>,
) -> io::Result<()> {
    let entrance = Entrance::new(Door::Resp, listener, None, Bounds::default(), gate.observer().clone());
    serve_at(entrance, gate, Arc::new(Guard::new(auth)), settings, shutdown).await
}

/// The same at an entrance that is there already.
///
/// # Errors
/// Never while it can accept at all: running out of files is waited out.
pub async fn serve_at(
    entrance: Entrance,
    gate: Gate,
    guard: Arc<Guard>,
    settings: Settings,
    shutdown: watch::Receiver<bool>,
) -> io::Result<()> {
    let down = shutdown.clone();
    let room = Room::open();
    let talk = move |visitor: Visitor| {
        let Visitor { stream, peer, number, place } = visitor;
        let number = i64::try_from(number).unwrap_or(i64::MAX);
        let session = Session::new(gate.clone(), Arc::clone(&guard), peer.ip(), number);
        let (settings, down, observer) = (settings.clone(), down.clone(), gate.observer().clone());
        let talk = async move {
            let _place = place;
            let ended = converse(stream, session, settings, down).await;
            if ended.is_err_and(|error| error.kind() == io::ErrorKind::TimedOut) {
                observer.metrics().refused(Door::Resp, Refusal::Slow);
            }
        };
        let room = room.clone();
        async move { room.hold(talk).await }
    };
    entrance.receive(shutdown, talk).await
}

/// One connection, to its end.
async fn converse(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    mut session: Session,
    settings: Settings,
    mut shutdown: watch::Receiver<bool>,
) -> io::Result<()> {
    let mut bytes: Vec<u8> = Vec::with_capacity(READ_BYTES);
    let mut out = Replies::default();
    let mut down = false;
    let order = shutdown.clone();
    let mut stop = pin!(shutdown.wait_for(|down| *down));
    // One timer for the whole conversation: setting one for every wait would cost more than a decision. When it rings, it is looked
    // at whether anything was heard since it was set.
    let mut bell = pin!(sleep(settings.idle));
    let mut heard = false;
    // Whether the order to stop and the timer know whom to wake.
    let mut told = false;
    let mut last_call = None;
    loop {
        let turn = answer_turn(&bytes, &mut session, &mut out).await;
        bytes.drain(..turn.used);
        if bytes.is_empty() && bytes.capacity() > MAX_KEPT_BYTES {
            bytes.shrink_to(READ_BYTES);
        }
        if !out.bytes.is_empty() {
            within(settings.patience, stream.write_all(&out.bytes)).await?;
            out.bytes.clear();
            if out.bytes.capacity() > MAX_KEPT_BYTES {
                out.bytes.shrink_to(MAX_KEPT_BYTES);
            }
        }
        if session.closing {
            return leave(&mut stream).await;
        }
        if turn.more {
            tokio::task::yield_now().await;
            continue;
        }
        if down && bytes.is_empty() {
            // What had been sent before the order to stop is answered, too. Who goes on sending must not keep the door open.
            let last = *last_call.get_or_insert_with(|| Instant::now() + LAST_CALL);
            let more = if Instant::now() < last { now(&mut stream, &mut bytes).await? } else { 0 };
            if more == 0 {
                return leave(&mut stream).await;
            }
            continue;
        }
        let begun = !bytes.is_empty();
        if begun {
            // Whoever begins a command ends it soon, however many pieces he sends it in.
            let end = *session.begun.get_or_insert_with(|| Instant::now() + settings.patience);
            tokio::select! {
                biased;
                read = timeout_at(end, stream.read_buf(&mut bytes)) => match read {
                    Ok(read) => if read? == 0 { return Ok(()) },
                    Err(_) => return Err(io::ErrorKind::TimedOut.into()),
                },
                _ = &mut stop, if !down => down = true,
            }
            continue;
        }
        session.begun = None;
        let mut read = pin!(stream.read_buf(&mut bytes));
        let mut is_first = true;
        let event = poll_fn(|context| {
            if let Poll::Ready(read) = read.as_mut().poll(context) {
                return Poll::Ready(Event::Read(read));
            }
            // The others have been told whom to wake. To ask them again after every command would cost as much as a decision, so it is only looked at
            // whether one of them has called already; if one does so from now on, this is asked again.
            let has_called = bell.is_elapsed() || (!down && order.has_changed().unwrap_or(true));
            if std::mem::take(&mut is_first) && told && !has_called {
                return Poll::Pending;
            }
            told = true;
            if !down && stop.as_mut().poll(context).is_ready() {
                return Poll::Ready(Event::Stop);
            }
            bell.as_mut().poll(context).map(|()| Event::Bell)
        });
        match event.await {
            Event::Read(read) => {
                heard = true;
                if read? == 0 {
                    return Ok(());
                }
            }
            Event::Stop => down = true,
            Event::Bell if !heard => return Err(io::ErrorKind::TimedOut.into()),
            Event::Bell => {
                (heard, told) = (false, false);
                bell.as_mut().reset(Instant::now() + settings.idle);
            }
        }
    }
}

/// What a connection waits for between two commands.
enum Event {
    Read(io::Result<usize>),
    Stop,
    Bell,
}

/// Says goodbye. Closing while something unread has arrived would take back answers that are still under way; so what comes is read and
/// forgotten until the other side has closed, for a moment at most.
async fn leave(stream: &mut (impl AsyncRead + AsyncWrite + Unpin)) -> io::Result<()> {
    stream.shutdown().await?;
    let mut rest = [0; 4096];
    let drain = async { while matches!(stream.read(&mut rest).await, Ok(1..)) {} };
    let _ = tokio::time::timeout(FAREWELL, drain).await;
    Ok(())
}

/// Reads what has already arrived. The runtime may not have heard of it yet, so it is given a moment.
async fn now(stream: &mut (impl AsyncRead + Unpin), bytes: &mut Vec<u8>) -> io::Result<usize> {
    timeout(MOMENT, stream.read_buf(bytes)).await.unwrap_or(Ok(0))
}

async fn within<T>(patience: Duration, io: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    // Nearly always it can be done at once, and then no timer is needed.
    let mut io = pin!(io);
    if let Poll::Ready(done) = poll_fn(|context| Poll::Ready(io.as_mut().poll(context))).await {
        return done;
    }
    timeout(patience, io).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}

/// What one turn did.
struct Turn {
    /// How many bytes the answered commands took.
    used: usize,
    /// There may be another complete command.
    more: bool,
}

/// Commands that are read before the first of them is answered, so that the memory they are about can be fetched meanwhile.
const AHEAD: usize = 16;

/// The most room for words that a connection keeps between two turns: a turn of commands of six.
const MAX_KEPT_WORDS: usize = TURN * 6;

/// Answers complete commands at the front of `bytes`, one turn of them.
async fn answer_turn(bytes: &[u8], session: &mut Session, out: &mut Replies) -> Turn {
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
    // A store that is far away is asked about all that is here at once: what waits for the answers before it has no more time than they had.
    let ahead_of_all = if session.gate.is_far() { TURN } else { AHEAD };
    while answered < TURN {
        // How long a command may be depends on the one before, as long as nobody has said who he is.
        let unknown = session.may == May::Nothing;
        let (most, count) = if unknown { (MAX_UNKNOWN_BYTES, 1) } else { (MAX_COMMAND_BYTES, ahead_of_all) };
        words.clear();
        group.read(&bytes[used..], words, &mut session.known, most, count);
        let mut awaited = [None; AHEAD];
        for (awaited, command) in awaited.iter_mut().zip(group.each(words)) {
            *awaited = session.expect(&command);
        }
        let mut together = session.gate.together(group.commands);
        // Commands that were answered together with one before them.
        let mut ahead = 0;
        for (at, (command, awaited)) in group.each(words).zip(awaited.iter().chain(repeat(&None))).enumerate() {
            if ahead > 0 {
                (ahead, used, answered) = (ahead - 1, used + command.bytes, answered + 1);
                continue;
            }
            if session.closing || out.bytes.len() > MAX_ANSWERS_BYTES {
                break;
            }
            session.begun = None;
            let at_once = match (awaited, &mut together) {
                (Some(awaited), Some(together)) => session.answer_at_once(&command, awaited, together, out),
                _ => false,
            };
            if !at_once {
                // Whoever is answered in another way may ask for these numbers.
                together.iter_mut().for_each(|together| session.gate.count(together));
                let rest = group.each(words).skip(at).take_while(|_| at + 1 < group.commands);
                let questions: Vec<_> = rest.map_while(|command| session.question(command.words)).collect();
                if questions.len() > 1 {
                    session.answer_all(&questions, out).await;
                    ahead = questions.len() - 1;
                } else {
                    session.answer(command.words, out).await;
                }
            }
            used += command.bytes;
            answered += 1;
        }
        together.iter_mut().for_each(|together| session.gate.count(together));
        if session.closing || out.bytes.len() > MAX_ANSWERS_BYTES {
            break;
        }
        let taken = match group.behind.take() {
            None => {
                let alike = session.answer_alike(&bytes[used..], TURN.saturating_sub(answered), out);
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
                out.error(&format!("ERR {broken}"));
                session.closing = true;
                used = bytes.len();
            }
        }
    }
    Turn { used, more: used < bytes.len() }
}

/// A few commands that were read one after the other.
#[derive(Default)]
struct Group<'a> {
    commands: usize,
    ends: Vec<End>,
    /// What comes behind them, if it is not a command of the same kind.
    behind: Option<Result<Next<'a>, frame::Broken>>,
}

/// Where the words of a command end, and what else is to be known of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct End {
    words: usize,
    bytes: usize,
    shape: Shape,
}

impl<'a> Group<'a> {
    /// Reads up to `count` commands from the front of `bytes`. `known` is the one before them.
    fn read(&mut self, bytes: &'a [u8], words: &mut Words<'a>, known: &mut Known, most: usize, count: usize) {
        let mut at = 0;
        (self.commands, self.behind) = (0, None);
        self.ends.clear();
        for _ in 0..count {
            let (rest, first) = (&bytes[at..], words.len());
            let (taken, shape) = match known.again(rest, words) {
                Some(again) => again,
                None => match frame::next(rest, words, most) {
                    Ok(Next::Command(taken)) => (taken, known.remember(rest, taken, &words[first..])),
                    other => {
                        self.behind = Some(other);
                        return;
                    }
                },
            };
            self.ends.push(End { words: words.len(), bytes: taken, shape });
            at += taken;
            self.commands += 1;
        }
    }

    fn each<'b>(&'b self, words: &'b [&'a [u8]]) -> impl Iterator<Item = Command<'b, 'a>> {
        let mut from = 0;
        self.ends.iter().map(move |end| {
            let own = &words[from..end.words];
            from = end.words;
            Command { words: own, bytes: end.bytes, shape: end.shape }
        })
    }
}

/// For fuzzing: a conversation over any stream, with everything allowed.
#[cfg(feature = "fuzzing")]
pub(crate) async fn converse_in_memory(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    gate: Gate,
    stopped: watch::Receiver<bool>,
) -> io::Result<()> {
    let (guard, peer) = (Arc::new(Guard::new(Auth::default())), std::net::IpAddr::from([127, 0, 0, 1]));
    converse(stream, Session::new(gate, guard, peer, 1), Settings::default(), stopped).await
}

/// For tests: what is answered to all of this, one command at a time, with nothing known of the one before, so that each goes the way that all can go.
/// What is left is the beginning of a command.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) async fn answer_one_by_one<'a>(mut bytes: &'a [u8], session: &mut Session, out: &mut Replies) -> &'a [u8] {
    while !session.closing && !bytes.is_empty() {
        let taken = match frame::next(bytes, &mut Words::new(), MAX_COMMAND_BYTES) {
            Ok(Next::Command(taken) | Next::Line(_, taken)) => taken,
            Ok(Next::Unfinished) => break,
            Err(_) => bytes.len(),
        };
        session.known.forget();
        let turn = answer_turn(&bytes[..taken], session, out).await;
        assert_eq!(turn.used, taken, "it is a whole command");
        bytes = &bytes[taken..];
    }
    bytes
}

/// For fuzzing: the same at the beginning of a conversation.
#[cfg(feature = "fuzzing")]
pub(crate) async fn answers_one_by_one(stream: &[u8], gate: Gate) -> Vec<u8> {
    let (guard, peer) = (Arc::new(Guard::new(Auth::default())), std::net::IpAddr::from([127, 0, 0, 1]));
    let (mut session, mut out) = (Session::new(gate, guard, peer, 1), Replies::default());
    answer_one_by_one(stream, &mut session, &mut out).await;
    out.bytes
}

/// For fuzzing: how many commands of this stream have an answer. What is no command has one, too, and is the last, as is `QUIT`.
#[cfg(feature = "fuzzing")]
pub(crate) fn count_commands(stream: &[u8]) -> usize {
    let (mut at, mut count, mut words) = (0, 0, Words::new());
    loop {
        words.clear();
        let (asked, taken) = match frame::next(&stream[at..], &mut words, MAX_COMMAND_BYTES) {
            Ok(Next::Command(taken)) => (words.first().map(|name| name.to_vec()), taken),
            Ok(Next::Line(line, taken)) => match frame::split(line) {
                Ok(words) => (words.into_iter().next(), taken),
                Err(_) => return count + 1,
            },
            Ok(Next::Unfinished) => return count,
            Err(_) => return count + 1,
        };
        at += taken;
        count += usize::from(asked.is_some());
        if asked.is_some_and(|name| name.eq_ignore_ascii_case(b"QUIT")) {
            return count;
        }
    }
}
