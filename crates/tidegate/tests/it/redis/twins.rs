//! The script and the core are twins: the same calls have the same answers, in every field, on
//! every server. So do the memory store and the naive model of the core's tests, which is written
//! from the definitions and shares no code with either.
//!
//! Which of the four take part in which steps:
//! - The model does not convert states to changed limits: the rounding of a conversion is a
//!   choice, not a definition (record 0006). So in a million steps every key
//!   keeps its limits (others in every history: those of a list, and drawn at random of any kind),
//!   and all four must agree. In a quarter as many further steps limits change at every call, and
//!   the other three must.
//! - The memory store may drop an idle state at any time, so its clock cannot go back. In the half
//!   of all steps in which the caller's clock goes back it does not take part.
//! - Everything else is in all steps: every algorithm and operation, ids and none, up to three
//!   subjects in one call.

use std::sync::Arc;

use tidegate::{ManualClock, Memory};
use tidegate_testkit::{Flavor, Server};

use super::{assert_all_expire, runtime, store};
use crate::conformance::{StepsBack, Trial};

/// Random calls per run that all four decide, over all servers together.
fn steps() -> usize {
    std::env::var("TIDEGATE_TWIN_STEPS")
        .ok()
        .and_then(|steps| steps.parse().ok())
        .unwrap_or(1_000_000)
}

#[test]
fn model_core_memory_and_script_agree_on_every_server() {
    const AT_ONCE: usize = 8;
    let seed: u64 =
        std::env::var("TIDEGATE_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1);
    let steps = steps() / Flavor::ALL.len() / AT_ONCE;
    for (number, flavor) in (0..).zip(Flavor::ALL) {
        let server = Arc::new(Server::start(flavor));
        let runtime = runtime();
        // Several histories in parallel, each in its own namespace, to use the machine.
        let histories: Vec<_> = (0..AT_ONCE as u64)
            .map(|history| {
                let (server, seed) = (Arc::clone(&server), seed + 1000 * history + 100 * number);
                runtime.spawn(async move {
                    for (model, steps) in [(true, steps / 2), (false, steps / 8)] {
                        for steps_back in [StepsBack::Never, StepsBack::OfTheCaller] {
                            run_history(&server, model, steps_back, seed, steps).await;
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

/// The server's clock steps back, by a microsecond up to a day. The model does not take part: its
/// time only goes forward.
#[test]
fn core_and_script_agree_when_the_servers_clock_steps_back() {
    const AT_ONCE: usize = 4;
    let seed: u64 =
        std::env::var("TIDEGATE_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1);
    let steps = steps() / 4 / Flavor::ALL.len() / AT_ONCE;
    for (number, flavor) in (0..).zip(Flavor::ALL) {
        let server = Arc::new(Server::start(flavor));
        let runtime = runtime();
        let histories: Vec<_> = (0..AT_ONCE as u64)
            .map(|history| {
                let (server, seed) = (Arc::clone(&server), seed + 1000 * history + 100 * number);
                runtime.spawn(async move {
                    run_history(&server, false, StepsBack::OfTheStore, seed, steps).await
                })
            })
            .collect();
        for history in histories {
            runtime.block_on(history).unwrap();
        }
        assert_all_expire(&server);
    }
}

/// Runs one history on all stores that support it.
async fn run_history(server: &Server, model: bool, steps_back: StepsBack, seed: u64, steps: usize) {
    let clock = ManualClock::new();
    let redis = store(server).namespace(format!("h{seed}-{model}-{steps_back:?}"));
    let redis = match steps_back {
        // Without a witness: its observations expire by the time of this process, which the clock
        // is ahead of. See `clock.rs`.
        StepsBack::OfTheStore => redis.server_clock(clock.clone()).witness_keys(0),
        _ => redis.clock(clock.clone()),
    };
    let redis = redis.build().unwrap();
    let memory = Memory::builder().clock(clock.clone()).max_keys(1024).build();
    let stores: &[(&str, &dyn tidegate::Store)] = &[("redis", &redis), ("memory", &memory)];
    let stores = if steps_back == StepsBack::Never { stores } else { &stores[..1] };
    let trial =
        Trial { stores, clock: &clock, forget: None, steps_back, steady: false, model, seed };
    let rebased = trial.run(steps).await;
    assert_eq!(redis.stats().clock_regressions, rebased, "{steps_back:?}, seed {seed}");
    assert_eq!(redis.stats().regressions, 0, "nothing was lost, so nothing may be restored");
    assert_eq!(redis.stats().repairs, 0);
}
