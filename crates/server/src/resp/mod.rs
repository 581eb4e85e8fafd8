//! The RESP door: any Redis client is a client.
//!
//! One task per connection. It reads what there is, answers every complete command in it, and writes all answers at once. A client that does not read its
//! answers is not read from either; one that begins a command must end it soon.

mod command;
mod frame;
mod reply;
mod throttle;

use std::future::Future;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};
use tokio::time::timeout;

pub use self::command::Auth;
use self::command::{May, Session};
pub use self::frame::{MAX_COMMAND_BYTES, MAX_LINE_BYTES, MAX_UNKNOWN_BYTES, MAX_WORDS};
use self::frame::{Next, Words};
use self::reply::Replies;
use crate::gate::Gate;

/// Answers that may wait to be written before more is read.
const MAX_ANSWERS_BYTES: usize = 64 << 10;
/// Commands answered before others get their turn.
const TURN: usize = 64;

/// Bounds of the door.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Connections at once.
    pub max_connections: usize,
    /// How long a connection may say nothing.
    pub idle: Duration,
    /// How long a command may take to arrive once it has begun, and answers to be taken.
    pub patience: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Settings { max_connections: 10_000, idle: Duration::from_secs(600), patience: Duration::from_secs(5) }
    }
}

/// Serves until `shutdown` says so, then answers what has arrived and returns.
///
/// # Errors
/// Never while it can accept at all: running out of files is waited out.
pub async fn serve(
    listener: TcpListener,
    gate: Gate,
    auth: Auth,
    settings: Settings,
    mut shutdown: watch::Receiver<bool>,
) -> io::Result<()> {
    let (auth, places) = (Arc::new(auth), Arc::new(Semaphore::new(settings.max_connections)));
    let numbers = AtomicI64::new(1);
    let mut connections = tokio::task::JoinSet::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = shutdown.wait_for(|down| *down) => break,
            Some(_) = connections.join_next() => continue,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(_) => {
                // Out of files, most likely: those who are here are served on, and soon somebody leaves.
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        let Ok(place) = Arc::clone(&places).try_acquire_owned() else { continue };
        let _ = stream.set_nodelay(true);
        let session = Session::new(gate.clone(), Arc::clone(&auth), numbers.fetch_add(1, Ordering::Relaxed));
        let (settings, shutdown) = (settings.clone(), shutdown.clone());
        connections.spawn(async move {
            let _place = place;
            let _ = converse(stream, session, settings, shutdown).await;
        });
    }
    drop(listener);
    while connections.join_next().await.is_some() {}
    Ok(())
}

/// One connection, to its end.
async fn converse(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    mut session: Session,
    settings: Settings,
    mut shutdown: watch::Receiver<bool>,
) -> io::Result<()> {
    let mut bytes: Vec<u8> = Vec::with_capacity(4096);
    let mut out = Replies { bytes: Vec::new(), three: false };
    let mut words = Words::new();
    let mut down = false;
    loop {
        let used = answer_all(&bytes, &mut words, &mut session, &mut out).await;
        bytes.drain(..used);
        if !out.bytes.is_empty() {
            within(settings.patience, stream.write_all(&out.bytes)).await?;
            out.bytes.clear();
            if out.bytes.capacity() > MAX_ANSWERS_BYTES {
                out.bytes.shrink_to(MAX_ANSWERS_BYTES);
            }
            if used > 0 && !session.closing {
                continue; // there may be more commands than one turn takes
            }
        }
        if session.closing || (down && bytes.is_empty()) {
            return stream.shutdown().await;
        }
        let patience = if bytes.is_empty() { settings.idle } else { settings.patience };
        tokio::select! {
            read = within(patience, stream.read_buf(&mut bytes)) => if read? == 0 { return Ok(()) },
            _ = shutdown.wait_for(|down| *down), if !down => down = true,
        }
    }
}

async fn within<T>(patience: Duration, io: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    timeout(patience, io).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}

/// Answers complete commands at the front of `bytes`, one turn of them, and says how many bytes they took.
async fn answer_all(bytes: &[u8], words: &mut Words, session: &mut Session, out: &mut Replies) -> usize {
    let mut used = 0;
    for _ in 0..TURN {
        if session.closing || out.bytes.len() > MAX_ANSWERS_BYTES {
            break;
        }
        let most = if session.may == May::Nothing { MAX_UNKNOWN_BYTES } else { MAX_COMMAND_BYTES };
        match frame::next(&bytes[used..], words, most) {
            Ok(Next::Command(next)) => {
                let command: Vec<&[u8]> = words.iter().map(|word| &bytes[used..][word.clone()]).collect();
                session.answer(&command, out).await;
                used += next;
            }
            Ok(Next::Unfinished) => break,
            Err(broken) => {
                out.error(&format!("ERR {broken}"));
                session.closing = true;
                used = bytes.len();
            }
        }
    }
    used
}
