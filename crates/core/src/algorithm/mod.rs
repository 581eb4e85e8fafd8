//! The algorithms: one file and one small state each, behind one trait.
//!
//! An algorithm only measures. It [ages](Kernel::age) a state to a time, says how many units
//! [fit](Kernel::room) below a ceiling, [charges](Kernel::charge), says how long to
//! [wait](Kernel::wait) until a cost fits, and [gives back](Kernel::give_back). The operations are
//! written once on top of it, in [`decide`](crate::decide()).

pub mod bucket;
pub mod concurrent;
pub mod estimate;
pub mod log;
mod pieces;
pub mod sliding;
pub mod window;

pub use bucket::Bucket;
pub use concurrent::Concurrent;
pub use estimate::Estimate;
pub use log::Log;
pub use sliding::Sliding;
pub use window::Window;

use crate::Id;
use crate::time::Timestamp;

/// Clock grids, finest first. A limit uses the first one on which its numbers stay exact.
pub(crate) const GRIDS_US: [u64; 7] = [1, 10, 100, 1_000, 10_000, 100_000, 1_000_000];

/// The measurements of an algorithm on the state of one key.
///
/// Except for `age`, every function expects an aged state and the time that `age` returned. A
/// ceiling is at least 1, a cost is at least 1, and `wait` is only called with a cost up to the
/// ceiling.
pub trait Kernel {
    /// The state of a key. The default is that of a new key.
    type State: Default + Clone;

    /// The most units in use.
    fn capacity(&self) -> u64;

    /// Removes what no longer counts at `now`, and returns the time to decide at: `now`, or the newest
    /// time in the state if that is later, because time does not go back.
    fn age(&self, state: &mut Self::State, now: Timestamp) -> Timestamp;

    /// The units that fit below `ceiling`, rounded down.
    fn room(&self, state: &Self::State, now: Timestamp, ceiling: u64) -> u64;

    /// Adds `cost`, whether it fits or not, and returns the time under which it is kept.
    fn charge(&self, state: &mut Self::State, now: Timestamp, cost: u64, id: Id) -> Timestamp;

    /// Adds `cost` without an id if it fits below the capacity, and returns whether it did.
    #[inline(always)]
    fn charge_if_it_fits(&self, state: &mut Self::State, now: Timestamp, cost: u64) -> bool {
        let fits = cost <= self.room(state, now, self.capacity());
        if fits {
            self.charge(state, now, cost, Id::NONE);
        }
        fits
    }

    /// Microseconds until `cost` fits below `ceiling` if nothing else is charged. Tight: one less is
    /// too early.
    fn wait(&self, state: &Self::State, now: Timestamp, cost: u64, ceiling: u64) -> u64;

    /// Gives back up to `units`, the newest first, and returns how many it gave back.
    ///
    /// With `charged_at`, the time that [`charge`](Kernel::charge) returned, at most what is left of
    /// that charge.
    fn give_back(
        &self,
        state: &mut Self::State,
        now: Timestamp,
        units: u64,
        charged_at: Option<Timestamp>,
    ) -> u64;

    /// The first time at which this state equals that of a new key.
    fn idle_at(&self, state: &Self::State) -> Timestamp;
}

/// How the moments that [`Kernel::charge`] has returned move when a state is rebased to an earlier
/// one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Moved {
    /// What was charged before this moment has ended, and can no longer be given back.
    pub(crate) oldest: Timestamp,
    /// Whatever is later moves back by so many microseconds,
    pub(crate) by_us: u64,
    /// and further, if it is later than this then.
    pub(crate) latest: Timestamp,
}

impl Moved {
    /// Everything is where it was.
    pub(crate) const NOTHING: Moved =
        Moved { oldest: Timestamp::EPOCH, by_us: 0, latest: Timestamp::MAX };

    /// Whatever is later than `latest` is there now. What had ended at `newest`, `life`
    /// microseconds after its moment, is over.
    fn to(latest: Timestamp, newest: Timestamp, life: u64) -> Moved {
        Moved { oldest: newest.plus(1).minus(life), by_us: 0, latest }
    }

    /// Where `moment` is now, unless what was charged then has ended.
    pub(crate) fn apply(&self, moment: Timestamp) -> Option<Timestamp> {
        (moment >= self.oldest).then(|| moment.minus(self.by_us).min(self.latest))
    }
}

/// An algorithm with its parameters.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Algorithm {
    /// A token bucket, leaky bucket or GCRA.
    Bucket(Bucket),
    /// A fixed window.
    Window(Window),
    /// A sliding window in steps.
    Sliding(Sliding),
    /// An estimate from two windows, the previous one weighted.
    Estimate(Estimate),
    /// A log of every hit.
    Log(Log),
    /// A limit on concurrent leases.
    Concurrent(Concurrent),
}

impl Algorithm {
    /// The word of the algorithm in the notation.
    pub const fn name(&self) -> &'static str {
        match self {
            Algorithm::Bucket(_) => "bucket",
            Algorithm::Window(_) => "window",
            Algorithm::Sliding(_) => "sliding",
            Algorithm::Estimate(_) => "estimate",
            Algorithm::Log(_) => "log",
            Algorithm::Concurrent(_) => "concurrent",
        }
    }

    /// The units per period; for `concurrent`, the units in use at the same time.
    pub const fn amount(&self) -> u64 {
        match self {
            Algorithm::Bucket(bucket) => bucket.amount,
            Algorithm::Window(window) => window.amount,
            Algorithm::Sliding(sliding) => sliding.amount,
            Algorithm::Estimate(estimate) => estimate.amount,
            Algorithm::Log(log) => log.amount,
            Algorithm::Concurrent(concurrent) => concurrent.amount,
        }
    }

    /// The most units in use at the same time.
    pub const fn capacity(&self) -> u64 {
        match self {
            Algorithm::Bucket(bucket) => bucket.capacity,
            other => other.amount(),
        }
    }

    /// The period in microseconds; for `concurrent`, the ttl of a lease.
    pub const fn period_us(&self) -> u64 {
        match self {
            Algorithm::Bucket(bucket) => bucket.period,
            Algorithm::Window(window) => window.period,
            Algorithm::Sliding(sliding) => sliding.period,
            Algorithm::Estimate(estimate) => estimate.period,
            Algorithm::Log(log) => log.period,
            Algorithm::Concurrent(concurrent) => concurrent.ttl,
        }
    }

    /// See [`Limit::worst_case`](crate::Limit::worst_case).
    pub(crate) fn worst_case(&self) -> u64 {
        match self {
            Algorithm::Bucket(bucket) => bucket.worst_case(),
            Algorithm::Window(window) => window.worst_case(),
            Algorithm::Sliding(sliding) => sliding.worst_case(),
            Algorithm::Estimate(estimate) => estimate.worst_case(),
            Algorithm::Log(log) => log.amount,
            Algorithm::Concurrent(concurrent) => concurrent.amount,
        }
    }
}
