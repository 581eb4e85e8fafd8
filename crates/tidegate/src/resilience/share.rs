//! The fallback: this node's share of each limit, by which it decides when the store does not
//! answer.
//!
//! A share is the limit divided by the number of nodes, so all shares together are the limit
//! (where that is at least one unit for each). Its state lives in a memory store, so usage is kept
//! from one outage to the next. The last answer of the store can only add usage to a share, never
//! remove it.

use std::sync::atomic::{AtomicBool, Ordering};

use tidegate_core::{Algorithm, Decision, Limit, Op, Period, Retry, Source, Timestamp, Verdict};

use crate::clock::Clock;
use crate::memory::Memory;
use crate::store::OnFailure;
use crate::store::{Charge, Check, InvalidCheck};

/// The most keys with a share.
const MAX_KEYS: usize = 1 << 20;
/// The `retry_after` of a denial whose wait only the store knows.
const RETRY_AFTER_US: u64 = 1_000_000;

/// The shares of all limits.
#[derive(Debug)]
pub(crate) struct Share {
    memory: Memory,
    /// Whether a check was ever decided here.
    is_used: AtomicBool,
}

impl Share {
    pub(crate) fn new(clock: Clock) -> Self {
        Share {
            memory: Memory::builder().clock(clock).max_keys(MAX_KEYS).build(),
            is_used: AtomicBool::new(false),
        }
    }

    /// Decides a check without the store. `policy` is that of a charge; `left` is what is left of the
    /// full limit, where that is known.
    pub(crate) fn decide(
        &self,
        check: &Check<'_>,
        nodes: u64,
        policy: impl Fn(&Charge<'_>) -> OnFailure,
        left: impl Fn(&Charge<'_>) -> Option<u64>,
    ) -> Result<Decision, InvalidCheck> {
        let is_closed = check.charges().iter().any(|charge| policy(charge) == OnFailure::Closed);
        let local: Vec<usize> = (0..check.charges().len())
            .filter(|&at| policy(&check.charges()[at]) == OnFailure::Local)
            .collect();
        let divided = local.iter().map(|&at| {
            let charge = &check.charges()[at];
            Charge { limit: share_of(&charge.limit, nodes), ..charge.clone() }
        });
        let mut shares = check.with_charges(divided.collect());
        if is_closed {
            // The check is denied; the other charges are only read for their fields.
            shares = shares.into_op(Op::Peek);
        }
        let mut at = self.memory.clock().now();
        let mut allowed = !is_closed;
        let mut verdicts: Vec<Verdict> = check
            .charges()
            .iter()
            .map(|charge| by_policy(check.op(), charge, policy(charge)))
            .collect();
        if !local.is_empty() {
            self.is_used.store(true, Ordering::Relaxed);
            for (index, own) in local.iter().zip(shares.charges()) {
                if let Some(left) = left(&check.charges()[*index]) {
                    self.use_up(own, left / nodes.max(1));
                }
            }
            let decision = self.memory.decide(&shares)?;
            at = decision.at();
            allowed &= decision.allowed();
            for (index, verdict) in local.iter().zip(decision.charges()) {
                let charge = &check.charges()[*index];
                let retry = match verdict.retry {
                    // The cost is above the share but not above the limit.
                    Retry::Never if charge.cost <= charge.limit.capacity() => {
                        Retry::After(RETRY_AFTER_US)
                    }
                    retry => retry,
                };
                verdicts[*index] = Verdict { amount: charge.limit.capacity(), retry, ..*verdict };
            }
        }
        if !allowed {
            verdicts.iter_mut().for_each(|verdict| verdict.granted = 0);
        }
        let decision = match &verdicts[..] {
            [one] => Decision::of_one(*one, allowed, at),
            _ => Decision::of_many(verdicts, allowed, at),
        };
        Ok(decision.with_source(Source::Fallback).with_id(check.id()))
    }

    /// The current time of the shares.
    pub(crate) fn now(&self) -> Timestamp {
        self.memory.clock().now()
    }

    /// Refunds, releases, resets or settles what may have been charged here.
    pub(crate) fn give_back(&self, check: &Check<'_>, nodes: u64) {
        if !self.is_used.load(Ordering::Relaxed) {
            return;
        }
        let shares = check
            .charges()
            .iter()
            .map(|charge| Charge { limit: share_of(&charge.limit, nodes), ..charge.clone() });
        let _ = self.memory.decide(&check.with_charges(shares.collect()));
    }

    /// Uses up a share until at most `left` units are left.
    fn use_up(&self, charge: &Charge<'_>, left: u64) {
        if matches!(charge.limit.algorithm(), Algorithm::Concurrent(_)) {
            return; // it would be a lease that is never released
        }
        let decide = |op, cost| {
            let charge = Charge { cost, ..charge.clone() };
            self.memory.decide(&Check::of(op).with_charges(vec![charge]))
        };
        if let Ok(now) = decide(Op::Peek, 0)
            && now.remaining() > left
        {
            let _ = decide(Op::Debit, now.remaining() - left);
        }
    }
}

/// The verdict of a policy that does not look at the limit.
fn by_policy(op: Op, charge: &Charge<'_>, policy: OnFailure) -> Verdict {
    let amount = charge.limit.capacity();
    match policy {
        OnFailure::Closed => Verdict {
            allowed: false,
            amount,
            retry: Retry::After(RETRY_AFTER_US),
            ..Verdict::default()
        },
        _ => {
            let granted = if op == Op::Peek { 0 } else { charge.cost };
            Verdict { allowed: true, granted, amount, remaining: amount, ..Verdict::default() }
        }
    }
}

/// The limit of one of `nodes`. An amount too small to divide is spread over time instead: one unit
/// for each node, less often.
pub(crate) fn share_of(limit: &Limit, nodes: u64) -> Limit {
    if nodes <= 1 {
        return *limit;
    }
    let divided = |amount: u64, period_us: u64| match amount / nodes {
        0 => (1, Period::micros(period_us.saturating_mul(nodes.div_ceil(amount.max(1))))),
        share => (share, Period::micros(period_us)),
    };
    let rejected = limit.counts_rejected();
    macro_rules! built {
        ($builder:expr) => {{
            let builder = $builder;
            if rejected { builder.count_rejected().build() } else { builder.build() }
        }};
    }
    let built = match *limit.algorithm() {
        Algorithm::Bucket(bucket) => {
            let burst = (bucket.capacity / nodes).max(1);
            // The exact rate is one period stretched; where no grid holds it, whole units.
            built!(
                Limit::bucket(bucket.amount, Period::micros(bucket.period.saturating_mul(nodes)))
                    .burst(burst)
            )
            .or_else(|_| {
                let (amount, period) = divided(bucket.amount, bucket.period);
                built!(Limit::bucket(amount, period).burst(burst))
            })
        }
        Algorithm::Window(window) => {
            let (amount, period) = divided(window.amount, window.period);
            let builder = Limit::window(amount, period);
            built!(if window.from_first_hit { builder.from_first_hit() } else { builder })
        }
        Algorithm::Sliding(sliding) => {
            let (amount, period) = divided(sliding.amount, sliding.period);
            let step = sliding.step.max(period.as_micros().div_ceil(tidegate_core::MAX_STEPS));
            let builder = Limit::sliding(amount, period).step(Period::micros(step));
            built!(if sliding.lenient { builder.lenient() } else { builder })
        }
        Algorithm::Estimate(estimate) => {
            let (amount, period) = divided(estimate.amount, estimate.period);
            built!(Limit::estimate(amount, period))
        }
        Algorithm::Log(log) => {
            let (amount, period) = divided(log.amount, log.period);
            built!(Limit::log(amount, period))
        }
        Algorithm::Concurrent(concurrent) => {
            Limit::concurrent((concurrent.amount / nodes).max(1), Period::micros(concurrent.ttl))
                .build()
        }
    };
    // At the edge of the numeric range the full limit is still a bound.
    built.unwrap_or(*limit)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::ManualClock;

    #[test]
    fn limits_are_divided_by_the_number_of_nodes() {
        for (limit, nodes, expected) in [
            ("100/s", 1, "100/s"),
            ("100/s", 4, "100/4s burst 25"),
            ("3/s", 10, "3/10s burst 1"),
            ("100/s window", 3, "33/s window"),
            ("3/s window", 10, "1/4s window"),
            ("240/h sliding step 1m", 2, "120/h sliding step 1m"),
            ("100/s estimate", 4, "25/s estimate"),
            ("10/s log count rejected", 2, "5/s log count rejected"),
            ("20 concurrent ttl 30s", 3, "6 concurrent ttl 30s"),
            ("1 concurrent ttl 30s", 3, "1 concurrent ttl 30s"),
        ] {
            let share = share_of(&limit.parse().unwrap(), nodes);
            assert_eq!(share, expected.parse().unwrap(), "{limit} by {nodes} is {share}");
        }
    }

    #[test]
    fn a_share_starts_with_its_part_of_what_is_left_and_never_regains_it() {
        let clock = ManualClock::new();
        clock.set(Timestamp::from_secs(1_000_000));
        let share = Share::new(clock.into());
        let limits: tidegate_core::Limits = "100/h window".parse().unwrap();
        let decide = |left: Option<u64>| {
            let check = Check::new().charge("k", &limits, 1);
            share.decide(&check, 4, |_| OnFailure::Local, |_| left).unwrap()
        };
        let first = decide(Some(40));
        assert_eq!((first.allowed(), first.remaining(), first.amount()), (true, 9, 100));
        assert_eq!(first.source(), Source::Fallback);
        let allowed = (0..100).filter(|_| decide(Some(100)).allowed()).count();
        assert_eq!(allowed, 9);
    }

    #[test]
    fn policies_decide_for_all_charges_of_a_check() {
        let share = Share::new(ManualClock::new().into());
        let limits: tidegate_core::Limits = "1/h; 2/h window".parse().unwrap();
        let check = Check::new().charge("k", &limits, 1);
        for policy in [OnFailure::Open, OnFailure::Closed] {
            for _ in 0..5 {
                let decision = share.decide(&check, 1, |_| policy, |_| None).unwrap();
                assert_eq!(decision.allowed(), policy == OnFailure::Open);
            }
        }
        // One closed charge denies the check, and the others are not charged.
        let closed = |charge: &Charge<'_>| {
            if charge.position == 1 { OnFailure::Closed } else { OnFailure::Local }
        };
        assert!(!share.decide(&check, 1, closed, |_| None).unwrap().allowed());
        assert!(share.decide(&check, 1, |_| OnFailure::Local, |_| None).unwrap().allowed());
    }
}
