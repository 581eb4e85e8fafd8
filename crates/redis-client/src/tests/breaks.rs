//! Connections that break, stall, drip or return garbage, and the outcomes that callers see.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use tidegate_testkit::{Fault, FaultProxy};

use super::*;

/// A process that was suspended finds replies and passed deadlines together. A reply that is
/// already in the socket has arrived in time.
#[test]
fn a_reply_that_arrived_while_the_process_was_suspended_counts() {
    let server = Server::start(Flavor::Redis7);
    // With one thread it is certain who is polled first.
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let all = runtime.spawn(async move {
        let (router, script) = (router(&server.url()), incr());
        until_applied(&router, &script).await;
        for number in 0..10 {
            let (own, script, before) = (router.clone(), script.clone(), count(&server));
            let (began, within) = (Instant::now(), Duration::from_millis(5));
            let waiting =
                tokio::spawn(async move { call(&own, &script, &number.to_string(), within).await });
            // The caller, then the driver.
            for _ in 0..4 {
                tokio::task::yield_now().await;
            }
            // From here until there is a reply this thread does nothing else.
            tidegate_testkit::wait_until("the server has answered, too late", PATIENCE, || {
                count(&server) > before && began.elapsed() > 2 * within
            });
            assert_eq!(waiting.await.unwrap(), Outcome::Applied(bulk(&number.to_string())));
        }
        assert_eq!(router.counters().timeouts, 0);
    });
    runtime.block_on(all).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stalled_server_costs_a_call_its_deadline_and_no_more() {
    for flavor in Flavor::ALL {
        let server = Server::start(flavor);
        let router = router(&server.url());
        let script = incr();
        until_applied(&router, &script).await;
        server.stop_signal();
        for _ in 0..5 {
            let start = Instant::now();
            let failure = unknown(call(&router, &script, "late", Duration::from_millis(20)).await);
            assert_eq!(failure.kind(), FailureKind::Timeout, "{flavor}: {failure}");
            assert!(start.elapsed() >= Duration::from_millis(20), "{flavor}");
            assert!(
                start.elapsed() < Duration::from_millis(500),
                "{flavor}: {:?}",
                start.elapsed()
            );
        }
        // After a second of silence the connection is closed; then calls fail without a wait.
        until_async("calls fail immediately", || async {
            let start = Instant::now();
            let outcome = call(&router, &script, "late", Duration::from_secs(5)).await;
            matches!(outcome, Outcome::NotApplied(_))
                && start.elapsed() < Duration::from_millis(100)
        })
        .await;
        server.continue_signal();
        let back = until_applied(&router, &script).await;
        assert!(back < Duration::from_secs(2), "{flavor}: back after {back:?}");
        assert!(router.counters().timeouts >= 5);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_short_stall_keeps_the_connection_and_late_replies_are_dropped() {
    let server = Server::start(Flavor::Redis7);
    let router = patient(&server.url());
    let script = incr();
    until_applied(&router, &script).await;
    let before = count(&server);
    server.stop_signal();
    let mut sent = 0;
    for number in 0..100 {
        match call(&router, &script, &format!("late {number}"), Duration::from_millis(1)).await {
            Outcome::Unknown(_) => sent += 1,
            // On a busy machine a millisecond may pass before anything is done.
            other => assert_eq!(not_applied(other).kind(), FailureKind::Timeout),
        }
    }
    server.continue_signal();
    for number in 0..100 {
        let nonce = format!("own {number}");
        assert_eq!(call(&router, &script, &nonce, PATIENCE).await, Outcome::Applied(bulk(&nonce)));
    }
    assert_eq!(
        count(&server),
        before + sent + 100,
        "what was unknown was applied, once, and nothing else"
    );
    let counters = router.counters();
    assert_eq!((counters.dropped_replies, counters.timeouts, counters.connects), (sent, 100, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_above_the_bound_fail_immediately() {
    let server = Server::start(Flavor::Redis7);
    let settings = Settings { max_in_flight: 50, silence: PATIENCE, ..Settings::default() };
    let router = Router::new(parsed(&server.url()), settings).unwrap();
    let script = incr();
    until_applied(&router, &script).await;
    server.stop_signal();
    let waiting: Vec<_> = (0..50)
        .map(|number| {
            let (router, script) = (router.clone(), script.clone());
            tokio::spawn(async move { call(&router, &script, &number.to_string(), PATIENCE).await })
        })
        .collect();
    until_async("all entries are taken", || async {
        let start = Instant::now();
        let outcome = call(&router, &script, "one more", Duration::from_millis(1)).await;
        matches!(outcome, Outcome::NotApplied(failure) if failure.kind() == FailureKind::Overloaded)
            && start.elapsed() < Duration::from_millis(100)
    })
    .await;
    server.continue_signal();
    for (number, task) in waiting.into_iter().enumerate() {
        match task.await.unwrap() {
            Outcome::Applied(value) => assert_eq!(value, bulk(&number.to_string())),
            // One of the calls above took its entry.
            other => assert_eq!(not_applied(other).kind(), FailureKind::Overloaded),
        }
    }
    until_applied(&router, &script).await;
    assert!(router.counters().overloads > 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unwritten_call_is_not_sent_after_its_deadline() {
    let server = Server::start(Flavor::Redis7);
    let proxy = FaultProxy::start(&server);
    let router = patient(proxy.url());
    let script = Script::new("redis.call('INCR', KEYS[1]) return 1");
    until_applied(&router, &script).await;
    let before = count(&server);
    // The proxy reads no further, the socket fills up, and what does not fit stays here.
    proxy.set(Fault::StallRequests);
    let big = "x".repeat(64 << 10);
    let outcomes = futures_of(0..200, |_| {
        let (router, script, big) = (router.clone(), script.clone(), big.clone());
        async move { call(&router, &script, &big, Duration::from_millis(500)).await }
    })
    .await;
    let unsent =
        outcomes.iter().filter(|outcome| matches!(outcome, Outcome::NotApplied(_))).count();
    let sent = outcomes.iter().filter(|outcome| matches!(outcome, Outcome::Unknown(_))).count();
    assert_eq!(sent + unsent, 200);
    assert!(unsent > 20 && sent > 20, "{sent} sent, {unsent} not");
    proxy.set(Fault::Pass);
    until_applied(&router, &script).await;
    assert_eq!(count(&server), before + sent as u64 + 1, "exactly what was unknown was applied");
    assert_eq!(router.counters().connects, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broken_connection_fails_its_call_immediately_and_nothing_is_sent_twice() {
    for (fault, applied) in [
        (Fault::CutBeforeRequest, false),
        (Fault::CutAfterRequest, true),
        (Fault::CutInReply { bytes: 1 }, true),
        (Fault::CutInReply { bytes: 5 }, true),
    ] {
        let server = Server::start(Flavor::Redis7);
        let proxy = FaultProxy::start(&server);
        let router = router(proxy.url());
        let script = incr();
        until_applied(&router, &script).await;
        let before = count(&server);
        proxy.once(fault);
        let start = Instant::now();
        let failure = unknown(call(&router, &script, "cut", PATIENCE).await);
        assert_eq!(failure.kind(), FailureKind::Disconnected, "{fault:?}: {failure}");
        assert!(start.elapsed() < Duration::from_secs(1), "{fault:?}: {:?}", start.elapsed());
        assert_eq!(count(&server), before + u64::from(applied), "{fault:?}");
        until_applied(&router, &script).await;
        assert_eq!(router.counters().retries, 0, "{fault:?}: what is unknown is not sent again");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broken_connection_fails_all_its_calls_immediately() {
    let server = Server::start(Flavor::Redis7);
    let proxy = FaultProxy::start(&server);
    let router = patient(proxy.url());
    let script = incr();
    until_applied(&router, &script).await;
    proxy.set(Fault::StallReplies);
    let before = count(&server);
    let waiting: Vec<_> = (0..200)
        .map(|number| {
            let (router, script) = (router.clone(), script.clone());
            tokio::spawn(async move { call(&router, &script, &number.to_string(), PATIENCE).await })
        })
        .collect();
    until("all were applied", || count(&server) == before + 200).await;
    let start = Instant::now();
    proxy.set(Fault::Pass);
    proxy.set(Fault::StallReplies);
    proxy.cut();
    for task in waiting {
        match task.await.unwrap() {
            Outcome::Unknown(failure) => assert_eq!(failure.kind(), FailureKind::Disconnected),
            Outcome::Applied(_) => {}
            other => panic!("{other:?}"),
        }
    }
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
    proxy.set(Fault::Pass);
    until_applied(&router, &script).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn lost_replies_are_unknown_and_not_replayed() {
    let server = Server::start(Flavor::Redis7);
    let proxy = FaultProxy::start(&server);
    let router = router(proxy.url());
    let script = incr();
    until_applied(&router, &script).await;
    let before = count(&server);
    proxy.set(Fault::SwallowReplies);
    for _ in 0..10 {
        unknown(call(&router, &script, "lost", Duration::from_millis(20)).await);
    }
    until("all were applied", || count(&server) == before + 10).await;
    // A lost reply must not be replaced by the next one: the connection is closed after `silence`.
    until("the silence is noticed", || proxy.counts().connections > 1).await;
    proxy.set(Fault::Pass);
    proxy.cut();
    until_applied(&router, &script).await;
    for number in 0..20 {
        let nonce = format!("own {number}");
        assert_eq!(call(&router, &script, &nonce, PATIENCE).await, Outcome::Applied(bulk(&nonce)));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn replies_that_arrive_byte_by_byte_are_complete() {
    let server = Server::start(Flavor::Redis7);
    let proxy = FaultProxy::start(&server);
    let router = router(proxy.url());
    let script = echo();
    proxy.set(Fault::Drip { bytes: 1, pause: Duration::from_micros(100) });
    for length in [0, 1, 10, 1000] {
        echoes(&router, &script, &"x".repeat(length)).await;
    }
    // Too slow for the deadline: later replies still reach the right calls.
    proxy.set(Fault::Drip { bytes: 1, pause: Duration::from_millis(5) });
    unknown(
        router
            .eval(
                &script,
                0,
                NO_KEYS,
                &["y".repeat(100)],
                Instant::now() + Duration::from_millis(50),
            )
            .await,
    );
    proxy.set(Fault::Pass);
    echoes(&router, &script, "after").await;
    assert_eq!(router.counters().protocol_errors, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn garbage_ends_the_connection_and_is_no_reply() {
    let server = Server::start(Flavor::Redis7);
    for seed in 0..20 {
        let proxy = FaultProxy::with_seed(&server, seed);
        let router = router(proxy.url());
        let script = incr();
        until_applied(&router, &script).await;
        proxy.once(Fault::Garbage);
        let failure = unknown(call(&router, &script, "n", PATIENCE).await);
        assert_eq!(failure.kind(), FailureKind::Protocol, "seed {seed}: {failure}");
        until_applied(&router, &script).await;
        assert_eq!(router.counters().protocol_errors, 1, "seed {seed}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn no_mix_of_faults_gives_a_call_the_wrong_reply() {
    let server = Server::start(Flavor::Valkey9);
    let proxy = FaultProxy::with_seed(&server, 7);
    let router = router(proxy.url());
    let script = incr();
    until_applied(&router, &script).await;
    let before = count(&server);
    let (applied, unknown) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let done = Arc::new(AtomicBool::new(false));
    let callers: Vec<_> = (0..16)
        .map(|caller| {
            let (router, script) = (router.clone(), script.clone());
            let (applied, unknown, done) =
                (Arc::clone(&applied), Arc::clone(&unknown), Arc::clone(&done));
            tokio::spawn(async move {
                let mut number = 0;
                while !done.load(Ordering::Relaxed) {
                    number += 1;
                    let nonce = format!("{caller}:{number}");
                    match call(&router, &script, &nonce, Duration::from_millis(30)).await {
                        Outcome::Applied(value) => {
                            assert_eq!(value, bulk(&nonce));
                            applied.fetch_add(1, Ordering::Relaxed);
                        }
                        Outcome::Unknown(_) => {
                            unknown.fetch_add(1, Ordering::Relaxed);
                        }
                        Outcome::NotApplied(_) => {
                            tokio::time::sleep(Duration::from_millis(2)).await
                        }
                    }
                }
            })
        })
        .collect();
    let faults = [
        Fault::CutAfterRequest,
        Fault::CutInReply { bytes: 7 },
        Fault::Garbage,
        Fault::Drip { bytes: 3, pause: Duration::from_micros(200) },
        Fault::CutBeforeRequest,
    ];
    for fault in faults.into_iter().cycle().take(15) {
        let enough = applied.load(Ordering::Relaxed) + 100;
        proxy.sometimes(3, fault);
        until("some calls were applied", || applied.load(Ordering::Relaxed) >= enough).await;
    }
    proxy.set(Fault::Pass);
    done.store(true, Ordering::Relaxed);
    for caller in callers {
        caller.await.unwrap();
    }
    // Applied calls ran, and calls that were not applied did not.
    let (applied, unknown) = (applied.load(Ordering::Relaxed), unknown.load(Ordering::Relaxed));
    let done = count(&server) - before;
    assert!(
        (applied..=applied + unknown).contains(&done),
        "{applied} applied, {unknown} unknown, {done} done"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn replies_beyond_their_bound_end_the_connection() {
    let server = Server::start(Flavor::Redis7);
    let router = router(&server.url());
    let long = |length: usize| Script::new(format!("return string.rep('x', {length})"));
    let run = async |script: &Script| router.eval(script, 0, NO_KEYS, NO_KEYS, soon()).await;
    assert!(matches!(run(&long(65_000)).await, Outcome::Applied(_)));
    let failure = unknown(run(&long(66_000)).await);
    assert_eq!(failure.kind(), FailureKind::Protocol, "{failure}");
    until_async("calls are answered again", || async {
        matches!(run(&long(1)).await, Outcome::Applied(_))
    })
    .await;

    // Commands may have more.
    server.command(&["SET", "big", &"x".repeat(1_000_000)]);
    let Outcome::Applied(value) = command(&router, &["GET", "big"]).await else { panic!() };
    assert_eq!(value.as_bytes().unwrap().len(), 1_000_000);
    server.command(&["SET", "big", &"x".repeat(1_100_000)]);
    assert_eq!(unknown(command(&router, &["GET", "big"]).await).kind(), FailureKind::Protocol);
    assert_eq!(router.counters().protocol_errors, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_idle_connection_is_replaced_before_the_next_call() {
    let server = Server::start(Flavor::Redis7);
    let proxy = FaultProxy::start(&server);
    let settings = Settings {
        silence: Duration::from_millis(200),
        ping_every: Duration::from_millis(200),
        ..Settings::default()
    };
    let router = Router::new(parsed(proxy.url()), settings).unwrap();
    until_applied(&router, &incr()).await;
    proxy.set(Fault::SwallowReplies);
    // Without calls, the PING gets no reply and the connection is closed.
    until("it connects again", || proxy.counts().connections > 1).await;
    proxy.set(Fault::Pass);
    until_applied(&router, &incr()).await;
}
