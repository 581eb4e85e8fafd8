//! Whole HTTP exchanges: what is sent and what comes back, every header of it. The clock stands at
//! one moment.
//!
//! Pages of `snapshots/` hold them. After a change that is meant: `INSTA_UPDATE=always cargo test
//! -p tidegate-server exchanges`, and read the difference.

use std::fmt::Write;

use crate::listeners::{Http, Listeners};

const RULES: &str = "\
rules:
  - { name: per-user, by: [user], limit: 2/min }
  - { name: everyone, limit: 5/min window }
  - { name: trial, mode: shadow, limit: 1/min }
  - { name: staff, when: { user: root }, limit: exempt }
  - { name: banned, when: { user: mallory }, limit: deny }
  - { name: uploads, when: { path: /upload }, by: [user], limit: 100/min, cost: { from: header.x-size, max: 50 }, refunds: off }
";

/// Compares with the page of `snapshots/` that has the name of the test.
macro_rules! is_as_written {
    ($($page:expr),+) => {
        insta::with_settings!({omit_expression => true}, { insta::assert_snapshot!($($page),+) })
    };
}

/// Sends a request and writes the whole exchange down.
fn tell(page: &mut String, http: &mut Http, method: &str, path: &str, body: &str) {
    let length = body.len();
    let kind = if body.is_empty() {
        String::new()
    } else {
        format!("content-type: application/json\r\ncontent-length: {length}\r\n")
    };
    http.send(&format!("{method} {path} HTTP/1.1\r\nhost: localhost\r\n{kind}\r\n{body}"));
    let answer = http.receive().expect("an answer");
    let shown = if body.len() > 300 { format!("({length} bytes)") } else { body.to_string() };
    let head = answer.own_head();
    writeln!(page, "> {method} {path} {shown}\n{}\n\n{}\n", head.join("\n"), answer.body).unwrap();
}

fn page(rules: &str, asks: &[(&str, &str)]) -> String {
    let listeners = Listeners::in_memory(rules);
    let (mut http, mut page) = (listeners.http(), String::new());
    for (path, body) in asks {
        tell(&mut page, &mut http, "POST", path, body);
    }
    page
}

#[test]
fn a_key_and_its_limit() {
    is_as_written!(page(
        "",
        &[
            ("/v1/check", r#"{"key":"user:7","limit":"3/min","cost":2}"#),
            ("/v1/check", r#"{"key":"user:7","limit":"3/min","cost":2}"#),
            ("/v1/check", r#"{"key":"user:7","limit":"3/min","cost":4}"#),
            ("/v1/check", r#"{"key":"user:8","limit":"3/min","cost":0}"#),
        ]
    ));
}

#[test]
fn several_limits() {
    is_as_written!(page(
        "",
        &[
            ("/v1/check", r#"{"key":"k","limit":"2/s; 3/m window; 2/s"}"#),
            ("/v1/check", r#"{"key":"k","limit":"2/s; 3/m window; 2/s"}"#),
            ("/v1/check", r#"{"key":"a \"strange\" key\n","limit":"2 concurrent ttl 30s; 2/h"}"#),
        ]
    ));
}

#[test]
fn every_operation() {
    is_as_written!(page(
        "",
        &[
            ("/v1/check", r#"{"key":"k","limit":"10/min","cost":3}"#),
            ("/v1/peek", r#"{"key":"k","limit":"10/min","cost":8}"#),
            ("/v1/take", r#"{"key":"k","limit":"10/min","cost":9}"#),
            ("/v1/debit", r#"{"key":"k","limit":"10/min","cost":2}"#),
            ("/v1/refund", r#"{"key":"k","limit":"10/min","cost":4}"#),
            ("/v1/reset", r#"{"key":"k","limit":"10/min"}"#),
            ("/v1/reserve", r#"{"key":"k","limit":"10/min","cost":6,"id":41}"#),
            ("/v1/settle", r#"{"key":"k","limit":"10/min","cost":2,"reserved":6,"id":41}"#),
            ("/v1/lease", r#"{"key":"jobs","limit":"1 concurrent ttl 30s","id":7}"#),
            ("/v1/lease", r#"{"key":"jobs","limit":"1 concurrent ttl 30s","id":8}"#),
            ("/v1/release", r#"{"key":"jobs","limit":"1 concurrent ttl 30s","id":7}"#),
        ]
    ));
}

#[test]
fn rules_with_shadows() {
    is_as_written!(page(
        RULES,
        &[
            ("/v1/check", r#"{"attributes":{"user":"ann"}}"#),
            ("/v1/check", r#"{"attributes":{"user":"ann"}}"#),
            ("/v1/check", r#"{"attributes":{"user":"ann"}}"#),
            (
                "/v1/check",
                r#"{"attributes":{"user":"ben","path":"/upload","header.x-size":"70"},"cost":2}"#
            ),
            ("/v1/refund", r#"{"attributes":{"user":"ben","path":"/upload"}}"#),
            ("/v1/peek", r#"{"attributes":{"user":"ben"}}"#),
        ]
    ));
}

#[test]
fn rules_that_let_everything_or_nothing_pass() {
    is_as_written!(page(
        "rules:\n  - { name: staff, when: { user: root }, limit: exempt }\n  - { name: banned, when: { user: mallory }, limit: deny }\n  - { name: on-trial, when: { user: mallory }, mode: shadow, limit: 1/h }\n",
        &[
            ("/v1/check", r#"{"attributes":{"user":"root"}}"#),
            ("/v1/check", r#"{"attributes":{"user":"mallory"}}"#),
            ("/v1/check", r#"{"attributes":{"user":"nobody knows"}}"#),
        ]
    ));
    insta::assert_snapshot!(
        "denied_beside_limits",
        page(RULES, &[("/v1/check", r#"{"attributes":{"user":"mallory"}}"#)])
    );
}

/// Requests to the proxy and questions of a gateway about the same requests: a line, and the
/// headers of the client.
fn clients(asks: &[(&str, &str)]) -> String {
    let mut page = String::new();
    for is_proxy in [true, false] {
        // Each has its own budgets.
        let listeners = crate::strangers::listeners("");
        let (mut proxy, mut gateway) = (listeners.proxy(), listeners.http());
        for (path, headers) in asks {
            let lines: String = headers.lines().map(|line| format!("{line}\r\n")).collect();
            let answer = if is_proxy {
                proxy.send(&format!("GET {path} HTTP/1.1\r\nhost: a\r\n{lines}\r\n"));
                proxy.receive()
            } else {
                gateway.send(&crate::strangers::question(path, &lines));
                gateway.receive()
            };
            let answer = answer.expect("an answer");
            // What the upstream answers is not changed.
            let is_own = !is_proxy || answer.status != 200;
            let all = || {
                answer.head.trim_end().lines().filter(|line| !line.starts_with("date: ")).collect()
            };
            let head: Vec<&str> = if is_own { answer.own_head() } else { all() };
            let to = if is_proxy { "proxy" } else { "/v1/auth" };
            let sent = headers.replace('\n', ", ");
            writeln!(page, "> {to}: GET {path} {sent}\n{}\n\n{}\n", head.join("\n"), answer.body)
                .unwrap();
        }
    }
    page
}

#[test]
fn clients_of_the_proxy_and_of_gateways() {
    is_as_written!(clients(&[
        ("/", "x-user: ann"),
        ("/", "x-user: ann"),
        ("/", "x-user: ann"),
        ("/", "x-user: ann\naccept: application/json"),
        ("/", "x-user: ann\naccept: text/plain"),
        ("/dear?cost=4", "x-user: ben"),
        ("/closed", "x-user: ben"),
        ("/closed", "x-user: ben\naccept: text/plain"),
        ("/hidden", "x-user: ben"),
        ("/tiers", "x-user: mallory"),
        ("/costly", "x-user: ben\nx-cost: much"),
    ]));
}

#[test]
fn a_batch() {
    is_as_written!(page(
        RULES,
        &[(
            "/v1/check",
            r#"{"checks":[{"key":"b","limit":"1/min"},{"key":"b","limit":"1/min"},{"attributes":{"user":"cyd"}},{"attributes":{"user":"dan","path":"/upload","header.x-size":"big"}}]}"#,
        )]
    ));
}

#[test]
fn every_mistake() {
    let deep = format!(r#"{{"checks":{}{}}}"#, "[".repeat(200), "]".repeat(200));
    let long_key = format!(r#"{{"key":"{}","limit":"1/s"}}"#, "k".repeat(1025));
    let many =
        format!(r#"{{"checks":[{}]}}"#, vec![r#"{"key":"k","limit":"1/s"}"#; 1001].join(","));
    let attributes: Vec<String> = (0..65).map(|number| format!(r#""a{number}":"x""#)).collect();
    let attributes = format!(r#"{{"attributes":{{{}}}}}"#, attributes.join(","));
    let mut asks = vec![
        ("/v1/check", ""),
        ("/v1/check", "[]"),
        ("/v1/check", "{}"),
        ("/v1/check", r#"{"key":"k"}"#),
        ("/v1/check", r#"{"limit":"1/s"}"#),
        ("/v1/check", r#"{"key":"k","limit":"1/fortnight"}"#),
        ("/v1/check", r#"{"key":"k","limit":"1/s","cost":-1}"#),
        ("/v1/check", r#"{"key":"k","limit":"1/s","cost":1.5}"#),
        ("/v1/check", r#"{"key":"k","limit":"1/s","cost":1e400}"#),
        ("/v1/check", r#"{"key":"k","limit":"1/s","cost":18446744073709551616}"#),
        ("/v1/check", r#"{"key":"k","key":"l","limit":"1/s"}"#),
        ("/v1/check", r#"{"key":"k","limit":"1/s","kost":1}"#),
        ("/v1/check", r#"{"key":"k","limit":"1/s","attributes":{}}"#),
        ("/v1/check", r#"{"key":"k","limit":"1/s"} and more"#),
        ("/v1/check", r#"["k","1/s"]"#),
        ("/v1/check", r#"{"checks":[["k","1/s"]]}"#),
        ("/v1/check", r#"{"checks":[]}"#),
        ("/v1/check", r#"{"checks":[{"key":"k","limit":"1/s"},{"key":"k"}]}"#),
        ("/v1/check", r#"{"checks":[{"checks":[]}]}"#),
        ("/v1/settle", r#"{"key":"k","limit":"1/s"}"#),
        ("/v1/release", r#"{"key":"k","limit":"1 concurrent ttl 3s","id":0}"#),
    ];
    asks.extend(
        [
            ("/v1/check", &deep),
            ("/v1/check", &long_key),
            ("/v1/check", &many),
            ("/v1/check", &attributes),
        ]
        .map(|(path, body)| (path, body.as_str())),
    );
    is_as_written!(page("", &asks));
}
