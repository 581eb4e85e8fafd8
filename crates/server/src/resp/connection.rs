//! One RESP connection: reads commands, answers them in order, and writes all answers together.

use std::future::{Future, poll_fn};
use std::io;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::RespSettings;
use super::command::Session;
use super::pending::Pending;
use super::reply::Replies;
use super::transaction::Transaction;
use super::turn::answer_turn;
use crate::observe::metrics::Refusal;
use crate::protocol::Protocol;

/// Bytes per read: a pipeline of about two hundred commands.
const READ_BYTES: usize = 16 << 10;
/// Capacity for answers that an idle connection keeps.
const MAX_KEPT_BYTES: usize = 64 << 10;
/// How long commands are still read after shutdown has begun.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(2);
/// How long the runtime may take to notice bytes that have arrived.
const ARRIVAL_GRACE: Duration = Duration::from_millis(50);
/// How long a closing connection waits for the client to read its answers.
const CLOSE_TIMEOUT: Duration = Duration::from_millis(500);

/// Serves one connection to its end.
pub(super) async fn serve_connection(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    mut session: Session,
    settings: RespSettings,
    mut pending: Pending,
    mut shutdown: watch::Receiver<bool>,
) -> io::Result<()> {
    let mut bytes: Vec<u8> = Vec::with_capacity(READ_BYTES);
    let mut out = Replies::default();
    let mut down = false;
    let order = shutdown.clone();
    let mut stop = pin!(shutdown.wait_for(|down| *down));
    // One timer per connection: setting one for every wait would cost more than a decision. When
    // it expires, the connection is idle if nothing was read since it was set.
    let mut idle_timer = pin!(sleep(settings.idle));
    let mut has_read = false;
    // Whether shutdown and timer have the waker of this task.
    let mut is_registered = false;
    let mut shutdown_deadline = None;
    loop {
        let turn = answer_turn(&bytes, &mut session, &mut out).await;
        bytes.drain(..turn.used);
        // The buffer has grown for one long command.
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
            return close(&mut stream).await;
        }
        if turn.more {
            tokio::task::yield_now().await;
            continue;
        }
        if down && bytes.is_empty() {
            // Answer what was sent before shutdown began, within a bound: a client that keeps
            // sending must not keep the listener open.
            let last = *shutdown_deadline.get_or_insert_with(|| Instant::now() + SHUTDOWN_GRACE);
            let more = if Instant::now() < last {
                read_arrived(&mut stream, &mut bytes).await?
            } else {
                0
            };
            if more == 0 {
                return close(&mut stream).await;
            }
            continue;
        }
        let begun = !bytes.is_empty();
        if begun {
            // A command has one deadline, however many pieces it arrives in.
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
            // Shutdown and timer already have the waker. Polling them after every command would
            // cost as much as a decision, so only check whether one of them is ready.
            let is_other_ready =
                idle_timer.is_elapsed() || (!down && order.has_changed().unwrap_or(true));
            if std::mem::take(&mut is_first) && is_registered && !is_other_ready {
                return Poll::Pending;
            }
            is_registered = true;
            if !down && stop.as_mut().poll(context).is_ready() {
                return Poll::Ready(Event::Stop);
            }
            idle_timer.as_mut().poll(context).map(|()| Event::IdleTimer)
        });
        match event.await {
            Event::Read(read) => {
                has_read = true;
                if read? == 0 {
                    return Ok(());
                }
            }
            Event::Stop => down = true,
            Event::IdleTimer if !has_read => return Err(io::ErrorKind::TimedOut.into()),
            Event::IdleTimer => {
                (has_read, is_registered) = (false, false);
                idle_timer.as_mut().reset(Instant::now() + settings.idle);
            }
        }
    }
}

/// The next event of a connection between two commands.
enum Event {
    Read(io::Result<usize>),
    Stop,
    IdleTimer,
}

/// Closes a connection. Closing a socket with unread bytes would discard answers in flight, so
/// input is drained until the client closes, for at most [`CLOSE_TIMEOUT`].
async fn close(stream: &mut (impl AsyncRead + AsyncWrite + Unpin)) -> io::Result<()> {
    stream.shutdown().await?;
    let mut rest = [0; 4096];
    let drain = async { while matches!(stream.read(&mut rest).await, Ok(1..)) {} };
    let _ = tokio::time::timeout(CLOSE_TIMEOUT, drain).await;
    Ok(())
}

/// Reads bytes that have already arrived. The runtime may not have noticed them yet.
async fn read_arrived(
    stream: &mut (impl AsyncRead + Unpin),
    bytes: &mut Vec<u8>,
) -> io::Result<usize> {
    timeout(ARRIVAL_GRACE, stream.read_buf(bytes)).await.unwrap_or(Ok(0))
}

async fn within<T>(patience: Duration, io: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    // Most writes complete at the first poll and need no timer.
    let mut io = pin!(io);
    if let Poll::Ready(done) = poll_fn(|context| Poll::Ready(io.as_mut().poll(context))).await {
        return done;
    }
    timeout(patience, io).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}
