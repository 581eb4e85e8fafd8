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
        format!(
            "listen: {{ http: off, resp: off, grpc: off }}\nrules:\n  - {{ name: a, limit: {limit} }}\n"
        )
    };
    std::fs::write(&file, rules("5/min")).unwrap();
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let options = Options { rules_file: Some(file.clone()), ..Options::default() };
    let running = runtime.block_on(start(Config::load(&file).unwrap(), options)).unwrap();
    let engine = running.engine().clone();
    let peek = |op: Op| {
        let none: [(&str, &str); 0] = [];
        let matches = engine.matching(&none[..], 1).unwrap();
        let ruling = runtime.block_on(engine.check_rules(op, matches, None)).unwrap();
        let (charged, verdict) =
            ruling.binding().map(|(charged, verdict)| (charged.clone(), *verdict)).unwrap();
        (charged.limit.to_string(), verdict.remaining)
    };
    assert_eq!(peek(Op::Check), ("5/m".into(), 4));
    // Replaced by a rename, as editors and Kubernetes do it; what was used stays used.
    let other = folder.path().join("other");
    std::fs::write(&other, rules("3/min")).unwrap();
    std::fs::rename(&other, &file).unwrap();
    wait_until("the new rules count", Duration::from_secs(20), || {
        peek(Op::Peek) == ("3/m".into(), 2)
    });
    let known = engine.rules();
    std::fs::write(&file, "rules: [{ name: a, limit: nonsense }]").unwrap();
    std::fs::write(&other, rules("9/min")).unwrap();
    std::fs::rename(&other, &file).unwrap();
    wait_until("the good rules count", Duration::from_secs(20), || peek(Op::Peek).0 == "9/m");
    assert!(!std::sync::Arc::ptr_eq(&known, &engine.rules()));
    assert!(runtime.block_on(running.stop()));
}

#[test]
fn a_token_that_changes_in_its_file_is_applied_and_a_bad_one_is_not() {
    let folder = tempfile::tempdir().unwrap();
    let (token, other) = (folder.path().join("token"), folder.path().join("other"));
    std::fs::write(&token, "first\n").unwrap();
    let text = format!(
        "listen: {{ http: 127.0.0.1:0, resp: off, grpc: off }}\ntokens: {{ check_file: {:?} }}\n",
        token.to_str().unwrap()
    );
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let config = Config::parse(&text, "test").unwrap();
    let running = runtime.block_on(start(config, Options::default())).unwrap();
    let at = running.http.unwrap();
    let status = |word: &str| {
        let body = r#"{"key":"k","limit":"1000/s"}"#;
        let mut stream = std::net::TcpStream::connect(at).unwrap();
        let length = body.len();
        write!(
            stream,
            "POST /v1/check HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {word}\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}"
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
    // What is no token leaves the last good one, and never an open listener.
    let failures = || {
        let shown = running.engine().observer().metrics().text(running.engine().store(), 0);
        shown
            .lines()
            .any(|line| line == "tidegate_reloads_total{what=\"tokens\",result=\"failed\"} 1")
    };
    std::fs::write(&other, "not a token\n").unwrap();
    std::fs::rename(&other, &token).unwrap();
    wait_until("the bad token is refused", Duration::from_secs(20), failures);
    assert_eq!((status("second").as_str(), status("first").as_str()), ("200", "401"));
    assert!(runtime.block_on(running.stop()));
}

/// A server that reloads a file, stopped when it is dropped.
struct Reloading {
    runtime: tokio::runtime::Runtime,
    running: Option<tidegate_server::Running>,
    file: std::path::PathBuf,
    _folder: tempfile::TempDir,
}

impl Reloading {
    fn start(text: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("tidegate.yaml");
        std::fs::write(&file, text).unwrap();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap();
        let options = Options { rules_file: Some(file.clone()), ..Options::default() };
        let running = runtime.block_on(start(Config::load(&file).unwrap(), options)).unwrap();
        Reloading { runtime, running: Some(running), file, _folder: folder }
    }

    /// Replaces the file by a rename.
    fn write(&self, text: &str) {
        let other = self.file.with_extension("new");
        std::fs::write(&other, text).unwrap();
        std::fs::rename(&other, &self.file).unwrap();
    }

    fn running(&self) -> &tidegate_server::Running {
        self.running.as_ref().unwrap()
    }

    fn get(&self, path: &str, headers: &str) -> String {
        let mut stream = std::net::TcpStream::connect(self.running().http.unwrap()).unwrap();
        let mut answer = String::new();
        // A connection for which there is no room is closed at any moment.
        let _ = write!(
            stream,
            "GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{headers}\r\n"
        );
        let _ = stream.read_to_string(&mut answer);
        answer
    }

    fn is_in_force(&self) -> bool {
        let engine = self.running().engine();
        let text = engine.observer().metrics().text(engine.store(), 0);
        let line =
            text.lines().find_map(|line| line.strip_prefix("tidegate_config_in_force ")).unwrap();
        line == "1"
    }
}

impl Drop for Reloading {
    fn drop(&mut self) {
        if let Some(running) = self.running.take() {
            self.runtime.block_on(running.stop());
        }
    }
}

const BOUND: Duration = Duration::from_secs(20);

/// What needs a restart is named and keeps `tidegate_config_in_force` at 0 until the file is put
/// back; the rest of the file counts meanwhile.
#[test]
fn changes_that_need_a_restart_are_named_until_they_are_reverted() {
    let text = |http: &str, more: &str, limit: &str| {
        format!(
            "listen: {{ http: {http}, resp: off, grpc: off }}\n{more}rules: [{{ name: a, limit: {limit} }}]\n"
        )
    };
    let server = Reloading::start(&text("127.0.0.1:0", "", "5/min"));
    assert!(server.is_in_force());
    server.write(&text(
        "127.0.0.1:1",
        "threads: 3\nresilience: { deadline_ms: 20 }\nstore: redis://:word@h\n",
        "6/min",
    ));
    wait_until("the difference is seen", BOUND, || !server.is_in_force());
    let limit = |server: &Reloading| {
        let rules = server.running().engine().rules();
        let rule = rules.iter().next().unwrap();
        format!("{:?}", rule.budget)
    };
    assert!(limit(&server).contains('6'), "what can change does: {}", limit(&server));
    let ready = server.get("/readyz", "");
    assert!(
        ready.starts_with("HTTP/1.1 200") && ready.contains("\r\n\r\ndegraded\nconfig: "),
        "{ready}"
    );
    assert!(
        ready.ends_with(
            "changes that need a restart: listen.http, resilience.deadline_ms, store, threads\n"
        ),
        "{ready}"
    );
    assert!(!ready.contains("word"), "{ready}");
    server.write("rules: [{ name: a, limit: nonsense }]\n");
    wait_until("the refusal is seen", BOUND, || {
        server.get("/readyz", "").contains("refused, the last good one stays")
    });
    assert!(!server.is_in_force() && limit(&server).contains('6'));
    // As an editor leaves it for a moment: no limit is lifted.
    server.write("");
    wait_until("an empty file is refused", BOUND, || {
        server.get("/readyz", "").contains("the file is empty")
    });
    assert!(!server.is_in_force() && limit(&server).contains('6'));
    std::fs::remove_file(&server.file).unwrap();
    wait_until("a missing file is seen", BOUND, || {
        server.get("/readyz", "").contains("no such file")
    });
    server.write(&text("127.0.0.1:0", "", "7/min"));
    wait_until("the file is in force", BOUND, || server.is_in_force());
    assert!(limit(&server).contains('7'));
    assert!(server.get("/readyz", "").ends_with("\r\n\r\nready\n"));
}

/// `trusted_proxies`, `log` and `connections` change while the server runs, also for a connection
/// that is open.
#[test]
fn trusted_proxies_log_and_connections_change_without_a_restart() {
    let text = |more: &str| {
        format!(
            "listen: {{ http: 127.0.0.1:0, resp: off, grpc: off }}\n{more}rules: [{{ name: a, by: ip, limit: 1/h }}]\n"
        )
    };
    let server = Reloading::start(&text("trusted_proxies: [127.0.0.1]\nlog: { level: error }\n"));
    let auth = |ip: &str| {
        let headers = format!(
            "X-Forwarded-For: {ip}\r\nX-Forwarded-Method: GET\r\nX-Forwarded-Uri: /\r\nX-Forwarded-Host: localhost\r\n"
        );
        server.get("/v1/auth", &headers).split(' ').nth(1).unwrap_or_default().to_owned()
    };
    assert_eq!((auth("192.0.2.1").as_str(), auth("192.0.2.1").as_str()), ("204", "429"));
    server.write(&text("log: { level: error }\n"));
    wait_until("no peer is trusted", BOUND, || auth("192.0.2.2") == "403");
    assert!(server.is_in_force(), "that takes no restart");
    server.write(&text("trusted_proxies: [loopback]\nlog: { level: debug }\n"));
    wait_until("this machine is trusted again", BOUND, || auth("192.0.2.3") == "204");
    let log = server.running().engine().observer().log().clone();
    wait_until("the log says more", BOUND, || log.wants(tidegate_server::observe::Level::Debug));
    // One connection at a time: the next one is closed without a response.
    let held = std::net::TcpStream::connect(server.running().http.unwrap()).unwrap();
    wait_until("it is accepted", BOUND, || {
        server
            .running()
            .engine()
            .observer()
            .metrics()
            .connections(tidegate_server::protocol::Protocol::Http)
            == 1
    });
    server.write(&text(
        "trusted_proxies: [loopback]\nlog: { level: error }\nconnections: { max: 1 }\n",
    ));
    wait_until("there is room for one", BOUND, || server.get("/healthz", "").is_empty());
    drop(held);
    wait_until("there is room again", BOUND, || server.get("/healthz", "").contains("ok"));
    assert!(server.is_in_force());
}
