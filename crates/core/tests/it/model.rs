//! Every algorithm against its naive model: every field of every verdict, at every step of random
//! stories.

use proptest::prelude::*;
use tidegate_core::{Algorithm, Charge, Id, Limit, Op, Record, State, Timestamp, Verdict, decide};

use crate::draw::{self, KINDS, Kind, Seeded, Source, Words};
use crate::naive::{self, Asked, Naive};

/// Tells one story to both, and says where they differ.
fn tell(source: &mut impl Source, kind: Kind, length: usize) -> Result<(), String> {
    let limit = draw::limit_of(source, kind);
    let mut now = draw::dawn(source);
    let (mut record, mut naive) = (Record::default(), Naive::new(&limit));
    let mut last = Verdict::default();
    let mut story: Vec<(Op, u64, u64)> = Vec::new();
    for _ in 0..length {
        now = draw::any_time(source, &limit, &last, now);
        let (op, cost) = (draw::op(source), draw::cost(source, &limit, &last));
        story.push((op, now, cost));
        let before = format!("{record:?}");
        let got = ask(&limit, &mut record, op, now, cost);
        let expected = naive.decide(op, now, cost);
        if got != expected {
            let story = &story[story.len().saturating_sub(12)..];
            return Err(format!(
                "{limit}\nstory {story:?}\n from {before}\n  got {got:?}\n want {expected:?}\nmodel {naive:?}"
            ));
        }
        last = got;
    }
    Ok(())
}

fn ask(limit: &Limit, record: &mut Record, op: Op, now: u64, cost: u64) -> Verdict {
    let decision = decide(op, &mut [Charge::new(limit, record, cost)], Timestamp::from_micros(now));
    assert_eq!(decision.allowed(), decision.binding().allowed, "one charge decides alone");
    *decision.binding()
}

fn stories(kind: Kind, count: u64) {
    for seed in 0..count {
        if let Err(difference) = tell(&mut Seeded::new(seed << 8 | kind as u64), kind, 40) {
            panic!("{kind:?}, seed {seed}: {difference}");
        }
    }
}

#[test]
fn buckets_equal_their_model() {
    stories(Kind::Bucket, 6_000);
}

#[test]
fn windows_equal_their_model() {
    stories(Kind::Window, 4_000);
}

#[test]
fn sliding_windows_equal_their_model() {
    stories(Kind::Sliding, 4_000);
}

#[test]
fn estimates_equal_their_model() {
    stories(Kind::Estimate, 4_000);
}

#[test]
fn logs_equal_their_model() {
    stories(Kind::Log, 4_000);
}

#[test]
fn concurrency_equals_its_model() {
    stories(Kind::Concurrent, 4_000);
}

/// One call of a story with ids: the operation, the id, when, and the cost and the reservation per
/// charge.
type Call = (Op, Option<Id>, u64, Vec<(u64, u64)>);

/// Tells a story of one to three limits on one key, with ids that come again, to both, and says
/// where they differ.
fn tell_with_ids(source: &mut impl Source, kind: Kind, length: usize) -> Result<(), String> {
    let mut limits = vec![draw::limit_of(source, kind)];
    while limits.len() < 3 && source.once_in(3) {
        limits.push(draw::limit(source));
    }
    let mut now = draw::dawn(source);
    let mut records = vec![Record::default(); limits.len()];
    let mut naives: Vec<Naive> = limits.iter().map(Naive::new).collect();
    let mut last = vec![Verdict::default(); limits.len()];
    let mut places = vec![Timestamp::EPOCH];
    let mut story: Vec<Call> = Vec::new();
    for _ in 0..length {
        let index = source.below(limits.len() as u64) as usize;
        if source.once_in(2) {
            now = draw::any_time(source, &limits[index], &last[index], now);
        }
        let op = op_with_id(source, &limits[index], &places);
        let id = (!source.once_in(4)).then(|| Id(source.below(5)));
        let amounts: Vec<(u64, u64)> = limits
            .iter()
            .zip(&last)
            .map(|(limit, last)| {
                let cost = draw::cost(source, limit, last);
                (
                    cost,
                    source.pick(&[
                        cost,
                        cost / 2,
                        cost.saturating_add(1),
                        1,
                        last.granted,
                        1_000_000,
                    ]),
                )
            })
            .collect();
        story.push((op, id, now, amounts.clone()));
        let before = format!("{records:?}");
        let charges = limits.iter().zip(&mut records).zip(&amounts);
        let mut charges: Vec<Charge<'_>> = charges
            .map(|((limit, record), &(cost, reserved))| Charge {
                limit,
                record,
                cost,
                reserved,
                id,
            })
            .collect();
        let decision = decide(op, &mut charges, Timestamp::from_micros(now));
        let asked = naives.iter_mut().zip(&amounts).map(|(key, &(cost, reserved))| Asked {
            key,
            cost,
            reserved,
        });
        // A lease without a name cannot be named.
        let named = id.filter(|id| *id != Id::NONE);
        let (expected, allowed) = naive::decide(op, named, now, asked.collect());
        if (decision.verdicts(), decision.allowed()) != (&expected[..], allowed) {
            let story = &story[story.len().saturating_sub(12)..];
            return Err(format!(
                "{limits:?}\nstory {story:?}\n from {before}\n  got {decision:?}\n want {expected:?}\nmodel {naives:?}"
            ));
        }
        last = expected;
        places.push(Timestamp::from_micros(now + last[0].reset_after_us));
    }
    Ok(())
}

/// Any operation; a place that is given back is one of those that were kept last.
fn op_with_id(source: &mut impl Source, limit: &Limit, places: &[Timestamp]) -> Op {
    let period = limit.algorithm().period_us();
    match source.below(20) {
        0..5 => Op::Check,
        5 => Op::Peek,
        6 | 7 => Op::Take,
        8 => Op::Debit,
        9..12 => Op::Refund,
        12 | 13 => Op::Settle,
        14 | 15 => Op::Release,
        // So fast that 2^53 units drain in a few ticks: the model keeps places where the core has
        // no number for them.
        16 | 17 if matches!(limit.algorithm(), Algorithm::Bucket(bucket) if bucket.rate.p > 1 << 51) => {
            Op::Take
        }
        16 | 17 => Op::Book { max_wait_us: source.pick(&[0, 1, period / 2, period]) },
        18 => Op::Unbook { idle_at: source.pick(&places[places.len().saturating_sub(3)..]) },
        _ if source.once_in(4) => Op::Reset,
        _ => Op::Refund,
    }
}

#[test]
fn charges_with_ids_equal_their_model() {
    for kind in KINDS {
        for seed in 0..1_000 {
            if let Err(difference) =
                tell_with_ids(&mut Seeded::new(seed << 8 | kind as u64), kind, 40)
            {
                panic!("{kind:?}, seed {seed}: {difference}");
            }
        }
    }
}

/// More leases at once than a list is kept for, named and unnamed, that end by themselves, by
/// release and by refund.
#[test]
fn many_leases_equal_their_model() {
    let mut most = 0;
    for seed in 0..40 {
        let source = &mut Seeded::new(seed);
        let limit: Limit = "90 concurrent ttl 1000us".parse().unwrap();
        let (mut record, mut naive, mut now) =
            (Record::default(), Naive::new(&limit), draw::dawn(source));
        for step in 0..600 {
            // Most of the time they are taken faster than they end, sometimes all of them end.
            now += if source.once_in(300) { 999 } else { source.pick(&[0, 1, 9, 9, 9, 20, 60]) };
            let (op, cost) = match source.below(16) {
                0..11 => (Op::Check, 1 + source.below(2)),
                11 => (Op::Take, 2),
                12 | 13 => (Op::Release, 0),
                14 => (Op::Refund, source.pick(&[1, 2, 3, 5, 70])),
                _ => (Op::Peek, 30),
            };
            let id = (op != Op::Refund && !source.once_in(3)).then(|| Id(1 + source.below(150)));
            let before = record.clone();
            let charge = Charge { id, ..Charge::new(&limit, &mut record, cost) };
            let got = *decide(op, &mut [charge], Timestamp::from_micros(now)).binding();
            let (expected, _) =
                naive::decide(op, id, now, vec![Asked { key: &mut naive, cost, reserved: 0 }]);
            assert_eq!(
                got, expected[0],
                "seed {seed}, step {step}: {op:?} of {cost} as {id:?} at {now} from {before:?}"
            );
            let State::Concurrent { leases } = &record.state else { continue };
            most = most.max(leases.iter().count());
        }
    }
    assert!(most > 60, "{most}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

    /// The same stories from words that can be shrunk to the shortest that differs.
    #[test]
    fn all_equal_their_models(kind in prop::sample::select(&KINDS), words in prop::collection::vec(any::<u64>(), 0..200)) {
        let told = tell(&mut Words::new(words), kind, 30);
        prop_assert!(told.is_ok(), "{}", told.unwrap_err());
    }
}
