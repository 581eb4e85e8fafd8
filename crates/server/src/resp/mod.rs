//! The RESP listener: any Redis client is a client.
//!
//! One task per connection. It reads what there is, answers every complete command in it, and
//! writes all answers at once. A client that does not read its answers is not read from either; one
//! that begins a command must end it soon.

mod alike;
mod arity;
mod command;
mod frame;
mod handshake;
mod pending;
mod reply;
mod throttle;
mod transaction;
mod turn;

use std::future::{Future, poll_fn};
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use self::command::Session;
pub use self::frame::{MAX_COMMAND_BYTES, MAX_LINE_BYTES, MAX_UNKNOWN_BYTES, MAX_WORDS};
pub use self::pending::FREE_BYTES;
use self::pending::{Budget, Pending};
use self::reply::Replies;
use self::transaction::Transaction;
pub use self::transaction::{MAX_QUEUED_BYTES, MAX_QUEUED_COMMANDS};
use self::turn::answer_turn;
#[cfg(feature = "fuzzing")]
use self::{
    frame::{Next, Words},
    turn::answer_one_by_one,
};
pub use crate::auth::Auth;
use crate::auth::{Caller, Guard};
use crate::engine::Engine;
use crate::listen::room::Room;
use crate::listen::{Bounds, Entrance, Visitor};
use crate::observe::metrics::Refusal;
use crate::protocol::Protocol;

/// How much is read at once: a pipeline of some two hundred commands.
const READ_BYTES: usize = 16 << 10;
/// The most room for answers that a connection keeps when it has nothing to do.
const MAX_KEPT_BYTES: usize = 64 << 10;
/// How long after the order to stop commands are still read.
const LAST_CALL: Duration = Duration::from_secs(2);
/// How long the runtime may take to notice what has arrived.
const MOMENT: Duration = Duration::from_millis(50);
/// How long to wait at the end for the other side to have read everything.
const FAREWELL: Duration = Duration::from_millis(500);

/// Bounds of the listener.
#[derive(Clone, Debug)]
pub struct Settings {
    /// How long a connection may say nothing.
    pub idle: Duration,
    /// How long a command may take to arrive once it has begun, and answers to be taken.
    pub patience: Duration,
    /// What all connections together may hold for unfinished commands and transactions, beyond
    /// [`FREE_BYTES`] each, in bytes.
    pub max_pending_bytes: usize,
    /// Calls of administrators (`TG.RESET` and its like) are answered here.
    pub has_admin_calls: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            idle: Duration::from_secs(600),
            patience: Duration::from_secs(5),
            max_pending_bytes: 64 << 20,
            has_admin_calls: true,
        }
    }
}

/// Serves until `shutdown` says so, then answers what has arrived and returns. Without TLS, and
/// with the bounds every listener has.
///
/// # Errors
/// Never while it can accept at all: running out of files is waited out.
pub async fn serve(
    listener: TcpListener,
    engine: Engine,
    auth: Auth,
    settings: Settings,
    shutdown: watch::Receiver<bool>,
) -> io::Result<()> {
    let entrance =
        Entrance::new(Protocol::Resp, listener, None, Bounds::default(), engine.observer().clone());
    serve_at(entrance, engine, Arc::new(Guard::new(auth)), settings, shutdown).await
}

/// The same at an entrance that is there already.
///
/// # Errors
/// Never while it can accept at all: running out of files is waited out.
pub async fn serve_at(
    entrance: Entrance,
    engine: Engine,
    guard: Arc<Guard>,
    settings: Settings,
    shutdown: watch::Receiver<bool>,
) -> io::Result<()> {
    let down = shutdown.clone();
    let room = Room::open();
    let budget = Budget::new(settings.max_pending_bytes);
    let talk = move |visitor: Visitor| {
        let Visitor { stream, peer, number, place } = visitor;
        let number = i64::try_from(number).unwrap_or(i64::MAX);
        let mut session =
            Session::new(engine.clone(), Arc::clone(&guard), Caller::at(peer.ip()), number);
        session.has_admin_calls = settings.has_admin_calls;
        let (settings, down, observer) =
            (settings.clone(), down.clone(), engine.observer().clone());
        let pending = Pending::new(budget.clone());
        let talk = async move {
            let _place = place;
            let ended = converse(stream, session, settings, pending, down).await;
            if ended.is_err_and(|error| error.kind() == io::ErrorKind::TimedOut) {
                observer.metrics().refused(Protocol::Resp, Refusal::Slow);
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
    mut pending: Pending,
    mut shutdown: watch::Receiver<bool>,
) -> io::Result<()> {
    let mut bytes: Vec<u8> = Vec::with_capacity(READ_BYTES);
    let mut out = Replies::default();
    let mut down = false;
    let order = shutdown.clone();
    let mut stop = pin!(shutdown.wait_for(|down| *down));
    // One timer for the whole conversation: setting one for every wait would cost more than a
    // decision. When it rings, it is looked at whether anything was heard since it was set.
    let mut bell = pin!(sleep(settings.idle));
    let mut heard = false;
    // Whether the order to stop and the timer know whom to wake.
    let mut told = false;
    let mut last_call = None;
    loop {
        let turn = answer_turn(&bytes, &mut session, &mut out).await;
        bytes.drain(..turn.used);
        // It has grown for one long command only.
        if bytes.is_empty() && bytes.capacity() > READ_BYTES {
            bytes.shrink_to(READ_BYTES);
        }
        if !pending.hold(bytes.capacity() + session.transaction.capacity()) {
            out.error(&format!(
                "ERR all connections together hold {} bytes of unfinished commands and transactions, and may hold no more: send smaller ones, or try again in a moment",
                pending.most()
            ));
            session.closing = true;
            session.engine.observer().metrics().refused(Protocol::Resp, Refusal::Full);
            (bytes, session.transaction) = (Vec::new(), Transaction::None);
            pending.hold(0);
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
            // What had been sent before the order to stop is answered, too. Who goes on sending
            // must not keep the listener open.
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
            // The others have been told whom to wake. To ask them again after every command would
            // cost as much as a decision, so it is only looked at whether one of them has called
            // already; if one does so from now on, this is asked again.
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

/// Says goodbye. Closing while something unread has arrived would take back answers that are still
/// under way; so what comes is read and forgotten until the other side has closed, for a moment at
/// most.
async fn leave(stream: &mut (impl AsyncRead + AsyncWrite + Unpin)) -> io::Result<()> {
    stream.shutdown().await?;
    let mut rest = [0; 4096];
    let drain = async { while matches!(stream.read(&mut rest).await, Ok(1..)) {} };
    let _ = tokio::time::timeout(FAREWELL, drain).await;
    Ok(())
}

/// Reads what has already arrived. The runtime may not have heard of it yet, so it is given a
/// moment.
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

/// For fuzzing: a conversation over any stream, with everything allowed.
#[cfg(feature = "fuzzing")]
pub(crate) async fn converse_in_memory(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    engine: Engine,
    stopped: watch::Receiver<bool>,
) -> io::Result<()> {
    let (guard, peer) = (Arc::new(Guard::new(Auth::default())), Caller::at([127, 0, 0, 1].into()));
    let (settings, pending) = (Settings::default(), Pending::new(Budget::new(usize::MAX)));
    converse(stream, Session::new(engine, guard, peer, 1), settings, pending, stopped).await
}

/// For fuzzing: the same at the beginning of a conversation.
#[cfg(feature = "fuzzing")]
pub(crate) async fn answers_one_by_one(stream: &[u8], engine: Engine) -> Vec<u8> {
    let (guard, peer) = (Arc::new(Guard::new(Auth::default())), Caller::at([127, 0, 0, 1].into()));
    let (mut session, mut out) = (Session::new(engine, guard, peer, 1), Replies::default());
    answer_one_by_one(stream, &mut session, &mut out).await;
    out.bytes
}

/// For fuzzing: how many commands of this stream have an answer. What is no command has one, too,
/// and is the last, as is `QUIT`.
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
