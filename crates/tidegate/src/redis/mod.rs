//! State in Redis or Valkey: the same decisions as in memory, in one round trip, shared by every
//! process that uses the server.
//!
//! ```no_run
//! use tidegate::redis::Redis;
//! use tidegate::Limiter;
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let redis = Redis::new("redis://127.0.0.1/")?;
//! let limiter = Limiter::builder("10/s; 120/m".parse()?).redis(redis).build();
//! let decision = limiter.check("user:7").await?;
//! # Ok(()) }
//! ```
//!
//! A decision is one call of one script, for any operation and any number of limits: it reads the
//! server's clock once, reads each key, decides, and writes each changed state together with its
//! expiry. The script is assembled from `lua/`, where each algorithm is the twin of its Rust.
//!
//! In reading order: `keys.rs` names the states, `call.rs` encodes a call and decodes its reply,
//! `witness.rs` remembers what replies said, `shared.rs` makes one call, `coalesce.rs` sends checks
//! of a hot key together, `cross_slot.rs` decides over several slots of a cluster, and
//! [`tidegate_redis_client`] is the connection. `prepare.rs` runs before the first decision,
//! [`inspect`] is the startup check, `clear.rs` removes the keys of a namespace.

mod builder;
mod call;
mod clear;
mod coalesce;
mod cross_slot;
pub mod inspect;
mod keys;
mod prepare;
mod shared;
mod steps;
mod witness;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tidegate_bounded::in_time;
use tidegate_core::{Algorithm, Decision, Op};

use self::call::{CallHead, ChargeAnswer};
use self::coalesce::Joined;
use self::shared::{NamedCharge, Shared};
use crate::store::{Check, Deciding, Diagnosis, Store, StoreError};

pub use self::builder::{DEFAULT_WITNESS_KEYS, RedisBuilder, RedisError};
pub use self::clear::ClearError;
pub use self::keys::{InvalidNamespace, MAX_NAMESPACE_BYTES};
pub use tidegate_redis_client::{
    Connect, Connecting, Failure, FailureKind, InvalidSecret, Link, RedisUrl, RedisUrlError,
};

/// The script, in the order in which it runs.
pub(crate) const SCRIPT: &str = concat!(
    include_str!("lua/fast.lua"),
    include_str!("lua/exact.lua"),
    include_str!("lua/bucket.lua"),
    include_str!("lua/window.lua"),
    include_str!("lua/estimate.lua"),
    include_str!("lua/pieces.lua"),
    include_str!("lua/concurrent.lua"),
    include_str!("lua/receipts.lua"),
    include_str!("lua/state.lua"),
    include_str!("lua/decide.lua"),
);

/// A store in Redis or Valkey. Cheap to clone; clones share the connections.
#[derive(Clone)]
pub struct Redis {
    shared: Arc<Shared>,
}

/// A call without a reply.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{failure}; {}", if *.applied { "it may have been charged" } else { "nothing was charged" })]
pub struct NoAnswer {
    applied: bool,
    #[source]
    failure: Failure,
}

impl NoAnswer {
    /// Whether the call may have been charged: it was sent before the connection broke or the
    /// deadline passed.
    pub fn may_have_been_counted(&self) -> bool {
        self.applied
    }

    /// Why there is no reply.
    pub fn failure(&self) -> &Failure {
        &self.failure
    }
}

/// Counters of a store since it was built.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct RedisStats {
    /// Calls of the script.
    pub calls: u64,
    /// Checks of hot keys that shared a call with others.
    pub coalesced: u64,
    /// Keys that held less than an earlier reply said, and were restored: a failover, an eviction,
    /// a flush, or a step forward of the server's clock had lost state.
    pub regressions: u64,
    /// States that were more than a second ahead of the server's clock, and were rebased: the clock
    /// went back, or a server with an earlier clock took over. Usage is kept.
    pub clock_regressions: u64,
    /// Keys that held a value that Tidegate did not write, and were taken as used up.
    pub repairs: u64,
    /// Connections made after one that broke.
    pub reconnects: u64,
    /// Calls that were retried because they were certainly not applied.
    pub retries: u64,
    /// Redirects to other servers of the cluster.
    pub redirects: u64,
    /// Loads of the script into a server.
    pub script_loads: u64,
    /// Calls without a reply before their deadline.
    pub timeouts: u64,
}

impl Redis {
    /// A store with default settings; see [`RedisUrl`] for the forms of URLs. Needs a tokio
    /// runtime.
    ///
    /// # Errors
    /// If the URL is invalid. A server that is down is not an error here.
    pub fn new(url: &str) -> Result<Self, RedisError> {
        Self::builder(url.parse()?).build()
    }

    /// A store with other settings.
    pub fn builder(url: RedisUrl) -> RedisBuilder {
        RedisBuilder::new(url)
    }

    /// Calls `report` once for each step back of a server's clock, with the least that it went
    /// back.
    /// `report` must not block. Only the first one set is called.
    pub fn on_clock_step(&self, report: impl Fn(Duration) + Send + Sync + 'static) {
        let _ = self.shared.on_clock_step.set(Box::new(report));
    }

    /// Counters since the store was built.
    pub fn stats(&self) -> RedisStats {
        let Shared { router, counts, .. } = &*self.shared;
        let client = router.counters();
        RedisStats {
            calls: counts.calls.load(Ordering::Relaxed),
            coalesced: counts.coalesced.load(Ordering::Relaxed),
            regressions: counts.regressions.load(Ordering::Relaxed),
            clock_regressions: counts.clock_regressions.load(Ordering::Relaxed),
            repairs: counts.repairs.load(Ordering::Relaxed),
            reconnects: client.reconnects,
            retries: client.retries,
            redirects: client.redirects,
            script_loads: client.script_loads,
            timeouts: client.timeouts,
        }
    }
}

impl fmt::Debug for Redis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Redis").field("prefix", &self.shared.keys.prefix()).finish_non_exhaustive()
    }
}

impl Store for Redis {
    fn diagnose(&self, error: &StoreError) -> Diagnosis {
        let no_answer = match error {
            StoreError::Unavailable(cause) => cause.downcast_ref::<NoAnswer>(),
            _ => None,
        };
        no_answer.map_or_else(|| Diagnosis::of(error), |own| diagnosis(own.failure()))
    }

    fn decide<'a>(&'a self, check: &'a Check<'a>) -> Deciding<'a> {
        Box::pin(async move {
            check.validate()?;
            let charges: Vec<NamedCharge<'_>> =
                check.charges().iter().map(|charge| self.shared.named(charge)).collect();
            let single = !self.shared.router.is_cluster()
                || charges.iter().all(|named| named.slot == charges[0].slot);
            if !single {
                return cross_slot::decide(&self.shared, check.clone().into_owned()).await;
            }
            let _call = if self.shared.is_coalescing && coalesce::can_share(check) {
                match self.shared.join(&charges[0]) {
                    Joined::Send(call) => Some(call),
                    Joined::Wait(later) => {
                        return match in_time(self.shared.deadline(), later).await {
                            Some(Ok(answer)) => {
                                answer.map_err(|error| coalesce::shared_error(&error))
                            }
                            Some(Err(_)) => Err(coalesce::no_answer(false)),
                            None => Err(coalesce::no_answer(true)),
                        };
                    }
                }
            } else {
                None
            };
            let head = CallHead {
                op: script_op(check),
                id: check.id(),
                time: self.shared.time(),
                denied: false,
            };
            let answer = self.shared.call(head, &charges, &[], self.shared.deadline()).await?;
            let verdicts = charges.iter().zip(&answer.charges);
            let verdict = |(named, found): (&NamedCharge<'_>, &ChargeAnswer)| {
                found.verdict(check.op(), named.charge, answer.allowed, answer.now)
            };
            let decision = match &charges[..] {
                [_] => Decision::of_one(
                    verdicts.map(verdict).next().unwrap_or_default(),
                    answer.allowed,
                    answer.now,
                ),
                _ => Decision::of_many(verdicts.map(verdict).collect(), answer.allowed, answer.now),
            };
            Ok(decision.with_id(check.id()))
        })
    }

    fn parts(&self, check: &Check<'_>) -> u64 {
        let router = &self.shared.router;
        if !router.is_cluster() {
            return 1;
        }
        let places = check
            .charges()
            .iter()
            .map(|charge| router.place(self.shared.keys.tag(&charge.subject).slot()));
        places.fold(0, |parts, place| parts | 1 << (place % 64))
    }
}

/// The operation that the script runs: only a single bucket can book, elsewhere a booking is a
/// check.
fn script_op(check: &Check<'_>) -> Op {
    match (check.op(), check.charges()) {
        (book @ Op::Book { .. }, [charge])
            if matches!(charge.limit.algorithm(), Algorithm::Bucket(_)) =>
        {
            book
        }
        (Op::Book { .. }, _) => Op::Check,
        (op, _) => op,
    }
}

/// What a failure means for later calls to the server.
fn diagnosis(failure: &Failure) -> Diagnosis {
    use FailureKind as K;
    let (why, advice) = (failure.to_string().into(), failure.advice());
    if failure.is_refusal() {
        return Diagnosis::Refused { why, advice, is_permanent: failure.is_permanent() };
    }
    match failure.kind() {
        K::Refused | K::Disconnected | K::Unresolved => {
            Diagnosis::Unresponsive { why, advice, is_disconnected: true }
        }
        K::Timeout | K::Loading | K::Busy | K::MaxClients | K::Protocol => {
            Diagnosis::Unresponsive { why, advice, is_disconnected: false }
        }
        K::Overloaded => Diagnosis::Healthy, // this process has too many calls in flight
        _ => Diagnosis::CallFailed { why, advice },
    }
}
