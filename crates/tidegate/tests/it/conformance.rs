//! What every store must do, whatever it is made of: the same as the core over a plain map of
//! records.

use std::collections::HashMap;

pub(crate) use tidegate_trace::Random;

use crate::model::{self, Model};
use tidegate::core::{Charge as CoreCharge, Record, decide, decide_on_store_clock};
use tidegate::{
    Algorithm, Charge, Check, Decision, Id, Limit, Limits, ManualClock, Memory, Op, Scope, Store,
    StoreError, Subject, Timestamp,
};

/// A store that could not be simpler: one map, one record per state, the core over it. Says what is
/// right.
#[derive(Default)]
pub(crate) struct Plain {
    records: HashMap<Identity, Record>,
    /// How many states were found ahead of the store's clock and rebased.
    rebased: u64,
}

/// What a state is known by: rule, key, algorithm (of ad hoc keys), position.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Identity(Option<String>, Vec<u8>, &'static str, u16);

impl Identity {
    pub(crate) fn of(charge: &Charge<'_>) -> Self {
        let (rule, algorithm) = match &charge.subject.scope {
            Scope::Rule(name) => (Some(name.to_string()), ""),
            _ => (None, charge.limit.algorithm().name()),
        };
        Identity(rule, charge.subject.key.to_vec(), algorithm, charge.position)
    }
}

impl Plain {
    pub(crate) fn decide(
        &mut self,
        check: &Check<'_>,
        now: Timestamp,
        steps_back: StepsBack,
    ) -> Decision {
        let identities: Vec<_> = check.charges().iter().map(Identity::of).collect();
        let mut records: Vec<Record> = identities
            .iter()
            .map(|identity| self.records.remove(identity).unwrap_or_default())
            .collect();
        let mut charges: Vec<CoreCharge<'_>> = records
            .iter_mut()
            .zip(check.charges())
            .map(|(record, charge)| CoreCharge {
                limit: &charge.limit,
                record,
                cost: charge.cost,
                reserved: charge.reserved,
                id: check.id(),
            })
            .collect();
        let (decision, rebased) = match steps_back {
            StepsBack::OfTheStore => decide_on_store_clock(check.op(), &mut charges, now),
            _ => (decide(check.op(), &mut charges, now), 0),
        };
        self.rebased += rebased as u64;
        self.records.extend(identities.into_iter().zip(records));
        decision
    }

    /// Forgets what is idle.
    fn forget(&mut self, now: Timestamp) {
        self.records.retain(|_, record| now < record.idle_at());
    }
}

const LIMITS: &[&str] = &[
    "2/s",
    "7/min burst 3",
    "7/min burst 5",
    "5/s; 20/min",
    "3/s window",
    "3/2s window",
    "4/s window from first hit",
    "6/s sliding step 150ms",
    "6/s sliding step 300ms lenient",
    "5/s estimate",
    "4/s log",
    "4/s log count rejected",
    "2/s count rejected",
    "3 concurrent ttl 700ms",
    "2/s; 9/min window; 5/10s log",
    "999983/day burst 10000000000",
    "1000000/s",
];

/// Whether the clock goes back, and whose it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum StepsBack {
    Never,
    /// Times that the caller brings: an earlier one counts as the newest.
    OfTheCaller,
    /// The store's own: states that are ahead of it are rebased.
    OfTheStore,
}

/// Stores that must agree, with the clock they all judge by.
pub(crate) struct Trial<'a> {
    pub(crate) stores: &'a [(&'a str, &'a dyn Store)],
    pub(crate) clock: &'a ManualClock,
    /// Makes the stores remove idle keys, if they can do it immediately: what they have forgotten
    /// matters when the clock goes back.
    pub(crate) forget: Option<&'a (dyn Fn() + Sync)>,
    pub(crate) steps_back: StepsBack,
    /// Every key keeps the limits it has, so that no state is ever read in another scale, and an id
    /// is used for one `take` only. For a store that decides in several steps: see
    /// `redis/cluster.rs`.
    pub(crate) steady: bool,
    /// Whether the naive model is compared, too. It knows everything but a change of limits: then
    /// every key keeps those it has.
    pub(crate) model: bool,
    pub(crate) seed: u64,
}

impl Trial<'_> {
    /// Asks all stores at random, thousands of times, and expects what [`Plain`] answers. Times and
    /// costs are chosen near the edges: exactly when something is free again, and a microsecond to
    /// both sides of it; exactly what is left, and one more.
    ///
    /// Returns how many states were rebased.
    pub(crate) async fn run(&self, steps: usize) -> u64 {
        let (clock, seed) = (self.clock, self.seed);
        let mut random = Random(seed);
        let mut limits: Vec<Limits> = LIMITS.iter().map(|text| text.parse().unwrap()).collect();
        if self.model {
            limits.extend((0..32).map(|_| model::any_limits(&mut random)));
        }
        let (mut plain, mut naive) = (Plain::default(), Model::default());
        let mut now: u64 = 1_700_000_000_000_000;
        let mut ids = vec![Id(1)];
        let mut before: Option<Decision> = None;
        let mut booked = Timestamp::EPOCH;
        for step in 0..steps {
            let edges = before.as_ref().map(Decision::binding).copied().unwrap_or_default();
            // A changed limit can make a key wait for decades.
            let near =
                |micros: u64, nudge: u64| (micros.min(20_000_000_000) + nudge).saturating_sub(1);
            now = match random.below(24) {
                0 if self.steps_back == StepsBack::OfTheCaller => {
                    now.saturating_sub(random.below(3_000_000))
                }
                0 if self.steps_back == StepsBack::OfTheStore => {
                    let most = *random.pick(&[
                        3,
                        1_000_002,
                        3_000_000,
                        40_000_000,
                        3_600_000_000,
                        86_400_000_000,
                    ]);
                    now - (most - 1 - random.below(most.min(3_000_000)))
                }
                1 => now + random.below(100_000_000),
                2..8 => now,
                8..12 => now + near(edges.retry.micros().unwrap_or(0), random.below(3)),
                12..14 => now + near(edges.next_after_us, random.below(3)),
                14 => now + near(edges.reset_after_us, random.below(3)).min(90_000_000),
                _ => {
                    now + *random.pick(&[
                        1, 2, 999, 149_999, 150_000, 150_001, 333_333, 500_000, 999_999, 1_000_000,
                    ])
                }
            };
            clock.set(Timestamp::from_micros(now));
            let op = *random.pick(&[
                Op::Check,
                Op::Check,
                Op::Check,
                Op::Check,
                Op::Peek,
                Op::Take,
                Op::Debit,
                Op::Refund,
                Op::Reset,
                Op::Release,
                Op::Settle,
                Op::Book { max_wait_us: 2_000_000 },
                Op::Unbook { idle_at: booked },
            ]);
            if op == Op::Reset && random.below(4) > 0 {
                continue; // too many would keep everything empty
            }
            let left = edges.remaining;
            let cost = *random.pick(&[
                0,
                1,
                1,
                1,
                1,
                2,
                3,
                5,
                9,
                left,
                left + 1,
                edges.amount,
                edges.amount + 1,
                u64::MAX,
            ]);
            let keys: Vec<String> = (0..8).map(|key| format!("key:{key}")).collect();
            let mut check = Check::of(op);
            let charges = if random.below(2) == 0 { 1 } else { 1 + random.below(3) };
            for _ in 0..charges {
                let key = random.pick(&keys);
                // Under a rule the same state is seen by limits of any algorithm.
                let rule = if random.below(3) == 0 { *random.pick(&["a", "b"]) } else { "" };
                let limits = match self.steady || self.model {
                    false => random.pick(&limits),
                    true => {
                        // Others in every history that the model takes part in.
                        let first =
                            if self.model { usize::try_from(seed % 1009).unwrap() } else { 0 };
                        let own = [rule, key]
                            .concat()
                            .bytes()
                            .fold(first, |sum, byte| sum * 7 + usize::from(byte));
                        &limits[own % limits.len()]
                    }
                };
                let scope = if rule.is_empty() { Scope::AdHoc } else { Scope::Rule(rule.into()) };
                check = check.charge_subject(
                    Subject { scope, key: key.as_bytes().into() },
                    limits,
                    cost,
                );
            }
            if op == Op::Take && check.charges().iter().any(|charge| charge.cost != cost) {
                continue; // the same pair twice adds up, and then the costs are uneven
            }
            let is_lease =
                |charge: &Charge<'_>| matches!(charge.limit.algorithm(), Algorithm::Concurrent(_));
            let takes = matches!(op, Op::Check | Op::Take | Op::Debit | Op::Book { .. });
            let needs_id = self.steady && takes && check.charges().iter().any(is_lease);
            if random.below(3) == 0 || needs_id || matches!(op, Op::Release | Op::Settle) {
                if random.below(2) == 0 || (self.steady && op == Op::Take) {
                    ids.push(Id(step as u64 + 2));
                }
                let latest = if self.steady && op == Op::Take { 1 } else { 6 };
                check = check.with_id(*random.pick(&ids[ids.len().saturating_sub(latest)..]));
            }
            if op == Op::Settle {
                let reserved = *random.pick(&[0, 1, 2, 5, u64::MAX]);
                check = check.reserving(reserved);
            }
            let expected = plain.decide(&check, clock.now(), self.steps_back);
            if self.model {
                let modelled = naive.decide(&check, clock.now());
                assert_eq!(
                    expected, modelled,
                    "core = model, seed {seed}, step {step}, at {now}: {check:?}"
                );
            }
            for (name, store) in self.stores {
                let decided = store.decide(&check).await;
                let decided = decided.unwrap_or_else(|error| {
                    panic!("{name}, seed {seed}, step {step}: {error}: {check:?}")
                });
                assert_eq!(
                    decided, expected,
                    "{name}, seed {seed}, step {step}, at {now}: {check:?}"
                );
            }
            if matches!(op, Op::Book { .. }) {
                booked = expected.at().after_micros(expected.binding().reset_after_us);
            }
            before = Some(expected);
            if let Some(forget) = self.forget {
                forget();
                plain.forget(clock.now());
            }
        }
        plain.rebased
    }
}

#[tokio::test]
async fn memory_conforms() {
    for seed in 0..20 {
        let clock = ManualClock::new();
        let memory = || Memory::builder().clock(clock.clone()).max_keys(1024).build();
        let trial = Trial {
            stores: &[("memory", &memory())],
            clock: &clock,
            forget: None,
            steps_back: StepsBack::Never,
            steady: false,
            model: false,
            seed,
        };
        trial.run(5_000).await;
        let memory = memory();
        let forget = || memory.reclaim();
        let trial = Trial {
            stores: &[("memory", &memory)],
            clock: &clock,
            forget: Some(&forget),
            steps_back: StepsBack::OfTheCaller,
            steady: false,
            model: false,
            seed: seed + 100,
        };
        trial.run(5_000).await;
    }
}

/// The same beside the naive model, every field, over limits of any kind.
#[tokio::test]
async fn core_and_memory_equal_the_model() {
    for seed in 0..60 {
        let clock = ManualClock::new();
        let memory = Memory::builder().clock(clock.clone()).max_keys(1024).build();
        let stores: &[(&str, &dyn Store)] = &[("memory", &memory)];
        let trial = Trial {
            stores,
            clock: &clock,
            forget: None,
            steps_back: StepsBack::Never,
            steady: false,
            model: true,
            seed,
        };
        trial.run(2_500).await;
        let clock = ManualClock::new();
        let trial = Trial {
            stores: &[],
            clock: &clock,
            forget: None,
            steps_back: StepsBack::OfTheCaller,
            steady: false,
            model: true,
            seed,
        };
        trial.run(2_500).await;
    }
}

#[tokio::test]
async fn checks_that_no_store_can_decide_are_refused_by_name() {
    let memory = Memory::new();
    let limit: Limit = "1/s".parse().unwrap();
    let long = "k".repeat(1025);
    let many: Vec<String> = (0..65).map(|key| key.to_string()).collect();
    let too_many = many.iter().fold(Check::new(), |check, key| check.charge(key, [&limit], 1));
    let uneven = Check::of(Op::Take).charge("a", [&limit], 1).charge("b", [&limit], 2);
    for (check, expected) in [
        (Check::new(), "invalid check: no charges: expected at least one key with a limit"),
        (
            Check::new().charge(&long, [&limit], 1),
            "invalid check: a key of 1025 bytes: expected at most 1024",
        ),
        (too_many, "invalid check: 65 charges: expected at most 64"),
        (
            uneven,
            "invalid check: take asks for 1 of one limit and 2 of another: expected the same cost everywhere",
        ),
    ] {
        let error: StoreError = Store::decide(&memory, &check).await.unwrap_err();
        assert_eq!(error.to_string(), expected);
    }
    assert!(memory.is_empty());
}

#[test]
fn equal_pairs_of_one_check_are_summed() {
    let limit: Limit = "10/s".parse().unwrap();
    let check =
        Check::new().charge("k", [&limit], 3).charge("other", [&limit], 1).charge("k", [&limit], 4);
    let costs: Vec<u64> = check.charges().iter().map(|charge| charge.cost).collect();
    assert_eq!(costs, [7, 1]);
}
