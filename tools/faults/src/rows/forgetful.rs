//! A server that loses what it knew, or holds what no node wrote.

use std::time::Duration;

use tidegate_testkit::{Flavor, Reply, Server, wait_until};

use super::{Context, millis};
use crate::judge::{Judge, Judged};
use crate::load::{Ask, Class};
use crate::stage::{PATIENCE, Relay, Run, Setup, Stage, budget};

/// What holds of every loss.
fn lost<'a>(context: &'a Context, run: &'a Run, [from, to]: [Duration; 2]) -> Judge<'a> {
    let mut judge = Judge::new(context, run);
    judge.no_errors();
    judge.latency();
    judge.back(to, millis(500));
    judge.lost("tight", context.tight(), from, to);
    judge.counted("tidegate_store_events_total{event=\"regression\"}", 1.0);
    judge
}

fn assert_all_end(judge: &mut Judge<'_>, redis: &Server) {
    let keys = redis.keys_without_ttl("tg1:");
    judge.holds(keys.is_empty(), || {
        format!("{} keys would stay for ever: {:?}", keys.len(), keys.first())
    });
}

/// Killed, and back with nothing.
pub(crate) fn f2(context: &Context) -> Judged {
    let redis = Server::start(Flavor::Redis8);
    let stage = Stage::start(context, &Setup::new(&redis.url(), 2));
    let load = stage.load();
    load.goes_on(millis(700));
    let loss = load.now();
    redis.kill();
    load.goes_on(millis(1000));
    redis.restart();
    let go = load.now();
    load.goes_on(millis(2500));
    load.settles();
    let run = stage.end(load);
    let mut judge = lost(context, &run, [loss, go]);
    assert_all_end(&mut judge, &redis);
    judge.end(&format!("killed at {}/s, back empty after 1 s", run.rate))
}

/// Killed, and back with what it had saved half a second before.
pub(crate) fn f3(context: &Context) -> Judged {
    let redis = Server::start(Flavor::Redis7);
    let stage = Stage::start(context, &Setup::new(&redis.url(), 2));
    let load = stage.load();
    load.goes_on(millis(500));
    assert_eq!(redis.command(&["SAVE"]), Reply::Text("OK".into()));
    load.goes_on(millis(500));
    let loss = load.now();
    redis.restart();
    let go = load.now();
    load.goes_on(millis(2500));
    load.settles();
    let run = stage.end(load);
    let mut judge = lost(context, &run, [loss, go]);
    assert_all_end(&mut judge, &redis);
    judge.end(&format!("killed at {}/s, back with a save of 0.5 s before", run.rate))
}

/// Full, and it throws keys away.
pub(crate) fn f9(context: &Context) -> Judged {
    let redis = Server::builder(Flavor::Redis7).arg("--maxmemory-policy", "volatile-lru").start();
    let stage = Stage::start(context, &Setup::new(&redis.url(), 2));
    let load = stage.load();
    load.goes_on(millis(700));
    let mut client = redis.client().expect("the server listens");
    let junk = "x".repeat(20_000);
    let mut number = 0;
    let from = load.now();
    let evicted = |redis: &Server| -> u64 {
        let info = redis.command(&["INFO", "stats"]).text().to_owned();
        info.lines().find_map(|line| line.strip_prefix("evicted_keys:")?.parse().ok()).unwrap_or(0)
    };
    // Small enough that whatever is written throws something else away, for as long as it takes to
    // lose each key several times.
    redis.command(&["CONFIG", "SET", "maxmemory", "3mb"]);
    wait_until("enough is thrown away", PATIENCE, || {
        for _ in 0..20 {
            number += 1;
            client
                .command(&["SET", &format!("junk:{number}"), &junk, "EX", "1000"])
                .expect("there is a reply");
        }
        evicted(&redis) > 3000 || load.now() > from + millis(1500)
    });
    redis.command(&["CONFIG", "SET", "maxmemory", "0"]);
    let to = load.now();
    load.goes_on(millis(2000));
    load.settles();
    let run = stage.end(load);
    let mut judge = lost(context, &run, [from, to]);
    judge.say(format!("{} evicted", evicted(&redis)));
    judge.end(&format!("evicting at {}/s", run.rate))
}

/// FLUSHALL, twice.
pub(crate) fn f21(context: &Context) -> Judged {
    let redis = Server::start(Flavor::Redis62);
    let stage = Stage::start(context, &Setup::new(&redis.url(), 2));
    let load = stage.load();
    load.goes_on(millis(700));
    let loss = load.now();
    redis.command(&["FLUSHALL"]);
    let go = load.now();
    load.goes_on(millis(1500));
    load.settles();
    let run = stage.end(load);
    let judge = lost(context, &run, [loss, go]);
    judge.end(&format!("FLUSHALL at {}/s", run.rate))
}

/// Another client writes into our keys: nonsense, and things of another type.
pub(crate) fn f22(context: &Context) -> Judged {
    let redis = Server::start(Flavor::Redis7);
    let stage = Stage::start(context, &Setup::new(&redis.url(), 2));
    let load = stage.load();
    load.goes_on(millis(500));
    let names = redis.command(&["KEYS", "tg1:*tight:*"]);
    let names: Vec<&str> = names.array().iter().map(Reply::text).collect();
    assert_eq!(names.len(), 5, "each budget has its key: {names:?}");
    for (number, name) in names.iter().enumerate() {
        if number % 2 == 0 {
            redis.command(&["DEL", name]);
            redis.command(&["LPUSH", name, "1", "2", "3"]);
        } else {
            redis.command(&["SET", name, "abc"]);
        }
    }
    load.goes_on(millis(2000));
    let run = stage.end(load);
    let mut judge = Judge::new(context, &run);
    judge.no_errors();
    judge.latency();
    // What is damaged counts as used up; keys of another type are ignored, and nodes decide
    // locally.
    judge.budgets("tight", context.tight());
    judge.counted("tidegate_store_events_total{event=\"repair\"}", 1.0);
    let plenty = run.record.of("plenty").filter(|answer| !answer.allowed()).count();
    judge.holds(plenty == 0, || format!("{plenty} others were denied"));
    judge.end(&format!("lists and nonsense in our keys at {}/s", run.rate))
}

/// Nodes and server are killed over and over; what is left behind ends by itself.
pub(crate) fn f24(context: &Context) -> Judged {
    let redis = Server::builder(Flavor::Valkey9)
        .arg("--appendonly", "yes")
        .arg("--appendfsync", "everysec")
        .start();
    let many = vec![Class { name: "many", ask: Ask::Limit(budget(1000)), keys: 1000, weight: 1 }];
    let mut stage = Stage::start(context, &Setup::new(&redis.url(), 2)).asks(many);
    for round in 0..3 {
        let load = stage.load();
        load.goes_on(millis(500));
        stage.nodes[round % 2].kill();
        redis.restart();
        load.goes_on(millis(300));
        let _ = load.end();
        stage.nodes[round % 2].start_again();
    }
    let load = stage.load();
    load.goes_on(millis(500));
    let run = stage.end(load);
    let mut judge = Judge::new(context, &run);
    judge.no_errors();
    let keys = redis.command(&["DBSIZE"]).int();
    judge.holds(keys > 100, || format!("only {keys} keys to look at"));
    judge.say(format!("{keys} keys"));
    assert_all_end(&mut judge, &redis);
    judge.say("all of them end");
    judge.end("nodes and server killed three times under load")
}

/// The replica that takes over had not heard of the last writes.
pub(crate) fn f29(context: &Context) -> Judged {
    let primary = Server::start(Flavor::Redis7);
    let port = primary.port().to_string();
    let replica = Server::builder(Flavor::Redis7)
        .arg("--repl-diskless-sync-delay", "0")
        .args("--replicaof", &["127.0.0.1", &port])
        .start();
    let is_up =
        || replica.command(&["INFO", "replication"]).text().contains("master_link_status:up");
    wait_until("the replica follows", PATIENCE, is_up);
    let relay = Relay::start(primary.port());
    let stage = Stage::start(context, &Setup::new(&relay.url(), 2));
    let load = stage.load();
    load.goes_on(millis(500));
    // It loses its primary, and has to follow a server that does not exist: from here on it
    // hears nothing.
    replica.command(&["REPLICAOF", "127.0.0.1", "1"]);
    load.goes_on(millis(600));
    let loss = load.now();
    primary.kill();
    replica.command(&["REPLICAOF", "NO", "ONE"]);
    relay.leads_to(replica.port());
    let go = load.now();
    load.goes_on(millis(2500));
    load.settles();
    let run = stage.end(load);
    let judge = lost(context, &run, [loss, go]);
    judge.end(&format!("a replica 0.6 s behind promoted at {}/s", run.rate))
}
