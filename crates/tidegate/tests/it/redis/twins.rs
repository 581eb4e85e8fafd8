//! The script and the core are twins: asked the same, they say the same, in every field, on every server. So do the memory store and
//! the naive model of the core's tests, which is written from the definitions and shares no code with either.
//!
//! Who takes part in which steps, and why not in all:
//! - The model does not know what becomes of a state whose limit has changed: the rounding of a conversion is a choice, not a
//!   definition (decision 0006). So in a million steps every key keeps its limits (others in every history: those of a list, and
//!   drawn at random of any kind), and all four must agree. In a quarter as many further steps limits change at every call, and the
//!   other three must.
//! - The memory store may forget what is idle as soon as it likes, so it cannot go back in time without being told to. In the half
//!   of all steps in which the clock goes back it does not take part.
//! - Everything else is in all steps: every algorithm and operation, ids and none, up to three subjects in one call.

use std::sync::Arc;

use tidegate::{ManualClock, Memory};
use tidegate_testkit::{Flavor, Server};

use super::{assert_all_expire, runtime, store};
use crate::conformance::Trial;

/// Random calls per run that all four decide, over all servers together.
fn steps() -> usize {
    std::env::var("TIDEGATE_TWIN_STEPS").ok().and_then(|steps| steps.parse().ok()).unwrap_or(1_000_000)
}

#[test]
fn model_core_memory_and_script_agree_on_every_server() {
    const AT_ONCE: usize = 8;
    let seed: u64 = std::env::var("TIDEGATE_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1);
    let steps = steps() / Flavor::ALL.len() / AT_ONCE;
    for (number, flavor) in (0..).zip(Flavor::ALL) {
        let server = Arc::new(Server::start(flavor));
        let runtime = runtime();
        // Several histories at once, each in its own namespace, so that the machine is not only waiting.
        let histories: Vec<_> = (0..AT_ONCE as u64)
            .map(|history| {
                let (server, seed) = (Arc::clone(&server), seed + 1000 * history + 100 * number);
                runtime.spawn(async move {
                    for (model, steps) in [(true, steps / 2), (false, steps / 8)] {
                        for clock_goes_back in [false, true] {
                            tell(&server, model, clock_goes_back, seed, steps).await;
                        }
                    }
                })
            })
            .collect();
        for history in histories {
            runtime.block_on(history).unwrap();
        }
        assert_all_expire(&server);
    }
}

/// One history, asked of everybody who can follow it.
async fn tell(server: &Server, model: bool, clock_goes_back: bool, seed: u64, steps: usize) {
    let clock = ManualClock::new();
    let namespace = format!("h{seed}-{model}-{clock_goes_back}");
    let redis = store(server).namespace(namespace).clock(clock.clone()).build().unwrap();
    let memory = Memory::builder().clock(clock.clone()).max_keys(1024).build();
    let stores: &[(&str, &dyn tidegate::Store)] = &[("redis", &redis), ("memory", &memory)];
    let stores = if clock_goes_back { &stores[..1] } else { stores };
    let trial = Trial { stores, clock: &clock, forget: None, clock_goes_back, steady: false, model, seed };
    trial.run(steps).await;
    assert_eq!(redis.stats().regressions, 0, "nothing was lost, so nothing may be restored");
    assert_eq!(redis.stats().repairs, 0);
}
