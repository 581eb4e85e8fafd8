//! Waiting instead of a denial: in order, bounded, and only if the wait can succeed.
//!
//! `cargo run -p tidegate --example waiting`

#![allow(clippy::print_stdout, reason = "an example shows what it does")]

use std::time::{Duration, Instant};

use tidegate::{AcquireError, Limiter};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    // One every 50 ms, and no burst.
    let limiter = Limiter::new("20/s burst 1".parse()?);

    let start = Instant::now();
    let mut jobs = Vec::new();
    for job in 1..=4 {
        let limiter = limiter.clone();
        jobs.push(tokio::spawn(async move {
            let turn = limiter.acquire("mailer", Duration::from_secs(1)).await;
            (job, turn.map(|_| start.elapsed()))
        }));
    }
    for job in jobs {
        let (job, after) = job.await?;
        // Rounded, because this one example runs on the real clock.
        println!("job {job} had its turn after about {} ms", (after?.as_millis() + 10) / 50 * 50);
    }

    // A wait that is known to be too long is refused now, not when the patience is over.
    let slow = limiter.with_limits("1/min".parse()?);
    let _ = slow.acquire("newsletter", Duration::from_secs(1)).await?;
    match slow.acquire("newsletter", Duration::from_secs(1)).await {
        Err(AcquireError::TooLong(denied)) => {
            println!(
                "refused without waiting: it would have been {:.0?}",
                denied.retry_after().unwrap_or_default()
            );
        }
        other => println!("{other:?}"),
    }
    Ok(())
}
