//! Servers that die, start late, have no address, or flush their scripts.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tidegate_testkit::{Fault, FaultProxy};

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_server_fails_calls_immediately_and_is_found_again_soon() {
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
                assert!(
                    start.elapsed() < Duration::from_secs(1),
                    "{flavor}: {:?}",
                    start.elapsed()
                );
                matches!(
                    outcome,
                    Outcome::NotApplied(failure) if failure.kind() == FailureKind::Refused
                )
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
async fn a_router_starts_without_its_server_and_connects_when_it_starts() {
    let server = Server::start(Flavor::Redis7);
    server.kill();
    let router = router(&server.url());
    let failure = not_applied(call(&router, &incr(), "x", PATIENCE).await);
    assert_eq!(failure.kind(), FailureKind::Refused, "{failure}");
    assert!(failure.to_string().starts_with("no connection to 127.0.0.1:"), "{failure}");
    server.restart();
    // Without a call, the driver connects: the next call is applied.
    until("it is connected", || router.counters().connects == 1).await;
    assert!(matches!(call(&router, &incr(), "x", PATIENCE).await, Outcome::Applied(_)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_without_an_address_is_unresolved() {
    let router = router("redis://no-such-host.invalid");
    let failure = not_applied(call(&router, &incr(), "x", PATIENCE).await);
    assert!(matches!(failure.kind(), FailureKind::Unresolved | FailureKind::Timeout), "{failure}");
}

#[tokio::test(flavor = "multi_thread")]
async fn flushed_scripts_fail_no_call_and_are_loaded_once() {
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
        assert!(loads <= 30, "{flavor}: {loads} loads for 10 flushes");
    }
}

/// A call that gets NOSCRIPT while another loads the script on the same connection retries
/// immediately, behind the load: two round trips in all, not three.
#[tokio::test(flavor = "multi_thread")]
async fn noscript_is_retried_without_waiting_for_the_load() {
    const TRIP: Duration = Duration::from_millis(100);
    let server = Server::start(Flavor::Redis7);
    let proxy = FaultProxy::start(&server);
    let (router, script) = (router(proxy.url()), incr());
    until_applied(&router, &script).await;
    proxy.set(Fault::Delay { request: Duration::ZERO, reply: TRIP, jitter: Duration::ZERO });
    let mut took = Vec::new();
    // A busy machine makes some rounds slow.
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
