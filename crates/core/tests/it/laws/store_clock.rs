//! I-CS: the clock of a store steps back. Usage is kept and drains from the new time on; nothing is
//! minted in real time, and nothing is denied for longer than the step, or than the limit takes to
//! drain.

use tidegate_core::{
    Algorithm, CLOCK_TOLERANCE_US, Charge, Id, Limit, Op, Record, Retry, State, Timestamp, Verdict,
    decide_on_store_clock,
};

use super::{peek, ts};
use crate::draw::{self, KINDS, Seeded, Source};

/// One call at this reading of the store's clock: the verdict, and whether the record was rebased.
fn ask(op: Op, limit: &Limit, record: &mut Record, at: u64, cost: u64) -> (Verdict, bool) {
    ask_with(op, limit, record, at, cost, None)
}

fn ask_with(
    op: Op,
    limit: &Limit,
    record: &mut Record,
    at: u64,
    cost: u64,
    id: Option<Id>,
) -> (Verdict, bool) {
    let mut charge = [Charge { id, ..Charge::new(limit, record, cost) }];
    let (decision, rebased) = decide_on_store_clock(op, &mut charge, ts(at));
    (*decision.binding(), rebased > 0)
}

fn limit(text: &str) -> Limit {
    text.parse().unwrap()
}

/// How far back a clock steps: around what is waited for, around the period, and far.
fn step(source: &mut impl Source, limit: &Limit) -> u64 {
    let period = limit.algorithm().period_us();
    let near = source.below(3);
    let step = match source.below(6) {
        0 => CLOCK_TOLERANCE_US - 1 + near,
        1 => period + near,
        2 => source.below(3 * period),
        3 => source.below(3_600_000_000),
        4 => source.below(10_000_000),
        _ => 86_400_000_000,
    };
    step.min(1 << 45)
}

/// What passed: when by real time, how much, and how many steps of the clock had been by then.
type Passed = Vec<(u64, u64, u64)>;

/// The most that any span of real time may contain, from one admission to a later one.
fn assert_nothing_is_minted(limit: &Limit, passed: &Passed) {
    let (amount, capacity) = (u128::from(limit.algorithm().amount()), u128::from(limit.capacity()));
    let period = u128::from(limit.algorithm().period_us());
    for (first, &(from, _, steps_before)) in passed.iter().enumerate() {
        let mut sum = 0;
        for &(to, cost, steps) in &passed[first..] {
            sum += u128::from(cost);
            let span = u128::from(to - from);
            let steps = u128::from(steps - steps_before);
            let grid = u128::from(limit.grid_us());
            let within_a_period = span < period;
            let most = match limit.algorithm() {
                // Only whole ticks drain; the first may have begun before.
                Algorithm::Bucket(_) => capacity + (span + grid - 1) * amount / period,
                Algorithm::Estimate(_) => capacity + (span + grid - 1) * amount / period,
                Algorithm::Log(_) | Algorithm::Concurrent(_) if within_a_period => amount,
                Algorithm::Sliding(sliding) if within_a_period && !sliding.lenient => amount,
                Algorithm::Window(window) if within_a_period && window.from_first_hit => 2 * amount,
                // Each step moves the edges that the clock has, so one more may lie in the span.
                Algorithm::Window(_) | Algorithm::Sliding(_) if within_a_period => {
                    (2 + steps) * amount
                }
                _ => continue,
            };
            assert!(
                sum <= most,
                "{limit}: {sum} of {most} in {span} us with {steps} steps: {passed:?}"
            );
        }
    }
}

#[test]
fn steps_back_of_the_stores_clock_mint_nothing() {
    let mut rebased_of_kind = [0; KINDS.len()];
    for (at, kind) in KINDS.into_iter().enumerate() {
        for seed in 0..3_000 {
            let source = &mut Seeded::new(seed << 8 | at as u64);
            let limit = draw::limit_of(source, kind);
            if limit.counts_rejected() {
                continue;
            }
            let (mut real, mut behind, mut steps) = (1_700_000_000_000_000, 0_u64, 0);
            let (mut record, mut passed, mut last) =
                (Record::default(), Passed::new(), Verdict::default());
            for _ in 0..40 {
                if source.once_in(6) {
                    behind += step(source, &limit);
                    steps += 1;
                }
                real = draw::later(source, &limit, &last, real).min(real + (1 << 46));
                let cost = draw::cost(source, &limit, &last);
                let reading = real.saturating_sub(behind);
                let (verdict, rebased) = ask(Op::Check, &limit, &mut record, reading, cost);
                rebased_of_kind[at] += u64::from(rebased);
                if verdict.allowed && cost > 0 {
                    passed.push((real, cost, steps));
                }
                last = verdict;
            }
            assert_nothing_is_minted(&limit, &passed);
        }
    }
    assert!(rebased_of_kind.iter().all(|rebased| *rebased > 1_000), "{rebased_of_kind:?}");
}

/// A record in which something is in use, and the reading of the clock at which something was last
/// taken.
fn used(source: &mut impl Source, limit: &Limit) -> (Record, u64) {
    let mut now = 1_700_000_000_000_000;
    let (mut record, mut last) = (Record::default(), Verdict::default());
    for _ in 0..12 {
        now = draw::later(source, limit, &last, now).min(now + (1 << 46));
        last = ask(draw::op(source), limit, &mut record, now, draw::cost(source, limit, &last)).0;
    }
    (record, now)
}

/// Once the clock has caught up, nothing is stricter than if it had never stepped: so nothing is
/// denied for longer than the step. Until then nothing is in use for longer than the limit takes to
/// drain.
#[test]
fn a_step_back_denies_no_longer_than_the_step_or_the_time_to_drain() {
    let mut rebased = 0;
    for seed in 0..40_000 {
        let source = &mut Seeded::new(seed);
        let limit = draw::limit(source);
        let (before, then) = used(source, &limit);
        let now = then.saturating_sub(step(source, &limit));
        if !before.is_ahead_of(Some(limit.algorithm()), ts(now)) {
            continue;
        }
        rebased += 1;
        let mut after = before.clone();
        after.rebase(ts(now));
        assert!(!after.is_ahead_of(Some(limit.algorithm()), ts(now)), "{limit}: {after:?}");
        // The time of the state is not earlier than the one of the call, so this is when it was
        // last decided.
        let caught_up = then + source.below(limit.algorithm().period_us().min(1 << 45));
        let (waited, moved) =
            (peek(&limit, &before, caught_up, 1), peek(&limit, &after, caught_up, 1));
        assert!(moved.remaining >= waited.remaining, "{limit}: {before:?} {after:?}");
        // Usage is kept. An estimate that waits for the clock counts all of its previous window; in
        // fact a part of that is over.
        let (was, is) = (peek(&limit, &before, now, 1), peek(&limit, &after, now, 1));
        if !matches!(limit.algorithm(), Algorithm::Estimate(_)) {
            assert_eq!(is.remaining, was.remaining, "{limit}: {before:?} {after:?}");
        }
        let period = limit.algorithm().period_us();
        let longest = match limit.algorithm() {
            Algorithm::Bucket(_) => continue, // the same level drains at the same rate
            Algorithm::Window(_) | Algorithm::Log(_) | Algorithm::Concurrent(_) => period,
            Algorithm::Sliding(sliding) => period + sliding.step,
            _ => 2 * period,
        };
        assert!(is.reset_after_us <= longest, "{limit}: {after:?}");
    }
    assert!(rebased > 5_000, "{rebased}");
}

/// The wait after a rebase is tight, and counts from the new time: also after further denials.
#[test]
fn waits_after_a_step_back_are_tight() {
    let mut denied = 0;
    for seed in 0..40_000 {
        let source = &mut Seeded::new(seed);
        let limit = draw::limit(source);
        let (mut record, then) = used(source, &limit);
        let now = then.saturating_sub(step(source, &limit));
        let cost = 1 + source.below(limit.capacity());
        let (verdict, rebased) = ask(Op::Check, &limit, &mut record, now, cost);
        let Retry::After(wait) = verdict.retry else { continue };
        if !rebased || limit.counts_rejected() || now + wait > Timestamp::MAX.as_micros() {
            continue;
        }
        denied += 1;
        let at = |at: u64| ask(Op::Peek, &limit, &mut record.clone(), at, cost).0.allowed;
        assert!(at(now + wait) && !at(now + wait - 1), "{limit}: {record:?}");
    }
    assert!(denied > 500, "{denied}");
}

/// A peek reports what the next call sees, and neither it nor a call of nothing writes.
#[test]
fn a_peek_at_a_state_from_the_future_changes_nothing() {
    for seed in 0..10_000 {
        let source = &mut Seeded::new(seed);
        let limit = draw::limit(source);
        let (mut record, then) = used(source, &limit);
        let now = then.saturating_sub(step(source, &limit));
        let before = record.clone();
        let cost = draw::cost(source, &limit, &Verdict::default());
        let (seen, rebased) = ask(Op::Peek, &limit, &mut record, now, cost);
        assert_eq!((&record, rebased), (&before, false));
        for op in [Op::Check, Op::Take, Op::Debit, Op::Book { max_wait_us: 1 << 40 }] {
            assert!(!ask(op, &limit, &mut record, now, 0).1);
            assert_eq!(record, before, "{limit}: {op:?} of nothing");
        }
        let (done, _) = ask(Op::Check, &limit, &mut record, now, cost);
        assert_eq!((seen.allowed, seen.amount), (done.allowed, done.amount), "{limit}");
        if !done.allowed && !limit.counts_rejected() {
            assert_eq!(seen, Verdict { granted: seen.granted, ..done }, "{limit}");
        }
    }
}

/// An hour back: what each algorithm says, by hand.
#[test]
fn each_algorithm_keeps_its_usage_an_hour_back() {
    const HOUR: u64 = 3_600_000_000;
    const NOW: u64 = 1_700_000_000_000_000 - 1_700_000_000_000_000 % HOUR; // where a window begins
    for (text, retry_ms) in [
        ("10/s burst 5", 100),
        ("5/20s window", 20_000),
        ("5/20s window from first hit", 20_000),
        ("5/20s sliding step 2s", 22_000),
        ("5/20s estimate", 24_000),
        ("5/20s log", 20_000),
        ("5 concurrent ttl 20s", 20_000),
    ] {
        let (limit, mut record) = (limit(text), Record::default());
        for taken in 0..5 {
            assert!(ask(Op::Check, &limit, &mut record, NOW + HOUR + taken, 1).0.allowed, "{text}");
        }
        let (verdict, rebased) = ask(Op::Check, &limit, &mut record, NOW, 1);
        let wait = verdict.retry.micros().unwrap().div_ceil(1_000);
        assert_eq!((verdict.allowed, rebased, wait), (false, true, retry_ms), "{text}");
        assert!(!ask(Op::Check, &limit, &mut record, NOW + 1, 1).1, "{text}: once is enough");
        assert!(ask(Op::Check, &limit, &mut record, NOW + retry_ms * 1_000, 1).0.allowed, "{text}");
    }
}

/// What can be given back by an id is the same before and after, and a charge that is over stays
/// over.
#[test]
fn refunds_by_id_survive_a_step_back() {
    const HOUR: u64 = 3_600_000_000;
    const NOW: u64 = 1_700_000_000_000_000;
    for text in [
        "1/min burst 9",
        "9/min window",
        "9/min window from first hit",
        "9/min sliding",
        "9/min estimate",
        "9/min log",
    ] {
        let (limit, mut record) = (limit(text), Record::default());
        let ask =
            |op, record: &mut Record, at, cost, id| ask_with(op, &limit, record, at, cost, id);
        assert!(ask(Op::Check, &mut record, NOW + HOUR, 4, Some(Id(1))).0.allowed, "{text}");
        assert!(ask(Op::Check, &mut record, NOW + HOUR, 5, None).0.allowed, "{text}");
        let (refunded, rebased) = ask(Op::Refund, &mut record, NOW, 4, Some(Id(1)));
        assert_eq!((refunded.granted, refunded.remaining, rebased), (4, 4, true), "{text}");
        assert_eq!(ask(Op::Refund, &mut record, NOW, 4, Some(Id(1))).0.granted, 0, "{text}: once");
    }
    // A minute before the newest charge one token drained: of the four that were charged then,
    // three are left.
    let (limit, mut record) = (limit("1/min burst 9"), Record::default());
    ask_with(Op::Check, &limit, &mut record, NOW + HOUR, 4, Some(Id(1)));
    ask(Op::Check, &limit, &mut record, NOW + HOUR + 60_000_000, 5);
    assert_eq!(ask_with(Op::Refund, &limit, &mut record, NOW, 4, Some(Id(1))).0.granted, 3);
}

/// A state in the scale of another limit is rebased in its own scale, and a denial does not convert
/// it.
#[test]
fn a_state_of_another_limit_is_rebased_in_its_own_scale() {
    const NOW: u64 = 1_700_000_000_000_000;
    let (log, bucket) = (limit("5/min log"), limit("5/min"));
    let mut record = Record::default();
    assert!(ask(Op::Check, &log, &mut record, NOW + 90_000_000, 5).0.allowed);
    let (verdict, rebased) = ask(Op::Check, &bucket, &mut record, NOW, 1);
    assert_eq!((verdict.allowed, verdict.retry, rebased), (false, Retry::After(12_000_000), true));
    assert!(record.state.fits(log.algorithm()), "{record:?}");
    assert_eq!(ask(Op::Peek, &log, &mut record, NOW, 5).0.retry, Retry::After(60_000_000));
}

/// A window knows when it started and when something was last taken in it. Its own limit needs the
/// first, any other limit the second.
#[test]
fn another_limit_counts_from_when_something_was_last_taken() {
    const NOW: u64 = 1_699_999_980_000_000; // where a minute begins
    let bucket = limit("5/min");
    for text in
        ["5/min window", "5/min window from first hit", "5/min sliding step 1m", "5/min estimate"]
    {
        let (own, mut record) = (limit(text), Record::default());
        assert!(ask(Op::Check, &own, &mut record, NOW, 1).0.allowed, "{text}");
        assert!(ask(Op::Check, &own, &mut record, NOW + 50_000_000, 4).0.allowed, "{text}");
        // The clock goes back by forty seconds, into the same window.
        let now = NOW + 10_000_000;
        assert!(!record.is_ahead_of(Some(own.algorithm()), ts(now)), "{text}");
        assert!(record.is_ahead_of(Some(bucket.algorithm()), ts(now)), "{text}");
        assert!(record.is_ahead_of(None, ts(now)), "{text}: any limit may be the next");
        assert!(!ask(Op::Check, &own, &mut record.clone(), now, 5).1, "{text}");
        let (verdict, rebased) = ask(Op::Check, &bucket, &mut record, now, 1);
        assert_eq!((verdict.retry, rebased), (Retry::After(12_000_000), true), "{text}");
        assert!(
            ask(Op::Check, &bucket, &mut record, now + 12_000_000, 1).0.allowed,
            "{text}: it drains from now on"
        );
    }
}

/// What was given back leaves times behind, but nothing that they are the times of.
#[test]
fn a_state_in_which_nothing_is_in_use_is_never_ahead() {
    let other = limit("1/s");
    for text in
        ["5/s", "5/s window", "5/s window from first hit", "5/s sliding", "5/s estimate", "5/s log"]
    {
        let (limit, mut record) = (limit(text), Record::default());
        assert!(ask(Op::Check, &limit, &mut record, 3_600_000_000, 5).0.allowed, "{text}");
        assert!(record.is_ahead_of(Some(limit.algorithm()), Timestamp::EPOCH), "{text}");
        assert_eq!(ask(Op::Refund, &limit, &mut record, 3_600_000_000, 5).0.granted, 5, "{text}");
        for algorithm in [Some(limit.algorithm()), Some(other.algorithm()), None] {
            for now in [0, 1, 3_000_000_000] {
                assert!(!record.is_ahead_of(algorithm, ts(now)), "{text}: at {now}");
            }
        }
    }
}

/// A level that a change of limits made too large to count is kept from a later moment on: that is
/// no step of the clock.
#[test]
fn a_level_that_counts_from_a_later_moment_is_not_ahead() {
    const NOW: u64 = 1_700_000_000_000_000;
    let (old, new) = (limit("1000000000/h"), limit("1/d"));
    let mut record = Record::default();
    assert!(ask(Op::Check, &old, &mut record, NOW, 1_000_000_000).0.allowed);
    assert_eq!(ask(Op::Refund, &new, &mut record, NOW, 1).0.granted, 1);
    assert!(record.state.fits(new.algorithm()), "{record:?}");
    let in_minutes =
        matches!(record.state, State::Bucket { level, .. } if level.at > ts(NOW + 60_000_000));
    assert!(in_minutes, "{record:?}");
    assert!(!record.is_ahead_of(Some(new.algorithm()), ts(NOW)), "{record:?}");
}

/// A clock that is not behind has nothing to move.
#[test]
fn rebasing_what_is_not_ahead_changes_nothing() {
    const NOW: u64 = 1_700_000_000_000_000;
    for text in [
        "5/min",
        "5/min window",
        "5/min window from first hit",
        "5/min sliding",
        "5/min estimate",
        "5/min log",
        "5 concurrent ttl 1m",
    ] {
        let (limit, mut record) = (limit(text), Record::default());
        assert!(ask_with(Op::Check, &limit, &mut record, NOW, 2, Some(Id(1))).0.allowed, "{text}");
        let before = record.clone();
        for now in [NOW, NOW + 1, NOW + 10_000_000] {
            record.rebase(ts(now));
            assert_eq!(record, before, "{text} at {now}");
        }
    }
}

#[test]
fn a_second_is_waited_for() {
    let (limit, mut record) = (limit("1/s"), Record::default());
    let at = |back: u64| Timestamp::from_secs(1_700_000_000).as_micros() - back;
    assert!(ask(Op::Check, &limit, &mut record, at(0), 1).0.allowed);
    let (verdict, rebased) = ask(Op::Check, &limit, &mut record, at(CLOCK_TOLERANCE_US), 1);
    assert_eq!(
        (verdict.retry, rebased),
        (Retry::After(1_000_000), false),
        "counted from the newest time"
    );
    let (verdict, rebased) = ask(Op::Check, &limit, &mut record, at(CLOCK_TOLERANCE_US + 1), 1);
    assert_eq!((verdict.retry, rebased), (Retry::After(1_000_000), true), "counted from now");
}
