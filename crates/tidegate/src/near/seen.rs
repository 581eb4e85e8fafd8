//! What the store has said of a charge last, and what follows from it for the time since. No clock in here: whoever asks says what time it is.
//!
//! Two uses. A denial is certain until its wait is over, counted from the moment the question was *sent*: the store judged later than that, so
//! nothing is denied here that it would allow. And what was left at the last answer, counted from the moment the answer *came*, is what
//! this node goes on from when it decides alone.

use tidegate_core::{Algorithm, Limit, Retry, Timestamp, Verdict};

/// What the store has said of one charge.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Seen {
    /// Which limit it was, by a hash.
    pub(crate) limit: u64,
    pub(crate) sent: Timestamp,
    pub(crate) answered: Timestamp,
    remaining: u64,
    reset_us: u64,
    next_us: u64,
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

/// What costs this much is denied.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Denied {
    cost: u64,
    /// For certain until then,
    until: Timestamp,
    /// and this is when the client is told to come back.
    retry: Timestamp,
}

impl Seen {
    pub(crate) fn new(limit: u64, verdict: &Verdict, sent: Timestamp, answered: Timestamp) -> Self {
        let &Verdict { remaining, reset_after_us: reset_us, next_after_us: next_us, .. } = verdict;
        Seen { limit, sent, answered, remaining, reset_us, next_us, denied: [None; 2], sends: Sends::default() }
    }

    /// The store has denied `cost` in this answer: certain for as long as it said, but at most for `longest_us`. Others may give something
    /// back without this node hearing of it.
    pub(crate) fn deny(&mut self, cost: u64, retry: Retry, longest_us: u64) {
        let Retry::After(wait_us) = retry else { return };
        let until = self.sent.after_micros(wait_us.min(longest_us));
        let denied = Denied { cost, until, retry: self.answered.after_micros(wait_us) };
        match &mut self.denied {
            [Some(cheapest), last] if cheapest.until > self.sent && cheapest.cost < cost => *last = Some(denied),
            [cheapest, _] => *cheapest = Some(denied),
        }
    }

    /// Takes over what an older answer said about denials and what still holds. `mark` is what [`sends`](Seen::sends) said of the question that
    /// is answered now.
    pub(crate) fn keep(&mut self, older: &Seen, mark: Option<u64>) {
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
            self.denied = older.denied.map(|denied| denied.filter(|denied| denied.until > self.sent));
        }
    }

    /// Something was given back, or may have been: no denial is certain any more.
    pub(crate) fn forget_denials(&mut self) {
        self.denied = [None; 2];
        self.sends.uncertain = true;
    }

    /// A check of this cost is sent. The mark is for [`keep`](Seen::keep).
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

    /// How long `cost` has to wait because this node has already sent checks for all that can be left until `then`, by which it would be decided.
    /// Those that were sent cost no more than this one: if all of them pass, too little is left, and if one of them is denied this one would be,
    /// too, had it come together with that one. So it is denied in vain at most for what drains in one round trip.
    pub(crate) fn crowded(&self, limit: &Limit, cost: u64, now: Timestamp, then: Timestamp) -> Option<u64> {
        let Sends { sent, included, largest, uncertain } = self.sends;
        let under_way = sent.saturating_sub(included);
        if uncertain || under_way == 0 || largest > cost || cost > limit.capacity() {
            return None;
        }
        let crowded = self.at_most(limit, then)? < under_way.saturating_add(cost);
        crowded.then(|| self.wait_us(limit, cost, under_way, now))
    }

    /// No more than this can be left, whatever others do but give back; where that is known.
    fn at_most(&self, limit: &Limit, then: Timestamp) -> Option<u64> {
        let passed_us = then.micros_since(self.sent);
        match limit.algorithm() {
            Algorithm::Bucket(bucket) => {
                let rate = bucket.rate;
                // Whatever was rounded, it was by less than a tick.
                let level = u128::from((self.reset_us / rate.grid).saturating_sub(1)) * u128::from(rate.p);
                let drained = (u128::from(passed_us / rate.grid) + 1) * u128::from(rate.p);
                let full = u128::from(bucket.capacity) * u128::from(rate.q);
                let free = full.saturating_sub(level.saturating_sub(drained)) / u128::from(rate.q);
                Some(u64::try_from(free).unwrap_or(u64::MAX).max(self.remaining).min(bucket.capacity))
            }
            Algorithm::Window(_) if passed_us < self.reset_us => Some(self.remaining),
            _ => None,
        }
    }

    /// How long `cost` is certainly denied: what the client is told to wait, if it is.
    pub(crate) fn denied(&self, limit: &Limit, cost: u64, now: Timestamp) -> Option<u64> {
        if cost > limit.capacity() {
            return None; // that is never, and the store says it best
        }
        let mut live = self.denied.iter().flatten().filter(|denied| denied.until > now);
        let (known, more_us) = match limit.algorithm() {
            // What costs more waits longer, by exactly the time the difference takes to drain.
            Algorithm::Bucket(bucket) => {
                let known = live.filter(|denied| denied.cost <= cost).max_by_key(|denied| denied.cost)?;
                let units = u128::from(cost - known.cost) * u128::from(bucket.rate.q);
                let ticks = u64::try_from(units.div_ceil(u128::from(bucket.rate.p))).unwrap_or(u64::MAX);
                (known, ticks.saturating_mul(bucket.rate.grid))
            }
            // Everything waits for the end of the window.
            Algorithm::Window(_) => (live.find(|denied| denied.cost <= cost)?, 0),
            // What costs more waits longer, but who knows how long: only the same cost is known.
            _ => (live.find(|denied| denied.cost == cost)?, 0),
        };
        Some(known.retry.micros_since(now).saturating_add(more_us).max(1))
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
                let free =
                    (u128::from(bucket.capacity) * u128::from(rate.q)).saturating_sub(level) / u128::from(rate.q);
                u64::try_from(free).unwrap_or(u64::MAX).max(self.remaining).min(bucket.capacity)
            }
            _ if passed_us >= self.reset_us => limit.capacity(),
            _ => self.remaining,
        }
    }

    /// How long until `cost` fits, as far as is known; `spent` units more than the store knows of are in use.
    pub(crate) fn wait_us(&self, limit: &Limit, cost: u64, spent: u64, now: Timestamp) -> u64 {
        let passed_us = now.micros_since(self.answered);
        match limit.algorithm() {
            Algorithm::Bucket(bucket) => {
                let rate = bucket.rate;
                let level = (u128::from(self.reset_us.div_ceil(rate.grid)) * u128::from(rate.p))
                    .saturating_sub(u128::from(passed_us / rate.grid) * u128::from(rate.p));
                let wanted = level + (u128::from(cost) + u128::from(spent)) * u128::from(rate.q);
                let over = wanted.saturating_sub(u128::from(bucket.capacity) * u128::from(rate.q));
                let ticks = u64::try_from(over.div_ceil(u128::from(rate.p))).unwrap_or(u64::MAX);
                ticks.saturating_mul(rate.grid).max(1)
            }
            Algorithm::Window(_) => self.reset_us.saturating_sub(passed_us).max(1),
            _ if cost <= self.remaining.saturating_add(1) => self.next_us.saturating_sub(passed_us).max(1),
            _ => self.reset_us.saturating_sub(passed_us).max(1),
        }
    }

    /// The numbers for a client, when `remaining` units are left and `spent` more than the store knows of are in use.
    pub(crate) fn verdict(&self, limit: &Limit, remaining: u64, spent: u64, now: Timestamp) -> Verdict {
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
