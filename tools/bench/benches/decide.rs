//! `cargo bench`: what one decision costs, algorithm by algorithm, in the core and through the
//! memory store.

use divan::{Bencher, black_box};
use tidegate::core::{Charge, Record, decide};
use tidegate::{Check, Limit, ManualClock, Memory, Op, Timestamp};

const LIMITS: &[&str] = &[
    "1000000/h",
    "1000000/h window",
    "1000000/h window from first hit",
    "1000000/h sliding step 1m",
    "1000000/h estimate",
    "100000/h log",
    "100000 concurrent ttl 1s",
];

fn main() {
    divan::main();
}

/// The core alone: a record at hand, one charge, time that moves on.
#[divan::bench(args = LIMITS)]
fn core(bencher: Bencher<'_, '_>, text: &str) {
    let limit: Limit = text.parse().expect("a limit");
    let (mut record, mut now) = (Record::default(), 1_700_000_000_000_000);
    bencher.bench_local(|| {
        now += 50_000;
        decide(Op::Check, &mut [Charge::new(&limit, &mut record, 1)], Timestamp::from_micros(now))
            .allowed()
    });
}

/// Through the memory store, one key.
#[divan::bench(args = LIMITS)]
fn memory(bencher: Bencher<'_, '_>, text: &str) {
    let limit: Limit = text.parse().expect("a limit");
    let clock = ManualClock::new();
    let memory = Memory::builder().clock(clock.clone()).build();
    bencher.bench_local(|| {
        clock.advance(std::time::Duration::from_millis(50));
        memory.check(black_box("user:7"), &limit, 1).allowed
    });
}

/// Three limits on one key and one on another, all or nothing.
#[divan::bench]
fn memory_four_charges(bencher: Bencher<'_, '_>) {
    let limits: tidegate::Limits =
        "1000000/s; 1000000/m; 1000000/h window".parse().expect("limits");
    let global: Limit = "10000000/s".parse().expect("a limit");
    let memory = Memory::new();
    bencher.bench_local(|| {
        memory
            .decide(&Check::new().charge("user:7", &limits, 1).charge("everyone", [&global], 1))
            .is_ok_and(|decision| decision.allowed())
    });
}
