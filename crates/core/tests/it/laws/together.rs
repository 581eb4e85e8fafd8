//! I-AON: several charges are taken together or not at all, in whatever order they are listed.

use tidegate_core::{Charge, Decision, Limit, Op, Record, Retry, Timestamp, Verdict, decide};

use super::{ask, peek, ts};
use crate::draw::{self, Seeded, Source};

type Parts = Vec<(Limit, Record, u64)>;

fn together(op: Op, parts: &mut Parts, now: u64) -> Decision {
    let mut charges: Vec<Charge<'_>> =
        parts.iter_mut().map(|(limit, record, cost)| Charge::new(limit, record, *cost)).collect();
    decide(op, &mut charges, ts(now))
}

/// Random charges over records with usage, and the time to decide.
fn scenes(count: u64, look: impl Fn(Parts, u64, &mut Seeded)) {
    for seed in 0..count {
        let source = &mut Seeded::new(seed);
        let mut now = draw::dawn(source);
        let mut parts: Parts =
            (0..1 + source.below(4)).map(|_| (draw::limit(source), Record::default(), 0)).collect();
        for _ in 0..8 {
            for (limit, record, cost) in &mut parts {
                let last = peek(limit, record, now, 1);
                *cost = draw::cost(source, limit, &last).min(u64::MAX / 8);
                if source.once_in(3) {
                    now = draw::later(source, limit, &last, now);
                }
            }
            look(parts.clone(), now, &mut Seeded::new(source.word()));
            let _ = together(Op::Check, &mut parts, now);
        }
    }
}

#[test]
fn all_or_nothing() {
    scenes(4_000, |parts, now, _| {
        let alone: Vec<Verdict> =
            parts.iter().map(|(limit, record, cost)| peek(limit, record, now, *cost)).collect();
        let mut after = parts.clone();
        let decision = together(Op::Check, &mut after, now);
        assert_eq!(decision.allowed(), alone.iter().all(|verdict| verdict.allowed));
        for (index, (limit, record, cost)) in parts.iter().enumerate() {
            let verdict = decision.verdicts()[index];
            assert_eq!(verdict.allowed, alone[index].allowed, "{limit}");
            let mut single = record.clone();
            if decision.allowed() {
                assert_eq!(ask(Op::Check, limit, &mut single, now, *cost), verdict, "{limit}");
                assert_eq!(after[index].1, single, "{limit}: taken as if alone");
            } else if !limit.counts_rejected() {
                assert_eq!(
                    (verdict.granted, &after[index].1),
                    (0, record),
                    "{limit}: a denial takes nothing"
                );
                assert_eq!(verdict.retry, alone[index].retry, "{limit}");
            }
        }
    });
}

#[test]
fn the_order_of_the_charges_does_not_matter() {
    scenes(3_000, |parts, now, source| {
        let op = source.pick(&[Op::Check, Op::Take, Op::Debit, Op::Peek]);
        let mut order: Vec<usize> = (0..parts.len()).collect();
        for place in (1..order.len()).rev() {
            order.swap(place, source.below(place as u64 + 1) as usize);
        }
        let mut other: Parts = order.iter().map(|index| parts[*index].clone()).collect();
        let mut first = parts;
        let (a, b) = (together(op, &mut first, now), together(op, &mut other, now));
        assert_eq!(a.allowed(), b.allowed());
        for (place, index) in order.iter().enumerate() {
            assert_eq!(a.verdicts()[*index], b.verdicts()[place]);
            assert_eq!(first[*index].1, other[place].1);
        }
    });
}

#[test]
fn the_combined_wait_is_tight_and_the_binding_charge_names_it() {
    scenes(4_000, |mut parts, now, _| {
        let decision = together(Op::Check, &mut parts, now);
        let rank = |retry: Retry| retry.micros().unwrap_or(u64::MAX);
        let verdicts = decision.verdicts();
        let first = |best: &dyn Fn(&Verdict, &Verdict) -> bool| {
            (0..verdicts.len()).find(|a| verdicts.iter().all(|b| best(&verdicts[*a], b))).unwrap()
        };
        if decision.allowed() {
            let share = |a: &Verdict, b: &Verdict| u128::from(a.remaining) * u128::from(b.amount);
            assert_eq!(decision.binding_index(), first(&|a, b| share(a, b) <= share(b, a)));
            return;
        }
        assert_eq!(decision.binding_index(), first(&|a, b| rank(a.retry) >= rank(b.retry)));
        if let Retry::After(wait) = decision.retry()
            && now + wait <= Timestamp::MAX.as_micros()
        {
            assert!(together(Op::Peek, &mut parts, now + wait).allowed());
            assert!(!together(Op::Peek, &mut parts, now + wait - 1).allowed());
        }
    });
}

#[test]
fn take_grants_the_same_to_all_and_is_as_much_as_fits() {
    scenes(4_000, |mut parts, now, _| {
        let rooms: Vec<u64> =
            parts.iter().map(|(limit, record, _)| peek(limit, record, now, 1).remaining).collect();
        let most =
            parts.iter().zip(&rooms).map(|((_, _, cost), room)| *cost.min(room)).min().unwrap();
        let before = parts.clone();
        let decision = together(Op::Take, &mut parts, now);
        for (index, verdict) in decision.verdicts().iter().enumerate() {
            assert_eq!(verdict.remaining, rooms[index] - most);
            assert_eq!(verdict.granted, if decision.allowed() { most } else { 0 });
        }
        if most == 0 {
            assert_eq!(parts, before, "nothing was taken");
        } else {
            assert!(decision.allowed());
        }
    });
}
