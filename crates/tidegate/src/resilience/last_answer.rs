//! The last answer of the store about a charge, and what it proves about later checks. No clock:
//! time is an argument.
//!
//! It has three uses. The deny cache: a denial holds until its wait is over, counted from the time
//! the call was *sent*. The store decided later than that, so nothing is denied here that it would
//! allow. The fields of a cached denial: those that the store would return, as the
//! [`expected`](super::expected) module derives them. The fallback: what was left at the last
//! answer, counted from the time the answer *arrived*, is where the share of this node starts.

use tidegate_core::{Algorithm, CLOCK_TOLERANCE_US, Limit, Retry, Timestamp, Verdict};

/// The last answer of the store about one charge.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct LastAnswer {
    /// The limit, as a [hash](super::fingerprint::Fingerprints::limit).
    pub(crate) limit: u64,
    pub(crate) sent: Timestamp,
    pub(crate) answered: Timestamp,
    /// When the store decided, by its own clock.
    pub(super) at: Timestamp,
    pub(super) remaining: u64,
    pub(super) reset_us: u64,
    pub(super) next_us: u64,
    /// The cost that this answer denied, and its wait in microseconds.
    pub(super) wait: Option<(u64, u64)>,
    /// Whether the store may hold the state in the scale of another limit, which drains at a time
    /// that no answer contains.
    pub(super) is_converted: bool,
    /// Denials that may still hold: the cheapest one, and the last one.
    denied: [Option<CachedDenial>; 2],
    in_flight: InFlightUnits,
}

/// The units this node has sent about one charge, and how many of them the last answer includes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct InFlightUnits {
    /// The units of all checks sent.
    sent: u64,
    /// How many of them the last answer includes.
    included: u64,
    /// The largest cost that it does not include.
    largest: u64,
    /// Whether something may have been given back since, or a call has an unknown outcome.
    is_uncertain: bool,
}

/// A denial that holds for this cost until then.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct CachedDenial {
    cost: u64,
    until: Timestamp,
}

impl LastAnswer {
    /// `at` is the store's time of the decision; `sent` and `answered` are this node's times of the
    /// call and its answer.
    pub(crate) fn new(
        limit: u64,
        verdict: &Verdict,
        at: Timestamp,
        sent: Timestamp,
        answered: Timestamp,
    ) -> Self {
        let &Verdict { remaining, reset_after_us: reset_us, next_after_us: next_us, .. } = verdict;
        LastAnswer {
            limit,
            sent,
            answered,
            at,
            remaining,
            reset_us,
            next_us,
            wait: None,
            is_converted: false,
            denied: [None; 2],
            in_flight: InFlightUnits::default(),
        }
    }

    /// Caches the denial of `cost` for as long as the store said, at most for `longest_us`: other
    /// nodes may give something back meanwhile.
    pub(crate) fn deny(&mut self, cost: u64, retry: Retry, longest_us: u64) {
        let Retry::After(wait_us) = retry else { return };
        self.wait = Some((cost, wait_us));
        let denied = CachedDenial { cost, until: self.sent.after_micros(wait_us.min(longest_us)) };
        match &mut self.denied {
            [Some(cheapest), last] if cheapest.until > self.sent && cheapest.cost < cost => {
                *last = Some(denied)
            }
            [cheapest, _] => *cheapest = Some(denied),
        }
    }

    /// Whether this answer is older than `known`. Overlapping calls are ordered by the store's
    /// clock; if that clock has stepped between them, by when they were sent.
    pub(crate) fn is_older_than(&self, known: &LastAnswer) -> bool {
        if self.sent >= known.answered {
            return false;
        }
        // The store decided both between the first call and the last answer.
        let at_most_us = self.answered.max(known.answered).micros_since(self.sent.min(known.sent));
        let apart_us = self.at.micros_since(known.at).max(known.at.micros_since(self.at));
        if apart_us > at_most_us.saturating_add(CLOCK_TOLERANCE_US) {
            return self.sent < known.sent;
        }
        (self.at, self.sent) < (known.at, known.sent)
    }

    /// Records that an older answer, of the call with this mark, has arrived: this answer includes
    /// all calls up to that mark.
    pub(crate) fn includes(&mut self, mark: Option<u64>) {
        self.in_flight.included = self.in_flight.included.max(mark.unwrap_or(0));
    }

    /// Takes over from an older answer the denials that still hold and the units in flight. `mark`
    /// is what [`sends`](LastAnswer::sends) returned for the call answered now; `has_written` says
    /// whether that call changed the state, which writes it in this limit's scale.
    pub(crate) fn keep(&mut self, older: &LastAnswer, mark: Option<u64>, has_written: bool) {
        self.is_converted = !has_written && (older.is_converted || self.limit != older.limit);
        if self.limit == older.limit {
            self.in_flight = older.in_flight;
            match mark {
                // Calls sent before it were decided before it.
                Some(mark) => {
                    self.in_flight.included = self.in_flight.included.max(mark);
                    self.in_flight.is_uncertain = false;
                }
                None => self.in_flight.is_uncertain = true,
            }
            self.denied =
                older.denied.map(|denied| denied.filter(|denied| denied.until > self.sent));
        }
    }

    /// Clears the cached denials: something was given back, or may have been.
    pub(crate) fn forget_denials(&mut self) {
        self.denied = [None; 2];
        self.in_flight.is_uncertain = true;
    }

    /// Records a check in flight. Returns its mark, for [`keep`](LastAnswer::keep).
    pub(crate) fn sends(&mut self, cost: u64) -> u64 {
        let InFlightUnits { sent, included, largest, .. } = &mut self.in_flight;
        *largest = if sent == included { cost } else { cost.max(*largest) };
        *sent = sent.saturating_add(cost);
        *sent
    }

    /// The mark of the last check sent.
    pub(crate) fn sent_so_far(&self) -> u64 {
        self.in_flight.sent
    }

    /// Records that the outcome of a check in flight is unknown.
    pub(crate) fn lost(&mut self) {
        self.in_flight.is_uncertain = true;
    }

    /// The denial of `cost` because this node has already sent checks for all that can be left at
    /// `then`, the latest time of its decision.
    ///
    /// The checks in flight cost no more than this one: if all are allowed, too little is left, and
    /// if one is denied, this one would be denied next to it. So the denial is wrong at most for
    /// what drains in one round trip. Its fields assume that all of them are charged.
    pub(crate) fn denied_by_in_flight(
        &self,
        limit: &Limit,
        cost: u64,
        now: Timestamp,
        then: Timestamp,
    ) -> Option<Verdict> {
        let InFlightUnits { sent, included, largest, is_uncertain } = self.in_flight;
        let in_flight = sent.saturating_sub(included);
        if is_uncertain || in_flight == 0 || largest > cost || cost > limit.capacity() {
            return None;
        }
        let is_denied = self.max_left(limit, then)? < in_flight.saturating_add(cost);
        let verdict = if is_denied { self.strictest(limit, cost, in_flight, now) } else { None };
        verdict.filter(|verdict| !verdict.allowed)
    }

    /// The most that can be left then if nothing is given back, where that is known.
    fn max_left(&self, limit: &Limit, then: Timestamp) -> Option<u64> {
        let passed_us = then.micros_since(self.sent);
        match limit.algorithm() {
            Algorithm::Bucket(bucket) => {
                let rate = bucket.rate;
                // Rounding accounts for less than a tick.
                let level =
                    u128::from((self.reset_us / rate.grid).saturating_sub(1)) * u128::from(rate.p);
                let drained = (u128::from(passed_us / rate.grid) + 1) * u128::from(rate.p);
                let full = u128::from(bucket.capacity) * u128::from(rate.q);
                let free = full.saturating_sub(level.saturating_sub(drained)) / u128::from(rate.q);
                Some(
                    u64::try_from(free)
                        .unwrap_or(u64::MAX)
                        .max(self.remaining)
                        .min(bucket.capacity),
                )
            }
            Algorithm::Window(_) if passed_us < self.reset_us => Some(self.remaining),
            _ => None,
        }
    }

    /// Whether a cached denial holds for a check of `cost`.
    pub(crate) fn denies(&self, limit: &Limit, cost: u64, now: Timestamp) -> bool {
        let mut live = self.denied.iter().flatten().filter(|denied| denied.until > now);
        match limit.algorithm() {
            Algorithm::Bucket(_) | Algorithm::Window(_) => live.any(|denied| denied.cost <= cost),
            // The wait is known for the same cost only.
            _ => live.any(|denied| denied.cost == cost),
        }
    }

    /// How much is left if nothing else was charged since.
    pub(crate) fn left(&self, limit: &Limit, now: Timestamp) -> u64 {
        let passed_us = now.micros_since(self.answered);
        match limit.algorithm() {
            Algorithm::Bucket(bucket) => {
                let rate = bucket.rate;
                // The level at the answer, rounded up to a whole tick.
                let level = u128::from(self.reset_us.div_ceil(rate.grid)) * u128::from(rate.p);
                let drained = u128::from(passed_us / rate.grid) * u128::from(rate.p);
                let level = level.saturating_sub(drained);
                let free = (u128::from(bucket.capacity) * u128::from(rate.q)).saturating_sub(level)
                    / u128::from(rate.q);
                u64::try_from(free).unwrap_or(u64::MAX).max(self.remaining).min(bucket.capacity)
            }
            _ if passed_us >= self.reset_us => limit.capacity(),
            _ => self.remaining,
        }
    }

    /// The fields of an allowed check when `remaining` units are left and `spent` units are in use
    /// that the store does not know of.
    pub(crate) fn verdict(
        &self,
        limit: &Limit,
        remaining: u64,
        spent: u64,
        now: Timestamp,
    ) -> Verdict {
        let passed_us = now.micros_since(self.answered);
        let spent_us = match limit.algorithm() {
            Algorithm::Bucket(bucket) => {
                let units = u128::from(spent) * u128::from(bucket.rate.q);
                u64::try_from(units.div_ceil(u128::from(bucket.rate.p)))
                    .unwrap_or(u64::MAX)
                    .saturating_mul(bucket.rate.grid)
            }
            _ => 0,
        };
        Verdict {
            allowed: true,
            granted: 0,
            amount: limit.capacity(),
            remaining,
            retry: Retry::Now,
            reset_after_us: self.reset_us.saturating_sub(passed_us).saturating_add(spent_us),
            next_after_us: self.next_us.saturating_sub(passed_us),
        }
    }

    /// When everything is available again if nothing else is charged; a fixed window ends then.
    pub(crate) fn reset_at(&self) -> Timestamp {
        self.sent.after_micros(self.reset_us)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(at_secs: u64, sent_ms: u64, answered_ms: u64) -> LastAnswer {
        let (sent, answered) =
            (Timestamp::from_millis(sent_ms), Timestamp::from_millis(answered_ms));
        LastAnswer::new(1, &Verdict::default(), Timestamp::from_secs(at_secs), sent, answered)
    }

    /// While the store's clock runs forward it orders two overlapping calls. When it has gone back an
    /// hour between them, the answer from before does not count as the newer one.
    #[test]
    fn overlapping_answers_stay_in_order_when_the_clock_goes_back() {
        let (first, second) = (answer(7_200, 0, 30), answer(7_201, 10, 1_020));
        assert!(first.is_older_than(&second) && !second.is_older_than(&first));
        let (before, after) = (answer(7_200, 0, 30), answer(3_600, 10, 20));
        assert!(before.is_older_than(&after) && !after.is_older_than(&before));
    }
}
