//! How many decisions one process makes: the library beside a bare EVALSHA of the same script with
//! the same arguments, and beside what others offer.

use std::path::PathBuf;
use std::process;
use std::sync::Arc;
use std::time::Instant;

use fred::interfaces::{ClientLike, LuaInterface};
use redis::aio::MultiplexedConnection;
use tidegate::redis::Redis;
use tidegate::{Check, Limits, Store};
use tidegate_testkit::{Flavor, Server};

use super::pipe::cpu_ns;
use super::recorder::Command;
use super::{Ask, KEYS, limits, load, median, name, recorded, runtime, server, store, user, words};

const ROUNDS: usize = 15;
const DECISIONS: usize = 1 << 14;
const LIMIT: &str = "1000000/h";

const LABELS: [&str; 5] = [
    "tidegate",
    "redis crate, the same script and arguments",
    "redis crate, plain GCRA script",
    "redis crate, script: return 1",
    "fred, plain GCRA script",
];
/// Where in `commands` the plain GCRA script is.
const GCRA: usize = 1;
/// Who comes after those that `commands` are for.
const FRED: usize = 3;

/// All contenders, connected.
struct Contenders {
    ours: Redis,
    limits: Limits,
    users: Vec<String>,
    bare: MultiplexedConnection,
    fred: fred::clients::Client,
    commands: [Vec<Command>; 3],
}

pub fn run(flavor: Flavor) {
    let server = server(flavor, &[]);
    let commands = [
        recorded(&server, 'r', LIMIT, Ask::Check, 8 * KEYS, 2),
        {
            let sha = load(&server, include_str!("gcra.lua"));
            let call = |key| {
                words(["EVALSHA", &sha, "1", &name("gcra", key), "1000000", "3600", "1000000", "1"])
            };
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
        let contenders = Contenders::connect(&server, commands).await;
        for concurrency in [64, 512] {
            let mut found = [const { Vec::new() }; LABELS.len()];
            for turn in 0..=ROUNDS {
                for (index, found) in found.iter_mut().enumerate() {
                    let (server_before, client_before) =
                        (cpu_ns(server.pid()), cpu_ns(std::process::id()));
                    let start = Instant::now();
                    contenders.round(index, concurrency).await;
                    let wall = start.elapsed().as_secs_f64();
                    let per_call =
                        |after: u64, before: u64| (after - before) as f64 / 1e3 / DECISIONS as f64;
                    let client_us = per_call(cpu_ns(std::process::id()), client_before);
                    let server_us = per_call(cpu_ns(server.pid()), server_before);
                    // The first round connects, loads and warms up.
                    if turn > 0 {
                        found.push([DECISIONS as f64 / wall, client_us, server_us]);
                    }
                }
            }
            println!(
                "  {concurrency} concurrent{:>38} {:>12} {:>12}",
                "per second", "client us", "server us"
            );
            for (label, rounds) in LABELS.iter().zip(&found) {
                let column =
                    |column: usize| median(rounds.iter().map(|round| round[column]).collect());
                let ratios =
                    found[0].iter().zip(rounds).map(|(ours, theirs)| ours[0] / theirs[0]).collect();
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
    async fn connect(server: &Server, commands: [Vec<Command>; 3]) -> Arc<Self> {
        let client = redis::Client::open(server.url()).expect("a URL");
        let config = fred::types::config::Config::from_url(&server.url()).expect("a URL");
        let fred = fred::types::Builder::from_config(config).build().expect("a client");
        fred.init().await.expect("the server");
        Arc::new(Contenders {
            ours: store(&server.url(), 8 * KEYS),
            limits: limits(LIMIT),
            users: (0..KEYS).map(|key| user('r', key)).collect(),
            bare: client.get_multiplexed_async_connection().await.expect("the server"),
            fred,
            commands,
        })
    }

    /// `DECISIONS` decisions, `concurrency` at a time.
    async fn round(self: &Arc<Self>, index: usize, concurrency: usize) {
        let tasks: Vec<_> = (0..concurrency)
            .map(|task| {
                let all = Arc::clone(self);
                let mine =
                    (0..DECISIONS / concurrency).map(move |n| (n * concurrency + task) % KEYS);
                tokio::spawn(async move {
                    match index.checked_sub(1) {
                        None => all.decide(mine).await,
                        Some(FRED) => all.evaluate_by_fred(mine).await,
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

    async fn evaluate_by_fred(&self, keys: impl Iterator<Item = usize>) {
        let text = |word: &Vec<u8>| String::from_utf8(word.clone()).expect("text");
        for key in keys {
            let [_, sha, _, name, args @ ..] = &self.commands[GCRA][key][..] else {
                unreachable!("an EVALSHA of one key")
            };
            let args: Vec<String> = args.iter().map(text).collect();
            let _: fred::types::Value =
                self.fred.evalsha(text(sha), text(name), args).await.expect("a reply");
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

/// The library beside limiters for other languages. Those run as programs of their own, and tell
/// what they reached.
pub fn rivals(flavor: Flavor) {
    const TURNS: usize = 5;
    let server = server(flavor, &[]);
    let runtime = runtime(2);
    let rivals = Rivals::installed();
    println!(
        "\n{flavor}: decisions a second of one process, a bucket beside fixed windows, median of {TURNS} interleaved rounds of {DECISIONS}"
    );
    for concurrency in [64, 512] {
        let contenders = runtime.block_on(Contenders::connect(&server, Default::default()));
        let mut found: Vec<(&str, Vec<f64>)> =
            ["tidegate", "rate-limiter-flexible", "rate-limit-redis", "limits"]
                .map(|label| (label, Vec::new()))
                .into();
        for _ in 0..TURNS {
            for (label, found) in &mut found {
                found.push(match *label {
                    "tidegate" => {
                        runtime.block_on(contenders.round(0, concurrency));
                        let start = Instant::now();
                        runtime.block_on(contenders.round(0, concurrency));
                        DECISIONS as f64 / start.elapsed().as_secs_f64()
                    }
                    "limits" => rivals.python(server.port()),
                    label => rivals.node(label, server.port(), concurrency),
                });
            }
        }
        println!("  {concurrency} concurrent");
        let ours = found[0].1.clone();
        for (label, found) in found {
            let ratios = ours.iter().zip(&found).map(|(ours, theirs)| ours / theirs).collect();
            let alone = if label == "limits" { " (Python, one at a time)" } else { "" };
            println!(
                "    {:<42} {:>7.0}   tidegate / it = {:.2}",
                format!("{label}{alone}"),
                median(found),
                median(ratios)
            );
        }
    }
}

/// Limiters for other languages, in a folder of their own.
struct Rivals(PathBuf);

impl Rivals {
    const NODE: [&str; 4] =
        ["ioredis@5", "rate-limiter-flexible@11", "rate-limit-redis@6", "express-rate-limit@8"];

    fn installed() -> Rivals {
        let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("target/rivals");
        std::fs::create_dir_all(&folder).expect("a folder");
        if !folder.join("node_modules/ioredis").exists() {
            let mut npm = process::Command::new("npm");
            tell(
                npm.args(["install", "--silent", "--no-fund", "--no-audit", "--prefix", "."])
                    .args(Self::NODE),
                &folder,
            );
        }
        if !folder.join("python/limits").exists() {
            let mut pip = process::Command::new("python3");
            tell(
                pip.args([
                    "-m",
                    "pip",
                    "install",
                    "-q",
                    "--target",
                    "python",
                    "limits==5.8.0",
                    "redis",
                ]),
                &folder,
            );
        }
        Rivals(folder)
    }

    fn node(&self, who: &str, port: u16, concurrency: usize) -> f64 {
        let mut node = process::Command::new("node");
        node.arg(script("rivals.mjs")).arg(who).args([
            port.to_string(),
            concurrency.to_string(),
            DECISIONS.to_string(),
        ]);
        number(&tell(&mut node, &self.0))
    }

    fn python(&self, port: u16) -> f64 {
        let mut python = process::Command::new("python3");
        python.env("PYTHONPATH", self.0.join("python")).arg(script("rivals.py"));
        number(&tell(python.args([port.to_string(), (DECISIONS / 4).to_string()]), &self.0))
    }
}

fn script(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("rivals").join(name)
}

fn tell(command: &mut process::Command, folder: &std::path::Path) -> String {
    let said = command.current_dir(folder).output();
    let said = said.unwrap_or_else(|error| {
        panic!("{command:?}: {error}: apt-get install -y nodejs npm python3-pip")
    });
    assert!(said.status.success(), "{command:?}: {}", String::from_utf8_lossy(&said.stderr));
    String::from_utf8_lossy(&said.stdout).into_owned()
}

fn number(text: &str) -> f64 {
    text.trim().parse().unwrap_or_else(|_| panic!("expected a number, found {text:?}"))
}

/// The library alone, for a profiler.
pub fn calls(flavor: Flavor) {
    let server = server(flavor, &[]);
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let contenders = Contenders::connect(&server, Default::default()).await;
        for _ in 0..4 {
            contenders.round(0, 64).await;
        }
    });
    println!("{} decisions", 4 * DECISIONS);
}
