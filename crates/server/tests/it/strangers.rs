//! What clients of the proxy and of gateways read when they are denied: which policies denied and
//! when to try again, and nothing about other rules, rules in shadow mode or the store. Callers of
//! the check API read the whole decision.

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener};
use std::thread;

use proptest::prelude::*;
use tidegate_server::config::Config;

use crate::listeners::{Answer, Listeners};

const RULES: &str = "\
trusted_proxies: [127.0.0.1]
rules:
  - { name: per-user, by: [header.x-user], limit: 2/min; 7777/h }
  - { name: everyone, limit: 4242/min window }
  - { name: trial, mode: shadow, by: [header.x-user], limit: 1/min }
  - { name: dear, when: { path: /dear }, limit: 3/min, cost: { from: query.cost, max: 4 } }
  - { name: closed, when: { path: /closed }, limit: deny }
  - { name: hidden, when: { path: /hidden }, limit: deny, deny_status: 429 }
  - { name: tiers, when: { path: /tiers }, limit: 9/min, overrides: [{ when: { header.x-user: mallory }, limit: deny }] }
  - { name: costly, when: { path: /costly }, mode: shadow, limit: 9/min, cost: { from: header.x-cost, max: 9 } }
";

/// What no client may read that `per-user` denies: names and numbers of other limits, members of a
/// decision, where the store is.
const SECRETS: [&str; 14] = [
    "everyone",
    "4242",
    "4241",
    "4240",
    "7777",
    "7775",
    "trial",
    "charges",
    "shadow",
    "t_us",
    "source",
    "fallback",
    "tidegate-mode",
    "127.0.0.1",
];

/// A service that says `ok`.
fn service() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap();
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            thread::spawn(move || {
                let mut reader = BufReader::new(stream);
                let mut line = String::new();
                while reader.read_line(&mut line).is_ok_and(|bytes| bytes > 0) {
                    if line == "\r\n" {
                        let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";
                        if reader.get_mut().write_all(answer).is_err() {
                            return;
                        }
                    }
                    line.clear();
                }
            });
        }
    });
    at
}

fn file(more: &str) -> String {
    let listen = "listen: { http: 127.0.0.1:0, grpc: off, resp: off, proxy: 127.0.0.1:0 }\nlog: { level: off }";
    format!("{listen}\nproxy: {{ upstream: \"http://{}\" }}\n{more}", service())
}

/// The check API, forward-auth and the proxy over one store.
pub(crate) fn listeners(more: &str) -> Listeners {
    Listeners::as_told(&file(&format!("{more}{RULES}")))
}

/// What a gateway asks about a request with these lines of headers.
pub(crate) fn question(path: &str, headers: &str) -> String {
    format!(
        "GET /v1/auth HTTP/1.1\r\nhost: t\r\nx-forwarded-method: GET\r\nx-forwarded-host: a\r\nx-forwarded-uri: {path}\r\nx-forwarded-for: 192.0.2.7\r\n{headers}\r\n"
    )
}

/// The same request by every way that a client can come: the fast path of the proxy, hyper, a
/// gateway.
fn by_every_way(listeners: &Listeners, path: &str, headers: &str) -> Vec<Answer> {
    ["", "connection: close\r\n", "gateway"]
        .into_iter()
        .map(|way| {
            let (mut client, text) = match way {
                "gateway" => (listeners.http(), question(path, headers)),
                way => (
                    listeners.proxy(),
                    format!("GET {path} HTTP/1.1\r\nhost: a\r\n{way}{headers}\r\n"),
                ),
            };
            client.send(&text);
            client.receive().unwrap()
        })
        .collect()
}

#[test]
fn no_answer_to_a_denied_client_names_another_rule() {
    for headers in ["[draft-10, github]", "[draft-7]", "[github]", "[none]"] {
        for denial in ["problem", "json", "text"] {
            let listeners =
                listeners(&format!("http: {{ headers: {headers}, denial: {denial} }}\n"));
            for answer in by_every_way(&listeners, "/", "x-user: ann\r\n").iter().take(2) {
                let whole = format!("{}{}", answer.head, answer.body);
                assert!(answer.status < 300 && !whole.contains("trial"), "{answer:?}");
            }
            for accept in ["", "accept: application/json\r\n", "accept: text/plain\r\n"] {
                for answer in by_every_way(&listeners, "/", &format!("x-user: ann\r\n{accept}")) {
                    let whole = format!("{}{}", answer.head, answer.body).to_ascii_lowercase();
                    assert_eq!(answer.status, 429, "{answer:?}");
                    assert!(answer.body.contains("per-user 2/m"), "{answer:?}");
                    let whole = whole.replace("x-ratelimit-resource", "");
                    let told = SECRETS.into_iter().find(|secret| whole.contains(secret));
                    assert_eq!(told, None, "{headers} {denial} {accept}: {answer:?}");
                }
            }
        }
    }
}

/// By the same rules and at the same moment.
#[test]
fn callers_of_the_check_api_read_the_whole_decision() {
    let listeners = listeners("");
    by_every_way(&listeners, "/", "x-user: ann\r\n");
    let answer = listeners.http().post("/v1/check", r#"{"attributes":{"header.x-user":"ann"}}"#);
    assert_eq!(answer.status, 429, "{answer:?}");
    for told in [
        r#""violated-policies":["per-user 2/m"]"#,
        r#""rule":"everyone","limit":"4242/m window","amount":4242"#,
        r#""shadow":[{"rule":"trial","allowed":false}]"#,
        r#""source":"store""#,
    ] {
        assert!(answer.body.contains(told), "{told}: {answer:?}");
    }
    let policy = r#"ratelimit-policy: "per-user 2/m";q=2;w=60, "per-user 7777/h";q=7777;w=3600, "everyone";q=4242;w=60"#;
    assert!(answer.head.contains(policy), "{answer:?}");
}

#[test]
fn a_rule_that_lets_nothing_pass_answers_403_unless_it_says_429() {
    // http.deny_status, path => status and title
    const QUOTA: &str = "Request cannot be satisfied as assigned quota has been exceeded";
    for (setting, path, user, status, title) in [
        ("", "/closed", "ann", 403, "Forbidden"),
        ("", "/hidden", "ann", 429, QUOTA),
        ("", "/tiers", "mallory", 403, "Forbidden"),
        ("http: { deny_status: 429 }\n", "/closed", "ann", 429, QUOTA),
        ("http: { deny_status: 429 }\n", "/tiers", "mallory", 429, QUOTA),
        ("http: { deny_status: 403 }\n", "/hidden", "ann", 429, QUOTA),
    ] {
        let listeners = listeners(setting);
        let body = format!(r#"{{"attributes":{{"path":"{path}","header.x-user":"{user}"}}}}"#);
        let mut answers = by_every_way(&listeners, path, &format!("x-user: {user}\r\n"));
        answers.push(listeners.http().post("/v1/check", &body));
        for answer in answers {
            assert_eq!(answer.status, status, "{setting}{path}: {answer:?}");
            let head = answer.head.to_ascii_lowercase();
            assert!(!head.contains("ratelimit") && !head.contains("retry-after"), "{answer:?}");
            let body: serde_json::Value = serde_json::from_str(&answer.body).unwrap();
            assert_eq!(
                (&body["title"], &body["status"]),
                (&title.into(), &status.into()),
                "{answer:?}"
            );
            assert_eq!(body["violated-policies"], serde_json::json!([&path[1..]]), "{answer:?}");
        }
    }
}

#[test]
fn deny_status_without_limit_deny_is_an_error() {
    for (rule, expected) in [
        (
            "{ name: a, limit: 1/s, deny_status: 403 }",
            Some(
                "rule a: deny_status is for `limit: deny` or `missing: deny`, which this rule and its overrides do not have: remove it",
            ),
        ),
        (
            "{ name: a, limit: deny, deny_status: 401 }",
            Some("deny_status is \"401\": expected 403 or 429"),
        ),
        ("{ name: a, limit: deny, deny_status: 429 }", None),
        ("{ name: a, by: [user], missing: deny, limit: 1/s, deny_status: 429 }", None),
        (
            "{ name: a, limit: 1/s, overrides: [{ when: { ip: \"::1\" }, limit: deny }], deny_status: 429 }",
            None,
        ),
    ] {
        let read = Config::parse(&format!("rules:\n  - {rule}\n"), "test")
            .map_err(|error| error.to_string());
        match (read, expected) {
            (Ok(_), None) => {}
            (Err(error), Some(expected)) => {
                assert!(error.starts_with("test:2:") && error.contains(expected), "{error}");
            }
            (read, expected) => panic!("{rule}: {expected:?}, {read:?}"),
        }
    }
}

#[test]
fn without_a_store_clients_learn_nothing_about_it() {
    let rules = "\
trusted_proxies: [127.0.0.1]
rules:
  - { name: strict, when: { path: /strict }, limit: 5/min, on_store_failure: closed }
  - { name: everyone, when: { path: /all }, limit: 4/min }
";
    let listeners = Listeners::without_store(&file(rules));
    for answer in by_every_way(&listeners, "/strict", "") {
        assert_eq!(answer.status, 503, "{answer:?}");
        assert!(answer.head.contains("retry-after: 1\r\n"), "{answer:?}");
        assert_eq!(
            answer.body,
            r#"{"type":"about:blank","title":"Service Unavailable","status":503,"detail":"The rate limiter has no answer. Try again in 1 second."}"#
        );
        assert!(
            !answer.head.contains("ratelimit") && !answer.head.contains("tidegate-mode"),
            "{answer:?}"
        );
    }
    // A rule that is enforced locally denies as always; only callers of the check API read by whom.
    for answer in (0..2).flat_map(|_| by_every_way(&listeners, "/all", "")) {
        assert!(!answer.head.contains("tidegate-mode"), "{answer:?}");
    }
    let answers = by_every_way(&listeners, "/all", "");
    assert!(
        answers.iter().all(|answer| answer.status == 429 && !answer.head.contains("mode")),
        "{answers:?}"
    );
    let answer = listeners.http().post("/v1/check", r#"{"attributes":{"path":"/all"}}"#);
    assert!(
        answer.status == 429 && answer.head.contains("x-tidegate-mode: fallback"),
        "{answer:?}"
    );
    let answer = listeners.http().post("/v1/check", r#"{"attributes":{"path":"/strict"}}"#);
    assert!(answer.status == 429 && answer.body.contains(r#""source":"fallback""#), "{answer:?}");
}

/// An error of the store itself, without anything before it.
#[test]
fn an_error_of_the_store_is_for_the_log() {
    let builder = tidegate::redis::Redis::builder("redis://127.0.0.1:1/".parse().unwrap());
    let listeners = Listeners::in_redis(
        "trusted_proxies: [127.0.0.1]\nrules: [{ name: all, limit: 5/min }]\n",
        builder,
    );
    let mut gateway = listeners.http();
    gateway.send(&question("/", ""));
    let answer = gateway.receive().unwrap();
    assert!(
        answer.status == 503 && answer.body.contains("The rate limiter has no answer."),
        "{answer:?}"
    );
    assert!(!answer.body.contains("127.0.0.1") && !answer.body.contains("store"), "{answer:?}");
    let answer = listeners.http().post("/v1/check", r#"{"attributes":{}}"#);
    assert!(answer.status == 503 && answer.body.contains("the store did not answer"), "{answer:?}");
}

#[test]
fn a_mistake_of_a_client_names_no_rule() {
    for answer in by_every_way(&listeners(""), "/costly", "x-user: ann\r\nx-cost: much\r\n") {
        assert_eq!(answer.status, 400, "{answer:?}");
        assert!(
            answer
                .body
                .ends_with(r#""detail":"header.x-cost is \"much\": expected a whole number"}"#),
            "{answer:?}"
        );
    }
}

/// The names in a list of quoted names.
fn names(line: &str) -> Vec<&str> {
    line.split(", ").map(|item| item.split(';').next().unwrap()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// Rules with one limit or several, some of them equal, and limits that a caller brings.
    #[test]
    fn no_list_of_policies_has_a_name_twice(
        rules in prop::collection::vec(prop::collection::vec(0_usize..4, 1..5), 1..5),
        brought in prop::collection::vec(0_usize..4, 1..5),
    ) {
        const LIMITS: [&str; 4] = ["10/s", "10/s window", "120/m", "20 concurrent ttl 30s"];
        let written = |limits: &[usize]| limits.iter().map(|at| LIMITS[*at]).collect::<Vec<_>>().join("; ");
        let lines = rules.iter().enumerate().map(|(at, limits)| format!("  - {{ name: r{at}, limit: {} }}\n", written(limits)));
        let listeners = Listeners::in_memory(&format!("trusted_proxies: [127.0.0.1]\nrules:\n{}", lines.collect::<String>()));
        let mut http = listeners.http();
        http.send(&question("/", ""));
        let by_gateway = http.receive().unwrap();
        let by_rules = http.post("/v1/check", r#"{"attributes":{}}"#);
        let by_caller = http.post("/v1/check", &format!(r#"{{"key":"k","limit":"{}"}}"#, written(&brought)));
        for answer in [by_gateway, by_rules, by_caller] {
            let line = |name: &str| answer.head.lines().find_map(|line| line.strip_prefix(name)).unwrap();
            let policies = names(line("ratelimit-policy: "));
            prop_assert_eq!(&policies, &names(line("ratelimit: ")));
            let mut once = policies.clone();
            once.sort_unstable();
            once.dedup();
            prop_assert_eq!(once.len(), policies.len(), "{:?}", policies);
        }
    }
}
