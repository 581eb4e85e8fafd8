//! `cargo xtask bench server`: the listeners for RESP and HTTP, beside Redis, redis-cell and a bare
//! axum, in one run.
//!
//! Each contender is a process of its own, loaded by the same generator in turns, many short rounds
//! each; the median round counts. Beside requests per second it shows the processor time that the
//! server spent on one, which is worth more on a busy machine.

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio, exit};
use std::time::Duration;

use tidegate_server::config::Config;
use tidegate_server::{Options, start};
use tidegate_testkit::{Flavor, Server, redis_benchmark, redis_cell, wait_until};

use crate::redis::pipe::cpu_ns;

const ROUNDS: usize = 7;
/// One command at a time is decided by the system and by the neighbours on the machine, so that
/// single rounds differ by a third: many short ones, then.
const ROUNDS_ONE_AT_A_TIME: usize = 41;
/// The keys that requests are about.
const KEYS: u64 = 1_000_000;
const CONNECTIONS: &str = "50";
/// A round of HTTP.
const HTTP_ROUND: &str = "1s";

pub fn run(args: &[&str]) {
    match args {
        [] | ["all"] => {
            resp(&[1, 16, 64]);
            http();
        }
        ["resp"] => resp(&[1, 16, 64]),
        ["resp", depths @ ..] => {
            resp(&depths.iter().map(|depth| depth.parse().expect("a depth")).collect::<Vec<_>>())
        }
        ["http"] => http(),
        // What is measured, as processes of their own.
        ["tidegate"] => serve_tidegate(1024, 1024, "auto"),
        ["tidegate", threads] => serve_tidegate(1024, 1024, threads),
        ["bound"] => crate::bound::serve(),
        ["axum"] => serve_axum(false),
        ["axum-json"] => serve_axum(true),
        ["axum-page"] => serve_axum_with_page(),
        _ => {
            eprintln!("server {}: expected resp [DEPTH…], http or all", args.join(" "));
            exit(2);
        }
    }
}

/// A server that is measured.
pub(crate) struct ServerContender {
    label: &'static str,
    pid: u32,
    port: u16,
    words: Vec<&'static str>,
    per_second: Vec<f64>,
    cpu_us: Vec<f64>,
}

impl ServerContender {
    pub(crate) fn new(
        label: &'static str,
        pid: u32,
        port: u16,
        words: &[&'static str],
    ) -> ServerContender {
        ServerContender {
            label,
            pid,
            port,
            words: words.to_vec(),
            per_second: Vec::new(),
            cpu_us: Vec::new(),
        }
    }

    /// One round: `load` makes requests, and says how many there were and how many a second.
    pub(crate) fn round(&mut self, load: impl FnOnce(u16, &[&str]) -> (f64, f64)) {
        let before = cpu_ns(self.pid);
        let (requests, per_second) = load(self.port, &self.words);
        self.cpu_us.push((cpu_ns(self.pid) - before) as f64 / 1e3 / requests);
        self.per_second.push(per_second);
    }
}

pub(crate) fn table(contenders: &[ServerContender], beside: &[&str]) {
    for one in contenders {
        let (rate, cpu) = (median(&one.per_second), median(&one.cpu_us));
        print!("  {:<34} {:>9.0} /s {:>8.2} us CPU", one.label, rate, cpu);
        for rival in contenders
            .iter()
            .filter(|rival| beside.contains(&rival.label) && rival.label != one.label)
        {
            // Two that ran in the same round had the same neighbours on the machine.
            let ratio = |own: &[f64], theirs: &[f64]| {
                median(
                    &own.iter().zip(theirs).map(|(own, theirs)| own / theirs).collect::<Vec<_>>(),
                )
            };
            let (rates, cpus) =
                (ratio(&one.per_second, &rival.per_second), ratio(&one.cpu_us, &rival.cpu_us));
            print!("   {rates:>5.2}x /s {cpus:>5.2}x CPU of {}", rival.label);
        }
        println!();
    }
}

fn resp(depths: &[u32]) {
    let module = redis_cell();
    let server = Server::builder(Flavor::Redis7)
        .arg("--loadmodule", module.to_str().expect("a path that is text"))
        .start();
    let (own, bound) = (Own::start("tidegate"), Own::start("bound"));
    let alone = Own::start_as(&["server", "tidegate", "1"]);
    for depth in depths {
        let (rounds, requests): (usize, u32) = match depth {
            1 => (ROUNDS_ONE_AT_A_TIME, 15_000),
            2..=16 => (ROUNDS, 200_000),
            _ => (ROUNDS, 600_000),
        };
        let throttle = ["CL.THROTTLE", "key:__rand_int__", "15", "30", "60", "1"];
        let mut contenders = [
            ServerContender::new("Redis PING", server.pid(), server.port(), &["PING"]),
            ServerContender::new("redis-cell CL.THROTTLE", server.pid(), server.port(), &throttle),
            ServerContender::new(
                "tidegate CL.THROTTLE",
                own.child.id(),
                own.resp.port(),
                &throttle,
            ),
            ServerContender::new(
                "tidegate, one thread, CL.THROTTLE",
                alone.child.id(),
                alone.resp.port(),
                &throttle,
            ),
            ServerContender::new("tidegate PING", own.child.id(), own.resp.port(), &["PING"]),
            ServerContender::new(
                "bound: tokio, flat16, the reply",
                bound.child.id(),
                bound.resp.port(),
                &throttle,
            ),
        ];
        for round in 0..rounds {
            let mut order: Vec<usize> = (0..contenders.len()).collect();
            if round % 2 == 1 {
                order.reverse();
            }
            for index in order {
                contenders[index].round(|port, words| {
                    let mut load = redis_benchmark();
                    load.args([
                        "-p",
                        &port.to_string(),
                        "-c",
                        CONNECTIONS,
                        "-P",
                        &depth.to_string(),
                    ]);
                    load.args(["-n", &requests.to_string(), "-r", &KEYS.to_string(), "--csv"])
                        .args(words);
                    (requests.into(), per_second(&printed(&mut load)))
                });
            }
        }
        println!(
            "\nRESP, P={depth}, {CONNECTIONS} connections, {KEYS} keys: median of {rounds} interleaved rounds of {requests} requests"
        );
        table(&contenders, &["Redis PING", "redis-cell CL.THROTTLE"]);
    }
}

/// The second field of the last line that `redis-benchmark --csv` prints.
fn per_second(csv: &str) -> f64 {
    let line = csv.lines().last().unwrap_or_default();
    // The name of the test may hold commas, but it stands between quotes.
    let field = line.rsplit("\",\"").nth(6).map(|field| field.trim_matches('"'));
    field
        .and_then(|field| field.parse().ok())
        .unwrap_or_else(|| panic!("redis-benchmark printed {csv}"))
}

fn http() {
    let own = Own::start("tidegate");
    let (bytes, json) = (Own::start("axum"), Own::start("axum-json"));
    let script = script();
    let mut contenders = vec![
        ServerContender::new("axum, fixed answer", bytes.child.id(), bytes.http.port(), &[]),
        ServerContender::new("axum, JSON in and out", json.child.id(), json.http.port(), &[]),
        ServerContender::new("tidegate POST /v1/check", own.child.id(), own.http.port(), &[]),
    ];
    let crab = throttlecrab();
    contenders.extend(crab.as_ref().map(|(child, port)| {
        ServerContender::new("throttlecrab POST /throttle", child.id(), *port, &["crab"])
    }));
    for round in 0..ROUNDS {
        let mut order: Vec<usize> = (0..contenders.len()).collect();
        if round % 2 == 1 {
            order.reverse();
        }
        for index in order {
            contenders[index].round(|port, words| {
                let mut load = Command::new("wrk");
                let (script, path) = match words {
                    [] => (&script.0, "/v1/check"),
                    _ => (&script.1, "/throttle"),
                };
                load.args(["-t1", &format!("-c{CONNECTIONS}"), &format!("-d{HTTP_ROUND}"), "-s"])
                    .arg(script);
                load.arg(format!("http://127.0.0.1:{port}{path}"));
                wrk(&mut load)
            });
        }
    }
    if let Some((mut child, _)) = crab {
        let _ = child.kill().and_then(|()| child.wait());
    }
    println!(
        "\nHTTP, {CONNECTIONS} connections, wrk with one thread: median of {ROUNDS} interleaved rounds of {HTTP_ROUND}"
    );
    table(
        &contenders,
        &["axum, fixed answer", "axum, JSON in and out", "throttlecrab POST /throttle"],
    );
}

/// Runs wrk: how many requests there were, and how many a second.
pub(crate) fn wrk(load: &mut Command) -> (f64, f64) {
    let out = printed(load);
    let number = |mark: &str| {
        let line = out
            .lines()
            .find(|line| line.contains(mark))
            .unwrap_or_else(|| panic!("wrk printed {out}"));
        let word = line.split_whitespace().find(|word| word.parse::<f64>().is_ok());
        word.and_then(|word| word.parse::<f64>().ok()).expect("a number")
    };
    assert!(!out.contains("Non-2xx"), "every request is to be allowed: {out}");
    (number("requests in"), number("Requests/sec"))
}

/// Requests for wrk, made beforehand, so that making them costs next to nothing: ours, and
/// throttlecrab's.
fn script() -> (PathBuf, PathBuf) {
    let write = |name: &str, path: &str, body: &str| {
        let file =
            std::env::temp_dir().join(format!("tidegate-bench-{}-{name}.lua", std::process::id()));
        let text = format!(
            "local all, at = {{}}, 0\n\
             init = function()\n\
             \x20 for n = 1, 10000 do\n\
             \x20   local body = string.format('{body}', n)\n\
             \x20   all[n] = wrk.format('POST', '{path}', {{ ['Content-Type'] = 'application/json' }}, body)\n\
             \x20 end\n\
             end\n\
             request = function() at = at % 10000 + 1; return all[at] end\n"
        );
        std::fs::write(&file, text).expect("a file for a moment");
        file
    };
    (
        write("own", "/v1/check", r#"{"key":"user:%07d","limit":"1000000/s"}"#),
        write(
            "crab",
            "/throttle",
            r#"{"key":"user:%07d","max_burst":1000000,"count_per_period":1000000,"period":1}"#,
        ),
    )
}

/// throttlecrab, if it is installed.
fn throttlecrab() -> Option<(Child, u16)> {
    let port = std::net::TcpListener::bind("127.0.0.1:0")
        .and_then(|listener| listener.local_addr())
        .ok()?
        .port();
    let mut command = Command::new("throttlecrab-server");
    command.args([
        "--http",
        "--http-host",
        "127.0.0.1",
        "--http-port",
        &port.to_string(),
        "--store",
        "adaptive",
    ]);
    match command.stdout(Stdio::null()).stderr(Stdio::null()).spawn() {
        Ok(child) => {
            let open = || std::net::TcpStream::connect(("127.0.0.1", port)).is_ok();
            wait_until("throttlecrab listens", Duration::from_secs(10), open);
            Some((child, port))
        }
        Err(_) => {
            println!(
                "throttlecrab is not measured: run `cargo install throttlecrab-server` to have it beside"
            );
            None
        }
    }
}

/// A process of our own, and where it listens.
pub(crate) struct Own {
    pub(crate) child: Child,
    pub(crate) http: SocketAddr,
    pub(crate) resp: SocketAddr,
}

impl Own {
    fn start(what: &str) -> Own {
        Self::start_as(&["server", what])
    }

    /// This program with these arguments.
    pub(crate) fn start_as(args: &[&str]) -> Own {
        Self::start_under(&[], args)
    }

    /// The same, run by another program such as `["valgrind", "--tool=callgrind"]`, which must
    /// become it.
    pub(crate) fn start_under(words: &[&str], args: &[&str]) -> Own {
        let program = std::env::current_exe().expect("this program").into_os_string();
        let mut words = words.iter().map(OsString::from).chain([program]);
        let mut command = Command::new(words.next().expect("a program"));
        command.args(words).args(args).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child =
            command.spawn().unwrap_or_else(|error| panic!("{:?}: {error}", command.get_program()));
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("a pipe")).read_line(&mut line).expect("a line");
        let mut words = line.split_whitespace().map(|word| word.parse().expect("an address"));
        let (http, resp) = (words.next().expect("an address"), words.next().expect("an address"));
        Own { child, http, resp }
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        let _ = self.child.kill().and_then(|()| self.child.wait());
    }
}

/// Says where it listens, and ends with the process that started it.
pub(crate) fn until_left_alone(http: SocketAddr, resp: SocketAddr) {
    println!("{http} {resp}");
    std::io::stdout().flush().expect("the parent reads");
    let _ = std::io::stdin().read_line(&mut String::new());
}

/// Our server, which lets so many connections in.
pub(crate) fn serve_tidegate(connections: usize, per_ip: usize, threads: &str) {
    let text = format!(
        "listen: {{ http: 127.0.0.1:0, resp: 127.0.0.1:0, grpc: off }}\nconnections: {{ max: {connections}, max_per_ip: {per_ip} }}\nthreads: {threads}\n"
    );
    let config = Config::parse(&text, "bench").expect("a configuration");
    let runtime = config.threads.runtime().expect("a runtime");
    let running = runtime.block_on(start(config, Options::default())).expect("open listeners");
    until_left_alone(running.http.expect("a listener"), running.resp.expect("a listener"));
}

/// An answer as long as ours.
const FIXED: &str = r#"{"t_us":1700000000000000,"key":"user:0000007","cost":1,"op":"check","limit":"1000000/s","allowed":true,"granted":1,"remaining":999999,"retry_after_us":0,"reset_after_us":1,"next_after_us":1,"charges":[{"limit":"1000000/s","amount":1000000,"cost":1,"binding":true,"allowed":true,"granted":1,"remaining":999999,"retry_after_us":0,"reset_after_us":1,"next_after_us":1}],"source":"store"}"#;

#[derive(serde::Deserialize)]
struct Asked {
    key: String,
    limit: String,
}

#[derive(serde::Serialize)]
struct Answered {
    key: String,
    limit: String,
    allowed: bool,
    remaining: u64,
}

fn serve_axum(json: bool) {
    use axum::http::header::CONTENT_TYPE;
    use axum::routing::post;
    serve_router(if json {
        axum::Router::new().route(
            "/v1/check",
            post(|axum::Json(Asked { key, limit }): axum::Json<Asked>| async move {
                axum::Json(Answered { key, limit, allowed: true, remaining: 999_999 })
            }),
        )
    } else {
        axum::Router::new().route(
            "/v1/check",
            post(|body: axum::body::Bytes| async move {
                std::hint::black_box(body);
                ([(CONTENT_TYPE, "application/json")], FIXED)
            }),
        )
    });
}

/// The fixed answer to a question, and a page of some length for those who do not read it.
fn serve_axum_with_page() {
    use axum::routing::{get, post};
    let page = || async { [b'x'; 16 << 10] };
    serve_router(
        axum::Router::new()
            .route("/v1/check", post(|| async { FIXED }))
            .route("/metrics", get(page)),
    );
}

fn serve_router(router: axum::Router) {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime");
    let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).expect("a port");
    let at = listener.local_addr().expect("an address");
    runtime.spawn(async move { axum::serve(listener, router).await });
    until_left_alone(at, at);
}

pub(crate) fn printed(command: &mut Command) -> String {
    let output = command.stderr(Stdio::null()).output();
    let output = output.unwrap_or_else(|error| {
        eprintln!(
            "{:?}: {error}: run `apt-get install wrk` and `cargo xtask servers --bench`",
            command.get_program()
        );
        exit(1)
    });
    String::from_utf8_lossy(&output.stdout).into_owned()
}

pub(crate) fn median(numbers: &[f64]) -> f64 {
    let mut numbers = numbers.to_vec();
    numbers.sort_by(f64::total_cmp);
    numbers[numbers.len() / 2]
}
