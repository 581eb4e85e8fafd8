//! How often long pages are sent.
//!
//! A decision is a few hundred bytes; a page of numbers is some ten thousand, and the description
//! of all paths ninety thousand. Whoever asks for them in a loop, or over many connections for
//! hundreds at once, would have the processors copy bytes while decisions wait. So all who want a
//! page stand in one line, which moves at a pace that takes little of a processor. Whoever comes
//! now and then does not wait.

use std::time::Duration;

use tokio::sync::Mutex;
use tokio::time::{Instant, sleep_until, timeout};

/// One page for each of these,
const EVERY: Duration = Duration::from_millis(5);
/// and so many at once after a pause.
const AT_ONCE: u32 = 20;
/// Nobody stands in line longer than this.
const LONGEST: Duration = Duration::from_secs(2);

/// The line of those who want a page.
#[derive(Debug)]
pub(crate) struct Pages {
    /// When the next page is due; of this lock, whoever comes first is first.
    due: Mutex<Instant>,
}

impl Default for Pages {
    fn default() -> Self {
        Pages { due: Mutex::new(Instant::now()) }
    }
}

impl Pages {
    /// Waits until it is this one's turn. False if that takes too long: too many want a page.
    pub(crate) async fn turn(&self) -> bool {
        let waiting = async {
            let mut due = self.due.lock().await;
            let now = Instant::now();
            let at = now.checked_sub(EVERY * (AT_ONCE - 1)).map_or(*due, |saved| saved.max(*due));
            // Who goes away meanwhile has taken nobody's turn.
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

    async fn crowd(pages: &Arc<Pages>, size: u64) -> Vec<(Duration, bool)> {
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
    async fn a_few_do_not_wait_a_crowd_moves_at_its_pace_and_nobody_waits_for_ever() {
        let pages = Arc::new(Pages::default());
        tokio::time::sleep(Duration::from_secs(60)).await;
        let turns = crowd(&pages, 1000).await;
        let served: Vec<Duration> = turns.iter().filter(|turn| turn.1).map(|turn| turn.0).collect();
        assert_eq!(
            served.iter().filter(|at| **at < EVERY).count(),
            20,
            "after a pause so many at once, not more"
        );
        for (place, at) in served.iter().enumerate().skip(20) {
            assert!(*at >= EVERY * u32::try_from(place - 20).unwrap(), "{place}: {at:?}");
        }
        assert!((400..=430).contains(&served.len()), "{}", served.len());
        assert!(turns.iter().all(|turn| turn.0 <= LONGEST + EVERY), "{:?}", turns.last());
        // Whoever was refused has taken no turn.
        let next = crowd(&pages, 1).await;
        assert!(next[0].1 && next[0].0 <= 2 * EVERY, "{next:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn whoever_goes_away_takes_no_turn() {
        let pages = Arc::new(Pages::default());
        for _ in 0..100 {
            let _ = timeout(Duration::ZERO, pages.turn()).await;
        }
        let began = Instant::now();
        assert!(pages.turn().await);
        assert!(began.elapsed() <= 22 * EVERY, "{:?}", began.elapsed());
    }
}
