//! I-R, I-T, I-M, I-Z, I-E: what an answer promises comes true, to the microsecond.

use tidegate_core::{Algorithm, Charge, Id, Limit, Op, Record, Retry, Timestamp, Verdict, decide};

use super::{ask, check, peek, ts};
use crate::draw::{self, Kind, Seeded, Source};

const END: u64 = Timestamp::MAX.as_micros();

/// Plays random histories on a clock that does not go back, and passes every state after a call to
/// `look`.
fn histories(count: u64, look: impl Fn(&Limit, &Record, u64, &Verdict, &mut Seeded)) {
    for seed in 0..count {
        let source = &mut Seeded::new(seed);
        let limit = draw::limit(source);
        let mut record = Record::default();
        let (mut now, mut last) = (draw::dawn(source), Verdict::default());
        for _ in 0..30 {
            now = draw::later(source, &limit, &last, now);
            let op =
                source.pick(&[Op::Check, Op::Check, Op::Check, Op::Take, Op::Debit, Op::Refund]);
            last = ask(op, &limit, &mut record, now, draw::cost(source, &limit, &last));
            let source = &mut Seeded::new(source.word());
            look(&limit, &record, now, &last, source);
        }
    }
}

#[test]
fn what_remains_fits_and_one_more_does_not() {
    histories(5_000, |limit, record, now, last, _| {
        let r = last.remaining;
        assert!(peek(limit, record, now, r).allowed, "{limit}: {r} left at {now} of {record:?}");
        assert!(
            !peek(limit, record, now, r + 1).allowed,
            "{limit}: {r} left at {now} of {record:?}"
        );
        for cost in [1, r / 2, r] {
            let after = check(limit, &mut record.clone(), now, cost);
            if cost <= r {
                assert_eq!(
                    (after.allowed, after.granted, after.remaining),
                    (true, cost, r - cost),
                    "{limit}"
                );
            }
        }
    });
}

#[test]
fn a_retry_is_allowed_at_the_promised_microsecond_and_not_before() {
    histories(5_000, |limit, record, now, last, source| {
        for cost in [1, last.remaining + 1, limit.capacity(), draw::cost(source, limit, last)] {
            let denied = peek(limit, record, now, cost);
            match denied.retry {
                Retry::Now => assert!(denied.allowed),
                Retry::Never => {
                    assert!(cost > limit.capacity(), "{limit}: {cost} fits at some time")
                }
                Retry::After(wait) if now + wait <= END => {
                    assert!(wait > 0 && !denied.allowed);
                    let history =
                        || format!("{limit}: {cost} at {now}, after {wait}, of {record:?}");
                    assert!(peek(limit, record, now + wait, cost).allowed, "{}", history());
                    assert!(!peek(limit, record, now + wait - 1, cost).allowed, "{}", history());
                    assert_eq!(
                        peek(limit, record, now + wait - 1, cost).retry,
                        Retry::After(1),
                        "{}",
                        history()
                    );
                }
                Retry::After(_) => {}
            }
        }
    });
}

#[test]
fn waiting_never_denies_what_was_allowed() {
    histories(5_000, |limit, record, now, last, source| {
        let then = draw::later(source, limit, last, now);
        let later = draw::later(source, limit, last, then);
        let (a, b) = (peek(limit, record, then, 1), peek(limit, record, later, 1));
        assert!(a.remaining <= b.remaining, "{limit}: at {then} and {later} of {record:?}");
        assert!(last.remaining <= a.remaining, "{limit}: at {now} and {then} of {record:?}");
    });
}

#[test]
fn everything_is_back_at_the_promised_microsecond_and_not_before() {
    histories(5_000, |limit, record, now, last, _| {
        let (full, reset, next) = (limit.capacity(), last.reset_after_us, last.next_after_us);
        assert_eq!(reset == 0, last.remaining == full, "{limit}");
        assert_eq!(next == 0, last.remaining == full, "{limit}");
        if reset > 0 && now + reset <= END {
            assert_eq!(
                peek(limit, record, now + reset, 1).remaining,
                full,
                "{limit} {now} {record:?}"
            );
            assert!(
                peek(limit, record, now + reset - 1, 1).remaining < full,
                "{limit} {now} {record:?}"
            );
        }
        if next > 0 && now + next <= END {
            assert!(
                peek(limit, record, now + next, 1).remaining > last.remaining,
                "{limit} {now} {record:?}"
            );
            assert_eq!(
                peek(limit, record, now + next - 1, 1).remaining,
                last.remaining,
                "{limit} {now} {record:?}"
            );
        }
    });
}

/// From `idle_at` on a record is the same as none, whatever comes; one microsecond earlier it is
/// not.
#[test]
fn an_idle_record_may_be_forgotten_and_no_earlier() {
    histories(2_500, |limit, record, now, last, source| {
        let idle = record.idle_at().as_micros();
        assert!(
            idle <= now || now + last.reset_after_us == idle,
            "{limit}: {now} {last:?} {record:?}"
        );
        if idle > now && idle <= END {
            assert!(
                peek(limit, record, idle - 1, 1).remaining < limit.capacity(),
                "{limit}: {record:?}"
            );
        }
        let mut at = idle.max(now);
        if at > END {
            return;
        }
        let (mut kept, mut none) = (record.clone(), Record::default());
        let mut last = Verdict::default();
        for _ in 0..8 {
            at = draw::later(source, limit, &last, at);
            let (op, cost) = (draw::op(source), draw::cost(source, limit, &last));
            last = ask(op, limit, &mut kept, at, cost);
            assert_eq!(
                last,
                ask(op, limit, &mut none, at, cost),
                "{limit}: {op:?} {cost} at {at} of {record:?}"
            );
        }
    });
}

#[test]
fn nothing_panics_at_the_limits_of_time_and_numbers() {
    let ops = [
        Op::Check,
        Op::Peek,
        Op::Take,
        Op::Debit,
        Op::Refund,
        Op::Reset,
        Op::Settle,
        Op::Release,
        Op::Book { max_wait_us: u64::MAX },
        Op::Unbook { idle_at: Timestamp::MAX },
    ];
    let extremes = [0, 1, 2, 1 << 51, (1 << 52) - 1, 1 << 53, u64::MAX - 1, u64::MAX];
    for seed in 0..6_000 {
        let source = &mut Seeded::new(seed);
        let limits = [draw::limit(source), draw::limit(source)];
        let mut record = Record::default();
        for _ in 0..40 {
            let limit = source.pick(&limits);
            let last = Verdict { amount: 1, ..Verdict::default() };
            let near = draw::cost(source, &limit, &last);
            let (far, reserved, any) =
                (source.pick(&extremes), source.pick(&extremes), source.word());
            let cost = source.pick(&[near, near, far]);
            let now = source.pick(&[0, 1, END - 1, END, u64::MAX, 1_700_000_000_000_000, any]);
            let id = source.pick(&[None, Some(Id(0)), Some(Id(1)), Some(Id(2))]);
            let charge = Charge { limit: &limit, record: &mut record, cost, reserved, id };
            let decision = decide(source.pick(&ops), &mut [charge], ts(now));
            assert!(decision.remaining() <= limit.capacity());
            let _ = record.idle_at();
        }
    }
}

/// The time to fill that headers name is the one that a full bucket takes, but for the rest of a
/// coarse tick.
#[test]
fn a_full_bucket_drains_in_its_time_to_fill() {
    for (text, fill_us) in
        [("10/s", 1_000_000), ("10/s burst 5", 500_000), ("7/min burst 3", 25_714_286)]
    {
        let limit: Limit = text.parse().unwrap();
        let Algorithm::Bucket(bucket) = limit.algorithm() else { unreachable!("{text}") };
        assert_eq!(bucket.fill_us(), fill_us, "{text}");
    }
    for seed in 0..4_000 {
        let limit = draw::limit_of(&mut Seeded::new(seed), Kind::Bucket);
        let Algorithm::Bucket(bucket) = limit.algorithm() else { unreachable!("{limit}") };
        let full = check(&limit, &mut Record::default(), 1_700_000_000_000_000, limit.capacity());
        let (reset, fill) = (full.reset_after_us, bucket.fill_us());
        assert!(fill <= reset && reset < fill + limit.grid_us(), "{limit}: {reset} of {fill}");
    }
}
