//! A real Redis behind the doors that is stopped and goes on: requests are answered all the time, and everything says so.

use std::time::Duration;

use tidegate_server::config::Config;
use tidegate_server::{Options, Running, start};
use tidegate_testkit::{Flavor, Server, wait_until};
use tokio::runtime::Runtime;

use crate::doors::Http;

const BOUND: Duration = Duration::from_secs(20);

fn open(server: &Server, rules: &str) -> (Runtime, Running) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let url = server.url();
    let text = format!(
        "store: {url}\nnear: {{ deadline_ms: 8, nodes: 1 }}\nlisten: {{ http: 127.0.0.1:0, resp: off, grpc: off }}\n{rules}"
    );
    let config = Config::parse(&text, "test").unwrap();
    let running = runtime.block_on(start(config, Options::default())).unwrap();
    (runtime, running)
}

fn get(http: &mut Http, path: &str) -> String {
    http.send(&format!("GET {path} HTTP/1.1\r\nhost: tidegate\r\n\r\n"));
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
    assert!(get(&mut http, "/readyz").starts_with("ready, without the store"));
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
