//! I-C: time that goes back is the latest time the key remembers.

use tidegate_core::{Op, Record, Verdict};

use super::{ask, check};
use crate::draw::{self, Kind, Seeded, Source};

/// The moment of the last charge is remembered exactly, except by a bucket on a coarse grid, which counts whole ticks.
#[test]
fn time_that_goes_back_is_the_time_something_was_last_taken() {
    for seed in 0..6_000 {
        let source = &mut Seeded(seed);
        let limit = draw::limit(source);
        if limit.grid_us() > 1 {
            continue;
        }
        let (mut raw, mut clamped) = (Record::default(), Record::default());
        let mut now = draw::dawn(source);
        let (mut latest, mut last) = (0, Verdict::default());
        for _ in 0..30 {
            now = draw::any_time(source, &limit, &last, now);
            // Only what takes moves the latest time, and only while it is in use.
            let op = source.pick(&[Op::Check, Op::Check, Op::Take, Op::Debit, Op::Peek]);
            let cost = draw::cost(source, &limit, &last);
            let time = if latest < raw.idle_at().as_micros() { now.max(latest) } else { now };
            let before = raw.clone();
            let got = ask(op, &limit, &mut raw, now, cost);
            let expected = ask(op, &limit, &mut clamped, time, cost);
            assert_eq!((got, &raw), (expected, &clamped), "{limit} seed {seed}: {op:?} {cost} at {now}, not {time}");
            if raw != before {
                latest = time;
            }
            last = got;
        }
    }
}

/// A clock that runs back and forth admits no more than one that stands still in between.
#[test]
fn a_clock_that_goes_back_admits_nothing_twice() {
    for kind in [Kind::Log, Kind::Sliding, Kind::Window, Kind::Estimate, Kind::Bucket, Kind::Concurrent] {
        for seed in 0..300 {
            let source = &mut Seeded(seed);
            let limit = draw::limit_of(source, kind);
            let mut record = Record::default();
            let start = 1_700_000_000_000_000;
            assert!(check(&limit, &mut record, start, limit.capacity()).allowed);
            for _ in 0..10 {
                let back = source.below(1_000_000_000);
                assert!(!check(&limit, &mut record, start - back, 1).allowed, "{limit}");
            }
        }
    }
}
