//! How long the server takes: bare round trips, and decisions.

use std::time::Duration;

use tidegate_core::Op;
use tokio::time::Instant;

use super::call::Head;
use super::inspect::probe;
use super::wire::{Failure, FailureKind, Outcome};
use super::{NoAnswer, Redis};
use crate::store::StoreError;

/// The most samples that are kept.
const MOST: usize = 1_000_000;
/// How long one sample may take.
const PATIENCE: Duration = Duration::from_secs(5);

/// How long a server takes to answer, one call at a time; see [`Redis::measure`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RoundTrips {
    /// `PING`: the network, and a server that has nothing to do.
    pub ping: Times,
    /// One decision about one key.
    pub decision: Times,
}

/// Some measurements, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Times {
    sorted: Vec<Duration>,
}

impl Times {
    fn new(mut samples: Vec<Duration>) -> Self {
        samples.sort();
        Times { sorted: samples }
    }

    /// How many there are.
    pub fn samples(&self) -> usize {
        self.sorted.len()
    }

    /// What so many per cent stay within; zero if nothing was measured.
    pub fn percentile(&self, percent: usize) -> Duration {
        let rank = (self.sorted.len() * percent.min(100)).div_ceil(100);
        self.sorted.get(rank.saturating_sub(1)).copied().unwrap_or_default()
    }

    /// The longest; zero if nothing was measured.
    pub fn max(&self) -> Duration {
        self.percentile(100)
    }
}

impl Redis {
    /// Measures `samples` round trips (at most a million) and as many decisions on a key of its own, in turns, one after another, for
    /// no longer than `within`. On a cluster, those of one of its servers.
    ///
    /// # Errors
    /// If one of them has no answer.
    pub async fn measure(&self, samples: usize, within: Duration) -> Result<RoundTrips, Failure> {
        let router = &self.inner.router;
        let end = Instant::now() + within;
        let masters = router.masters(Instant::now() + PATIENCE).await?;
        let none = || Failure::local(FailureKind::ClusterDown, "no server takes writes");
        let master = masters.first().ok_or_else(none)?;
        let charge = probe(&self.inner.keys, &(0..=u16::MAX)).ok_or_else(none)?;
        let asked = self.inner.ask(&charge);
        let (mut pings, mut decisions) = (Vec::new(), Vec::new());
        // The first two are not counted: the connection is made, and the script may have to be loaded.
        for sample in 0..=samples.min(MOST) {
            if sample > 1 && Instant::now() >= end {
                break;
            }
            let began = Instant::now();
            match router.command(master, &["PING"], began + PATIENCE).await {
                Outcome::Applied(_) => {}
                // Refused, but answered.
                Outcome::NotApplied(failure) | Outcome::Unknown(failure) if failure.kind() == FailureKind::NoPerm => {}
                Outcome::NotApplied(failure) | Outcome::Unknown(failure) => return Err(failure),
            }
            pings.push(began.elapsed());
            let began = Instant::now();
            let head = Head { op: Op::Check, id: None, now: self.inner.now(), denied: false };
            let answer = self.inner.call(head, std::slice::from_ref(&asked), &[], began + PATIENCE).await;
            answer.map_err(failure_of)?;
            decisions.push(began.elapsed());
        }
        Ok(RoundTrips { ping: Times::new(pings.split_off(1)), decision: Times::new(decisions.split_off(1)) })
    }
}

fn failure_of(error: StoreError) -> Failure {
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
    fn percentiles_are_samples() {
        let times = Times::new((1..=200).rev().map(Duration::from_micros).collect());
        assert_eq!(times.percentile(50), Duration::from_micros(100));
        assert_eq!(times.percentile(99), Duration::from_micros(198));
        assert_eq!(times.max(), Duration::from_micros(200));
        assert_eq!(Times::new(vec![Duration::from_micros(7)]).percentile(50), Duration::from_micros(7));
        assert_eq!(Times::new(Vec::new()).max(), Duration::ZERO);
    }
}
