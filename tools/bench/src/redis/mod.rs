//! `cargo xtask bench redis`: what a decision costs the server, how many one process can make, and
//! how large a key is.

mod bytes;
mod cpu;
pub mod pipe;
mod recorder;
mod throughput;

use std::process::exit;
use std::time::Duration;

use tidegate::redis::Redis;
use tidegate::{Check, Id, Limits, Op, Store};
use tidegate_testkit::{Flavor, Server, redis_cell};

use tokio::runtime::Runtime;

use self::recorder::{Command, Recorder};

/// Keys a measurement goes through, over and over.
const KEYS: usize = 4096;

pub fn run(args: &[&str]) {
    let what = args.first().copied().unwrap_or("all");
    let flavor = match args.get(1) {
        None | Some(&"redis7") => Flavor::Redis7,
        Some(&"redis8") => Flavor::Redis8,
        Some(&"redis62") => Flavor::Redis62,
        Some(&"valkey9") => Flavor::Valkey9,
        Some(other) => {
            eprintln!("redis {what} {other}: expected redis62, redis7, redis8 or valkey9");
            exit(2);
        }
    };
    match what {
        "cpu" => cpu::run(flavor),
        "instructions" => cpu::instructions(flavor),
        "throughput" => throughput::run(flavor),
        "bytes" => bytes::run(flavor),
        "calls" => throughput::calls(flavor),
        "rivals" => throughput::rivals(flavor),
        "all" => {
            cpu::run(flavor);
            throughput::run(flavor);
            bytes::run(flavor);
        }
        _ => {
            eprintln!(
                "redis {what}: expected cpu, instructions, throughput, rivals, bytes, calls or all"
            );
            exit(2);
        }
    }
}

/// A server with redis-cell in it, run by another program if there is one.
fn server(flavor: Flavor, under: &[&str]) -> Server {
    let module = redis_cell();
    Server::builder(flavor)
        .under(under)
        .arg("--loadmodule", module.to_str().expect("a path that is text"))
        .start()
}

/// As short as a key of the library is in Redis when the caller's is `user:00000000`.
fn name(prefix: &str, key: usize) -> String {
    let name = format!("{prefix:x<15}:user:{key:08}");
    assert_eq!(name.len(), 29);
    name
}

/// A key as callers give it. Each contender has a letter of its own, and so keys of its own.
fn user(letter: char, key: usize) -> String {
    format!("use{letter}:{key:08}")
}

fn words<const N: usize>(words: [&str; N]) -> Command {
    words.map(|word| word.as_bytes().to_vec()).into()
}

/// Loads a script and gives its digest.
fn load(server: &Server, script: &str) -> String {
    server.command(&["SCRIPT", "LOAD", script]).text().to_owned()
}

fn limits(text: &str) -> Limits {
    text.parse().expect("limits")
}

/// The request about each key.
#[derive(Clone, Copy, PartialEq)]
enum Ask {
    /// A check without an id.
    Check,
    /// A lease.
    Lease,
    /// A lease, and its end.
    LeaseAndRelease,
}

/// Asks about `keys` keys, 64 at a time.
async fn ask_all(redis: &Redis, limits: &Limits, letter: char, keys: usize, ask: Ask) {
    let tasks: Vec<_> = (0..64)
        .map(|task| {
            let (redis, limits) = (redis.clone(), limits.clone());
            tokio::spawn(async move {
                for key in (task..keys).step_by(64) {
                    let (key, id) = (user(letter, key), Id(key as u64 + 1));
                    let check = Check::new().charge(&key, &limits, 1);
                    let check = if ask == Ask::Check { check } else { check.with_id(id) };
                    let _ = redis.decide(&check).await.expect("a decision");
                    if ask == Ask::LeaseAndRelease {
                        let release = Check::of(Op::Release).charge(&key, &limits, 1).with_id(id);
                        let _ = redis.decide(&release).await.expect("a decision");
                    }
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.expect("no panic");
    }
}

/// What the library sends for every key under `limit`: the calls of the last of `rounds` rounds.
fn recorded(
    server: &Server,
    letter: char,
    limit: &str,
    ask: Ask,
    witness_keys: usize,
    rounds: usize,
) -> Vec<Command> {
    let recorder = Recorder::before(server);
    runtime(1).block_on(async {
        let redis = store(recorder.url(), witness_keys);
        for _ in 0..rounds {
            recorder.calls();
            ask_all(&redis, &limits(limit), letter, KEYS, ask).await;
        }
    });
    recorder.calls()
}

fn runtime(worker_threads: usize) -> Runtime {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(worker_threads)
        .enable_all()
        .build()
        .expect("a runtime")
}

/// A store that waits as long as a busy machine takes.
fn store(url: &str, witness_keys: usize) -> Redis {
    let builder = Redis::builder(url.parse().expect("a URL"));
    builder.timeout(Duration::from_secs(10)).witness_keys(witness_keys).build().expect("a store")
}

fn median(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_by(f64::total_cmp);
    numbers[numbers.len() / 2]
}
