//! How many nodes there are: counted in the store, kept when it is silent, assumed to be many by whoever never heard.

use std::time::Duration;

use tidegate::{ManualClock, Near, Source};

use super::{Remote, ask, limits};

fn counting(remote: &Remote, clock: &ManualClock, seed: u64) -> Near {
    Near::builder(remote.clone()).clock(clock.clone()).seed(seed).build()
}

async fn seconds(seconds: u64) {
    tokio::time::sleep(Duration::from_secs(seconds)).await;
}

fn clock() -> ManualClock {
    let clock = ManualClock::with_runtime();
    clock.advance(Duration::from_secs(1_000_000));
    clock
}

#[tokio::test(start_paused = true)]
async fn nodes_that_come_leave_and_die_are_counted() {
    let clock = clock();
    let remote = Remote::new(&clock);
    let mut nears = vec![counting(&remote, &clock, 1)];
    assert_eq!(nears[0].stats().nodes, 10, "nothing is known yet");
    seconds(1).await;
    assert_eq!(nears[0].stats().nodes, 1);
    nears.extend((2..5).map(|seed| counting(&remote, &clock, seed)));
    seconds(5).await;
    assert_eq!(nears.iter().map(|near| near.stats().nodes).collect::<Vec<_>>(), [4; 4]);
    nears.pop().unwrap().close().await;
    seconds(4).await;
    assert_eq!(nears[0].stats().nodes, 3, "one has said that it goes");
    drop(nears.pop());
    seconds(9).await;
    assert_eq!(nears[0].stats().nodes, 2, "one has gone without a word");
}

#[tokio::test(start_paused = true)]
async fn the_number_stays_when_the_store_is_silent_and_newcomers_assume_many() {
    let clock = clock();
    let remote = Remote::new(&clock);
    let nears: Vec<Near> = (0..3).map(|seed| counting(&remote, &clock, seed)).collect();
    seconds(5).await;
    remote.silent(true);
    seconds(60).await;
    assert_eq!(nears.iter().map(|near| near.stats().nodes).collect::<Vec<_>>(), [3; 3]);
    let newcomer = counting(&remote, &clock, 9);
    let limits = limits("300/h window");
    let mut passed = 0;
    for _ in 0..400 {
        let decision = ask(&newcomer, "k", &limits, 1).await;
        assert_eq!(decision.source(), Source::Fallback);
        passed += u64::from(decision.allowed());
    }
    assert_eq!(passed, 30, "a tenth");
    remote.silent(false);
    seconds(10).await;
    assert_eq!(nears[0].stats().nodes, 4);
    assert_eq!(newcomer.stats().nodes, 4);
}
