//! Waiting until a deadline, and not a moment less.
//!
//! A process that had no turn for a while, because the machine gave it none, finds everything at
//! once when it goes on: answers that lie in its sockets, and deadlines that have passed meanwhile.
//! A runtime may show whoever waits the deadline first. So before somebody gives up, those who read
//! have a few turns: what has come by then has come in time.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Poll;

use tokio::time::{Instant, timeout_at};

/// In the first the runtime looks at its sockets and wakes who reads from them, perhaps behind the
/// one who waits; in the second they read. One more for an answer that is passed on.
const TURNS: usize = 3;

/// Waits for `answer` until `deadline`. None, if it has not come.
pub async fn in_time<F: Future>(deadline: Instant, answer: F) -> Option<F::Output> {
    let mut answer = pin!(answer);
    if let Ok(answer) = timeout_at(deadline, answer.as_mut()).await {
        return Some(answer);
    }
    for _ in 0..TURNS {
        tokio::task::yield_now().await;
        if let Poll::Ready(answer) =
            poll_fn(|context| Poll::Ready(answer.as_mut().poll(context))).await
        {
            return Some(answer);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::sync::oneshot;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn what_does_not_come_is_not_waited_for() {
        let began = Instant::now();
        let deadline = began + Duration::from_millis(5);
        assert_eq!(in_time(deadline, std::future::pending::<()>()).await, None);
        assert_eq!(began.elapsed(), Duration::from_millis(5));
        assert_eq!(in_time(deadline, async { 7 }).await, Some(7), "it is there");
        assert_eq!(in_time(deadline, tokio::time::sleep(Duration::from_millis(1))).await, None);
    }

    /// An answer that goes through two other hands, both of which have something to do already when
    /// the deadline is seen.
    #[tokio::test(start_paused = true)]
    async fn what_is_on_its_way_here_when_the_deadline_is_seen_has_come_in_time() {
        let (tell, told) = oneshot::channel();
        let (pass_on, answer) = oneshot::channel();
        let deadline = Instant::now();
        let waiting = in_time(deadline, answer);
        tokio::spawn(async move { pass_on.send(told.await.unwrap()).unwrap() });
        tokio::spawn(async move { tell.send(7).unwrap() });
        assert_eq!(waiting.await, Some(Ok(7)));
    }
}
