//! When requests of one connection of HTTP/2 go to the upstream: a few at once, and more as answers
//! are taken.
//!
//! Somebody who asks for hundreds of things at once and takes none of the answers would have a
//! connection to the upstream made for each of them, in a moment and for nothing. So a connection
//! begins with a few requests, and each answer whose body the client begins to take lets one more
//! than before be under way. Nobody waits for long: whoever has many requests that are answered
//! late, as those of a long poll are, has them all under way a moment later.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use crate::listen::http::MAX_STREAMS;

/// So many are under way before any answer was taken.
const FIRST: u32 = 16;
/// Nobody waits for longer than this.
const LONGEST: Duration = Duration::from_millis(100);

/// Of one connection.
#[derive(Debug)]
pub(super) struct Starts {
    places: Arc<Semaphore>,
    /// How many places there are, taken or not.
    count: AtomicU32,
}

/// A request that is under way.
#[derive(Debug)]
pub(super) struct Start {
    starts: Arc<Starts>,
    /// Whoever has waited for too long has gone without.
    place: Option<OwnedSemaphorePermit>,
}

impl Default for Starts {
    fn default() -> Self {
        Starts { places: Arc::new(Semaphore::new(FIRST as usize)), count: AtomicU32::new(FIRST) }
    }
}

impl Starts {
    /// Waits until it is the next one's turn, in the order in which they ask.
    pub(super) async fn next(self: &Arc<Self>) -> Start {
        let place = match Arc::clone(&self.places).try_acquire_owned() {
            Ok(place) => Some(place),
            Err(_) => timeout(LONGEST, Arc::clone(&self.places).acquire_owned())
                .await
                .ok()
                .and_then(Result::ok),
        };
        Start { starts: Arc::clone(self), place }
    }
}

impl Start {
    /// The client takes the answer. Who is dropped without that leaves things as they were.
    pub(super) fn taken(self) {
        let more = |count: u32| (count < MAX_STREAMS).then_some(count + 1);
        if self.starts.count.fetch_update(Relaxed, Relaxed, more).is_ok() {
            self.starts.places.add_permits(1);
        }
        drop(self.place);
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::pin;
    use std::task::{Context, Waker};

    use tokio::time::{Instant, advance};

    use super::*;

    /// As many as may go on now.
    fn at_once(starts: &Arc<Starts>) -> Vec<Start> {
        let mut context = Context::from_waker(Waker::noop());
        let next = || match pin!(starts.next()).poll(&mut context) {
            std::task::Poll::Ready(start) => Some(start),
            std::task::Poll::Pending => None,
        };
        std::iter::from_fn(next).take(1000).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn more_are_under_way_as_answers_are_taken() {
        let starts = Arc::<Starts>::default();
        let mut under_way = at_once(&starts);
        assert_eq!(under_way.len(), 16);
        assert_eq!(at_once(&starts).len(), 0, "nobody took an answer");
        drop(under_way.split_off(10));
        assert_eq!(
            at_once(&starts).len(),
            6,
            "those that ended in another way leave things as they were"
        );
        under_way.into_iter().for_each(Start::taken);
        let under_way = at_once(&starts);
        assert_eq!(under_way.len(), 26, "one more for each");
        under_way.into_iter().for_each(Start::taken);
        for _ in 0..10 {
            at_once(&starts).into_iter().for_each(Start::taken);
        }
        assert_eq!(at_once(&starts).len(), MAX_STREAMS as usize, "as many as there can be");
    }

    #[tokio::test(start_paused = true)]
    async fn nobody_waits_for_long() {
        let starts = Arc::<Starts>::default();
        let first = at_once(&starts);
        let began = Instant::now();
        let mut late = pin!(starts.next());
        assert!(late.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        advance(LONGEST / 2).await;
        assert!(late.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        let late = late.await;
        assert!(began.elapsed() <= LONGEST + Duration::from_millis(2), "{:?}", began.elapsed());
        drop(late);
        assert_eq!(at_once(&starts).len(), 0, "it had no place of its own to leave");
        drop(first);
        assert_eq!(at_once(&starts).len(), 16);
    }
}
