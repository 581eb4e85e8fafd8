//! `tidegate proxy`, as a process.

#![allow(clippy::print_stdout, reason = "figures for runs with --nocapture")]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::shown;

/// A proxy that is stopped when it is dropped.
struct Proxy {
    process: Child,
    at: SocketAddr,
}

impl Proxy {
    fn start(args: &[&str]) -> Proxy {
        Self::by(Command::new(env!("CARGO_BIN_EXE_tidegate")), args)
    }

    /// Starts the proxy by a command that runs the binary with further arguments.
    fn by(mut command: Command, args: &[&str]) -> Proxy {
        let process = command
            .args(["proxy", "--listen", "127.0.0.1:0", "--log", "off"])
            .args(args)
            .env_remove("TIDEGATE_STORE")
            .env_remove("TIDEGATE_CONFIG")
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        // Killed when this is dropped.
        let mut proxy = Proxy { process, at: SocketAddr::from(([127, 0, 0, 1], 0)) };
        let mut lines =
            BufReader::new(proxy.process.stdout.take().unwrap()).lines().map_while(Result::ok);
        let told = ["rules  ", "store  "]
            .map(|name| lines.next().is_some_and(|line| line.starts_with(name)));
        assert_eq!(told, [true; 2], "what is enforced, and where state is");
        let line = lines.next().unwrap();
        let at = line
            .strip_prefix("proxy  ")
            .and_then(|rest| rest.split_whitespace().next()?.parse().ok());
        proxy.at = at.unwrap_or_else(|| panic!("{line}"));
        assert_eq!(lines.next().as_deref(), Some("ready"), "the proxy's listener alone is open");
        proxy
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.at).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream
    }

    /// The peak memory of the process, in bytes.
    fn peak(&self) -> u64 {
        let status =
            std::fs::read_to_string(format!("/proc/{}/status", self.process.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
        line.trim().strip_suffix(" kB").unwrap().trim().parse::<u64>().unwrap() << 10
    }

    fn stop(mut self) -> bool {
        let told = Command::new("kill")
            .args(["-TERM", &self.process.id().to_string()])
            .status()
            .unwrap()
            .success();
        told && self.process.wait().unwrap().success()
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Serves each connection with a function, in its own thread.
fn upstream(serve: impl Fn(BufReader<TcpStream>) + Clone + Send + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            let serve = serve.clone();
            stream.set_nodelay(true).unwrap();
            std::thread::spawn(move || serve(BufReader::new(stream)));
        }
    });
    format!("http://{at}")
}

fn head(stream: &mut impl BufRead) -> Option<String> {
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        if stream.read_line(&mut head).ok()? == 0 {
            return None;
        }
    }
    Some(head)
}

/// An upstream that answers `ok`.
pub(crate) fn ok() -> String {
    upstream(|mut stream| {
        while head(&mut stream).is_some() {
            stream.get_mut().write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").unwrap();
        }
    })
}

#[test]
fn limits_of_the_command_line_and_of_a_file_stand_before_an_upstream() {
    let (ok, folder) = (ok(), tempfile::tempdir().unwrap());
    let file = folder.path().join("tidegate.yaml");
    std::fs::write(
        &file,
        "listen: { http: 127.0.0.1:0 }\nrules: [{ name: per-ip, when: { path: /shut }, limit: deny }]\n",
    )
    .unwrap();
    let config = file.to_str().unwrap();
    let proxy = Proxy::start(&[
        "--upstream",
        &ok,
        "--config",
        config,
        "--limit",
        "2/h by ip",
        "--limit",
        "1000/s",
    ]);
    let ask = |path: &str| {
        let mut stream = proxy.connect();
        write!(stream, "GET {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    };
    assert!(ask("/shut").starts_with("HTTP/1.1 403"), "by the file");
    for _ in 0..2 {
        let answer = ask("/");
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        assert!(
            answer.contains(r#"ratelimit-policy: "per-ip-2";q=2;w=3600, "everyone";q=1000;w=1"#),
            "{answer}"
        );
    }
    let denied = ask("/");
    assert!(denied.starts_with("HTTP/1.1 429") && denied.contains("\r\nretry-after: "), "{denied}");
    assert!(proxy.stop());
}

#[test]
fn mistakes_are_named() {
    for (args, expected) in [
        (&["proxy"][..], "no upstream: expected --upstream"),
        (
            &["proxy", "--upstream", "http://127.0.0.1:1"],
            "nothing is limited: expected --limit '10/s by ip'",
        ),
        (
            &["proxy", "--upstream", "https://a", "--limit", "1/s"],
            "TLS to the upstream is not supported",
        ),
        (&["proxy", "--upstream", "a:1", "--limit", "1/s"], "expected http://HOST:PORT"),
        (
            &["proxy", "--upstream", "http://a", "--limit", "1/s by user"],
            "by \"user\": no such attribute: expected ip, path",
        ),
        (
            &["proxy", "--upstream", "http://a", "--limit", "1/s", "--trust", "10.0.0.0/99"],
            "prefix",
        ),
    ] {
        let text = shown(args, "");
        assert!(text.starts_with("exit 2\n") && text.contains(expected), "{args:?}\n{text}");
    }
    let printed =
        shown(&["proxy", "--upstream", "http://a", "--limit", "1/s by ip", "--print-config"], "");
    assert!(
        printed.contains("upstream: http://a:80\n") && printed.contains("by:\n      - ip\n"),
        "{printed}"
    );
}

/// The most memory that a body may need, whatever its size: the buffers of two connections, and
/// overhead of the runtime.
const MEMORY: u64 = 16 << 20;
const SIZE: u64 = 1 << 30;

#[test]
fn a_gigabyte_goes_through_in_little_memory() {
    let upstream = upstream(|mut stream| {
        while let Some(head) = head(&mut stream) {
            if head.starts_with("POST") {
                let sent =
                    std::io::copy(&mut (&mut stream).take(SIZE), &mut std::io::sink()).unwrap();
                let body = sent.to_string();
                write!(
                    stream.get_mut(),
                    "HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{body}",
                    body.len()
                )
                .unwrap();
            } else {
                write!(stream.get_mut(), "HTTP/1.1 200 OK\r\ncontent-length: {SIZE}\r\n\r\n")
                    .unwrap();
                std::io::copy(&mut std::io::repeat(7).take(SIZE), stream.get_mut()).unwrap();
            }
        }
    });
    let proxy = Proxy::start(&["--upstream", &upstream, "--limit", "1000/s"]);
    let mut client = BufReader::new(proxy.connect());
    client.get_mut().write_all(b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n").unwrap();
    head(&mut client).unwrap();
    // A client that does not read slows the upstream down, and costs the proxy no memory.
    let before = proxy.peak();
    let got = std::io::copy(&mut (&mut client).take(SIZE), &mut std::io::sink()).unwrap();
    assert_eq!(got, SIZE);
    write!(client.get_mut(), "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: {SIZE}\r\n\r\n")
        .unwrap();
    std::io::copy(&mut std::io::repeat(7).take(SIZE), client.get_mut()).unwrap();
    head(&mut client).unwrap();
    let mut body = vec![0; SIZE.to_string().len()];
    client.read_exact(&mut body).unwrap();
    assert_eq!(body, SIZE.to_string().into_bytes());
    let grown = proxy.peak() - before;
    println!(
        "a gigabyte down and one up: {} KiB at first, {} KiB more at most",
        before >> 10,
        grown >> 10
    );
    assert!(grown <= MEMORY, "{grown} bytes more");
    assert!(proxy.stop());
}

#[test]
fn clients_that_do_not_read_cost_others_nothing() {
    let upstream = upstream(|mut stream| {
        while let Some(head) = head(&mut stream) {
            let size = if head.starts_with("GET /large") { SIZE } else { 2 };
            let sent =
                write!(stream.get_mut(), "HTTP/1.1 200 OK\r\ncontent-length: {size}\r\n\r\n")
                    .and_then(|()| {
                        std::io::copy(&mut std::io::repeat(7).take(size), stream.get_mut())
                    });
            if sent.is_err() {
                return;
            }
        }
    });
    let proxy = Proxy::start(&["--upstream", &upstream, "--limit", "100000/s"]);
    let mut bystander = BufReader::new(proxy.connect());
    let mut times = |count: usize| {
        let mut times: Vec<Duration> = (0..count)
            .map(|_| {
                let began = Instant::now();
                bystander.get_mut().write_all(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n").unwrap();
                assert!(head(&mut bystander).unwrap().starts_with("HTTP/1.1 200"));
                bystander.read_exact(&mut [0; 2]).unwrap();
                began.elapsed()
            })
            .collect();
        times.sort_unstable();
        times
    };
    let (quiet, before) = (times(500), proxy.peak());
    let slow: Vec<TcpStream> = (0..100)
        .map(|_| {
            let mut stream = proxy.connect();
            stream.write_all(b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n").unwrap();
            let mut first = [0; 1];
            stream.read_exact(&mut first).unwrap();
            stream
        })
        .collect();
    let (beside, grown) = (times(500), proxy.peak() - before);
    let p99 = |times: &[Duration]| times[times.len() * 99 / 100];
    println!(
        "100 clients that do not read: {} KiB more, others' p99 {:?} (without them {:?})",
        grown >> 10,
        p99(&beside),
        p99(&quiet)
    );
    assert!(grown <= 64 << 20, "{grown} bytes more");
    drop(slow);
    assert!(proxy.stop());
}

/// The proxy may open 264 files. 64 are for others, and of the rest half are for the upstream:
/// clients cannot take them.
#[test]
fn connections_to_the_upstream_count_among_the_files() {
    const MANY: Duration = Duration::from_secs(60);
    let (seen, go) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
    let (count, gone) = (Arc::clone(&seen), Arc::clone(&go));
    let at = upstream(move |mut stream| {
        if head(&mut stream).is_none() {
            return;
        }
        count.fetch_add(1, Ordering::SeqCst);
        tidegate_testkit::wait_until("all are there", MANY, || gone.load(Ordering::SeqCst));
        let _ = stream
            .get_mut()
            .write_all(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok");
    });
    let mut shell = Command::new("sh");
    shell.args(["-c", r#"ulimit -n 264 && exec "$0" "$@""#, env!("CARGO_BIN_EXE_tidegate")]);
    let proxy = Proxy::by(shell, &["--upstream", &at, "--limit", "100000/s"]);
    let mut clients: Vec<TcpStream> = (0..300).map(|_| proxy.connect()).collect();
    for client in &mut clients {
        let _ = client.write_all(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n");
    }
    tidegate_testkit::wait_until("a hundred are at the upstream", MANY, || {
        seen.load(Ordering::SeqCst) == 100
    });
    go.store(true, Ordering::SeqCst);
    let mut served = 0;
    for mut client in clients {
        let mut answer = String::new();
        // Beyond those, connections are closed without an answer, or served when others have left.
        let _ = client.read_to_string(&mut answer);
        served += usize::from(answer.starts_with("HTTP/1.1 200"));
        assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 200"), "{answer}");
    }
    assert!((100..=300).contains(&served), "{served} were served");
    assert!(proxy.stop());
}
