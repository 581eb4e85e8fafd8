//! Every algorithm against its naive model: every field of every verdict, at every step of random stories.

use proptest::prelude::*;
use tidegate_core::{Charge, Limit, Op, Record, Timestamp, Verdict, decide};

use crate::draw::{self, KINDS, Kind, Seeded, Source, Words};
use crate::naive::Naive;

/// Tells one story to both, and says where they differ.
fn tell(source: &mut impl Source, kind: Kind, length: usize) -> Result<(), String> {
    let limit = draw::limit_of(source, kind);
    let mut now = draw::dawn(source);
    let (mut record, mut naive) = (Record::default(), Naive::new(&limit));
    let mut last = Verdict::default();
    let mut story: Vec<(Op, u64, u64)> = Vec::new();
    for _ in 0..length {
        now = draw::any_time(source, &limit, &last, now);
        let (op, cost) = (draw::op(source), draw::cost(source, &limit, &last));
        story.push((op, now, cost));
        let before = format!("{record:?}");
        let got = ask(&limit, &mut record, op, now, cost);
        let expected = naive.decide(op, now, cost);
        if got != expected {
            let story = &story[story.len().saturating_sub(12)..];
            return Err(format!(
                "{limit}\nstory {story:?}\n from {before}\n  got {got:?}\n want {expected:?}\nmodel {naive:?}"
            ));
        }
        last = got;
    }
    Ok(())
}

fn ask(limit: &Limit, record: &mut Record, op: Op, now: u64, cost: u64) -> Verdict {
    let decision = decide(op, &mut [Charge::new(limit, record, cost)], Timestamp::from_micros(now));
    assert_eq!(decision.allowed(), decision.binding().allowed, "one charge decides alone");
    *decision.binding()
}

fn stories(kind: Kind, count: u64) {
    for seed in 0..count {
        if let Err(difference) = tell(&mut Seeded(seed << 8 | kind as u64), kind, 40) {
            panic!("{kind:?}, seed {seed}: {difference}");
        }
    }
}

#[test]
fn buckets_equal_their_model() {
    stories(Kind::Bucket, 6_000);
}

#[test]
fn windows_equal_their_model() {
    stories(Kind::Window, 4_000);
}

#[test]
fn sliding_windows_equal_their_model() {
    stories(Kind::Sliding, 4_000);
}

#[test]
fn estimates_equal_their_model() {
    stories(Kind::Estimate, 4_000);
}

#[test]
fn logs_equal_their_model() {
    stories(Kind::Log, 4_000);
}

#[test]
fn concurrency_equals_its_model() {
    stories(Kind::Concurrent, 4_000);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

    /// The same stories from words that can be shrunk to the shortest that differs.
    #[test]
    fn all_equal_their_models(kind in prop::sample::select(&KINDS), words in prop::collection::vec(any::<u64>(), 0..200)) {
        let told = tell(&mut Words::new(words), kind, 30);
        prop_assert!(told.is_ok(), "{}", told.unwrap_err());
    }
}
