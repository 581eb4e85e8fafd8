//! `tidegate serve` and `validate`, as they are run.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tidegate_testkit::{ClockShim, Fault, FaultProxy, Flavor, Server, wait_until};

use crate::tidegate;

/// The goal is a second on a machine with nothing else to do. The median of a few starts is held to
/// more, since tests run beside others.
#[test]
fn serve_is_ready_at_once() {
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

/// It asks for memory in large pieces, most of which it does not touch.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
#[test]
fn memory_is_asked_for_in_large_pieces_unless_somebody_says_otherwise() {
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
fn serve_says_where_it_listens_answers_and_stops_when_told() {
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
    /// What it said.
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
fn a_server_is_asked_as_a_store_is() {
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
fn a_server_with_a_certificate_is_asked_too() {
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
    assert_eq!(asked.status.code(), Some(2), "nobody vouches for it");
}

#[test]
fn running_out_of_files_is_survived_at_every_protocol() {
    use rustix::process::{Resource, Rlimit, getrlimit, prlimit};
    let mut serving =
        Serving::with_grpc("127.0.0.1:0", &["--admin", "127.0.0.1:0", "--log", "off"]);
    assert_eq!(serving.listeners.len(), 4);
    for (protocol, at) in serving.listeners.clone() {
        // HTTP/2 is asked by a PING, whose eight bytes come back; a connection begins with a
        // preface and settings.
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
        // Fewer files than it has already, and a few: nothing more can be accepted.
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
    // What is printed is a file, and says the same again.
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

/// A store that cannot be used fails the start, with what to do; one that is only unreachable does
/// not, and the log says how limits are enforced meanwhile. A password that is rotated later gives
/// one line, and one when it is over.
#[test]
fn a_store_that_does_not_decide_is_told_at_the_start_and_later() {
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
fn a_step_back_of_the_stores_clock_is_told_once() {
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

/// A Redis so far away that `serve` does not wait for the whole check is reported, too.
#[test]
fn a_store_that_is_too_far_away_to_be_checked_is_reported() {
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

/// What is printed at the start names the rules that do not follow the file, and does not say
/// `ready` where `/readyz` does not.
#[test]
fn the_greeting_without_the_store_says_what_is_enforced() {
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

/// A Redis so far away that a decision takes more than a third of the deadline is told by `serve`
/// and `doctor`.
#[test]
fn a_store_that_is_far_away_is_told() {
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
