//! The bucket: token bucket, leaky bucket (funnel) and GCRA, which are one rule in three
//! vocabularies.
//!
//! A charge pours its cost in; the bucket drains evenly at `amount` per `period`; what would
//! overflow the capacity is denied. A token bucket calls the space above the level its tokens; GCRA
//! calls the moment at which the level will be zero its theoretical arrival time.
//!
//! **Exactness.** The level is counted in units so small that every tick of the clock drains a
//! whole number of them: one token is `q` units, one tick drains `p`. Nothing is ever rounded, so 7
//! per minute is 7 per minute for ever.

use core::cmp::max;

use super::{GRIDS_US, Kernel, Moved};
use crate::Id;
use crate::exact::{gcd, mul_div_ceil, mul_div_floor};
use crate::limit::{LimitError, Parameter, Problem};
use crate::time::{EXACT, MAX_WAIT_US, Period, Timestamp};

/// A token has at least this many units where the exact domain allows it, so that carrying a level
/// over to another rate, which rounds up to a whole unit, costs less than a millionth of a
/// token.
const FINE: u64 = 1 << 20;

/// The parameters of a bucket.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub struct Bucket {
    /// The tokens that drain in a period.
    pub amount: u64,
    /// The period in microseconds.
    pub period: u64,
    /// The tokens that the bucket holds.
    pub capacity: u64,
    /// The capacity in units.
    pub full: u64,
    /// The rate in units.
    pub rate: Rate,
}

/// A rate in units: a token is `q` units, and a tick of `grid` microseconds drains `p`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Rate {
    /// The units that drain in a tick.
    pub p: u64,
    /// The units of a token.
    pub q: u64,
    /// The microseconds of a tick.
    pub grid: u64,
}

/// The state of a bucket for one key: the units in it, and when they were.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Level {
    /// The units in the bucket; zero is idle.
    pub units: u64,
    /// The time at which the bucket held them.
    pub at: Timestamp,
}

impl Bucket {
    /// Finds the finest grid on which every value stays below 2^53, `below` tokens of debt
    /// included.
    pub(crate) fn new(
        amount: u64,
        period: Period,
        capacity: u64,
        below: u64,
    ) -> Result<Self, LimitError> {
        let period = period.as_micros();
        let most = 2 * (u128::from(capacity) + u128::from(below));
        let exact = |p: u128, q: u128| most * q < u128::from(EXACT) && p < u128::from(EXACT);
        let rate = GRIDS_US.iter().find_map(|&grid| {
            let per_period = u128::from(amount) * u128::from(grid);
            let divisor = gcd(per_period, u128::from(period));
            let (mut p, mut q) = (per_period / divisor, u128::from(period) / divisor);
            if !exact(p, q) {
                return None;
            }
            while q < u128::from(FINE) && exact(2 * p, 2 * q) {
                (p, q) = (2 * p, 2 * q);
            }
            Some(Rate { p: u64::try_from(p).ok()?, q: u64::try_from(q).ok()?, grid })
        });
        let Some(rate) = rate else {
            return Err(LimitError::new(Parameter::Burst, capacity, Problem::NoGrid));
        };
        if most / 2 * u128::from(period) > u128::from(amount) * u128::from(MAX_WAIT_US) {
            return Err(LimitError::new(Parameter::Burst, capacity, Problem::TooSlow));
        }
        Ok(Bucket { amount, period, capacity, full: capacity * rate.q, rate })
    }

    /// Drains whole ticks of more than a microsecond.
    #[cold]
    fn aged_by_ticks(&self, level: Level, now: Timestamp) -> Level {
        let Rate { p, grid, .. } = self.rate;
        let ticks = now.micros_since(level.at) / grid;
        let units = level.units.saturating_sub(ticks.saturating_mul(p));
        // An idle key does not save up: its clock starts with the tick it is in. Otherwise only
        // whole ticks are spent; the rest of the last one is kept for later.
        let at = if units == 0 { now.floor_to(grid) } else { level.at.plus(ticks * grid) };
        Level { units, at }
    }

    /// How long an idle bucket's whole capacity takes to drain, in microseconds, rounded up.
    pub fn fill_us(&self) -> u64 {
        mul_div_ceil(self.capacity, self.period, self.amount)
    }

    /// A full burst, and what drains before the period is over.
    pub(crate) fn worst_case(&self) -> u64 {
        let ticks = (self.period - 1).div_ceil(self.rate.grid);
        let drained = u128::from(ticks) * u128::from(self.rate.p) / u128::from(self.rate.q);
        self.capacity
            + u64::try_from(drained).expect("no more than the amount and what one tick drains")
    }

    /// Books `cost` for when it fits, and charges it now: returns the wait, or `None` if that is more
    /// than `max_wait_us`. Later calls see it as charged, so bookings stay in order.
    pub(crate) fn book(
        &self,
        level: &mut Level,
        now: Timestamp,
        cost: u64,
        max_wait_us: u64,
    ) -> Option<u64> {
        let wait = self.wait(level, now, cost, self.capacity);
        // The longest wait that is reported may stand for a longer one, which cannot be booked.
        if wait > max_wait_us || wait >= MAX_WAIT_US {
            return None;
        }
        let Rate { p, q, grid } = self.rate;
        // At the booked time the bucket may have run empty within the last tick; that fraction is not
        // saved up.
        let ticks = now.plus(wait).micros_since(level.at) / grid;
        let units = max(level.units, ticks.saturating_mul(p)).checked_add(cost * q)?;
        if units >= EXACT {
            return None;
        }
        level.units = units;
        Some(wait)
    }
}

impl Level {
    /// Whether a store's clock that is behind moves it. What a change of limits made more than can
    /// be counted is kept from a later moment on ([`Rate::carry`]), which is not a step of the
    /// clock; no limit with its debt reaches half as much.
    pub(crate) fn is_countable(&self) -> bool {
        self.units < EXACT / 2
    }

    /// The same level at `now`. What drained between a charge and the level's moment has drained
    /// all the same.
    pub(crate) fn rebase(&mut self, now: Timestamp) -> Moved {
        let by_us = self.at.micros_since(now);
        self.at = self.at.minus(by_us);
        Moved { oldest: Timestamp::from_kept_micros(by_us), by_us, latest: Timestamp::MAX }
    }
}

impl Rate {
    /// The first moment at which the bucket is empty. One that is empty is so whatever the clock
    /// says, also if it went back.
    pub(crate) fn idle_at(&self, level: &Level) -> Timestamp {
        if level.units == 0 {
            return Timestamp::EPOCH;
        }
        let ticks = if self.p == 1 { level.units } else { level.units.div_ceil(self.p) };
        level.at.plus(ticks.saturating_mul(self.grid))
    }

    /// The last moment at which the level can have been charged. On a coarse grid a bucket's clock
    /// starts with the tick it is in, which may be before the charge: it must not drain for that time
    /// again.
    pub(crate) fn charged_by(&self, level: &Level, now: Timestamp) -> Timestamp {
        let on_grid = level.at.floor_to(self.grid) == level.at;
        if on_grid { level.at.plus(self.grid - 1).min(now.max(level.at)) } else { level.at }
    }

    /// The same usage at another rate, rounded up to a whole unit.
    pub(crate) fn carry(&self, level: &Level, to: Rate, now: Timestamp) -> Level {
        let at = if self.grid > to.grid { self.charged_by(level, now) } else { level.at };
        let level = &Level { units: level.units, at };
        let units = mul_div_ceil(level.units, to.q, self.q);
        if units < EXACT {
            return Level { units, at: level.at };
        }
        // More than the new scale can count: it counts from the moment at which, at its own rate,
        // it is no more than that.
        let countable = mul_div_floor(EXACT - 1, self.q, to.q);
        let ticks = level.units.saturating_sub(countable).div_ceil(self.p);
        Level { units: EXACT - 1, at: level.at.after_micros(ticks.saturating_mul(self.grid)) }
    }
}

impl Kernel for Bucket {
    type State = Level;

    #[inline(always)]
    fn capacity(&self) -> u64 {
        self.capacity
    }

    #[inline(always)]
    fn age(&self, level: &mut Level, now: Timestamp) -> Timestamp {
        let now = if level.units == 0 { now } else { max(now, level.at) };
        if self.rate.grid != 1 {
            *level = self.aged_by_ticks(*level, now);
            return now;
        }
        // A tick is as fine as the clock: all the time that passed is spent, none is kept or saved
        // up. If it went back, which an empty bucket does not mind, any number does: nothing drains
        // from it.
        let elapsed = now.as_micros().wrapping_sub(level.at.as_micros());
        level.units = level.units.saturating_sub(elapsed.saturating_mul(self.rate.p));
        level.at = now;
        now
    }

    #[inline(always)]
    fn room(&self, level: &Level, _now: Timestamp, ceiling: u64) -> u64 {
        (ceiling * self.rate.q).saturating_sub(level.units) / self.rate.q
    }

    #[inline(always)]
    fn charge(&self, level: &mut Level, _now: Timestamp, cost: u64, _id: Id) -> Timestamp {
        level.units = level.units.saturating_add(cost.saturating_mul(self.rate.q)).min(EXACT - 1);
        level.at
    }

    #[inline(always)]
    fn charge_if_it_fits(&self, level: &mut Level, _now: Timestamp, cost: u64) -> bool {
        // What it would come to; no division.
        let poured = cost.saturating_mul(self.rate.q);
        // The highest level at which that fits; below zero there is none.
        let highest = if poured <= self.full { (self.full - poured).cast_signed() } else { -1 };
        let fits = level.units.cast_signed() <= highest;
        if fits {
            level.units = level.units.wrapping_add(poured);
        }
        fits
    }

    #[inline(always)]
    fn wait(&self, level: &Level, now: Timestamp, cost: u64, ceiling: u64) -> u64 {
        let Rate { p, q, grid } = self.rate;
        let over = level.units.saturating_sub((ceiling - cost) * q);
        if over == 0 {
            return 0;
        }
        // Most rates of one token per so many ticks have p = 1, and the division dominates
        // the cost.
        let ticks = if p == 1 { over } else { over.div_ceil(p) };
        level.at.plus(ticks.saturating_mul(grid)).micros_since(now).min(MAX_WAIT_US)
    }

    fn give_back(
        &self,
        level: &mut Level,
        _now: Timestamp,
        units: u64,
        charged_at: Option<Timestamp>,
    ) -> u64 {
        let Rate { p, q, grid } = self.rate;
        // Had the request never come, the bucket could have been idle since then and saved nothing
        // up: of what it took, only what cannot have drained yet may be given back (I-REF).
        let drained = charged_at
            .map_or(0, |then| level.at.micros_since(then).div_ceil(grid).saturating_mul(p));
        let back = units.saturating_mul(q).saturating_sub(drained).min(level.units);
        level.units -= back;
        back.div_ceil(q)
    }

    fn idle_at(&self, level: &Level) -> Timestamp {
        self.rate.idle_at(level)
    }
}
