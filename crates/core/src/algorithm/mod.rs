//! The algorithms: one file each, one small state each, and the same six questions to all of them.
//!
//! An algorithm only measures. It can [age](Kernel::age) a state to a moment, say how much
//! [room](Kernel::room) is left below a ceiling, [charge](Kernel::charge), say how long to
//! [wait](Kernel::wait) until a cost fits, and [give back](Kernel::give_back). What an operation
//! makes of these answers is written once, in [`decide`](crate::decide()), and is the same for all.

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

/// Clock grids, finest first. A limit is judged on the first one on which its numbers stay exact.
pub(crate) const GRIDS_US: [u64; 7] = [1, 10, 100, 1_000, 10_000, 100_000, 1_000_000];

/// What every algorithm can say about one key.
///
/// Except for `age`, every function expects a state that has been aged, and the moment `age`
/// returned. A ceiling is at least 1, a cost is at least 1, and `wait` is only asked for a cost up
/// to the ceiling.
pub trait Kernel {
    /// What is kept for a key. The default is a key that was never seen.
    type State: Default + Clone;

    /// How much at once.
    fn capacity(&self) -> u64;

    /// Forgets what no longer counts at `now`, and returns the moment to judge at: `now`, or the
    /// newest time in the state if that is later, because time does not go back.
    fn age(&self, state: &mut Self::State, now: Timestamp) -> Timestamp;

    /// How many whole units fit below `ceiling`.
    fn room(&self, state: &Self::State, now: Timestamp, ceiling: u64) -> u64;

    /// Adds `cost`, whether it fits or not, and returns the moment under which it is kept.
    fn charge(&self, state: &mut Self::State, now: Timestamp, cost: u64, id: Id) -> Timestamp;

    /// Adds `cost` without an id if it fits below the capacity; says whether it did.
    #[inline(always)]
    fn charge_if_it_fits(&self, state: &mut Self::State, now: Timestamp, cost: u64) -> bool {
        let fits = cost <= self.room(state, now, self.capacity());
        if fits {
            self.charge(state, now, cost, Id::NONE);
        }
        fits
    }

    /// Microseconds until `cost` fits below `ceiling` if nobody takes anything more. Tight: one
    /// less is too early.
    fn wait(&self, state: &Self::State, now: Timestamp, cost: u64, ceiling: u64) -> u64;

    /// Takes back up to `units`, the newest first, and returns how many it took back.
    ///
    /// With `charged_at`, what [`charge`](Kernel::charge) returned, only what that charge still
    /// weighs is given back.
    fn give_back(
        &self,
        state: &mut Self::State,
        now: Timestamp,
        units: u64,
        charged_at: Option<Timestamp>,
    ) -> u64;

    /// The first moment from which this state is the same as none at all.
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
    /// Token bucket, leaky bucket, GCRA.
    Bucket(Bucket),
    /// Fixed window.
    Window(Window),
    /// Sliding window in steps.
    Sliding(Sliding),
    /// Two windows, the previous one weighted.
    Estimate(Estimate),
    /// Every hit kept.
    Log(Log),
    /// Leases in flight.
    Concurrent(Concurrent),
}

impl Algorithm {
    /// Its word in the notation.
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

    /// How much per period; for `concurrent`, how much at once.
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

    /// How much at once.
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
