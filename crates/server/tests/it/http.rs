//! The HTTP listener, by whole exchanges.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};

use tidegate_server::config::Config;
use tidegate_server::{Options, Running, start};
use tokio::runtime::Runtime;

struct Open {
    runtime: Runtime,
    running: Option<Running>,
    at: SocketAddr,
}

fn open(rules: &str) -> Open {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let text = format!("listen: {{ http: 127.0.0.1:0, resp: off, grpc: off }}\n{rules}");
    let config = Config::parse(&text, "test").unwrap();
    let running = runtime.block_on(start(config, Options::default())).unwrap();
    let at = running.http.unwrap();
    Open { runtime, running: Some(running), at }
}

/// Status, headers and body.
fn exchange(at: SocketAddr, head: &str, body: &str) -> (u16, String, String) {
    let mut stream = TcpStream::connect(at).unwrap();
    let length = body.len();
    write!(stream, "{head} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}")
        .unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    (status, head.to_ascii_lowercase(), body.to_string())
}

/// What the headers of a denial are, and how it is written, asked twice on one connection: the
/// short way, and, as it closes, the other.
fn denied(at: SocketAddr, accept: &str) -> (String, String) {
    let accept = if accept.is_empty() { String::new() } else { format!("Accept: {accept}\r\n") };
    let body = r#"{"key":"k","limit":"2/min","cost":3}"#;
    let request = |more: &str| {
        let length = body.len();
        format!(
            "POST /v1/check HTTP/1.1\r\nHost: localhost\r\n{accept}{more}Content-Length: {length}\r\n\r\n{body}"
        )
    };
    let mut stream = TcpStream::connect(at).unwrap();
    write!(stream, "{}{}", request(""), request("Connection: close\r\n")).unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let answers: Vec<&str> = text.split("HTTP/1.1 429 Too Many Requests\r\n").skip(1).collect();
    assert_eq!(answers.len(), 2, "{text}");
    let read = |answer: &str| {
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        let unstable = ["date:", "connection:", "content-length:", "x-ratelimit-reset:"];
        let lines = head.lines().filter(|line| !unstable.iter().any(|name| line.starts_with(name)));
        let (before, time) = body.split_once("\"t_us\":").unwrap_or((body, ""));
        (
            lines.collect::<Vec<_>>().join("\n"),
            format!("{before}{}", time.trim_start_matches(|c: char| c.is_ascii_digit())),
        )
    };
    assert_eq!(read(answers[0]), read(answers[1]));
    read(answers[0])
}

#[test]
fn a_denial_is_written_as_it_is_accepted_and_else_as_the_setting_says() {
    let kind = |head: &str| {
        head.lines().find_map(|line| line.strip_prefix("content-type: ")).unwrap().to_string()
    };
    for (setting, accept, expected) in [
        ("", "", "application/problem+json"),
        ("", "*/*", "application/problem+json"),
        ("", "application/json", "application/json"),
        ("", "text/html, text/plain;q=0.5", "text/plain; charset=utf-8"),
        ("http: { denial: json }\n", "", "application/json"),
        ("http: { denial: text }\n", "*/*", "text/plain; charset=utf-8"),
        ("http: { denial: text }\n", "application/problem+json", "application/problem+json"),
    ] {
        let open = open(setting);
        let (head, body) = denied(open.at, accept);
        assert_eq!(kind(&head), expected, "{setting} {accept}");
        match expected {
            "application/problem+json" => {
                assert!(body.contains("\"violated-policies\":[\"2/m\"]"), "{body}")
            }
            "application/json" => {
                assert!(body.contains("\"allowed\":false") && !body.contains("violated"), "{body}")
            }
            _ => assert_eq!(
                body,
                "Too many requests. This one costs more than its limit ever allows. Violated policies: 2/m.\n"
            ),
        }
    }
}

#[test]
fn which_headers_are_sent_is_a_setting() {
    for (setting, expected) in [
        (
            "[draft-10, github]",
            "ratelimit-policy: \"2/m\";q=2;w=60\nratelimit: \"2/m\";r=2\nx-ratelimit-limit: 2\nx-ratelimit-remaining: 2\nx-ratelimit-used: 0\nx-ratelimit-resource: 2/m\n",
        ),
        ("[ietf]", "ratelimit-policy: \"2/m\";q=2;w=60\nratelimit: \"2/m\";r=2\n"),
        ("[draft-7]", "ratelimit-policy: 2;w=60\nratelimit: limit=2, remaining=2, reset=0\n"),
        (
            "[github]",
            "x-ratelimit-limit: 2\nx-ratelimit-remaining: 2\nx-ratelimit-used: 0\nx-ratelimit-resource: 2/m\n",
        ),
        ("[none]", ""),
        ("[]", ""),
    ] {
        let open = open(&format!("http: {{ headers: {setting} }}\n"));
        let (head, _) = denied(open.at, "");
        let expected = format!(
            "{expected}content-type: application/problem+json\ncache-control: no-store\nx-content-type-options: nosniff"
        );
        assert_eq!(head, expected, "{setting}");
    }
    for (setting, problem) in [
        ("headers: [draft-6]", "\"draft-6\": expected draft-10 (or ietf), draft-7, github or none"),
        (
            "headers: [draft-7, draft-10]",
            "draft-10 and draft-7 have the same headers: expected one of the two",
        ),
        ("denial: html", "\"html\": expected problem, json or text"),
    ] {
        let error =
            Config::parse(&format!("http: {{ {setting} }}\n"), "test").unwrap_err().to_string();
        assert!(error.starts_with("test:1:") && error.contains(problem), "{error}");
    }
}

#[test]
fn a_check_is_answered_with_numbers_and_headers() {
    let open = open("");
    let body = r#"{"key":"user:7","limit":"2/min","cost":2}"#;
    let (status, headers, answer) = exchange(open.at, "POST /v1/check", body);
    assert_eq!(status, 200, "{answer}");
    assert!(headers.contains("ratelimit: \"2/m\";r=0;t=30"), "{headers}");
    assert!(headers.contains("x-ratelimit-remaining: 0"), "{headers}");
    let (start, rest) = answer.split_once(",\"key\"").unwrap();
    assert!(start.starts_with("{\"t_us\":"));
    assert_eq!(
        format!("\"key\"{rest}"),
        r#""key":"user:7","cost":2,"op":"check","limit":"2/min","allowed":true,"granted":2,"remaining":0,"retry_after_us":0,"reset_after_us":60000000,"next_after_us":30000000,"charges":[{"limit":"2/m","amount":2,"cost":2,"binding":true,"allowed":true,"granted":2,"remaining":0,"retry_after_us":0,"reset_after_us":60000000,"next_after_us":30000000}],"source":"store"}"#
    );
    let (status, headers, answer) =
        exchange(open.at, "POST /v1/check", r#"{"key":"user:7","limit":"2/min"}"#);
    assert_eq!(status, 429);
    assert!(
        headers.contains("retry-after: 30") || headers.contains("retry-after: 29"),
        "{headers}"
    );
    assert!(headers.contains("content-type: application/problem+json"), "{headers}");
    assert!(
        answer.contains("#quota-exceeded") && answer.contains(r#""violated-policies":["2/m"]"#),
        "{answer}"
    );
    let never = exchange(open.at, "POST /v1/check", r#"{"key":"k","limit":"2/min","cost":3}"#);
    assert!(
        never.0 == 429
            && !never.1.contains("retry-after")
            && never.2.contains("\"retry_after_us\":null"),
        "{never:?}"
    );
}

#[test]
fn rules_decide_all_or_nothing_and_shadows_only_look_on() {
    let open = open(
        "rules:\n  - { name: per-user, by: [user], limit: 1/min }\n  - { name: all, limit: 3/min }\n  - { name: trial, mode: shadow, limit: 1/min }\n  - { name: banned, when: { user: mallory }, limit: deny }\n",
    );
    let ask = |user: &str| {
        exchange(open.at, "POST /v1/check", &format!(r#"{{"attributes":{{"user":"{user}"}}}}"#))
    };
    let (status, _, answer) = ask("a");
    assert!(
        status == 200 && answer.contains(r#""shadow":[{"rule":"trial","allowed":true}]"#),
        "{answer}"
    );
    let (status, headers, answer) = ask("a");
    assert!(status == 429 && answer.contains(r#""violated-policies":["per-user"]"#), "{answer}");
    assert!(
        headers.contains(r#"ratelimit-policy: "per-user";q=1;w=60, "all";q=3;w=60"#),
        "{headers}"
    );
    let (status, _, answer) = ask("b");
    assert!(
        status == 200 && answer.contains(r#""shadow":[{"rule":"trial","allowed":false}]"#),
        "{answer}"
    );
    assert_eq!(ask("c").0, 200, "a denial took nothing from all");
    assert_eq!(ask("d").0, 429);
    let (status, headers, answer) = ask("mallory");
    assert!(
        status == 403 && answer.contains(r#""violated-policies":["all","banned"]"#),
        "{answer}"
    );
    assert!(!headers.contains("ratelimit") && !headers.contains("retry-after"), "{headers}");
}

#[test]
fn reserve_settle_lease_release_and_batches() {
    let open = open("");
    let ask = |path: &str, body: &str| exchange(open.at, &format!("POST /v1/{path}"), body);
    let (_, _, answer) = ask("reserve", r#"{"key":"k","limit":"10/min","cost":6}"#);
    let id = answer.split("\"id\":").nth(1).unwrap().split(',').next().unwrap().to_string();
    let (status, _, answer) = ask(
        "settle",
        &format!(r#"{{"key":"k","limit":"10/min","cost":2,"reserved":6,"id":{id}}}"#),
    );
    assert!(status == 200 && answer.contains("\"remaining\":8"), "{answer}");
    assert_eq!(ask("settle", r#"{"key":"k","limit":"10/min"}"#).0, 400);
    let (status, _, answer) =
        ask("check", r#"{"checks":[{"key":"b","limit":"1/min"},{"key":"b","limit":"1/min"}]}"#);
    assert_eq!(status, 200);
    assert_eq!(answer.matches("\"allowed\":true,\"granted\"").count(), 2, "{answer}");
}

#[test]
fn mistakes_name_the_field() {
    let open = open("");
    for (body, expected) in [
        ("", "the body is empty"),
        ("[]", "expected"),
        (r#"{"key":"k"}"#, "limit is missing"),
        (r#"{"limit":"1/s"}"#, "key is missing"),
        (r#"{"key":"k","limit":"1/fortnight"}"#, "limit is"),
        (r#"{"key":"k","limit":"1/s","cost":-1}"#, "-1"),
        (r#"{"key":"k","limit":"1/s","cost":1.5}"#, "1.5"),
        (r#"{"key":"k","limit":"1/s","kost":1}"#, "kost"),
        (r#"{"key":"k","limit":"1/s","attributes":{}}"#, "one or the other"),
        (r#"{"checks":[]}"#, "checks has 0 items"),
    ] {
        let (status, _, answer) = exchange(open.at, "POST /v1/check", body);
        assert!(status == 400 && answer.contains(expected), "{body} answered {status} {answer}");
    }
    let long = format!(r#"{{"key":"{}","limit":"1/s"}}"#, "k".repeat(2000));
    assert_eq!(exchange(open.at, "POST /v1/check", &long).0, 400);
    let huge = format!(r#"{{"key":"{}","limit":"1/s"}}"#, "k".repeat(70_000));
    assert_eq!(exchange(open.at, "POST /v1/check", &huge).0, 413);
    assert_eq!(exchange(open.at, "GET /nowhere", "").0, 404);
    assert_eq!(exchange(open.at, "GET /readyz", "").0, 200);
}

#[test]
fn listeners_are_not_opened_to_everybody_by_accident() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let config =
        Config::parse("listen: { http: 0.0.0.0:0, resp: off, grpc: off }\n", "test").unwrap();
    let error = runtime.block_on(start(config, Options::default())).unwrap_err().to_string();
    assert!(error.contains("accept any client"), "{error}");
}

impl Drop for Open {
    fn drop(&mut self) {
        let running = self.running.take().unwrap();
        assert!(self.runtime.block_on(running.stop()), "every request was answered");
    }
}
