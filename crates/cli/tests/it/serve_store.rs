//! `tidegate serve` over stores that fail, are slow, or whose clock steps back.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Command, Stdio};
use std::time::Duration;

use tidegate_testkit::{ClockShim, Fault, FaultProxy, Flavor, Server, wait_until};

use crate::tidegate;

/// A store that cannot be used fails the start, with what to do; one that is only unreachable does
/// not, and the log says how limits are enforced meanwhile. A password that is rotated later gives
/// one line, and one when it is over.
#[test]
fn a_store_that_does_not_decide_is_reported_at_start_and_later() {
    let server = Server::builder(Flavor::Redis7).password("first").start();
    let port = server.port();
    let serve = |url: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
        command.args([
            "serve",
            "--store",
            url,
            "--http",
            "127.0.0.1:0",
            "--grpc",
            "off",
            "--resp",
            "off",
        ]);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    };
    for command in ["serve", "proxy"] {
        let mut args = vec![command, "--store"];
        let url = format!("redis://:wrong@127.0.0.1:{port}");
        args.push(&url);
        if command == "proxy" {
            args.extend([
                "--upstream",
                "http://127.0.0.1:1",
                "--limit",
                "10/s by ip",
                "--listen",
                "127.0.0.1:0",
            ]);
        }
        let output = tidegate(&args).output().unwrap();
        let (said, error) =
            (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
        assert!(!output.status.success() && !said.contains("ready"), "{said}{error}");
        assert!(
            error.contains("WRONGPASS") && error.contains("Check user and password."),
            "{error}"
        );
    }
    let mut running = serve(&server.url()).spawn().unwrap();
    let mut said = BufReader::new(running.stdout.take().unwrap()).lines().map_while(Result::ok);
    assert!(said.any(|line| line == "ready"));
    let mut log = BufReader::new(running.stderr.take().unwrap()).lines().map_while(Result::ok);
    let mut admin = server.client().unwrap();
    admin.command(&["CONFIG", "SET", "requirepass", "second"]).unwrap();
    admin.command(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]).unwrap();
    let begins = log
        .find(|line| line.contains("the store refuses charges: this node decides locally"))
        .unwrap();
    assert!(
        begins.contains("WRONGPASS") && begins.contains("nodes=1") && begins.contains("advice="),
        "{begins}"
    );
    admin.command(&["CONFIG", "SET", "requirepass", "first"]).unwrap();
    let ends = log.next().unwrap();
    assert!(
        ends.contains("the store decides again"),
        "one line when it begins, and one when it ends: {ends}"
    );
    running.kill().unwrap();
    running.wait().unwrap();
    server.kill();
    let mut lone = serve(&format!("redis://127.0.0.1:{port}")).spawn().unwrap();
    let mut said = BufReader::new(lone.stdout.take().unwrap()).lines().map_while(Result::ok);
    assert!(said.any(|line| line == "ready"));
    let line =
        BufReader::new(lone.stderr.take().unwrap()).lines().map_while(Result::ok).next().unwrap();
    assert!(line.contains("the store is unreachable: this node decides locally"), "{line}");
    assert!(
        line.contains(
            "each limit in full on this node (1 node, assumed: the store was never reached)"
        ),
        "{line}"
    );
    lone.kill().unwrap();
    lone.wait().unwrap();
}

/// The clock of the store goes back by an hour: every key is counted, and the log has one line for
/// all of them.
#[test]
fn a_step_back_of_the_stores_clock_is_logged_once() {
    let shim = ClockShim::build();
    shim.set(3600);
    let builder = Server::builder(Flavor::Redis7);
    let redis = shim
        .environment()
        .iter()
        .fold(builder, |builder, (name, value)| builder.env(name, value))
        .start();
    let mut running = Command::new(env!("CARGO_BIN_EXE_tidegate"))
        .args([
            "serve",
            "--store",
            &redis.url(),
            "--http",
            "127.0.0.1:0",
            "--grpc",
            "off",
            "--resp",
            "off",
        ])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = BufReader::new(running.stdout.take().unwrap()).lines().map_while(Result::ok);
    let http = said.find_map(|line| line.strip_prefix("http ").map(str::to_owned)).unwrap();
    let http: SocketAddr = http.split_whitespace().next().unwrap().parse().unwrap();
    assert!(said.any(|line| line == "ready"));
    let send = |method: &str, path: &str, body: &str| {
        let mut stream = TcpStream::connect(http).unwrap();
        let length = body.len();
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}"
        )
        .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    };
    let ask =
        |key: usize| send("POST", "/v1/check", &format!(r#"{{"key":"k{key}","limit":"1/min"}}"#));
    for key in 0..5 {
        // A busy machine may decide without the store, which charges nothing there.
        wait_until("the store decides", Duration::from_secs(60), || {
            ask(key).contains(r#""source":"store""#)
        });
    }
    shim.set(0);
    for key in 0..5 {
        let denied = |answer: &str| {
            answer.contains(r#""allowed":false"#) && answer.contains(r#""source":"store""#)
        };
        wait_until("the store denies", Duration::from_secs(60), || denied(&ask(key)));
    }
    let metrics = send("GET", "/metrics", "");
    let counted =
        metrics.lines().find(|line| line.contains(r#"{event="clock_regression"}"#)).unwrap();
    let counted: u64 = counted.split(' ').nth(1).unwrap().parse().unwrap();
    assert!(counted >= 5, "{counted}: five keys, and what nodes are counted by");
    assert!(
        Command::new("kill").args(["-TERM", &running.id().to_string()]).status().unwrap().success()
    );
    let mut log = String::new();
    running.stderr.take().unwrap().read_to_string(&mut log).unwrap();
    running.wait().unwrap();
    let lines: Vec<&str> =
        log.lines().filter(|line| line.contains("the clock of the store went back")).collect();
    let [line] = lines[..] else { panic!("one line for all keys: {log}") };
    assert!(
        line.contains("at_least_seconds=") && line.contains("meaning=") && line.contains("advice="),
        "{line}"
    );
}

/// `serve` also reports a Redis so slow that it does not wait for the full check.
#[test]
fn a_store_too_slow_to_be_checked_is_reported() {
    let server = Server::start(Flavor::Redis7);
    let proxy = FaultProxy::start(&server);
    let reply = Duration::from_millis(400);
    proxy.set(Fault::Delay { request: Duration::ZERO, reply, jitter: Duration::ZERO });
    let mut serving = Command::new(env!("CARGO_BIN_EXE_tidegate"))
        .args([
            "serve",
            "--store",
            proxy.url(),
            "--http",
            "127.0.0.1:0",
            "--grpc",
            "off",
            "--resp",
            "off",
        ])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut log = BufReader::new(serving.stderr.take().unwrap()).lines().map_while(Result::ok);
    let line = log.find(|line| line.contains("the store was not checked")).unwrap();
    assert!(
        line.contains("it did not answer the start check within 1s") && line.contains("doctor"),
        "{line}"
    );
    serving.kill().unwrap();
    serving.wait().unwrap();
}

/// The output on start names the rules that do not follow the file, and does not say `ready` where
/// `/readyz` does not.
#[test]
fn without_the_store_the_greeting_says_what_is_enforced() {
    let redis = Server::start(Flavor::Redis7);
    let url = redis.url();
    redis.kill();
    let folder = tempfile::tempdir().unwrap();
    for (policy, enforced, last) in [
        ("open", "except rule own (open: not enforced)", "ready"),
        (
            "closed",
            "except rule own (closed: denied)",
            "not ready: requests are denied until the store decides; /readyz says when",
        ),
    ] {
        let file = folder.path().join("tidegate.yaml");
        let rules = format!(
            "rules: [{{ name: own, limit: 2/h, on_store_failure: {policy} }}]\nresilience: {{ nodes: 1 }}\n"
        );
        std::fs::write(&file, format!("store: {url}\n{rules}")).unwrap();
        let mut serving = Command::new(env!("CARGO_BIN_EXE_tidegate"))
            .args([
                "serve",
                "--config",
                file.to_str().unwrap(),
                "--http",
                "127.0.0.1:0",
                "--grpc",
                "off",
                "--resp",
                "off",
            ])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut said = BufReader::new(serving.stdout.take().unwrap()).lines().map_while(Result::ok);
        let store = said.find(|line| line.starts_with("store ")).unwrap();
        assert!(store.contains(": unreachable; enforced meanwhile: each limit in full"), "{store}");
        assert!(store.ends_with(enforced), "{store}");
        assert_eq!(said.find(|line| line.contains("ready")).as_deref(), Some(last));
        let mut log = BufReader::new(serving.stderr.take().unwrap()).lines().map_while(Result::ok);
        let line = log.find(|line| line.contains("the store is unreachable")).unwrap();
        assert!(line.contains(enforced), "{line}");
        serving.kill().unwrap();
        serving.wait().unwrap();
    }
}

/// `serve` and `doctor` report a Redis so slow that a decision takes more than a third of the
/// deadline.
#[test]
fn a_slow_store_is_reported() {
    let server = Server::start(Flavor::Redis7);
    let proxy = FaultProxy::start(&server);
    let way = Duration::from_millis(3);
    proxy.set(Fault::Delay { request: way, reply: way, jitter: Duration::ZERO });
    let mut serving = Command::new(env!("CARGO_BIN_EXE_tidegate"))
        .args([
            "serve",
            "--store",
            proxy.url(),
            "--http",
            "127.0.0.1:0",
            "--grpc",
            "off",
            "--resp",
            "off",
        ])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut log = BufReader::new(serving.stderr.take().unwrap()).lines().map_while(Result::ok);
    let line = log.find(|line| line.contains("the store is slow")).unwrap();
    assert!(
        line.contains("more than a third of the deadline (15 ms)")
            && line.contains("resilience.deadline_ms"),
        "{line}"
    );
    serving.kill().unwrap();
    serving.wait().unwrap();
    let output = tidegate(&["doctor", "--store", proxy.url(), "--samples", "5"]).output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    let flat = said.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(
        flat.contains("warning a decision of the store takes")
            && flat.contains("set resilience.deadline_ms to"),
        "{said}"
    );
    let doctor = ["doctor", "--store", proxy.url(), "--samples", "5", "--deadline-ms", "1000"];
    let output = tidegate(&doctor).output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(
        !said.contains("a decision of the store takes"),
        "six milliseconds are little of a second: {said}"
    );
    let output = tidegate(&[&doctor[..], &["--json"]].concat()).output().unwrap();
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&json["deadline_ms"], &json["slow"]), (&1000.into(), &serde_json::Value::Null));
}
