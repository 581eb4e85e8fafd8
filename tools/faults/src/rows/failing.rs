//! A server that stalls, is slow, or says that it will not.

use std::thread;

use tidegate_testkit::{Fault, FaultProxy, Flavor, Reply, Server, wait_until};

use super::{Context, millis};
use crate::inject::every;
use crate::judge::{Judge, Judged};
use crate::stage::{PATIENCE, Relay, Scene, Setup, Stage, left};

/// What holds of every fault that takes the store away and gives it back whole: clients notice
/// nothing but by the source of the answers, nothing passes beyond the shares, nothing is charged
/// twice, and the store is back soon.
fn whole<'a>(context: &'a Context, scene: &'a Scene, redis: &Server) -> Judge<'a> {
    let mut judge = Judge::new(context, &scene.run);
    judge.no_errors();
    judge.latency();
    judge.back(scene.go, millis(500));
    judge.budgets("tight", context.tight());
    judge.charged_once("tight", context.tight(), |key| left(&redis.url(), key, context.tight()));
    judge
}

/// What the server refuses is sent all the same and decided locally each time; no node gives up
/// asking.
fn refused<'a>(context: &'a Context, scene: &'a Scene, redis: &Server) -> Judge<'a> {
    let mut judge = whole(context, scene, redis);
    let alone = judge.alone("meanwhile", scene.from + millis(100), scene.go);
    judge.holds(alone > 0.5, || format!("the store refused, and only {alone} were decided alone"));
    judge.counted("tidegate_store_missed_total{reason=\"no_answer\"}", 1.0);
    judge
}

fn ok(reply: &Reply) {
    assert_eq!(*reply, Reply::Text("OK".into()));
}

/// Stalled, with all connections open.
pub(crate) fn f1(context: &Context) -> Judged {
    let redis = Server::start(Flavor::Redis7);
    let stage = Stage::start(context, &Setup::new(&redis.url(), 2));
    let scene = stage.play([1000, 2000, 2000], || redis.stop_signal(), || redis.continue_signal());
    let mut judge = whole(context, &scene, &redis);
    judge.open_after(scene.from, scene.go, millis(100));
    judge.counted("tidegate_mode_changes_total{to=\"open\"}", 2.0);
    judge.counted("tidegate_store_missed_total{reason=\"breaker\"}", 1.0);
    judge.end(&format!("stalled 2 s at {}/s", scene.run.rate))
}

/// Every call takes longer.
pub(crate) fn f4(context: &Context) -> Judged {
    let redis = Server::start(Flavor::Redis7);
    let proxy = FaultProxy::with_seed(&redis, context.seed);
    let stage = Stage::start(context, &Setup::new(proxy.url(), 2)).rate(1000);
    let load = stage.load();
    load.goes_on(millis(500));
    let mut parts = Vec::new();
    for ms in [1, 5, 20, 100] {
        let from = load.now();
        proxy.set(Fault::Delay {
            request: millis(ms) / 2,
            reply: millis(ms) / 2,
            jitter: millis(ms) / 4,
        });
        load.goes_on(millis(1500));
        parts.push((ms, from, load.now()));
    }
    let go = load.now();
    proxy.set(Fault::Pass);
    load.goes_on(millis(1500));
    load.settles();
    let run = stage.end(load);
    let mut judge = Judge::new(context, &run);
    judge.no_errors();
    judge.latency();
    for (ms, from, to) in parts {
        let alone = judge.alone(&format!("+{ms} ms"), from + millis(300), to);
        judge.holds(ms > 1 || !context.strict || alone < 0.05, || {
            format!("+{ms} ms: {alone} alone")
        });
        judge.holds(ms < 20 || alone > 0.9, || format!("+{ms} ms: only {alone} alone"));
    }
    judge.back(go, millis(500));
    judge.budgets("tight", context.tight());
    judge.charged_once("tight", context.tight(), |key| left(&redis.url(), key, context.tight()));
    judge.end(&format!("calls delayed at {}/s", run.rate))
}

/// Stalls of a twentieth of a second, as a fork or a big deletion makes them.
pub(crate) fn f5(context: &Context) -> Judged {
    let redis = Server::start(Flavor::Redis7);
    let stage = Stage::start(context, &Setup::new(&redis.url(), 2));
    let load = stage.load();
    load.goes_on(millis(500));
    let from = load.now();
    let mut client = redis.client().expect("the server listens");
    let spikes = every(
        millis(450),
        || _ = client.command(&["DEBUG", "SLEEP", "0.05"]),
        || load.goes_on(millis(5000)),
    );
    let go = load.now();
    load.goes_on(millis(1000));
    load.settles();
    let run = stage.end(load);
    let mut judge = Judge::new(context, &run);
    judge.no_errors();
    judge.latency();
    let alone = judge.alone("meanwhile", from, go);
    judge.holds(!context.strict || alone < 0.3, || format!("{alone} were decided alone"));
    let changes = run.metrics.get("tidegate_mode_changes_total{to=\"open\"}");
    let most = ((go - from).as_secs_f64() + 1.0) * run.nodes as f64;
    judge.say(format!("{spikes} stalls, {changes} times open on {} nodes", run.nodes));
    judge.holds(!context.strict || changes <= most, || {
        format!("the breaker opened {changes} times, at most {most}")
    });
    judge.back(go, millis(500));
    judge.budgets("tight", context.tight());
    judge.charged_once("tight", context.tight(), |key| left(&redis.url(), key, context.tight()));
    judge.end(&format!("stalls of 50 ms at {}/s", run.rate))
}

/// Busy with the endless script of another client.
pub(crate) fn f6(context: &Context) -> Judged {
    let redis = Server::builder(Flavor::Redis7).arg("--busy-reply-threshold", "200").start();
    let stage = Stage::start(context, &Setup::new(&redis.url(), 2));
    let mut client = redis.client().expect("the server listens");
    let mut endless = None;
    let scene = stage.play(
        [1000, 1500, 2000],
        || {
            endless =
                Some(thread::spawn(move || client.command(&["EVAL", "while true do end", "0"])))
        },
        || ok(&redis.command(&["SCRIPT", "KILL"])),
    );
    let killed = endless
        .map(|thread| thread.join().is_ok_and(|reply| reply.is_ok_and(|reply| reply.is_error())));
    let mut judge = whole(context, &scene, &redis);
    judge.open_after(scene.from, scene.go, millis(100));
    judge.holds(killed == Some(true), || "the script of the other ended by itself".into());
    let stats = redis.command(&["INFO", "commandstats"]);
    judge.holds(stats.text().contains("cmdstat_script|kill:calls=1,"), || {
        "a node killed a script of another".into()
    });
    judge.end(&format!("busy 1.5 s at {}/s", scene.run.rate))
}

/// Loading its data.
pub(crate) fn f7(context: &Context) -> Judged {
    let redis = Server::start(Flavor::Redis7);
    ok(&redis.command(&["DEBUG", "POPULATE", "20000", "key", "200"]));
    for (name, value) in [
        ("key-load-delay", "50"),
        ("rdbcompression", "no"),
        ("loading-process-events-interval-bytes", "2048"),
    ] {
        ok(&redis.command(&["CONFIG", "SET", name, value]));
    }
    let stage = Stage::start(context, &Setup::new(&redis.url(), 2));
    // It answers the one who asked for it when it is done.
    let scene = stage.play([1000, 0, 2000], || ok(&redis.command(&["DEBUG", "RELOAD"])), || ());
    let mut judge = whole(context, &scene, &redis);
    judge.say(format!("loading took {:.1} s", (scene.go - scene.from).as_secs_f64()));
    judge.alone("meanwhile", scene.from, scene.go);
    judge.counted("tidegate_store_missed_total{reason=\"no_answer\"}", 1.0);
    judge.at_most("tidegate_store_events_total{event=\"reconnect\"}", 2.0 * scene.run.nodes as f64);
    judge.end(&format!("loading at {}/s", scene.run.rate))
}

fn by_setting(context: &Context, name: &str, [bad, good]: [&str; 2], said: &str) -> Judged {
    let redis = Server::start(Flavor::Redis8);
    let stage = Stage::start(context, &Setup::new(&redis.url(), 2));
    let set = |value: &str| ok(&redis.command(&["CONFIG", "SET", name, value]));
    let scene = stage.play([1000, 1500, 1500], || set(bad), || set(good));
    let mut judge = refused(context, &scene, &redis);
    judge.at_most(
        "tidegate_mode_changes_total{to=\"open\"}",
        if context.strict { 0.0 } else { f64::MAX },
    );
    judge.holds(stage.nodes[0].log().contains(said), || {
        format!("the log does not say {said:?}: {}", stage.nodes[0].log())
    });
    judge.end(&format!("{name} {bad} for 1.5 s at {}/s", scene.run.rate))
}

/// Out of memory.
pub(crate) fn f8(context: &Context) -> Judged {
    by_setting(context, "maxmemory", ["1", "0"], "maxmemory")
}

/// Too few replicas.
pub(crate) fn f12(context: &Context) -> Judged {
    by_setting(context, "min-replicas-to-write", ["2", "0"], "min-replicas-to-write")
}

/// It cannot save, and will not write.
pub(crate) fn f10(context: &Context) -> Judged {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let redis =
        Server::builder(Flavor::Valkey9).arg("--dir", &folder.path().display().to_string()).start();
    let stage = Stage::start(context, &Setup::new(&redis.url(), 2));
    let scene = stage.play(
        [1000, 1500, 1500],
        || {
            folder.close().expect("it can be removed");
            ok(&redis.command(&["CONFIG", "SET", "save", "3600 1"]));
            redis.command(&["BGSAVE"]);
            wait_until("saving has failed", PATIENCE, || {
                redis
                    .command(&["INFO", "persistence"])
                    .text()
                    .contains("rdb_last_bgsave_status:err")
            });
        },
        || ok(&redis.command(&["CONFIG", "SET", "stop-writes-on-bgsave-error", "no"])),
    );
    let judge = refused(context, &scene, &redis);
    judge.end(&format!("saving fails for 1.5 s at {}/s", scene.run.rate))
}

/// A primary that became a replica behind our back, and an address that leads elsewhere only
/// afterwards.
pub(crate) fn f11(context: &Context) -> Judged {
    let redis = Server::start(Flavor::Redis7);
    let next = Server::builder(Flavor::Redis7)
        .arg("--repl-diskless-sync-delay", "0")
        .args("--replicaof", &["127.0.0.1", &redis.port().to_string()])
        .start();
    let follows = |server: &Server| {
        server.command(&["INFO", "replication"]).text().contains("master_link_status:up")
    };
    wait_until("the replica follows", PATIENCE, || follows(&next));
    let relay = Relay::start(redis.port());
    let stage = Stage::start(context, &Setup::new(&relay.url(), 2));
    let scene = stage.play(
        [1000, 600, 2000],
        || {
            // No client writes while they change places, so nothing is lost.
            redis.command(&["CLIENT", "PAUSE", "10000", "WRITE"]);
            let offset = |server: &Server, name: &str| {
                let info = server.command(&["INFO", "replication"]).text().to_owned();
                info.lines().find_map(|line| line.strip_prefix(name).map(str::to_owned))
            };
            wait_until("the replica has everything", PATIENCE, || {
                offset(&redis, "master_repl_offset:") == offset(&next, "slave_repl_offset:")
            });
            ok(&next.command(&["REPLICAOF", "NO", "ONE"]));
            ok(&redis.command(&["REPLICAOF", "127.0.0.1", &next.port().to_string()]));
            redis.command(&["CLIENT", "UNPAUSE"]);
        },
        || relay.leads_newcomers_to(next.port()),
    );
    let mut judge = whole(context, &scene, &next);
    judge.alone("meanwhile", scene.from, scene.go);
    judge.counted("tidegate_store_missed_total{reason=\"no_answer\"}", 1.0);
    judge.holds(!redis.command(&["INFO", "commandstats"]).text().is_empty(), String::new);
    judge.end(&format!("demoted, and found elsewhere 0.6 s later, at {}/s", scene.run.rate))
}

/// Forgets the script, over and over.
pub(crate) fn f14(context: &Context) -> Judged {
    let redis = Server::start(Flavor::Valkey9);
    let stage = Stage::start(context, &Setup::new(&redis.url(), 2));
    let load = stage.load();
    load.goes_on(millis(500));
    let from = load.now();
    let flush = || _ = redis.command(&["SCRIPT", "FLUSH"]);
    let flushes = every(millis(100), flush, || load.goes_on(millis(2500)));
    let to = load.now();
    load.goes_on(millis(300));
    let run = stage.end(load);
    let mut judge = Judge::new(context, &run);
    judge.no_errors();
    judge.latency();
    judge.alone("meanwhile", from, to);
    // A call that finds no script takes a round trip more, and the server two milliseconds to read
    // the script again. Three in a hundred come within that time, and some of them are too late for
    // their deadline if the machine has other things to do as well.
    let alone = judge.alone_while_quiet(from, to);
    judge.holds(!context.strict || alone <= 0.01, || format!("{alone} were decided alone"));
    judge.budgets("tight", context.tight());
    judge.charged_once("tight", context.tight(), |key| left(&redis.url(), key, context.tight()));
    let loads = run.metrics.get("tidegate_store_events_total{event=\"script_load\"}");
    // One for each node and flush, and one more if the flush hits between loading and calling.
    let most = (2 * run.nodes * (flushes + 1)) as f64;
    judge.say(format!("{flushes} flushes, {loads} loads"));
    judge.holds(loads >= 1.0 && loads <= most, || {
        format!("{loads} loads, and between 1 and {most} were expected")
    });
    judge.end(&format!("scripts flushed every 100 ms at {}/s", run.rate))
}

/// Wants a password all of a sudden, and then does not any more.
pub(crate) fn f19(context: &Context) -> Judged {
    let redis = Server::start(Flavor::Redis7);
    let stage = Stage::start(context, &Setup::new(&redis.url(), 2));
    let mut client = redis.client().expect("the server listens");
    let mut said = |words: &[&str]| client.command(words).expect("there is a reply");
    let mut attempts = 0;
    let load = stage.load();
    load.goes_on(millis(1000));
    let from = load.now();
    ok(&said(&["CONFIG", "SET", "requirepass", "pw"]));
    said(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]);
    let connections = |info: &Reply| -> u64 {
        let line =
            info.text().lines().find_map(|line| line.strip_prefix("total_connections_received:"));
        line.and_then(|number| number.parse().ok()).expect("the server reports it")
    };
    let before = connections(&said(&["INFO", "stats"]));
    load.goes_on(millis(1500));
    attempts += connections(&said(&["INFO", "stats"])) - before;
    let go = load.now();
    ok(&said(&["CONFIG", "SET", "requirepass", ""]));
    load.goes_on(millis(2500));
    load.settles();
    let scene = Scene { from, go, run: stage.end(load) };
    let mut judge = Judge::new(context, &scene.run);
    judge.no_errors();
    judge.latency();
    judge.alone("meanwhile", from, go);
    // A login that is refused is tried again after a pause that grows; the bound of the catalogue
    // is one attempt in a tenth of a second.
    judge.say(format!("{attempts} logins tried"));
    let most = scene.run.nodes * 2 * (1500 / 100 + 2);
    judge.holds(attempts <= most, || format!("{attempts} logins were tried, at most {most}"));
    judge.back(go, millis(2000));
    judge.budgets("tight", context.tight());
    judge.holds(stage.nodes[0].log().contains("NOAUTH"), || {
        format!("the log: {}", stage.nodes[0].log())
    });
    judge.end(&format!("a password wanted for 1.5 s at {}/s", scene.run.rate))
}

/// No place for another connection.
pub(crate) fn f20(context: &Context) -> Judged {
    let redis = Server::start(Flavor::Redis7);
    let mut others: Vec<_> = (0..8).map(|_| redis.client().expect("the server listens")).collect();
    for other in &mut others {
        other.command(&["PING"]).expect("there is a reply");
    }
    let stage = Stage::start(context, &Setup::new(&redis.url(), 2));
    let mut connected = 0;
    let mut first = others.remove(0);
    let clients = |info: &Reply| -> u64 {
        let line = info.text().lines().find_map(|line| line.strip_prefix("connected_clients:"));
        line.and_then(|number| number.parse().ok()).expect("the server reports it")
    };
    let load = stage.load();
    load.goes_on(millis(1000));
    connected += clients(&first.command(&["INFO", "clients"]).expect("there is a reply"));
    let from = load.now();
    ok(&first.command(&["CONFIG", "SET", "maxclients", "8"]).expect("there is a reply"));
    first
        .command(&[
            "CLIENT",
            "KILL",
            "LADDR",
            &format!("127.0.0.1:{}", redis.port()),
            "SKIPME",
            "yes",
        ])
        .expect("a reply");
    // The places of those who were killed are taken before they come back.
    others = (0..8).filter_map(|_| redis.client().ok()).collect();
    others.iter_mut().for_each(|other| _ = other.command(&["PING"]));
    load.goes_on(millis(1500));
    let go = load.now();
    ok(&first.command(&["CONFIG", "SET", "maxclients", "10000"]).expect("there is a reply"));
    load.goes_on(millis(2500));
    load.settles();
    let scene = Scene { from, go, run: stage.end(load) };
    let mut judge = Judge::new(context, &scene.run);
    judge.no_errors();
    judge.latency();
    judge.alone("meanwhile", from, go);
    let each = connected.saturating_sub(8) as f64 / scene.run.nodes as f64;
    judge.say(format!("{each} connections a node"));
    judge.holds(each <= 2.0, || format!("{each} connections a node, at most 2"));
    judge.back(go, millis(2000));
    judge.budgets("tight", context.tight());
    judge.end(&format!("maxclients for 1.5 s at {}/s", scene.run.rate))
}
