//! The circuit breaker: whether to call the store. A state machine without a clock.
//!
//! It opens when the store has not answered for a while and several calls in a row were missed, or
//! when most calls of the current interval were missed. While it is open only probes call the
//! store, at random times that differ between nodes. It closes when enough probes in a row were
//! answered: one after an outage, more if it had closed only shortly before, so that a store that
//! flaps is trusted less each time.
//!
//! Before it opens, a part of the store can be *unresponsive*: a call missed its deadline, and no
//! other call has been answered since it was sent. Then requests stop waiting for the store, and
//! one background call at a time finds out whether that was a short stall.

use tidegate_core::Timestamp;

/// When the breaker opens and how often it is probed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BreakerRules {
    /// The number of misses in a row that open it after `outage_us`.
    pub(crate) misses: u32,
    /// The time since the first of the misses after which that many open it.
    pub(crate) outage_us: u64,
    /// The time after which two misses open it: with a long deadline there are few.
    pub(crate) long_outage_us: u64,
    /// The shortest and longest time between two probes.
    pub(crate) probe_us: (u64, u64),
}

impl Default for BreakerRules {
    fn default() -> Self {
        BreakerRules {
            misses: 5,
            outage_us: 50_000,
            long_outage_us: 250_000,
            probe_us: (50_000, 150_000),
        }
    }
}

/// The interval over which the share of misses is counted.
const INTERVAL_US: u64 = 500_000;
/// The share of fewer calls is not significant.
const MIN_CALLS: u32 = 20;
/// If it opens again sooner than this after it has closed, it closed too early.
const TOO_EARLY_US: u64 = 2_000_000;
/// The most probes in a row that must be answered before it closes.
const MAX_PROBES: u32 = 16;
/// After the first good probe, all others that are needed follow within this time: a store that is
/// back is soon used again.
const CONFIRM_US: u64 = 300_000;

/// Whether the store is called.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum BreakerState {
    /// The store is called.
    #[default]
    Closed,
    /// The store is not called but probed: this node decides locally.
    Open,
}

/// What an event has changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum BreakerChange {
    Opened,
    Closed,
}

#[derive(Debug, Default)]
pub(crate) struct Breaker {
    rules: BreakerRules,
    is_open: bool,
    is_unresponsive: bool,
    /// Misses in a row.
    misses: u32,
    /// When the first of them was sent.
    missing_since: Timestamp,
    last_answer: Timestamp,
    /// The start of the current interval, with its answers and misses.
    interval: Timestamp,
    answered: u32,
    missed: u32,
    closed_at: Option<Timestamp>,
    /// Probes answered in a row.
    good_probes: u32,
    /// How many of them close it.
    needed_probes: u32,
}

impl Breaker {
    pub(crate) fn new(rules: BreakerRules) -> Self {
        Breaker { rules, needed_probes: 1, ..Breaker::default() }
    }

    pub(crate) fn is_open(&self) -> bool {
        self.is_open
    }

    /// Records an answer. One to a call that was sent before it opened does not close it: only
    /// probes do.
    pub(crate) fn answered(&mut self, now: Timestamp) {
        self.start_interval(now);
        self.answered += 1;
        self.misses = 0;
        (self.last_answer, self.is_unresponsive) = (now, false);
    }

    /// Marks it unresponsive after a miss of a call sent at `sent`, unless another call was answered
    /// since. Says whether it was responsive before: then it needs an unresponsive probe.
    pub(crate) fn becomes_unresponsive(&mut self, sent: Timestamp) -> bool {
        let becomes = !self.is_open && !self.is_unresponsive && sent >= self.last_answer;
        self.is_unresponsive |= becomes;
        becomes
    }

    /// Whether requests should not wait for an answer.
    pub(crate) fn is_unresponsive(&self) -> bool {
        self.is_unresponsive
    }

    /// Ends that state: its probe has ended.
    pub(crate) fn not_unresponsive(&mut self) {
        self.is_unresponsive = false;
    }

    /// Records a miss of a call sent at `sent`.
    pub(crate) fn missed(&mut self, sent: Timestamp, now: Timestamp) -> Option<BreakerChange> {
        self.start_interval(now);
        self.missed += 1;
        if self.misses == 0 {
            self.missing_since = sent;
        }
        self.misses += 1;
        let missing_us = now.micros_since(self.missing_since);
        let no_answers = self.misses >= self.rules.misses && missing_us >= self.rules.outage_us
            || self.misses >= 2 && missing_us >= self.rules.long_outage_us;
        // A share of misses counts only in the second half of an interval: every short stall starts
        // with misses alone.
        let mostly_misses = self.answered + self.missed >= MIN_CALLS
            && self.missed > self.answered
            && now.micros_since(self.interval) >= INTERVAL_US / 2;
        if self.is_open || !(no_answers || mostly_misses) {
            return None;
        }
        Some(self.set_open(now))
    }

    /// Opens it without further misses, if it is closed: the store said that it takes no calls.
    pub(crate) fn open(&mut self, now: Timestamp) -> Option<BreakerChange> {
        (!self.is_open).then(|| self.set_open(now))
    }

    fn set_open(&mut self, now: Timestamp) -> BreakerChange {
        let closed_too_early =
            self.closed_at.is_some_and(|closed_at| now.micros_since(closed_at) < TOO_EARLY_US);
        self.needed_probes =
            if closed_too_early { (self.needed_probes * 2).min(MAX_PROBES) } else { 1 };
        (self.is_open, self.good_probes, self.is_unresponsive) = (true, 0, false);
        BreakerChange::Opened
    }

    /// Records the outcome of a probe.
    pub(crate) fn probed(&mut self, is_answered: bool, now: Timestamp) -> Option<BreakerChange> {
        if !self.is_open {
            return None;
        }
        self.good_probes = if is_answered { self.good_probes + 1 } else { 0 };
        if self.good_probes < self.needed_probes {
            return None;
        }
        self.is_open = false;
        self.closed_at = Some(now);
        (self.misses, self.answered, self.missed, self.interval) = (0, 0, 0, now);
        Some(BreakerChange::Closed)
    }

    /// The pause before the next probe; `random` is any number.
    pub(crate) fn pause_us(&self, random: u64) -> u64 {
        let (mut least, mut most) = self.rules.probe_us;
        if self.good_probes > 0 {
            most = most.min(CONFIRM_US / u64::from(self.needed_probes - 1).max(1));
            least = least.min(most / 2);
        }
        least + random % (most - least).max(1)
    }

    fn start_interval(&mut self, now: Timestamp) {
        if now.micros_since(self.interval) >= INTERVAL_US {
            (self.interval, self.answered, self.missed) = (now, 0, 0);
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
        let mut breaker = Breaker::new(BreakerRules::default());
        (0..1000).for_each(|ms| breaker.answered(at(ms)));
        let opened = stall(&mut breaker, 1000, 200).unwrap();
        assert!((45..=100).contains(&opened), "after {opened} ms");
        assert!(breaker.is_open());
    }

    #[test]
    fn a_short_stall_does_not_open_it() {
        let mut breaker = Breaker::new(BreakerRules::default());
        for second in 0..20 {
            (0..460).for_each(|ms| breaker.answered(at(second * 500 + ms)));
            assert_eq!(stall(&mut breaker, second * 500 + 460, 40), None);
        }
        assert!(!breaker.is_open());
    }

    #[test]
    fn one_miss_in_five_does_not_open_it_and_two_in_three_do() {
        let mut breaker = Breaker::new(BreakerRules::default());
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
    fn needs_more_good_probes_after_it_closed_too_early() {
        let mut breaker = Breaker::new(BreakerRules::default());
        stall(&mut breaker, 0, 200);
        assert_eq!(breaker.probed(false, at(300)), None);
        assert_eq!(breaker.probed(true, at(400)), Some(BreakerChange::Closed));
        stall(&mut breaker, 500, 200);
        assert_eq!(breaker.probed(true, at(800)), None);
        assert_eq!(breaker.probed(true, at(900)), Some(BreakerChange::Closed));
        // Long after that, one is enough again.
        stall(&mut breaker, 9000, 200);
        assert_eq!(breaker.probed(true, at(9500)), Some(BreakerChange::Closed));
    }

    /// However often the store has flapped, it is used again within half a second.
    #[test]
    fn closes_within_half_a_second_however_many_probes_are_needed() {
        let mut breaker = Breaker::new(BreakerRules::default());
        let mut now = 0;
        for times in 0..10 {
            now += stall(&mut breaker, now, 200).unwrap() + 5;
            // The worst case: the store is back just after a probe, and every pause is the longest.
            assert_eq!(breaker.probed(false, at(now)), None);
            let back = now;
            let mut probes = 0;
            loop {
                let longest_us = (0..100_000).map(|random| breaker.pause_us(random)).max().unwrap();
                now += longest_us.div_ceil(1000);
                probes += 1;
                if breaker.probed(true, at(now)) == Some(BreakerChange::Closed) {
                    break;
                }
            }
            assert!(now - back <= 500, "after {times} times: {} ms, {probes} probes", now - back);
            assert_eq!(probes, 1 << times.min(4), "each outage doubles the probes that are needed");
        }
    }

    #[test]
    fn unresponsive_from_a_miss_without_a_later_answer_until_the_next_answer() {
        let mut breaker = Breaker::new(BreakerRules::default());
        breaker.answered(at(10));
        assert!(!breaker.becomes_unresponsive(at(9)), "another was answered since");
        assert!(breaker.becomes_unresponsive(at(11)) && breaker.is_unresponsive());
        assert!(!breaker.becomes_unresponsive(at(12)), "it is unresponsive already");
        breaker.answered(at(20));
        assert!(!breaker.is_unresponsive() && breaker.becomes_unresponsive(at(21)));
        stall(&mut breaker, 21, 200);
        assert!(
            breaker.is_open() && !breaker.is_unresponsive(),
            "the open breaker replaces that state"
        );
        assert!(!breaker.becomes_unresponsive(at(300)));
    }

    #[test]
    fn late_answers_do_not_close_it() {
        let mut breaker = Breaker::new(BreakerRules::default());
        stall(&mut breaker, 0, 200);
        breaker.answered(at(300));
        assert!(breaker.is_open());
    }

    #[test]
    fn pauses_between_probes_are_within_bounds() {
        let breaker = Breaker::new(BreakerRules::default());
        let (least, most) = BreakerRules::default().probe_us;
        for random in [0, 1, 99_999, 100_000, u64::MAX] {
            assert!((least..most).contains(&breaker.pause_us(random)));
        }
    }
}
