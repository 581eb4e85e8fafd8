//! `missing: share | skip | deny`: requests that lack what a rule is by, the same over every
//! protocol.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use serde_json::{Value, json};
use tidegate::{ManualClock, Memory};
use tidegate_server::backend::Backend;
use tidegate_server::config::Config;
use tidegate_server::grpc::SERVICE;
use tidegate_server::grpc::message::{
    Code, Descriptor, Entry, RateLimitRequest, RateLimitResponse,
};
use tidegate_server::{Options, start_over};
use tidegate_testkit::Client;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::Endpoint;
use tonic_prost::ProstCodec;

use crate::listeners::{BEGIN, Http, Listeners};

const RULES: &str = "\
trusted_proxies: [127.0.0.1]
rules:
  - { name: shared, by: [header.x-shared], missing: share, limit: 3/h }
  - { name: skipped, by: [header.x-skip], missing: skip, limit: 1/h }
  - { name: denied, when: { path: /keys }, by: [header.x-key, path], missing: deny, limit: 1/h }
";

/// The path of a request, its headers, and whether it is allowed.
type Step = (&'static str, &'static [(&'static str, &'static str)], bool);

/// An empty header is a missing one.
const HISTORY: &[Step] = &[
    ("/", &[], true),
    ("/", &[("x-skip", "")], true),
    ("/", &[("x-skip", "a")], true),
    ("/", &[("x-shared", "b"), ("x-skip", "a")], false),
    ("/", &[("x-shared", "b")], true),
    ("/", &[], false),
    ("/keys", &[("x-shared", "c")], false),
    ("/keys", &[("x-shared", "c"), ("x-key", "")], false),
    ("/keys", &[("x-shared", "c"), ("x-key", "k")], true),
    ("/keys", &[("x-shared", "c"), ("x-key", "k")], false),
    ("/keys", &[("x-shared", "c"), ("x-key", "l")], true),
];

/// Where each protocol listens.
struct At {
    http: SocketAddr,
    grpc: SocketAddr,
    resp: u16,
    proxy: SocketAddr,
    runtime: tokio::runtime::Runtime,
}

/// Plays the history against a server of its own.
fn play(ask: impl Fn(&At, &str, &[(&str, &str)]) -> bool) {
    for has_fast_path in [true, false] {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let text = format!(
            "listen: {{ http: 127.0.0.1:0, grpc: 127.0.0.1:0, resp: 127.0.0.1:0, proxy: 127.0.0.1:0 }}\nlog: {{ level: off }}\nproxy: {{ upstream: \"http://{}\" }}\n{RULES}",
            upstream()
        );
        let mut config = Config::parse(&text, "test").unwrap();
        config.proxy.as_mut().unwrap().has_fast_path = has_fast_path;
        let clock = ManualClock::new();
        clock.set(BEGIN);
        let store = Backend::Memory(Memory::builder().clock(clock).build());
        let running = runtime.block_on(start_over(store, config, Options::default())).unwrap();
        let at = At {
            http: running.http.unwrap(),
            grpc: running.grpc.unwrap(),
            resp: running.resp.unwrap().port(),
            proxy: running.proxy.unwrap(),
            runtime,
        };
        for (step, (path, headers, allowed)) in HISTORY.iter().enumerate() {
            assert_eq!(ask(&at, path, headers), *allowed, "step {step}: {path} {headers:?}");
        }
        assert!(at.runtime.block_on(running.stop()));
    }
}

/// An upstream that answers `ok` to everything.
fn upstream() -> SocketAddr {
    let upstream = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = upstream.local_addr().unwrap();
    std::thread::spawn(move || {
        for stream in upstream.incoming() {
            let mut stream = stream.unwrap();
            let (mut head, mut byte) = (Vec::new(), [0]);
            while !head.ends_with(b"\r\n\r\n") && stream.read(&mut byte).is_ok_and(|read| read == 1)
            {
                head.push(byte[0]);
            }
            let _ = stream
                .write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok");
        }
    });
    at
}

/// As callers of the check API name them.
fn attributes(path: &str, headers: &[(&str, &str)]) -> Vec<(String, String)> {
    let headers = headers.iter().map(|(name, value)| (format!("header.{name}"), value.to_string()));
    [("path".into(), path.into())].into_iter().chain(headers).collect()
}

fn lines(headers: &[(&str, &str)]) -> String {
    headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect()
}

#[test]
fn the_check_api() {
    play(|at, path, headers| {
        let attributes: serde_json::Map<String, Value> = attributes(path, headers)
            .into_iter()
            .map(|(name, value)| (name, value.into()))
            .collect();
        let answer = Http::connect(at.http)
            .post("/v1/check", &json!({ "attributes": attributes }).to_string());
        answer.status == 200
    });
}

#[test]
fn resp() {
    play(|at, path, headers| {
        let mut client = Client::connect(at.resp).unwrap();
        let pairs = attributes(path, headers);
        let words: Vec<&str> =
            pairs.iter().flat_map(|(name, value)| [name.as_str(), value.as_str()]).collect();
        let answer = client.command(&[&["TG.RULES"], &words[..]].concat()).unwrap();
        answer.array()[0].int() == 1
    });
}

#[test]
fn grpc() {
    play(|at, path, headers| {
        let entries =
            attributes(path, headers).into_iter().map(|(key, value)| Entry { key, value });
        let descriptor = Descriptor { entries: entries.collect(), ..Descriptor::default() };
        let request =
            RateLimitRequest { domain: "d".into(), descriptors: vec![descriptor], hits_addend: 0 };
        let endpoint = Endpoint::from_shared(format!("http://{}", at.grpc))
            .unwrap()
            .timeout(Duration::from_secs(20));
        let response = at.runtime.block_on(async {
            let mut client = tonic::client::Grpc::new(endpoint.connect().await.unwrap());
            client.ready().await.unwrap();
            let path = PathAndQuery::try_from(format!("/{SERVICE}/ShouldRateLimit")).unwrap();
            let codec = ProstCodec::<RateLimitRequest, RateLimitResponse>::default();
            client.unary(tonic::Request::new(request), path, codec).await.unwrap().into_inner()
        });
        response.overall_code == Code::Ok as i32
    });
}

#[test]
fn forward_auth() {
    play(|at, path, headers| {
        let mut client = Http::connect(at.http);
        client.send(&format!(
            "GET /v1/auth HTTP/1.1\r\nhost: t\r\nx-forwarded-method: GET\r\nx-forwarded-host: h\r\nx-forwarded-uri: {path}\r\nx-forwarded-for: 192.0.2.7\r\n{}\r\n",
            lines(headers)
        ));
        client.receive().unwrap().status == 204
    });
}

#[test]
fn the_proxy() {
    play(|at, path, headers| {
        let mut stream = TcpStream::connect(at.proxy).unwrap();
        write!(
            stream,
            "GET {path} HTTP/1.1\r\nhost: h\r\n{}connection: close\r\n\r\n",
            lines(headers)
        )
        .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer.starts_with("HTTP/1.1 200 ")
    });
}

#[test]
fn a_denial_names_what_is_missing() {
    let listeners = Listeners::in_memory(RULES);
    let answer =
        listeners.http().post("/v1/check", r#"{"attributes":{"path":"/keys","header.x-key":""}}"#);
    let answer: Value = serde_json::from_str(&answer.body).unwrap();
    assert_eq!(
        (&answer["rule"], &answer["missing"], &answer["retry_after_us"]),
        (&json!("denied"), &json!("header.x-key"), &Value::Null)
    );
    // Nothing was charged.
    let left = listeners.http().post("/v1/peek", r#"{"attributes":{"path":"/"},"cost":3}"#);
    assert_eq!(left.status, 200, "{}", left.body);
}

/// A rule with `missing: deny` denies like any rule that denies: also what another rule exempts.
#[test]
fn exemptions_do_not_lift_a_denial() {
    let listeners = Listeners::in_memory(
        "rules:\n  - { name: keys, by: [key], missing: deny, limit: 1/h }\n  - { name: staff, when: { user: root }, limit: exempt }\n",
    );
    let ask = |attributes: &str| {
        listeners.http().post("/v1/check", &format!(r#"{{"attributes":{attributes}}}"#)).status
    };
    assert_eq!(ask(r#"{"user":"root"}"#), 403);
    assert_eq!([(); 3].map(|()| ask(r#"{"user":"root","key":"a"}"#)), [200; 3]);
}

/// A descriptor that has the attribute counts; one that lacks it denies only if no other has it.
#[test]
fn one_descriptor_that_has_the_attribute_is_enough() {
    let listeners =
        Listeners::in_memory("rules:\n  - { name: keys, by: [key], missing: deny, limit: 1/h }\n");
    let ask = |descriptors: Value| {
        listeners
            .http()
            .post("/json", &json!({ "domain": "d", "descriptors": descriptors }).to_string())
            .status
    };
    let entry = |key: &str, value: &str| json!({ "entries": [{ "key": key, "value": value }] });
    assert_eq!(ask(json!([entry("path", "/")])), 429);
    assert_eq!(ask(json!([entry("path", "/"), entry("key", "a")])), 200);
    assert_eq!(ask(json!([entry("path", "/"), entry("key", "a")])), 429);
}

#[test]
fn explain_says_why_a_rule_is_skipped_or_denies() {
    let listeners = Listeners::in_memory(RULES);
    let explain = |path: &str| {
        listeners.runtime.block_on(listeners.engine().explain(&[("path", path)][..], 1)).unwrap()
    };
    let text = explain("/").to_string();
    assert!(text.contains("shared: applies to no header.x-shared, costs 1\n"), "{text}");
    assert!(
        text.contains(
            "skipped: does not apply: header.x-skip is missing, and the rule says `missing: skip`\n"
        ),
        "{text}"
    );
    assert!(text.ends_with("the request would pass\n"), "{text}");
    let denied = explain("/keys");
    let text = denied.to_string();
    assert!(
        text.contains(
            "denied: denies: header.x-key is missing, and the rule says `missing: deny`\n"
        ),
        "{text}"
    );
    assert!(text.ends_with("the request would be denied\n"), "{text}");
    let json = denied.to_json();
    assert_eq!(
        json["rules"][1]["because"],
        json!({ "attribute": "header.x-skip", "value": null, "missing": "skip" })
    );
    assert_eq!(
        json["rules"][2]["because"],
        json!({ "attribute": "header.x-key", "value": null, "missing": "deny" })
    );
    assert_eq!(
        (&json["rules"][2]["applies"], &json["rules"][2]["allowed"]),
        (&json!(true), &json!(false))
    );
}

/// There is no budget for requests that a rule skips or denies; the shared one can be reset.
#[test]
fn reset_finds_the_shared_budget_and_no_other() {
    let listeners = Listeners::in_memory(RULES);
    let reset = |body: Value| {
        let answer = listeners.http().post("/v1/reset", &body.to_string());
        (answer.status, answer.body)
    };
    assert_eq!(
        reset(json!({ "rule": "shared", "by": { "header.x-shared": "" } })),
        (200, r#"{"op":"reset","reset":[{"rule":"shared","by":{"header.x-shared":""}}]}"#.into())
    );
    let (status, body) = reset(json!({ "rule": "skipped", "by": { "header.x-skip": "" } }));
    let expected = "by has an empty header.x-skip: rule skipped says missing: skip, so there is no budget for requests without it; give a value";
    assert!(status == 400 && body.contains(expected), "{status} {body}");
    assert_eq!(
        reset(json!({ "rule": "*", "attributes": { "path": "/keys" } })),
        (200, r#"{"op":"reset","reset":[{"rule":"shared","by":{"header.x-shared":null}}]}"#.into())
    );
    let rules = listeners.engine().rules();
    let words: Vec<&str> =
        rules.iter().map(|rule| rule.missing.unwrap_or_default().name()).collect();
    assert_eq!(words, ["share", "skip", "deny"]);
}
