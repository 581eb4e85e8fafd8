//! The smallest use: one limit, one key, ask before you serve.
//!
//! `cargo run -p tidegate --example one_key`

#![allow(clippy::print_stdout, reason = "an example shows what it does")]

use tidegate::Limiter;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    // A bucket of three that regrows three an hour, one such bucket for each key.
    let limiter = Limiter::new("3/h".parse()?);

    for request in 1..=5 {
        let decision = limiter.check("user:7").await?;
        if decision.allowed() {
            println!("request {request}: served, {} left", decision.remaining());
        } else {
            // A denial is an answer, not an error. It says when the same request would pass.
            let wait = decision.retry_after().expect("a cost of 1 fits some time");
            println!(
                "request {request}: denied, come back in {} minutes",
                wait.as_secs().div_ceil(60)
            );
        }
    }

    // Another key has a budget of its own.
    let other = limiter.check("user:8").await?;
    println!(
        "user:8: {}, {} left",
        if other.allowed() { "served" } else { "denied" },
        other.remaining()
    );
    Ok(())
}
