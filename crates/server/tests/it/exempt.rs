//! `limit: exempt`, over every protocol: no rule charges the request, and rules that deny still
//! deny it.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};

use tidegate_server::config::Config;
use tidegate_server::engine::Engine;
use tidegate_server::{Options, start};

use crate::listeners::Listeners;

const RULES: &str = "\
trusted_proxies: [127.0.0.1]
rules:
  - { name: per-user, by: [header.x-user], limit: 2/h }
  - { name: trial, mode: shadow, limit: 1/h }
  - { name: staff, when: { header.x-user: root }, limit: exempt }
  - { name: closed, when: { path: /closed }, limit: deny }
";

/// What is left for root and in all, as the rules see it without the exemption.
fn untouched(engine: &Engine) {
    let text = engine.observer().metrics().text(engine.store(), 0);
    let keys =
        text.lines().find_map(|line| line.strip_prefix("tidegate_store_keys ")).expect(&text);
    assert_eq!(keys, "0", "nothing was charged");
}

#[test]
fn the_check_api_and_resp_charge_nothing_and_say_which_rule_exempted() {
    let listeners = Listeners::in_memory(RULES);
    let (mut http, mut resp) = (listeners.http(), listeners.resp());
    for _ in 0..3 {
        let answer = http.post("/v1/check", r#"{"attributes":{"header.x-user":"root"}}"#);
        assert_eq!(
            (answer.status, answer.body.as_str()),
            (
                200,
                r#"{"cost":1,"op":"check","rule":"staff","allowed":true,"exempt":true,"charges":[]}"#
            )
        );
        assert!(!answer.head.to_ascii_lowercase().contains("ratelimit"), "{answer:?}");
        let answer = resp.command(&["TG.RULES", "header.x-user", "root"]).unwrap();
        assert_eq!(answer.array()[0].int(), 1, "{answer:?}");
    }
    untouched(listeners.engine());
    let denied =
        http.post("/v1/check", r#"{"attributes":{"header.x-user":"root","path":"/closed"}}"#);
    assert!(
        !denied.body.contains("exempt") && denied.body.contains(r#""rule":"closed""#),
        "{denied:?}"
    );
    let limited = |http: &mut crate::listeners::Http| {
        http.post("/v1/check", r#"{"attributes":{"header.x-user":"a"}}"#).status
    };
    assert_eq!([(); 3].map(|()| limited(&mut http)), [200, 200, 429]);
}

#[test]
fn forward_auth_charges_nothing() {
    let listeners = Listeners::in_memory(RULES);
    let ask = |user: &str, uri: &str| {
        let mut client = listeners.http();
        client.send(&format!(
            "GET /v1/auth HTTP/1.1\r\nhost: t\r\nx-forwarded-method: GET\r\nx-forwarded-host: h\r\nx-forwarded-uri: {uri}\r\nx-forwarded-for: 192.0.2.7\r\nx-user: {user}\r\n\r\n"
        ));
        client.receive().unwrap().status
    };
    assert_eq!([(); 3].map(|()| ask("root", "/")), [204; 3]);
    untouched(listeners.engine());
    assert!(ask("root", "/closed") >= 400);
    assert_eq!([(); 3].map(|()| ask("a", "/")), [204, 204, 429]);
}

/// Descriptors of Envoy's protocol, also as `/json`: one that is exempt exempts the request.
#[test]
fn descriptors_charge_nothing() {
    let listeners = Listeners::in_memory(RULES);
    let mut http = listeners.http();
    let mut ask = |entries: &[(&str, &str)]| {
        let descriptors: Vec<String> = entries
            .iter()
            .map(|(key, value)| format!(r#"{{"entries":[{{"key":"{key}","value":"{value}"}}]}}"#))
            .collect();
        let body = format!(r#"{{"domain":"d","descriptors":[{}]}}"#, descriptors.join(","));
        let answer = http.post("/json", &body);
        (answer.status, answer.body)
    };
    for _ in 0..3 {
        let (status, body) = ask(&[("header.x-user", "root"), ("ip", "192.0.2.7")]);
        assert!(status == 200 && body.contains("4294967295"), "{body}");
    }
    untouched(listeners.engine());
    assert_eq!(ask(&[("header.x-user", "root"), ("path", "/closed")]).0, 429);
    assert_eq!([(); 3].map(|()| ask(&[("header.x-user", "a")]).0), [200, 200, 429]);
}

#[test]
fn the_proxy_charges_nothing_and_settles_nothing() {
    let upstream = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = upstream.local_addr().unwrap();
    std::thread::spawn(move || {
        for stream in upstream.incoming() {
            let mut stream = stream.unwrap();
            let mut head = Vec::new();
            let mut byte = [0];
            while !head.ends_with(b"\r\n\r\n") && stream.read(&mut byte).is_ok_and(|read| read == 1)
            {
                head.push(byte[0]);
            }
            let _ = stream
                .write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok");
        }
    });
    let text = format!(
        "listen: {{ http: off, grpc: off, resp: off, proxy: 127.0.0.1:0 }}\nlog: {{ level: off }}\nproxy: {{ upstream: \"http://{to}\" }}\n{RULES}  - {{ name: slow, limit: 1/h, settle: {{ by: response_bytes, per: 1 }} }}\n"
    );
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let running =
        runtime.block_on(start(Config::parse(&text, "test").unwrap(), Options::default())).unwrap();
    let at = running.proxy.unwrap();
    let ask = |user: &str, path: &str| {
        let mut stream = TcpStream::connect(at).unwrap();
        write!(
            stream,
            "GET {path} HTTP/1.1\r\nhost: h\r\nx-user: {user}\r\nconnection: close\r\n\r\n"
        )
        .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer.split(' ').nth(1).unwrap().parse::<u16>().unwrap()
    };
    assert_eq!([(); 3].map(|()| ask("root", "/")), [200; 3]);
    untouched(running.engine());
    assert!(ask("root", "/closed") >= 400);
    assert_eq!([(); 2].map(|()| ask("a", "/")), [200, 429]);
    assert!(runtime.block_on(running.stop()));
}

#[test]
fn explain_names_the_rule_that_exempted() {
    let listeners = Listeners::in_memory(RULES);
    let explain = |attributes: &[(&str, &str)]| {
        listeners.runtime.block_on(listeners.engine().explain(attributes, 1)).unwrap().to_string()
    };
    let text = explain(&[("header.x-user", "root")]);
    assert!(
        text.contains("staff: applies to everybody: exempts from all rules but those that deny\n"),
        "{text}"
    );
    assert!(
        text.ends_with("the request would pass: staff exempts it, and no rule charges it\n"),
        "{text}"
    );
    let text = explain(&[("header.x-user", "root"), ("path", "/closed")]);
    assert!(text.ends_with("the request would be denied\n"), "{text}");
}

/// Where `unlimited` and `exempt` cannot work, the message says what to write.
#[test]
fn unlimited_is_for_overrides_and_exempt_for_rules() {
    for (rule, expected) in [
        (
            "{ name: a, limit: unlimited }",
            "f:2:23: rule a: limit: unlimited has no effect, and the other rules still apply: write `limit: exempt` to exempt the requests that match from all rules, or remove the rule",
        ),
        (
            "{ name: a, limit: exempt, mode: shadow }",
            "f:2:37: rule a: limit: exempt cannot be in shadow mode, in which a rule has no effect: remove `mode: shadow`, or the rule",
        ),
        (
            "{ name: a, limit: exempt, overrides: [{ when: { tier: x }, limit: 1/s }] }",
            "f:2:31: rule a: limit: exempt has no overrides: narrow `when` instead, for example with `!PATTERN`",
        ),
        (
            "{ name: a, limit: 1/s, overrides: [{ when: { tier: x }, limit: exempt }] }",
            "f:2:68: rule a: limit: exempt in an override: write `limit: unlimited` to lift this rule alone, or a rule of its own with `limit: exempt` to lift all rules",
        ),
    ] {
        let error = Config::parse(&format!("rules:\n  - {rule}\n"), "f").unwrap_err().to_string();
        assert_eq!(error, expected, "{rule}");
    }
    Config::parse(
        "rules: [{ name: a, limit: 1/s, overrides: [{ when: { tier: x }, limit: unlimited }] }]",
        "f",
    )
    .unwrap();
}
