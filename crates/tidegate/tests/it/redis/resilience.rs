//! What stands before a real server that is stopped, killed and slowed down.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tidegate::redis::{FailureKind, Redis};
use tidegate::resilience::{BreakerState, NodesFrom, Policy, Resilient, SyncMode};
use tidegate::{Check, Limiter, Source, Store};
use tidegate_testkit::{Cluster, Fault, FaultProxy, Flavor, Reply, Server, wait_until};

use super::cluster::{one_per_master, slot_of};
use super::{assert_all_expire, limits, runtime};
use crate::dropped::every_operation;

const BOUND: Duration = Duration::from_secs(20);

/// A node before this server. Its deadline is longer than usual, because the machine of a test may
/// be busy.
async fn node(server: &Server) -> Resilient {
    patient_node(server, Duration::from_millis(50)).await
}

async fn patient_node(server: &Server, deadline: Duration) -> Resilient {
    let redis = Redis::builder(server.url().parse().unwrap()).timeout(deadline).build().unwrap();
    redis.prepare().await.unwrap();
    Resilient::builder(redis).deadline(deadline).nodes(2).build()
}

/// Asks without a pause until the answer comes from there.
fn ask_until(runtime: &tokio::runtime::Runtime, resilient: &Resilient, source: Source) -> u64 {
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
fn a_stopped_server_is_done_without_and_found_again() {
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
fn a_killed_server_is_done_without_and_found_again() {
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

/// A server that takes no writes for now is called each time: it may deny without writing. Its
/// state says so, until it takes writes again.
#[test]
fn a_server_out_of_memory_is_called_and_its_state_is_refused() {
    let server = Server::start(Flavor::Redis7);
    let runtime = runtime();
    let resilient = runtime.block_on(node(&server));
    server.command(&["CONFIG", "SET", "maxmemory", "1"]);
    let limits = limits("1000000/s");
    for _ in 0..50 {
        let check = Check::new().charge("k", &limits, 1);
        let decision = runtime.block_on(resilient.decide(&check)).unwrap();
        assert_eq!((decision.allowed(), decision.source()), (true, Source::Fallback));
    }
    assert_eq!(resilient.stats().opened, 0);
    let state = resilient.status().state;
    assert_eq!(state.name(), "refused");
    assert!(
        state.why().contains("maxmemory") && state.advice().contains("CONFIG SET maxmemory"),
        "{state:?}"
    );
    server.command(&["CONFIG", "SET", "maxmemory", "0"]);
    ask_until(&runtime, &resilient, Source::Store);
    wait_until("the state is healthy", BOUND, || resilient.status().state.is_healthy());
}

/// Every change of the state, with the word for it.
fn states(resilient: &Resilient) -> Arc<Mutex<Vec<String>>> {
    let told = Arc::new(Mutex::new(Vec::new()));
    let own = Arc::clone(&told);
    resilient.on_state(move |status| {
        own.lock().unwrap().push(format!("{}: {}", status.state.name(), status.state.why()))
    });
    told
}

/// The password is rotated under a running node: the breaker opens at the first refusal, one change
/// is told, and all is well when the password is put back.
#[test]
fn a_password_that_was_rotated_is_a_refusal_until_it_is_put_back() {
    let server = Server::builder(Flavor::Redis7).password("first").start();
    let runtime = runtime();
    let resilient = runtime.block_on(node(&server));
    let told = states(&resilient);
    ask_until(&runtime, &resilient, Source::Store);
    let mut admin = server.client().unwrap();
    let ok = |reply: Reply| assert_eq!(reply, Reply::Text("OK".into()));
    ok(admin.command(&["CONFIG", "SET", "requirepass", "second"]).unwrap());
    admin.command(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]).unwrap();
    wait_until("the state is refused", BOUND, || {
        ask_until(&runtime, &resilient, Source::Fallback);
        resilient.status().state.name() == "refused"
    });
    assert!(resilient.status().state.why().contains("WRONGPASS"), "{:?}", resilient.status());
    assert_eq!(resilient.stats().breaker, BreakerState::Open);
    let calls = resilient.stats().calls;
    (0..100).for_each(|_| assert_eq!(ask_until(&runtime, &resilient, Source::Fallback), 1));
    assert_eq!(resilient.stats().calls, calls, "no request pays for it");
    ok(admin.command(&["CONFIG", "SET", "requirepass", "first"]).unwrap());
    ask_until(&runtime, &resilient, Source::Store);
    wait_until("the state is healthy", BOUND, || resilient.status().state.is_healthy());
    let told = told.lock().unwrap().clone();
    let kinds: Vec<&str> = told.iter().filter_map(|line| line.split(':').next()).collect();
    // The connection that was killed may be seen first.
    assert!(
        kinds == ["refused", "healthy"] || kinds == ["unreachable", "refused", "healthy"],
        "{told:?}"
    );
}

/// A replica answers looks and takes no writes: looks do not end the refusal.
#[test]
fn a_server_that_becomes_a_replica_is_a_refusal_until_it_takes_writes() {
    let (server, other) = (Server::start(Flavor::Valkey9), Server::start(Flavor::Valkey9));
    let runtime = runtime();
    let resilient = runtime.block_on(node(&server));
    let told = states(&resilient);
    ask_until(&runtime, &resilient, Source::Store);
    server.command(&["REPLICAOF", "127.0.0.1", &other.port().to_string()]);
    wait_until("the state is refused", BOUND, || {
        ask_until(&runtime, &resilient, Source::Fallback);
        resilient.status().state.name() == "refused"
    });
    let status = resilient.status();
    assert!(status.state.advice().contains("replica"), "{status:?}");
    // Long enough for several probes.
    let probes = server.command(&["INFO", "commandstats"]);
    wait_until("it was probed", BOUND, || server.command(&["INFO", "commandstats"]) != probes);
    assert_eq!(resilient.status().state.name(), "refused");
    server.command(&["REPLICAOF", "NO", "ONE"]);
    ask_until(&runtime, &resilient, Source::Store);
    wait_until("the state is healthy", BOUND, || resilient.status().state.is_healthy());
    let told = told.lock().unwrap().clone();
    assert_eq!(told.iter().filter(|line| line.starts_with("refused")).count(), 1, "{told:?}");
}

/// A node of a cluster of its own, without slots.
fn cluster_of_one() -> Server {
    Server::builder(Flavor::Redis7).arg("--cluster-enabled", "yes").start()
}

fn slots(server: &Server, command: &str, first: &str, last: &str) {
    assert_eq!(
        server.command(&["CLUSTER", command, first, last]),
        Reply::Text("OK".into()),
        "CLUSTER {command}"
    );
}

/// A cluster that does not serve its slots refuses, at the start and later, until they are served.
#[test]
fn a_cluster_that_does_not_serve_its_slots_is_a_refusal_until_it_does() {
    for scheme in ["redis", "redis+cluster"] {
        let server = cluster_of_one();
        let (runtime, deadline) = (runtime(), Duration::from_millis(100));
        let url = format!("{scheme}://127.0.0.1:{}", server.port());
        let redis = runtime
            .block_on(async { Redis::builder(url.parse().unwrap()).timeout(deadline).build() })
            .unwrap();
        let failure = runtime.block_on(redis.prepare()).unwrap_err();
        assert!(failure.is_refusal() && !failure.is_permanent(), "{scheme}: {failure:?}");
        let resilient = runtime
            .block_on(async { Resilient::builder(redis).deadline(deadline).nodes(2).build() });
        let told = states(&resilient);
        let status = runtime.block_on(resilient.probe());
        assert_eq!(status.state.name(), "refused", "{scheme}: {status}");
        assert!(
            status.state.advice().contains("redis-cli --cluster check"),
            "{scheme}: {status:?}"
        );
        (0..20).for_each(|_| _ = ask_until(&runtime, &resilient, Source::Fallback));
        assert_eq!(
            resilient.status().state.name(),
            "refused",
            "{scheme}: every answer is a fallback"
        );
        slots(&server, "ADDSLOTSRANGE", "0", "16383");
        ask_until(&runtime, &resilient, Source::Store);
        wait_until("the state is healthy", BOUND, || resilient.status().state.is_healthy());
        slots(&server, "DELSLOTSRANGE", "0", "9000");
        wait_until("the state is refused", BOUND, || {
            ask_until(&runtime, &resilient, Source::Fallback);
            resilient.status().state.name() == "refused"
        });
        slots(&server, "ADDSLOTSRANGE", "0", "9000");
        ask_until(&runtime, &resilient, Source::Store);
        wait_until("the state is healthy", BOUND, || resilient.status().state.is_healthy());
        let told = told.lock().unwrap().clone();
        let kinds: Vec<&str> = told.iter().filter_map(|line| line.split(':').next()).collect();
        assert_eq!(kinds, ["refused", "healthy", "refused", "healthy"], "{scheme}: {told:?}");
    }
}

/// A command that the script calls was renamed: no decision can ever succeed, and the failure names
/// the command.
#[test]
fn a_server_without_a_command_of_the_script_is_refused_for_good() {
    Flavor::on_all(|flavor| {
        let renamed = |builder: tidegate_testkit::Builder, name: &str| {
            builder.args("--rename-command", &[name, ""])
        };
        let server = ["TIME", "SET"].into_iter().fold(Server::builder(flavor), renamed).start();
        let runtime = runtime();
        let redis = runtime.block_on(async { Redis::new(&server.url()) }).unwrap();
        let failure = runtime.block_on(redis.prepare()).unwrap_err();
        assert_eq!(
            (failure.kind(), failure.is_permanent()),
            (FailureKind::Unsupported, true),
            "{failure:?}"
        );
        assert!(failure.to_string().contains("does not know TIME, SET"), "{failure}");
        assert!(failure.advice().contains("rename-command"), "{}", failure.advice());
        // A node that was not prepared finds it out with its first call.
        let resilient = runtime.block_on(async {
            Resilient::builder(redis).deadline(Duration::from_millis(100)).nodes(1).build()
        });
        ask_until(&runtime, &resilient, Source::Fallback);
        wait_until("the state is refused", BOUND, || {
            ask_until(&runtime, &resilient, Source::Fallback);
            resilient.status().state.name() == "refused"
        });
        assert!(resilient.status().state.is_permanent(), "{:?}", resilient.status());
    });
}

/// Something between this node and its server, as a proxy for Redis without its upstream: takes
/// connections, and answers every script with an error that is on no list.
fn proxy_without_upstream() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let stream = stream.unwrap();
            std::thread::spawn(move || answer_without_upstream(&stream));
        }
    });
    port
}

/// Until the connection ends.
fn answer_without_upstream(stream: &TcpStream) -> Option<()> {
    let mut input = BufReader::new(stream);
    let number = |sign: char, input: &mut BufReader<&TcpStream>| -> Option<usize> {
        let mut line = String::new();
        input.read_line(&mut line).ok()?;
        line.trim_end().strip_prefix(sign)?.parse().ok()
    };
    loop {
        let mut command = Vec::new();
        for _ in 0..number('*', &mut input)? {
            let mut word = vec![0; number('$', &mut input)? + 2];
            input.read_exact(&mut word).ok()?;
            command.push(word);
        }
        let is_script = command[0].starts_with(b"EVAL");
        let reply = if is_script { "-ERR upstream failure\r\n" } else { "+OK\r\n" };
        (&*stream).write_all(reply.as_bytes()).ok()?;
    }
}

/// Every call is answered with an error that is on no list. It may be about one call alone; the
/// layer's own charge fails, too, so the store refuses.
#[test]
fn a_store_that_answers_everything_with_an_error_is_a_refusal() {
    let runtime = runtime();
    let (url, deadline) =
        (format!("redis://127.0.0.1:{}", proxy_without_upstream()), Duration::from_millis(100));
    let redis = runtime
        .block_on(async { Redis::builder(url.parse().unwrap()).timeout(deadline).build() })
        .unwrap();
    let resilient =
        runtime.block_on(async { Resilient::builder(redis).deadline(deadline).nodes(1).build() });
    let told = states(&resilient);
    wait_until("the state is refused", BOUND, || {
        ask_until(&runtime, &resilient, Source::Fallback);
        resilient.status().state.name() == "refused"
    });
    let state = resilient.status().state;
    assert!(state.why().contains("ERR upstream failure") && !state.is_permanent(), "{state:?}");
    (0..20).for_each(|_| _ = ask_until(&runtime, &resilient, Source::Fallback));
    assert_eq!(told.lock().unwrap().len(), 1, "{told:?}");
}

/// A server that takes no writes renews no lease of a node. The nodes are there all the same, and
/// each goes on with its part of the limit.
#[test]
fn nodes_do_not_forget_each_other_while_the_server_takes_no_writes() {
    let server = Server::start(Flavor::Redis7);
    let (runtime, deadline) = (runtime(), Duration::from_millis(200));
    let resilients: Vec<Resilient> = (0..2)
        .map(|_| {
            let redis = Redis::builder(server.url().parse().unwrap()).timeout(deadline);
            runtime.block_on(async {
                Resilient::builder(redis.build().unwrap()).deadline(deadline).build()
            })
        })
        .collect();
    let known = || {
        resilients
            .iter()
            .map(|resilient| (resilient.status().nodes, resilient.status().nodes_from))
            .collect::<Vec<_>>()
    };
    wait_until("both are counted", BOUND, || known() == [(2, NodesFrom::Counted); 2]);
    server.command(&["CONFIG", "SET", "maxmemory", "1"]);
    wait_until("their leases have ended", BOUND, || server.command(&["DBSIZE"]).int() == 0);
    let calls: Vec<u64> = resilients.iter().map(|resilient| resilient.stats().calls).collect();
    // Enough to count twice.
    let have_called = || {
        resilients.iter().zip(&calls).all(|(resilient, calls)| resilient.stats().calls >= calls + 5)
    };
    wait_until("both have called the store", BOUND, have_called);
    assert_eq!(known(), [(2, NodesFrom::Counted); 2]);
    let limits = limits("20/h window");
    let passes = |resilient: &Resilient| {
        let check = Check::new().charge("k", &limits, 1);
        u64::from(runtime.block_on(resilient.decide(&check)).unwrap().allowed())
    };
    let passed: Vec<u64> =
        resilients.iter().map(|resilient| (0..20).map(|_| passes(resilient)).sum()).collect();
    assert_eq!(passed, [10, 10]);
    server.command(&["CONFIG", "SET", "maxmemory", "0"]);
    wait_until("both are healthy", BOUND, || {
        resilients.iter().all(|resilient| resilient.status().state.is_healthy())
    });
    resilients.iter().for_each(|resilient| runtime.block_on(resilient.close()));
}

/// One node of a cluster at a redis:// URL decides about its own slots alone.
#[test]
fn one_node_of_a_cluster_is_refused_before_the_first_decision() {
    let cluster = Cluster::start(Flavor::Valkey9);
    let runtime = runtime();
    for node in &cluster.nodes()[..3] {
        let redis = runtime.block_on(async { Redis::new(&node.url()) }).unwrap();
        let failure = runtime.block_on(redis.prepare()).unwrap_err();
        assert_eq!(
            (failure.kind(), failure.is_permanent()),
            (FailureKind::Topology, true),
            "{failure:?}"
        );
        assert!(failure.advice().contains("redis+cluster://"), "{}", failure.advice());
    }
}

/// What waiting cannot mend is told by [`Redis::prepare`], with what to do.
#[test]
fn what_waiting_cannot_mend_is_told_before_the_first_decision() {
    let server = Server::builder(Flavor::Redis7).password("s3cret").start();
    let (port, runtime) = (server.port(), runtime());
    let rights = "on >limiter resetkeys ~tg1:* -@all +evalsha +script|load +time +get +set +del +pexpire +select";
    let words: Vec<&str> =
        ["ACL", "SETUSER", "limiter"].into_iter().chain(rights.split(' ')).collect();
    assert_eq!(server.command(&words), Reply::Text("OK".into()));
    let prepared = |url: String| {
        let redis =
            runtime.block_on(async { Redis::builder(url.parse().unwrap()).build() }).unwrap();
        runtime.block_on(redis.prepare())
    };
    for (url, said, advice) in [
        (format!("redis://127.0.0.1:{port}"), "NOAUTH", "Put user and password into the URL"),
        (format!("redis://:wrong@127.0.0.1:{port}"), "WRONGPASS", "Check user and password"),
        (
            format!("redis://:s3cret@127.0.0.1:{port}/77"),
            "DB index is out of range",
            "redis://HOST/0",
        ),
        (
            format!("redis://limiter:limiter@127.0.0.1:{port}"),
            "may not run getrange, strlen, setrange, append: ACL SETUSER <user> +getrange",
            "doctor",
        ),
        (
            format!("redis+cluster://:s3cret@127.0.0.1:{port}"),
            "cluster support disabled",
            "write redis://",
        ),
    ] {
        let failure = prepared(url.clone()).unwrap_err();
        assert!(failure.is_permanent(), "{url}: {failure:?}");
        assert!(
            failure.to_string().contains(said) && failure.advice().contains(advice),
            "{url}: {failure}"
        );
    }
    server.command(&["REPLICAOF", "127.0.0.1", "1"]);
    let failure = prepared(format!("redis://:s3cret@127.0.0.1:{port}")).unwrap_err();
    assert!(failure.is_permanent() && failure.advice().contains("replica"), "{failure:?}");
    server.command(&["REPLICAOF", "NO", "ONE"]);
    assert_eq!(prepared(format!("redis://:s3cret@127.0.0.1:{port}")), Ok(()));
    server.kill();
    let failure = prepared(format!("redis://:s3cret@127.0.0.1:{port}")).unwrap_err();
    assert!(!failure.is_permanent() && !failure.is_refusal(), "{failure:?}");
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
            // One more hour of window cannot begin in between; a bucket regrows a little.
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

/// One server of a cluster is silent: its keys are decided alone, all others are as exact and as
/// fast as before.
#[test]
fn a_silent_server_of_a_cluster_is_away_alone() {
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
    wait_until("one is away", BOUND, || {
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

/// Whoever is busy with an endless script says so, but only now and then: it is not asked until
/// that is over.
#[test]
fn a_server_that_is_busy_with_a_script_is_done_without_and_found_again() {
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
    assert_eq!(resilient.stats().calls, calls, "nobody asks but who probes");
    assert_eq!(server.command(&["SCRIPT", "KILL"]), Reply::Text("OK".into()));
    assert!(endless.join().unwrap().unwrap().is_error());
    ask_until(&runtime, &resilient, Source::Store);
}

/// Whatever the line does, every request is answered, the store never lets pass more than the
/// limit, and all is well when the line is.
#[test]
fn whatever_the_line_does_there_is_an_answer() {
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

/// A node that is not let run for longer than its deadline, as on a busy machine, takes the answers
/// that have come meanwhile.
#[test]
fn a_pause_of_the_process_is_not_taken_for_silence() {
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
            // The caller, then the one who writes.
            for _ in 0..4 {
                tokio::task::yield_now().await;
            }
            // From here until there is an answer this thread does nothing else.
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

/// A server that is stopped under load and goes on: from the moment it is asked again it decides
/// everything, over new connections, as the old ones were silent for too long. The deadline is one
/// that a busy machine keeps; what the usual one makes of it `cargo xtask bench resilience` and
/// `cargo xtask faults F1` tell.
#[test]
fn soon_after_a_stop_everything_is_decided_by_the_server_again() {
    /// In a millisecond: so few that all of a deadline may be under way.
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
            // What could not be asked while the machine was busy is not asked all at once.
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
    wait_until("it is asked again", BOUND, || resilient.stats().breaker == BreakerState::Closed);
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
