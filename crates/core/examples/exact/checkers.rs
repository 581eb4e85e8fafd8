//! A second implementation of the rules, each O(1) amortised and with a state of its own. Nothing here knows the
//! core.

use std::collections::{BTreeMap, VecDeque};

/// What a checker says of a decision: whether it must be allowed, how much must be left afterwards,
/// and whether the bound that the algorithm promises still holds.
pub(crate) struct Answer {
    pub(crate) allowed: bool,
    pub(crate) left: u64,
    pub(crate) bounded: bool,
}

/// One key, decided without the core.
pub(crate) trait Checker {
    fn ask(&mut self, now: u64, cost: u64) -> Answer;
}

/// The theoretical arrival time, in parts of which a microsecond has `amount` and a unit `period`.
/// On a coarse grid time is floored to the tick it is in.
pub(crate) struct Arrival {
    pub(crate) amount: u128,
    pub(crate) period: u128,
    pub(crate) burst: u128,
    pub(crate) grid: u64,
    pub(crate) arrival: u128,
    /// The most that any span until now has admitted beyond the rate: the bound, by the real clock.
    pub(crate) excess: u128,
    pub(crate) at: u64,
}

impl Checker for Arrival {
    fn ask(&mut self, now: u64, cost: u64) -> Answer {
        let time = u128::from(now / self.grid * self.grid) * self.amount;
        let latest = time + self.burst * self.period;
        let next = self.arrival.max(time) + u128::from(cost) * self.period;
        self.excess = self.excess.saturating_sub(u128::from(now - self.at) * self.amount);
        self.at = now;
        let allowed = next <= latest;
        if allowed {
            self.arrival = next;
            self.excess += u128::from(cost) * self.period;
        }
        // A span that begins within a tick of a coarse grid may hold one more.
        let most = self.burst * self.period + u128::from(self.grid - 1) * self.amount;
        let left = (latest - self.arrival.max(time)) / self.period;
        Answer { allowed, left: left as u64, bounded: self.excess <= most }
    }
}

/// One counter for each window since the epoch.
pub(crate) struct Epoch {
    pub(crate) amount: u64,
    pub(crate) period: u64,
    pub(crate) window: u64,
    pub(crate) used: u64,
}

impl Checker for Epoch {
    fn ask(&mut self, now: u64, cost: u64) -> Answer {
        if now / self.period != self.window {
            (self.window, self.used) = (now / self.period, 0);
        }
        let allowed = cost <= self.amount - self.used;
        self.used += if allowed { cost } else { 0 };
        Answer { allowed, left: self.amount - self.used, bounded: self.used <= self.amount }
    }
}

/// One counter for each window since its first hit.
pub(crate) struct FirstHit {
    pub(crate) amount: u64,
    pub(crate) period: u64,
    pub(crate) start: u64,
    pub(crate) used: u64,
}

impl Checker for FirstHit {
    fn ask(&mut self, now: u64, cost: u64) -> Answer {
        if self.used > 0 && now >= self.start + self.period {
            self.used = 0;
        }
        let allowed = cost <= self.amount - self.used;
        if allowed && cost > 0 {
            self.start = if self.used == 0 { now } else { self.start };
            self.used += cost;
        }
        Answer { allowed, left: self.amount - self.used, bounded: self.used <= self.amount }
    }
}

/// The moments of the last `amount` units: the next must come a period after the oldest of them.
pub(crate) struct Ring {
    pub(crate) moments: Vec<u64>,
    pub(crate) next: usize,
    pub(crate) period: u64,
}

impl Ring {
    pub(crate) fn new(amount: u64, period: u64) -> Self {
        Ring { moments: vec![0; amount as usize], next: 0, period }
    }

    /// Whether `cost` more units keep the distance: the exact rule of a log.
    fn admits(&self, now: u64, cost: u64) -> bool {
        let amount = self.moments.len();
        let Some(before) = cost.checked_sub(1) else { return true };
        cost <= amount as u64
            && now - self.moments[(self.next + before as usize) % amount] >= self.period
    }

    fn push(&mut self, now: u64, cost: u64) {
        for _ in 0..cost {
            self.moments[self.next] = now;
            self.next = (self.next + 1) % self.moments.len();
        }
    }
}

/// A counter for each step; strict ones also keep the distance that a log would.
pub(crate) struct Steps {
    pub(crate) amount: u64,
    pub(crate) period: u64,
    pub(crate) step: u64,
    pub(crate) live: VecDeque<(u64, u64)>,
    pub(crate) used: u64,
    pub(crate) ring: Option<Ring>,
}

impl Checker for Steps {
    fn ask(&mut self, now: u64, cost: u64) -> Answer {
        let steps = self.period.div_ceil(self.step);
        while let Some((start, used)) = self.live.front() {
            let (last_hit, whole) = (start + self.step - 1, start + steps * self.step);
            if now < if self.ring.is_some() { last_hit + self.period } else { whole } {
                break;
            }
            self.used -= used;
            self.live.pop_front();
        }
        let allowed = cost <= self.amount - self.used;
        let mut bounded = true;
        if allowed && cost > 0 {
            self.used += cost;
            let start = now - now % self.step;
            match self.live.back_mut() {
                Some(newest) if newest.0 == start => newest.1 += cost,
                _ => self.live.push_back((start, cost)),
            }
            if let Some(ring) = &mut self.ring {
                bounded = ring.admits(now, cost);
                ring.push(now, cost);
            }
        }
        Answer { allowed, left: self.amount - self.used, bounded }
    }
}

/// Two counters, and the formula as it is written.
pub(crate) struct TwoWindows {
    pub(crate) amount: u64,
    pub(crate) period: u64,
    pub(crate) grid: u64,
    pub(crate) window: u64,
    pub(crate) previous: u64,
    pub(crate) current: u64,
}

impl Checker for TwoWindows {
    fn ask(&mut self, now: u64, cost: u64) -> Answer {
        let window = now / self.period;
        if window != self.window {
            self.previous = if window == self.window + 1 { self.current } else { 0 };
            (self.window, self.current) = (window, 0);
        }
        let whole = u128::from(self.period / self.grid);
        let gone = u128::from(now % self.period / self.grid);
        let most = u128::from(self.amount) * whole;
        let taken =
            |current: u64| u128::from(self.previous) * (whole - gone) + u128::from(current) * whole;
        let allowed = cost == 0 || taken(self.current.saturating_add(cost)) <= most;
        let current = if allowed { self.current + cost } else { self.current };
        let left = (most.saturating_sub(taken(current)) / whole) as u64;
        self.current = current;
        Answer { allowed, left, bounded: self.current <= self.amount }
    }
}

/// Every unit: by its distance to the one `amount` before it.
pub(crate) struct Every {
    pub(crate) ring: Ring,
    pub(crate) live: VecDeque<(u64, u64)>,
    pub(crate) used: u64,
}

impl Checker for Every {
    fn ask(&mut self, now: u64, cost: u64) -> Answer {
        while let Some((_, units)) = self.live.pop_front_if(|(at, _)| now - *at >= self.ring.period)
        {
            self.used -= units;
        }
        let allowed = self.ring.admits(now, cost);
        if allowed && cost > 0 {
            self.ring.push(now, cost);
            self.live.push_back((now, cost));
            self.used += cost;
        }
        let amount = self.ring.moments.len() as u64;
        Answer { allowed, left: amount - self.used.min(amount), bounded: self.used <= amount }
    }
}

/// The leases in flight, by when they end.
pub(crate) struct Deadlines {
    pub(crate) amount: u64,
    pub(crate) ttl: u64,
    pub(crate) live: BTreeMap<u64, u64>,
    pub(crate) used: u64,
}

impl Checker for Deadlines {
    fn ask(&mut self, now: u64, cost: u64) -> Answer {
        while let Some(first) = self.live.first_entry().filter(|first| *first.key() <= now) {
            self.used -= first.remove();
        }
        let allowed = self.used + cost <= self.amount;
        if allowed && cost > 0 {
            *self.live.entry(now + self.ttl).or_default() += cost;
            self.used += cost;
        }
        Answer { allowed, left: self.amount - self.used, bounded: self.used <= self.amount }
    }
}
