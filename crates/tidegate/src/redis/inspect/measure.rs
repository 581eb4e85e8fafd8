//! Measures round trips and decisions.

use std::fmt;
use std::time::Duration;

use tidegate_core::Op;
use tokio::time::Instant;

use super::super::call::CallHead;
use super::super::{NoAnswer, Redis};
use super::rights::probe;
use crate::store::StoreError;
use tidegate_redis_client::{Failure, FailureKind, Outcome};

/// The most samples to keep.
const MOST: usize = 1_000_000;
/// The timeout of one sample.
const PATIENCE: Duration = Duration::from_secs(5);

/// The times of sequential calls; see [`Redis::measure`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RoundTrips {
    /// Of `PING`: the network and an idle server.
    pub ping: Times,
    /// Of a decision about one key.
    pub decision: Times,
}

/// Measured times, sorted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Times {
    sorted: Vec<Duration>,
}

impl Times {
    fn new(mut samples: Vec<Duration>) -> Self {
        samples.sort();
        Times { sorted: samples }
    }

    /// The number of samples.
    pub fn samples(&self) -> usize {
        self.sorted.len()
    }

    /// The time that this per cent of the samples stay within; zero if there are none.
    pub fn percentile(&self, percent: usize) -> Duration {
        let rank = (self.sorted.len() * percent.min(100)).div_ceil(100);
        self.sorted.get(rank.saturating_sub(1)).copied().unwrap_or_default()
    }

    /// The longest time; zero if there are no samples.
    pub fn max(&self) -> Duration {
        self.percentile(100)
    }
}

/// A decision should take at most one part in this many of the deadline, so that a slower one is
/// still in time.
const PART: u32 = 3;

/// A store whose decisions take too large a part of the deadline: late ones are decided without it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlowStore {
    /// The median time of a decision.
    pub decision: Duration,
    /// The deadline of a decision.
    pub deadline: Duration,
}

impl SlowStore {
    /// The least sufficient deadline, in whole milliseconds.
    pub fn enough(&self) -> Duration {
        let millis = (self.decision * PART).as_micros().div_ceil(1000);
        Duration::from_millis(u64::try_from(millis).unwrap_or(u64::MAX))
    }
}

impl fmt::Display for SlowStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tenths = self.decision.as_micros().div_ceil(100);
        let (deadline, enough) = (self.deadline.as_millis(), self.enough().as_millis());
        write!(
            f,
            "a decision of the store takes {}.{} ms, more than a third of the deadline ({deadline} ms): late ones are decided without \
             the store; set resilience.deadline_ms to {enough} or more, or move nearer to the server",
            tenths / 10,
            tenths % 10
        )
    }
}

impl RoundTrips {
    /// A warning, if the median decision takes more than a third of this deadline.
    pub fn too_slow_for(&self, deadline: Duration) -> Option<SlowStore> {
        let decision = self.decision.percentile(50);
        (decision * PART > deadline).then_some(SlowStore { decision, deadline })
    }
}

impl Redis {
    /// Measures `samples` round trips (at most a million) and as many decisions on a key of its
    /// own, alternately and one at a time, for at most `within`. On a cluster, it measures one
    /// server.
    ///
    /// # Errors
    /// If a call fails.
    pub async fn measure(&self, samples: usize, within: Duration) -> Result<RoundTrips, Failure> {
        let router = &self.shared.router;
        let end = Instant::now() + within;
        let masters = router.masters(Instant::now() + PATIENCE).await?;
        let none = || Failure::local(FailureKind::ClusterDown, "no server takes writes");
        let master = masters.first().ok_or_else(none)?;
        let charge = probe(&self.shared.keys, &(0..=u16::MAX)).ok_or_else(none)?;
        let named = self.shared.named(&charge);
        let (mut pings, mut decisions) = (Vec::new(), Vec::new());
        // The first two are not counted: they wait for the connection and may load the script.
        for sample in 0..=samples.min(MOST) {
            if sample > 1 && Instant::now() >= end {
                break;
            }
            let began = Instant::now();
            match router.command(master, &["PING"], began + PATIENCE).await {
                Outcome::Applied(_) => {}
                // Refused, but answered.
                Outcome::NotApplied(failure) | Outcome::Unknown(failure)
                    if failure.kind() == FailureKind::NoPerm => {}
                Outcome::NotApplied(failure) | Outcome::Unknown(failure) => return Err(failure),
            }
            pings.push(began.elapsed());
            let began = Instant::now();
            let head =
                CallHead { op: Op::Check, id: None, time: self.shared.time(), denied: false };
            let answer =
                self.shared.call(head, std::slice::from_ref(&named), &[], began + PATIENCE).await;
            answer.map_err(failure_of)?;
            decisions.push(began.elapsed());
        }
        Ok(RoundTrips {
            ping: Times::new(pings.split_off(1)),
            decision: Times::new(decisions.split_off(1)),
        })
    }
}

pub(in crate::redis) fn failure_of(error: StoreError) -> Failure {
    match error {
        StoreError::Unavailable(cause) => match cause.downcast::<NoAnswer>() {
            Ok(no_answer) => no_answer.failure.clone(),
            Err(other) => Failure::local(FailureKind::Other, other.to_string()),
        },
        other => Failure::local(FailureKind::Other, other.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_than_a_third_of_the_deadline_is_slow() {
        let trips = |micros| {
            let times = Times::new(vec![Duration::from_micros(micros)]);
            RoundTrips { ping: times.clone(), decision: times }
        };
        let deadline = Duration::from_millis(15);
        assert_eq!(trips(5_000).too_slow_for(deadline), None);
        let slow = trips(6_130).too_slow_for(deadline).unwrap();
        assert_eq!(slow.enough(), Duration::from_millis(19));
        let text = slow.to_string();
        assert!(
            text.starts_with(
                "a decision of the store takes 6.2 ms, more than a third of the deadline (15 ms)"
            ),
            "{text}"
        );
        assert!(text.contains("resilience.deadline_ms to 19 or more"), "{text}");
        assert_eq!(trips(6_130).too_slow_for(slow.enough()), None);
    }

    #[test]
    fn percentiles_are_samples() {
        let times = Times::new((1..=200).rev().map(Duration::from_micros).collect());
        assert_eq!(times.percentile(50), Duration::from_micros(100));
        assert_eq!(times.percentile(99), Duration::from_micros(198));
        assert_eq!(times.max(), Duration::from_micros(200));
        assert_eq!(
            Times::new(vec![Duration::from_micros(7)]).percentile(50),
            Duration::from_micros(7)
        );
        assert_eq!(Times::new(Vec::new()).max(), Duration::ZERO);
    }
}
