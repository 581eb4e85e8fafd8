//! Rules that change while the server runs.

use std::io::{Read, Write};
use std::time::Duration;

use tidegate::Op;
use tidegate_server::config::Config;
use tidegate_server::{Options, start};
use tidegate_testkit::wait_until;

#[test]
fn a_changed_file_is_read_and_a_bad_one_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("tidegate.yaml");
    let rules = |limit: &str| {
        format!("listen: {{ http: off, resp: off, grpc: off }}\nrules:\n  - {{ name: a, limit: {limit} }}\n")
    };
    std::fs::write(&file, rules("5/min")).unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let options = Options { rules_file: Some(file.clone()), ..Options::default() };
    let running = runtime.block_on(start(Config::load(&file).unwrap(), options)).unwrap();
    let gate = running.gate().clone();
    let peek = |op: Op| {
        let none: [(&str, &str); 0] = [];
        let ruling = runtime.block_on(gate.rule(op, &none[..], 1, None)).unwrap();
        let (charged, verdict) = ruling.binding().map(|(charged, verdict)| (charged.clone(), *verdict)).unwrap();
        (charged.limit.to_string(), verdict.remaining)
    };
    assert_eq!(peek(Op::Check), ("5/m".into(), 4));
    // Replaced by a rename, as editors and Kubernetes do it; what was used stays used.
    let other = folder.path().join("other");
    std::fs::write(&other, rules("3/min")).unwrap();
    std::fs::rename(&other, &file).unwrap();
    wait_until("the new rules count", Duration::from_secs(20), || peek(Op::Peek) == ("3/m".into(), 2));
    let known = gate.rules();
    std::fs::write(&file, "rules: [{ name: a, limit: nonsense }]").unwrap();
    std::fs::write(&other, rules("9/min")).unwrap();
    std::fs::rename(&other, &file).unwrap();
    wait_until("the good rules count", Duration::from_secs(20), || peek(Op::Peek).0 == "9/m");
    assert!(!std::sync::Arc::ptr_eq(&known, &gate.rules()));
    assert!(runtime.block_on(running.stop()));
}

#[test]
fn a_token_that_changes_in_its_file_counts_at_once_and_a_bad_one_does_not() {
    let folder = tempfile::tempdir().unwrap();
    let (token, other) = (folder.path().join("token"), folder.path().join("other"));
    std::fs::write(&token, "first\n").unwrap();
    let text = format!(
        "listen: {{ http: 127.0.0.1:0, resp: off, grpc: off }}\ntokens: {{ check_file: {:?} }}\n",
        token.to_str().unwrap()
    );
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let config = Config::parse(&text, "test").unwrap();
    let running = runtime.block_on(start(config, Options::default())).unwrap();
    let at = running.http.unwrap();
    let status = |word: &str| {
        let body = r#"{"key":"k","limit":"1000/s"}"#;
        let mut stream = std::net::TcpStream::connect(at).unwrap();
        let length = body.len();
        write!(
            stream,
            "POST /v1/check HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {word}\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}"
        )
        .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer.split(' ').nth(1).unwrap().to_string()
    };
    assert_eq!((status("first").as_str(), status("second").as_str()), ("200", "401"));
    // Replaced by a rename, as Kubernetes does it.
    std::fs::write(&other, "second\n").unwrap();
    std::fs::rename(&other, &token).unwrap();
    wait_until("the new token counts", Duration::from_secs(20), || status("second") == "200");
    assert_eq!(status("first"), "401");
    // What is no token leaves the last good one, and never an open door.
    let failures = || {
        let shown = running.gate().observer().metrics().text(running.gate().store(), 0);
        shown.lines().any(|line| line == "tidegate_reloads_total{what=\"tokens\",result=\"failed\"} 1")
    };
    std::fs::write(&other, "not a token\n").unwrap();
    std::fs::rename(&other, &token).unwrap();
    wait_until("the bad token is refused", Duration::from_secs(20), failures);
    assert_eq!((status("second").as_str(), status("first").as_str()), ("200", "401"));
    assert!(runtime.block_on(running.stop()));
}
