//! How many decisions one process makes: the library beside a bare EVALSHA of the same script with the same arguments.

use std::sync::Arc;
use std::time::Instant;

use redis::aio::MultiplexedConnection;
use tidegate::{Check, Limits, Redis, Store};
use tidegate_testkit::Flavor;

use super::pipe::cpu_ns;
use super::recorder::Command;
use super::{Ask, KEYS, limits, load, median, name, recorded, runtime, server, store, user, words};

const ROUNDS: usize = 15;
const DECISIONS: usize = 1 << 14;
const LIMIT: &str = "1000000/h";

const LABELS: [&str; 4] = [
    "tidegate",
    "redis crate, the same script and arguments",
    "redis crate, plain GCRA script",
    "redis crate, script: return 1",
];

/// Everybody, connected.
struct Contenders {
    ours: Redis,
    limits: Limits,
    users: Vec<String>,
    bare: MultiplexedConnection,
    commands: [Vec<Command>; 3],
}

pub fn run(flavor: Flavor) {
    let server = server(flavor, &[]);
    let commands = [
        recorded(&server, 'r', LIMIT, Ask::Check, 8 * KEYS, 2),
        {
            let sha = load(&server, include_str!("gcra.lua"));
            let call = |key| words(["EVALSHA", &sha, "1", &name("gcra", key), "1000000", "3600", "1000000", "1"]);
            (0..KEYS).map(call).collect()
        },
        {
            let sha = load(&server, "return 1");
            (0..KEYS).map(|key| words(["EVALSHA", &sha, "1", &name("one", key)])).collect()
        },
    ];
    let runtime = runtime(2);
    println!(
        "\n{flavor}: decisions of one process over one connection, two worker threads, median of {ROUNDS} interleaved \
         rounds of {DECISIONS}"
    );
    runtime.block_on(async {
        let client = redis::Client::open(server.url()).expect("a URL");
        let contenders = Arc::new(Contenders {
            ours: store(&server.url(), 8 * KEYS),
            limits: limits(LIMIT),
            users: (0..KEYS).map(|key| user('r', key)).collect(),
            bare: client.get_multiplexed_async_connection().await.expect("the server"),
            commands,
        });
        for concurrency in [64, 512] {
            let mut found = [const { Vec::new() }; LABELS.len()];
            for turn in 0..=ROUNDS {
                for (index, found) in found.iter_mut().enumerate() {
                    let (server_before, client_before) = (cpu_ns(server.pid()), cpu_ns(std::process::id()));
                    let start = Instant::now();
                    contenders.round(index, concurrency).await;
                    let wall = start.elapsed().as_secs_f64();
                    let per_call = |after: u64, before: u64| (after - before) as f64 / 1e3 / DECISIONS as f64;
                    let client_us = per_call(cpu_ns(std::process::id()), client_before);
                    let server_us = per_call(cpu_ns(server.pid()), server_before);
                    // The first round connects, loads and warms up.
                    if turn > 0 {
                        found.push([DECISIONS as f64 / wall, client_us, server_us]);
                    }
                }
            }
            println!("  {concurrency} at once{:>38} {:>12} {:>12}", "per second", "client us", "server us");
            for (label, rounds) in LABELS.iter().zip(&found) {
                let column = |column: usize| median(rounds.iter().map(|round| round[column]).collect());
                let ratios = found[0].iter().zip(rounds).map(|(ours, theirs)| ours[0] / theirs[0]).collect();
                println!(
                    "    {label:<42} {:>7.0} {:>12.2} {:>12.2}   tidegate / it = {:.2}",
                    column(0),
                    column(1),
                    column(2),
                    median(ratios)
                );
            }
        }
        assert_eq!(contenders.ours.stats().regressions, 0, "nothing was lost");
    });
}

impl Contenders {
    /// `DECISIONS` decisions, `concurrency` at a time.
    async fn round(self: &Arc<Self>, index: usize, concurrency: usize) {
        let tasks: Vec<_> = (0..concurrency)
            .map(|task| {
                let all = Arc::clone(self);
                let mine = (0..DECISIONS / concurrency).map(move |n| (n * concurrency + task) % KEYS);
                tokio::spawn(async move {
                    match index.checked_sub(1) {
                        None => all.decide(mine).await,
                        Some(which) => all.evaluate(which, mine).await,
                    }
                })
            })
            .collect();
        for task in tasks {
            task.await.expect("no panic");
        }
    }

    async fn decide(&self, keys: impl Iterator<Item = usize>) {
        for key in keys {
            let check = Check::new().charge(&self.users[key], &self.limits, 1);
            assert!(self.ours.decide(&check).await.expect("a decision").allowed());
        }
    }

    async fn evaluate(&self, which: usize, keys: impl Iterator<Item = usize>) {
        let mut connection = self.bare.clone();
        for key in keys {
            let mut command = redis::Cmd::new();
            for word in &self.commands[which][key] {
                command.arg(word);
            }
            let _: redis::Value = command.query_async(&mut connection).await.expect("a reply");
        }
    }
}

/// The library alone, for a profiler.
pub fn calls(flavor: Flavor) {
    let server = server(flavor, &[]);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let client = redis::Client::open(server.url()).expect("a URL");
        let contenders = Arc::new(Contenders {
            ours: store(&server.url(), 8 * KEYS),
            limits: limits(LIMIT),
            users: (0..KEYS).map(|key| user('r', key)).collect(),
            bare: client.get_multiplexed_async_connection().await.expect("the server"),
            commands: [Vec::new(), Vec::new(), Vec::new()],
        });
        for _ in 0..4 {
            contenders.round(0, 64).await;
        }
    });
    println!("{} decisions", 4 * DECISIONS);
}
