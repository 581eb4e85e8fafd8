//! Connections that break, stall, lie or drip; servers that die; and what callers are told.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use tidegate_testkit::{Fault, FaultProxy};

use super::*;

fn incr() -> Script {
    Script::new("redis.call('INCR', KEYS[1]) return ARGV[1]")
}

async fn call(router: &Router, script: &Script, nonce: &str, within: Duration) -> Outcome {
    router.eval(script, 0, &["tg:n"], &[nonce], Instant::now() + within).await
}

async fn until_applied(router: &Router, script: &Script) -> Duration {
    let start = Instant::now();
    until_async("calls are answered again", || async {
        matches!(call(router, script, "x", PATIENCE).await, Outcome::Applied(_))
    })
    .await;
    start.elapsed()
}

fn count(server: &Server) -> u64 {
    match server.command(&["GET", "tg:n"]) {
        tidegate_testkit::Reply::Text(text) => text.parse().unwrap(),
        _ => 0,
    }
}

/// A process that is not let run for a while finds answers and passed deadlines together. What lies
/// in the socket has come in time.
#[test]
fn an_answer_that_came_while_the_process_did_not_run_is_an_answer() {
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
            // The caller, then the one who writes.
            for _ in 0..4 {
                tokio::task::yield_now().await;
            }
            // From here until there is an answer this thread does nothing else.
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
        // After a second of silence the connection is given up; then nobody waits any more.
        until_async("callers are refused at once", || async {
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
async fn a_short_stall_is_survived_and_late_replies_are_nobodys() {
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
async fn more_calls_than_may_wait_are_refused_at_once() {
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
    until_async("all places are taken", || async {
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
            // A place was taken by one of those above.
            other => assert_eq!(not_applied(other).kind(), FailureKind::Overloaded),
        }
    }
    until_applied(&router, &script).await;
    assert!(router.counters().overloads > 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_not_handed_to_the_socket_is_never_sent_after_it_was_given_up() {
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
async fn a_connection_that_breaks_is_told_at_once_and_nothing_is_sent_twice() {
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
async fn everybody_on_a_connection_that_breaks_is_told_at_once() {
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
    // The connection is out of step: a reply that is missing must not be made up for by the next.
    // It is given up as soon as it has been silent for too long.
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
async fn replies_that_come_in_crumbs_are_whole() {
    let server = Server::start(Flavor::Redis7);
    let proxy = FaultProxy::start(&server);
    let router = router(proxy.url());
    let script = echo();
    proxy.set(Fault::Drip { bytes: 1, pause: Duration::from_micros(100) });
    for length in [0, 1, 10, 1000] {
        echoes(&router, &script, &"x".repeat(length)).await;
    }
    // Too slow for the deadline: given up, and later replies are still the right ones.
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
async fn garbage_ends_the_connection_and_nobody_believes_it() {
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
async fn a_network_that_does_everything_at_once_never_gives_a_caller_the_wrong_reply() {
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
        until("some calls came through", || applied.load(Ordering::Relaxed) >= enough).await;
    }
    proxy.set(Fault::Pass);
    done.store(true, Ordering::Relaxed);
    for caller in callers {
        caller.await.unwrap();
    }
    // What was answered was done, and what was not applied was not.
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
async fn a_server_that_dies_is_told_at_once_and_found_again_soon() {
    for flavor in Flavor::ALL {
        let server = Server::start(flavor);
        let router = router(&server.url());
        let script = incr();
        until_applied(&router, &script).await;
        for _ in 0..3 {
            server.kill();
            until_async("the death is noticed", || async {
                let start = Instant::now();
                let outcome = call(&router, &script, "x", PATIENCE).await;
                assert!(start.elapsed() < Duration::from_secs(1), "{flavor}: {:?}", start.elapsed());
                matches!(outcome, Outcome::NotApplied(failure) if failure.kind() == FailureKind::Refused)
            })
            .await;
            // Many calls, few attempts.
            let (before, start) = (router.counters().failed_connects, Instant::now());
            for _ in 0..20_000 {
                not_applied(call(&router, &script, "x", PATIENCE).await);
            }
            let attempts = router.counters().failed_connects - before;
            let most = 8 + start.elapsed().as_millis() / 10;
            assert!(
                u128::from(attempts) <= most,
                "{flavor}: {attempts} attempts in {:?}",
                start.elapsed()
            );
            server.restart();
            let back = until_applied(&router, &script).await;
            assert!(back < Duration::from_secs(1), "{flavor}: back after {back:?}");
        }
        assert_eq!(router.counters().reconnects, 3, "{flavor}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_router_starts_without_its_server_and_finds_it_when_it_comes() {
    let server = Server::start(Flavor::Redis7);
    server.kill();
    let router = router(&server.url());
    let failure = not_applied(call(&router, &incr(), "x", PATIENCE).await);
    assert_eq!(failure.kind(), FailureKind::Refused, "{failure}");
    assert!(failure.to_string().starts_with("no connection to 127.0.0.1:"), "{failure}");
    server.restart();
    // Nobody asks, and yet it is found: the first call after is answered.
    until("it is connected", || router.counters().connects == 1).await;
    assert!(matches!(call(&router, &incr(), "x", PATIENCE).await, Outcome::Applied(_)));
}

#[tokio::test(flavor = "multi_thread")]
async fn names_that_have_no_address_are_told() {
    let router = router("redis://no-such-host.invalid");
    let failure = not_applied(call(&router, &incr(), "x", PATIENCE).await);
    assert!(matches!(failure.kind(), FailureKind::Unresolved | FailureKind::Timeout), "{failure}");
}

#[tokio::test(flavor = "multi_thread")]
async fn forgotten_scripts_fail_no_call_and_are_loaded_once() {
    for flavor in Flavor::ALL {
        let server = Server::start(flavor);
        let router = router(&server.url());
        let script = incr();
        until_applied(&router, &script).await;
        let before = count(&server);
        let done = Arc::new(AtomicBool::new(false));
        let callers: Vec<_> = (0..64)
            .map(|caller| {
                let (router, script, done) = (router.clone(), script.clone(), Arc::clone(&done));
                tokio::spawn(async move {
                    let mut calls = 0_u64;
                    while !done.load(Ordering::Relaxed) {
                        calls += 1;
                        let nonce = format!("{caller}:{calls}");
                        assert_eq!(
                            call(&router, &script, &nonce, PATIENCE).await,
                            Outcome::Applied(bulk(&nonce))
                        );
                    }
                    calls
                })
            })
            .collect();
        let loads = router.counters().script_loads;
        for round in 1..=10 {
            server.command(&["SCRIPT", "FLUSH"]);
            until("it was loaded again", || router.counters().script_loads >= loads + round).await;
        }
        done.store(true, Ordering::Relaxed);
        let mut calls = 0;
        for caller in callers {
            calls += caller.await.unwrap();
        }
        assert_eq!(count(&server), before + calls, "{flavor}: every call was applied once");
        let loads = router.counters().script_loads - loads;
        assert!(loads <= 30, "{flavor}: {loads} loads for 10 times forgotten");
    }
}

/// Whoever finds no script while another is loading it over the same connection asks again at once,
/// and is answered behind the script: two trips in all, not three.
#[tokio::test(flavor = "multi_thread")]
async fn who_finds_no_script_does_not_wait_for_the_end_of_its_load() {
    const TRIP: Duration = Duration::from_millis(100);
    let server = Server::start(Flavor::Redis7);
    let proxy = FaultProxy::start(&server);
    let (router, script) = (router(proxy.url()), incr());
    until_applied(&router, &script).await;
    proxy.set(Fault::Delay { request: Duration::ZERO, reply: TRIP, jitter: Duration::ZERO });
    let mut took = Vec::new();
    // A machine that has other things to do makes some of them slow.
    while took.iter().all(|took| *took >= TRIP * 3) {
        assert!(took.len() < 20, "{took:?}: two trips are {:?}", TRIP * 2);
        server.command(&["SCRIPT", "FLUSH"]);
        let began = Instant::now();
        let calls: Vec<_> = (0..10)
            .map(|number: u32| {
                let (router, script) = (router.clone(), script.clone());
                tokio::spawn(
                    async move { call(&router, &script, &number.to_string(), PATIENCE).await },
                )
            })
            .collect();
        for (number, call) in calls.into_iter().enumerate() {
            assert_eq!(call.await.unwrap(), Outcome::Applied(bulk(&number.to_string())));
        }
        took.push(began.elapsed());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_connection_that_was_lost_is_noticed_before_the_next_call() {
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
    // Nobody calls. The question goes unanswered, and the connection is given up.
    until("it connects again", || proxy.counts().connections > 1).await;
    proxy.set(Fault::Pass);
    until_applied(&router, &incr()).await;
}
