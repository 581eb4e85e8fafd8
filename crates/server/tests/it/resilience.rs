//! A real Redis behind the listeners that is stopped and goes on: requests are answered all the
//! time, and everything says so.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::time::Duration;

use tidegate::redis::Redis;
use tidegate_server::config::Config;
use tidegate_server::{Options, Running, start};
use tidegate_testkit::{Client, Fault, FaultProxy, Flavor, Reply, Server, redis_cli, wait_until};
use tokio::runtime::Runtime;

use crate::listeners::{Http, Listeners};

const BOUND: Duration = Duration::from_secs(20);

fn open(server: &Server, rules: &str) -> (Runtime, Running) {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let url = server.url();
    let text = format!(
        "store: {url}\nresilience: {{ nodes: 1 }}\nlisten: {{ http: 127.0.0.1:0, resp: 127.0.0.1:0, grpc: off }}\n{rules}"
    );
    let config = Config::parse(&text, "test").unwrap();
    let running = runtime.block_on(start(config, Options::default())).unwrap();
    (runtime, running)
}

fn get(http: &mut Http, path: &str) -> String {
    http.send(&format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n"));
    http.receive().unwrap().body
}

/// Posts the same question until the answer has this in it.
fn ask_until(http: &mut Http, body: &str, part: &str) {
    wait_until(part, BOUND, || {
        let answer = http.post("/v1/check", body);
        assert_eq!(answer.status, 200, "{}", answer.body);
        answer.body.contains(part)
    });
}

#[test]
fn a_stopped_redis_is_done_without_told_and_found_again() {
    let server = Server::start(Flavor::Redis7);
    let (runtime, running) = open(&server, "");
    let mut http = Http::connect(running.http.unwrap());
    let many = r#"{"key":"user:7","limit":"1000000/s"}"#;
    ask_until(&mut http, many, r#""source":"store""#);
    assert_eq!(get(&mut http, "/readyz"), "ready\n");
    server.stop_signal();
    wait_until("it is known to be away", BOUND, || {
        ask_until(&mut http, many, r#""source":"fallback""#);
        get(&mut http, "/metrics").contains("tidegate_breaker_open 1\n")
    });
    let readiness = get(&mut http, "/readyz");
    assert!(readiness.starts_with("degraded\nstore: unreachable: "), "{readiness}");
    assert!(
        readiness.ends_with(
            "enforced meanwhile: each limit in full on this node (1 node, configured)\n"
        ),
        "{readiness}"
    );
    let numbers = get(&mut http, "/metrics");
    assert!(numbers.contains("tidegate_store_up{store=\"redis\"} 0\n"), "{numbers}");
    assert!(numbers.contains("tidegate_mode_changes_total{to=\"open\"} 1\n"), "{numbers}");
    assert!(numbers.contains("tidegate_nodes 1\n"), "{numbers}");
    server.continue_signal();
    ask_until(&mut http, many, r#""source":"store""#);
    wait_until("it is told", BOUND, || get(&mut http, "/readyz") == "ready\n");
    drop(http);
    assert!(runtime.block_on(running.stop()));
}

fn config(store: &str, more: &str) -> Config {
    let listen = "listen: { http: 127.0.0.1:0, resp: off, grpc: off }";
    Config::parse(&format!("store: {store}\n{listen}\n{more}"), "test").unwrap()
}

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
}

/// What waiting cannot mend fails the start, with what to do.
#[test]
fn a_redis_that_refuses_fails_the_start() {
    let server = Server::builder(Flavor::Redis7).password("s3cret").start();
    let (port, runtime) = (server.port(), runtime());
    let started = |url: &str| runtime.block_on(start(config(url, ""), Options::default()));
    for (url, said, advice) in [
        (format!("redis://127.0.0.1:{port}"), "NOAUTH", "Put user and password into the URL"),
        (format!("redis://:wrong@127.0.0.1:{port}"), "WRONGPASS", "Check user and password"),
        (
            format!("redis://:s3cret@127.0.0.1:{port}/77"),
            "DB index is out of range",
            "redis://HOST/0",
        ),
    ] {
        let error = started(&url).expect_err(&url).to_string();
        assert!(
            error.starts_with("store redis://") && error.contains(said) && error.contains(advice),
            "{error}"
        );
        assert!(!error.contains("s3cret") && !error.contains("wrong@"), "{error}");
    }
    let renamed = Server::builder(Flavor::Redis7).args("--rename-command", &["TIME", ""]).start();
    let error = started(&renamed.url()).expect_err("no TIME").to_string();
    assert!(error.contains("does not know TIME") && error.contains("rename-command"), "{error}");
    server.command(&["REPLICAOF", "127.0.0.1", "1"]);
    let error = started(&server.url()).expect_err("a replica").to_string();
    assert!(error.contains("takes no writes") || error.contains("lost its primary"), "{error}");
    assert!(error.contains("Name the primary"), "{error}");
}

/// A node of a cluster at a redis:// URL fails the start, also where it owns the first and the last
/// slots: the probe finds out.
#[test]
fn one_node_of_a_cluster_fails_the_start() {
    let nodes =
        [(); 2].map(|()| Server::builder(Flavor::Redis7).arg("--cluster-enabled", "yes").start());
    let slots = [&["0", "1023", "15360", "16383"][..], &["1024", "15359"]];
    for (node, slots) in nodes.iter().zip(slots) {
        let words: Vec<&str> = ["CLUSTER", "ADDSLOTSRANGE"].iter().chain(slots).copied().collect();
        assert_eq!(node.command(&words), Reply::Text("OK".into()));
    }
    nodes[0].command(&["CLUSTER", "SET-CONFIG-EPOCH", "1"]);
    nodes[0].command(&["CLUSTER", "MEET", "127.0.0.1", &nodes[1].port().to_string()]);
    let is_ok =
        |node: &Server| node.command(&["CLUSTER", "INFO"]).text().contains("cluster_state:ok");
    wait_until("the cluster is well", BOUND, || nodes.iter().all(is_ok));
    let runtime = runtime();
    for node in &nodes {
        let error = runtime
            .block_on(start(config(&node.url(), ""), Options::default()))
            .expect_err("one node");
        let error = error.to_string();
        assert!(error.starts_with("store redis://127.0.0.1:"), "{error}");
        assert!(error.contains("MOVED") && error.contains("write redis+cluster://"), "{error}");
    }
}

/// A cluster that lost slots: numbers and readiness say so, and that it is over.
#[test]
fn a_cluster_that_lost_slots_is_reported_until_they_are_served() {
    let server = Server::builder(Flavor::Redis7).arg("--cluster-enabled", "yes").start();
    server.command(&["CLUSTER", "ADDSLOTSRANGE", "0", "16383"]);
    let is_ok = || server.command(&["CLUSTER", "INFO"]).text().contains("cluster_state:ok");
    wait_until("the cluster is well", BOUND, is_ok);
    let runtime = runtime();
    let url = format!("redis+cluster://127.0.0.1:{}", server.port());
    let running = runtime
        .block_on(start(config(&url, "resilience: { nodes: 1 }"), Options::default()))
        .unwrap();
    let mut http = Http::connect(running.http.unwrap());
    let many = r#"{"key":"k","limit":"1000000/s"}"#;
    ask_until(&mut http, many, r#""source":"store""#);
    wait_until("it is ready", BOUND, || get(&mut http, "/readyz") == "ready\n");
    server.command(&["CLUSTER", "DELSLOTSRANGE", "0", "9000"]);
    wait_until("readiness says why", BOUND, || {
        ask_until(&mut http, many, r#""source":"fallback""#);
        get(&mut http, "/readyz")
            .starts_with("degraded\nstore: refused: the cluster does not serve this slot")
            || get(&mut http, "/readyz")
                .starts_with("degraded\nstore: refused: no node of the cluster serves slot")
    });
    assert!(get(&mut http, "/metrics").contains("tidegate_store_up{store=\"redis\"} 0\n"));
    server.command(&["CLUSTER", "ADDSLOTSRANGE", "0", "9000"]);
    ask_until(&mut http, many, r#""source":"store""#);
    wait_until("it is ready again", BOUND, || get(&mut http, "/readyz") == "ready\n");
    assert!(get(&mut http, "/metrics").contains("tidegate_store_up{store=\"redis\"} 1\n"));
    drop(http);
    runtime.block_on(running.stop());
}

/// Readiness names the rules that do not follow the file.
#[test]
fn readiness_names_the_rules_that_differ_from_the_file() {
    let server = Server::start(Flavor::Redis7);
    let url = server.url();
    server.kill();
    let each = "each limit in full on this node (1 node, configured)";
    let rule = |name: &str, policy: &str| {
        format!("{{ name: {name}, limit: 2/h, on_store_failure: {policy} }}")
    };
    for (file, rules, first, enforced, passes) in [
        (
            "local",
            rule("lax", "open"),
            "degraded\n",
            format!("{each}, except rule lax (open: not enforced)"),
            5,
        ),
        (
            "local",
            rule("strict", "closed"),
            "not ready\n",
            format!("{each}, except rule strict (closed: denied)"),
            0,
        ),
        (
            "closed",
            rule("own", "local"),
            "not ready\n",
            format!(
                "everything is denied (on_store_failure: closed), except rule own (local: {each})"
            ),
            2,
        ),
    ] {
        let runtime = runtime();
        let more =
            format!("resilience: {{ nodes: 1 }}\non_store_failure: {file}\nrules: [{rules}]");
        let running = runtime.block_on(start(config(&url, &more), Options::default())).unwrap();
        let mut http = Http::connect(running.http.unwrap());
        let readiness = get(&mut http, "/readyz");
        assert!(readiness.starts_with(first), "{readiness}");
        assert!(readiness.ends_with(&format!("; enforced meanwhile: {enforced}\n")), "{readiness}");
        let problem = tidegate_server::store_problem(running.engine()).unwrap();
        assert_eq!((problem.state, problem.enforced), ("unreachable", enforced));
        assert_eq!(problem.denies, first == "not ready\n");
        let passed =
            (0..5).filter(|_| http.post("/v1/check", r#"{"attributes":{"a":"b"}}"#).status == 200);
        assert_eq!(passed.count(), passes, "{more}");
        drop(http);
        runtime.block_on(running.stop());
    }
}

/// Three hundred milliseconds there and back: `validate` has the time to find out that it is slow.
#[test]
fn a_redis_three_hundred_milliseconds_away_is_checked_and_found_slow() {
    let server = Server::start(Flavor::Redis7);
    let proxy = FaultProxy::start(&server);
    let reply = Duration::from_millis(300);
    proxy.set(Fault::Delay { request: Duration::ZERO, reply, jitter: Duration::ZERO });
    let found = runtime()
        .block_on(tidegate_server::preflight(&config(proxy.url(), "resilience: { nodes: 1 }")));
    let [finding] = &found[..] else { panic!("one finding: {found:?}") };
    assert!(finding.message.starts_with("store: a decision of the store takes 3"), "{finding:?}");
    assert!(finding.message.contains("more than a third of the deadline (15 ms)"), "{finding:?}");
    assert!(!finding.is_error(), "{finding:?}");
}

/// A password that is rotated under a running server: numbers and readiness say so, and that it is
/// over.
#[test]
fn a_password_that_was_rotated_is_told_until_it_is_put_back() {
    let server = Server::builder(Flavor::Redis7).password("first").start();
    for (rules, status, first) in [
        ("rules: [{ name: own, limit: 1000000/s }]", 200, "degraded\n"),
        (
            "rules: [{ name: strict, limit: 1000000/s, on_store_failure: closed }]",
            503,
            "not ready\n",
        ),
    ] {
        let runtime = runtime();
        let config = config(&server.url(), &format!("resilience: {{ nodes: 3 }}\n{rules}"));
        let running = runtime.block_on(start(config, Options::default())).unwrap();
        let mut http = Http::connect(running.http.unwrap());
        ask_until(&mut http, r#"{"key":"k","limit":"1000000/s"}"#, r#""source":"store""#);
        assert_eq!(get(&mut http, "/readyz"), "ready\n");
        let mut admin = server.client().unwrap();
        admin.command(&["CONFIG", "SET", "requirepass", "second"]).unwrap();
        admin.command(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]).unwrap();
        wait_until("readiness says why", BOUND, || {
            http.post("/v1/check", r#"{"key":"k","limit":"1000000/s"}"#);
            get(&mut http, "/readyz").contains("WRONGPASS")
        });
        http.send("GET /readyz HTTP/1.1\r\nhost: localhost\r\n\r\n");
        let readiness = http.receive().unwrap();
        assert_eq!(readiness.status, status, "{}", readiness.body);
        assert!(
            readiness.body.starts_with(&format!("{first}store: refused: ")),
            "{}",
            readiness.body
        );
        assert!(
            readiness.body.contains("1/3 of each limit on this node (3 nodes, configured)"),
            "{}",
            readiness.body
        );
        assert_eq!(
            readiness.body.contains("except rule strict (closed: denied)"),
            status == 503,
            "{}",
            readiness.body
        );
        wait_until("the gauge is 0", BOUND, || {
            get(&mut http, "/metrics").contains("tidegate_store_up{store=\"redis\"} 0\n")
        });
        admin.command(&["CONFIG", "SET", "requirepass", "first"]).unwrap();
        wait_until("it is over", BOUND, || get(&mut http, "/readyz") == "ready\n");
        wait_until("the gauge is 1", BOUND, || {
            get(&mut http, "/metrics").contains("tidegate_store_up{store=\"redis\"} 1\n")
        });
        drop(http);
        assert!(runtime.block_on(running.stop()));
    }
}

/// Six milliseconds there and back are within the deadline.
#[test]
fn a_redis_six_milliseconds_away_decides() {
    let server = Server::start(Flavor::Redis7);
    let proxy = FaultProxy::start(&server);
    let way = Duration::from_millis(3);
    proxy.set(Fault::Delay { request: way, reply: way, jitter: Duration::ZERO });
    let runtime = runtime();
    let config = config(proxy.url(), "resilience: { nodes: 1 }");
    let slow = runtime
        .block_on(tidegate_server::check_store(&config))
        .unwrap()
        .slow
        .expect("six are more than five");
    assert!(
        slow.decision >= 2 * way
            && slow.to_string().contains("more than a third of the deadline (15 ms)"),
        "{slow}"
    );
    let running = runtime.block_on(start(config, Options::default())).unwrap();
    let mut http = Http::connect(running.http.unwrap());
    let mut in_a_row = 0;
    wait_until("a hundred in a row are decided by the store", BOUND, || {
        let answer = http.post("/v1/check", r#"{"key":"k","limit":"1000000/s"}"#);
        in_a_row = if answer.body.contains(r#""source":"store""#) { in_a_row + 1 } else { 0 };
        in_a_row == 100
    });
    drop(http);
    assert!(runtime.block_on(running.stop()));
}

/// A node whose store was never there enforces limits in full, and says what it assumes.
#[test]
fn a_lone_node_that_never_reached_its_store_enforces_limits_in_full() {
    let server = Server::start(Flavor::Redis7);
    let url = server.url();
    server.kill();
    let runtime = runtime();
    let running = runtime
        .block_on(start(config(&url, ""), Options::default()))
        .expect("it starts without its store");
    let mut http = Http::connect(running.http.unwrap());
    let readiness = get(&mut http, "/readyz");
    assert!(
        readiness.starts_with("degraded\nstore: unreachable: no connection to 127.0.0.1"),
        "{readiness}"
    );
    let enforced = "enforced meanwhile: each limit in full on this node (1 node, assumed: the store was never reached)\n";
    assert!(readiness.ends_with(enforced), "{readiness}");
    let numbers = get(&mut http, "/metrics");
    assert!(numbers.contains("tidegate_store_up{store=\"redis\"} 0\n"), "{numbers}");
    let allowed = (0..30)
        .filter(|_| http.post("/v1/check", r#"{"key":"k","limit":"20/h"}"#).status == 200)
        .count();
    assert_eq!(allowed, 20);
    drop(http);
    runtime.block_on(running.stop());
}

#[test]
fn rules_say_what_happens_without_an_answer_and_how_near_they_are_decided() {
    let server = Server::start(Flavor::Redis7);
    let rules = "rules:
  - { name: strict, when: { kind: strict }, limit: 1000/h, on_store_failure: closed }
  - { name: lax, when: { kind: lax }, limit: 2/h, on_store_failure: open }
  - { name: own, when: { kind: own }, limit: 3/h, on_store_failure: local }
  - { name: hot, when: { kind: hot }, limit: 1000000/h window, sync: lease }
";
    let (runtime, running) = open(&server, rules);
    let mut http = Http::connect(running.http.unwrap());
    let question = |kind: &str| format!(r#"{{"attributes":{{"kind":"{kind}"}}}}"#);
    ask_until(&mut http, &question("strict"), r#""source":"store""#);
    ask_until(&mut http, &question("hot"), r#""source":"local""#);
    server.kill();
    let mut passed = |kind: &str| {
        let statuses = (0..10).map(|_| http.post("/v1/check", &question(kind)).status);
        let statuses: Vec<u16> = statuses.collect();
        assert!(statuses.iter().all(|status| [200, 429].contains(status)), "{statuses:?}");
        statuses.iter().filter(|status| **status == 200).count()
    };
    assert_eq!((passed("strict"), passed("lax"), passed("own")), (0, 10, 3));
    assert!(get(&mut http, "/metrics").contains("tidegate_fail_open_total 10\n"));
    drop(http);
    runtime.block_on(running.stop());
}

/// No answer that was given without the store looks like one of the store.
#[test]
fn every_answer_without_the_store_is_marked() {
    let server = Server::start(Flavor::Valkey9);
    let (runtime, running) = open(&server, "");
    let mut http = Http::connect(running.http.unwrap());
    let port = running.resp.unwrap().port();
    let mut two = Client::connect(port).unwrap();
    assert_eq!(two.command(&["TG.MARK", "ON"]).unwrap(), Reply::Text("OK".into()));
    let mut sources = || {
        let answer = http.post("/v1/check", r#"{"key":"user:7","limit":"1000000/s"}"#);
        assert_eq!(
            answer.head.contains("x-tidegate-mode: fallback"),
            answer.body.contains(r#""source":"fallback""#)
        );
        let by_http = if answer.head.contains("x-tidegate-mode") { "fallback" } else { "store" };
        let throttled = two.command(&["CL.THROTTLE", "user:7", "1000000", "1000000", "1"]).unwrap();
        let checked = two.command(&["TG.CHECK", "user:7", "1000000/s"]).unwrap();
        assert_eq!((throttled.array().len(), checked.array().len()), (6, 6));
        let told = two.command(&["INFO"]).unwrap().text().contains("store_answers:1");
        let [throttled, checked] =
            [&throttled.array()[5], &checked.array()[5]].map(|source| source.text().to_owned());
        let mut three = redis_cli();
        three.args([
            "-p",
            &port.to_string(),
            "-3",
            "--json",
            "TG.CHECK",
            "user:7",
            "1000000/s",
            "AS",
            "MAP",
        ]);
        let named = String::from_utf8(three.output().unwrap().stdout).unwrap();
        let named = named
            .split(r#""source":""#)
            .nth(1)
            .and_then(|rest| rest.split('"').next())
            .unwrap()
            .to_owned();
        (by_http, [throttled, checked, named], told)
    };
    let of = |source: &str| [source.to_owned(), source.to_owned(), source.to_owned()];
    wait_until("the store answers", BOUND, || sources() == ("store", of("store"), true));
    server.stop_signal();
    wait_until("nobody asks it any more", BOUND, || {
        sources() == ("fallback", of("fallback"), false)
    });
    server.continue_signal();
    wait_until("the store answers again", BOUND, || sources() == ("store", of("store"), true));
    drop((http, two));
    assert!(runtime.block_on(running.stop()));
}

/// Commands that come together are asked together: a pipeline costs a few round trips, not one for
/// each, and its answers are as one by one.
#[test]
fn a_pipeline_waits_for_the_store_once() {
    const COMMANDS: i64 = 64;
    let server = Server::start(Flavor::Redis7);
    let proxy = FaultProxy::start(&server);
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let text = format!(
        "store: {}\nresilience: {{ deadline_ms: 8, nodes: 1 }}\nlisten: {{ http: off, resp: 127.0.0.1:0, grpc: off }}\n",
        proxy.url()
    );
    let running =
        runtime.block_on(start(Config::parse(&text, "test").unwrap(), Options::default())).unwrap();
    let mut client = Client::connect(running.resp.unwrap().port()).unwrap();
    assert_eq!(client.command(&["TG.MARK", "ON"]).unwrap(), Reply::Text("OK".into()));
    // Every round trip has its length, whatever the machine does.
    proxy.set(Fault::Delay {
        request: Duration::ZERO,
        reply: Duration::from_millis(3),
        jitter: Duration::ZERO,
    });
    let mut key = 0;
    wait_until("a whole pipeline is decided by the store", BOUND, || {
        key += 1;
        let key = format!("user:{key}");
        let began = std::time::Instant::now();
        for number in 0..COMMANDS {
            match number % 2 {
                0 => client.send(&["TG.CHECK", &key, "20/d window"]).unwrap(),
                _ => client.send(&["CL.THROTTLE", &key, "9", "1", "100000"]).unwrap(),
            }
        }
        let answers: Vec<Reply> = (0..COMMANDS).map(|_| client.receive().unwrap()).collect();
        if answers.iter().any(|answer| answer.array()[5].text() == "fallback") {
            return false; // a busy machine: the deadline is the usual one
        }
        for (number, answer) in answers.iter().enumerate() {
            let (allowed, nth) = (answer.array()[0].int(), number / 2);
            let expected = if number % 2 == 0 { i64::from(nth < 20) } else { i64::from(nth >= 10) };
            assert_eq!(allowed, expected, "command {number}: {answer:?}");
        }
        began.elapsed() < Duration::from_millis(3) * u32::try_from(COMMANDS).unwrap() / 2
    });
    drop(client);
    assert!(runtime.block_on(running.stop()));
}

/// What waits for the answers to those before it has no more time left than they had: all commands
/// of a pipeline are asked together.
#[test]
fn a_pipeline_is_one_trip_to_a_store_that_is_far_away() {
    // The connection to a store lets 32 calls be unanswered before it makes others wait.
    const COMMANDS: i64 = 30;
    let server = Server::start(Flavor::Redis7);
    let proxy = FaultProxy::start(&server);
    let listeners =
        Listeners::in_redis("", Redis::builder(proxy.url().parse().unwrap()).timeout(BOUND));
    let question = |key: &str| {
        let words = ["CL.THROTTLE", key, "15", "30", "3600"]
            .map(|word| format!("${}\r\n{word}\r\n", word.len()));
        format!("*5\r\n{}", words.concat())
    };
    let stream = TcpStream::connect(("127.0.0.1", listeners.resp)).unwrap();
    let (mut writer, mut answers) = (stream.try_clone().unwrap(), BufReader::new(stream).lines());
    // How many numbers follow, and five of them.
    let mut answered = || answers.by_ref().take(6).map(Result::unwrap).collect::<Vec<_>>();
    writer.write_all(question("first").as_bytes()).unwrap();
    assert_eq!(answered()[..2], ["*5", ":0"]);
    let keys = || server.command(&["DBSIZE"]).int();
    let before = keys();
    proxy.set(Fault::StallReplies);
    let pipeline: String =
        (0..COMMANDS).map(|number| question(&format!("user:{number}"))).collect();
    writer.write_all(pipeline.as_bytes()).unwrap();
    wait_until("all of them are decided", BOUND, || keys() == before + COMMANDS);
    proxy.set(Fault::Pass);
    for _ in 0..COMMANDS {
        assert_eq!(answered()[..4], ["*5", ":0", ":16", ":15"]);
    }
}
