//! The machine, the clock, and the operator.

use std::fs;
use std::io::Write;
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tidegate_testkit::{ClockShim, Flavor, Sentinels, Server, spawn, wait_until};

use super::{Context, millis};
use crate::inject::{every, firewall, open_wall};
use crate::judge::{Judge, Judged, ms};
use crate::load::{Ask, Class, Http, Source};
use crate::stage::{Node, PATIENCE, Setup, Stage, budget};
use tidegate_trace::Random;

/// A cluster of two halves that do not hear each other, each with a primary.
pub(crate) fn f30(context: &Context) -> Judged {
    let sentinels = Sentinels::start(Flavor::Redis7);
    let (old, port) = (sentinels.master(), sentinels.master().port());
    // One node is on the side of the old primary, which it knows by another address; the other on
    // that of the sentinels.
    old.command(&["CONFIG", "SET", "bind", "127.0.0.1 127.0.0.9"]);
    let stores = vec![format!("redis://127.0.0.9:{port}"), sentinels.url()];
    let stage = Stage::start(context, &Setup::each(stores)).rate(2000);
    let load = stage.load();
    load.goes_on(millis(300));
    let from = load.now();
    firewall(&[
        format!("ip daddr 127.0.0.1 tcp dport {port} drop"),
        format!("ip saddr 127.0.0.1 tcp sport {port} drop"),
    ]);
    let replica = &sentinels.servers()[1];
    wait_until("the replica is promoted", PATIENCE, || {
        replica.command(&["INFO", "replication"]).text().contains("role:master")
    });
    load.goes_on(millis(2500));
    open_wall();
    sentinels.wait_until_ok();
    let go = load.now();
    load.goes_on(millis(1000));
    let run = stage.end(load);
    let mut judge = Judge::new(context, &run);
    judge.no_errors();
    judge.latency();
    let amount = context.tight();
    let mut most = 0;
    for key in 0..5 {
        for node in 0..2 {
            let of = |answer: &crate::load::Answer| {
                answer.node == node && answer.source != Some(Source::Fallback)
            };
            let passed = judge.passed("tight", key, of);
            judge.holds(passed <= amount, || {
                format!("tight:{key}: {passed} passed on one side, at most {amount}")
            });
        }
        let both = judge.passed("tight", key, |answer| answer.source != Some(Source::Fallback));
        most = most.max(both);
    }
    judge.say(format!("{most} ≤ {} passed on both sides", 2 * amount));
    judge.alone("meanwhile", from, go);
    judge.end(&format!("a split of {:.1} s at {}/s", (go - from).as_secs_f64(), run.rate))
}

/// The wall clock of the nodes jumps.
pub(crate) fn f49(context: &Context) -> Judged {
    let amount = context.tight();
    let limit = format!("{amount}/h window from first hit");
    let shim = ClockShim::build();
    let environment: Vec<String> =
        shim.environment().iter().map(|(name, value)| format!("{name}={value}")).collect();
    let wrapper: Vec<&str> =
        ["env"].into_iter().chain(environment.iter().map(String::as_str)).collect();
    let redis = Server::start(Flavor::Redis7);
    let mix = vec![Class { name: "hour", ask: Ask::Limit(limit), keys: 5, weight: 1 }];
    let mut stage = Stage::start(context, &Setup::new(&redis.url(), 1)).asks(mix).rate(1000);
    stage.nodes = vec![
        Node::start_by(&wrapper, "store: memory\nrules: []\n"),
        Node::start_by(&wrapper, &Setup::new(&redis.url(), 1).config(0)),
    ];
    let load = stage.load();
    load.goes_on(millis(1000));
    redis.stop_signal();
    for ahead in [1, 86_400, 0, -86_400, 0] {
        shim.set(ahead);
        load.goes_on(millis(700));
    }
    redis.continue_signal();
    load.goes_on(millis(1000));
    let run = stage.end(load);
    let mut judge = Judge::new(context, &run);
    judge.no_errors();
    judge.latency();
    let mut most = 0;
    for key in 0..5 {
        let here = judge.passed("hour", key, |answer| answer.node == 0);
        let alone = judge.passed("hour", key, |answer| {
            answer.node == 1 && answer.source == Some(Source::Fallback)
        });
        let there = judge.passed("hour", key, |answer| {
            answer.node == 1 && answer.source != Some(Source::Fallback)
        });
        for (what, passed) in [("in memory", here), ("alone", alone), ("by the store", there)] {
            judge.holds(passed <= amount, || {
                format!("hour:{key}: {passed} passed {what}, at most {amount}")
            });
            most = most.max(passed);
        }
    }
    judge.say(format!("{most} ≤ {amount} passed in each of memory, store and alone"));
    judge.end(&format!("clocks of nodes a second and a day ahead and behind at {}/s", run.rate))
}

/// A node that may have 256 MiB, and people who would have it use more.
pub(crate) fn f52(context: &Context) -> Judged {
    const MOST: u64 = 256 << 20;
    // What a request claims to bring.
    const CLAIM: &str =
        "POST /v1/check HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99999999999\r\n\r\n";
    let group = MemoryGroup::new(MOST);
    let setup = Setup::new("memory", 1);
    let mut stage = Stage::start(context, &setup);
    let enter = format!("echo $$ > {} && exec \"$@\"", group.processes().display());
    stage.nodes = vec![Node::start_by(&["sh", "-c", &enter, "sh"], &setup.config(0))];
    let load = stage.load();
    load.goes_on(millis(300));
    let address = &stage.nodes[0].http;
    let over = AtomicBool::new(false);
    let asked = AtomicU64::new(0);
    thread::scope(|scope| {
        for thread in 0..2 {
            let (over, asked) = (&over, &asked);
            scope.spawn(move || {
                let mut http = Http::connect(address).expect("the node listens");
                for number in 0_u64.. {
                    if over.load(Ordering::Relaxed) {
                        break;
                    }
                    let check = |at| {
                        format!(r#"{{"key":"{thread}:{number}:{at}","limit":"100000/d log"}}"#)
                    };
                    let checks: Vec<String> = (0..CHECKS).map(check).collect();
                    let body = format!(r#"{{"checks":[{}]}}"#, checks.join(","));
                    // Whether it was allowed does not matter here.
                    let _ = http.post("/v1/check", &body).expect("it is answered");
                    asked.fetch_add(CHECKS, Ordering::Relaxed);
                }
            });
        }
        let claims: Vec<_> = (0..100)
            .filter_map(|_| {
                let mut stream = TcpStream::connect(address).ok()?;
                stream.write_all(CLAIM.as_bytes()).ok()?;
                stream.write_all(&[b' '; 32 << 10]).ok()?;
                Some(stream)
            })
            .collect();
        load.goes_on(millis(context.scaled(12_000)));
        over.store(true, Ordering::Relaxed);
        drop(claims);
    });
    load.goes_on(millis(300));
    let (most, killed) = (group.most(), group.killed());
    let run = stage.end(load);
    let mut judge = Judge::new(context, &run);
    judge.no_errors();
    judge.budgets("tight", context.tight());
    let asked = asked.into_inner();
    judge.say(format!("{asked} keys, at most {} of {} MiB", most >> 20, MOST >> 20));
    judge.holds(killed == 0, || format!("the system ended {killed} processes for want of memory"));
    judge.holds(most < MOST, || format!("{most} bytes were used, and there are {MOST}"));
    judge.counted("tidegate_store_overflows_total", 1.0);
    judge.end(&format!("256 MiB at {}/s", run.rate))
}

/// Keys in one request of those who want much.
const CHECKS: u64 = 64;

/// A control group that may have so much memory.
struct MemoryGroup {
    folder: PathBuf,
    is_first_version: bool,
}

impl MemoryGroup {
    fn new(most: u64) -> Self {
        let is_first_version = Path::new("/sys/fs/cgroup/memory/memory.limit_in_bytes").exists();
        let root =
            Path::new(if is_first_version { "/sys/fs/cgroup/memory" } else { "/sys/fs/cgroup" });
        let folder = root.join(format!("tidegate-faults-{}", std::process::id()));
        let group = MemoryGroup { folder, is_first_version };
        let made = || {
            if !is_first_version {
                fs::write(root.join("cgroup.subtree_control"), "+memory")?;
            }
            fs::create_dir(&group.folder)?;
            let file = if is_first_version { "memory.limit_in_bytes" } else { "memory.max" };
            fs::write(group.folder.join(file), most.to_string())
        };
        made().unwrap_or_else(|error| {
            panic!(
                "{}: {error}: this row needs root and a memory control group (cgroup)",
                group.folder.display()
            )
        });
        group
    }

    /// Who writes its number here is in it.
    fn processes(&self) -> PathBuf {
        self.folder.join("cgroup.procs")
    }

    fn read(&self, file: &str) -> String {
        let file = self.folder.join(file);
        fs::read_to_string(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()))
    }

    /// The most bytes that it had at any time.
    fn most(&self) -> u64 {
        let text = self.read(if self.is_first_version {
            "memory.max_usage_in_bytes"
        } else {
            "memory.peak"
        });
        text.trim().parse().expect("a number of bytes")
    }

    /// How many processes were ended because there was no more.
    fn killed(&self) -> u64 {
        let text =
            self.read(if self.is_first_version { "memory.oom_control" } else { "memory.events" });
        let count = text.lines().find_map(|line| line.strip_prefix("oom_kill "));
        count.and_then(|count| count.parse().ok()).expect("a count")
    }
}

impl Drop for MemoryGroup {
    fn drop(&mut self) {
        // Not before the last in it has ended.
        for _ in 0..100 {
            if fs::remove_dir(&self.folder).is_ok() {
                break;
            }
            thread::sleep(millis(20));
        }
    }
}

/// One processor for the nodes, which others keep busy, and far too much to do.
pub(crate) fn f53(context: &Context) -> Judged {
    let redis = Server::start(Flavor::Redis7);
    let setup = Setup::new(&redis.url(), 2);
    let mut stage = Stage::start(context, &setup);
    stage.nodes =
        (0..2).map(|node| Node::start_by(&["taskset", "-c", "0"], &setup.config(node))).collect();
    let mut others: Vec<Child> = Vec::new();
    let load = stage.load();
    load.goes_on(millis(1000));
    for _ in 0..2 {
        let busy = spawn("taskset".as_ref(), |command| {
            command.args(["-c", "0", "sh", "-c", "while :; do :; done"]).stdout(Stdio::null());
        });
        others
            .push(busy.expect("`taskset` is part of util-linux: run `apt-get install util-linux`"));
    }
    load.set_rate(context.scaled(20_000));
    let mut slowest = Duration::ZERO;
    let mut well = true;
    let address = stage.nodes[0].http.clone();
    every(
        millis(100),
        || {
            let began = Instant::now();
            well &= Http::connect(&address)
                .and_then(|mut http| http.get("/readyz"))
                .is_ok_and(|(status, _)| status == 200);
            slowest = slowest.max(began.elapsed());
        },
        || load.goes_on(millis(2500)),
    );
    load.set_rate(context.scaled(1000));
    for other in &mut others {
        let _ = other.kill().and_then(|()| other.wait());
    }
    let go = load.now();
    load.goes_on(millis(2000));
    load.settles();
    let run = stage.end(load);
    let mut judge = Judge::new(context, &run);
    judge.no_errors();
    judge.say(format!("health within {}", ms(slowest)));
    judge.holds(well, || "health was not answered".into());
    // Clients kept sending, and all of that waits at the nodes: until it is answered, whatever
    // they ask the store is late by as much.
    let caught_up = judge.caught_up(go);
    judge.back(caught_up, millis(500));
    judge.budgets("tight", context.tight());
    judge.counted("tidegate_store_missed_total{reason=\"overload\"}", 0.0);
    judge.end(&format!("a third of a processor at {}/s", context.scaled(20_000)))
}

fn put(node: &Node, text: &str) {
    let (file, new) = (node.config(), node.config().with_extension("new"));
    fs::write(&new, text).expect("a temporary file can be written");
    fs::rename(&new, &file).expect("a temporary file can be moved");
    node.signal(Signal::HUP);
}

/// Files with mistakes in them, over and over.
pub(crate) fn f56(context: &Context) -> Judged {
    let redis = Server::start(Flavor::Redis7);
    let rules = format!(
        "rules:\n  - {{ name: own, when: {{ kind: own }}, by: [user], limit: {} }}\n",
        budget(context.tight())
    );
    let mix = vec![
        Class { name: "plenty", ask: Ask::Limit("1000000/s".into()), keys: 200, weight: 4 },
        Class { name: "own", ask: Ask::Kind("own"), keys: 5, weight: 1 },
    ];
    let stage = Stage::start(context, &Setup::new(&redis.url(), 2).rules(&rules)).asks(mix);
    let good = fs::read_to_string(stage.nodes[0].config()).expect("the file is there");
    let start = good.find("rules:").expect("it has rules");
    let mut random = Random(context.seed);
    let load = stage.load();
    load.goes_on(millis(300));
    let mutations = every(
        millis(4),
        || {
            let mut bytes = good.clone().into_bytes();
            // A byte of the rules is another one, or is missing; sometimes everything is.
            let at = start
                + usize::try_from(random.below((good.len() - start) as u64))
                    .expect("it is an index");
            match random.below(10) {
                0 => bytes.clear(),
                1..4 => _ = bytes.remove(at),
                _ => bytes[at] = b' ' + random.next().to_le_bytes()[0] % 95,
            }
            let text = String::from_utf8_lossy(&bytes);
            // One that is good by chance could be another limit for the same keys.
            if !text.contains("limit") || text.contains(&budget(context.tight())) {
                put(&stage.nodes[0], &text);
            }
        },
        || load.goes_on(millis(4000)),
    );
    put(&stage.nodes[0], &good);
    load.goes_on(millis(500));
    let run = stage.end(load);
    let mut judge = Judge::new(context, &run);
    judge.no_errors();
    judge.latency();
    judge.say(format!("{mutations} files"));
    judge.counted("tidegate_reloads_total{what=\"rules\",result=\"failed\"}", 1.0);
    judge.at_most("tidegate_panics_total", 0.0);
    for key in 0..5 {
        // While a file that is good by chance is another rule, no rule may match a request, and
        // passes.
        let passed = judge.passed("own", key, |answer| {
            answer.node == 1 && answer.source != Some(Source::Fallback)
        });
        judge.holds(passed <= context.tight(), || {
            format!("own:{key}: {passed} passed of {}", context.tight())
        });
    }
    judge.end(&format!("a file with mistakes every few ms at {}/s", run.rate))
}

/// A limit that goes down and up again.
pub(crate) fn f57(context: &Context) -> Judged {
    let redis = Server::start(Flavor::Redis7);
    let (small, large) = (context.tight() / 2, context.tight());
    let rules = |amount: u64| {
        format!(
            "rules:\n  - {{ name: own, when: {{ kind: own }}, by: [user], limit: {} }}\n",
            budget(amount)
        )
    };
    let setup = |amount: u64| Setup::new(&redis.url(), 1).rules(&rules(amount));
    let mix = vec![Class { name: "own", ask: Ask::Kind("own"), keys: 5, weight: 1 }];
    let stage = Stage::start(context, &setup(large)).asks(mix).rate(1000);
    let good = fs::read_to_string(stage.nodes[0].config()).expect("the file is there");
    let load = stage.load();
    let mut is_small = false;
    let flips = every(
        millis(10),
        || {
            is_small = !is_small;
            let amount = if is_small { small } else { large };
            put(&stage.nodes[0], &good.replace(&budget(large), &budget(amount)));
        },
        || load.goes_on(millis(4000)),
    );
    put(&stage.nodes[0], &good);
    load.goes_on(millis(1000));
    let run = stage.end(load);
    let mut judge = Judge::new(context, &run);
    judge.no_errors();
    judge.latency();
    judge.say(format!("{flips} changes"));
    judge.counted("tidegate_reloads_total{what=\"rules\",result=\"ok\"}", 10.0);
    judge.budgets("own", large);
    judge.end(&format!("a limit of {large} and {small} in turns at {}/s", run.rate))
}

/// Those who ask for numbers and never read them.
pub(crate) fn f66(context: &Context) -> Judged {
    use std::io::Write;
    let redis = Server::start(Flavor::Redis7);
    let stage = Stage::start(context, &Setup::new(&redis.url(), 2));
    let mut deaf = Vec::new();
    let scene = stage.play(
        [700, 3000, 1000],
        || {
            for _ in 0..100 {
                let mut stream =
                    std::net::TcpStream::connect(&stage.nodes[0].http).expect("the node listens");
                stream.set_write_timeout(Some(millis(50))).expect("it can be set");
                // Far more answers than a server keeps for a client that does not read.
                let _ = stream.write_all(
                    "GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n".repeat(500).as_bytes(),
                );
                deaf.push(stream);
            }
        },
        || (),
    );
    let mut judge = Judge::new(context, &scene.run);
    judge.no_errors();
    judge.latency();
    judge.alone("meanwhile", scene.from, scene.go);
    judge.back(scene.go, millis(500));
    judge.budgets("tight", context.tight());
    judge.end(&format!("100 who never read at {}/s", scene.run.rate))
}
