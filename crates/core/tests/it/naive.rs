//! The algorithms once more, slow and obvious: the history of what was charged, one formula for how much fits, and a
//! search for everything else. Written from the definitions, without looking at how the core does it.

use tidegate_core::{Algorithm, Limit, Op, Retry, Verdict};

/// What was charged and when. For a bucket, in shares of a token so small that a period has that many of them.
#[derive(Clone, Copy, Debug)]
struct Past {
    at: u64,
    units: u128,
}

/// One key under one limit.
#[derive(Clone, Debug)]
pub(crate) struct Naive {
    limit: Limit,
    /// Oldest first. What has ended when something changes is forgotten.
    past: Vec<Past>,
    /// The newest moment the key remembers: time does not go back behind it while anything is in use.
    newest: u64,
}

impl Naive {
    pub(crate) fn new(limit: &Limit) -> Self {
        Naive { limit: *limit, past: Vec::new(), newest: 0 }
    }

    /// What a single charge answers, field by field.
    pub(crate) fn decide(&mut self, op: Op, now: u64, cost: u64) -> Verdict {
        let now = self.clamped(now);
        let capacity = self.limit.capacity();
        let ceiling = if op == Op::Debit { capacity + self.limit.debt() } else { capacity };
        let room = self.room(now, ceiling);
        let fits = match op {
            Op::Check | Op::Debit | Op::Peek => cost <= room,
            Op::Take => cost == 0 || room > 0,
            _ => true,
        };
        let mut granted = 0;
        match op {
            Op::Check | Op::Debit if fits => granted = cost,
            Op::Take => granted = cost.min(room),
            Op::Refund => granted = self.give_back(now, cost),
            Op::Reset => self.past.clear(),
            _ => {}
        }
        if matches!(op, Op::Check | Op::Debit | Op::Take) {
            self.charge(now, granted);
        }
        if op == Op::Check && !fits && self.limit.counts_rejected() && cost <= capacity {
            let most = capacity + self.limit.algorithm().amount();
            self.charge(now, cost.min(self.room(now, most)));
        }
        let retry = match op {
            _ if fits => Retry::Now,
            Op::Take => Retry::After(self.wait(now, 1, capacity)),
            _ if cost > ceiling => Retry::Never,
            _ => Retry::After(self.wait(now, cost, ceiling)),
        };
        let remaining = self.room(now, capacity);
        Verdict {
            allowed: fits,
            granted,
            amount: capacity,
            remaining,
            retry,
            reset_after_us: self.wait(now, capacity, capacity),
            next_after_us: if remaining == capacity { 0 } else { self.wait(now, remaining + 1, capacity) },
        }
    }

    /// Charges `units` whether they fit or not.
    pub(crate) fn force(&mut self, now: u64, units: u64) {
        self.charge(self.clamped(now), units);
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
                // previous * (period - elapsed) + (current + cost) * period <= amount * period, in ticks
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

    /// How full a bucket is: the fullest that any stretch of its past leaves it. Time is floored to its grid.
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

    fn charge(&mut self, now: u64, units: u64) {
        if units == 0 {
            return;
        }
        self.forget(now);
        let (at, share) = match self.limit.algorithm() {
            Algorithm::Bucket(bucket) => (self.tick(now), u128::from(bucket.period)),
            _ => (now, 1),
        };
        self.past.push(Past { at, units: u128::from(units) * share });
        self.newest = self.remembered(at);
    }

    /// The newest time that is still known after something was taken at `at`: a window knows its start, a step its own.
    fn remembered(&self, at: u64) -> u64 {
        match self.limit.algorithm() {
            Algorithm::Window(window) if window.from_first_hit => self.window_start(at, window.period),
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

    /// Gives back up to `units` without asking whose they were, the newest first.
    fn give_back(&mut self, now: u64, units: u64) -> u64 {
        if units == 0 {
            return 0;
        }
        if let Algorithm::Bucket(bucket) = self.limit.algorithm() {
            let (level, share) = (self.level(now), u128::from(bucket.period));
            let back = level.min(u128::from(units) * share);
            if back > 0 {
                let at = self.tick(now);
                self.past = vec![Past { at, units: level - back }];
                self.past.retain(|past| past.units > 0);
                self.newest = at;
            }
            return back.div_ceil(share) as u64;
        }
        let live: u128 = self.sum(|past| self.counts(past, now));
        if live == 0 {
            return 0;
        }
        self.forget(now);
        let mut left = u128::from(units);
        for past in self.past.iter_mut().rev() {
            let back = left.min(past.units);
            past.units -= back;
            left -= back;
        }
        self.past.retain(|past| past.units > 0);
        match (self.limit.algorithm(), self.past.last()) {
            // These remember no more than their entries.
            (Algorithm::Log(_) | Algorithm::Sliding(_), Some(last)) => self.newest = self.remembered(last.at),
            // An estimate remembers in which window it last was.
            (Algorithm::Estimate(estimate), _) => {
                self.newest = self.newest.max(now / estimate.period * estimate.period);
            }
            _ => {}
        }
        u64::try_from(u128::from(units) - left).expect("no more than was asked for")
    }
}
