//! What the host takes. A virtual machine does not run while its host lets
//! another one run; its kernel counts how long.

use std::fs;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use super::Orders;

/// How often it is looked at, and what the kernel counts in.
const TICK: Duration = Duration::from_millis(10);

/// When it was looked at, and how long the processors together had been taken by then.
#[derive(Debug, Default)]
pub(crate) struct Stolen(Vec<(Duration, Duration)>);

impl Stolen {
    /// Looks until the load ends.
    pub(super) fn watch(began: Instant, orders: &Orders) -> Stolen {
        let mut seen = Vec::new();
        while !orders.stop.load(Ordering::Relaxed) {
            let Some(total) = so_far() else { break };
            seen.push((began.elapsed(), total));
            thread::sleep(TICK);
        }
        Stolen(seen)
    }

    /// How long processors did not run within this time. What is counted is rounded, and a little
    /// late.
    pub(crate) fn within(&self, from: Duration, to: Duration) -> Duration {
        let before = self.0.iter().rev().find(|(at, _)| *at + TICK <= from).or(self.0.first());
        let after = self.0.iter().find(|(at, _)| *at >= to + TICK).or(self.0.last());
        before
            .zip(after)
            .map(|(before, after)| after.1.saturating_sub(before.1))
            .unwrap_or_default()
    }

    /// How much of the processors that was, of the whole time.
    pub(crate) fn share(&self) -> f64 {
        let (Some(first), Some(last)) = (self.0.first(), self.0.last()) else { return 0.0 };
        let processors = thread::available_parallelism().map_or(1.0, |number| number.get() as f64);
        (last.1.saturating_sub(first.1)).as_secs_f64()
            / ((last.0 - first.0).as_secs_f64() * processors).max(0.001)
    }
}

/// The eighth number of the first line of `/proc/stat`, in hundredths of a second.
fn so_far() -> Option<Duration> {
    let text = fs::read_to_string("/proc/stat").ok()?;
    let stolen: u32 = text.lines().next()?.split_whitespace().nth(8)?.parse().ok()?;
    Some(TICK * stolen)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_taken_within_a_time_is_told_with_what_is_counted_late() {
        let ms = Duration::from_millis;
        let stolen = Stolen(
            (0..100).map(|at| (ms(at * 10), if at < 50 { ms(0) } else { ms(30) })).collect(),
        );
        assert_eq!(stolen.within(ms(0), ms(300)), ms(0));
        assert_eq!(stolen.within(ms(480), ms(495)), ms(30));
        assert_eq!(stolen.within(ms(600), ms(5000)), ms(0));
        assert_eq!(stolen.within(ms(0), ms(5000)), ms(30));
        assert!(stolen.share() > 0.0 && stolen.share() <= 0.031);
        assert_eq!(Stolen::default().within(ms(0), ms(9)), ms(0));
    }
}
