//! I-DET, I-REJ, I-PEEK: denials and peeks leave no trace.

use tidegate_core::{Charge, Id, Limit, Op, Record, State, Verdict, decide};

use super::{ask, check, ts};
use crate::draw::{self, Seeded, Source};

const OPS: [Op; 7] = [
    Op::Check,
    Op::Check,
    Op::Take,
    Op::Debit,
    Op::Refund,
    Op::Peek,
    Op::Book { max_wait_us: 1_000_000 },
];

#[test]
fn denials_and_peeks_leave_the_record_unchanged() {
    for seed in 0..6_000 {
        let source = &mut Seeded::new(seed);
        let limit = draw::limit(source);
        let mut record = Record::default();
        let (mut now, mut last) = (draw::dawn(source), Verdict::default());
        for _ in 0..30 {
            now = draw::any_time(source, &limit, &last, now);
            let (op, cost) = (source.pick(&OPS), draw::cost(source, &limit, &last));
            let before = record.clone();
            last = ask(op, &limit, &mut record, now, cost);
            let again = ask(op, &limit, &mut before.clone(), now, cost);
            assert_eq!(last, again, "{limit} seed {seed}: the same call has the same answer");
            let counted = limit.counts_rejected() && matches!(op, Op::Check | Op::Book { .. });
            if op == Op::Peek || cost == 0 || (!last.allowed && !counted) {
                assert_eq!(
                    record, before,
                    "{limit} seed {seed}: {op:?} {cost} at {now} was {last:?}"
                );
            }
            if last.granted == 0 && op != Op::Check && !matches!(op, Op::Book { .. }) {
                assert_eq!(
                    record, before,
                    "{limit} seed {seed}: {op:?} {cost} at {now} moved nothing"
                );
            }
        }
    }
}

#[test]
fn a_look_from_a_clock_that_is_ahead_forgets_nothing() {
    for text in ["2/10us log", "2/10us sliding step 3us", "2 concurrent ttl 10us"] {
        let limit: Limit = text.parse().unwrap();
        let mut record = Record::default();
        assert!(check(&limit, &mut record, 100, 2).allowed);
        for op in [Op::Peek, Op::Check, Op::Debit, Op::Take] {
            let cost = if op == Op::Take { 0 } else { 5 };
            let _ = ask(op, &limit, &mut record, 150, cost);
            assert!(!check(&limit, &mut record, 105, 1).allowed, "{text}: after {op:?} at 150");
        }
    }
}

#[test]
fn giving_back_nothing_makes_no_record() {
    for seed in 0..600 {
        let limit = draw::limit(&mut Seeded::new(seed));
        for id in [None, Some(Id(7))] {
            for op in [Op::Refund, Op::Release, Op::Settle, Op::Unbook { idle_at: ts(9) }] {
                let mut record = Record::default();
                let charge =
                    Charge { limit: &limit, record: &mut record, cost: 3, reserved: 3, id };
                assert!(decide(op, &mut [charge], ts(5)).allowed());
                assert_eq!(record.state, State::Idle, "{limit} {op:?} {id:?}");
            }
        }
    }
}

#[test]
fn the_id_of_leases_without_an_id_cannot_be_used() {
    let limit: Limit = "2 concurrent ttl 10s".parse().unwrap();
    let mut record = Record::default();
    assert!(check(&limit, &mut record, 0, 2).allowed);
    let mut named = |op, id| {
        let charge =
            Charge { limit: &limit, record: &mut record, cost: 1, reserved: 0, id: Some(id) };
        decide(op, &mut [charge], ts(1))
    };
    assert!(!named(Op::Check, Id::NONE).allowed());
    assert_eq!(named(Op::Release, Id::NONE).granted(), 0);
    assert!(!named(Op::Check, Id(1)).allowed());
}
