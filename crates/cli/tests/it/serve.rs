//! `tidegate serve` and `validate`, as processes.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::tidegate;

/// The goal is a second on a machine with nothing else to do. The median of a few starts is held to
/// more, since tests run beside others.
#[test]
fn serve_is_ready_within_seconds() {
    let mut took: Vec<Duration> = (0..5)
        .map(|_| {
            let begun = Instant::now();
            let mut server = Command::new(env!("CARGO_BIN_EXE_tidegate"))
                .args([
                    "serve",
                    "--http",
                    "127.0.0.1:0",
                    "--grpc",
                    "127.0.0.1:0",
                    "--resp",
                    "127.0.0.1:0",
                ])
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            let mut lines =
                BufReader::new(server.stdout.take().unwrap()).lines().map_while(Result::ok);
            assert!(lines.any(|line| line == "ready"));
            let took = begun.elapsed();
            server.kill().unwrap();
            server.wait().unwrap();
            took
        })
        .collect();
    took.sort();
    assert!(took[2] < Duration::from_secs(3), "{took:?}");
}

/// The server requests memory in large pieces, most of which it does not touch.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
#[test]
fn memory_is_requested_in_large_pieces_unless_the_environment_says_otherwise() {
    const PIECE_KIB: u64 = 16 << 10;
    let heap_kib = |told: Option<&str>| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
        command
            .args(["serve", "--http", "127.0.0.1:0", "--grpc", "off", "--resp", "off"])
            .stdout(Stdio::piped());
        command.envs(told.map(|bytes| ("MALLOC_TOP_PAD_", bytes)));
        let mut server = command.spawn().unwrap();
        let mut lines = BufReader::new(server.stdout.take().unwrap()).lines().map_while(Result::ok);
        assert!(lines.any(|line| line == "ready"));
        let maps = std::fs::read_to_string(format!("/proc/{}/smaps", server.id())).unwrap();
        server.kill().unwrap();
        server.wait().unwrap();
        let heap = maps.lines().skip_while(|line| !line.ends_with("[heap]"));
        let number = |name: &str| {
            let line = heap.clone().find_map(|line| line.strip_prefix(name)).expect(name);
            line.trim().trim_end_matches(" kB").parse::<u64>().expect(line)
        };
        (number("Size:"), number("Rss:"))
    };
    let (asked, touched) = heap_kib(None);
    assert!(
        asked >= PIECE_KIB && touched < PIECE_KIB / 2,
        "{asked} kB, {touched} kB of them in use"
    );
    let (asked, _) = heap_kib(Some("131072"));
    assert!(asked < PIECE_KIB, "{asked} kB");
}

#[test]
fn serve_prints_its_listeners_answers_and_stops_on_a_signal() {
    let mut server = Command::new(env!("CARGO_BIN_EXE_tidegate"))
        .args(["serve", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--resp", "127.0.0.1:0"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(server.stdout.take().unwrap()).lines().map_while(Result::ok);
    let address = |line: String| line.split_whitespace().nth(1).unwrap().to_string();
    let built_in = "rules  2 rules built in (per-ip, everyone); --config FILE brings yours";
    assert_eq!(lines.next().as_deref(), Some(built_in));
    assert_eq!(lines.next().as_deref(), Some("store  memory"));
    let http = address(lines.next().unwrap());
    let grpc = lines.next().unwrap();
    assert!(grpc.starts_with("grpc   127.0.0.1:") && grpc.contains("grpcurl -plaintext"), "{grpc}");
    let resp = address(lines.next().unwrap());
    assert_eq!(lines.next().as_deref(), Some("ready"));
    let ask = |address: &str, text: &str| {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(text.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    };
    let body = r#"{"attributes":{"ip":"192.0.2.7"}}"#;
    let request = format!(
        "POST /v1/check HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    let answer = ask(&http, &request);
    assert!(
        answer.starts_with("HTTP/1.1 200") && answer.contains(r#""rule":"per-ip""#),
        "{answer}"
    );
    assert_eq!(
        ask(&resp, "CL.THROTTLE user:7 15 30 60\r\nQUIT\r\n"),
        "*5\r\n:0\r\n:16\r\n:15\r\n:-1\r\n:2\r\n+OK\r\n"
    );
    assert!(
        Command::new("kill").args(["-TERM", &server.id().to_string()]).status().unwrap().success()
    );
    assert!(server.wait().unwrap().success());
}

/// A server that is stopped when it is dropped.
pub(crate) struct Serving {
    process: Child,
    /// Where each listener is.
    pub(crate) listeners: HashMap<String, SocketAddr>,
    /// The output on start.
    pub(crate) greeting: String,
}

impl Serving {
    pub(crate) fn start(args: &[&str]) -> Serving {
        Self::with_grpc("off", args)
    }

    pub(crate) fn with_grpc(grpc: &str, args: &[&str]) -> Serving {
        let mut process = Command::new(env!("CARGO_BIN_EXE_tidegate"))
            .args(["serve", "--http", "127.0.0.1:0", "--grpc", grpc, "--resp", "127.0.0.1:0"])
            .args(args)
            .env_remove("TIDEGATE_STORE")
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut lines =
            BufReader::new(process.stdout.take().unwrap()).lines().map_while(Result::ok);
        let (mut listeners, mut greeting) = (HashMap::new(), String::new());
        for line in lines.by_ref() {
            greeting += &format!("{line}\n");
            if line == "ready" {
                break;
            }
            let mut words = line.split_whitespace();
            let (name, at) = (words.next().unwrap(), words.next().unwrap());
            listeners.extend(at.parse().ok().map(|at| (name.to_owned(), at)));
        }
        Serving { process, listeners, greeting }
    }

    fn pid(&self) -> rustix::process::Pid {
        rustix::process::Pid::from_child(&self.process)
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        let _ = rustix::process::kill_process(self.pid(), rustix::process::Signal::TERM);
        let _ = self.process.wait();
    }
}

#[test]
fn check_uses_a_server_like_a_store() {
    let serving = Serving::start(&["--token", "open-sesame", "--log", "off"]);
    let url = format!("http://{}", serving.listeners["http"]);
    let check = |token: &str, more: &[&str]| {
        let args = [&["check", "user:7", "--limit", "3/day window; 9/day", "--server", &url], more]
            .concat();
        let output = tidegate(&args).env("TIDEGATE_TOKEN", token).output().unwrap();
        let text = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
        (output.status.code().unwrap(), text.replace(&url, "URL"))
    };
    let (code, text) = check("open-sesame", &["--cost", "2"]);
    assert!(code == 0 && text.contains("1 of 3 left") && text.contains("7 of 9 left"), "{text}");
    assert!(text.ends_with("decided by URL\n"), "{text}");
    let (code, text) = check("open-sesame", &["--cost", "2", "--json"]);
    assert!(
        code == 1
            && text.contains(r#""allowed":false,"granted":0,"remaining":1,"retry_after_us":"#),
        "{text}"
    );
    let (code, text) = check("open-sesame", &["--op", "peek", "--cost", "4"]);
    assert!(code == 1 && text.contains("can never pass"), "{text}");
    let (code, text) = check("close-sesame", &[]);
    assert!(code == 2 && text.contains("TIDEGATE_TOKEN"), "{text}");
    drop(serving);
    let (code, text) = check("open-sesame", &[]);
    assert!(code == 2 && text.contains("`tidegate serve` starts one"), "{text}");
    for wrong in ["127.0.0.1:8080", "ftp://x", "http://", "http://a@b:1", "http://h:70000"] {
        let output =
            tidegate(&["check", "k", "--limit", "1/s", "--server", wrong]).output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(
            output.status.code() == Some(2) && text.contains("expected http://HOST:PORT"),
            "{wrong}: {text}"
        );
    }
}

#[test]
fn check_uses_a_server_with_tls() {
    let certs = tidegate_testkit::Certs::new();
    let [cert, key, ca] = [certs.server_cert(), certs.server_key(), certs.ca()];
    let [cert, key, ca] = [&cert, &key, &ca].map(|path| path.to_str().unwrap());
    let serving = Serving::start(&["--tls-cert", cert, "--tls-key", key, "--log", "off"]);
    let url = format!("https://localhost:{}", serving.listeners["http"].port());
    let asked = tidegate(&["check", "user:7", "--limit", "3/day", "--server", &url, "--ca", ca])
        .output()
        .unwrap();
    assert!(asked.status.success(), "{}", String::from_utf8_lossy(&asked.stderr));
    let asked =
        tidegate(&["check", "user:7", "--limit", "3/day", "--server", &url]).output().unwrap();
    assert_eq!(asked.status.code(), Some(2), "no trusted authority signed the certificate");
}

#[test]
fn running_out_of_files_is_survived_at_every_protocol() {
    use rustix::process::{Resource, Rlimit, getrlimit, prlimit};
    let mut serving =
        Serving::with_grpc("127.0.0.1:0", &["--admin", "127.0.0.1:0", "--log", "off"]);
    assert_eq!(serving.listeners.len(), 4);
    for (protocol, at) in serving.listeners.clone() {
        // HTTP/2 gets a PING, whose eight bytes come back; a connection begins with a preface and
        // settings.
        let begin = |stream: &mut TcpStream| {
            let greeting: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
            protocol != "grpc" || stream.write_all(greeting).is_ok()
        };
        let ask = |stream: &mut TcpStream| {
            let (question, answer): (&[u8], &[u8]) = match protocol.as_str() {
                "resp" => (b"PING\r\n", b"PONG"),
                "grpc" => (b"\0\0\x08\x06\0\0\0\0\0tidegate", b"tidegate"),
                _ => (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n", b"HTTP/1.1 200"),
            };
            let (mut bytes, mut seen) = ([0; 512], Vec::new());
            let mut asked = stream.write_all(question).is_ok();
            while asked && !seen.windows(answer.len()).any(|part| part == answer) {
                match stream.read(&mut bytes) {
                    Ok(read @ 1..) => seen.extend_from_slice(&bytes[..read]),
                    _ => asked = false,
                }
            }
            asked
        };
        let connect = |patience: Duration| {
            let mut stream = TcpStream::connect(at).unwrap();
            stream.set_read_timeout(Some(patience)).unwrap();
            assert!(begin(&mut stream), "{protocol}");
            stream
        };
        let mut here = connect(Duration::from_secs(20));
        assert!(ask(&mut here), "{protocol}");
        // Hardly more files than are open already: no connection can be accepted.
        let few = Rlimit { current: Some(4), maximum: getrlimit(Resource::Nofile).maximum };
        let enough = prlimit(Some(serving.pid()), Resource::Nofile, few).unwrap();
        let mut waiting: Vec<TcpStream> =
            (0..20).map(|_| connect(Duration::from_millis(100))).collect();
        assert!(!ask(&mut waiting[0]), "{protocol}: there are no files left");
        assert!(ask(&mut here), "{protocol}: who is here is served on");
        prlimit(Some(serving.pid()), Resource::Nofile, enough).unwrap();
        drop(waiting);
        assert!(ask(&mut connect(Duration::from_secs(20))), "{protocol}: others are served again");
        assert!(serving.process.try_wait().unwrap().is_none());
    }
}

#[test]
fn the_file_is_overridden_by_the_environment_and_that_by_options() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("tidegate.yaml");
    let text = "store: redis://bob:hush@127.0.0.1:1/\nlisten: { http: 127.0.0.1:1, resp: 127.0.0.1:1, grpc: off }\nlog: { level: warn }\nthreads: 5\n";
    std::fs::write(&file, text).unwrap();
    let print = |args: &[&str], variables: &[(&str, &str)], input: &str| {
        let mut command = tidegate(&["serve", "--print-config"]);
        let output =
            command.args(args).envs(variables.iter().copied()).write_stdin(input).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let path = file.to_str().unwrap();
    let of_file = print(&["--config", path], &[], "");
    assert!(of_file.contains("http: 127.0.0.1:1") && of_file.contains("level: warn"), "{of_file}");
    assert!(of_file.contains("\nthreads: 5\n"), "{of_file}");
    assert!(
        of_file.contains("store: redis://:***@127.0.0.1:1\n") && !of_file.contains("hush"),
        "{of_file}"
    );
    let variables = [
        ("TIDEGATE_CONFIG", path),
        ("TIDEGATE_HTTP", "127.0.0.1:2"),
        ("TIDEGATE_RESP", "127.0.0.1:2"),
        ("TIDEGATE_STORE", "memory"),
        ("TIDEGATE_THREADS", "2"),
        ("TIDEGATE_STORE_SECRET_FILE", "/run/slots"),
        ("TIDEGATE_TOKEN", "sesame"),
        ("TIDEGATE_ADMIN_TOKEN_FILE", "/run/admin"),
    ];
    let mixed = print(&["--resp", "off", "--log", "json,debug"], &variables, "");
    for expected in [
        "# a check token was given, and is not shown\n",
        "store: memory",
        "store_secret_file: /run/slots",
        "threads: 2\n",
        "http: 127.0.0.1:2",
        "resp: \"off\"",
        "level: debug",
        "format: json",
        "admin_file: /run/admin",
    ] {
        assert!(mixed.contains(expected), "{expected} is not in\n{mixed}");
    }
    assert!(!mixed.contains("sesame"), "{mixed}");
    assert!(print(&["--threads", "auto"], &variables, "").contains("\nthreads: auto\n"));
    // The output is a configuration that prints the same again.
    let again = print(&["--config", "-"], &[], &mixed);
    assert_eq!(again, mixed.split_once('\n').unwrap().1);
    let wrong =
        tidegate(&["serve", "--config", "-"]).write_stdin("stor: memory\n").output().unwrap();
    assert_eq!(wrong.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&wrong.stderr).contains("standard input:1:1"), "{wrong:?}");
    assert!(mixed.contains("\n  max_bytes: auto\n"), "{mixed}");
    assert!(print(&["--max-bytes", "64MiB"], &variables, "").contains("\n  max_bytes: 64MiB\n"));
    let none = tidegate(&["serve", "--max-bytes", "64"]).output().unwrap();
    assert_eq!(none.status.code(), Some(2));
    let said = String::from_utf8_lossy(&none.stderr);
    assert!(
        said.contains("--max-bytes") && said.contains("expected auto, or a number of bytes"),
        "{said}"
    );
    let none = tidegate(&["serve", "--threads", "0"]).output().unwrap();
    assert_eq!(none.status.code(), Some(2));
    let said = String::from_utf8_lossy(&none.stderr);
    assert!(
        said.contains("--threads") && said.contains("expected auto, or a number from 1 to 1024"),
        "{said}"
    );
}

#[test]
fn files_are_validated() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("rules.yaml");
    let path = file.to_str().unwrap();
    std::fs::write(
        &file,
        "rules:\n  - { name: a, by: [ip], limit: 2/s }\n  - { name: b, when: { method: POST }, limit: deny }\n",
    )
    .unwrap();
    tidegate(&["validate", path]).assert().success();
    std::fs::write(&file, "rules:\n  - { name: a, lmit: 2/s }\n").unwrap();
    let wrong = tidegate(&["validate", path]).assert().code(2);
    let text = String::from_utf8(wrong.get_output().stderr.clone()).unwrap();
    assert!(text.contains("rules.yaml:2:") && text.contains("lmit"), "{text}");
}

#[test]
fn a_folder_for_envoy_is_validated_and_served() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    let file = folder.path().join("edge.yaml");
    std::fs::write(
        &file,
        "domain: shop\ndescriptors:\n  - { key: user, rate_limit: { unit: year, requests_per_unit: 1 } }\n",
    )
    .unwrap();
    let right = tidegate(&["validate", path]).assert().success();
    let text = String::from_utf8(right.get_output().stdout.clone()).unwrap();
    assert!(text.ends_with(": 1 domains with 1 limits, nothing wrong\n"), "{text}");
    let mut server = Command::new(env!("CARGO_BIN_EXE_tidegate"))
        .args([
            "serve",
            "--http",
            "127.0.0.1:0",
            "--grpc",
            "127.0.0.1:0",
            "--resp",
            "off",
            "--envoy-config",
            path,
        ])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(server.stdout.take().unwrap()).lines().map_while(Result::ok);
    assert_eq!(lines.next().as_deref(), Some("rules  none"));
    assert_eq!(lines.next().unwrap(), format!("envoy  {path}: 1 domain, 1 limit"));
    assert_eq!(lines.next().as_deref(), Some("store  memory"));
    let http = lines.next().unwrap().split_whitespace().nth(1).unwrap().to_string();
    assert!(
        lines.next().unwrap().contains(r#""domain":"shop""#),
        "a line to try with what there is"
    );
    assert_eq!(lines.next().as_deref(), Some("ready"));
    let ask = || {
        let body = r#"{"domain":"shop","descriptors":[{"entries":[{"key":"user","value":"a"}]}]}"#;
        let mut stream = TcpStream::connect(&http).unwrap();
        let length = body.len();
        write!(
            stream,
            "POST /json HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}"
        )
        .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    };
    assert!(ask().starts_with("HTTP/1.1 200"));
    assert!(ask().starts_with("HTTP/1.1 429"));
    assert!(
        Command::new("kill").args(["-TERM", &server.id().to_string()]).status().unwrap().success()
    );
    assert!(server.wait().unwrap().success());
    std::fs::write(
        &file,
        "domain: shop\ndescriptors:\n  - { key: user, rate_limit: { units: year } }\n",
    )
    .unwrap();
    let wrong = tidegate(&["validate", path]).assert().code(2);
    let text = String::from_utf8(wrong.get_output().stderr.clone()).unwrap();
    assert!(
        text.contains("edge.yaml:3:") && text.contains("config error, unknown key 'units'"),
        "{text}"
    );
}
