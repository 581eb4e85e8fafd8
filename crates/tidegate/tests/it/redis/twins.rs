//! The script and the core are twins: asked the same, they say the same, in every field, on every server.

use std::sync::Arc;

use tidegate::{ManualClock, Memory};
use tidegate_testkit::{Flavor, Server};

use super::{assert_all_expire, runtime, store};
use crate::conformance::Trial;

/// Random calls per run, over all servers together; each is also asked of the memory store.
fn steps() -> usize {
    std::env::var("TIDEGATE_TWIN_STEPS").ok().and_then(|steps| steps.parse().ok()).unwrap_or(1_000_000)
}

#[test]
fn core_memory_and_script_agree_on_every_server() {
    const AT_ONCE: usize = 8;
    let seed: u64 = std::env::var("TIDEGATE_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1);
    let steps = steps() / Flavor::ALL.len() / AT_ONCE;
    for flavor in Flavor::ALL {
        let server = Arc::new(Server::start(flavor));
        let runtime = runtime();
        // Several histories at once, each in its own namespace, so that the machine is not only waiting.
        let histories: Vec<_> = (0..AT_ONCE)
            .map(|history| {
                let server = Arc::clone(&server);
                runtime.spawn(async move {
                    let clock = ManualClock::new();
                    let redis = store(&server).namespace(format!("h{history}")).clock(clock.clone()).build().unwrap();
                    let memory = Memory::builder().clock(clock.clone()).max_keys(1024).build();
                    let seed = seed + 1000 * history as u64;
                    let stores: &[(&str, &dyn tidegate::Store)] = &[("memory", &memory), ("redis", &redis)];
                    Trial { stores, clock: &clock, forget: None, clock_goes_back: false, steady: false, seed }
                        .run(steps / 2)
                        .await;
                    // Memory may forget what is idle as soon as it likes, so it cannot go back in time without being told to.
                    let redis = store(&server).namespace(format!("b{history}")).clock(clock.clone()).build().unwrap();
                    let stores: &[(&str, &dyn tidegate::Store)] = &[("redis", &redis)];
                    Trial { stores, clock: &clock, forget: None, clock_goes_back: true, steady: false, seed }
                        .run(steps / 2)
                        .await;
                    assert_eq!(redis.stats().regressions, 0, "nothing was lost, so nothing may be restored");
                    assert_eq!(redis.stats().repairs, 0);
                })
            })
            .collect();
        for history in histories {
            runtime.block_on(history).unwrap();
        }
        assert_all_expire(&server);
    }
}
