//! What the store has said of a charge last, and what follows from it for the time since. No clock
//! in here: whoever asks says what time it is.
//!
//! Three uses. A denial is certain until its wait is over, counted from the moment the question was
//! *sent*: the store judged later than that, so nothing is denied here that it would allow. The
//! fields of such a denial are those that the store would return, as the `expected` module derives
//! them. And what was left at the last answer, counted from the moment the answer *came*, is what
//! this node goes on from when it decides alone.

use tidegate_core::{Algorithm, CLOCK_TOLERANCE_US, Limit, Retry, Timestamp, Verdict};

/// What the store has said of one charge.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct LastAnswer {
    /// Which limit it was, by a hash.
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
    /// The store may hold the state in the scale of another limit, which ends at a time that no
    /// answer contains.
    pub(super) converted: bool,
    /// Denials that may still hold: the cheapest that is known, and the last one.
    denied: [Option<Denied>; 2],
    sends: Sends,
}

/// What this node has sent about one charge, and how much of it the last answer knew of.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Sends {
    /// Units of all checks that were sent,
    sent: u64,
    /// of which the last answer includes so many.
    included: u64,
    /// The largest of those that it does not include.
    largest: u64,
    /// Something may have come back since, or was sent and nobody knows what became of it.
    uncertain: bool,
}

/// A check of this cost is denied until then.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Denied {
    cost: u64,
    until: Timestamp,
}

impl LastAnswer {
    /// `at` is the store's time of the decision; `sent` and `answered` are this node's times of the
    /// call and of its answer.
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
            converted: false,
            denied: [None; 2],
            sends: Sends::default(),
        }
    }

    /// The store has denied `cost` in this answer: certain for as long as it said, but at most for
    /// `longest_us`. Others may give something back without this node hearing of it.
    pub(crate) fn deny(&mut self, cost: u64, retry: Retry, longest_us: u64) {
        let Retry::After(wait_us) = retry else { return };
        self.wait = Some((cost, wait_us));
        let denied = Denied { cost, until: self.sent.after_micros(wait_us.min(longest_us)) };
        match &mut self.denied {
            [Some(cheapest), last] if cheapest.until > self.sent && cheapest.cost < cost => {
                *last = Some(denied)
            }
            [cheapest, _] => *cheapest = Some(denied),
        }
    }

    /// Whether this answer is older than `known`. Calls that overlap are ordered by the store's
    /// clock; if it has stepped between them, by when they were sent.
    pub(crate) fn is_older_than(&self, known: &LastAnswer) -> bool {
        if self.sent >= known.answered {
            return false;
        }
        // Both were decided between the first call and the last answer.
        let at_most_us = self.answered.max(known.answered).micros_since(self.sent.min(known.sent));
        let apart_us = self.at.micros_since(known.at).max(known.at.micros_since(self.at));
        if apart_us > at_most_us.saturating_add(CLOCK_TOLERANCE_US) {
            return self.sent < known.sent;
        }
        (self.at, self.sent) < (known.at, known.sent)
    }

    /// An answer that is older than this one, of the question with this mark: this one includes
    /// whatever was sent before it, too.
    pub(crate) fn includes(&mut self, mark: Option<u64>) {
        self.sends.included = self.sends.included.max(mark.unwrap_or(0));
    }

    /// Takes over what an older answer said about denials and what still holds. `mark` is what
    /// [`sends`](LastAnswer::sends) said of the question that is answered now; `moved` says whether
    /// that call charged or gave back anything, which writes the state in this limit's scale.
    pub(crate) fn keep(&mut self, older: &LastAnswer, mark: Option<u64>, moved: bool) {
        self.converted = !moved && (older.converted || self.limit != older.limit);
        if self.limit == older.limit {
            self.sends = older.sends;
            match mark {
                // Whatever was sent before it was done before it.
                Some(mark) => {
                    self.sends.included = self.sends.included.max(mark);
                    self.sends.uncertain = false;
                }
                None => self.sends.uncertain = true,
            }
            self.denied =
                older.denied.map(|denied| denied.filter(|denied| denied.until > self.sent));
        }
    }

    /// Something was given back, or may have been: no denial is certain any more.
    pub(crate) fn forget_denials(&mut self) {
        self.denied = [None; 2];
        self.sends.uncertain = true;
    }

    /// A check of this cost is sent. The mark is for [`keep`](LastAnswer::keep).
    pub(crate) fn sends(&mut self, cost: u64) -> u64 {
        let Sends { sent, included, largest, .. } = &mut self.sends;
        *largest = if sent == included { cost } else { cost.max(*largest) };
        *sent = sent.saturating_add(cost);
        *sent
    }

    /// The mark of what was sent last.
    pub(crate) fn sent_so_far(&self) -> u64 {
        self.sends.sent
    }

    /// Nobody knows what became of something that was sent.
    pub(crate) fn lost(&mut self) {
        self.sends.uncertain = true;
    }

    /// The denial of `cost` because this node has already sent checks for all that can be left
    /// until `then`, by which it would be decided. Those that were sent cost no more than this one:
    /// if all of them pass, too little is left, and if one of them is denied this one would be,
    /// too, had it come together with that one. So it is denied in vain at most for what drains in
    /// one round trip. Its fields are those after all of them were charged.
    pub(crate) fn crowded(
        &self,
        limit: &Limit,
        cost: u64,
        now: Timestamp,
        then: Timestamp,
    ) -> Option<Verdict> {
        let Sends { sent, included, largest, uncertain } = self.sends;
        let under_way = sent.saturating_sub(included);
        if uncertain || under_way == 0 || largest > cost || cost > limit.capacity() {
            return None;
        }
        let crowded = self.at_most(limit, then)? < under_way.saturating_add(cost);
        let verdict = if crowded { self.strictest(limit, cost, under_way, now) } else { None };
        verdict.filter(|verdict| !verdict.allowed)
    }

    /// No more than this can be left, whatever others do but give back; where that is known.
    fn at_most(&self, limit: &Limit, then: Timestamp) -> Option<u64> {
        let passed_us = then.micros_since(self.sent);
        match limit.algorithm() {
            Algorithm::Bucket(bucket) => {
                let rate = bucket.rate;
                // Whatever was rounded, it was by less than a tick.
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

    /// Whether a check of `cost` is certainly denied.
    pub(crate) fn denies(&self, limit: &Limit, cost: u64, now: Timestamp) -> bool {
        let mut live = self.denied.iter().flatten().filter(|denied| denied.until > now);
        match limit.algorithm() {
            Algorithm::Bucket(_) | Algorithm::Window(_) => live.any(|denied| denied.cost <= cost),
            // Only of the same cost is known how long it waits.
            _ => live.any(|denied| denied.cost == cost),
        }
    }

    /// How much is left, if nobody else has taken anything since.
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

    /// The numbers for a client, when `remaining` units are left and `spent` more than the store
    /// knows of are in use.
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

    /// When everything is available again, if nobody takes anything: a fixed window is over then.
    pub(crate) fn reset_at(&self) -> Timestamp {
        self.sent.after_micros(self.reset_us)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(at_secs: u64, sent_ms: u64, answered_ms: u64) -> LastAnswer {
        let (sent, answered) =
            (Timestamp::from_millis(sent_ms), Timestamp::from_millis(answered_ms));
        LastAnswer::new(1, &Verdict::default(), Timestamp::from_secs(at_secs), sent, answered)
    }

    /// Two calls that overlap. As long as the store's clock runs forward it says which was decided
    /// later; when it has gone back an hour between them, an answer from before does not count as
    /// the newer one.
    #[test]
    fn overlapping_answers_are_ordered_although_the_clock_went_back() {
        let (first, second) = (seen(7_200, 0, 30), seen(7_201, 10, 1_020));
        assert!(first.is_older_than(&second) && !second.is_older_than(&first));
        let (before, after) = (seen(7_200, 0, 30), seen(3_600, 10, 20));
        assert!(before.is_older_than(&after) && !after.is_older_than(&before));
    }
}
