//! A cost that is known only afterwards: reserve an estimate, settle what it came to.
//!
//! `cargo run -p tidegate --example llm_tokens`

#![allow(clippy::print_stdout, reason = "an example shows what it does")]

use tidegate::{Check, Limiter, Limits, ManualClock, Memory, StoreError};

struct Model {
    limiter: Limiter,
    requests: Limits,
    tokens: Limits,
}

impl Model {
    /// One call of a model: asked with an estimate, paid with what it used.
    async fn call(&self, user: &str, estimate: u64, used: u64) -> Result<(), StoreError> {
        // One request and so many tokens, all or nothing.
        let check = Check::new().charge_named("requests", user, &self.requests, 1).charge_named(
            "tokens",
            user,
            &self.tokens,
            estimate,
        );
        let reservation = self.limiter.reserve_all(check).await?;
        if !reservation.allowed() {
            let decision = reservation.decision();
            let which = ["requests", "tokens"][decision.binding_index()];
            let wait = decision.retry_after().unwrap_or_default();
            println!("{user} estimate {estimate:>4}: denied by the {which}, come back in {wait:?}");
            return Ok(());
        }

        // … here the model would run …

        let settled = reservation.settle_each(&[1, used]).await?;
        let tokens = &settled.verdicts()[1];
        let what = match used.checked_sub(estimate) {
            None => format!("{} given back", tokens.granted),
            Some(0) => "as estimated".into(),
            Some(_) => format!("{} more taken", tokens.granted),
        };
        // `allowed` says whether all of it could be taken. What is beyond the debt is lost.
        let note = if settled.allowed() { "" } else { ", the rest is beyond the debt" };
        println!(
            "{user} estimate {estimate:>4}, used {used:>4}: {what}{note}; {} left",
            tokens.remaining
        );
        if tokens.remaining == 0 {
            println!("    in debt or empty: the next token comes in {:?}", tokens.next_after());
        }
        Ok(())
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (requests, tokens): (Limits, Limits) = ("4/min".parse()?, "1000/min debt 500".parse()?);
    let memory = Memory::builder().clock(ManualClock::new()).build();
    let limiter = Limiter::builder(requests.clone()).memory(memory).build();
    let model = Model { limiter, requests, tokens };
    model.call("user:7", 400, 150).await?; // less than reserved
    model.call("user:7", 900, 900).await?; // more than there is
    model.call("user:7", 600, 1100).await?; // more than reserved, and more than is left: into debt
    model.call("user:7", 1, 1).await?; // a debt is paid back first
    model.call("user:8", 600, 2000).await?; // more than the debt allows
    for _ in 0..5 {
        model.call("user:9", 10, 10).await?; // the fifth is one request too many
    }
    Ok(())
}
