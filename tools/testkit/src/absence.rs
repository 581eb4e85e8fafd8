//! When processors did not run.
//!
//! A virtual machine does not run while its host lets another one run, and
//! times that are measured then say something about the host. Its kernel counts that in hundredths
//! of a second and late; so a thread on each processor, before which no other program goes, sleeps
//! for a moment again and again and notes when it was woken too late.

use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// How long they sleep.
const MOMENT: Duration = Duration::from_millis(1);
/// What is less than this is nothing.
const LATE: Duration = Duration::from_micros(500);

/// Watches until its findings are read.
#[derive(Debug)]
pub struct AbsenceWatch {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<Vec<(Instant, Instant)>>>,
}

/// From when to when a processor did not run.
#[derive(Clone, Debug, Default)]
pub struct Absences(Vec<(Instant, Instant)>);

impl AbsenceWatch {
    /// Begins to look. Where no process may go before others (`chrt` of util-linux needs the right
    /// to), nothing will have been seen.
    pub fn begin() -> AbsenceWatch {
        let stop = Arc::new(AtomicBool::new(false));
        let processors = thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let watch = |processor: usize| {
            let stop = Arc::clone(&stop);
            thread::spawn(move || if goes_first_on(processor) { look(&stop) } else { Vec::new() })
        };
        AbsenceWatch { threads: (0..processors).map(watch).collect(), stop }
    }

    /// What was seen.
    pub fn end(self) -> Absences {
        self.stop.store(true, Ordering::Relaxed);
        Absences(
            self.threads.into_iter().flat_map(|thread| thread.join().unwrap_or_default()).collect(),
        )
    }
}

impl Absences {
    /// How long processors did not run between these moments, all of them together.
    pub fn within(&self, from: Instant, to: Instant) -> Duration {
        self.0
            .iter()
            .map(|(gone, back)| (*back).min(to).saturating_duration_since((*gone).max(from)))
            .sum()
    }
}

fn look(stop: &AtomicBool) -> Vec<(Instant, Instant)> {
    let mut seen = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let due = Instant::now() + MOMENT;
        thread::sleep(MOMENT);
        let woken = Instant::now();
        if woken.saturating_duration_since(due) > LATE {
            seen.push((due, woken));
        }
    }
    seen
}

/// From now on this thread runs on one processor, and before all others there.
fn goes_first_on(processor: usize) -> bool {
    let own = rustix::thread::gettid().as_raw_nonzero().to_string();
    let run = |program: &str, args: &[&str]| {
        let done = Command::new(program)
            .args(args)
            .arg(&own)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status();
        done.is_ok_and(|status| status.success())
    };
    run("taskset", &["-cp", &processor.to_string()]) && run("chrt", &["-f", "-p", "1"])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_lies_within_counts() {
        let (start, ms) = (Instant::now(), Duration::from_millis);
        let seen =
            Absences(vec![(start + ms(10), start + ms(14)), (start + ms(12), start + ms(30))]);
        assert_eq!(seen.within(start, start + ms(10)), ms(0));
        assert_eq!(seen.within(start, start + ms(100)), ms(22));
        assert_eq!(seen.within(start + ms(13), start + ms(20)), ms(1 + 7));
        assert_eq!(Absences::default().within(start, start + ms(100)), ms(0));
    }
}
