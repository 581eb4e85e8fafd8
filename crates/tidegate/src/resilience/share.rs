//! What this node decides alone when the store does not answer: under the limit divided by the
//! number of nodes, from what the store said last.
//!
//! The shares of all nodes together are the limit (where it is at least one for each). They live in
//! a memory store of their own, so what was taken alone is remembered from one outage to the next;
//! what the store has said is only ever added to it, never taken away.

use std::sync::atomic::{AtomicBool, Ordering};

use tidegate_core::{Algorithm, Decision, Limit, Op, Period, Retry, Source, Timestamp, Verdict};

use crate::clock::Clock;
use crate::memory::Memory;
use crate::store::OnFailure;
use crate::store::{Charge, Check, InvalidCheck};

/// How many keys can be decided alone.
const MAX_KEYS: usize = 1 << 20;
/// When somebody is told to come back who would have to wait for the store.
const COME_BACK_US: u64 = 1_000_000;

#[derive(Debug)]
pub(crate) struct Share {
    memory: Memory,
    /// Whether anything was ever decided here.
    used: AtomicBool,
}

impl Share {
    pub(crate) fn new(clock: Clock) -> Self {
        Share {
            memory: Memory::builder().clock(clock).max_keys(MAX_KEYS).build(),
            used: AtomicBool::new(false),
        }
    }

    /// Decides without the store. `policy` says what happens to a charge, `left` what is left of
    /// the whole limit as far as is known.
    pub(crate) fn decide(
        &self,
        check: &Check<'_>,
        nodes: u64,
        policy: impl Fn(&Charge<'_>) -> OnFailure,
        left: impl Fn(&Charge<'_>) -> Option<u64>,
    ) -> Result<Decision, InvalidCheck> {
        let closed = check.charges().iter().any(|charge| policy(charge) == OnFailure::Closed);
        let local: Vec<usize> = (0..check.charges().len())
            .filter(|&at| policy(&check.charges()[at]) == OnFailure::Local)
            .collect();
        let shares = local.iter().map(|&at| {
            let charge = &check.charges()[at];
            Charge { limit: divided(&charge.limit, nodes), ..charge.clone() }
        });
        let mut alone = check.with_charges(shares.collect());
        if closed {
            // It will not pass: how the others stand is still told.
            alone = alone.into_op(Op::Peek);
        }
        let mut at = self.memory.clock().now();
        let mut allowed = !closed;
        let mut verdicts: Vec<Verdict> = check
            .charges()
            .iter()
            .map(|charge| by_policy(check.op(), charge, policy(charge)))
            .collect();
        if !local.is_empty() {
            self.used.store(true, Ordering::Relaxed);
            for (place, own) in local.iter().zip(alone.charges()) {
                if let Some(left) = left(&check.charges()[*place]) {
                    self.warm(own, left / nodes.max(1));
                }
            }
            let decision = self.memory.decide(&alone)?;
            at = decision.at();
            allowed &= decision.allowed();
            for (place, verdict) in local.iter().zip(decision.charges()) {
                let charge = &check.charges()[*place];
                let retry = match verdict.retry {
                    // Too much for the share, but not for the limit.
                    Retry::Never if charge.cost <= charge.limit.capacity() => {
                        Retry::After(COME_BACK_US)
                    }
                    retry => retry,
                };
                verdicts[*place] = Verdict { amount: charge.limit.capacity(), retry, ..*verdict };
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

    /// Gives back, forgets or settles here, too, what may have been taken here.
    pub(crate) fn give_back(&self, check: &Check<'_>, nodes: u64) {
        if !self.used.load(Ordering::Relaxed) {
            return;
        }
        let shares = check
            .charges()
            .iter()
            .map(|charge| Charge { limit: divided(&charge.limit, nodes), ..charge.clone() });
        let _ = self.memory.decide(&check.with_charges(shares.collect()));
    }

    /// No more is left of a share than of the whole, divided.
    fn warm(&self, charge: &Charge<'_>, left: u64) {
        if matches!(charge.limit.algorithm(), Algorithm::Concurrent(_)) {
            return; // what is taken here would be a lease that nobody ends
        }
        let ask = |op, cost| {
            let charge = Charge { cost, ..charge.clone() };
            self.memory.decide(&Check::of(op).with_charges(vec![charge]))
        };
        if let Ok(now) = ask(Op::Peek, 0)
            && now.remaining() > left
        {
            let _ = ask(Op::Debit, now.remaining() - left);
        }
    }
}

/// What a policy says by itself.
fn by_policy(op: Op, charge: &Charge<'_>, policy: OnFailure) -> Verdict {
    let amount = charge.limit.capacity();
    match policy {
        OnFailure::Closed => Verdict {
            allowed: false,
            amount,
            retry: Retry::After(COME_BACK_US),
            ..Verdict::default()
        },
        _ => {
            let granted = if op == Op::Peek { 0 } else { charge.cost };
            Verdict { allowed: true, granted, amount, remaining: amount, ..Verdict::default() }
        }
    }
}

/// A limit for one of `nodes`. What is too little to be divided is spread over time instead: one
/// unit for each node, less often.
pub(crate) fn divided(limit: &Limit, nodes: u64) -> Limit {
    if nodes <= 1 {
        return *limit;
    }
    let shared = |amount: u64, period_us: u64| match amount / nodes {
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
                let (amount, period) = shared(bucket.amount, bucket.period);
                built!(Limit::bucket(amount, period).burst(burst))
            })
        }
        Algorithm::Window(window) => {
            let (amount, period) = shared(window.amount, window.period);
            let builder = Limit::window(amount, period);
            built!(if window.from_first_hit { builder.from_first_hit() } else { builder })
        }
        Algorithm::Sliding(sliding) => {
            let (amount, period) = shared(sliding.amount, sliding.period);
            let step = sliding.step.max(period.as_micros().div_ceil(tidegate_core::MAX_STEPS));
            let builder = Limit::sliding(amount, period).step(Period::micros(step));
            built!(if sliding.lenient { builder.lenient() } else { builder })
        }
        Algorithm::Estimate(estimate) => {
            let (amount, period) = shared(estimate.amount, estimate.period);
            built!(Limit::estimate(amount, period))
        }
        Algorithm::Log(log) => {
            let (amount, period) = shared(log.amount, log.period);
            built!(Limit::log(amount, period))
        }
        Algorithm::Concurrent(concurrent) => {
            Limit::concurrent((concurrent.amount / nodes).max(1), Period::micros(concurrent.ttl))
                .build()
        }
    };
    // A limit at the edge of what can be counted: the whole of it is still a bound.
    built.unwrap_or(*limit)
}

/// Now, by the clock that judges what is decided alone.
impl Share {
    pub(crate) fn now(&self) -> Timestamp {
        self.memory.clock().now()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::ManualClock;

    #[test]
    fn limits_are_divided() {
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
            let share = divided(&limit.parse().unwrap(), nodes);
            assert_eq!(share, expected.parse().unwrap(), "{limit} by {nodes} is {share}");
        }
    }

    #[test]
    fn a_share_begins_with_its_part_of_what_is_left_and_is_never_warmed_up_again() {
        let clock = ManualClock::new();
        clock.set(Timestamp::from_secs(1_000_000));
        let share = Share::new(clock.into());
        let limits: tidegate_core::Limits = "100/h window".parse().unwrap();
        let ask = |left: Option<u64>| {
            let check = Check::new().charge("k", &limits, 1);
            share.decide(&check, 4, |_| OnFailure::Local, |_| left).unwrap()
        };
        let first = ask(Some(40));
        assert_eq!((first.allowed(), first.remaining(), first.amount()), (true, 9, 100));
        assert_eq!(first.source(), Source::Fallback);
        let allowed = (0..100).filter(|_| ask(Some(100)).allowed()).count();
        assert_eq!(allowed, 9);
    }

    #[test]
    fn policies() {
        let share = Share::new(ManualClock::new().into());
        let limits: tidegate_core::Limits = "1/h; 2/h window".parse().unwrap();
        let check = Check::new().charge("k", &limits, 1);
        for policy in [OnFailure::Open, OnFailure::Closed] {
            for _ in 0..5 {
                let decision = share.decide(&check, 1, |_| policy, |_| None).unwrap();
                assert_eq!(decision.allowed(), policy == OnFailure::Open);
            }
        }
        // One that is closed closes all, and takes nothing from the others.
        let closed = |charge: &Charge<'_>| {
            if charge.position == 1 { OnFailure::Closed } else { OnFailure::Local }
        };
        assert!(!share.decide(&check, 1, closed, |_| None).unwrap().allowed());
        assert!(share.decide(&check, 1, |_| OnFailure::Local, |_| None).unwrap().allowed());
    }
}
