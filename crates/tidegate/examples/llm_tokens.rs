//! A cost that is known only afterwards: reserve an estimate, settle what it came to.
//!
//! `cargo run -p tidegate --example llm_tokens`

#![allow(clippy::print_stdout, reason = "an example shows what it does")]

use tidegate::{Limiter, ManualClock, Memory, StoreError};

struct Gate {
    requests: Limiter,
    tokens: Limiter,
}

impl Gate {
    /// One call of a model: asked with an estimate, paid with what it used.
    async fn call(&self, user: &str, estimate: u64, used: u64) -> Result<(), StoreError> {
        // The tokens first: a reservation can be cancelled.
        let reservation = self.tokens.reserve(user, estimate).await?;
        if !reservation.allowed() {
            let wait = reservation.decision().retry_after().unwrap_or_default();
            println!("estimate {estimate:>4}: denied by the tokens, come back in {wait:?}");
            return Ok(());
        }
        let request = self.requests.check(user).await?;
        if !request.allowed() {
            let back = reservation.cancel().await?;
            println!("estimate {estimate:>4}: denied by the requests, {} tokens given back", back.granted());
            return Ok(());
        }

        // … here the model would run …

        let settled = reservation.settle(used).await?;
        let what = match used.checked_sub(estimate) {
            None => format!("{} given back", settled.granted()),
            Some(0) => "as estimated".into(),
            Some(_) => format!("{} more taken", settled.granted()),
        };
        // `allowed` says whether all of it could be taken. What is beyond the debt is lost.
        let note = if settled.allowed() { "" } else { ", the rest is beyond the debt" };
        println!("estimate {estimate:>4}, used {used:>4}: {what}{note}; {} left", settled.remaining());
        if settled.remaining() == 0 {
            println!("    in debt or empty: the next token comes in {:?}", settled.next_after());
        }
        Ok(())
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let memory = Memory::builder().clock(ManualClock::new()).build();
    let gate = Gate {
        requests: Limiter::builder("4/min".parse()?).name("requests").memory(memory.clone()).build(),
        // Whoever uses more than was reserved may go 500 below empty.
        tokens: Limiter::builder("1000/min debt 500".parse()?).name("tokens").memory(memory).build(),
    };
    gate.call("user:7", 400, 150).await?; // less than reserved
    gate.call("user:7", 900, 900).await?; // more than there is
    gate.call("user:7", 600, 1100).await?; // more than reserved, and more than is left: into debt
    gate.call("user:7", 1, 1).await?; // a debt is paid back first
    gate.call("user:8", 600, 2000).await?; // more than the debt allows
    gate.call("user:9", 10, 10).await?;
    gate.call("user:9", 10, 10).await?;
    gate.call("user:9", 10, 10).await?;
    gate.call("user:9", 10, 0).await?;
    gate.call("user:9", 10, 10).await?; // the fifth request
    Ok(())
}
