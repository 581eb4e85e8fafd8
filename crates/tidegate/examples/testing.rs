//! Testing code that is rate limited, without sleeping: a clock that moves when told to.
//!
//! `cargo run -p tidegate --example testing`

#![allow(clippy::print_stdout, reason = "an example shows what it does")]

use std::time::Duration;

use tidegate::{Limiter, ManualClock, Memory};

/// The code under test. It is given its limiter, and does not know which clock is behind it.
async fn greet(limiter: &Limiter, user: &str) -> String {
    match limiter.check(user).await {
        Ok(decision) if decision.allowed() => format!("hello {user}"),
        Ok(decision) => {
            format!("not again before {:?}", decision.retry_after().unwrap_or_default())
        }
        // No answer is not a denial. Whether to serve without one is for you to say.
        Err(error) => format!("cannot tell: {error}"),
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let clock = ManualClock::new(); // stands at the Unix epoch
    let memory = Memory::builder().clock(clock.clone()).build();
    let limiter = Limiter::builder("1/10s".parse()?).memory(memory).build();

    assert_eq!(greet(&limiter, "ann").await, "hello ann");
    assert_eq!(greet(&limiter, "ann").await, "not again before 10s");

    // Waits are exact: one microsecond early is too early.
    clock.advance(Duration::from_micros(9_999_999));
    assert_eq!(greet(&limiter, "ann").await, "not again before 1µs");
    clock.advance(Duration::from_micros(1));
    assert_eq!(greet(&limiter, "ann").await, "hello ann");

    // `acquire` sleeps on the same clock, so a waiting task is tested by moving it.
    let waiting = tokio::spawn({
        let limiter = limiter.clone();
        async move {
            limiter.acquire("ann", Duration::from_secs(60)).await.map(|pass| pass.decision().at())
        }
    });
    while clock.now().as_micros() < 20_000_000 {
        tokio::task::yield_now().await; // lets the task run until it waits
        assert!(!waiting.is_finished());
        clock.advance(Duration::from_secs(5));
    }
    waiting.await??;
    println!("twenty seconds have passed on the clock that counts, and none on yours");
    Ok(())
}
