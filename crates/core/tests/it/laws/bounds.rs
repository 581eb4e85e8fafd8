//! I-U: the upper bounds that each algorithm promises, for all spans, and the worst case, which is
//! reached.

use tidegate_core::{Algorithm, Limit, Op, Period, Record, Verdict};

use super::{ask, check};
use crate::draw::{self, Seeded, Source};

/// What may be admitted in a closed span of `length` microseconds more than its first, as numerator
/// and denominator.
fn most_within(limit: &Limit, length: u64) -> Option<(u128, u128)> {
    let (length, capacity) = (u128::from(length), u128::from(limit.capacity()));
    let period = u128::from(limit.algorithm().period_us());
    match limit.algorithm() {
        Algorithm::Bucket(bucket) => {
            // On a coarse grid a span that begins within a tick holds one more.
            let grid = u128::from(limit.grid_us());
            Some((
                capacity * period + u128::from(bucket.amount) * length.div_ceil(grid) * grid,
                period,
            ))
        }
        _ if length >= period => None,
        Algorithm::Estimate(estimate) => {
            let length = length + u128::from(estimate.grid) - 1;
            Some((capacity * (period + length), period))
        }
        Algorithm::Sliding(sliding) if !sliding.lenient => Some((capacity, 1)),
        Algorithm::Log(_) => Some((capacity, 1)),
        _ => Some((u128::from(limit.worst_case()), 1)),
    }
}

#[test]
fn no_span_admits_more_than_its_bound() {
    for seed in 0..8_000 {
        let source = &mut Seeded::new(seed);
        let limit = draw::limit(source);
        let mut record = Record::default();
        let mut admitted: Vec<(u64, u64)> = Vec::new();
        let (mut now, mut last) = (draw::dawn(source), Verdict::default());
        for _ in 0..40 {
            now = draw::later(source, &limit, &last, now);
            let op = source.pick(&[Op::Check, Op::Check, Op::Take]);
            last = ask(op, &limit, &mut record, now, draw::cost(source, &limit, &last));
            if last.granted > 0 {
                admitted.push((now, last.granted));
            }
        }
        for (first, (from, _)) in admitted.iter().enumerate() {
            let mut sum = 0;
            for (to, cost) in &admitted[first..] {
                sum += u128::from(*cost);
                if let Some((most, share)) = most_within(&limit, to - from) {
                    assert!(
                        sum * share <= most,
                        "{limit} seed {seed}: {sum} from {from} to {to} of {admitted:?}"
                    );
                }
                if to - from < limit.algorithm().period_us()
                    && !matches!(limit.algorithm(), Algorithm::Concurrent(_))
                {
                    let worst = u128::from(limit.worst_case());
                    assert!(
                        sum <= worst,
                        "{limit} seed {seed}: {sum} > {worst} from {from} to {to} of {admitted:?}"
                    );
                }
            }
        }
    }
}

/// Every way to spend small limits, one microsecond after another: the worst that happens is what
/// `worst_case` says.
#[test]
fn the_worst_case_is_reached_and_no_worse_happens() {
    let mut limits = Vec::new();
    for amount in 1..=2 {
        for period in (1..=4).map(Period::micros) {
            for burst in 1..=3 {
                limits.push(Limit::bucket(amount, period).burst(burst).build().unwrap());
            }
            limits.push(Limit::window(amount, period).build().unwrap());
            limits.push(Limit::window(amount, period).from_first_hit().build().unwrap());
            limits.push(Limit::estimate(amount, period).build().unwrap());
            limits.push(Limit::log(amount, period).build().unwrap());
            for step in (1..=period.as_micros()).map(Period::micros) {
                limits.push(Limit::sliding(amount, period).step(step).build().unwrap());
                limits.push(Limit::sliding(amount, period).step(step).lenient().build().unwrap());
            }
        }
    }
    for limit in limits {
        let end = 12 + 2 * limit.algorithm().period_us() + limit.capacity();
        let worst = spend(&limit, &Record::default(), 12, end, &mut Vec::new());
        assert_eq!(worst, limit.worst_case(), "{limit}");
    }
}

/// The most within one period, over all ways to spend from `now` to `end`.
fn spend(
    limit: &Limit,
    record: &Record,
    now: u64,
    end: u64,
    admitted: &mut Vec<(u64, u64)>,
) -> u64 {
    let period = limit.algorithm().period_us();
    let mut worst: u64 =
        admitted.iter().filter(|(at, _)| now - 1 - at < period).map(|(_, cost)| cost).sum();
    if now == end {
        return worst;
    }
    for cost in 0..=limit.capacity() {
        let mut record = record.clone();
        if !check(limit, &mut record, now, cost).allowed {
            break;
        }
        admitted.push((now, cost));
        worst = worst.max(spend(limit, &record, now + 1, end, admitted));
        admitted.pop();
    }
    worst
}

/// Numbers too large to try all: full bursts, as close together as they are admitted.
#[test]
fn the_worst_case_of_real_limits_is_reached() {
    // limit, moments of the bursts before the span, and of those in it
    for (text, moments, expected) in [
        ("10/s", &[0, 100_000, 999_999][..], 19),
        ("30/m burst 15", &[0, 20_000_000, 40_000_000, 59_999_999], 44),
        ("10/s window", &[999_999, 1_000_000], 20),
        ("10/s window from first hit", &[1_000_000], 19),
        ("240/h sliding step 1m", &[0, 59_999_999], 240),
        ("240/h sliding step 1m lenient", &[59_999_999, 3_600_000_000], 480),
        ("1000/day estimate", &[86_399_999_999, 172_799_999_998], 1999),
        ("5/20s log", &[0], 5),
    ] {
        let limit: Limit = text.parse().unwrap();
        assert_eq!(limit.worst_case(), expected, "{text}");
        let mut record = Record::default();
        let base = 604_800_000_000 * 2_800; // the start of a week, and so of a day, an hour and a minute
        let mut sum = 0;
        if text.ends_with("first hit") {
            // One unit starts the window just before the span; the rest of it comes last, and then
            // the next window.
            assert!(check(&limit, &mut record, base, 1).allowed);
            sum += ask(Op::Take, &limit, &mut record, base + 999_999, 10).granted;
        }
        for at in moments {
            sum += ask(Op::Take, &limit, &mut record, base + at, limit.capacity()).granted;
        }
        assert_eq!(sum, expected, "{text}");
    }
}
