//! I-CFG: a limit that changes keeps what was used. Nothing is minted, and what was used still
//! drains away.

use tidegate_core::{Limit, Op, Period, Record, State, Verdict};

use super::{ask, check, peek, ts};
use crate::draw::{self, Kind, Seeded, Source};

/// What was admitted, and when.
type Admitted = Vec<(u64, u64)>;

/// `A[s, t] <= max capacity + max rate * (t - s)` for all closed spans. What a coarse grid has not
/// counted yet, less than one of its ticks, a finer one may count in its place, once.
fn assert_no_minting(limits: &[Limit], admitted: &Admitted, history: &str) {
    let capacity = limits.iter().map(Limit::capacity).max().unwrap();
    let rate = |limit: &Limit| {
        (u128::from(limit.algorithm().amount()), u128::from(limit.algorithm().period_us()))
    };
    let faster = |a: (u128, u128), b: (u128, u128)| if a.0 * b.1 >= b.0 * a.1 { a } else { b };
    let (amount, period) = limits.iter().map(rate).reduce(faster).unwrap();
    let uncounted = limits.iter().map(Limit::grid_us).max().unwrap() - 1;
    for (first, (from, _)) in admitted.iter().enumerate() {
        let mut sum = 0;
        for (to, cost) in &admitted[first..] {
            sum += u128::from(*cost);
            let most = u128::from(capacity) * period + amount * u128::from(to - from + uncounted);
            assert!(sum * period <= most, "{history}: {sum} from {from} to {to} of {admitted:?}");
        }
    }
}

/// Limits take turns on one key at every call, with denied calls and looks between.
fn alternate(source: &mut impl Source, limits: &[Limit], length: usize) -> (Record, Admitted, u64) {
    let mut record = Record::default();
    let mut admitted = Admitted::new();
    let (mut now, mut last) = (draw::dawn(source), Verdict::default());
    for _ in 0..length {
        let limit = source.pick(limits);
        now = draw::later(source, &limit, &last, now);
        let op = source.pick(&[Op::Check, Op::Check, Op::Check, Op::Take, Op::Peek]);
        last = ask(op, &limit, &mut record, now, draw::cost(source, &limit, &last));
        if last.granted > 0 && op != Op::Peek {
            admitted.push((now, last.granted));
        }
    }
    (record, admitted, now)
}

#[test]
fn buckets_that_take_turns_mint_nothing() {
    for seed in 0..6_000 {
        let source = &mut Seeded::new(seed);
        let limits: Vec<Limit> =
            (0..2 + source.below(2)).map(|_| draw::limit_of(source, Kind::Bucket)).collect();
        let (_, admitted, _) = alternate(source, &limits, 40);
        assert_no_minting(&limits, &admitted, &format!("seed {seed}, {limits:?}"));
    }
}

/// On a coarse grid a bucket's clock starts before the first charge, but a finer limit does not
/// drain for that time.
#[test]
fn a_finer_limit_does_not_drain_before_the_charge() {
    let coarse: Limit = "999983/day burst 10000000000".parse().unwrap();
    let fine = Limit::bucket(1_000_000_000, Period::SECOND).burst(1_000).build().unwrap();
    assert_eq!((coarse.grid_us(), fine.grid_us()), (1_000_000, 1));
    let mut record = Record::default();
    let (start, mut admitted) = (1_700_000_000_999_000, Admitted::new());
    for turn in 0..100 {
        let now = start + turn;
        for (limit, cost) in [(&coarse, 900_000_000), (&fine, 1)] {
            if check(limit, &mut record, now, cost).allowed {
                admitted.push((now, cost));
            }
        }
    }
    assert_no_minting(&[coarse, fine], &admitted, "coarse and fine");
}

/// What was used may drain by the old limit or by the new one, whichever is faster, but not by
/// both.
#[test]
fn a_change_of_algorithm_does_not_drain_twice() {
    for seed in 0..30_000 {
        let source = &mut Seeded::new(seed);
        let (old, new) = (draw::limit(source), draw::limit(source));
        let cost = 1 + source.below(old.capacity().min(new.capacity()));
        let start = draw::dawn(source);
        let (mut kept, mut direct) = (Record::default(), Record::default());
        let last = check(&old, &mut kept, start, cost);
        assert!(last.allowed && check(&new, &mut direct, start, cost).allowed);
        let now = draw::later(source, &old, &last, start);
        let used = |limit: &Limit, record: &Record| {
            limit.capacity() - peek(limit, record, now, 1).remaining
        };
        let (by_old, by_new) = (used(&old, &kept).min(new.capacity()), used(&new, &direct));
        let carried = used(&new, &kept);
        let history = format!("seed {seed}: {old} to {new}, {cost} at {start}, now {now}");
        assert!(
            carried >= by_old.min(by_new),
            "{history}: used {by_old} or {by_new}, carried {carried}"
        );
        // How much of a coarse tick has passed is unknown.
        let most = if old.grid_us().max(new.grid_us()) > 1 {
            cost.min(new.capacity())
        } else {
            by_old.max(by_new)
        };
        assert!(carried <= most, "{history}: used {by_old} or {by_new}, carried {carried}");
    }
}

#[test]
fn limits_of_any_algorithms_that_take_turns_keep_a_bound() {
    for seed in 0..6_000 {
        let source = &mut Seeded::new(seed);
        let limits = [draw::limit(source), draw::limit(source)];
        let (record, admitted, now) = alternate(source, &limits, 40);
        let span = limits.iter().map(|limit| limit.algorithm().period_us()).min().unwrap();
        // One edge of the shorter period forgets what the other limit admitted, so each can admit
        // both sides of it.
        let most: u64 = 2 * limits.iter().map(Limit::worst_case).sum::<u64>();
        for (first, (from, _)) in admitted.iter().enumerate() {
            let within = admitted[first..].iter().take_while(|(at, _)| at - from < span);
            let sum: u64 = within.map(|(_, cost)| cost).sum();
            assert!(
                sum <= most,
                "seed {seed}, {limits:?}: {sum} > {most} within {span} from {from} of {admitted:?}"
            );
        }
        // Looks and denials do not keep it from draining: when its own limit says so, it is gone.
        let end = record.idle_at().as_micros().max(now);
        if end < (1 << 52) - 1 {
            for limit in &limits {
                assert_eq!(peek(limit, &record, end, 1).remaining, limit.capacity(), "seed {seed}");
            }
        }
    }
}

/// Rounding up at every turn costs less than one unit in a million turns.
#[test]
fn buckets_that_take_turns_keep_their_rate() {
    for (a, b) in [
        ("10/s", "10/s burst 7"),
        ("7/m burst 3", "7/m burst 1000000"),
        ("999983/day burst 10000000000", "12/s"),
    ] {
        let limits: [Limit; 2] = [a.parse().unwrap(), b.parse().unwrap()];
        let slowest = limits
            .iter()
            .map(|limit| limit.algorithm().period_us() / limit.algorithm().amount())
            .max()
            .unwrap();
        let mut record = Record::default();
        let start = 1_700_000_000_000_000;
        // What a coarse tick has not counted yet is still in use.
        let tick = limits.iter().map(Limit::grid_us).max().unwrap() - 1;
        let uncounted = tick.div_ceil(slowest);
        let drained = |record: &Record, at| {
            limits.iter().all(|l| peek(l, record, at, 1).remaining + 2 + uncounted >= l.capacity())
        };
        for turn in 0..20_000 {
            let now = start + turn * (slowest + 1);
            assert!(
                check(&limits[turn as usize % 2], &mut record, now, 1).allowed,
                "{a} and {b}, turn {turn}"
            );
            assert!(drained(&record, now), "{a} and {b}, turn {turn}: {record:?}");
        }
    }
}

/// A level is carried over rounded up, by less than one unit of the new scale.
#[test]
fn a_level_is_carried_over_exactly_or_a_trifle_more() {
    let level = |record: &Record| match record.state {
        State::Bucket { rate, level } => {
            (u128::from(level.units), u128::from(rate.q), level.at.as_micros())
        }
        _ => (0, 1, 0),
    };
    let mut carried = 0;
    for seed in 0..6_000 {
        let source = &mut Seeded::new(seed);
        let (old, new) =
            (draw::limit_of(source, Kind::Bucket), draw::limit_of(source, Kind::Bucket));
        let (mut record, mut now) = (Record::default(), draw::dawn(source));
        let mut last = Verdict::default();
        for _ in 0..4 {
            now = draw::later(source, &old, &last, now);
            last = check(&old, &mut record, now, 1);
        }
        // At the moment of the level itself nothing drains.
        let (units, scale, at) = level(&record);
        if check(&new, &mut record, at, 1).allowed {
            let (after, new_scale, _) = level(&record);
            let (got, exact) = ((after - new_scale) * scale, units * new_scale);
            assert!(exact <= got && got < exact + scale, "seed {seed}: {old} to {new}");
            carried += 1;
        }
    }
    assert!(carried > 1_000, "{carried} of them fit");
}

/// 2^13 tokens of 2^40 units each are 2^53 units, one more than there is a number for: they count
/// from the first moment at which they are fewer.
#[test]
fn a_level_of_2_to_the_53_counts_from_the_next_tick() {
    let old = Limit::bucket(1, Period::micros(1)).burst(1 << 13).build().unwrap();
    let new = Limit::bucket(1, Period::micros(1 << 40)).build().unwrap();
    let (mut record, now) = (Record::default(), 1_700_000_000_000_000);
    assert!(check(&old, &mut record, now, 1 << 13).allowed);
    assert_eq!(ask(Op::Refund, &new, &mut record, now, 1).granted, 1);
    let State::Bucket { rate, level } = record.state else { panic!("{record:?}") };
    assert_eq!((rate.q, level.at), (1 << 40, ts(now + 1)));
    assert_eq!(level.units, (1 << 53) - 1 - (1 << 40));
}

/// On the same grid nothing is unknown about the moment of a level.
#[test]
fn a_limit_on_the_same_coarse_grid_drains_from_the_same_tick() {
    let (old, new): (Limit, Limit) = (
        "999983/day burst 10000000000".parse().unwrap(),
        "999979/day burst 10000000000".parse().unwrap(),
    );
    assert_eq!((old.grid_us(), new.grid_us()), (1_000_000, 1_000_000));
    let (mut record, tick) = (Record::default(), 1_700_000_000_000_000);
    assert!(check(&old, &mut record, tick + 900_000, 5).allowed);
    assert!(check(&new, &mut record, tick + 900_000, 5).allowed);
    let State::Bucket { level, .. } = record.state else { panic!("{record:?}") };
    assert_eq!(level.at, ts(tick));
}

/// A token has a million units at least, where the exact domain allows it: rounding up to one unit
/// costs less than a millionth of a token.
#[test]
fn a_change_of_rate_costs_less_than_a_millionth_of_a_token() {
    for (old, new) in [("7/s", "10/s"), ("1000/s", "999/s"), ("3/ms", "10/s"), ("7/us", "1000/ms")]
    {
        let (old, new): (Limit, Limit) = (old.parse().unwrap(), new.parse().unwrap());
        for later in 0..50 {
            let (mut record, start) = (Record::default(), 1_700_000_000_000_000);
            assert!(check(&old, &mut record, start, 1).allowed);
            assert!(check(&old, &mut record, start + later, 1).allowed);
            let State::Bucket { rate: from, level: before } = record.state else {
                panic!("{record:?}")
            };
            assert!(check(&new, &mut record, start + later, 1).allowed);
            let State::Bucket { rate: to, level: after } = record.state else {
                panic!("{record:?}")
            };
            let wide = u128::from;
            let added = wide(after.units - to.q) * wide(from.q) - wide(before.units) * wide(to.q);
            assert!(
                added * 1_000_000 < wide(from.q) * wide(to.q),
                "{old} to {new}: {before:?} became {after:?}"
            );
        }
    }
}
