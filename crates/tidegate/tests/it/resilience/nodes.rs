//! The number of nodes: counted in the store, kept while the store does not answer; a node that has
//! never reached the store assumes one.

use std::time::Duration;

use tidegate::resilience::{NodesFrom, Policy, Resilient, SyncMode};
use tidegate::{Check, ManualClock, Source, Store};

use super::{Remote, ask, limits};

fn counting(remote: &Remote, clock: &ManualClock, seed: u64) -> Resilient {
    Resilient::builder(remote.clone()).clock(clock.clone()).seed(seed).build()
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
async fn nodes_that_start_stop_and_crash_are_counted() {
    let clock = clock();
    let remote = Remote::new(&clock);
    let mut resilients = vec![counting(&remote, &clock, 1)];
    let stats = resilients[0].stats();
    assert_eq!((stats.nodes, stats.nodes_from), (1, NodesFrom::Assumed), "nothing is known yet");
    seconds(1).await;
    let stats = resilients[0].stats();
    assert_eq!((stats.nodes, stats.nodes_from), (1, NodesFrom::Counted));
    resilients.extend((2..5).map(|seed| counting(&remote, &clock, seed)));
    seconds(5).await;
    assert_eq!(
        resilients.iter().map(|resilient| resilient.stats().nodes).collect::<Vec<_>>(),
        [4; 4]
    );
    resilients.pop().unwrap().close().await;
    seconds(4).await;
    assert_eq!(resilients[0].stats().nodes, 3, "one node has left");
    drop(resilients.pop());
    seconds(9).await;
    assert_eq!(resilients[0].stats().nodes, 2, "one node has crashed");
}

#[tokio::test(start_paused = true)]
async fn the_count_stays_during_an_outage_and_a_new_node_assumes_one() {
    let clock = clock();
    let remote = Remote::new(&clock);
    let resilients: Vec<Resilient> = (0..3).map(|seed| counting(&remote, &clock, seed)).collect();
    seconds(5).await;
    remote.silent(true);
    seconds(60).await;
    assert_eq!(
        resilients.iter().map(|resilient| resilient.stats().nodes).collect::<Vec<_>>(),
        [3; 3]
    );
    let newcomer = counting(&remote, &clock, 9);
    let limits = limits("300/h window");
    let mut passed = 0;
    for _ in 0..400 {
        let decision = ask(&newcomer, "k", &limits, 1).await;
        assert_eq!(decision.source(), Source::Fallback);
        passed += u64::from(decision.allowed());
    }
    assert_eq!(passed, 300, "the full limit: it knows of no other nodes");
    let status = newcomer.status();
    assert_eq!((status.nodes, status.nodes_from), (1, NodesFrom::Assumed));
    assert_eq!(
        status.enforced(),
        "each limit in full on this node (1 node, assumed: the store was never reached)"
    );
    remote.silent(false);
    seconds(10).await;
    assert_eq!(resilients[0].stats().nodes, 4);
    assert_eq!(newcomer.stats().nodes, 4);
}

/// Until the nodes are counted, a new node takes little ahead because there may be others.
#[tokio::test(start_paused = true)]
async fn a_new_node_takes_little_ahead_until_the_nodes_are_counted() {
    let clock = clock();
    let remote = Remote::new(&clock);
    let newcomer = counting(&remote, &clock, 9);
    let (limits, policy) =
        (limits("100000/h window"), Policy { sync: SyncMode::Lease, ..Policy::default() });
    let (mut before, mut after) = (0, 0);
    for _ in 0..3000 {
        let check = Check::new().policy(policy).charge("k", &limits, 1);
        assert!(newcomer.decide(&check).await.unwrap().allowed());
        let stats = newcomer.stats();
        let most = if stats.nodes_from == NodesFrom::Assumed { &mut before } else { &mut after };
        *most = stats.lease_units_held.max(*most);
        tokio::time::sleep(Duration::from_micros(200)).await;
    }
    assert!(
        before < 120 && after > 120,
        "{before} units were held before, {after} after they were counted"
    );
}

/// A renewal that fails or loses its answer leaves no second entry of the node.
#[tokio::test(start_paused = true)]
async fn a_node_whose_renewal_fails_is_counted_once() {
    for loses_answers in [false, true] {
        let clock = clock();
        let remote = Remote::new(&clock);
        let resilient = counting(&remote, &clock, 7);
        seconds(3).await;
        assert_eq!(resilient.stats().nodes, 1);
        let broken = |broken| {
            if loses_answers { remote.loses_answers(broken) } else { remote.fails(broken) }
        };
        broken(true);
        seconds(2).await;
        broken(false);
        for tenths in 0..100 {
            tokio::time::sleep(Duration::from_millis(100)).await;
            assert_eq!(
                resilient.stats().nodes,
                1,
                "{tenths} tenths of a second later, loses answers: {loses_answers}"
            );
        }
        resilient.close().await;
        let newcomer = counting(&remote, &clock, 8);
        seconds(1).await;
        assert_eq!(newcomer.stats().nodes, 1, "a stopped node leaves no entry");
    }
}
