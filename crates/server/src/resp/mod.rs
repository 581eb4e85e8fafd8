//! The RESP listener: any Redis client is a client.
//!
//! One task per connection. It reads what there is, answers every complete command in it, and
//! writes all answers at once. A client that does not read its answers is not read from either; one
//! that begins a command must end it soon.

mod arity;
mod command;
mod connection;
mod fast_path;
mod frame;
mod handshake;
mod pending;
mod reply;
mod throttle;
mod transaction;
mod turn;

use std::io;
use std::sync::Arc;
use std::time::Duration;

#[cfg(feature = "fuzzing")]
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::watch;

use self::command::Session;
use self::connection::converse;
pub use self::frame::{MAX_COMMAND_BYTES, MAX_LINE_BYTES, MAX_UNKNOWN_BYTES, MAX_WORDS};
pub use self::pending::FREE_BYTES;
use self::pending::{Budget, Pending};
pub use self::transaction::{MAX_QUEUED_BYTES, MAX_QUEUED_COMMANDS};
#[cfg(feature = "fuzzing")]
use self::{
    frame::{Next, Words},
    reply::Replies,
    turn::answer_one_by_one,
};
pub use crate::auth::Auth;
use crate::auth::{Caller, Guard};
use crate::engine::Engine;
use crate::listen::{Bounds, Entrance, Visitor};
use crate::observe::metrics::Refusal;
use crate::protocol::Protocol;

/// Bounds of the listener.
#[derive(Clone, Debug)]
pub struct RespSettings {
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

impl Default for RespSettings {
    fn default() -> Self {
        RespSettings {
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
    settings: RespSettings,
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
    settings: RespSettings,
    shutdown: watch::Receiver<bool>,
) -> io::Result<()> {
    let down = shutdown.clone();
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
        async move {
            let _place = place;
            let ended = converse(stream, session, settings, pending, down).await;
            if ended.is_err_and(|error| error.kind() == io::ErrorKind::TimedOut) {
                observer.metrics().refused(Protocol::Resp, Refusal::Slow);
            }
        }
    };
    entrance.receive(shutdown, talk).await
}

/// For fuzzing: a conversation over any stream, with everything allowed.
#[cfg(feature = "fuzzing")]
pub(crate) async fn converse_in_memory(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    engine: Engine,
    stopped: watch::Receiver<bool>,
) -> io::Result<()> {
    let (guard, peer) = (Arc::new(Guard::new(Auth::default())), Caller::at([127, 0, 0, 1].into()));
    let (settings, pending) = (RespSettings::default(), Pending::new(Budget::new(usize::MAX)));
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
