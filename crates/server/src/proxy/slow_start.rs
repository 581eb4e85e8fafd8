//! Limits how many requests of one HTTP/2 connection are at the upstream: few at first, more as the
//! client reads responses.
//!
//! Otherwise a client that sends hundreds of requests and reads no response would open as many
//! upstream connections in a moment. A connection starts with a few permits, and each response that
//! the client begins to read adds one. A request waits for a permit for at most 100 ms, so many
//! slow requests, such as long polls, are all at the upstream a moment later.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use crate::listen::http::MAX_STREAMS;

/// Permits before the client has read a response.
const FIRST: u32 = 16;
/// The longest wait for a permit.
const LONGEST: Duration = Duration::from_millis(100);

/// The permits of one HTTP/2 connection.
#[derive(Debug)]
pub(super) struct SlowStart {
    permits: Arc<Semaphore>,
    /// How many permits there are, in use or not.
    count: AtomicU32,
}

/// The permit of one request at the upstream.
#[derive(Debug)]
pub(super) struct StartPermit {
    slow_start: Arc<SlowStart>,
    /// `None` if the wait was too long and the request went ahead without one.
    permit: Option<OwnedSemaphorePermit>,
}

impl Default for SlowStart {
    fn default() -> Self {
        SlowStart {
            permits: Arc::new(Semaphore::new(FIRST as usize)),
            count: AtomicU32::new(FIRST),
        }
    }
}

impl SlowStart {
    /// Waits for a permit, in the order of the calls.
    pub(super) async fn next(self: &Arc<Self>) -> StartPermit {
        let permit = match Arc::clone(&self.permits).try_acquire_owned() {
            Ok(permit) => Some(permit),
            Err(_) => timeout(LONGEST, Arc::clone(&self.permits).acquire_owned())
                .await
                .ok()
                .and_then(Result::ok),
        };
        StartPermit { slow_start: Arc::clone(self), permit }
    }
}

impl StartPermit {
    /// Adds a permit when the client begins to read the response. Dropping one adds none.
    pub(super) fn response_read(self) {
        let more = |count: u32| (count < MAX_STREAMS).then_some(count + 1);
        if self.slow_start.count.fetch_update(Relaxed, Relaxed, more).is_ok() {
            self.slow_start.permits.add_permits(1);
        }
        drop(self.permit);
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::pin;
    use std::task::{Context, Waker};

    use tokio::time::{Instant, advance};

    use super::*;

    /// Takes all permits that are free.
    fn start_all(slow_start: &Arc<SlowStart>) -> Vec<StartPermit> {
        let mut context = Context::from_waker(Waker::noop());
        let next = || match pin!(slow_start.next()).poll(&mut context) {
            std::task::Poll::Ready(start) => Some(start),
            std::task::Poll::Pending => None,
        };
        std::iter::from_fn(next).take(1000).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn more_requests_start_as_responses_are_read() {
        let slow_start = Arc::<SlowStart>::default();
        let mut under_way = start_all(&slow_start);
        assert_eq!(under_way.len(), 16);
        assert_eq!(start_all(&slow_start).len(), 0, "no response was read");
        drop(under_way.split_off(10));
        assert_eq!(
            start_all(&slow_start).len(),
            6,
            "requests that end without a reader add no permit"
        );
        under_way.into_iter().for_each(StartPermit::response_read);
        let under_way = start_all(&slow_start);
        assert_eq!(under_way.len(), 26, "one more for each");
        under_way.into_iter().for_each(StartPermit::response_read);
        for _ in 0..10 {
            start_all(&slow_start).into_iter().for_each(StartPermit::response_read);
        }
        assert_eq!(
            start_all(&slow_start).len(),
            MAX_STREAMS as usize,
            "the limit of HTTP/2 streams"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_waits_for_at_most_a_moment() {
        let slow_start = Arc::<SlowStart>::default();
        let first = start_all(&slow_start);
        let began = Instant::now();
        let mut late = pin!(slow_start.next());
        assert!(late.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        advance(LONGEST / 2).await;
        assert!(late.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        let late = late.await;
        assert!(began.elapsed() <= LONGEST + Duration::from_millis(2), "{:?}", began.elapsed());
        drop(late);
        assert_eq!(start_all(&slow_start).len(), 0, "it had no permit to return");
        drop(first);
        assert_eq!(start_all(&slow_start).len(), 16);
    }
}
