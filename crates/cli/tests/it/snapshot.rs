//! The memory store over a restart: after a signal, after a kill, with a full disk, with a damaged
//! file.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// For whatever comes sooner or later.
const PATIENCE: Duration = Duration::from_secs(30);

struct Server {
    child: Child,
    at: SocketAddr,
}

impl Server {
    /// With state in this file, which may have at most so many blocks of 512 bytes.
    fn start(file: &Path, blocks: Option<u32>) -> Self {
        let program = env!("CARGO_BIN_EXE_tidegate");
        let mut command = match blocks {
            None => Command::new(program),
            Some(blocks) => {
                let mut shell = Command::new("sh");
                shell.args(["-c", &format!(r#"ulimit -f {blocks} && exec "$0" "$@""#), program]);
                shell
            }
        };
        command
            .args([
                "serve",
                "--http",
                "127.0.0.1:0",
                "--grpc",
                "off",
                "--resp",
                "off",
                "--snapshot-file",
            ])
            .arg(file);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
        let protocol = lines.find(|line| line.starts_with("http")).unwrap();
        let at = protocol.split_whitespace().nth(1).unwrap().parse().unwrap();
        assert!(lines.any(|line| line == "ready"));
        Server { child, at }
    }

    fn ask(&self, request: &str) -> String {
        let mut stream = TcpStream::connect(self.at).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    /// What is left after taking so much.
    fn take(&self, key: &str, limit: &str, cost: u64) -> u64 {
        let body = format!(r#"{{"key":"{key}","limit":"{limit}","cost":{cost}}}"#);
        let (path, length) = ("/v1/check", body.len());
        let request = format!(
            "POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
        );
        let answer = self.ask(&request);
        let number = answer.split(r#""remaining":"#).nth(1).unwrap_or_else(|| panic!("{answer}"));
        number.split(|c: char| !c.is_ascii_digit()).next().unwrap().parse().unwrap()
    }

    fn metric(&self, line: &str) -> u64 {
        let page =
            self.ask("GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
        let number = page
            .lines()
            .find_map(|own| own.strip_prefix(line))
            .unwrap_or_else(|| panic!("{line} in {page}"));
        number.trim().parse().unwrap()
    }

    /// Waits until it is so many more.
    fn until_more(&self, line: &str, more: u64) {
        let (begun, before) = (Instant::now(), self.metric(line));
        while self.metric(line) < before + more {
            assert!(begun.elapsed() < PATIENCE, "{line} stays near {before}");
            std::thread::yield_now();
        }
    }

    /// Ends it, and says what it wrote to its log.
    fn end(mut self, signal: Signal) -> String {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
        let mut log = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut log).unwrap();
        self.child.wait().unwrap();
        log
    }
}

const SAVED: &str = r#"tidegate_snapshots_total{result="ok"}"#;
const FAILED: &str = r#"tidegate_snapshots_total{result="failed"}"#;

#[test]
fn a_server_that_was_stopped_continues_with_its_state() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("state");
    let server = Server::start(&file, None);
    let limits = [
        "100/d",
        "90/d window",
        "80/d sliding",
        "70/d estimate",
        "60/d log",
        "50 concurrent ttl 1d",
    ];
    let left: Vec<u64> = limits.iter().map(|limit| server.take("k", limit, 7)).collect();
    assert_eq!(left, [93, 83, 73, 63, 53, 43]);
    let log = server.end(Signal::TERM);
    assert!(log.contains("no snapshot yet") && log.contains("the snapshot is written"), "{log}");
    let server = Server::start(&file, None);
    let left: Vec<u64> = limits.iter().map(|limit| server.take("k", limit, 0)).collect();
    assert_eq!(left, [93, 83, 73, 63, 53, 43]);
    assert_eq!(server.take("k", limits[0], 3), 90);
    let log = server.end(Signal::TERM);
    assert!(log.contains("the store is as it was saved"), "{log}");
}

#[test]
fn a_server_that_was_killed_loses_at_most_one_period() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("state");
    let server = Server::start(&file, None);
    assert_eq!(server.take("early", "100/d", 40), 60);
    // One that had begun before, and one that began after.
    server.until_more(SAVED, 2);
    assert!(server.metric("tidegate_snapshot_bytes ") > 100);
    let _ = server.take("late", "100/d", 40);
    let _ = server.end(Signal::KILL);
    let server = Server::start(&file, None);
    assert_eq!(server.take("early", "100/d", 0), 60);
    assert!([60, 100].contains(&server.take("late", "100/d", 0)));
    let _ = server.end(Signal::KILL);
}

#[test]
fn on_a_full_disk_the_old_file_stays_and_decisions_continue() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("state");
    let server = Server::start(&file, Some(8));
    assert_eq!(server.take("first", "100/d", 40), 60);
    server.until_more(SAVED, 2);
    for number in 0..200 {
        assert_eq!(server.take(&format!("key:{number}"), "100/d", 1), 99);
    }
    server.until_more(FAILED, 2);
    assert_eq!(server.take("first", "100/d", 10), 50);
    let log = server.end(Signal::TERM);
    assert!(log.contains("the snapshot cannot be written: the old one stays"), "{log}");
    // No partial file is left; the lock file stays.
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
    // The old file is complete.
    let server = Server::start(&file, None);
    assert_eq!(server.take("first", "100/d", 0), 60);
    let log = server.end(Signal::TERM);
    assert!(log.contains("the store is as it was saved"), "{log}");
}

#[test]
fn a_damaged_file_is_loaded_as_far_as_possible() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("state");
    let server = Server::start(&file, None);
    assert_eq!(server.take("k", "100/d", 40), 60);
    let _ = server.end(Signal::TERM);
    let whole = fs::read(&file).unwrap();
    let mut damaged = whole.clone();
    // The last block is 24 bytes, and the keys are before it.
    damaged[whole.len() - 30] ^= 1;
    fs::write(&file, &damaged).unwrap();
    let server = Server::start(&file, None);
    assert_eq!(server.take("k", "100/d", 1), 99);
    let log = server.end(Signal::KILL);
    assert!(
        log.contains("only a part of the snapshot could be read")
            && log.contains("damaged_blocks=1"),
        "{log}"
    );
    assert_eq!(fs::read(folder.path().join("state.partly")).unwrap(), damaged);
    let mut later = whole;
    later[8] = 9;
    fs::write(&file, &later).unwrap();
    let server = Server::start(&file, None);
    assert_eq!(server.take("k", "100/d", 1), 99);
    let log = server.end(Signal::KILL);
    assert!(log.contains("has version 9 of the format: expected 2"), "{log}");
    assert_eq!(fs::read(folder.path().join("state.unreadable")).unwrap(), later);
}

/// The start fails, in time and with what to do; nothing is made or changed.
#[test]
fn files_that_cannot_be_trusted_or_do_not_end_stop_the_start() {
    use std::os::unix::fs::PermissionsExt;

    let folder = tempfile::tempdir().unwrap();
    let start = |more: &[&str]| {
        let listeners = ["serve", "--http", "127.0.0.1:0", "--grpc", "off", "--resp", "off"];
        crate::shown(&[&listeners, more].concat(), "")
    };
    let file = folder.path().join("state");
    fs::write(&file, "").unwrap();
    fs::set_permissions(&file, PermissionsExt::from_mode(0o666)).unwrap();
    let text = start(&["--snapshot-file", file.to_str().unwrap()]);
    assert!(
        text.starts_with("exit 2") && text.contains("other users may write to it (mode 666)"),
        "{text}"
    );
    assert!(text.contains("memory.snapshot_file: ") && text.contains("`chmod 600` it"), "{text}");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    for device in ["/dev/null", "/dev/zero"] {
        let text = start(&["--snapshot-file", device]);
        assert!(
            text.starts_with("exit 2") && text.contains("is a device: expected a file"),
            "{text}"
        );
        assert!(!Path::new(&format!("{device}.lock")).exists());
    }
    for (more, expected) in [
        (&["--config", "/dev/zero"][..], "more than 1048576 bytes"),
        (&["--token-file", "/dev/zero"], "more than 65536 bytes"),
        (&["--tls-cert", "/dev/zero", "--tls-key", "/dev/zero"], "/dev/zero: more than "),
        (&["--store", "rediss://127.0.0.1:1?ca=/dev/zero"], "more than 4194304 bytes"),
    ] {
        let text = start(more);
        assert!(text.starts_with("exit 2") && text.contains(expected), "{more:?}: {text}");
    }
}
