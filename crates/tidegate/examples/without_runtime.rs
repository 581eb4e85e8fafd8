//! Without async: the memory store answers at once, one key at a time or many.
//!
//! `cargo run -p tidegate --example without_runtime`

#![allow(clippy::print_stdout, reason = "an example shows what it does")]

use tidegate::{Limit, ManualClock, Memory};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // `Memory::new()` would use the machine's clock; here time stands still, so that the output is
    // always the same.
    let memory = Memory::builder().clock(ManualClock::new()).build();
    let limit: Limit = "2/s".parse()?;

    // Yes or no: the fastest question.
    println!("may user:7 pass? {}", memory.allows("user:7", &limit, 1));

    // The same question with all the numbers.
    let verdict = memory.check("user:7", &limit, 1);
    println!("again? {}, {} left", verdict.allowed, verdict.remaining);
    let verdict = memory.check("user:7", &limit, 1);
    println!("and again? {}, everything is back in {:?}", verdict.allowed, verdict.reset_after());

    // Many at once, for example all that came in one network read: the clock is read once, and the
    // next keys are fetched while one is decided. Each stands for itself, in this order.
    let asks = [("user:8", 1), ("user:9", 3), ("user:8", 1), ("user:8", 1)];
    for ((key, cost), verdict) in asks.iter().zip(memory.check_many(&asks, &limit)) {
        println!(
            "{key} for {cost}: {} ({} left)",
            if verdict.allowed { "yes" } else { "no" },
            verdict.remaining
        );
    }

    // Threads share a store by cloning it; a gate is the store under one limit.
    let gate = memory.gate(&limit);
    let threads: Vec<_> = (0..4)
        .map(|_| {
            let gate = gate.clone();
            std::thread::spawn(move || (0..1_000).filter(|_| gate.allows("shared", 1)).count())
        })
        .collect();
    let allowed: usize = threads.into_iter().map(|thread| thread.join().expect("no panic")).sum();
    println!("four threads asked 4000 times and got {allowed}");
    Ok(())
}
