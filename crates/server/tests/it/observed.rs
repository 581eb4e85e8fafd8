//! Metrics, log lines and the most limited keys, as an operator sees them.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde_json::Value;
use tidegate::{Check, Limits, Memory, Op};
use tidegate_server::backend::Backend;
use tidegate_server::config::Config;
use tidegate_server::engine::Engine;
use tidegate_server::observe::{Format, Level, Log, LogSettings, Observer};
use tidegate_server::protocol::Protocol;
use tidegate_testkit::{Flavor, Server};
use tokio::runtime::Runtime;

use crate::listeners::Listeners;

const RULES: &str = "\
rules:
  - { name: per-user, by: [user], limit: 1/min; 100/h }
  - { name: all, limit: 1000/min }
  - { name: trial, mode: shadow, limit: 1/min }
  - { name: banned, when: { user: mallory }, limit: deny }
";

/// All series, by name and labels.
fn series(text: &str) -> BTreeMap<String, f64> {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines
        .map(|line| {
            let (name, value) = line.rsplit_once(' ').unwrap();
            (name.to_owned(), value.parse().unwrap_or_else(|_| panic!("{line}")))
        })
        .collect()
}

fn get(listeners: &Listeners, path: &str) -> String {
    let mut http = listeners.http();
    http.send(&format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n"));
    let answer = http.receive().unwrap();
    assert_eq!(answer.status, 200, "{}", answer.body);
    answer.body
}

fn ask(listeners: &Listeners, path: &str, body: &str) -> String {
    let mut http = listeners.http();
    http.send(&format!(
        "POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    ));
    http.receive().unwrap().body
}

#[test]
fn decisions_are_counted_by_protocol_and_rule() {
    let listeners = Listeners::in_memory(RULES);
    for user in ["a", "a", "b", "mallory"] {
        ask(&listeners, "/v1/check", &format!(r#"{{"attributes":{{"user":"{user}"}}}}"#));
    }
    ask(&listeners, "/v1/check", r#"{"key":"k","limit":"1/s"}"#);
    ask(&listeners, "/v1/peek", r#"{"attributes":{"user":"a"}}"#);
    let mut resp = listeners.resp();
    for _ in 0..3 {
        resp.command(&["CL.THROTTLE", "k", "0", "1", "60"]).unwrap();
    }
    let text = get(&listeners, "/metrics");
    let found = series(&text);
    let of =
        |name: &str| found.get(name).copied().unwrap_or_else(|| panic!("{name} is not in\n{text}"));
    assert_eq!(of(r#"tidegate_decisions_total{protocol="http",outcome="allowed"}"#), 3.0);
    assert_eq!(
        of(r#"tidegate_decisions_total{protocol="http",outcome="denied"}"#),
        3.0,
        "with the peek"
    );
    assert_eq!(of(r#"tidegate_decisions_total{protocol="resp",outcome="denied"}"#), 2.0);
    assert_eq!(of(r#"tidegate_rule_decisions_total{rule="per-user",outcome="allowed"}"#), 3.0);
    assert_eq!(of(r#"tidegate_rule_decisions_total{rule="per-user",outcome="denied"}"#), 1.0);
    assert_eq!(of(r#"tidegate_rule_decisions_total{rule="all",outcome="allowed"}"#), 4.0);
    assert_eq!(of(r#"tidegate_rule_decisions_total{rule="banned",outcome="denied"}"#), 1.0);
    assert_eq!(of(r#"tidegate_shadow_decisions_total{rule="trial",outcome="denied"}"#), 3.0);
    assert_eq!(of(r#"tidegate_connections{protocol="resp"}"#), 1.0);
    assert!(of("tidegate_store_keys") >= 4.0);
    assert!(of(r#"tidegate_decision_seconds_count{protocol="http"}"#) >= 1.0);
    assert_eq!(of(r#"tidegate_store_up{store="memory"}"#), 1.0);
    assert!(!text.contains("mallory"), "no label is a value of a client");
}

/// Many requests for long pages have a limited rate, and decisions do not wait behind them.
#[test]
fn long_pages_have_a_rate_and_decisions_do_not_wait_behind_them() {
    const PAGES: usize = 60;
    let listeners = Listeners::in_memory(RULES);
    for path in ["/metrics", "/openapi.json"] {
        let began = Instant::now();
        let mut many = listeners.http();
        many.send(&format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n").repeat(PAGES));
        for _ in 0..PAGES / 2 {
            assert_eq!(many.receive().unwrap().status, 200);
        }
        ask(&listeners, "/v1/check", r#"{"key":"k","limit":"1/s"}"#);
        for _ in PAGES / 2..PAGES {
            assert_eq!(many.receive().unwrap().status, 200);
        }
        // A burst of twenty, then two hundred a second.
        assert!(
            began.elapsed() >= Duration::from_millis(190),
            "{path}: after {:?}",
            began.elapsed()
        );
    }
}

#[test]
fn the_number_of_series_does_not_depend_on_requests() {
    let listeners = Listeners::in_memory(RULES);
    let before = series(&get(&listeners, "/metrics")).len();
    let mut resp = listeners.resp();
    for key in 0..5000 {
        resp.command(&["TG.RULES", "user", &key.to_string()]).unwrap();
        resp.command(&["TG.CHECK", &key.to_string(), "1/min", "COST", "2"]).unwrap();
    }
    let after = series(&get(&listeners, "/metrics"));
    assert_eq!(after.len(), before);
    assert!(after.len() < 300, "{} series", after.len());
    let top: Value = serde_json::from_str(&get(&listeners, "/v1/top?n=1000")).unwrap();
    assert!(top["keys"].as_array().unwrap().len() <= 1000);
}

#[test]
fn the_most_limited_are_listed_without_their_names() {
    let listeners = Listeners::in_memory(RULES);
    for user in ["a", "b", "a", "a", "b", "b", "b", "c"] {
        ask(&listeners, "/v1/check", &format!(r#"{{"attributes":{{"user":"{user}"}}}}"#));
    }
    let top: Value = serde_json::from_str(&get(&listeners, "/v1/top")).unwrap();
    let keys = top["keys"].as_array().unwrap();
    let denied: Vec<u64> = keys.iter().map(|one| one["denied"].as_u64().unwrap()).collect();
    assert_eq!(denied, [3, 2], "{top}");
    assert!(
        keys.iter()
            .all(|one| one["rule"] == "per-user" && one["key"].as_str().unwrap().starts_with('#'))
    );
    for query in ["n=0", "n=1001", "m=1"] {
        let mut http = listeners.http();
        http.send(&format!("GET /v1/top?{query} HTTP/1.1\r\nHost: localhost\r\n\r\n"));
        assert_eq!(http.receive().unwrap().status, 400, "{query}");
    }
}

#[test]
fn rules_are_shown_completely_and_explained() {
    let listeners = Listeners::in_memory(
        "rules:\n  - { name: a, by: [ip, user], limit: 2/min, cost: 2, overrides: [{ when: { user: vip }, limit: 9/min }] }\n  - { name: b, when: { method: [POST, PUT] }, limit: deny, mode: shadow, refunds: off }\n",
    );
    let rules: Value = serde_json::from_str(&get(&listeners, "/v1/rules")).unwrap();
    assert_eq!(
        rules["rules"][1].to_string(),
        r#"{"by":[],"cost":1,"limit":"deny","missing":"share","mode":"shadow","name":"b","on_store_failure":null,"overflow":null,"overrides":[],"refunds":false,"sync":"direct","when":{"method":["POST","PUT"]}}"#
    );
    assert_eq!(
        rules["rules"][0]["overrides"][0].to_string(),
        r#"{"limit":"9/m","when":{"user":["vip"]}}"#
    );
    let body = r#"{"attributes":{"ip":"192.0.2.7","method":"GET"}}"#;
    let explained: Value = serde_json::from_str(&ask(&listeners, "/v1/explain", body)).unwrap();
    assert_eq!(
        explained["rules"][0].to_string(),
        r#"{"allowed":true,"applies":true,"budget":"2/m","by":{"ip":"192.0.2.7","user":null},"cost":2,"limits":[{"allowed":true,"amount":2,"limit":"2/m","remaining":2,"reset_after_us":0,"retry_after_us":0}],"mode":"enforce","override":null,"rule":"a"}"#
    );
    assert_eq!(
        explained["rules"][1]["because"].to_string(),
        r#"{"attribute":"method","expected":["POST","PUT"],"value":"GET"}"#
    );
    ask(&listeners, "/v1/check", r#"{"attributes":{"ip":"192.0.2.7"}}"#);
    let mut http = listeners.http();
    http.send(&format!(
        "POST /v1/explain HTTP/1.1\r\nHost: localhost\r\nAccept: text/plain\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    ));
    assert_eq!(
        http.receive().unwrap().body,
        "a: applies to ip \"192.0.2.7\", no user, costs 2\n    2/m: 0 of 2 left, would be denied for 60000 ms\nb: does not apply: method is \"GET\", not \"POST\" or \"PUT\"\nthe request would be denied\n"
    );
    let text = get(&listeners, "/metrics");
    assert!(
        text.contains("tidegate_rule_decisions_total{rule=\"a\",outcome=\"denied\"} 0\n"),
        "an explanation is no denial"
    );
}

#[derive(Clone, Default)]
struct Page(Arc<Mutex<Vec<u8>>>);

impl Write for Page {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn denials_are_logged_a_few_a_second_with_the_number_of_the_rest() {
    for show_keys in [false, true] {
        let (page, settings) = (
            Page::default(),
            LogSettings { denials_per_second: 3, show_keys, ..LogSettings::default() },
        );
        let log = Log::to(page.clone(), Level::Info, Format::Json);
        let rules = Config::parse(RULES, "test").unwrap().rules;
        let engine = Engine::with_observer(
            Backend::Memory(Memory::new()),
            rules,
            Observer::new(log, &settings),
        )
        .for_protocol(Protocol::Grpc);
        let runtime = Runtime::new().unwrap();
        let limits: Limits = "1/h".parse().unwrap();
        let check = Check::of(Op::Check).charge("alice", &limits, 1);
        let begin = std::time::Instant::now();
        let mut asked = 0;
        // Until a second has passed and something was left out before it.
        while begin.elapsed() < Duration::from_millis(2100) {
            let _ = runtime.block_on(engine.check(&check)).unwrap();
            asked += 1;
        }
        engine.observer().log().flush(Duration::from_secs(10));
        let text = String::from_utf8(page.0.lock().clone()).unwrap();
        let lines: Vec<Value> =
            text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert!((6..=9).contains(&lines.len()), "three seconds at most began: {}", lines.len());
        let left_out: u64 =
            lines.iter().filter_map(|line| line["left_out"].as_str()?.parse::<u64>().ok()).sum();
        assert!(left_out > 0 && left_out < asked, "{text}");
        assert!(
            lines.iter().all(|line| line["message"] == "denied" && line["listener"] == "grpc"),
            "{text}"
        );
        assert_eq!(text.contains("alice"), show_keys, "{text}");
    }
}

/// A key that another program has written is an error of the store, which names it; the log does
/// only if keys may be shown.
#[test]
fn keys_in_lines_about_the_store_are_hashed() {
    let server = Server::start(Flavor::Redis7);
    let runtime = Runtime::new().unwrap();
    let _entered = runtime.enter();
    let limits: Limits = "1/h".parse().unwrap();
    let check = Check::of(Op::Check).charge("alice@example.com", &limits, 1);
    let redis = tidegate::redis::Redis::new(&server.url()).unwrap();
    assert!(runtime.block_on(tidegate::Store::decide(&redis, &check)).unwrap().allowed());
    let name = server.command(&["KEYS", "*alice*"]).array()[0].text().to_owned();
    server.command(&["DEL", &name]);
    server.command(&["LPUSH", &name, "x"]);
    let resilient = || tidegate::resilience::Resilient::builder(redis.clone()).nodes(1).build();
    for show_keys in [false, true] {
        for store in [Backend::Redis(redis.clone()), Backend::Resilient(resilient(), redis.clone())]
        {
            let page = Page::default();
            let log = Log::to(page.clone(), Level::Debug, Format::Human);
            let observer = Observer::new(log, &LogSettings { show_keys, ..LogSettings::default() });
            if let Backend::Resilient(resilient, _) = &store {
                let own = observer.clone();
                resilient.on_miss(move |error| own.missed(error));
            }
            let engine =
                Engine::with_observer(store, Config::parse(RULES, "test").unwrap().rules, observer)
                    .for_protocol(Protocol::Grpc);
            let decided = runtime.block_on(engine.check(&check));
            engine.observer().log().flush(Duration::from_secs(10));
            let text = String::from_utf8(page.0.lock().clone()).unwrap();
            assert!(
                text.contains("holds something that Tidegate did not write"),
                "{decided:?}: {text}"
            );
            assert_eq!(text.contains("alice"), show_keys, "{text}");
            assert_eq!(text.contains("key #"), !show_keys, "{text}");
        }
    }
}

#[test]
fn an_outage_of_the_store_is_visible() {
    let server = Server::start(Flavor::Redis7);
    let listeners =
        Listeners::in_redis(RULES, tidegate::redis::Redis::builder(server.url().parse().unwrap()));
    let up = || series(&get(&listeners, "/metrics"))[r#"tidegate_store_up{store="redis"}"#];
    ask(&listeners, "/v1/check", r#"{"key":"k","limit":"1/s"}"#);
    assert_eq!(up(), 1.0);
    server.kill();
    assert!(ask(&listeners, "/v1/check", r#"{"key":"k","limit":"1/s"}"#).contains("503"));
    assert_eq!(up(), 0.0);
    let text = get(&listeners, "/metrics");
    assert!(
        series(&text)[r#"tidegate_decisions_total{protocol="http",outcome="failed"}"#] >= 1.0,
        "{text}"
    );
    assert!(text.contains(r#"tidegate_store_events_total{event="timeout"}"#), "{text}");
}

/// Rendering the metrics takes longer than a decision: constant requests for them do not slow
/// decisions down.
#[test]
fn metrics_are_rendered_at_a_bounded_rate() {
    let listeners = Listeners::in_memory(RULES);
    let began = std::time::Instant::now();
    let mut pages = std::collections::BTreeSet::new();
    for _ in 0..1000 {
        ask(&listeners, "/v1/check", r#"{"key":"k","limit":"1000000/s"}"#);
        pages.insert(get(&listeners, "/metrics"));
    }
    let most = 50 * (began.elapsed().as_secs() + 2);
    assert!(pages.len() as u64 <= most, "{} pages, at most {most}", pages.len());
}

/// The table of docs/metrics.md names every metric with its kind, and no other.
#[test]
fn the_page_has_every_metric() {
    let page =
        fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/metrics.md"))
            .unwrap();
    let told: BTreeMap<String, String> = page
        .lines()
        .filter_map(|line| {
            let mut cells = line.split('|').map(str::trim).skip(1);
            let name = cells.next()?.strip_prefix("`tidegate_")?.strip_suffix('`')?;
            Some((format!("tidegate_{name}"), cells.next()?.to_owned()))
        })
        .collect();
    let server = Server::start(Flavor::Redis7);
    let (memory, redis) = (
        Listeners::in_memory(RULES),
        Listeners::in_redis(RULES, tidegate::redis::Redis::builder(server.url().parse().unwrap())),
    );
    let mut real = BTreeMap::new();
    let resilient =
        Listeners::resilient(RULES, tidegate::redis::Redis::builder(server.url().parse().unwrap()));
    for listeners in [&memory, &redis, &resilient] {
        let text = get(listeners, "/metrics");
        let kinds = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '));
        real.extend(kinds.map(|(name, kind)| (name.to_owned(), kind.to_owned())));
    }
    assert_eq!(told, real);
}
