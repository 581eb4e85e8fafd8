//! Without async: the memory store decides immediately, one key or a batch.
//!
//! `cargo run -p tidegate --example without_runtime`

#![allow(clippy::print_stdout, reason = "an example shows what it does")]

use tidegate::{Limit, ManualClock, Memory, Scope, Verdict};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // `Memory::new()` would use the system's clock; a manual clock makes the output repeatable.
    let memory = Memory::builder().clock(ManualClock::new()).build();
    let limit: Limit = "2/s".parse()?;

    // A yes or no is the fastest check.
    println!("may user:7 pass? {}", memory.allows("user:7", &limit, 1));

    // A verdict has all the numbers.
    let verdict = memory.check("user:7", &limit, 1);
    println!("again? {}, {} left", verdict.allowed, verdict.remaining);
    let verdict = memory.check("user:7", &limit, 1);
    println!("and again? {}, everything is back in {:?}", verdict.allowed, verdict.reset_after());

    // A store that is prepared for one limit checks faster, and takes batches: for example all the
    // requests of one network read. Each key is checked independently, in this order.
    let prepared = memory.prepare(&Scope::AdHoc, &limit);
    let batch = [("user:8", 1), ("user:9", 3), ("user:8", 1), ("user:8", 1)];
    prepared.check_each(&batch, |key, verdict: Verdict| {
        let allowed = if verdict.allowed { "yes" } else { "no" };
        println!("{key}: {allowed} ({} left)", verdict.remaining);
    });

    // Threads share a store by cloning it.
    let threads: Vec<_> = (0..4)
        .map(|_| {
            let prepared = prepared.clone();
            std::thread::spawn(move || (0..1_000).filter(|_| prepared.allows("shared", 1)).count())
        })
        .collect();
    let allowed: usize = threads.into_iter().map(|thread| thread.join().expect("no panic")).sum();
    println!("four threads checked 4000 times and were allowed {allowed}");
    Ok(())
}
