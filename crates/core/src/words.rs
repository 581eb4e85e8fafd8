//! A record as words, for storage outside the process, such as a file.
//!
//! Reading validates: words that no record can have been written as are rejected, so an edited file
//! cannot bring numbers outside the exact domain into a store.

use alloc::vec::Vec;

use crate::algorithm::bucket::{Level, Rate};
use crate::algorithm::concurrent::{Lease, Leases};
use crate::algorithm::estimate::Pair;
use crate::algorithm::log::{Entries, Entry};
use crate::algorithm::sliding::{Step, Steps};
use crate::algorithm::window::Count;
use crate::limit::MAX_STEPS;
use crate::state::{Receipt, Receipts};
use crate::time::{EXACT, Period, Timestamp};
use crate::{Id, MAX_LOG_AMOUNT, Record, State};

/// The kinds of states, in the order in which they came.
const IDLE: u64 = 0;
const BUCKET: u64 = 1;
const WINDOW: u64 = 2;
const SLIDING: u64 = 3;
const ESTIMATE: u64 = 4;
const LOG: u64 = 5;
const CONCURRENT: u64 = 6;

impl Record {
    /// Appends the record to `words`.
    ///
    /// ```
    /// use tidegate_core::{Charge, Limit, Op, Record, Timestamp, decide};
    /// let limit: Limit = "5/20s log".parse()?;
    /// let mut record = Record::default();
    /// decide(Op::Check, &mut [Charge::new(&limit, &mut record, 2)], Timestamp::from_secs(7));
    /// let mut words = Vec::new();
    /// record.write(&mut words);
    /// assert_eq!(Record::read(&mut &words[..]), Some(record));
    /// # Ok::<(), tidegate_core::ParseError>(())
    /// ```
    pub fn write(&self, words: &mut Vec<u64>) {
        match &self.state {
            State::Idle => words.push(IDLE),
            State::Bucket { rate: Rate { p, q, grid }, level: Level { units, at } } => {
                words.extend([BUCKET, *p, *q, *grid, *units, at.as_micros()]);
            }
            State::Window { period, from_first_hit, count: Count { start, last, used } } => {
                let (start, last) = (start.as_micros(), last.as_micros());
                words.extend([WINDOW, *period, u64::from(*from_first_hit), start, last, *used]);
            }
            State::Sliding { period, step, lenient, steps } => {
                let last = steps.last().as_micros();
                words.extend([
                    SLIDING,
                    *period,
                    *step,
                    u64::from(*lenient),
                    last,
                    steps.iter().count() as u64,
                ]);
                words.extend(steps.iter().flat_map(|Step { index, used }| [index, used]));
            }
            State::Estimate { period, pair: Pair { start, last, previous, current } } => {
                words.extend([
                    ESTIMATE,
                    *period,
                    start.as_micros(),
                    last.as_micros(),
                    *previous,
                    *current,
                ]);
            }
            State::Log { period, entries } => {
                words.extend([LOG, *period, entries.iter().count() as u64]);
                words.extend(entries.iter().flat_map(|Entry { at, cost }| [at.as_micros(), cost]));
            }
            State::Concurrent { leases } => {
                let (granted, parts) = leases.parts();
                words.extend([
                    CONCURRENT,
                    leases.newest().as_micros(),
                    granted,
                    leases.iter().count() as u64,
                ]);
                let of = |(number, lease): (u64, Lease)| {
                    [lease.id.0, lease.cost, lease.deadline.as_micros(), number]
                };
                words.extend(parts.flat_map(of));
            }
        }
        words.push(self.receipts.iter().count() as u64);
        let of = |Receipt { id, refundable, charged_at, settled }: Receipt| {
            [id.0, refundable, charged_at.as_micros(), u64::from(settled)]
        };
        words.extend(self.receipts.iter().flat_map(of));
    }

    /// Reads a record from the start of `words` and advances `words` behind it. `None` if there is none;
    /// the position of `words` is unspecified then.
    pub fn read(words: &mut &[u64]) -> Option<Record> {
        let state = read_state(words)?;
        let [count] = take(words)?;
        let mut receipts = Receipts::default();
        if count > Receipts::MAX as u64 {
            return None;
        }
        for _ in 0..count {
            let [id, refundable, charged_at, settled] = take(words)?;
            let (id, refundable) = (Id(id), exact(refundable)?);
            if id == Id::NONE || receipts.iter().any(|other| other.id == id) {
                return None;
            }
            receipts.keep(Receipt {
                id,
                refundable,
                charged_at: moment(charged_at)?,
                settled: flag(settled)?,
            });
        }
        Some(Record { state, receipts })
    }
}

fn read_state(words: &mut &[u64]) -> Option<State> {
    let [kind] = take(words)?;
    match kind {
        IDLE => Some(State::Idle),
        BUCKET => {
            let [p, q, grid, units, at] = take(words)?;
            let rate = Rate { p: at_least_one(p)?, q: at_least_one(q)?, grid: at_least_one(grid)? };
            Some(State::Bucket { rate, level: Level { units: exact(units)?, at: moment(at)? } })
        }
        WINDOW => {
            let [length, from_first_hit, start, last, used] = take(words)?;
            let (start, last) = (clock_time(start)?, clock_time(last)?);
            let count = Count { start, last, used: exact(used)? };
            let (period, from_first_hit) = (period(length)?, flag(from_first_hit)?);
            let is_possible = start <= last && last.micros_since(start) < period;
            let is_possible =
                is_possible && (from_first_hit || start.as_micros().is_multiple_of(period));
            is_possible.then_some(State::Window { period, from_first_hit, count })
        }
        SLIDING => {
            let [length, step, lenient, last, count] = take(words)?;
            let (length, step, last) = (period(length)?, period(step)?, clock_time(last)?);
            // As many as a window has, and two that are not yet forgotten.
            if step > length
                || length.div_ceil(step) > MAX_STEPS
                || count > length.div_ceil(step) + 2
            {
                return None;
            }
            let mut steps = Vec::new();
            for _ in 0..count {
                let [index, used] = take(words)?;
                clock_time(index.checked_mul(step)?)?;
                if steps.last().is_some_and(|before: &Step| before.index >= index) {
                    return None;
                }
                steps.push(Step { index, used: at_least_one(used)? });
            }
            let steps = Steps::from_parts(steps, last)?;
            Some(State::Sliding { period: length, step, lenient: flag(lenient)?, steps })
        }
        ESTIMATE => {
            let [length, start, last, previous, current] = take(words)?;
            let (length, start, last) = (period(length)?, clock_time(start)?, clock_time(last)?);
            let pair = Pair { start, last, previous: exact(previous)?, current: exact(current)? };
            let is_possible =
                start.as_micros().is_multiple_of(length) && last.micros_since(start) < length;
            is_possible.then_some(State::Estimate { period: length, pair })
        }
        LOG => {
            let [length, count] = take(words)?;
            if count > 2 * MAX_LOG_AMOUNT {
                return None;
            }
            let mut entries = Vec::new();
            for _ in 0..count {
                let [at, cost] = take(words)?;
                let at = clock_time(at)?;
                if entries.last().is_some_and(|before: &Entry| before.at >= at) {
                    return None;
                }
                entries.push(Entry { at, cost: at_least_one(cost)? });
            }
            Some(State::Log { period: period(length)?, entries: Entries::from_parts(entries)? })
        }
        CONCURRENT => {
            let [newest, granted, count] = take(words)?;
            let mut leases = Vec::new();
            for _ in 0..count {
                let [id, cost, deadline, number] = take(words)?;
                leases.push((
                    number,
                    Lease { id: Id(id), cost: at_least_one(cost)?, deadline: moment(deadline)? },
                ));
            }
            Some(State::Concurrent {
                leases: Leases::from_parts(&leases, clock_time(newest)?, exact(granted)?)?,
            })
        }
        _ => None,
    }
}

/// The next few words.
fn take<const N: usize>(words: &mut &[u64]) -> Option<[u64; N]> {
    let (taken, rest) = words.split_first_chunk::<N>()?;
    *words = rest;
    Some(*taken)
}

fn exact(number: u64) -> Option<u64> {
    (number < EXACT).then_some(number)
}

fn at_least_one(number: u64) -> Option<u64> {
    exact(number).filter(|number| *number > 0)
}

/// A time that can be later than any clock, such as the end of a lease granted at the last time.
fn moment(micros: u64) -> Option<Timestamp> {
    exact(micros).map(Timestamp::from_kept_micros)
}

/// A time that a clock can have.
fn clock_time(micros: u64) -> Option<Timestamp> {
    moment(micros).filter(|at| *at <= Timestamp::MAX)
}

fn period(micros: u64) -> Option<u64> {
    (1..=Period::MAX.as_micros()).contains(&micros).then_some(micros)
}

fn flag(word: u64) -> Option<bool> {
    match word {
        0 => Some(false),
        1 => Some(true),
        _ => None,
    }
}
