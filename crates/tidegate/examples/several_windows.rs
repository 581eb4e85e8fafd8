//! Several limits on one key, decided together: all of them or none.
//!
//! `cargo run -p tidegate --example several_windows`

#![allow(clippy::print_stdout, reason = "an example shows what it does")]

use std::time::Duration;

use tidegate::{Limiter, ManualClock, Memory};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let clock = ManualClock::new();
    let memory = Memory::builder().clock(clock.clone()).build();
    // Two a second for bursts, five a minute for the long run.
    let limiter = Limiter::builder("2/s; 5/m window".parse()?).memory(memory).build();

    println!("{:>6}  {:<7} {:>5} {:>8}  which limit binds", "at", "answer", "left", "wait");
    for _ in 0..3 {
        for _ in 0..3 {
            let decision = limiter.check("user:7").await?;
            let answer = if decision.allowed() { "allowed" } else { "denied" };
            // Of several limits, the numbers are those of the one that binds: on a denial the one
            // with the longest wait.
            let binding = &limiter.limits().as_slice()[decision.binding_index()];
            let wait = decision.retry_after().unwrap_or_default();
            let at = Duration::from_micros(decision.at().as_micros());
            println!(
                "{:>6}  {answer:<7} {:>5} {:>8}  {binding}",
                format!("{at:?}"),
                decision.remaining(),
                format!("{wait:?}")
            );
        }
        clock.advance(Duration::from_secs(1));
    }

    // What the second limit denied was not charged to the first either.
    let peek = limiter.peek("user:7").await?;
    for (limit, verdict) in limiter.limits().iter().zip(peek.verdicts()) {
        println!("{limit}: {} of {} left", verdict.remaining, verdict.amount);
    }
    Ok(())
}
