//! I-REF: what is given back under an id is given back once, was taken before, and never lets in
//! more than if the request had not come.

use tidegate_core::{Algorithm, Charge, Decision, Id, Limit, Op, Record, Verdict, decide};

use super::{peek, ts};
use crate::draw::{self, KINDS, Kind, Seeded, Source};
use crate::naive::Naive;

/// One call under an id.
fn named(
    op: Op,
    limit: &Limit,
    record: &mut Record,
    now: u64,
    (reserved, cost): (u64, u64),
    id: u64,
) -> Decision {
    decide(op, &mut [Charge { limit, record, cost, reserved, id: Some(Id(id)) }], ts(now))
}

/// What would be left if only these had been charged.
fn without(limit: &Limit, charged: &[(u64, u64)], now: u64) -> u64 {
    let mut naive = Naive::new(limit);
    for (at, units) in charged {
        naive.force(*at, *units);
    }
    naive.room(now, limit.capacity())
}

/// What was given back in full leaves nothing behind: its id is new again, also if the clock goes
/// back.
#[test]
fn an_id_whose_charge_was_given_back_is_charged_again_on_any_clock() {
    for text in [
        "5/s",
        "5/s burst 7",
        "999983/d burst 9",
        "5/s window",
        "5/s window from first hit",
        "5/s sliding",
        "5/s estimate",
        "5/s log",
    ] {
        let limit: Limit = text.parse().unwrap();
        let mut record = Record::default();
        let now = 1_700_000_000_000_000;
        assert_eq!(
            named(Op::Check, &limit, &mut record, now, (0, 2), 1).remaining(),
            limit.capacity() - 2,
            "{text}"
        );
        let refund = decide(Op::Refund, &mut [Charge::new(&limit, &mut record, 2)], ts(now));
        assert_eq!(refund.granted(), 2, "{text}");
        let again = named(Op::Check, &limit, &mut record, now - 3_000_000, (0, 2), 1);
        assert_eq!(again.remaining(), limit.capacity() - 2, "{text}");
    }
}

#[test]
fn refunds_and_settlements_admit_no_more_than_without_the_request() {
    for seed in 0..8_000 {
        let source = &mut Seeded::new(seed);
        let kind = source.pick(&KINDS[..5]);
        let limit = draw::limit_of(source, kind);
        if matches!(limit.algorithm(), Algorithm::Window(window) if window.from_first_hit) {
            continue; // it keeps the start that its first hit gave it, even if that is given back
        }
        let mut record = Record::default();
        // What was charged, without what was given back: index + 1 is the id.
        let mut charged: Vec<(u64, u64)> = Vec::new();
        let (mut consumed, mut returned) = (0_u128, 0_u128);
        let (mut now, mut last) = (draw::dawn(source), Verdict::default());
        for _ in 0..30 {
            now = draw::later(source, &limit, &last, now);
            let cost = 1 + source.below(limit.capacity());
            let id = 1 + source.below(charged.len() as u64 + 1);
            let decision = match source.below(4) {
                0 | 1 => {
                    let id = charged.len() as u64 + 1;
                    let decision = named(Op::Check, &limit, &mut record, now, (0, cost), id);
                    charged.push((now, decision.granted()));
                    consumed += u128::from(decision.granted());
                    if limit.counts_rejected() && !decision.allowed() {
                        break; // what is charged then has no id, and this model no word for it
                    }
                    decision
                }
                2 => {
                    let decision = named(Op::Refund, &limit, &mut record, now, (0, cost), id);
                    if let Some((_, units)) = charged.get_mut(id as usize - 1) {
                        assert!(decision.granted() <= cost.min(*units));
                        *units -= cost.min(*units);
                    }
                    returned += u128::from(decision.granted());
                    decision
                }
                _ => {
                    let reserved = charged.get(id as usize - 1).map_or(0, |(_, units)| *units);
                    let actual = source.below(reserved + 1);
                    let decision =
                        named(Op::Settle, &limit, &mut record, now, (reserved, actual), id);
                    returned += u128::from(decision.granted());
                    if let Some((_, units)) = charged.get_mut(id as usize - 1) {
                        *units = actual;
                    }
                    let again = named(Op::Settle, &limit, &mut record, now, (reserved, actual), id);
                    assert_eq!(again.granted(), 0, "{limit} seed {seed}: settled once");
                    decision
                }
            };
            last = *decision.binding();
            assert!(returned <= consumed, "{limit} seed {seed}");
            // Had it not come, the ticks of a coarse grid would fall on other moments.
            let (left, bound) =
                (last.remaining, without(&limit, &charged, now + limit.grid_us() - 1));
            assert!(
                left <= bound,
                "{limit} seed {seed}: {left} left, {bound} if it had not come; {record:?}"
            );
        }
    }
}

#[test]
fn a_charge_is_given_back_once_and_only_what_it_took() {
    for seed in 0..3_000 {
        let source = &mut Seeded::new(seed);
        let limit = draw::limit(source);
        let mut record = Record::default();
        let (now, cost) = (draw::dawn(source), 1 + source.below(limit.capacity()));
        let first = named(Op::Check, &limit, &mut record, now, (0, cost), 7);
        assert!(first.allowed());
        let charged = record.clone();
        let again = named(Op::Check, &limit, &mut record, now, (0, cost), 7);
        assert!(again.allowed(), "{limit}: the same charge, sent again");
        assert_eq!(record, charged, "{limit}: is not taken twice");
        assert_eq!(
            named(Op::Refund, &limit, &mut record, now, (0, u64::MAX), 8).granted(),
            0,
            "{limit}: unknown id"
        );
        assert_eq!(
            named(Op::Refund, &limit, &mut record, now, (0, u64::MAX), 7).granted(),
            cost,
            "{limit}"
        );
        assert_eq!(peek(&limit, &record, now, 1).remaining, limit.capacity(), "{limit}");
        assert_eq!(
            named(Op::Refund, &limit, &mut record, now, (0, u64::MAX), 7).granted(),
            0,
            "{limit}: only once"
        );
    }
}

/// What was used beyond the reservation is taken like a debit: as far as the debt reaches, and no
/// further.
#[test]
fn settling_for_more_takes_what_is_missing() {
    for seed in 0..3_000 {
        let source = &mut Seeded::new(seed);
        let kind =
            source.pick(&[Kind::Bucket, Kind::Window, Kind::Sliding, Kind::Estimate, Kind::Log]);
        let limit = draw::limit_of(source, kind);
        let mut record = Record::default();
        let now = draw::dawn(source);
        let reserved = 1 + source.below(limit.capacity());
        assert!(named(Op::Check, &limit, &mut record, now, (0, reserved), 7).allowed());
        let actual = reserved + source.below(3 * limit.capacity());
        let settled = named(Op::Settle, &limit, &mut record, now, (reserved, actual), 7);
        let most = limit.capacity() + limit.debt();
        assert_eq!(settled.granted(), actual.min(most) - reserved, "{limit}");
        assert_eq!(settled.allowed(), actual <= most, "{limit}");
        assert_eq!(settled.remaining(), limit.capacity().saturating_sub(actual), "{limit}");
        let kept = record.clone();
        assert_eq!(
            named(Op::Settle, &limit, &mut record, now, (reserved, actual), 7).granted(),
            0,
            "{limit}"
        );
        assert_eq!(record, kept, "{limit}: settled once");
    }
}

#[test]
fn what_was_charged_under_another_scale_is_not_given_back() {
    let (old, new): (Limit, Limit) = ("10/s window".parse().unwrap(), "10/s log".parse().unwrap());
    let mut record = Record::default();
    assert!(named(Op::Check, &old, &mut record, 0, (0, 4), 1).allowed());
    assert!(named(Op::Check, &new, &mut record, 1, (0, 3), 2).allowed());
    assert_eq!(named(Op::Refund, &new, &mut record, 2, (0, 4), 1).granted(), 0);
    let again = named(Op::Check, &new, &mut record, 2, (0, 4), 1);
    assert_eq!(
        (again.allowed(), again.remaining()),
        (true, 3),
        "nothing was given back, so it is still taken"
    );
    let refunded = named(Op::Refund, &new, &mut record, 2, (0, 3), 2);
    assert_eq!((refunded.granted(), refunded.remaining()), (3, 6));
}

#[test]
fn no_more_than_the_last_few_ids_are_kept() {
    let limit: Limit = "1000/s".parse().unwrap();
    let mut record = Record::default();
    for id in 1..=1_000 {
        assert!(named(Op::Check, &limit, &mut record, id * 1_000_000, (0, 1), id).allowed());
        assert!(record.receipts.iter().count() <= tidegate_core::Receipts::MAX);
    }
    assert_eq!(record.receipts.iter().last().map(|receipt| receipt.id), Some(Id(1_000)));
}

#[test]
fn what_was_given_back_in_full_was_never_taken() {
    for text in [
        "10/min",
        "10/min window",
        "10/min sliding",
        "10/min estimate",
        "10/min log",
        "10 concurrent ttl 1m",
    ] {
        let limit: Limit = text.parse().unwrap();
        let (mut record, now) = (Record::default(), 1_700_000_000_000_000);
        for _ in 0..3 {
            // Charged once for any number of calls, given back once, and then it can be charged
            // again.
            assert!(named(Op::Check, &limit, &mut record, now, (0, 4), 7).allowed());
            assert!(named(Op::Check, &limit, &mut record, now, (0, 4), 7).allowed());
            assert_eq!(peek(&limit, &record, now, 1).remaining, 6, "{text}");
            assert_eq!(
                named(Op::Refund, &limit, &mut record, now, (0, 4), 7).granted(),
                4,
                "{text}"
            );
            assert_eq!(
                named(Op::Refund, &limit, &mut record, now, (0, 4), 7).granted(),
                0,
                "{text}"
            );
        }
        assert_eq!(peek(&limit, &record, now, 1).remaining, 10, "{text}");
    }
}

#[test]
fn an_idle_state_knows_no_ids() {
    for text in ["10/min", "10/min window", "10/min sliding", "10/min estimate", "10/min log"] {
        let limit: Limit = text.parse().unwrap();
        let (mut record, now) = (Record::default(), 1_700_000_000_000_000);
        assert!(named(Op::Check, &limit, &mut record, now, (0, 4), 7).allowed());
        let idle = record.idle_at().as_micros();
        // One that was forgotten and one that was not must answer the same.
        for (op, cost) in [(Op::Check, 10), (Op::Refund, 4), (Op::Settle, 6), (Op::Take, 3)] {
            let (mut kept, mut forgotten) = (record.clone(), Record::default());
            let expected = named(op, &limit, &mut forgotten, idle, (4, cost), 7);
            assert_eq!(named(op, &limit, &mut kept, idle, (4, cost), 7), expected, "{text} {op:?}");
            assert_eq!(
                peek(&limit, &kept, idle, 1),
                peek(&limit, &forgotten, idle, 1),
                "{text} {op:?}"
            );
        }
    }
}

#[test]
fn taking_again_under_the_same_id_grants_the_same_and_takes_nothing() {
    let limit: Limit = "10/min".parse().unwrap();
    let (mut record, now) = (Record::default(), 1_700_000_000_000_000);
    let first = named(Op::Take, &limit, &mut record, now, (0, 7), 1);
    let again = named(Op::Take, &limit, &mut record, now, (0, 7), 1);
    let other = named(Op::Take, &limit, &mut record, now, (0, 7), 2);
    assert_eq!([first.granted(), again.granted(), other.granted()], [7, 7, 3]);
    let exhausted = named(Op::Take, &limit, &mut record, now, (0, 7), 1);
    assert_eq!((exhausted.allowed(), exhausted.granted()), (true, 7));
}
