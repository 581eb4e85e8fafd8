//! One timer for all deadlines of a connection on the [fast path](super::fast_path).

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::time::{Instant, Sleep, sleep};

/// One timer for one connection. It fires more often than needed, so that most deadlines need no
/// timer of their own.
#[derive(Debug)]
pub(super) struct ConnectionTimer {
    sleep: Pin<Box<Sleep>>,
    tick: Duration,
    until: Instant,
}

impl ConnectionTimer {
    /// A timer for deadlines of at least `tick`.
    pub(super) fn of(tick: Duration, first: Duration) -> Self {
        ConnectionTimer { sleep: Box::pin(sleep(tick)), tick, until: Instant::now() + first }
    }

    /// Sets the deadline to `most` from now.
    pub(super) fn set(&mut self, most: Duration) {
        self.until = Instant::now() + most;
    }

    /// Ready when the deadline has passed.
    pub(super) fn poll(&mut self, context: &mut Context<'_>) -> Poll<()> {
        loop {
            ready!(self.sleep.as_mut().poll(context));
            let now = Instant::now();
            if now >= self.until {
                return Poll::Ready(());
            }
            self.sleep.as_mut().reset(self.until.min(now + self.tick));
        }
    }
}
