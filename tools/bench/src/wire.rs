//! `cargo run --release -- wire`: one script over one connection, Tidegate's client beside the
//! crate `redis`.
//!
//! Both send the same EVALSHA to the same server from the same runtime, in turns, many short rounds
//! each. Beside calls per second it shows the processor time of the client and of the server per
//! call, which a busy machine disturbs less.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tidegate_redis_client::{Outcome, Router, Script, Settings, Value};
use tidegate_testkit::{Flavor, Server};

const ROUNDS: usize = 9;
const ROUND: Duration = Duration::from_millis(400);
/// One read and one write, as a decision would.
const SCRIPT: &str = "local level = tonumber(redis.call('GET', KEYS[1]) or '0') + tonumber(ARGV[1])
redis.call('SET', KEYS[1], string.format('%.0f', level), 'PX', ARGV[2])
return {1, level, ARGV[3]}";
const PATIENCE: Duration = Duration::from_secs(10);
const KEYS: u64 = 10_000;

pub(crate) fn run(words: &[&str]) {
    let callers: Vec<u64> =
        words.iter().map(|word| word.parse().expect("a number of callers")).collect();
    let callers = if callers.is_empty() { vec![1, 64, 512] } else { callers };
    let server = Server::start(Flavor::Redis7);
    let runtime =
        tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime");
    println!(
        "calls per second and processor time per call, median of {ROUNDS} interleaved rounds of {ROUND:?}\n"
    );
    for callers in callers {
        let mut rounds: [Vec<WireRound>; 2] = Default::default();
        let contenders = runtime.block_on(async {
            [WireContender::ours(&server), WireContender::theirs(&server).await]
        });
        for round in 0..=ROUNDS {
            for (contender, rounds) in contenders.iter().zip(&mut rounds) {
                let measured = measure(&runtime, &server, contender, callers);
                // The first connects, loads the script and fills the caches.
                if round > 0 {
                    rounds.push(measured);
                }
            }
        }
        println!("{callers} caller(s)");
        let medians = rounds.map(|rounds| WireRound::median(&rounds));
        for (contender, median) in contenders.iter().zip(&medians) {
            let WireRound { calls, client_us, server_us, batch } = median;
            let ratio = calls / medians[1].calls;
            println!(
                "  {:<10} {calls:>9.0} calls/s   x {ratio:.2}   client {client_us:>5.2} us   server {server_us:>5.2} us   {batch:.1} calls a read",
                contender.name()
            );
        }
        println!();
    }
}

#[derive(Clone)]
enum WireContender {
    Ours(Router, Arc<Script>),
    Theirs(redis::aio::MultiplexedConnection, String),
}

impl WireContender {
    fn ours(server: &Server) -> Self {
        let url = server.url().parse().expect("a URL");
        let router = Router::new(url, Settings::default()).expect("a router");
        WireContender::Ours(router, Arc::new(Script::new(SCRIPT)))
    }

    async fn theirs(server: &Server) -> Self {
        let client =
            redis::Client::open(format!("{}/?protocol=resp3", server.url())).expect("a client");
        let config = redis::AsyncConnectionConfig::new().set_response_timeout(Some(PATIENCE));
        let connection = client.get_multiplexed_async_connection_with_config(&config).await;
        let mut connection = connection.expect("a connection");
        let mut load = redis::cmd("SCRIPT");
        let sha =
            load.arg("LOAD").arg(SCRIPT).query_async(&mut connection).await.expect("a digest");
        WireContender::Theirs(connection, sha)
    }

    fn name(&self) -> &'static str {
        match self {
            WireContender::Ours(..) => "tidegate",
            WireContender::Theirs(..) => "redis",
        }
    }

    async fn call(&mut self, number: u64) {
        let key = format!("tg:{{{:016x}}}", number % KEYS);
        let nonce = number.to_string();
        match self {
            WireContender::Ours(router, script) => {
                let args = ["1", "60000", nonce.as_str()];
                // The rival's deadline is as far away.
                let deadline = tokio::time::Instant::now() + PATIENCE;
                let outcome = router.eval(script, 0, &[&key], &args, deadline).await;
                let Outcome::Applied(Value::Array(items)) = outcome else { panic!("{outcome:?}") };
                assert_eq!(items[2].as_bytes(), Some(nonce.as_bytes()));
            }
            WireContender::Theirs(connection, sha) => {
                let mut call = redis::cmd("EVALSHA");
                call.arg(&*sha).arg(1).arg(&key).arg(1).arg(60_000).arg(&nonce);
                let items: (i64, i64, String) =
                    call.query_async(connection).await.expect("an answer");
                assert_eq!(items.2, nonce);
            }
        }
    }
}

struct WireRound {
    calls: f64,
    client_us: f64,
    server_us: f64,
    /// How many calls the server found each time it read.
    batch: f64,
}

impl WireRound {
    fn median(rounds: &[WireRound]) -> WireRound {
        let of = |field: fn(&WireRound) -> f64| {
            let mut values: Vec<f64> = rounds.iter().map(field).collect();
            values.sort_by(f64::total_cmp);
            values[values.len() / 2]
        };
        WireRound {
            calls: of(|r| r.calls),
            client_us: of(|r| r.client_us),
            server_us: of(|r| r.server_us),
            batch: of(|r| r.batch),
        }
    }
}

fn measure(
    runtime: &tokio::runtime::Runtime,
    server: &Server,
    contender: &WireContender,
    callers: u64,
) -> WireRound {
    let (done, total) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let reads_before = reads(server);
    let (client_before, server_before) =
        (processor_time("self"), processor_time(&server.pid().to_string()));
    let start = Instant::now();
    runtime.block_on(async {
        let tasks: Vec<_> = (0..callers)
            .map(|caller| {
                let (mut contender, done, total) =
                    (contender.clone(), Arc::clone(&done), Arc::clone(&total));
                tokio::spawn(async move {
                    let mut calls = 0;
                    while !done.load(Ordering::Relaxed) {
                        contender.call(calls * callers + caller).await;
                        calls += 1;
                    }
                    total.fetch_add(calls, Ordering::Relaxed);
                })
            })
            .collect();
        tokio::time::sleep(ROUND).await;
        done.store(true, Ordering::Relaxed);
        for task in tasks {
            task.await.expect("a caller");
        }
    });
    let elapsed = start.elapsed().as_secs_f64();
    let calls = total.load(Ordering::Relaxed) as f64;
    WireRound {
        calls: calls / elapsed,
        client_us: (processor_time("self") - client_before).as_secs_f64() * 1e6 / calls,
        server_us: (processor_time(&server.pid().to_string()) - server_before).as_secs_f64() * 1e6
            / calls,
        batch: calls / (reads(server) - reads_before),
    }
}

/// How often the server has read from a connection.
fn reads(server: &Server) -> f64 {
    let info = server.command(&["INFO", "stats"]);
    let line = info.text().lines().find_map(|line| line.strip_prefix("total_reads_processed:"));
    line.and_then(|number| number.parse().ok()).expect("a number of reads")
}

/// What all threads of a process have used.
fn processor_time(pid: &str) -> Duration {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).expect("/proc, so Linux");
    let of = |task: std::io::Result<fs::DirEntry>| {
        let text = fs::read_to_string(task.ok()?.path().join("schedstat")).ok()?;
        text.split(' ').next()?.parse::<u64>().ok()
    };
    Duration::from_nanos(tasks.filter_map(of).sum())
}
