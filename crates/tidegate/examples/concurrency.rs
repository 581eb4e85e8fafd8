//! A limit on concurrent work: a lease for each task, released when the task is done.
//!
//! `cargo run -p tidegate --example concurrency`

#![allow(clippy::print_stdout, reason = "an example shows what it does")]

use std::time::Duration;

use tidegate::{Limiter, ManualClock, Memory};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let clock = ManualClock::new();
    let memory = Memory::builder().clock(clock.clone()).build();
    // Two concurrent leases. A lease that is not released ends after 30 s, also after a crash.
    let limiter = Limiter::builder("2 concurrent ttl 30s".parse()?).memory(memory).build();

    let first = limiter.lease("report").await?;
    let second = limiter.lease("report").await?;
    println!("first: {}, second: {}", first.allowed(), second.allowed());

    let third = limiter.lease("report").await?;
    println!(
        "third: {}, at the latest there is room in {:?}",
        third.allowed(),
        third.decision().next_after()
    );

    // Either end it and hear what the store says …
    let released = first.release().await?;
    println!("first released: room for {}", released.remaining());
    // … or let it go out of scope.
    drop(second);
    println!("second dropped: room for {}", limiter.peek("report").await?.remaining());

    // A worker that dies without a word holds its place until the ttl is over.
    std::mem::forget(limiter.lease("report").await?);
    println!("one died: room for {}", limiter.peek("report").await?.remaining());
    clock.advance(Duration::from_secs(30));
    println!("30 s later: room for {}", limiter.peek("report").await?.remaining());
    Ok(())
}
