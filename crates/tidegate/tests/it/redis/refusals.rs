//! Servers that answer but refuse: the state of the resilience layer, and the failures of
//! `prepare`.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tidegate::redis::{FailureKind, Redis};
use tidegate::resilience::{BreakerState, NodesFrom, Resilient};
use tidegate::{Check, Source, Store};
use tidegate_testkit::{Cluster, Flavor, Reply, Server, wait_until};

use super::resilience::{BOUND, ask_until, node};
use super::{limits, runtime};

/// A server that takes no writes is still called: it may deny without writing. Its state is refused
/// until it takes writes again.
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

/// Records every change of the state, with its reason.
fn states(resilient: &Resilient) -> Arc<Mutex<Vec<String>>> {
    let told = Arc::new(Mutex::new(Vec::new()));
    let own = Arc::clone(&told);
    resilient.on_state(move |status| {
        own.lock().unwrap().push(format!("{}: {}", status.state.name(), status.state.why()))
    });
    told
}

/// The password is rotated under a running node: the breaker opens at the first refusal, one change
/// is reported, and the store decides again when the password is back.
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
    // The closed connection may be reported first.
    assert!(
        kinds == ["refused", "healthy"] || kinds == ["unreachable", "refused", "healthy"],
        "{told:?}"
    );
}

/// A replica answers peeks and takes no writes: peeks do not end the refusal.
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

/// A cluster that does not serve its slots refuses, at the start and later, until it does.
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

/// A command that the script calls was renamed: no decision can succeed, and the failure names it.
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
        // A node that was not prepared finds out with its first call.
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

/// A proxy for Redis without its upstream: accepts connections, and answers every script with an
/// unknown error.
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

/// Answers until the connection ends.
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

/// Every call gets an unknown error. It could concern only that call, but the layer's own charge
/// fails, too, so the store refuses.
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

/// A server that takes no writes renews no node lease. The nodes still exist, and each keeps its
/// share of the limit.
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
    // Enough for two counts.
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

/// One node of a cluster at a redis:// URL decides only its own slots.
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

/// [`Redis::prepare`] returns what waiting cannot fix, with advice.
#[test]
fn permanent_failures_are_found_before_the_first_decision() {
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
