//! Waiting for an answer until a deadline, also on a machine that stalls.
//!
//! After a stall of the process, replies are in its sockets and deadlines have passed. The runtime
//! may report the deadline to a waiting task before the reply. So after the deadline, tasks that
//! read get a few more turns; an answer that arrives by then is in time.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Poll;

use tokio::time::{Instant, timeout_at};

/// In the first turn the runtime polls its sockets and wakes the readers; in the second they read.
/// One more is for an answer that another task passes on.
const TURNS: usize = 3;

/// Waits for `answer` until `deadline`. Nothing, if there is none by then.
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
    async fn an_answer_that_does_not_arrive_times_out() {
        let began = Instant::now();
        let deadline = began + Duration::from_millis(5);
        assert_eq!(in_time(deadline, std::future::pending::<()>()).await, None);
        assert_eq!(began.elapsed(), Duration::from_millis(5));
        assert_eq!(in_time(deadline, async { 7 }).await, Some(7), "it is there");
        assert_eq!(in_time(deadline, tokio::time::sleep(Duration::from_millis(1))).await, None);
    }

    /// The answer passes through two tasks, which are ready to run when the deadline fires.
    #[tokio::test(start_paused = true)]
    async fn an_answer_in_flight_at_the_deadline_is_in_time() {
        let (send, sent) = oneshot::channel();
        let (pass_on, answer) = oneshot::channel();
        let deadline = Instant::now();
        let waiting = in_time(deadline, answer);
        tokio::spawn(async move { pass_on.send(sent.await.unwrap()).unwrap() });
        tokio::spawn(async move { send.send(7).unwrap() });
        assert_eq!(waiting.await, Some(Ok(7)));
    }
}
