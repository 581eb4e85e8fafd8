//! One of the compared limits, with its own state for every key.
//!
//! It calls the core instead of a store. A store may drop an idle key, which is visible only if
//! time goes backwards, and in a trace it may. Here records are kept unchanged, so a trace always
//! has the same answers. With `--store` a server decides ([`super::remote`]), and the contender
//! only records the decisions.

use std::collections::{HashMap, VecDeque};

use tidegate::Check;
use tidegate_core::{
    Algorithm, Charge, Decision, Id, Limit, Op, Record, Timestamp, Verdict, decide,
};

use super::Event;
use crate::args::LimitText;

/// From this many keys on, idle keys are dropped now and then.
const MANY_KEYS: usize = 1 << 18;
/// The most grants that are kept for one key to find the most that it was granted in a period.
const MANY_MOMENTS: usize = 1 << 14;

pub(super) struct Contender {
    limit: LimitText,
    windows: Vec<Window>,
    keys: HashMap<Box<str>, Holding>,
    /// The number of keys at which idle ones are dropped next.
    sweep_at: usize,
    /// Whether leases are granted, which need an id.
    leases: bool,
    observes: bool,
    /// The most requests of one key that were denied in a row.
    longest_streak: u64,
}

/// One of the limits that are decided together.
pub(super) struct Window {
    pub(super) limit: Limit,
    /// How often it is given: equal limits are charged together.
    times: u64,
    /// The most that one key was granted within one period.
    pub(super) most: Most,
}

/// The most that one key was granted within a period.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Most {
    pub(super) units: u64,
    /// The time of the first grant among them.
    pub(super) from_us: u64,
    /// Whether grants had to be merged, so that the real number may be higher.
    pub(super) at_least: bool,
}

/// The state of one key.
struct Holding {
    records: Vec<Record>,
    recent: Vec<Recent>,
    /// How many of its requests were denied in a row.
    streak: u64,
}

/// The grants of the last period, oldest first.
#[derive(Default)]
struct Recent {
    grants: VecDeque<(u64, u64)>,
    total: u64,
    merged: bool,
}

impl Contender {
    pub(super) fn new(limit: LimitText, observes: bool) -> Self {
        let mut windows: Vec<Window> = Vec::new();
        for one in &limit.limits {
            match windows.iter_mut().find(|window| window.limit == *one) {
                Some(window) => window.times += 1,
                None => windows.push(Window { limit: *one, times: 1, most: Most::default() }),
            }
        }
        let leases = windows
            .iter()
            .any(|window| matches!(window.limit.algorithm(), Algorithm::Concurrent(_)));
        Contender {
            limit,
            windows,
            keys: HashMap::new(),
            sweep_at: MANY_KEYS,
            leases,
            observes,
            longest_streak: 0,
        }
    }

    /// The limit as it was written.
    pub(super) fn text(&self) -> &str {
        &self.limit.text
    }

    /// The most requests of one key that were denied in a row.
    pub(super) fn longest_streak(&self) -> u64 {
        self.longest_streak
    }

    /// The limits that are decided together.
    pub(super) fn windows(&self) -> &[Window] {
        &self.windows
    }

    pub(super) fn decide(&mut self, event: &Event) -> Decision {
        let now = Timestamp::from_micros(event.at_us);
        let id = self.id(event);
        let key = event.key.as_str();
        let holding = match self.keys.get_mut(key) {
            Some(holding) => holding,
            None => {
                self.make_room(now);
                let records = self.windows.iter().map(|_| Record::default()).collect();
                let recent = self.windows.iter().map(|_| Recent::default()).collect();
                self.keys.entry(key.into()).or_insert(Holding { records, recent, streak: 0 })
            }
        };
        let mut charges: Vec<Charge<'_>> = self
            .windows
            .iter()
            .zip(&mut holding.records)
            .map(|(window, record)| {
                let cost = event.cost.saturating_mul(window.times);
                Charge { limit: &window.limit, record, cost, reserved: 0, id }
            })
            .collect();
        let decision = decide(event.op, &mut charges, now);
        if self.observes && event.is_offer() {
            let streak = holding.observe(&mut self.windows, event, &decision);
            self.longest_streak = self.longest_streak.max(streak);
        }
        decision
    }

    /// The request as a check for a store, with its charge under `name`.
    pub(super) fn check<'a>(&'a self, name: &'a str, event: &'a Event) -> Check<'a> {
        let check =
            Check::of(event.op).charge_named(name, &event.key, &self.limit.limits, event.cost);
        match self.id(event) {
            Some(id) => check.with_id(id),
            None => check,
        }
    }

    /// Records a decision of a store.
    pub(super) fn observe(&mut self, event: &Event, decision: &Decision) {
        if !self.observes || !event.is_offer() {
            return;
        }
        if !self.keys.contains_key(event.key.as_str()) {
            self.make_room(Timestamp::from_micros(event.at_us));
        }
        let recent = || self.windows.iter().map(|_| Recent::default()).collect();
        let holding = self.keys.entry(event.key.as_str().into());
        let holding =
            holding.or_insert_with(|| Holding { records: Vec::new(), recent: recent(), streak: 0 });
        let streak = holding.observe(&mut self.windows, event, decision);
        self.longest_streak = self.longest_streak.max(streak);
    }

    /// The id of a lease is the number of its line. A refund has none, and ends the newest lease.
    fn id(&self, event: &Event) -> Option<Id> {
        let takes = matches!(event.op, Op::Check | Op::Take | Op::Debit);
        (self.leases && takes).then_some(Id(event.number))
    }

    /// When there are very many keys, drops those whose state equals that of a new key.
    fn make_room(&mut self, now: Timestamp) {
        if self.keys.len() < self.sweep_at {
            return;
        }
        let windows = &self.windows;
        self.keys.retain(|_, holding| {
            let idle = holding.records.iter().all(|record| now >= record.idle_at());
            let mut recent = holding.recent.iter().zip(windows);
            let quiet = recent
                .all(|(recent, window)| recent.is_over(window.limit.algorithm().period_us(), now));
            !(idle && quiet)
        });
        self.sweep_at = MANY_KEYS.max(2 * self.keys.len());
    }
}

impl Holding {
    /// Records a decision; returns how many requests were denied in a row.
    fn observe(&mut self, windows: &mut [Window], event: &Event, decision: &Decision) -> u64 {
        if decision.allowed() {
            self.streak = 0;
            for ((window, recent), verdict) in
                windows.iter_mut().zip(&mut self.recent).zip(decision.charges())
            {
                window.observe(recent, event.at_us, verdict);
            }
        } else {
            self.streak += 1;
        }
        self.streak
    }
}

impl Window {
    fn observe(&mut self, recent: &mut Recent, at_us: u64, verdict: &Verdict) {
        let total = recent.add(at_us, verdict.granted, self.limit.algorithm().period_us());
        if total > self.most.units {
            let from_us = recent.grants.front().map_or(at_us, |(oldest, _)| *oldest);
            self.most = Most { units: total, from_us, at_least: self.most.at_least };
        }
        self.most.at_least |= recent.merged;
    }
}

impl Recent {
    /// Adds a grant; returns the sum of the grants within (t - period, t].
    fn add(&mut self, at_us: u64, units: u64, period_us: u64) -> u64 {
        let newest = self.grants.back().map_or(0, |(newest, _)| *newest);
        let at_us = at_us.max(newest); // time does not go back
        while let Some((oldest, units)) = self.grants.front().copied() {
            if at_us - oldest < period_us {
                break;
            }
            self.total -= units;
            self.grants.pop_front();
        }
        self.total += units;
        match self.grants.back_mut() {
            Some((newest, granted)) if *newest == at_us => *granted += units,
            _ => self.grants.push_back((at_us, units)),
        }
        if self.grants.len() > MANY_MOMENTS {
            self.merge();
        }
        self.total
    }

    /// Merges pairs of grants. Each pair counts from its earlier time, so sums can only be too
    /// small.
    fn merge(&mut self) {
        let grants = std::mem::take(&mut self.grants);
        let mut pairs = grants.into_iter();
        while let Some((at_us, units)) = pairs.next() {
            let second = pairs.next().map_or(0, |(_, units)| units);
            self.grants.push_back((at_us, units + second));
        }
        self.merged = true;
    }

    fn is_over(&self, period_us: u64, now: Timestamp) -> bool {
        self.grants
            .back()
            .is_none_or(|(newest, _)| now.as_micros().saturating_sub(*newest) >= period_us)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn contender(limit: &str) -> Contender {
        Contender::new(crate::args::limit(limit).unwrap(), true)
    }

    fn event(number: u64, at_us: u64, key: &str) -> Event {
        Event { number, at_us, key: key.into(), cost: 1, op: Op::Check, expect: None }
    }

    #[test]
    fn the_busiest_period_may_begin_anywhere_and_excludes_its_first_moment() {
        let mut contender = contender("2/s window; 100/h");
        for (number, at_us) in (1..).zip([0, 900_000, 1_000_000, 1_100_000, 1_899_999]) {
            let _ = contender.decide(&event(number, at_us, "k"));
        }
        let most = contender.windows()[0].most;
        // 900000, 1000000 and 1100000; the last one came too early for the window, and the first
        // too early for the period.
        assert_eq!((most.units, most.from_us, most.at_least), (3, 900_000, false));
        assert_eq!(contender.windows()[1].most.units, 4);
    }

    #[test]
    fn streaks_of_denials_are_counted_key_by_key() {
        let mut contender = contender("1/s");
        for (number, key) in (1..).zip(["a", "b", "a", "b", "a", "b", "c"]) {
            let _ = contender.decide(&event(number, 0, key));
        }
        assert_eq!(contender.longest_streak(), 2);
    }

    #[test]
    fn too_many_moments_make_it_a_lower_bound() {
        let mut contender = contender("1000000/h");
        let hits = MANY_MOMENTS as u64 + 10;
        for n in 1..=hits {
            let _ = contender.decide(&event(n, n, "k"));
        }
        let most = contender.windows()[0].most;
        assert_eq!((most.units, most.at_least), (hits, true));
    }

    #[test]
    fn idle_keys_are_forgotten_when_there_are_many_and_live_ones_are_not() {
        let mut contender = contender("2/s");
        contender.sweep_at = 100;
        for n in 1..=100 {
            let _ = contender.decide(&event(n, 0, &format!("early-{n}")));
        }
        let _ = contender.decide(&event(101, 600_000, "late"));
        assert_eq!(
            contender.keys.len(),
            101,
            "half a second later all of them are in the busiest period still"
        );
        contender.sweep_at = 100;
        let _ = contender.decide(&event(102, 1_000_000, "later"));
        assert_eq!(contender.keys.len(), 2, "late and later");
        assert_eq!(contender.decide(&event(103, 1_000_000, "late")).remaining(), 0);
    }
}
