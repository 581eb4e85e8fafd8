//! I-C: time that goes back is the latest time the key remembers.

use tidegate_core::{Op, Record, State, Timestamp, Verdict};

use super::{ask, check};
use crate::draw::{self, Kind, Seeded, Source};

/// The newest time a key remembers: a bucket's tick, the start of a window or step, the newest hit
/// or lease.
fn remembered(record: &Record) -> u64 {
    let newest = match &record.state {
        State::Bucket { level, .. } => Some(level.at),
        State::Window { count, .. } => Some(count.start),
        State::Sliding { step, steps, .. } => {
            steps.iter().last().map(|newest| Timestamp::from_micros(newest.index * step))
        }
        State::Estimate { pair, .. } => Some(pair.start),
        State::Log { entries, .. } => entries.iter().last().map(|newest| newest.at),
        State::Concurrent { leases } => leases.iter().next().map(|_| leases.newest()),
        State::Idle => None,
    };
    newest.map_or(0, Timestamp::as_micros)
}

#[test]
fn time_that_goes_back_is_the_newest_time_the_key_remembers() {
    for seed in 0..6_000 {
        let source = &mut Seeded::new(seed);
        let limit = draw::limit(source);
        let (mut raw, mut clamped) = (Record::default(), Record::default());
        let (mut now, mut last) = (draw::dawn(source), Verdict::default());
        for _ in 0..30 {
            now = draw::any_time(source, &limit, &last, now);
            let op = source.pick(&[Op::Check, Op::Check, Op::Take, Op::Debit, Op::Peek]);
            let cost = draw::cost(source, &limit, &last);
            let time = now.max(remembered(&raw));
            let got = ask(op, &limit, &mut raw, now, cost);
            let expected = ask(op, &limit, &mut clamped, time, cost);
            assert_eq!(
                (got, &raw),
                (expected, &clamped),
                "{limit} seed {seed}: {op:?} {cost} at {now}, not {time}"
            );
            last = got;
        }
    }
}

/// A clock that runs back and forth admits no more than one that stands still in between.
#[test]
fn a_clock_that_goes_back_admits_nothing_twice() {
    for kind in
        [Kind::Log, Kind::Sliding, Kind::Window, Kind::Estimate, Kind::Bucket, Kind::Concurrent]
    {
        for seed in 0..300 {
            let source = &mut Seeded::new(seed);
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
