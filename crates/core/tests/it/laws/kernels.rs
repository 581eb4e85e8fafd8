//! What a store may ask an algorithm itself, without an operation: the same as what the limit and
//! the record say.

use tidegate_core::algorithm::Kernel;
use tidegate_core::{Algorithm, Id, Op, Record, State, Verdict};

use super::{ask, ts};
use crate::draw::{self, KINDS, Seeded};

/// Calls a function with the kernel of an algorithm and the state that it works on.
macro_rules! with_kernel {
    ($algorithm:expr, $state:expr, $call:expr) => {
        match ($algorithm, $state) {
            (Algorithm::Bucket(kernel), State::Bucket { level, .. }) => $call(kernel, level),
            (Algorithm::Window(kernel), State::Window { count, .. }) => $call(kernel, count),
            (Algorithm::Sliding(kernel), State::Sliding { steps, .. }) => $call(kernel, steps),
            (Algorithm::Estimate(kernel), State::Estimate { pair, .. }) => $call(kernel, pair),
            (Algorithm::Log(kernel), State::Log { entries, .. }) => $call(kernel, entries),
            (Algorithm::Concurrent(kernel), State::Concurrent { leases }) => $call(kernel, leases),
            (algorithm, state) => panic!("{state:?} is not a state of {algorithm:?}"),
        }
    };
}

fn facts<K: Kernel>(kernel: &K, state: &K::State) -> (u64, u64) {
    (kernel.capacity(), kernel.idle_at(state).as_micros())
}

#[test]
fn a_kernel_has_the_capacity_of_its_limit_and_the_end_of_its_record() {
    for (seed, kind) in (0..3_000).zip(KINDS.into_iter().cycle()) {
        let source = &mut Seeded::new(seed);
        let limit = draw::limit_of(source, kind);
        let (mut record, mut now, mut last) =
            (Record::default(), draw::dawn(source), Verdict::default());
        for _ in 0..6 {
            now = draw::later(source, &limit, &last, now);
            last =
                ask(draw::op(source), &limit, &mut record, now, draw::cost(source, &limit, &last));
            if record.state == State::Idle {
                continue;
            }
            let (capacity, idle_at) = with_kernel!(limit.algorithm(), &record.state, facts);
            assert_eq!(
                (capacity, idle_at),
                (limit.capacity(), record.idle_at().as_micros()),
                "{limit}: {record:?}"
            );
        }
    }
}

/// Charges as much as a number can say, and a little more, and takes all of it back.
fn charged_beyond<K: Kernel>(kernel: &K, _: &K::State) -> u64 {
    let mut state = K::State::default();
    let now = kernel.age(&mut state, ts(1_700_000_000_000_000));
    kernel.charge(&mut state, now, u64::MAX, Id::NONE);
    kernel.charge(&mut state, now, 5, Id::NONE);
    kernel.give_back(&mut state, now, u64::MAX, None)
}

/// Doubles of a script are exact up to there.
#[test]
fn no_charge_counts_beyond_2_to_the_53() {
    const MOST: u64 = (1 << 53) - 1;
    for (seed, kind) in (0..600).zip(KINDS.into_iter().cycle()) {
        let limit = draw::limit_of(&mut Seeded::new(seed), kind);
        let mut record = Record::default();
        assert!(ask(Op::Check, &limit, &mut record, 1_700_000_000_000_000, 1).allowed, "{limit}");
        let back = with_kernel!(limit.algorithm(), &record.state, charged_beyond);
        let Algorithm::Bucket(bucket) = limit.algorithm() else {
            assert_eq!(back, MOST, "{limit}");
            continue;
        };
        assert_eq!(back, MOST.div_ceil(bucket.rate.q), "{limit}: in tokens");
        let mut level = Default::default();
        bucket.charge(&mut level, ts(0), u64::MAX, Id::NONE);
        assert_eq!(level.units, MOST, "{limit}");
    }
}
