//! The RESP listener: any Redis client is a client.
//!
//! A connection reads what has arrived, answers every complete command in it, and writes all answers
//! together. It reads no more from a client that does not take its answers, and closes when a
//! command takes too long to arrive.

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
use self::connection::serve_connection;
pub use self::frame::{MAX_COMMAND_BYTES, MAX_LINE_BYTES, MAX_UNKNOWN_BYTES, MAX_WORDS};
pub use self::pending::FREE_BYTES;
use self::pending::{Pending, PendingBudget};
pub use self::transaction::{MAX_QUEUED_BYTES, MAX_QUEUED_COMMANDS};
#[cfg(feature = "fuzzing")]
use self::{
    frame::{Parsed, Words},
    reply::Replies,
    turn::answer_one_by_one,
};
pub use crate::auth::Auth;
use crate::auth::{Caller, Guard};
use crate::engine::Engine;
use crate::listen::{Bounds, Connection, Listener};
use crate::observe::metrics::Refusal;
use crate::protocol::Protocol;

/// The options of the RESP listener.
#[derive(Clone, Debug)]
pub struct RespSettings {
    /// How long a connection may be idle.
    pub idle: Duration,
    /// How long a command may take to arrive, and how long answers may take to be read.
    pub patience: Duration,
    /// Bytes that all connections together may hold for unfinished commands and transactions,
    /// beyond [`FREE_BYTES`] each.
    pub max_pending_bytes: usize,
    /// Whether administration commands (`TG.RESET`, `TG.RESETRULE`, `TG.RESETRULES`) are answered.
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

/// Serves without TLS until `shutdown` is true, then answers what has arrived and returns.
///
/// # Errors
/// Never while it can accept connections: it waits when no file is free.
pub async fn serve(
    listener: TcpListener,
    engine: Engine,
    auth: Auth,
    settings: RespSettings,
    shutdown: watch::Receiver<bool>,
) -> io::Result<()> {
    let listener =
        Listener::new(Protocol::Resp, listener, None, Bounds::default(), engine.observer().clone());
    serve_at(listener, engine, Arc::new(Guard::new(auth)), settings, shutdown).await
}

/// Serves the connections of this listener.
///
/// # Errors
/// Never while it can accept connections: it waits when no file is free.
pub async fn serve_at(
    listener: Listener,
    engine: Engine,
    guard: Arc<Guard>,
    settings: RespSettings,
    shutdown: watch::Receiver<bool>,
) -> io::Result<()> {
    let down = shutdown.clone();
    let budget = PendingBudget::new(settings.max_pending_bytes);
    let talk = move |connection: Connection| {
        let Connection { stream, peer, number, slot } = connection;
        let number = i64::try_from(number).unwrap_or(i64::MAX);
        let mut session =
            Session::new(engine.clone(), Arc::clone(&guard), Caller::at(peer.ip()), number);
        session.has_admin_calls = settings.has_admin_calls;
        let (settings, down, observer) =
            (settings.clone(), down.clone(), engine.observer().clone());
        let pending = Pending::new(budget.clone());
        async move {
            let _slot = slot;
            let ended = serve_connection(stream, session, settings, pending, down).await;
            if ended.is_err_and(|error| error.kind() == io::ErrorKind::TimedOut) {
                observer.metrics().refused(Protocol::Resp, Refusal::Slow);
            }
        }
    };
    listener.serve(shutdown, talk).await
}

/// For fuzzing: serves any stream, with everything allowed.
#[cfg(feature = "fuzzing")]
pub(crate) async fn serve_in_memory(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    engine: Engine,
    stopped: watch::Receiver<bool>,
) -> io::Result<()> {
    let (guard, peer) = (Arc::new(Guard::new(Auth::default())), Caller::at([127, 0, 0, 1].into()));
    let (settings, pending) =
        (RespSettings::default(), Pending::new(PendingBudget::new(usize::MAX)));
    serve_connection(stream, Session::new(engine, guard, peer, 1), settings, pending, stopped).await
}

/// For fuzzing: the answers of a new connection, each by the general path.
#[cfg(feature = "fuzzing")]
pub(crate) async fn answers_one_by_one(stream: &[u8], engine: Engine) -> Vec<u8> {
    let (guard, peer) = (Arc::new(Guard::new(Auth::default())), Caller::at([127, 0, 0, 1].into()));
    let (mut session, mut out) = (Session::new(engine, guard, peer, 1), Replies::default());
    answer_one_by_one(stream, &mut session, &mut out).await;
    out.bytes
}

/// For fuzzing: how many commands of this stream have an answer. Bytes that are not a command, and
/// `QUIT`, are the last to have one.
#[cfg(feature = "fuzzing")]
pub(crate) fn count_commands(stream: &[u8]) -> usize {
    let (mut at, mut count, mut words) = (0, 0, Words::new());
    loop {
        words.clear();
        let (asked, taken) = match frame::next(&stream[at..], &mut words, MAX_COMMAND_BYTES) {
            Ok(Parsed::Command(taken)) => (words.first().map(|name| name.to_vec()), taken),
            Ok(Parsed::Line(line, taken)) => match frame::split(line) {
                Ok(words) => (words.into_iter().next(), taken),
                Err(_) => return count + 1,
            },
            Ok(Parsed::Unfinished) => return count,
            Err(_) => return count + 1,
        };
        at += taken;
        count += usize::from(asked.is_some());
        if asked.is_some_and(|name| name.eq_ignore_ascii_case(b"QUIT")) {
            return count;
        }
    }
}
