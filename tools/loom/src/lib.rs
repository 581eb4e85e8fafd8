//! What is read without a lock, in every order in which threads can meet: `cargo xtask loom`.
//!
//! [`sound::version`] is the product's file, with loom's atomics for the standard library's. The
//! same scenarios run over copies of it from each of which one ordering was taken away, and each of
//! them must fail: so the checker can, and no ordering is there for nothing.

#![cfg(test)]
#![allow(clippy::duplicate_mod, reason = "the same scenarios, over each copy")]

mod sync {
    pub(crate) use loom::sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering, fence};
}

mod sound;

include!(concat!(env!("OUT_DIR"), "/weaker.rs"));

/// Tries every order.
fn try_all((scenario, interruptions): sound::scenarios::Scenario) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = interruptions;
    model.check(scenario);
}

#[test]
fn every_order_of_threads_is_sound() {
    sound::scenarios::ALL.iter().copied().for_each(try_all);
}

#[test]
fn every_ordering_is_needed() {
    assert!(WEAKER.len() >= 7, "only {} were found", WEAKER.len());
    // A thread each: loom does not recover from a failure on the thread where it was.
    let noticed = |scenario: &sound::scenarios::Scenario| {
        let scenario = *scenario;
        std::thread::spawn(move || try_all(scenario)).join().is_err()
    };
    for (what, scenarios) in WEAKER {
        assert!(scenarios.iter().any(noticed), "no scenario fails without `{what}`");
        println!("noticed: {what}");
    }
}
