//! What is kept for one key and one limit, and how it outlives a change of the limit.
//!
//! A state carries the scale it was written in: the rate of a bucket, the period of a window. So it
//! can be read by a limit that has changed since, without the old limit.

use alloc::vec::Vec;

use crate::Id;
use crate::algorithm::bucket::{Level, Rate};
use crate::algorithm::concurrent::{Lease, Leases, Place};
use crate::algorithm::estimate::Pair;
use crate::algorithm::log::{Entries, Entry};
use crate::algorithm::sliding::{Step, Steps};
use crate::algorithm::window::Count;
use crate::algorithm::{Algorithm, Bucket, Estimate, Kernel, Log, Sliding, Window};
use crate::time::Timestamp;

/// Everything a store keeps for one key and one limit. The default is that of a new key.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Record {
    /// The state of the algorithm.
    pub state: State,
    /// The last few charges with an id; empty unless ids are used.
    pub receipts: Receipts,
}

impl Record {
    /// The first time at which this record equals no record: a store may remove it from then on, not
    /// before.
    pub fn idle_at(&self) -> Timestamp {
        self.state.idle_at()
    }

    /// The heap bytes of this record, including the overhead of the allocator.
    pub fn heap_bytes(&self) -> usize {
        let state = match &self.state {
            State::Sliding { steps, .. } => steps.heap_bytes(),
            State::Log { entries, .. } => entries.heap_bytes(),
            State::Concurrent { leases } => leases.heap_bytes(),
            State::Idle | State::Bucket { .. } | State::Window { .. } | State::Estimate { .. } => 0,
        };
        state + block::<Receipt>(self.receipts.0.capacity())
    }
}

/// The bytes an allocator takes for this many values: a word of its own, in steps of two words, at
/// least four. That is the allocator of GNU/Linux; others have similar steps.
pub(crate) fn block<T>(count: usize) -> usize {
    const WORD: usize = size_of::<usize>();
    match count * size_of::<T>() {
        0 => 0,
        bytes => (bytes + WORD).next_multiple_of(2 * WORD).max(4 * WORD),
    }
}

/// The state of an algorithm for one key, with the scale it is written in.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum State {
    /// The state of a new key, and of every key that is idle.
    #[default]
    Idle,
    /// See [`bucket`](crate::algorithm::bucket).
    Bucket {
        /// The rate it is counted in.
        rate: Rate,
        /// The units in the bucket, and since when.
        level: Level,
    },
    /// See [`window`](crate::algorithm::window).
    Window {
        /// The length of the window in microseconds.
        period: u64,
        /// Whether it started with its first hit.
        from_first_hit: bool,
        /// The usage of the window.
        count: Count,
    },
    /// See [`sliding`](crate::algorithm::sliding).
    Sliding {
        /// The period in microseconds.
        period: u64,
        /// The length of a step in microseconds.
        step: u64,
        /// Whether steps are removed early.
        lenient: bool,
        /// The count of each step.
        steps: Steps,
    },
    /// See [`estimate`](crate::algorithm::estimate).
    Estimate {
        /// The length of a window in microseconds.
        period: u64,
        /// The counts of the current and the previous window.
        pair: Pair,
    },
    /// See [`log`](crate::algorithm::log).
    Log {
        /// The period in microseconds.
        period: u64,
        /// The hits with their times.
        entries: Entries,
    },
    /// See [`concurrent`](crate::algorithm::concurrent).
    Concurrent {
        /// The leases in flight.
        leases: Leases,
    },
}

impl State {
    /// An empty state in the scale of `algorithm`.
    pub(crate) fn empty(algorithm: &Algorithm) -> State {
        match *algorithm {
            Algorithm::Bucket(Bucket { rate, .. }) => {
                State::Bucket { rate, level: Level::default() }
            }
            Algorithm::Window(Window { period, from_first_hit, .. }) => {
                State::Window { period, from_first_hit, count: Count::default() }
            }
            Algorithm::Sliding(Sliding { period, step, lenient, .. }) => {
                State::Sliding { period, step, lenient, steps: Steps::default() }
            }
            Algorithm::Estimate(Estimate { period, .. }) => {
                State::Estimate { period, pair: Pair::default() }
            }
            Algorithm::Log(Log { period, .. }) => {
                State::Log { period, entries: Entries::default() }
            }
            Algorithm::Concurrent(_) => State::Concurrent { leases: Leases::default() },
        }
    }

    /// Whether it is in the scale of `algorithm`: the same kind, and the same rate, period or step.
    pub fn fits(&self, algorithm: &Algorithm) -> bool {
        match (self, algorithm) {
            (State::Bucket { rate, .. }, Algorithm::Bucket(bucket)) => *rate == bucket.rate,
            (State::Window { period, from_first_hit, .. }, Algorithm::Window(window)) => {
                (*period, *from_first_hit) == (window.period, window.from_first_hit)
            }
            (State::Sliding { period, step, lenient, .. }, Algorithm::Sliding(sliding)) => {
                (*period, *step, *lenient) == (sliding.period, sliding.step, sliding.lenient)
            }
            (State::Estimate { period, .. }, Algorithm::Estimate(estimate)) => {
                *period == estimate.period
            }
            (State::Log { period, .. }, Algorithm::Log(log)) => *period == log.period,
            (State::Concurrent { .. }, Algorithm::Concurrent(_)) => true,
            _ => false,
        }
    }

    /// The same usage in the scale of `algorithm`. Nothing is minted: what was used stays used.
    ///
    /// A bucket's level is converted and drains at the new rate. Anything else becomes one charge
    /// at the time of the last charge: not now, or two limits that alternate on one key would push it
    /// ahead and it would never end.
    pub(crate) fn carry(&self, algorithm: &Algorithm, now: Timestamp) -> State {
        let mut carried = State::empty(algorithm);
        if now >= self.idle_at() {
            return carried;
        }
        if let (State::Bucket { rate: from, level }, State::Bucket { rate: to, level: new }) =
            (self, &mut carried)
        {
            *new = from.carry(level, *to, now);
            return carried;
        }
        let (usage, last) = (self.clone().usage(now), self.last(now));
        if usage > 0 {
            macro_rules! charge {
                ($kernel:expr, $state:expr) => {{
                    let last = $kernel.age($state, last);
                    $kernel.charge($state, last, usage, Id::NONE);
                }};
            }
            match (algorithm, &mut carried) {
                (Algorithm::Bucket(k), State::Bucket { level, .. }) => charge!(k, level),
                (Algorithm::Window(k), State::Window { count, .. }) => charge!(k, count),
                (Algorithm::Sliding(k), State::Sliding { steps, .. }) => charge!(k, steps),
                (Algorithm::Estimate(k), State::Estimate { pair, .. }) => charge!(k, pair),
                (Algorithm::Log(k), State::Log { entries, .. }) => charge!(k, entries),
                (Algorithm::Concurrent(k), State::Concurrent { leases }) => charge!(k, leases),
                _ => unreachable!("State::empty made it for this algorithm"),
            }
        }
        carried
    }

    /// How many of the units in use at `now` were in use at the last charge, rounded up. What has
    /// drained since then is included, because the converted state drains from that time on and
    /// nothing may drain twice.
    fn usage(self, now: Timestamp) -> u64 {
        match self {
            State::Idle => 0,
            State::Bucket { rate, level } => level.units.div_ceil(rate.q),
            State::Window { period, from_first_hit, mut count } => {
                Window { amount: 1, period, from_first_hit }.age(&mut count, now);
                count.used
            }
            State::Sliding { period, step, lenient, mut steps } => {
                Sliding { amount: 1, period, step, lenient }.age(&mut steps, now);
                steps.total()
            }
            State::Estimate { period, mut pair } => {
                let last = pair.last;
                Estimate { amount: 1, period, grid: 1 }.age(&mut pair, now);
                pair.last = last;
                Estimate::used_last(&pair, period)
            }
            State::Log { period, mut entries } => {
                Log { amount: 1, period }.age(&mut entries, now);
                entries.total()
            }
            State::Concurrent { mut leases } => {
                leases.age(now);
                leases.total()
            }
        }
    }

    /// The time of the last charge, or the latest time at which it can have been.
    fn last(&self, now: Timestamp) -> Timestamp {
        match self {
            State::Idle => Timestamp::EPOCH,
            State::Bucket { rate, level } => rate.charged_by(level, now),
            State::Window { count, .. } => count.last,
            State::Sliding { steps, .. } => steps.last(),
            State::Estimate { pair, .. } => pair.last,
            State::Log { entries, .. } => {
                entries.iter().next_back().map_or(Timestamp::EPOCH, |entry| entry.at)
            }
            State::Concurrent { leases } => leases.newest(),
        }
    }

    /// What ageing a large state to `now` removes.
    pub(crate) fn ended(&self, algorithm: &Algorithm, now: Timestamp) -> Ended {
        match (self, algorithm) {
            (State::Sliding { steps, .. }, Algorithm::Sliding(k)) => {
                Ended::Steps(k.ended(steps, now))
            }
            (State::Log { entries, .. }, Algorithm::Log(k)) => {
                Ended::Entries(k.ended(entries, now))
            }
            (State::Concurrent { leases }, Algorithm::Concurrent(_)) => {
                Ended::Leases(leases.ended(now))
            }
            _ => Ended::Nothing,
        }
    }

    /// Restores what ageing removed.
    pub(crate) fn restore(&mut self, ended: Ended) {
        match (self, ended) {
            (State::Sliding { steps, .. }, Ended::Steps(ended)) => steps.restore(&ended),
            (State::Log { entries, .. }, Ended::Entries(ended)) => entries.restore(&ended),
            (State::Concurrent { leases }, Ended::Leases(ended)) => leases.restore(ended),
            _ => {}
        }
    }

    /// Whether it is small enough to copy rather than to change in place.
    pub(crate) fn is_small(&self) -> bool {
        matches!(
            self,
            State::Idle | State::Bucket { .. } | State::Window { .. } | State::Estimate { .. }
        )
    }

    /// The first time at which this state equals that of a new key.
    pub fn idle_at(&self) -> Timestamp {
        match self {
            State::Idle => Timestamp::EPOCH,
            State::Bucket { rate, level } => rate.idle_at(level),
            State::Window { period, from_first_hit, count } => {
                Window { amount: 1, period: *period, from_first_hit: *from_first_hit }
                    .idle_at(count)
            }
            State::Sliding { period, step, lenient, steps } => {
                Sliding { amount: 1, period: *period, step: *step, lenient: *lenient }
                    .idle_at(steps)
            }
            State::Estimate { period, pair } => {
                Estimate { amount: 1, period: *period, grid: 1 }.idle_at(pair)
            }
            State::Log { period, entries } => Log { amount: 1, period: *period }.idle_at(entries),
            State::Concurrent { leases } => leases.idle_at(),
        }
    }
}

/// What a large state holds that no longer counts, oldest first.
pub(crate) enum Ended {
    Nothing,
    Steps(Vec<Step>),
    Entries(Vec<Entry>),
    Leases(Vec<(Place, Lease)>),
}

/// The charges of the last few calls with an id, so that each can be settled or refunded once.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Receipts(Vec<Receipt>);

/// One charge with an id.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Receipt {
    /// The id of the charge.
    pub id: Id,
    /// The units that can still be given back.
    pub refundable: u64,
    /// The time under which the algorithm keeps the charge.
    pub charged_at: Timestamp,
    /// Whether the charge is settled, so that further calls with its id do nothing.
    pub settled: bool,
}

impl Receipts {
    /// The most receipts to keep. The oldest is dropped first and can then no longer be refunded,
    /// which errs on the strict side.
    pub const MAX: usize = 64;

    /// The receipts, oldest first.
    pub fn iter(&self) -> impl Iterator<Item = Receipt> + '_ {
        self.0.iter().copied()
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Receipt> {
        self.0.iter_mut()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn find(&mut self, id: Id) -> Option<&mut Receipt> {
        self.0.iter_mut().find(|receipt| receipt.id == id)
    }

    /// Drops a receipt with nothing left: its id can be used again.
    pub(crate) fn forget(&mut self, id: Id) {
        self.0.retain(|receipt| receipt.id != id);
    }

    pub(crate) fn keep(&mut self, receipt: Receipt) {
        if self.0.len() >= Self::MAX {
            self.0.remove(0);
        }
        self.0.push(receipt);
    }

    /// Marks all receipts as settled: after a change of scale their units are unknown.
    pub(crate) fn forfeit(&mut self) {
        for receipt in &mut self.0 {
            receipt.refundable = 0;
        }
    }
}
