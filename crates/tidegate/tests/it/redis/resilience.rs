//! The resilience layer over real servers that are stopped, killed and slowed down.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tidegate::redis::Redis;
use tidegate::resilience::{BreakerState, Policy, Resilient, SyncMode};
use tidegate::{Check, Limiter, Source, Store};
use tidegate_testkit::{Cluster, Fault, FaultProxy, Flavor, Reply, Server, wait_until};

use super::cluster::{one_per_master, slot_of};
use super::{assert_all_expire, limits, runtime};
use crate::dropped::every_operation;

pub(super) const BOUND: Duration = Duration::from_secs(20);

/// A node in front of this server, with a longer deadline than usual for a busy machine.
pub(super) async fn node(server: &Server) -> Resilient {
    patient_node(server, Duration::from_millis(50)).await
}

pub(super) async fn patient_node(server: &Server, deadline: Duration) -> Resilient {
    let redis = Redis::builder(server.url().parse().unwrap()).timeout(deadline).build().unwrap();
    redis.prepare().await.unwrap();
    Resilient::builder(redis).deadline(deadline).nodes(2).build()
}

/// Checks without a pause until a decision has this source; returns how many it took.
pub(super) fn ask_until(
    runtime: &tokio::runtime::Runtime,
    resilient: &Resilient,
    source: Source,
) -> u64 {
    let limits = limits("1000000/s");
    let mut asked = 0;
    wait_until(source.name(), BOUND, || {
        asked += 1;
        let check = Check::new().charge("k", &limits, 1);
        let decision =
            runtime.block_on(resilient.decide(&check)).expect("there is always an answer");
        assert!(decision.allowed());
        decision.source() == source
    });
    asked
}

#[test]
fn a_stopped_server_is_replaced_by_the_fallback_and_found_again() {
    let server = Server::start(Flavor::Valkey9);
    let runtime = runtime();
    let resilient = runtime.block_on(node(&server));
    ask_until(&runtime, &resilient, Source::Store);
    for _ in 0..2 {
        server.stop_signal();
        ask_until(&runtime, &resilient, Source::Fallback);
        wait_until("the breaker is open", BOUND, || {
            ask_until(&runtime, &resilient, Source::Fallback);
            resilient.stats().breaker == BreakerState::Open
        });
        server.continue_signal();
        ask_until(&runtime, &resilient, Source::Store);
    }
    let stats = resilient.stats();
    assert_eq!((stats.breaker, stats.opened, stats.closed), (BreakerState::Closed, 2, 2));
}

#[test]
fn a_killed_server_is_replaced_by_the_fallback_and_found_again() {
    let server = Server::start(Flavor::Redis7);
    let runtime = runtime();
    let resilient = runtime.block_on(node(&server));
    ask_until(&runtime, &resilient, Source::Store);
    server.kill();
    ask_until(&runtime, &resilient, Source::Fallback);
    wait_until("the breaker is open", BOUND, || {
        ask_until(&runtime, &resilient, Source::Fallback);
        resilient.stats().breaker == BreakerState::Open
    });
    server.restart();
    ask_until(&runtime, &resilient, Source::Store);
}

#[test]
fn leases_and_what_is_charged_afterwards_add_up_in_a_real_server() {
    for flavor in [Flavor::Redis62, Flavor::Valkey9] {
        let server = Server::start(flavor);
        let runtime = runtime();
        let resilient = runtime.block_on(patient_node(&server, Duration::from_secs(10)));
        for (sync, limits) in
            [(SyncMode::Lease, limits("100000/h window")), (SyncMode::Async, limits("100000/h"))]
        {
            let policy = Policy { sync, ..Policy::default() };
            let (mut passed, mut here) = (0, 0);
            for _ in 0..3000 {
                let check = Check::new().policy(policy).charge("k", &limits, 1);
                let decision = runtime.block_on(resilient.decide(&check)).unwrap();
                assert_ne!(decision.source(), Source::Fallback);
                passed += u64::from(decision.allowed());
                here += u64::from(decision.source() == Source::Local);
            }
            assert_eq!(passed, 3000);
            assert!(here > 2000, "{sync:?}: only {here} were decided here");
            // No other window begins in between; a bucket refills a little.
            wait_until("everything is charged or given back", BOUND, || {
                let stats = resilient.stats();
                let gone = stats.lease_units_spent
                    + stats.lease_units_returned
                    + stats.lease_units_expired;
                stats.lease_units_granted == gone && stats.unsynced_units == 0
            });
            let peek = Check::of(tidegate::Op::Peek).charge("k", &limits, 1);
            let left = runtime.block_on(resilient.decide(&peek)).unwrap().remaining();
            assert!((97_000..=97_200).contains(&left), "{sync:?}: {left} are left");
        }
        runtime.block_on(resilient.close());
        assert_all_expire(&server);
    }
}

/// One server of a cluster does not answer: its keys are decided locally, all others as exactly and
/// as fast as before.
#[test]
fn an_unresponsive_server_of_a_cluster_degrades_only_its_keys() {
    let cluster = Cluster::start(Flavor::Valkey9);
    let runtime = runtime();
    let limits = limits("1000000/d window");
    let deadline = Duration::from_millis(50);
    let builder = Redis::builder(cluster.url().parse().unwrap()).timeout(deadline);
    let redis = runtime.block_on(async { builder.build() }).unwrap();
    runtime.block_on(redis.prepare()).unwrap();
    let keys = runtime.block_on(one_per_master(&cluster, &redis, &limits, "away"));
    let resilient =
        runtime.block_on(async { Resilient::builder(redis).deadline(deadline).nodes(1).build() });
    let ask = |key: &str| {
        let check = Check::new().charge(key, &limits, 1);
        runtime.block_on(resilient.decide(&check)).expect("there is always an answer").source()
    };
    wait_until("all answer", BOUND, || keys.iter().all(|key| ask(key) == Source::Store));
    let silent = cluster.master_of(slot_of(&cluster, &keys[0]));
    silent.stop_signal();
    wait_until("one is unavailable", BOUND, || {
        let _ = (ask(&keys[0]), ask(&keys[1]), ask(&keys[2]));
        resilient.stats().breaker == BreakerState::Open
    });
    let others = (0..50)
        .filter(|_| ask(&keys[1]) == Source::Store && ask(&keys[2]) == Source::Store)
        .count();
    assert!(others >= 45, "the others answered {others} of 50 times");
    silent.continue_signal();
    wait_until("all answer again", BOUND, || keys.iter().all(|key| ask(key) == Source::Store));
}

/// A server that is busy with an endless script answers BUSY, but only sometimes: it is not called
/// until that ends.
#[test]
fn a_busy_server_is_replaced_by_the_fallback_and_found_again() {
    let server = Server::builder(Flavor::Redis7).arg("--busy-reply-threshold", "10").start();
    let runtime = runtime();
    let resilient = runtime.block_on(node(&server));
    ask_until(&runtime, &resilient, Source::Store);
    let mut client = server.client().unwrap();
    let endless = std::thread::spawn(move || client.command(&["EVAL", "while true do end", "0"]));
    wait_until("it says that it is busy", BOUND, || server.command(&["PING"]).is_error());
    wait_until("the breaker is open", BOUND, || {
        ask_until(&runtime, &resilient, Source::Fallback);
        resilient.stats().breaker == BreakerState::Open
    });
    let calls = resilient.stats().calls;
    (0..100).for_each(|_| assert_eq!(ask_until(&runtime, &resilient, Source::Fallback), 1));
    assert_eq!(resilient.stats().calls, calls, "only the probe calls the store");
    assert_eq!(server.command(&["SCRIPT", "KILL"]), Reply::Text("OK".into()));
    assert!(endless.join().unwrap().unwrap().is_error());
    ask_until(&runtime, &resilient, Source::Store);
}

/// Whatever the network does, every check has an answer, the store never allows more than the
/// limit, and all checks are exact again when the network works.
#[test]
fn whatever_the_network_does_there_is_an_answer() {
    const LIMIT: u64 = 400;
    let server = Server::start(Flavor::Redis7);
    let late = |ms| Fault::Delay {
        request: Duration::ZERO,
        reply: Duration::from_millis(ms),
        jitter: Duration::ZERO,
    };
    let faults = [
        late(100),
        Fault::StallRequests,
        Fault::StallReplies,
        Fault::SwallowReplies,
        Fault::CutBeforeRequest,
        Fault::CutAfterRequest,
        Fault::CutInReply { bytes: 3 },
        Fault::Drip { bytes: 1, pause: Duration::from_millis(20) },
        Fault::Garbage,
        Fault::Refuse,
    ];
    let runtime = runtime();
    for sync in [SyncMode::Direct, SyncMode::Lease, SyncMode::Async] {
        let proxy = FaultProxy::start(&server);
        let builder =
            Redis::builder(proxy.url().parse().unwrap()).timeout(Duration::from_millis(20));
        let redis = runtime.block_on(async { builder.namespace(sync.name()).build() }).unwrap();
        runtime.block_on(redis.prepare()).unwrap();
        let resilient = runtime.block_on(async {
            Resilient::builder(redis).deadline(Duration::from_millis(20)).nodes(1).build()
        });
        let limits = limits(&format!("{LIMIT}/d window"));
        let policy = Policy { sync, ..Policy::default() };
        let (mut answered, mut alone) = (0, 0);
        let mut ask = || {
            let check = Check::new().policy(policy).charge("k", &limits, 1);
            let decision =
                runtime.block_on(resilient.decide(&check)).expect("there is always an answer");
            if decision.allowed() {
                *(if decision.source() == Source::Fallback {
                    &mut alone
                } else {
                    &mut answered
                }) += 1;
            }
            decision.source()
        };
        for fault in faults {
            (0..20).for_each(|_| _ = ask());
            proxy.set(fault);
            (0..15).for_each(|_| _ = ask());
            proxy.set(Fault::Pass);
            proxy.cut();
            wait_until("it answers again", BOUND, || ask() != Source::Fallback);
        }
        assert!(answered <= LIMIT, "{sync:?}: the store let {answered} pass");
        assert!(alone <= LIMIT, "{sync:?}: this node alone let {alone} pass");
        runtime.block_on(resilient.close());
    }
    assert_all_expire(&server);
}

/// A node that was suspended for longer than its deadline accepts the replies that arrived
/// meanwhile.
#[test]
fn a_suspended_process_does_not_take_the_store_for_unavailable() {
    let server = Server::start(Flavor::Redis7);
    // With one thread it is certain who is polled first.
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let resilient = runtime.block_on(patient_node(&server, tidegate::resilience::DEFAULT_DEADLINE));
    ask_until(&runtime, &resilient, Source::Store);
    let before = resilient.stats();
    let own = resilient.clone();
    let all = runtime.spawn(async move {
        let scripts = |server: &Server| {
            let stats = server.command(&["INFO", "commandstats"]);
            let calls = stats
                .text()
                .split("cmdstat_evalsha:calls=")
                .nth(1)
                .and_then(|rest| rest.split(',').next());
            calls.map_or(0, |calls| calls.parse::<u64>().unwrap())
        };
        for number in 0..10 {
            let (resilient, before, began) = (own.clone(), scripts(&server), Instant::now());
            let waiting = tokio::spawn(async move {
                let key = format!("user:{number}");
                resilient
                    .decide(&Check::new().charge(&key, &limits("1000/s"), 1))
                    .await
                    .unwrap()
                    .source()
            });
            // The caller, then the driver.
            for _ in 0..4 {
                tokio::task::yield_now().await;
            }
            // From here until there is a reply this thread does nothing else.
            wait_until("the server has answered, too late", BOUND, || {
                scripts(&server) > before
                    && began.elapsed() > 2 * tidegate::resilience::DEFAULT_DEADLINE
            });
            assert_eq!(waiting.await.unwrap(), Source::Store);
        }
    });
    runtime.block_on(all).unwrap();
    assert_eq!(
        (resilient.stats().misses, resilient.stats().not_called),
        (before.misses, before.not_called)
    );
}

/// A server that is suspended under load and continues: from the first call it decides everything,
/// over new connections, because the old ones had no byte for too long. The deadline is one that a
/// busy machine keeps; `cargo xtask bench resilience` and `cargo xtask faults F1` use the default.
#[test]
fn soon_after_a_stop_the_server_decides_everything_again() {
    /// Per millisecond: so few that all of a deadline may be in flight.
    const AT_ONCE: u64 = 2;
    const ENOUGH: usize = 500;
    let server = Server::start(Flavor::Redis7);
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let resilient = runtime.block_on(patient_node(&server, Duration::from_millis(500)));
    let limits = Arc::new(limits("1000000/s"));
    let (stop, answers) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(Vec::new())));
    let load = runtime.spawn({
        let (resilient, stop, answers) =
            (resilient.clone(), Arc::clone(&stop), Arc::clone(&answers));
        async move {
            let mut tick = tokio::time::interval(Duration::from_millis(1));
            // Checks that a busy machine missed are not made all together.
            tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
            let mut asked = 0_u64;
            while !stop.load(Ordering::Relaxed) {
                tick.tick().await;
                for _ in 0..AT_ONCE {
                    asked += 1;
                    let (resilient, limits, answers) =
                        (resilient.clone(), Arc::clone(&limits), Arc::clone(&answers));
                    tokio::spawn(async move {
                        let (began, key) = (Instant::now(), format!("user:{}", asked % 500));
                        let decision =
                            resilient.decide(&Check::new().charge(&key, &*limits, 1)).await;
                        answers
                            .lock()
                            .unwrap()
                            .push((began, decision.expect("there is always an answer").source()));
                    });
                }
            }
        }
    });
    let by_the_server = |since: Instant| {
        let those = || -> Vec<Source> {
            let answers = answers.lock().unwrap();
            answers.iter().filter(|(began, _)| *began >= since).map(|(_, source)| *source).collect()
        };
        wait_until("many were answered", BOUND, || those().len() >= ENOUGH);
        assert!(those().iter().all(|source| *source == Source::Store), "{:?}", resilient.stats());
    };
    by_the_server(Instant::now());
    server.stop_signal();
    wait_until("the breaker is open", BOUND, || resilient.stats().breaker == BreakerState::Open);
    let open = Instant::now();
    wait_until("it stays open for a while", BOUND, || open.elapsed() > Duration::from_millis(1500));
    server.continue_signal();
    wait_until("it is called again", BOUND, || resilient.stats().breaker == BreakerState::Closed);
    by_the_server(Instant::now());
    stop.store(true, Ordering::Relaxed);
    runtime.block_on(load).unwrap();
}

#[test]
fn every_operation_that_is_dropped_leaves_nothing_behind_in_a_real_server() {
    let server = Server::start(Flavor::Valkey9);
    let runtime = runtime();
    let redis = Redis::builder(server.url().parse().unwrap()).timeout(BOUND);
    let redis = runtime.block_on(async { redis.build() }).unwrap();
    runtime.block_on(redis.prepare()).unwrap();
    let plain = |limits| Limiter::builder(limits).redis(redis.clone()).name("plain").build();
    runtime.block_on(every_operation(plain));
    let resilient = runtime
        .block_on(async { Resilient::builder(redis.clone()).deadline(BOUND).nodes(1).build() });
    runtime.block_on(every_operation(|limits| {
        Limiter::builder(limits).resilient(resilient.clone()).name("near").build()
    }));
    let stats = resilient.stats();
    assert_eq!((stats.in_flight, stats.fallback_allowed, stats.fallback_denied), (0, 0, 0));
    runtime.block_on(resilient.close());
    assert_all_expire(&server);
}
