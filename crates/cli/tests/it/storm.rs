//! The real server under load, while its rules change all the time, and during shutdown.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;
use tidegate::redis::Redis;
use tidegate::{Check, Limits, Op, Store};
use tidegate_testkit::{Client, Flavor, Reply, Server, wait_until};

/// A server, and where its listeners are.
struct Running {
    child: Child,
    http: String,
    resp: u16,
}

impl Running {
    fn start(args: &[&str]) -> Running {
        let mut child = Command::new(env!("CARGO_BIN_EXE_tidegate"))
            .args(["serve", "--http", "127.0.0.1:0", "--grpc", "off", "--resp", "127.0.0.1:0"])
            .args(args)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
        let (mut http, mut resp) = (None, None);
        for line in lines.by_ref() {
            let mut words = line.split_whitespace();
            match words.next() {
                Some("http") => http = words.next().map(str::to_owned),
                Some("resp") => {
                    resp = words.next().and_then(|at| at.rsplit(':').next()?.parse().ok())
                }
                Some("ready") => break,
                _ => {}
            }
        }
        // What it says later is read, too, so that it never waits for us.
        thread::spawn(move || lines.for_each(drop));
        Running {
            child,
            http: http.expect("a listener for HTTP"),
            resp: resp.expect("a listener for RESP"),
        }
    }

    fn signal(&self, name: &str) {
        assert!(
            Command::new("kill")
                .args([name, &self.child.id().to_string()])
                .status()
                .unwrap()
                .success()
        );
    }

    /// Tells it to stop; how long it took.
    fn stop(&mut self) -> Duration {
        let began = Instant::now();
        self.signal("-TERM");
        wait_until("the server has ended", Duration::from_secs(15), || {
            self.child.try_wait().unwrap().is_some()
        });
        assert!(self.child.wait().unwrap().success(), "it says that everything was answered");
        began.elapsed()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill().and_then(|()| self.child.wait());
    }
}

/// A connection for HTTP that is kept.
struct Http(BufReader<TcpStream>);

impl Http {
    fn connect(at: &str) -> Http {
        let stream = TcpStream::connect(at).unwrap();
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        Http(BufReader::new(stream))
    }

    /// Status and body; nothing if the connection ended before the answer began. An answer that
    /// ends early is a mistake.
    fn post(&mut self, path: &str, body: &str) -> Option<(u16, String)> {
        let request = format!(
            "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        self.0.get_mut().write_all(request.as_bytes()).ok()?;
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            match self.0.read_line(&mut head) {
                Ok(0) | Err(_) if head.is_empty() => return None,
                Ok(read) if read > 0 => {}
                other => panic!("an answer ends early ({other:?}): {head:?}"),
            }
        }
        let length = head
            .lines()
            .find_map(|line| line.strip_prefix("content-length: "))
            .unwrap()
            .parse()
            .unwrap();
        let mut body = vec![0; length];
        self.0.read_exact(&mut body).unwrap();
        Some((head.split(' ').nth(1).unwrap().parse().unwrap(), String::from_utf8(body).unwrap()))
    }
}

fn rules(version: u32) -> String {
    // `common` stays as it is; the others change name, number and amount together.
    let all = "rules:\n  - { name: common, limit: 100000000/d window }\n";
    match version {
        0 => format!(
            "{all}  - {{ name: north, limit: 10000000/d }}\n  - {{ name: south, by: [user], limit: 10000000/d }}\n"
        ),
        1 => format!("{all}  - {{ name: east, limit: 20000000/d }}\n"),
        _ => format!("{all}  - {{ name: broken, lmit: 1/s }}\n"),
    }
}

fn put(file: &Path, text: &str) {
    let new = file.with_extension("new");
    fs::write(&new, text).unwrap();
    fs::rename(&new, file).unwrap();
}

#[test]
fn a_storm_of_reloads_drops_nothing_and_mixes_nothing() {
    const EACH: u64 = 3_000;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("rules.yaml");
    put(&file, &rules(0));
    let server = Running::start(&["--config", file.to_str().unwrap()]);
    let (working, asked, old, new) =
        (AtomicU64::new(4), AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
    // Clients go on until there was a storm, however slowly files are written and signals are sent.
    let reloads = AtomicU64::new(0);
    let goes_on = |number: &u64| *number < EACH || reloads.load(Ordering::Acquire) <= 10;
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let mut http = Http::connect(&server.http);
                for number in (0..).take_while(goes_on) {
                    let body = format!(r#"{{"attributes":{{"user":"u{}"}}}}"#, number % 100);
                    let (status, answer) =
                        http.post("/v1/check", &body).expect("every request is answered");
                    assert_eq!(status, 200, "{answer}");
                    let answer: Value = serde_json::from_str(&answer).unwrap();
                    let charges = answer["charges"].as_array().unwrap();
                    let seen: Vec<(&str, u64)> = charges
                        .iter()
                        .map(|charge| {
                            (charge["rule"].as_str().unwrap(), charge["amount"].as_u64().unwrap())
                        })
                        .collect();
                    match seen[..] {
                        [("common", 100_000_000), ("north", 10_000_000), ("south", 10_000_000)] => {
                            &old
                        }
                        [("common", 100_000_000), ("east", 20_000_000)] => &new,
                        _ => panic!("neither the old rules nor the new ones: {seen:?}"),
                    }
                    .fetch_add(1, Ordering::Relaxed);
                    asked.fetch_add(1, Ordering::Relaxed);
                }
                working.fetch_sub(1, Ordering::Release);
            });
            scope.spawn(|| {
                let mut resp = Client::connect(server.resp).unwrap();
                for _ in (0..).step_by(30).take_while(goes_on) {
                    for number in 0..30 {
                        resp.send(&["TG.RULES", "user", &format!("u{number}")]).unwrap();
                    }
                    for _ in 0..30 {
                        let answer = resp.receive().expect("every command is answered");
                        assert_eq!(answer.array()[0], Reply::Int(1), "{answer:?}");
                        asked.fetch_add(1, Ordering::Relaxed);
                    }
                }
                working.fetch_sub(1, Ordering::Release);
            });
        }
        // The storm: as fast as files can be written and signals be sent, and every third time
        // something that cannot be.
        for version in (0..3).cycle().take_while(|_| working.load(Ordering::Acquire) > 0) {
            put(&file, &rules(version));
            server.signal("-HUP");
            reloads.fetch_add(1, Ordering::Release);
        }
    });
    let (old, new) = (old.into_inner(), new.into_inner());
    assert!(old > 0 && new > 0, "both rules were seen: {old} and {new}");
    // Every request was charged once to the rule that was there all the time.
    put(&file, &rules(1));
    let mut http = Http::connect(&server.http);
    let mut answer = Value::Null;
    wait_until("the last rules are read", Duration::from_secs(10), || {
        server.signal("-HUP");
        let (_, body) = http.post("/v1/peek", r#"{"attributes":{"user":"x"}}"#).unwrap();
        answer = serde_json::from_str(&body).unwrap();
        answer["charges"][1]["rule"] == "east"
    });
    assert_eq!(answer["charges"][0]["remaining"], 100_000_000 - asked.into_inner());
}

/// Sends requests until the server shuts down and the connections end; returns how many were
/// allowed. No connection may end in the middle of a response.
fn load_until_stopped(server: &mut Running, at_least: u64) -> (u64, Duration) {
    const DEPTH: usize = 32;
    let (answered, stopping) = (AtomicU64::new(0), AtomicBool::new(false));
    let (http_at, port) = (server.http.clone(), server.resp);
    let took = thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                let mut resp = Client::connect(port).unwrap();
                'requests: loop {
                    for _ in 0..DEPTH {
                        if resp.send(&["TG.CHECK", "all", "100000000/d window"]).is_err() {
                            break; // what was sent before is answered
                        }
                    }
                    for _ in 0..DEPTH {
                        match resp.receive() {
                            Ok(answer) => {
                                assert_eq!(answer.array()[0], Reply::Int(1), "{answer:?}")
                            }
                            Err(error) => {
                                assert!(
                                    stopping.load(Ordering::Acquire),
                                    "the connection ended before the shutdown: {error}"
                                );
                                assert_ne!(
                                    error.kind(),
                                    std::io::ErrorKind::InvalidData,
                                    "half an answer: {error}"
                                );
                                break 'requests;
                            }
                        }
                        answered.fetch_add(1, Ordering::AcqRel);
                    }
                }
            });
            scope.spawn(|| {
                let mut http = Http::connect(&http_at);
                while let Some((status, answer)) =
                    http.post("/v1/check", r#"{"key":"all","limit":"100000000/d window"}"#)
                {
                    assert_eq!(status, 200, "{answer}");
                    answered.fetch_add(1, Ordering::AcqRel);
                }
                assert!(
                    stopping.load(Ordering::Acquire),
                    "the connection ended before the shutdown"
                );
            });
        }
        wait_until("there is load", Duration::from_secs(30), || {
            answered.load(Ordering::Acquire) >= at_least
        });
        stopping.store(true, Ordering::Release);
        server.stop()
    });
    (answered.into_inner(), took)
}

#[test]
fn told_to_stop_under_load_it_answers_what_it_has_charged() {
    // What was charged is counted where it outlives the server.
    let redis = Server::start(Flavor::Redis7);
    let mut server = Running::start(&["--store", &redis.url()]);
    let (answered, took) = load_until_stopped(&mut server, 3_000);
    assert!(took < Duration::from_secs(10), "it took {took:?}");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let limits: Limits = "100000000/d window".parse().unwrap();
    let left = runtime.block_on(async {
        let store = Redis::builder(redis.url().parse().unwrap())
            .timeout(Duration::from_secs(10))
            .build()
            .unwrap();
        store.decide(&Check::of(Op::Peek).charge("all", &limits, 1)).await.unwrap().remaining()
    });
    // On a busy machine Redis may be too late for an answer, which is then the server's own: it is
    // answered, and perhaps not charged.
    assert!(
        100_000_000 - left <= answered,
        "{} were charged, and {answered} answered",
        100_000_000 - left
    );
}

#[test]
fn told_to_stop_under_load_in_memory_it_ends_between_answers() {
    let mut server = Running::start(&[]);
    let (answered, took) = load_until_stopped(&mut server, 20_000);
    assert!(answered >= 20_000 && took < Duration::from_secs(10), "{answered} in {took:?}");
}
