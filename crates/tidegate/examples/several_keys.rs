//! One request that is charged to several budgets, the user's and a global one: all or nothing.
//!
//! `cargo run -p tidegate --example several_keys`

#![allow(clippy::print_stdout, reason = "an example shows what it does")]

use tidegate::{Check, Limits, ManualClock, Memory};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let memory = Memory::builder().clock(ManualClock::new()).build();
    let per_user: Limits = "3/s; 100/h".parse()?;
    let everyone: Limits = "5/s".parse()?;

    for user in ["alice", "alice", "alice", "alice", "bob", "bob", "carol"] {
        let check = Check::new().charge(user, &per_user, 1).charge("everyone", &everyone, 1);
        let decision = memory.decide(&check)?;
        // The charges are in the order in which they were added: two of the user, one global.
        let binding = &check.charges()[decision.binding_index()];
        let whose = String::from_utf8_lossy(&binding.subject.key);
        let answer = if decision.allowed() { "allowed" } else { "denied " };
        println!(
            "{user:<6} {answer} bound by {} of {whose}, {} left",
            binding.limit,
            decision.remaining()
        );
    }

    // Carol was denied by the global limit, so her own budget was not charged.
    let carol = memory.decide(&Check::of(tidegate::Op::Peek).charge("carol", &per_user, 1))?;
    println!("carol still has {} of {}", carol.remaining(), carol.amount());
    Ok(())
}
