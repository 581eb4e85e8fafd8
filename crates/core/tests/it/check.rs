//! The fast path is the same rule: `admit` and `report` equal `decide` with `Op::Check`, field by
//! field and state by state.

use tidegate_core::algorithm::Kernel;
use tidegate_core::{
    Algorithm, Charge, Limit, Op, Record, State, Timestamp, Verdict, admit, decide, report,
};

use crate::draw::{self, Kind, Seeded, Source};

fn check<K: Kernel<State: Copy>>(
    limit: &Limit,
    kernel: &K,
    kept: &mut K::State,
    at: Timestamp,
    cost: u64,
) -> Verdict {
    let admitted = admit(limit, kernel, kept, at, cost);
    report(limit, kernel, admitted, cost)
}

#[test]
fn the_fast_check_is_the_same_rule() {
    for seed in 0..9_000 {
        let source = &mut Seeded::new(seed);
        let kind = source.pick(&[Kind::Bucket, Kind::Window, Kind::Estimate]);
        let limit = draw::limit_of(source, kind);
        let mut record = Record::default();
        let (mut level, mut count, mut pair) = Default::default();
        let (mut now, mut last) = (draw::dawn(source), Verdict::default());
        for step in 0..40 {
            now = draw::any_time(source, &limit, &last, now);
            let cost = draw::cost(source, &limit, &last);
            let at = Timestamp::from_micros(now);
            let (fast, state) = match limit.algorithm() {
                Algorithm::Bucket(kernel) => {
                    let verdict = check(&limit, kernel, &mut level, at, cost);
                    (verdict, State::Bucket { rate: kernel.rate, level })
                }
                Algorithm::Window(kernel) => {
                    let verdict = check(&limit, kernel, &mut count, at, cost);
                    let (period, from_first_hit) = (kernel.period, kernel.from_first_hit);
                    (verdict, State::Window { period, from_first_hit, count })
                }
                Algorithm::Estimate(kernel) => {
                    let verdict = check(&limit, kernel, &mut pair, at, cost);
                    (verdict, State::Estimate { period: kernel.period, pair })
                }
                other => unreachable!("{other:?} is not small"),
            };
            let decision = decide(Op::Check, &mut [Charge::new(&limit, &mut record, cost)], at);
            assert_eq!(
                &fast,
                decision.binding(),
                "{limit} seed {seed} step {step}: {cost} at {now}"
            );
            assert_eq!(decision.allowed(), fast.allowed);
            if record.state == State::Idle {
                assert!(!fast.allowed || cost == 0, "{limit}: nothing was ever taken");
            } else {
                assert_eq!(record.state, state, "{limit} seed {seed} step {step}: {cost} at {now}");
            }
            last = fast;
        }
    }
}
