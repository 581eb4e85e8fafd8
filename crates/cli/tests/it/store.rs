//! `--store`: decisions on a server are those in memory.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use assert_cmd::cargo::CommandCargoExt;
use insta::assert_snapshot;
use tidegate_testkit::{Cluster, Flavor, Server, wait_until};

use crate::{shown, stdout, tidegate};

#[test]
fn a_second_check_finds_less_left() {
    let server = Server::start(Flavor::Redis7);
    let url = server.url();
    let check = |more: &[&str]| {
        let args = [
            &[
                "check",
                "user:7",
                "--limit",
                "3/day window from first hit",
                "--op",
                "take",
                "--store",
                &url,
            ],
            more,
        ]
        .concat();
        let text = shown(&args, "");
        // How long it has still to go depends on how quick we are.
        let lines = text.lines().map(|line| line.split(", full again").next().unwrap());
        let lines = lines.map(|line| line.split(", try again").next().unwrap());
        lines.collect::<Vec<_>>().join("\n").replace(&server.port().to_string(), "PORT") + "\n"
    };
    let told =
        check(&[]) + &check(&["--cost", "9"]) + &check(&[]) + &check(&["--namespace", "other"]);
    assert_snapshot!(told, @"
    exit 0
    --- stdout
    allowed: user:7 requested 1 unit and took 1 unit
      3/d window from first hit  2 of 3 left
      decided by redis://127.0.0.1:PORT
    exit 0
    --- stdout
    allowed: user:7 requested 9 units and took 2 units
      3/d window from first hit  0 of 3 left
      decided by redis://127.0.0.1:PORT
    exit 1
    --- stdout
    denied: user:7 requested 1 unit; nothing was taken
      3/d window from first hit  0 of 3 left
      decided by redis://127.0.0.1:PORT
    exit 0
    --- stdout
    allowed: user:7 requested 1 unit and took 1 unit
      3/d window from first hit  2 of 3 left
      decided by redis://127.0.0.1:PORT
    ");
    let json = tidegate(&["check", "user:7", "--limit", "3/day window from first hit", "--json"]);
    let json = { json }.env("TIDEGATE_STORE", server.url()).output().unwrap();
    let json: serde_json::Value = serde_json::from_slice(&json.stdout).unwrap();
    assert_eq!((&json["store"], &json["remaining"]), (&server.url().into(), &0.into()));
    assert_eq!(server.keys_without_ttl(""), Vec::<String>::new());
}

#[test]
fn memory_is_a_store_too() {
    let args = ["check", "user:7", "--limit", "10/s", "--store", "memory"];
    assert_snapshot!(shown(&args, ""), @"
    exit 0
    --- stdout
    allowed: user:7 took 1 unit
      10/s  9 of 10 left, full again in 100 ms
    ");
    let args = ["simulate", "--limit", "10/s", "--for", "2s"];
    assert_eq!(stdout(&[&args[..], &["--store", "memory"]].concat(), ""), stdout(&args, ""));
}

#[test]
fn a_server_that_is_not_there_is_an_error_that_teaches() {
    let server = Server::start(Flavor::Redis7);
    server.kill();
    for command in [&["check", "k", "--limit", "1/s"][..], &["simulate", "--limit", "1/s"]] {
        let text = shown(&[command, &["--store", &server.url()]].concat(), "");
        assert!(text.starts_with("exit 2\n--- stderr\nerror: "), "{text}");
        assert!(text.contains("Is it running there?"), "{text}");
    }
}

const LIMITS: [&str; 11] = [
    "10/s",
    "10/s burst 3 debt 5",
    "10/s window",
    "10/s window from first hit",
    "10/s sliding step 100ms",
    "10/s sliding step 70ms lenient",
    "10/s estimate",
    "10/s log",
    "10/s log count rejected",
    "5 concurrent ttl 700ms",
    "10/s; 10/s; 300/m sliding step 1s; 20 concurrent ttl 3s",
];

/// Both answer the same, byte for byte; and nothing stays on the server.
#[test]
fn a_server_simulates_as_memory_does() {
    Flavor::on_all(|flavor| {
        let server = Server::start(flavor);
        // What is shown is made of the answers, so one server will do for the other formats.
        let formats =
            if flavor == Flavor::Redis7 { &["jsonl", "table", "svg"][..] } else { &["jsonl"] };
        for pattern in ["poisson", "attack"] {
            for format in formats {
                let mut args =
                    vec!["simulate", "--rate", "90/s", "--for", "3s", "--keys", "3", "--cost", "2"];
                args.extend(["--pattern", pattern, "--format", format]);
                args.extend(LIMITS.iter().flat_map(|limit| ["--limit", limit]));
                let here = stdout(&args, "");
                let url = server.url();
                let there = tidegate(&[&args[..], &["--store", &url]].concat()).output().unwrap();
                assert!(
                    there.status.success(),
                    "{flavor}: {}",
                    String::from_utf8_lossy(&there.stderr)
                );
                assert!(here.as_bytes() == there.stdout, "{flavor}: {pattern}, {format}");
                let note = String::from_utf8(there.stderr).unwrap();
                assert!(
                    note.starts_with(&format!("note: decided by {url}, in the namespace sim-")),
                    "{note}"
                );
            }
        }
        assert_eq!(server.command(&["DBSIZE"]).int(), 0, "{flavor}");
    });
}

fn transcripts() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/transcripts");
    let files = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let files: Vec<_> =
        files.filter(|path| path.extension().is_some_and(|extension| extension == "txt")).collect();
    assert!(!files.is_empty());
    files
}

#[test]
fn every_transcript_holds_on_every_server() {
    Flavor::on_all(|flavor| {
        let server = Server::start(flavor);
        for path in transcripts() {
            let text = stdout(
                &[
                    "simulate",
                    "--verify",
                    "--store",
                    &server.url(),
                    "--trace",
                    path.to_str().unwrap(),
                ],
                "",
            );
            assert!(text.ends_with("all as expected\n"), "{flavor}: {}: {text}", path.display());
        }
        assert_eq!(server.command(&["DBSIZE"]).int(), 0, "{flavor}");
    });
}

#[test]
fn a_cluster_simulates_as_memory_does() {
    let cluster = Cluster::start(Flavor::Valkey9);
    let args = [
        "simulate",
        "--limit",
        "10/s; 100/m log",
        "--rate",
        "500/s",
        "--keys",
        "50",
        "--pattern",
        "poisson",
        "--format",
        "jsonl",
    ];
    let there = stdout(&[&args[..], &["--store", &cluster.url()]].concat(), "");
    assert!(there == stdout(&args, ""));
    for node in &cluster.nodes()[..3] {
        assert_eq!(node.command(&["DBSIZE"]).int(), 0);
    }
}

#[test]
fn what_differs_is_told_as_in_memory() {
    let server = Server::start(Flavor::Redis7);
    let bad = "# limit: 2/s\n0 a 2 -> allow remaining 1\n0 a -> deny retry 500ms\nx\n";
    let run = |more: &[&str]| {
        tidegate(&[&["simulate", "--trace", "-", "--verify"], more].concat())
            .write_stdin(bad)
            .output()
            .unwrap()
    };
    let (here, there) = (run(&[]), run(&["--store", &server.url()]));
    let after_note = |output: &Output| {
        let text = String::from_utf8(output.stderr.clone()).unwrap();
        text.lines()
            .filter(|line| !line.starts_with("note: decided by"))
            .collect::<Vec<_>>()
            .join("\n")
    };
    assert_eq!((here.status.code(), &here.stdout), (there.status.code(), &there.stdout));
    assert_eq!(after_note(&here), after_note(&there));
    assert_eq!(server.command(&["DBSIZE"]).int(), 0, "an error leaves nothing behind either");
}

#[test]
fn time_that_goes_back_far_is_told() {
    let server = Server::start(Flavor::Redis7);
    let text = shown(
        &[
            "simulate",
            "--limit",
            "2/s",
            "--trace",
            "-",
            "--store",
            &server.url(),
            "--format",
            "jsonl",
        ],
        "2h a\n0 a\n",
    );
    assert!(text.contains("note: request 2: time goes back by more than an hour"), "{text}");
}

/// Starts a simulation that has written keys and waits for more requests, sends a signal, and says
/// how it ended.
fn interrupt(server: &Server, signal: &str) -> Option<i32> {
    let mut command = Command::cargo_bin("tidegate").unwrap();
    command.args([
        "simulate",
        "--limit",
        "10/day",
        "--trace",
        "-",
        "--format",
        "jsonl",
        "--store",
        &server.url(),
    ]);
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut note = String::new();
    BufReader::new(child.stderr.take().unwrap()).read_line(&mut note).unwrap();
    assert!(note.contains("in the namespace sim-"), "{note}");
    let mut stdin = child.stdin.take().unwrap();
    for n in 0..2000 {
        writeln!(stdin, "{n}ms key-{n}").unwrap();
    }
    stdin.flush().unwrap();
    wait_until("keys are written", Duration::from_secs(20), || {
        server.command(&["DBSIZE"]).int() > 0
    });
    let sent = Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap();
    assert!(sent.success());
    let ended = child.wait().unwrap().code();
    drop(stdin); // until now it could have had more
    ended
}

#[test]
fn an_interrupted_simulation_leaves_nothing_behind() {
    let server = Server::start(Flavor::Redis7);
    for signal in ["-INT", "-TERM"] {
        assert_eq!(interrupt(&server, signal), Some(130));
        assert_eq!(server.command(&["DBSIZE"]).int(), 0);
    }
    // A killed process cannot clean up, but the keys expire by themselves.
    assert_eq!(interrupt(&server, "-KILL"), None);
    assert!(server.command(&["DBSIZE"]).int() > 0);
    assert_eq!(server.keys_without_ttl(""), Vec::<String>::new());
}

/// A user without the right to remove keys gets a note; the result is valid.
#[test]
fn a_failed_cleanup_is_reported() {
    let server = Server::start(Flavor::Redis7);
    server.command(&["ACL", "SETUSER", "weak", "on", ">pw", "~*", "+@all", "-scan"]);
    let url = server.url().replace("://", "://weak:pw@");
    let text = shown(&["simulate", "--limit", "10/s", "--for", "1s", "--store", &url], "");
    assert!(text.starts_with("exit 0\n") && text.contains("could not be removed"), "{text}");
    assert_eq!(server.keys_without_ttl(""), Vec::<String>::new());
}
