//! The breaker: whether it is worth asking the store. A state machine without a clock; whoever
//! holds it says what time it is.
//!
//! It opens when the store has been silent for a while and several calls in a row had no answer, or
//! when most calls of the last moments had none. While it is open nobody asks but the prober, at
//! times that no two nodes share. It closes when enough probes in a row were answered: one after an
//! outage, more if it had closed only a moment before, so that a store that comes and goes is not
//! believed every time.
//!
//! Before it opens there is *silence*: a call had no answer in time, and no other call has had one
//! since it was sent. Then nobody waits for the store either: one question at a time, that nobody
//! waits for, finds out whether it was a short stall, and counts as a call.

use tidegate_core::Timestamp;

/// When to open and when to close.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rules {
    /// So many misses in a row,
    pub(crate) misses: u32,
    /// and so long since the last answer, open it.
    pub(crate) silence_us: u64,
    /// So do two misses, so long after the last answer: with a long deadline there are few.
    pub(crate) long_silence_us: u64,
    /// The shortest and longest time between two probes.
    pub(crate) probe_us: (u64, u64),
}

impl Default for Rules {
    fn default() -> Self {
        Rules {
            misses: 5,
            silence_us: 50_000,
            long_silence_us: 250_000,
            probe_us: (50_000, 150_000),
        }
    }
}

/// A moment over which the share of misses is counted, in microseconds.
const MOMENT_US: u64 = 500_000;
/// Fewer calls in a moment say nothing.
const ENOUGH: u32 = 20;
/// It opens again sooner than this after it has closed: then it closed too early.
const TOO_EARLY_US: u64 = 2_000_000;
/// The most probes in a row that must be answered before it closes.
const MOST_PROBES: u32 = 16;
/// After the first good probe the others that are needed follow within this, however many they are:
/// a store that is back is asked again soon.
const SURE_US: u64 = 300_000;

/// Whether the store is asked.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum BreakerState {
    /// It is asked.
    #[default]
    Closed,
    /// It is not: this node decides alone, and looks from time to time whether the store is back.
    Open,
}

/// What an event has changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Change {
    Opened,
    Closed,
}

#[derive(Debug, Default)]
pub(crate) struct Breaker {
    rules: Rules,
    open: bool,
    /// Calls in a row that had no answer.
    misses: u32,
    /// When the first of them was sent.
    silent_since: Timestamp,
    /// When a call was answered last.
    heard: Timestamp,
    silent: bool,
    /// Answers and misses of this moment.
    moment: Timestamp,
    answered: u32,
    missed: u32,
    closed_at: Option<Timestamp>,
    /// Probes answered in a row, and how many must be.
    good: u32,
    needed: u32,
}

impl Breaker {
    pub(crate) fn new(rules: Rules) -> Self {
        Breaker { rules, needed: 1, ..Breaker::default() }
    }

    pub(crate) fn is_open(&self) -> bool {
        self.open
    }

    /// A call was answered. One that was sent before it opened does not close it: only probes do.
    pub(crate) fn answered(&mut self, now: Timestamp) {
        self.turn(now);
        self.answered += 1;
        self.misses = 0;
        (self.heard, self.silent) = (now, false);
    }

    /// A call that was sent at `sent` was missed. Whether that is when silence begins: somebody has
    /// to listen from now on.
    pub(crate) fn falls_silent(&mut self, sent: Timestamp) -> bool {
        let falls = !self.open && !self.silent && sent >= self.heard;
        self.silent |= falls;
        falls
    }

    /// Whether nobody should wait for an answer.
    pub(crate) fn is_silent(&self) -> bool {
        self.silent
    }

    /// Nobody listens any more.
    pub(crate) fn not_silent(&mut self) {
        self.silent = false;
    }

    /// A call had no answer in time; it had been sent at `sent`.
    pub(crate) fn missed(&mut self, sent: Timestamp, now: Timestamp) -> Option<Change> {
        self.turn(now);
        self.missed += 1;
        if self.misses == 0 {
            self.silent_since = sent;
        }
        self.misses += 1;
        let silence_us = now.micros_since(self.silent_since);
        let silent = self.misses >= self.rules.misses && silence_us >= self.rules.silence_us
            || self.misses >= 2 && silence_us >= self.rules.long_silence_us;
        let mostly = self.answered + self.missed >= ENOUGH && self.missed > self.answered;
        // A share of misses is only believed at the end of a moment: a short stall begins with
        // nothing else.
        let mostly = mostly && now.micros_since(self.moment) >= MOMENT_US / 2;
        if self.open || !(silent || mostly) {
            return None;
        }
        Some(self.opens(now))
    }

    /// Opens it without waiting for more misses, if it is not open: the store said that it takes no
    /// calls.
    pub(crate) fn open_at_once(&mut self, now: Timestamp) -> Option<Change> {
        (!self.open).then(|| self.opens(now))
    }

    fn opens(&mut self, now: Timestamp) -> Change {
        let early =
            self.closed_at.is_some_and(|closed_at| now.micros_since(closed_at) < TOO_EARLY_US);
        self.needed = if early { (self.needed * 2).min(MOST_PROBES) } else { 1 };
        (self.open, self.good, self.silent) = (true, 0, false);
        Change::Opened
    }

    /// A probe was answered in time, or not.
    pub(crate) fn probed(&mut self, answered: bool, now: Timestamp) -> Option<Change> {
        if !self.open {
            return None;
        }
        self.good = if answered { self.good + 1 } else { 0 };
        if self.good < self.needed {
            return None;
        }
        self.open = false;
        self.closed_at = Some(now);
        (self.misses, self.answered, self.missed, self.moment) = (0, 0, 0, now);
        Some(Change::Closed)
    }

    /// How long to wait before the next probe; `random` is any number.
    pub(crate) fn pause_us(&self, random: u64) -> u64 {
        let (mut least, mut most) = self.rules.probe_us;
        if self.good > 0 {
            most = most.min(SURE_US / u64::from(self.needed - 1).max(1));
            least = least.min(most / 2);
        }
        least + random % (most - least).max(1)
    }

    fn turn(&mut self, now: Timestamp) {
        if now.micros_since(self.moment) >= MOMENT_US {
            (self.moment, self.answered, self.missed) = (now, 0, 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Timestamp {
        Timestamp::from_millis(10_000 + ms)
    }

    /// One call each millisecond, each without an answer for 5 ms.
    fn stall(breaker: &mut Breaker, from: u64, ms: u64) -> Option<u64> {
        (0..ms).find(|n| breaker.missed(at(from + n), at(from + n + 5)).is_some())
    }

    #[test]
    fn opens_within_a_hundred_milliseconds_of_a_stall() {
        let mut breaker = Breaker::new(Rules::default());
        (0..1000).for_each(|ms| breaker.answered(at(ms)));
        let opened = stall(&mut breaker, 1000, 200).unwrap();
        assert!((45..=100).contains(&opened), "after {opened} ms");
        assert!(breaker.is_open());
    }

    #[test]
    fn a_short_stall_does_not_open_it() {
        let mut breaker = Breaker::new(Rules::default());
        for second in 0..20 {
            (0..460).for_each(|ms| breaker.answered(at(second * 500 + ms)));
            assert_eq!(stall(&mut breaker, second * 500 + 460, 40), None);
        }
        assert!(!breaker.is_open());
    }

    #[test]
    fn one_miss_in_five_does_not_open_it_and_two_in_three_do() {
        let mut breaker = Breaker::new(Rules::default());
        for ms in 0..5000 {
            if ms % 5 == 0 {
                assert_eq!(breaker.missed(at(ms), at(ms)), None);
            } else {
                breaker.answered(at(ms));
            }
        }
        let opened = (5000..6000).any(|ms| {
            breaker.answered(at(ms));
            [ms, ms].into_iter().any(|ms| breaker.missed(at(ms), at(ms)).is_some())
        });
        assert!(opened);
    }

    #[test]
    fn closes_with_the_first_good_probe_and_less_gladly_when_that_was_too_early() {
        let mut breaker = Breaker::new(Rules::default());
        stall(&mut breaker, 0, 200);
        assert_eq!(breaker.probed(false, at(300)), None);
        assert_eq!(breaker.probed(true, at(400)), Some(Change::Closed));
        stall(&mut breaker, 500, 200);
        assert_eq!(breaker.probed(true, at(800)), None);
        assert_eq!(breaker.probed(true, at(900)), Some(Change::Closed));
        // Long after that one is enough again.
        stall(&mut breaker, 9000, 200);
        assert_eq!(breaker.probed(true, at(9500)), Some(Change::Closed));
    }

    /// However often it came and went, a store that is back is asked again within half a second.
    #[test]
    fn closes_within_half_a_second_however_many_probes_are_needed() {
        let mut breaker = Breaker::new(Rules::default());
        let mut now = 0;
        for times in 0..10 {
            now += stall(&mut breaker, now, 200).unwrap() + 5;
            // The worst of chances: it is back just after a probe, and every pause is the longest.
            assert_eq!(breaker.probed(false, at(now)), None);
            let back = now;
            let mut probes = 0;
            loop {
                let longest_us = (0..100_000).map(|random| breaker.pause_us(random)).max().unwrap();
                now += longest_us.div_ceil(1000);
                probes += 1;
                if breaker.probed(true, at(now)) == Some(Change::Closed) {
                    break;
                }
            }
            assert!(now - back <= 500, "after {times} times: {} ms, {probes} probes", now - back);
            assert_eq!(probes, 1 << times.min(4), "it is believed less gladly each time");
        }
    }

    #[test]
    fn silence_begins_with_a_call_since_which_nothing_was_heard_and_ends_with_an_answer() {
        let mut breaker = Breaker::new(Rules::default());
        breaker.answered(at(10));
        assert!(!breaker.falls_silent(at(9)), "another was answered since");
        assert!(breaker.falls_silent(at(11)) && breaker.is_silent());
        assert!(!breaker.falls_silent(at(12)), "it is silent already");
        breaker.answered(at(20));
        assert!(!breaker.is_silent() && breaker.falls_silent(at(21)));
        stall(&mut breaker, 21, 200);
        assert!(breaker.is_open() && !breaker.is_silent(), "then it is open");
        assert!(!breaker.falls_silent(at(300)));
    }

    #[test]
    fn late_answers_do_not_close_it() {
        let mut breaker = Breaker::new(Rules::default());
        stall(&mut breaker, 0, 200);
        breaker.answered(at(300));
        assert!(breaker.is_open());
    }

    #[test]
    fn probes_come_within_their_bounds() {
        let breaker = Breaker::new(Rules::default());
        let (least, most) = Rules::default().probe_us;
        for random in [0, 1, 99_999, 100_000, u64::MAX] {
            assert!((least..most).contains(&breaker.pause_us(random)));
        }
    }
}
