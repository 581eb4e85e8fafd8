//! Futures whose panic must not end the task that polls them.

use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::task::Poll;

/// The output of a future; `None` if it panics.
pub(crate) async fn caught<F: Future>(future: F) -> Option<F::Output> {
    let mut future = pin!(future);
    // A future that panicked is not polled again.
    poll_fn(|context| match catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(context))) {
        Ok(polled) => polled.map(Some),
        Err(_) => Poll::Ready(None),
    })
    .await
}
