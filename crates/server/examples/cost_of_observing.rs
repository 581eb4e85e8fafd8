//! What it costs that decisions are counted, timed and listed: the same decision with and without
//! the engine around it.
//!
//! `cargo run --release -p tidegate-server --example cost_of_observing`

#![allow(clippy::print_stdout, reason = "it is for people")]

use std::future::Future;
use std::hint::black_box;
use std::pin::pin;
use std::task::{Context, Waker};
use std::time::{Duration, Instant};

use tidegate::{Check, Limit, Memory};
use tidegate_server::backend::Backend;
use tidegate_server::engine::Engine;
use tidegate_server::protocol::Protocol;
use tidegate_server::rules::Rules;

const ROUNDS: u32 = 200_000;
const REPEATS: u32 = 25;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    for (name, limit) in [("allowed", "1000000/s burst 1000000"), ("denied", "1/day")] {
        let limit: Limit = limit.parse()?;
        let memory = Memory::new();
        let engine = Engine::new(Backend::Memory(memory.clone()), Rules::default())
            .for_protocol(Protocol::Resp);
        let keys: Vec<String> = (0..1000).map(|number| format!("user:{number}")).collect();
        let check = |at: u32| Check::new().charge(&keys[at as usize % keys.len()], [&limit], 1);
        let bare = fastest(|at| _ = black_box(memory.decide(&check(at))));
        // The memory store never waits, so that one poll is enough.
        let mut context = Context::from_waker(Waker::noop());
        let seen = fastest(|at| {
            _ = black_box(pin!(engine.check(&check(at))).poll(&mut context).is_ready())
        });
        let ns = |took: Duration| took.as_nanos() as f64 / f64::from(ROUNDS);
        println!("{name}: {:.1} ns in the store, {:.1} ns through the engine", ns(bare), ns(seen));
    }
    Ok(())
}

/// The shortest of several runs, which was disturbed least.
fn fastest(mut decide: impl FnMut(u32)) -> Duration {
    let mut run = |_| {
        let begin = Instant::now();
        (0..ROUNDS).for_each(&mut decide);
        begin.elapsed()
    };
    (0..REPEATS).map(&mut run).min().unwrap_or_default()
}
