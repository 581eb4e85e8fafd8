//! The rate at which long pages are sent.
//!
//! A decision is a few hundred bytes; the page of metrics is some ten thousand, and the description
//! of all paths ninety thousand. Many concurrent requests for pages would keep the processors busy
//! with copying while decisions wait. Requests for pages therefore share one queue with a limited
//! rate. An occasional request does not wait.

use std::time::Duration;

use tokio::sync::Mutex;
use tokio::time::{Instant, sleep_until, timeout};

/// One page for each of these,
const EVERY: Duration = Duration::from_millis(5);
/// and this many without a delay after a pause.
const BURST: u32 = 20;
/// The longest wait.
const LONGEST: Duration = Duration::from_secs(2);

/// The queue of requests for pages.
#[derive(Debug)]
pub(crate) struct Pages {
    /// When the next page may be sent. The lock is fair: requests take it in order.
    due: Mutex<Instant>,
}

impl Default for Pages {
    fn default() -> Self {
        Pages { due: Mutex::new(Instant::now()) }
    }
}

impl Pages {
    /// Waits for a turn. False if that takes too long because too many requests wait.
    pub(crate) async fn turn(&self) -> bool {
        let waiting = async {
            let mut due = self.due.lock().await;
            let now = Instant::now();
            let at = now.checked_sub(EVERY * (BURST - 1)).map_or(*due, |saved| saved.max(*due));
            // A request that is cancelled here has not used a turn.
            sleep_until(at).await;
            *due = at + EVERY;
        };
        timeout(LONGEST, waiting).await.is_ok()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    async fn concurrent(pages: &Arc<Pages>, size: u64) -> Vec<(Duration, bool)> {
        let began = Instant::now();
        let all: Vec<_> = (0..size)
            .map(|_| {
                let pages = Arc::clone(pages);
                tokio::spawn(async move {
                    let turn = pages.turn().await;
                    (began.elapsed(), turn)
                })
            })
            .collect();
        let mut turns = Vec::new();
        for one in all {
            turns.push(one.await.unwrap());
        }
        turns
    }

    #[tokio::test(start_paused = true)]
    async fn a_few_do_not_wait_many_have_a_rate_and_the_wait_is_bounded() {
        let pages = Arc::new(Pages::default());
        tokio::time::sleep(Duration::from_secs(60)).await;
        let turns = concurrent(&pages, 1000).await;
        let served: Vec<Duration> = turns.iter().filter(|turn| turn.1).map(|turn| turn.0).collect();
        assert_eq!(served.iter().filter(|at| **at < EVERY).count(), 20, "the burst after a pause");
        for (place, at) in served.iter().enumerate().skip(20) {
            assert!(*at >= EVERY * u32::try_from(place - 20).unwrap(), "{place}: {at:?}");
        }
        assert!((400..=430).contains(&served.len()), "{}", served.len());
        assert!(turns.iter().all(|turn| turn.0 <= LONGEST + EVERY), "{:?}", turns.last());
        // A refused request has used no turn.
        let next = concurrent(&pages, 1).await;
        assert!(next[0].1 && next[0].0 <= 2 * EVERY, "{next:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_cancelled_request_uses_no_turn() {
        let pages = Arc::new(Pages::default());
        for _ in 0..100 {
            let _ = timeout(Duration::ZERO, pages.turn()).await;
        }
        let began = Instant::now();
        assert!(pages.turn().await);
        assert!(began.elapsed() <= 22 * EVERY, "{:?}", began.elapsed());
    }
}
