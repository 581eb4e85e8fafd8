//! Cached denials have the fields that the store would return: a node and a bare store get the same
//! calls at the same times, and all answers must be equal.

use std::time::Duration;

use tidegate::resilience::{Policy, Resilient, SyncMode};
use tidegate::{Check, Decision, Limits, ManualClock, Memory, Op, Retry, Source, Store, Timestamp};

use super::limits;
use crate::conformance::Random;

/// A node with a store, and a bare store, on one clock.
struct Pair {
    clock: ManualClock,
    resilient: Resilient,
    bare: Memory,
}

impl Pair {
    fn new(seed: u64) -> Self {
        let clock = ManualClock::new();
        clock.set(Timestamp::from_secs(1_700_000_000));
        let store = || Memory::builder().clock(clock.clone()).max_keys(1024).build();
        let resilient =
            Resilient::builder(store()).clock(clock.clone()).nodes(1).seed(seed).build();
        Pair { resilient, bare: store(), clock }
    }

    fn advance_us(&self, micros: u64) {
        self.clock.advance(Duration::from_micros(micros));
    }

    /// Decides on both and expects equal answers from any source.
    async fn ask(&self, check: &Check<'_>) -> Decision {
        let (resilient, bare) =
            (self.resilient.decide(check).await.unwrap(), self.bare.decide(check).unwrap());
        let source = resilient.source();
        let all =
            check.charges().iter().map(|charge| format!("{} cost {}", charge.limit, charge.cost));
        let all: Vec<_> = all.collect();
        assert_eq!(
            resilient.clone().with_source(Source::Store),
            bare,
            "{:?} from {source:?} of {all:?}",
            check.op()
        );
        resilient
    }

    async fn op(&self, op: Op, limits: &Limits, cost: u64) -> Decision {
        self.ask(&Check::of(op).charge("k", limits, cost)).await
    }
}

#[tokio::test(start_paused = true)]
async fn a_debit_after_a_denial_extends_its_wait() {
    let (pair, limits) = (Pair::new(1), limits("3/h burst 2"));
    assert!(pair.op(Op::Check, &limits, 2).await.allowed());
    assert!(!pair.op(Op::Check, &limits, 1).await.allowed());
    assert!(pair.op(Op::Debit, &limits, 1).await.allowed());
    let denial = pair.op(Op::Check, &limits, 1).await;
    assert_eq!((denial.retry(), denial.source()), (Retry::After(2_400_000_000), Source::Local));
}

#[tokio::test(start_paused = true)]
async fn a_cost_above_the_capacity_of_one_limit_is_never_allowed() {
    let (pair, limits) = (Pair::new(1), limits("9/h window; 4/s"));
    for _ in 0..2 {
        assert!(pair.op(Op::Check, &limits, 4).await.allowed());
        pair.advance_us(1_000_000);
    }
    for source in [Source::Store, Source::Local] {
        let denial = pair.op(Op::Check, &limits, 5).await;
        assert_eq!((denial.retry(), denial.source()), (Retry::Never, source));
    }
}

/// The common case costs no call: the same or a higher cost, repeated until the wait is over.
#[tokio::test(start_paused = true)]
async fn a_denied_bucket_or_window_needs_no_further_call() {
    for (text, first) in
        [("100/s", 1), ("7/min burst 3", 1), ("10/s", 4), ("5/s window", 1), ("3/h burst 2", 2)]
    {
        let (pair, limits) = (Pair::new(1), limits(text));
        let all = pair.op(Op::Peek, &limits, 0).await.remaining();
        assert!(pair.op(Op::Check, &limits, all).await.allowed());
        let wait =
            pair.op(Op::Check, &limits, first).await.retry().micros().unwrap().min(1_000_000);
        for part in 0..100 {
            if part > 0 {
                pair.advance_us(wait / 100);
            }
            assert_eq!(
                pair.op(Op::Check, &limits, first).await.source(),
                Source::Local,
                "{text} after {part} %"
            );
        }
    }
}

#[tokio::test(start_paused = true)]
async fn every_field_of_every_answer_equals_the_bare_store() {
    const LIMITS: &[&str] = &[
        "2/s",
        "3/h burst 2",
        "7/min burst 3",
        "7/min burst 5",
        "1000/7s burst 20",
        "5/s; 20/min",
        "9/h window; 4/s",
        "3/s window",
        "4/s window from first hit",
        "6/s sliding step 150ms",
        "6/s sliding step 300ms lenient",
        "5/s estimate",
        "4/s log",
        "2/s; 9/min window; 5/10s log",
        "3 concurrent ttl 700ms; 2/s",
        "2/s count rejected; 3/s window",
        "999983/day burst 10000000000",
        "3000000/s burst 5",
    ];
    const OPS: &[Op] = &[
        Op::Check,
        Op::Check,
        Op::Check,
        Op::Check,
        Op::Check,
        Op::Peek,
        Op::Take,
        Op::Debit,
        Op::Refund,
        Op::Reset,
    ];
    let all: Vec<Limits> = LIMITS.iter().map(|text| limits(text)).collect();
    let mut here = 0;
    for seed in 0..200 {
        let (pair, mut random) = (Pair::new(seed), Random(seed));
        // Most histories have one list of limits; some change it at every call, also under one rule.
        let (changes, own) = (seed % 4 == 0, random.pick(&all).clone());
        let mut edges;
        for _ in 0..300 {
            let limits = if changes { random.pick(&all[..9]) } else { &own };
            let most = limits.iter().map(|limit| limit.capacity()).max().unwrap_or(1);
            let cost = match random.below(4) {
                0 => random.below(most.min(8) + 2),
                _ => 1 + random.below(most.min(4)),
            };
            let op = *random.pick(OPS);
            let check = match changes {
                true => Check::of(op).charge_named("rule", "k", limits, cost),
                false => Check::of(op).charge("k", limits, cost),
            };
            let decision = pair.ask(&check).await;
            here += u32::from(decision.source() == Source::Local);
            let binding = decision.binding();
            edges = [
                binding.retry.micros().unwrap_or(0),
                binding.next_after_us,
                binding.reset_after_us,
            ];
            let pause = match random.below(8) {
                0..4 => 0,
                4 => *random.pick(&[1, 999, 150_000, 333_333, 1_000_000, 61_000_000]),
                // To the time of the next event, or a microsecond off.
                _ => (random.pick(&edges).min(&20_000_000_000) + random.below(3)).saturating_sub(1),
            };
            pair.advance_us(pause);
        }
    }
    assert!(here > 1000, "only {here} were decided by the node");
}

/// A denial by units in flight has the fields after all of them are charged.
#[tokio::test(start_paused = true)]
async fn concurrent_denials_have_the_fields_of_the_last_check() {
    for text in ["50/d window", "50/d", "7/min burst 30"] {
        let (pair, limits) = (Pair::new(7), limits(text));
        let all = pair.op(Op::Check, &limits, 1).await.remaining();
        let ask = |_| {
            let (resilient, limits) = (pair.resilient.clone(), limits.clone());
            tokio::spawn(async move {
                resilient.decide(&Check::new().charge("k", &limits, 1)).await.unwrap()
            })
        };
        let tasks: Vec<_> = (0..500).map(ask).collect();
        for _ in 0..all {
            assert!(pair.bare.decide(&Check::new().charge("k", &limits, 1)).unwrap().allowed());
        }
        let denial = pair.bare.decide(&Check::new().charge("k", &limits, 1)).unwrap();
        let mut here = 0;
        for task in tasks {
            let decision = task.await.unwrap();
            here += u32::from(decision.source() == Source::Local);
            assert!(
                decision.allowed() || decision.clone().with_source(Source::Store) == denial,
                "{text}: {decision:?}"
            );
        }
        assert!(here > 400, "{text}: only {here} were decided by the node");
    }
}

/// A denial in async mode has the fields of the store after this node has charged what it allowed.
#[tokio::test(start_paused = true)]
async fn an_async_denial_counts_unsynced_units() {
    let policy = Policy { sync: SyncMode::Async, ..Policy::default() };
    for text in
        ["50/h window", "50/h", "9/h; 50/h window", "20/h log", "30/h sliding", "20/h estimate"]
    {
        let (pair, limits) = (Pair::new(3), limits(text));
        let check = |cost| Check::new().policy(policy).charge("k", &limits, cost);
        assert!(pair.ask(&check(1)).await.allowed());
        let mut here = 0;
        for _ in 0..60 {
            let (resilient, bare) = (
                pair.resilient.decide(&check(2)).await.unwrap(),
                pair.bare.decide(&check(2)).unwrap(),
            );
            assert_eq!(resilient.allowed(), bare.allowed(), "{text}");
            if !resilient.allowed() {
                assert_eq!(resilient.charges(), bare.charges(), "{text}");
                here += u32::from(resilient.source() == Source::Local);
            }
        }
        assert!(here > 30, "{text}: only {here} were decided by the node");
    }
}
