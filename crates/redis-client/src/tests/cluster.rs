//! Cluster: the owner of a slot is found, followed when it moves, and replaced when it dies.

use tidegate_testkit::{Cluster, Reply as KitReply};

use super::super::address::Address;
use super::super::url::Host;
use super::*;

/// A tag in a slot of each of the three masters.
const TAGS: [&str; 3] = ["b", "c", "a"];

fn incr() -> Script {
    Script::new("return redis.call('INCRBY', KEYS[1], ARGV[1])")
}

fn key(tag: &str) -> String {
    format!("tg:{{{tag}}}:n")
}

async fn increment(router: &Router, script: &Script, tag: &str, deadline: Instant) -> Outcome {
    router.eval(script, super::super::slot_of(tag.as_bytes()), &[key(tag)], &["1"], deadline).await
}

#[tokio::test(flavor = "multi_thread")]
async fn every_slot_is_served_by_its_owner() {
    for flavor in Flavor::ALL {
        let cluster = Cluster::start(flavor);
        let router = router(&cluster.url());
        assert!(router.is_cluster());
        let script = incr();
        for tag in TAGS {
            assert_eq!(super::super::slot_of(tag.as_bytes()), cluster.slot_of(&key(tag)), "{tag}");
            for round in 1..=3 {
                let outcome = increment(&router, &script, tag, soon()).await;
                assert_eq!(outcome, Outcome::Applied(Value::Int(round)), "{flavor} {tag}");
            }
        }
        let owners: Vec<u16> =
            TAGS.iter().map(|tag| cluster.master_of(cluster.slot_of(tag)).port()).collect();
        let mut masters = router.masters(soon()).await.unwrap();
        let mut expected: Vec<NodeId> = owners
            .iter()
            .map(|&port| NodeId(Address::Tcp(Host { name: "127.0.0.1".into(), port })))
            .collect();
        masters.sort_by_key(NodeId::to_string);
        expected.sort_by_key(NodeId::to_string);
        assert_eq!(masters, expected, "{flavor}");
        for master in &masters {
            let Outcome::Applied(role) = router.command(master, &["ROLE"], soon()).await else {
                panic!("{flavor}")
            };
            assert_eq!(role.as_array().unwrap()[0], bulk("master"), "{flavor}");
        }
        let counters = router.counters();
        assert_eq!(
            (counters.redirects, counters.retries, counters.discoveries),
            (0, 0, 1),
            "{flavor}"
        );
        assert_eq!(counters.script_loads, 3, "{flavor}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slot_that_is_moved_is_followed_and_remembered() {
    let cluster = Cluster::start(Flavor::Redis7);
    let router = router(&cluster.url());
    let (script, tag) = (incr(), TAGS[0]);
    let slot = cluster.slot_of(tag);
    assert_eq!(increment(&router, &script, tag, soon()).await, Outcome::Applied(Value::Int(1)));
    let before = router.counters().discoveries;

    let (source, target) = (cluster.master_of(slot), cluster.master_of(cluster.slot_of(TAGS[1])));
    let (source_id, target_id, number) = (cluster.id(source), cluster.id(target), slot.to_string());
    let ok = |reply: KitReply| assert_eq!(reply, KitReply::Text("OK".into()));
    ok(target.command(&["CLUSTER", "SETSLOT", &number, "IMPORTING", &source_id]));
    ok(source.command(&["CLUSTER", "SETSLOT", &number, "MIGRATING", &target_id]));
    // The key is still there, so the old owner answers.
    assert_eq!(increment(&router, &script, tag, soon()).await, Outcome::Applied(Value::Int(2)));
    assert_eq!(router.counters().redirects, 0);

    // Moved, but the slot is not: ASK, every time, also when the script has to be loaded there.
    ok(source.command(&[
        "MIGRATE",
        "127.0.0.1",
        &target.port().to_string(),
        &key(tag),
        "0",
        "5000",
    ]));
    for round in 3..=5 {
        assert_eq!(
            increment(&router, &script, tag, soon()).await,
            Outcome::Applied(Value::Int(round))
        );
    }
    assert_eq!(router.counters().redirects, 3);

    // Two keys of the slot, one of them new: it cannot be said where both are.
    let two = Script::new("redis.call('GET', KEYS[1]) return redis.call('GET', KEYS[2])");
    let keys = [key(tag), format!("tg:{{{tag}}}:other")];
    let failure = not_applied(router.eval(&two, slot, &keys, NO_KEYS, soon()).await);
    assert_eq!(failure.kind(), FailureKind::TryAgain, "{failure}");
    assert_eq!(router.counters().retries, 0);

    // The slot is moved: one MOVED, then straight there.
    ok(target.command(&["CLUSTER", "SETSLOT", &number, "NODE", &target_id]));
    ok(source.command(&["CLUSTER", "SETSLOT", &number, "NODE", &target_id]));
    let redirects = router.counters().redirects;
    for round in 6..=9 {
        assert_eq!(
            increment(&router, &script, tag, soon()).await,
            Outcome::Applied(Value::Int(round))
        );
    }
    assert_eq!(router.counters().redirects, redirects + 1);
    until("the map is read again", || router.counters().discoveries == before + 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_planned_failover_fails_no_call() {
    let cluster = Cluster::start(Flavor::Valkey9);
    let router = router(&cluster.url());
    let (script, tag) = (incr(), TAGS[0]);
    let slot = cluster.slot_of(tag);
    let callers: Vec<_> = (0..8)
        .map(|_| {
            let (router, script) = (router.clone(), script.clone());
            tokio::spawn(async move {
                for _ in 0..500 {
                    let outcome = increment(&router, &script, tag, soon()).await;
                    assert!(matches!(outcome, Outcome::Applied(_)), "{outcome:?}");
                }
            })
        })
        .collect();
    let cluster = tokio::task::spawn_blocking(move || {
        cluster.failover(slot);
        cluster
    });
    let cluster = cluster.await.unwrap();
    for caller in callers {
        caller.await.unwrap();
    }
    let total = cluster.master_of(slot).command(&["GET", &key(tag)]);
    assert_eq!(total, KitReply::Text("4000".into()));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_owner_is_replaced_and_the_other_slots_do_not_notice() {
    for kill in [true, false] {
        let cluster = Cluster::start(Flavor::Redis8);
        let router = router(&cluster.url());
        let script = incr();
        for tag in TAGS {
            increment(&router, &script, tag, soon()).await;
        }
        // Otherwise the servers themselves refuse all slots when one is lost.
        for node in cluster.nodes() {
            node.command(&["CONFIG", "SET", "cluster-require-full-coverage", "no"]);
        }
        let slot = cluster.slot_of(TAGS[0]);
        let victim = cluster.master_of(slot);
        if kill {
            victim.kill()
        } else {
            victim.stop_signal()
        }

        // The other slots are served, quickly, all the time, until this one is served again.
        let start = Instant::now();
        let mut failures = 0;
        loop {
            for tag in &TAGS[1..] {
                let begun = Instant::now();
                let outcome = increment(&router, &script, tag, soon()).await;
                assert!(matches!(outcome, Outcome::Applied(_)), "{outcome:?}");
                assert!(begun.elapsed() < Duration::from_secs(1));
            }
            let deadline = Instant::now() + Duration::from_millis(20);
            match increment(&router, &script, TAGS[0], deadline).await {
                Outcome::Applied(_) => break,
                Outcome::NotApplied(_) | Outcome::Unknown(_) => failures += 1,
            }
            assert!(
                Instant::now() < deadline + Duration::from_secs(1),
                "a call outlived its deadline"
            );
            assert!(start.elapsed() < PATIENCE, "the slot was not served again");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        assert!(failures > 0, "the owner was dead");
        let new = cluster.wait_for_failover(slot);
        assert_ne!(new.port(), victim.port());
        if !kill {
            victim.continue_signal();
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn lost_slots_are_reported_and_the_cluster_that_comes_back_is_used() {
    let cluster = Cluster::start(Flavor::Redis7);
    let router = router(&cluster.url());
    let script = incr();
    for tag in TAGS {
        increment(&router, &script, tag, soon()).await;
    }
    // Without two of three masters there is no election, and the third stops serving.
    let gone: Vec<_> =
        TAGS[1..].iter().map(|tag| cluster.kill_master_of(cluster.slot_of(tag))).collect();
    until_async("the cluster is down", || async {
        let outcome = increment(&router, &script, TAGS[0], soon()).await;
        matches!(
            outcome,
            Outcome::NotApplied(failure) if failure.kind() == FailureKind::ClusterDown
        )
    })
    .await;
    // It may be down only briefly, so the call is retried once, after a short wait.
    let (began, retries) = (Instant::now(), router.counters().retries);
    let outcome = increment(&router, &script, TAGS[0], soon()).await;
    assert!(matches!(outcome, Outcome::NotApplied(_)), "{outcome:?}");
    assert_eq!(router.counters().retries, retries + 1);
    assert!(began.elapsed() >= Duration::from_millis(50), "{:?}", began.elapsed());
    gone.iter().for_each(|server| server.restart());
    for tag in TAGS {
        until_async("the cluster is back", || async {
            matches!(increment(&router, &script, tag, soon()).await, Outcome::Applied(_))
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_of_two_slots_are_refused_and_nothing_is_done() {
    let cluster = Cluster::start(Flavor::Redis62);
    let router = router(&cluster.url());
    let script =
        Script::new("redis.call('SET', KEYS[1], 1) redis.call('SET', KEYS[2], 1) return 1");
    let slot = cluster.slot_of(TAGS[0]);
    let failure = not_applied(
        router.eval(&script, slot, &[key(TAGS[0]), key(TAGS[1])], NO_KEYS, soon()).await,
    );
    assert_eq!(failure.kind(), FailureKind::CrossSlot, "{failure}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_that_is_not_there_is_told_at_once_after_the_first_try() {
    let router = router("redis+cluster://127.0.0.1:1,127.0.0.1:2");
    let failure = not_applied(router.eval(&echo(), 0, NO_KEYS, &["x"], soon()).await);
    assert_eq!(failure.kind(), FailureKind::Refused, "{failure}");
    let start = Instant::now();
    for _ in 0..100 {
        not_applied(router.eval(&echo(), 0, NO_KEYS, &["x"], soon()).await);
    }
    assert!(start.elapsed() < Duration::from_secs(1));
    assert!(router.counters().discoveries <= 11, "{:?}", router.counters());
    assert!(router.masters(soon()).await.is_err());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_plain_address_of_a_cluster_says_which_address_to_use() {
    let cluster = Cluster::start(Flavor::Redis7);
    let router = router(&cluster.nodes()[0].url());
    let failures = futures_of(TAGS, |tag| {
        let router = router.clone();
        async move { increment(&router, &incr(), tag, soon()).await }
    })
    .await;
    let moved = failures.into_iter().filter_map(|outcome| match outcome {
        Outcome::NotApplied(failure) => Some(failure),
        _ => None,
    });
    let moved: Vec<Failure> = moved.collect();
    assert_eq!(moved.len(), 2);
    for failure in moved {
        assert_eq!(
            (failure.kind(), failure.is_permanent()),
            (FailureKind::Topology, true),
            "{failure}"
        );
        assert_eq!(failure.advice(), "It is part of a cluster: write redis+cluster://.");
    }
}

#[test]
fn redirects_and_announced_names_are_read_as_they_come() {
    use super::super::cluster::{host_of, read_redirect};
    let asked = Address::Tcp(Host { name: "10.0.0.7".into(), port: 7000 });
    let host = |name: &str, port| Host { name: name.into(), port };
    for (error, expected) in [
        ("MOVED 3999 127.0.0.1:6381", Some((3999, host("127.0.0.1", 6381)))),
        ("ASK 1 node.example:7", Some((1, host("node.example", 7)))),
        ("MOVED 1 ::1:7001", Some((1, host("::1", 7001)))),
        ("MOVED 1 :7001", Some((1, host("10.0.0.7", 7001)))),
        ("MOVED 1 ?:7001", None),
        ("MOVED 16384 127.0.0.1:6381", None),
        ("MOVED 1 127.0.0.1", None),
        ("MOVED 1 127.0.0.1:0", None),
        ("MOVED", None),
    ] {
        assert_eq!(read_redirect(error, &asked), expected, "{error}");
    }
    assert_eq!(host_of("", 7001, &asked), Some(host("10.0.0.7", 7001)));
    // A server may say what it likes; what is no name would stand in logs as it came.
    for name in ["two\nlines", "a b", "\u{1b}[31m", "a\"b", &"x".repeat(256)] {
        assert_eq!(host_of(name, 7001, &asked), None, "{name:?}");
    }
    assert_eq!(host_of("fe80::1%eth0", 7001, &asked), Some(host("fe80::1%eth0", 7001)));
}
