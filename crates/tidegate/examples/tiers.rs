//! Plans with different limits over one store. A customer that changes plan keeps its usage.
//!
//! `cargo run -p tidegate --example tiers`

#![allow(clippy::print_stdout, reason = "an example shows what it does")]

use tidegate::{Limiter, ManualClock, Memory};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let memory = Memory::builder().clock(ManualClock::new()).build();
    // With a name, the state belongs to "api" and not to the numbers of a limit, so even the
    // algorithm may change.
    let free = Limiter::builder("10/min".parse()?).name("api").memory(memory).build();
    let pro = free.with_limits("100/min burst 50".parse()?);
    let enterprise = free.with_limits("1000/min sliding step 1s".parse()?);

    // Which plan a customer has is yours to look up, for example once per request.
    let plan_of = |customer: &str| match customer {
        "acme" => &enterprise,
        "initech" => &pro,
        _ => &free,
    };
    for customer in ["acme", "initech", "umbrella"] {
        let decision = plan_of(customer).check(customer).await?;
        println!("{customer:<9} {:>4} of {:>4} left", decision.remaining(), decision.amount());
    }

    // An upgrade gives more, but not the same again: the ten that were used stay used.
    let _ = free.check("newcomer").cost(10).await?;
    println!("newcomer, free:       {:>4} left", free.peek("newcomer").await?.remaining());
    println!("newcomer, pro:        {:>4} left", pro.peek("newcomer").await?.remaining());
    println!("newcomer, enterprise: {:>4} left", enterprise.peek("newcomer").await?.remaining());
    Ok(())
}
