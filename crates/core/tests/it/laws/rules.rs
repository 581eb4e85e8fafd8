//! The rules of single operations: counting rejected, debit and debt, take, booking, leases.

use tidegate_core::{Algorithm, Charge, Id, Limit, Op, Period, Record, Retry, Verdict, decide};

use super::{ask, check, peek, ts};
use crate::draw::{self, Kind, Seeded, Source};

#[test]
fn counting_rejected_charges_what_was_denied_up_to_one_amount_beyond() {
    // 3 in 10 s: at, cost => allowed, remaining, retry after, all in seconds
    let limit: Limit = "3/10s log count rejected".parse().unwrap();
    let mut record = Record::default();
    for (at, cost, allowed, remaining, retry) in [
        (0, 3, true, 0, 0),
        (5, 2, false, 0, 10), // now 5 are in: 3 of them end at 10, the other 2 at 15
        (6, 1, false, 0, 9), // 6 are in, which is capacity + amount: 1 fits again when the 2 of 5 s have ended
        (7, 1, false, 0, 8), // no more is charged
        (8, 4, false, 0, u64::MAX), // never fits: not charged
        (15, 1, true, 1, 0),
    ] {
        let verdict = check(&limit, &mut record, at * 1_000_000, cost);
        let waited = verdict.retry.micros().map_or(u64::MAX, |wait| wait / 1_000_000);
        assert_eq!(
            (verdict.allowed, verdict.remaining, waited),
            (allowed, remaining, retry),
            "{cost} at {at} s"
        );
    }
}

#[test]
fn counting_rejected_denies_a_hammering_client_and_allows_a_patient_one() {
    for seed in 0..4_000 {
        let source = &mut Seeded::new(seed);
        let kind =
            source.pick(&[Kind::Bucket, Kind::Window, Kind::Sliding, Kind::Estimate, Kind::Log]);
        let limit = draw::limit_of(source, kind);
        if !limit.counts_rejected() {
            continue;
        }
        let most = limit.capacity() + limit.algorithm().amount();
        let mut record = Record::default();
        let mut now = 1_700_000_000_000_000;
        let mut used = 0;
        for _ in 0..20 {
            let cost = 1 + source.below(limit.capacity());
            let verdict = check(&limit, &mut record, now, cost);
            used = if verdict.allowed { used + cost } else { most.min(used + cost) };
            assert_eq!(verdict.remaining, limit.capacity().saturating_sub(used), "{limit}");
        }
        let before = record.clone();
        let never = check(&limit, &mut record, now, limit.capacity() + 1);
        assert_eq!(
            (never.retry, &record),
            (Retry::Never, &before),
            "{limit}: a cost that never fits is not charged"
        );
        assert!(!ask(Op::Debit, &limit, &mut record, now, u64::MAX).allowed);
        assert_eq!(record, before, "{limit}: only checks count");
        let Retry::After(wait) = check(&limit, &mut record, now, limit.capacity()).retry else {
            panic!("{limit}: everything is taken");
        };
        now += wait;
        assert!(
            check(&limit, &mut record, now, limit.capacity()).allowed,
            "{limit}: allowed after the wait"
        );
    }
}

#[test]
fn a_debit_goes_into_debt_up_to_its_bound() {
    for seed in 0..4_000 {
        let source = &mut Seeded::new(seed);
        let limit = draw::limit(source);
        let most = limit.capacity() + limit.debt();
        let mut record = Record::default();
        let now = draw::dawn(source);
        let mut used = 0;
        for _ in 0..12 {
            let cost =
                source.pick(&[1, limit.capacity(), most, most - used, most - used + 1, u64::MAX]);
            let before = record.clone();
            let verdict = ask(Op::Debit, &limit, &mut record, now, cost);
            let fits = cost <= most - used;
            assert_eq!(verdict.allowed, fits, "{limit} seed {seed}: {cost} after {used}");
            match fits {
                true => used += cost,
                false => assert_eq!(record, before),
            }
            assert_eq!(verdict.retry == Retry::Never, cost > most);
            assert_eq!(verdict.remaining, limit.capacity().saturating_sub(used), "{limit}");
            if let Retry::After(wait) = verdict.retry
                && now + wait < 1 << 52
            {
                let then = |at| ask(Op::Debit, &limit, &mut record.clone(), at, cost).allowed;
                assert!(
                    then(now + wait) && !then(now + wait - 1),
                    "{limit}: a debit's wait is tight too"
                );
            }
        }
    }
}

#[test]
fn take_keeps_fractions() {
    let limit: Limit = "3/s".parse().unwrap();
    let mut record = Record::default();
    assert_eq!(ask(Op::Take, &limit, &mut record, 0, 9).granted, 3);
    // Two and a half have come back: two are granted, and the half is still there a sixth of a
    // second later.
    assert_eq!(ask(Op::Take, &limit, &mut record, 833_334, 9).granted, 2);
    assert_eq!(ask(Op::Take, &limit, &mut record, 999_999, 9).granted, 0);
    let last = ask(Op::Take, &limit, &mut record, 999_999, 9);
    assert_eq!((last.allowed, last.retry), (false, Retry::After(1)));
    assert_eq!(ask(Op::Take, &limit, &mut record, 1_000_000, 9).granted, 1);
}

/// Bookings stay in order, and requests at the booked times keep the bound of the bucket.
#[test]
fn booked_places_keep_the_order_and_the_bound() {
    for seed in 0..6_000 {
        let source = &mut Seeded::new(seed);
        let limit = draw::limit_of(source, Kind::Bucket);
        let Algorithm::Bucket(bucket) = limit.algorithm() else { unreachable!() };
        if bucket.rate.p > 1 << 51 {
            continue; // so fast that 2^53 units drain in a few ticks: there is nothing to wait for
        }
        let mut record = Record::default();
        let (mut now, mut last) = (1_700_000_000_000_000, Verdict::default());
        let mut turns: Vec<(u64, u64)> = Vec::new();
        for _ in 0..25 {
            now = draw::later(source, &limit, &last, now).min(1_700_000_000_000_000 + (1 << 50));
            let cost = draw::cost(source, &limit, &last);
            let max_wait_us =
                source.pick(&[0, 1, last.next_after_us, last.reset_after_us, 1 << 40]);
            let before = record.clone();
            let wait = peek(&limit, &record, now, cost).retry;
            last = ask(Op::Book { max_wait_us }, &limit, &mut record, now, cost);
            if !last.allowed {
                assert_eq!(record, before, "{limit}: a refused booking leaves no trace");
                // Too long, too much, or further ahead than 2^53 units, which is more than a whole
                // bucket.
                let (too_long, too_much) =
                    (wait.micros().is_some_and(|wait| wait > max_wait_us), cost > limit.capacity());
                assert!(
                    too_long || too_much || last.reset_after_us > bucket.fill_us(),
                    "{limit}: {cost} at {now}"
                );
                continue;
            }
            assert_eq!(last.retry, wait, "{limit}: the wait is the one a check would name");
            let turn = now + last.retry.micros().unwrap();
            assert!(turn - now <= max_wait_us);
            assert!(
                turns.last().is_none_or(|(before, _)| *before <= turn) || cost == 0,
                "{limit}: in order"
            );
            if cost > 0 {
                turns.push((turn, cost));
            }
        }
        let uncounted = u128::from(limit.grid_us()) - 1;
        let (amount, period) = (u128::from(bucket.amount), u128::from(bucket.period));
        for (first, (from, _)) in turns.iter().enumerate() {
            let mut sum = 0;
            for (to, cost) in &turns[first..] {
                sum += u128::from(*cost);
                let most = u128::from(bucket.capacity) * period
                    + amount * (u128::from(to - from) + uncounted);
                assert!(
                    sum * period <= most,
                    "{limit} seed {seed}: {sum} from {from} to {to} of {turns:?}"
                );
            }
        }
    }
}

#[test]
fn only_the_last_place_can_be_given_back() {
    let limit: Limit = "1/s".parse().unwrap();
    let mut record = Record::default();
    let mut book = |now| {
        let booked = ask(Op::Book { max_wait_us: u64::MAX }, &limit, &mut record, now, 1);
        (booked.retry.micros().unwrap(), ts(now + booked.reset_after_us))
    };
    assert_eq!(book(0).0, 0);
    let (second, third) = (book(10), book(20));
    assert_eq!((second.0, third.0), (999_990, 1_999_980));
    let mut unbook = |idle_at| ask(Op::Unbook { idle_at }, &limit, &mut record, 30, 1);
    assert_eq!(unbook(second.1).granted, 0, "there is a later booking");
    assert_eq!(unbook(third.1).granted, 1);
    assert_eq!(unbook(third.1).granted, 0, "only once");
    assert_eq!(unbook(second.1).granted, 1, "there is no later booking");
    assert_eq!(check(&limit, &mut record, 1_000_000, 1).retry, Retry::Now);
}

#[test]
fn a_booking_of_anything_but_a_single_bucket_is_a_check() {
    for seed in 0..3_000 {
        let source = &mut Seeded::new(seed);
        let limits = [draw::limit(source), draw::limit(source)];
        let limits = if matches!(limits[0].algorithm(), Algorithm::Bucket(_)) {
            &limits[..]
        } else {
            &limits[..1]
        };
        let now = draw::dawn(source);
        let mut booked = vec![Record::default(); 2];
        let mut checked = booked.clone();
        for _ in 0..5 {
            let cost = 1 + source.below(4);
            let decide = |op, records: &mut Vec<Record>| {
                let charges = limits.iter().zip(records);
                let mut charges: Vec<_> =
                    charges.map(|(limit, record)| Charge::new(limit, record, cost)).collect();
                decide(op, &mut charges, ts(now))
            };
            assert_eq!(
                decide(Op::Book { max_wait_us: 1 << 40 }, &mut booked),
                decide(Op::Check, &mut checked)
            );
            assert_eq!(booked, checked);
        }
    }
}

#[test]
fn leases_end_by_release_once_or_by_themselves() {
    let limit = Limit::concurrent(3, Period::seconds(10)).build().unwrap();
    let mut record = Record::default();
    let mut call = |op, at_secs: u64, cost, id| {
        let charge =
            Charge { limit: &limit, record: &mut record, cost, reserved: 0, id: Some(Id(id)) };
        decide(op, &mut [charge], ts(at_secs * 1_000_000))
    };
    assert!(call(Op::Check, 0, 2, 1).allowed());
    assert!(call(Op::Check, 0, 2, 1).allowed(), "the same lease again");
    assert!(call(Op::Check, 4, 1, 2).allowed());
    assert_eq!(call(Op::Check, 5, 1, 3).retry(), Retry::After(5_000_000), "the first ends at 10 s");
    assert_eq!(call(Op::Release, 6, 0, 2).granted(), 1);
    assert_eq!(call(Op::Release, 6, 0, 2).granted(), 0, "only once");
    assert!(call(Op::Check, 6, 1, 3).allowed());
    assert_eq!(call(Op::Release, 10, 0, 1).granted(), 0, "it has ended by itself");
    let left = call(Op::Check, 10, 2, 4);
    assert_eq!((left.allowed(), left.remaining()), (true, 0));
    assert_eq!(
        call(Op::Settle, 11, 9, 4).remaining(),
        2,
        "settling ends a lease, whatever it cost"
    );
    assert_eq!(call(Op::Refund, 12, 1, 3).remaining(), 3, "and so does a refund");
}

#[test]
fn releasing_does_not_change_other_limits() {
    for seed in 0..500 {
        let source = &mut Seeded::new(seed);
        let kind =
            source.pick(&[Kind::Bucket, Kind::Window, Kind::Sliding, Kind::Estimate, Kind::Log]);
        let limit = draw::limit_of(source, kind);
        let mut record = Record::default();
        let mut call = |op| {
            let _ = decide(
                op,
                &mut [Charge {
                    limit: &limit,
                    record: &mut record,
                    cost: 1,
                    reserved: 0,
                    id: Some(Id(1)),
                }],
                ts(9),
            );
            record.clone()
        };
        assert_eq!(call(Op::Check), call(Op::Release), "{limit}");
    }
}

#[test]
fn a_reset_removes_all_usage() {
    for seed in 0..2_000 {
        let source = &mut Seeded::new(seed);
        let limit = draw::limit(source);
        let (now, mut record) = (draw::dawn(source), Record::default());
        let _ = ask(Op::Debit, &limit, &mut record, now, limit.capacity() + limit.debt());
        let verdict = ask(Op::Reset, &limit, &mut record, now, 1);
        assert_eq!(
            (verdict.allowed, verdict.remaining, verdict.reset_after_us),
            (true, limit.capacity(), 0),
            "{limit}"
        );
        assert!(record.idle_at() <= ts(now), "{limit}: a store may remove it immediately");
        assert!(record.receipts.is_empty());
    }
}
