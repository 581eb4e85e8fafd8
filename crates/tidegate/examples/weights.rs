//! Requests with a cost, checks that take nothing, and requests for as much as there is.
//!
//! `cargo run -p tidegate --example weights`

#![allow(clippy::print_stdout, reason = "an example shows what it does")]

use tidegate::{Limiter, ManualClock, Memory, Retry};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let memory = Memory::builder().clock(ManualClock::new()).build(); // time stands still
    let limiter = Limiter::builder("100/min".parse()?).memory(memory).build();

    for (what, cost) in
        [("a search", 5), ("an export", 60), ("another export", 60), ("a backup", 101)]
    {
        let decision = limiter.check("acme").cost(cost).await?;
        match decision.retry() {
            Retry::Now => {
                println!("{what:<15} costs {cost:>3}: allowed, {} left", decision.remaining())
            }
            Retry::After(micros) => {
                println!("{what:<15} costs {cost:>3}: denied, fits in {} s", micros / 1_000_000)
            }
            // No wait helps: it costs more than the limit can ever hold.
            Retry::Never => println!("{what:<15} costs {cost:>3}: denied, and always will be"),
        }
    }

    // A look takes nothing.
    let look = limiter.peek("acme").cost(30).await?;
    println!(
        "would 30 fit? {}; still {} left",
        if look.allowed() { "yes" } else { "no" },
        look.remaining()
    );

    // Bytes and rows can be had in part: take what there is.
    let part = limiter.take_up_to("acme", 50).await?;
    println!("asked for 50, got {}, {} left", part.granted(), part.remaining());
    Ok(())
}
