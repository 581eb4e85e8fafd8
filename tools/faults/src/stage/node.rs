//! One `tidegate serve`, as a process of its own.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use tidegate_testkit::{spawn, wait_until};

use super::{Metrics, PATIENCE};
use crate::load::Http;

pub(crate) struct Node {
    program: PathBuf,
    child: Child,
    folder: TempDir,
    /// Where its HTTP listener is.
    pub(crate) http: String,
}

/// What a breaker did, and when.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Change {
    Opened(Duration),
    Closed(Duration),
}

const CONFIG: &str = "tidegate.yaml";
const LOG: &str = "log";

impl Node {
    pub(crate) fn start(config: &str) -> Node {
        Node::start_by(&[], config)
    }

    /// The same, started by a program that sets something up first: `taskset`, `prlimit`,
    /// `setpriv`.
    pub(crate) fn start_by(wrapper: &[&str], config: &str) -> Node {
        Node::start_of(beside("tidegate"), wrapper, config)
    }

    /// A node of the release before.
    pub(crate) fn start_previous(config: &str) -> Node {
        Node::start_of(previous(), &[], config)
    }

    fn start_of(program: PathBuf, wrapper: &[&str], config: &str) -> Node {
        let folder = tempfile::Builder::new()
            .prefix("tidegate-")
            .tempdir()
            .expect("a temporary folder can be made");
        let config = format!("listen: {{ http: 127.0.0.1:0, resp: off, grpc: off }}\n{config}");
        fs::write(folder.path().join(CONFIG), config).expect("a temporary file can be written");
        let (child, http) = open(&program, wrapper, folder.path());
        Node { program, child, folder, http }
    }

    /// Starts it again if it has ended, with the same file, at another address.
    pub(crate) fn start_again(&mut self) {
        self.kill();
        (self.child, self.http) = open(&self.program, &[], self.folder.path());
    }

    pub(crate) fn config(&self) -> PathBuf {
        self.folder.path().join(CONFIG)
    }

    /// What it has logged.
    pub(crate) fn log(&self) -> String {
        String::from_utf8_lossy(&fs::read(self.folder.path().join(LOG)).unwrap_or_default())
            .into_owned()
    }

    /// When its breaker opened and closed, since `began`: it logs that.
    pub(crate) fn changes(&self, began: SystemTime) -> Vec<Change> {
        const DAY: Duration = Duration::from_secs(24 * 60 * 60);
        let began = began.duration_since(UNIX_EPOCH).expect("it is later than 1970").as_millis()
            % DAY.as_millis();
        let log = self.log();
        // `breaker=` is what the release before says.
        let changes = log.lines().filter(|line| {
            line.contains("breaker=")
                || line.contains(": this node decides locally")
                || line.contains("the store decides again")
        });
        let changes = changes.filter_map(|line| {
            // 2026-11-16T02:44:33.123Z
            let numbers: Vec<u128> =
                line.get(11..23)?.split([':', '.']).filter_map(|part| part.parse().ok()).collect();
            let [hours, minutes, seconds, ms] = numbers[..] else { return None };
            let at = ((hours * 60 + minutes) * 60 + seconds) * 1000 + ms;
            let at = u64::try_from((at + DAY.as_millis() - began) % DAY.as_millis()).ok()?;
            let at = Duration::from_millis(at);
            let is_open =
                line.contains("breaker=open") || line.contains(": this node decides locally");
            Some(if is_open { Change::Opened(at) } else { Change::Closed(at) })
        });
        changes.collect()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).expect("a child can be sent a signal");
    }

    pub(crate) fn kill(&mut self) {
        let _ = self.child.kill().and_then(|()| self.child.wait());
    }

    /// Comes back when it has ended by itself.
    pub(crate) fn ends(&mut self, bound: Duration) -> ExitStatus {
        wait_until("the node has ended", bound, || {
            self.child.try_wait().is_ok_and(|status| status.is_some())
        });
        self.child.wait().expect("a child can be waited for")
    }

    pub(crate) fn http(&self) -> Http {
        Http::connect(&self.http).expect("the node listens")
    }

    /// What it counts, if it answers.
    pub(crate) fn metrics(&self) -> Option<Metrics> {
        let (_, text) = Http::connect(&self.http).ok()?.get("/metrics").ok()?;
        Some(Metrics::parse(&text))
    }

    /// Comes back when the store decides; of a node in memory, immediately.
    pub(crate) fn is_warm(&self) {
        let mut http = self.http();
        wait_until("the store decides", PATIENCE, || {
            let answer = http.post("/v1/check", r#"{"key":"warm","limit":"1000000/s"}"#);
            answer.is_ok_and(|(_, body)| body.contains(r#""source":"store""#))
        });
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Starts the program in this folder; with where its listener is.
fn open(program: &Path, wrapper: &[&str], folder: &Path) -> (Child, String) {
    let log = File::options()
        .create(true)
        .append(true)
        .open(folder.join(LOG))
        .expect("a file can be made");
    let (first, rest) = match wrapper {
        [] => (program, &[][..]),
        [first, rest @ ..] => (Path::new(first), rest),
    };
    let child = spawn(first, |command| {
        command.args(rest);
        if !wrapper.is_empty() {
            command.arg(program);
        }
        command.args(["serve", "--config", CONFIG]).current_dir(folder);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log);
    });
    let mut child = child.unwrap_or_else(|error| panic!("{}: {error}", program.display()));
    let mut lines =
        BufReader::new(child.stdout.take().expect("it is piped")).lines().map_while(Result::ok);
    let mut http = None;
    for line in lines.by_ref() {
        let mut words = line.split_whitespace();
        match words.next() {
            Some("http") => http = words.next().map(str::to_owned),
            Some("ready") => break,
            _ => {}
        }
    }
    // What it says later is read, too, so that it never waits for us.
    thread::spawn(move || lines.for_each(drop));
    let log = || fs::read_to_string(folder.join(LOG)).unwrap_or_default();
    (child, http.unwrap_or_else(|| panic!("the node does not start: {}", log())))
}

/// A program of this repository, which lies beside this one, or above it if this is a test.
pub(crate) fn beside(name: &str) -> PathBuf {
    let own = std::env::current_exe().expect("a program knows where it is");
    let mut folders = own.ancestors().skip(1).take(2).map(|folder| folder.join(name));
    folders.find(|path| path.is_file()).unwrap_or_else(|| {
        panic!(
            "{name} is missing beside {}: run `cargo xtask faults`, which builds it",
            own.display()
        )
    })
}

/// The program of the release before, which `cargo xtask faults` builds.
fn previous() -> PathBuf {
    let own = std::env::current_exe().expect("a program knows where it is");
    let mut folders =
        own.ancestors().skip(2).take(2).map(|folder| folder.join("previous/tidegate"));
    folders.find(|path| path.is_file()).unwrap_or_else(|| {
        panic!(
            "previous/tidegate is missing above {}: run `cargo xtask faults F63`, which builds it",
            own.display()
        )
    })
}
