//! A second implementation of the algorithms, slow and obvious: the history of what was charged, one formula for how
//! much fits, and a search for everything else. Written from the definitions, without looking at
//! how the core does it.
//!
//! It knows every algorithm and every operation, with several charges and with ids. It does not
//! know what becomes of a state whose limit has changed: how that is converted and rounded is a
//! choice, not a definition, and a second copy of it would show nothing. `tidegate`'s tests of its
//! stores use this file, too.

mod operations;

use tidegate_core::{Algorithm, Id, Limit, Op, Verdict};

pub(crate) use self::operations::{Asked, decide};

/// What was charged and when. For a bucket, in shares of a token so small that a period has that
/// many of them.
#[derive(Clone, Copy, Debug)]
struct Past {
    at: u64,
    units: u128,
    /// Whose lease it is.
    id: Option<Id>,
}

/// What is remembered of a charge that came with an id.
#[derive(Clone, Copy, Debug)]
struct Receipt {
    id: Id,
    /// How much of it can still be given back.
    left: u64,
    /// Under which moment it is kept: the start of its window or step, or its own.
    at: u64,
    settled: bool,
}

/// From which charges something is given back.
#[derive(Clone, Copy)]
enum When {
    /// The newest first.
    Any,
    /// Those that are kept under this moment.
    At(u64),
}

/// One key under one limit.
#[derive(Clone, Debug)]
pub(crate) struct Naive {
    limit: Limit,
    /// Oldest first. What has ended when something changes is forgotten.
    past: Vec<Past>,
    /// The newest moment the key remembers: time does not go back behind it while anything is in
    /// use.
    newest: u64,
    /// The oldest first.
    receipts: Vec<Receipt>,
}

impl Naive {
    pub(crate) fn new(limit: &Limit) -> Self {
        Naive { limit: *limit, past: Vec::new(), newest: 0, receipts: Vec::new() }
    }

    #[allow(dead_code, reason = "as below")]
    pub(crate) fn limit(&self) -> &Limit {
        &self.limit
    }

    /// What a single charge without an id answers, field by field.
    #[allow(dead_code, reason = "some users of this file do not need it")]
    pub(crate) fn decide(&mut self, op: Op, now: u64, cost: u64) -> Verdict {
        decide(op, None, now, vec![Asked { key: self, cost, reserved: 0 }]).0.remove(0)
    }

    /// Charges `units` whether they fit or not.
    #[allow(dead_code, reason = "as above")]
    pub(crate) fn force(&mut self, now: u64, units: u64) {
        self.charge(self.clamped(now), units, None);
    }

    /// Whether nothing is in use at `now`, which does not go back.
    fn is_idle(&self, now: u64) -> bool {
        !self.past.iter().any(|past| self.counts(past, now))
    }

    /// Time does not go back.
    fn clamped(&self, now: u64) -> u64 {
        if self.past.is_empty() { now } else { now.max(self.newest) }
    }

    /// The first wait after which `cost` fits: found by trying.
    fn wait(&self, now: u64, cost: u64, ceiling: u64) -> u64 {
        let fits = |wait: u64| self.room(now + wait, ceiling) >= cost;
        if fits(0) {
            return 0;
        }
        let (mut too_early, mut enough) = (0, 1);
        while !fits(enough) {
            (too_early, enough) = (enough, enough * 2);
        }
        while too_early + 1 < enough {
            let middle = too_early + (enough - too_early) / 2;
            *(if fits(middle) { &mut enough } else { &mut too_early }) = middle;
        }
        enough
    }

    /// How much fits at `now`: the definition of each algorithm.
    pub(crate) fn room(&self, now: u64, ceiling: u64) -> u64 {
        let ceiling = u128::from(ceiling);
        let left = match self.limit.algorithm() {
            Algorithm::Bucket(bucket) => {
                let period = u128::from(bucket.period);
                (ceiling * period).saturating_sub(self.level(now)) / period
            }
            Algorithm::Estimate(estimate) => {
                // previous * (period - elapsed) + (current + cost) * period <= amount * period, in
                // ticks
                let grid = u128::from(estimate.grid);
                let period = u128::from(estimate.period) / grid;
                let window = now / estimate.period;
                let elapsed = u128::from(now % estimate.period) / grid;
                let sum = |index: u64| self.sum(|past| past.at / estimate.period == index);
                let previous = if window == 0 { 0 } else { sum(window - 1) };
                let taken = previous * (period - elapsed) + sum(window) * period;
                (ceiling * period).saturating_sub(taken) / period
            }
            _ => ceiling.saturating_sub(self.sum(|past| self.counts(past, now))),
        };
        left as u64
    }

    fn sum(&self, counts: impl Fn(&Past) -> bool) -> u128 {
        self.past.iter().filter(|past| counts(past)).map(|past| past.units).sum()
    }

    /// Whether a charge still counts at `now`.
    fn counts(&self, past: &Past, now: u64) -> bool {
        match self.limit.algorithm() {
            Algorithm::Bucket(_) => self.level(now) > 0,
            Algorithm::Window(window) if window.from_first_hit => {
                now < self.window_start(past.at, window.period) + window.period
            }
            Algorithm::Window(window) => past.at / window.period == now / window.period,
            Algorithm::Sliding(sliding) => {
                let index = past.at / sliding.step;
                let steps = sliding.period.div_ceil(sliding.step);
                if sliding.lenient {
                    now / sliding.step < index + steps
                } else {
                    (index + 1) * sliding.step - 1 + sliding.period > now
                }
            }
            Algorithm::Estimate(estimate) => past.at / estimate.period + 1 >= now / estimate.period,
            Algorithm::Log(log) => now < past.at + log.period,
            Algorithm::Concurrent(concurrent) => now < past.at + concurrent.ttl,
        }
    }

    /// When the first-hit window that holds `at` began.
    fn window_start(&self, at: u64, period: u64) -> u64 {
        let mut start = self.past[0].at;
        for past in self.past.iter().filter(|past| past.at <= at) {
            if past.at >= start + period {
                start = past.at;
            }
        }
        start
    }

    /// How full a bucket is: the fullest that any stretch of its past leaves it. Time is floored to
    /// its grid.
    fn level(&self, now: u64) -> u128 {
        let Algorithm::Bucket(bucket) = self.limit.algorithm() else { return 0 };
        let tick = u128::from(bucket.amount) * u128::from(self.limit.grid_us());
        let (mut level, mut since) = (0, 0);
        for past in self.past.iter().rev() {
            since += past.units;
            let ticks = now.saturating_sub(past.at) / self.limit.grid_us();
            level = since.saturating_sub(tick * u128::from(ticks)).max(level);
        }
        level
    }

    fn charge(&mut self, now: u64, units: u64, id: Option<Id>) {
        if units == 0 {
            return;
        }
        self.forget(now);
        let (at, share) = match self.limit.algorithm() {
            Algorithm::Bucket(bucket) => (self.tick(now), u128::from(bucket.period)),
            _ => (now, 1),
        };
        self.past.push(Past { at, units: u128::from(units) * share, id });
        self.newest = self.remembered(at);
    }

    /// The newest time that is still known after something was taken at `at`: a window knows its
    /// start, a step its own.
    fn remembered(&self, at: u64) -> u64 {
        match self.limit.algorithm() {
            Algorithm::Window(window) if window.from_first_hit => {
                self.window_start(at, window.period)
            }
            Algorithm::Window(window) => at / window.period * window.period,
            Algorithm::Sliding(sliding) => at / sliding.step * sliding.step,
            Algorithm::Estimate(estimate) => at / estimate.period * estimate.period,
            _ => at,
        }
    }

    /// What no longer counts when something changes is gone, even if the clock should go back.
    fn forget(&mut self, now: u64) {
        let all = self.clone();
        self.past.retain(|past| all.counts(past, now));
    }

    /// The tick of a bucket's clock that `now` is in.
    fn tick(&self, now: u64) -> u64 {
        now / self.limit.grid_us() * self.limit.grid_us()
    }

    /// Gives back up to `units`, the newest first, and says how many.
    fn give_back(&mut self, now: u64, units: u64, when: When) -> u64 {
        if let Algorithm::Bucket(bucket) = self.limit.algorithm() {
            let (level, share, at) = (self.level(now), u128::from(bucket.period), self.tick(now));
            // What has drained since the charge is gone.
            let ticks = if let When::At(then) = when {
                at.saturating_sub(then) / self.limit.grid_us()
            } else {
                0
            };
            let drained =
                u128::from(ticks) * u128::from(bucket.amount) * u128::from(self.limit.grid_us());
            let back = (u128::from(units) * share).saturating_sub(drained).min(level);
            if back > 0 {
                self.past = vec![Past { at, units: level - back, id: None }];
                self.past.retain(|past| past.units > 0);
                self.newest = at;
            }
            return back.div_ceil(share) as u64;
        }
        let mut after = self.clone();
        after.forget(now);
        let same: Vec<bool> = after
            .past
            .iter()
            .map(|past| matches!(when, When::Any) || after.is_kept_under(past, when))
            .collect();
        let mut left = u128::from(units);
        for (past, _) in after.past.iter_mut().zip(same).rev().filter(|(_, same)| *same) {
            let back = left.min(past.units);
            past.units -= back;
            left -= back;
        }
        let back = (u128::from(units) - left) as u64;
        if back == 0 {
            return 0;
        }
        after.past.retain(|past| past.units > 0);
        match (after.limit.algorithm(), after.past.last()) {
            // These remember no more than their entries.
            (Algorithm::Log(_) | Algorithm::Sliding(_), Some(last)) => {
                after.newest = after.remembered(last.at)
            }
            // An estimate remembers in which window it last was.
            (Algorithm::Estimate(estimate), _) => {
                after.newest = after.newest.max(now / estimate.period * estimate.period);
            }
            _ => {}
        }
        *self = after;
        back
    }

    fn is_kept_under(&self, past: &Past, when: When) -> bool {
        matches!(when, When::At(at) if self.remembered(past.at) == at)
    }

    /// Ends a lease.
    fn release(&mut self, now: u64, id: Id) {
        self.forget(now);
        self.past.retain(|past| past.id != Some(id));
    }

    /// Takes `cost` from a bucket for the moment `wait` from now. Should it run dry before that, it
    /// saves nothing up.
    fn book(&mut self, now: u64, wait: u64, cost: u64) {
        let Algorithm::Bucket(bucket) = self.limit.algorithm() else {
            unreachable!("only a bucket keeps places")
        };
        let (at, grid) = (self.tick(now), self.limit.grid_us());
        let drained =
            u128::from((now + wait - at) / grid) * u128::from(bucket.amount) * u128::from(grid);
        let units = self.level(now).max(drained) + u128::from(cost) * u128::from(bucket.period);
        self.past = vec![Past { at, units, id: None }];
        self.newest = at;
    }

    /// When a bucket will be empty.
    fn bucket_idle_at(&self, now: u64) -> Option<u64> {
        let Algorithm::Bucket(bucket) = self.limit.algorithm() else { return None };
        let tick = u128::from(bucket.amount) * u128::from(self.limit.grid_us());
        Some(self.tick(now) + self.level(now).div_ceil(tick) as u64 * self.limit.grid_us())
    }
}
