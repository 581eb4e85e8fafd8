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

/// One connection, to its end.
pub(super) async fn converse(
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
