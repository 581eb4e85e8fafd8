//! Sentinel and Cluster: masters that die, change places, and slots that move.

use std::collections::BTreeMap;
use std::time::Duration;

use tidegate_testkit::{Cluster, Flavor, Reply, Sentinels, Server, wait_until};

use super::{Context, millis};
use crate::inject::move_slot;
use crate::judge::{Judge, Judged};
use crate::load::{Ask, Class, Source};
use crate::stage::{PATIENCE, Setup, Stage, TIGHT_KEYS, budget, left};

/// The master dies, and Sentinel makes the replica the next one.
pub(crate) fn f26(context: &Context) -> Judged {
    let sentinels = Sentinels::start(Flavor::Redis7);
    let stage = Stage::start(context, &Setup::new(&sentinels.url(), 2));
    let load = stage.load();
    load.goes_on(millis(700));
    let dead = load.now();
    sentinels.kill_master();
    sentinels.wait_for_failover();
    let go = load.now();
    load.goes_on(millis(3000));
    load.settles();
    let run = stage.end(load);
    let mut judge = Judge::new(context, &run);
    judge.no_errors();
    judge.latency();
    judge.say(format!("elected after {:.1} s", (go - dead).as_secs_f64()));
    judge.open_after(dead, go, millis(100));
    judge.back(go, millis(1000));
    judge.lost("tight", context.tight(), dead, go);
    judge.end(&format!("the master under Sentinel killed at {}/s", run.rate))
}

/// A replica is never called, not even when there is no other server.
pub(crate) fn f13(context: &Context) -> Judged {
    let sentinels = Sentinels::start(Flavor::Redis7);
    let replica = sentinels.replica();
    replica.command(&["CONFIG", "SET", "replica-serve-stale-data", "no"]);
    replica.command(&["CONFIG", "RESETSTAT"]);
    let stage = Stage::start(context, &Setup::new(&sentinels.url(), 2)).rate(1000);
    // The master is unresponsive for less than Sentinel needs to replace it.
    let master = sentinels.master();
    let scene = stage.play([700, 500, 1500], || master.stop_signal(), || master.continue_signal());
    let mut judge = Judge::new(context, &scene.run);
    judge.no_errors();
    judge.latency();
    let stats = replica.command(&["INFO", "commandstats"]).text().to_owned();
    let was_master = replica.command(&["ROLE"]).array()[0] == Reply::Text("master".into());
    judge.holds(was_master || !stats.contains("evalsha"), || {
        format!("a replica was called: {stats}")
    });
    judge.say(if was_master {
        "the replica was promoted meanwhile"
    } else {
        "the replica was never asked"
    });
    judge.budgets("tight", context.tight());
    judge.end(&format!("a master silent for 0.5 s beside its replica at {}/s", scene.run.rate))
}

/// On which master the budgets of the usual load are, by their keys' number.
fn owners(cluster: &Cluster, store: &str, context: &Context) -> BTreeMap<u16, (u16, u16)> {
    let names: Vec<String> = (0..TIGHT_KEYS).map(|key| format!("tight:{key}")).collect();
    // Whatever was taken once can be found.
    for name in &names {
        crate::stage::take(store, name, context.tight());
    }
    let mut owners = BTreeMap::new();
    for node in cluster.nodes() {
        let Reply::Array(keys) = node.command(&["KEYS", "tg1:*"]) else { continue };
        for key in
            keys.iter().filter_map(|key| if let Reply::Text(key) = key { Some(key) } else { None })
        {
            if let Some(number) = names.iter().position(|name| key.ends_with(&format!(":{name}"))) {
                let slot = cluster.slot_of(key);
                let number = u16::try_from(number).expect("few keys");
                owners.insert(number, (slot, cluster.master_of(slot).port()));
            }
        }
    }
    assert_eq!(owners.len(), names.len(), "every budget is somewhere");
    owners
}

/// Nodes before a cluster, with only budgets to ask about, enough for the whole row.
fn few(context: &Context) -> Vec<Class> {
    vec![Class {
        name: "tight",
        ask: Ask::Limit(budget(context.tight())),
        keys: TIGHT_KEYS,
        weight: 1,
    }]
}

/// Budgets that outlast the row, so that losses can be counted in the store.
const PLENTY: u64 = 10_000_000;

fn plenty() -> Vec<Class> {
    vec![Class { name: "tight", ask: Ask::Limit(budget(PLENTY)), keys: 60, weight: 1 }]
}

/// A master dies, and the cluster elects its replica. Other slots do not notice.
pub(crate) fn f27(context: &Context) -> Judged {
    let cluster = Cluster::start(Flavor::Valkey9);
    for node in cluster.nodes() {
        node.command(&["CONFIG", "SET", "cluster-require-full-coverage", "no"]);
    }
    let owners = owners(&cluster, &cluster.url(), context);
    let (slot, dying) = owners[&0];
    let stage = Stage::start(context, &Setup::new(&cluster.url(), 2)).asks(few(context)).rate(500);
    let load = stage.load();
    load.goes_on(millis(500));
    let dead = load.now();
    cluster.kill_master_of(slot);
    cluster.wait_for_failover(slot);
    let go = load.now();
    load.goes_on(millis(3000));
    load.settles();
    let run = stage.end(load);
    let mut judge = Judge::new(context, &run);
    judge.no_errors();
    judge.latency();
    judge.say(format!("elected after {:.1} s", (go - dead).as_secs_f64()));
    let elsewhere: Vec<_> =
        run.record.between(dead, go).filter(|a| owners[&a.key].1 != dying).collect();
    let alone = elsewhere.iter().filter(|answer| answer.source == Some(Source::Fallback)).count();
    judge.say(format!("other slots {alone} of {} alone", elsewhere.len()));
    judge.holds(!context.strict || alone * 50 <= elsewhere.len(), || {
        format!("other slots: {alone} of {} alone", elsewhere.len())
    });
    judge.back(go, millis(1000));
    judge.lost("tight", context.tight(), dead, go);
    judge.end(&format!("a master of a cluster killed at {}/s", run.rate))
}

/// Master and replica change places in agreement.
pub(crate) fn f28(context: &Context) -> Judged {
    let cluster = Cluster::patient(Flavor::Redis7, Duration::from_secs(5));
    let stage = Stage::start(context, &Setup::new(&cluster.url(), 2)).asks(plenty()).rate(500);
    let load = stage.load();
    load.goes_on(millis(500));
    let from = load.now();
    for slot in [100, 8000, 16_000] {
        cluster.failover(slot);
    }
    let go = load.now();
    load.goes_on(millis(1000));
    load.settles();
    let run = stage.end(load);
    let mut judge = Judge::new(context, &run);
    judge.no_errors();
    judge.latency();
    judge.alone("meanwhile", from, go);
    judge.back(go, millis(500));
    judge.charged_once("tight", PLENTY, |key| left(&cluster.url(), key, PLENTY));
    judge.at_most("tidegate_store_events_total{event=\"regression\"}", 0.0);
    judge.end(&format!("three masters change places with their replicas at {}/s", run.rate))
}

/// Slots without a server.
pub(crate) fn f15(context: &Context) -> Judged {
    let cluster = Cluster::start(Flavor::Redis7);
    for node in cluster.nodes() {
        node.command(&["CONFIG", "SET", "cluster-require-full-coverage", "no"]);
    }
    let owners = owners(&cluster, &cluster.url(), context);
    let (slot, lost) = owners[&0];
    let stage = Stage::start(context, &Setup::new(&cluster.url(), 2)).asks(few(context)).rate(500);
    let scene = stage.play(
        [500, 5000, 4000],
        || {
            // The replica first, so that no other server takes over.
            [cluster.replica_of(slot), cluster.master_of(slot)]
                .into_iter()
                .for_each(Server::stop_signal);
        },
        || cluster.nodes().iter().filter(|node| !node.is_awake()).for_each(Server::continue_signal),
    );
    let mut judge = Judge::new(context, &scene.run);
    judge.no_errors();
    judge.latency();
    let part = |lost_ones: bool| {
        let answers = scene.run.record.between(scene.from + millis(500), scene.go);
        let answers: Vec<_> = answers.filter(|a| (owners[&a.key].1 == lost) == lost_ones).collect();
        let alone = answers.iter().filter(|answer| answer.source == Some(Source::Fallback)).count();
        (alone, answers.len())
    };
    let ((lost_alone, lost_all), (alone, all)) = (part(true), part(false));
    judge.say(format!("lost slots {lost_alone} of {lost_all} alone, others {alone} of {all}"));
    judge.holds(lost_alone > 0, || "a server decided about the lost slots".into());
    judge.holds(!context.strict || alone * 50 <= all, || {
        format!("other slots: {alone} of {all} alone")
    });
    judge.budgets("tight", context.tight());
    judge.end(&format!("a master and its replica stopped at {}/s", scene.run.rate))
}

/// Slots move under load.
pub(crate) fn f16(context: &Context) -> Judged {
    let cluster = Cluster::patient(Flavor::Redis8, Duration::from_secs(5));
    let stage = Stage::start(context, &Setup::new(&cluster.url(), 2)).asks(plenty()).rate(500);
    let load = stage.load();
    load.goes_on(millis(700));
    let from = load.now();
    let mut slots: Vec<u16> = Vec::new();
    for node in cluster.nodes() {
        if let Reply::Array(keys) = node.command(&["KEYS", "tg1:*tight:*"]) {
            slots.extend(keys.iter().filter_map(|key| {
                if let Reply::Text(key) = key { Some(cluster.slot_of(key)) } else { None }
            }));
        }
    }
    slots.sort_unstable();
    slots.dedup();
    for slot in &slots {
        let owner = cluster.master_of(*slot);
        let next = cluster.nodes().iter().find(|node| {
            node.port() != owner.port()
                && node.command(&["ROLE"]).array()[0] == Reply::Text("master".into())
        });
        move_slot(&cluster, *slot, owner, next.expect("there are three masters"), || ());
    }
    let go = load.now();
    load.goes_on(millis(1500));
    load.settles();
    let run = stage.end(load);
    let mut judge = Judge::new(context, &run);
    judge.no_errors();
    judge.latency();
    judge.say(format!("{} slots moved in {:.1} s", slots.len(), (go - from).as_secs_f64()));
    judge.alone("meanwhile", from, go);
    judge.back(go, millis(500));
    judge.charged_once("tight", PLENTY, |key| left(&cluster.url(), key, PLENTY));
    judge.counted("tidegate_store_events_total{event=\"redirect\"}", 1.0);
    judge.at_most("tidegate_store_events_total{event=\"regression\"}", 0.0);
    judge.end(&format!("every slot in use moved at {}/s", run.rate))
}

/// Slots that are half here and half there.
pub(crate) fn f17(context: &Context) -> Judged {
    let cluster = Cluster::patient(Flavor::Redis7, Duration::from_secs(5));
    let stage = Stage::start(context, &Setup::new(&cluster.url(), 2)).asks(plenty()).rate(500);
    let load = stage.load();
    load.goes_on(millis(700));
    let from = load.now();
    let found =
        cluster.nodes().iter().find_map(|node| match node.command(&["KEYS", "tg1:*tight:*"]) {
            Reply::Array(keys) => keys.first().map(|key| cluster.slot_of(key.text())),
            _ => None,
        });
    let slot = found.expect("a budget is somewhere");
    let owner = cluster.master_of(slot);
    let next = cluster.nodes()[..3]
        .iter()
        .find(|node| node.port() != owner.port())
        .expect("three masters");
    move_slot(&cluster, slot, owner, next, || load.goes_on(millis(1500)));
    let go = load.now();
    load.goes_on(millis(1000));
    let run = stage.end(load);
    let mut judge = Judge::new(context, &run);
    judge.no_errors();
    judge.latency();
    judge.alone("meanwhile", from, go);
    judge.charged_once("tight", PLENTY, |key| left(&cluster.url(), key, PLENTY));
    judge.counted("tidegate_store_events_total{event=\"redirect\"}", 1.0);
    judge.at_most("tidegate_store_events_total{event=\"regression\"}", 0.0);
    judge.end(&format!("a slot on its way for 1.5 s at {}/s", run.rate))
}

/// Rules over two slots, one of which is down.
pub(crate) fn f44(context: &Context) -> Judged {
    let cluster = Cluster::start(Flavor::Redis7);
    for node in cluster.nodes() {
        node.command(&["CONFIG", "SET", "cluster-require-full-coverage", "no"]);
    }
    let rules = format!(
        "rules:\n  - {{ name: each, by: [user], limit: {limit} }}\n  - {{ name: all, limit: {limit} }}\n",
        limit = budget(PLENTY)
    );
    let mix = vec![Class { name: "both", ask: Ask::Kind("any"), keys: 40, weight: 1 }];
    let stage =
        Stage::start(context, &Setup::new(&cluster.url(), 2).rules(&rules)).asks(mix).rate(400);
    let used = |rule: &str, user: &str| -> u64 {
        let body = format!(r#"{{"attributes":{{"user":"{user}"}}}}"#);
        let mut found = 0;
        wait_until("the store says what is left", PATIENCE, || {
            let answer = stage.nodes[0].http().post("/v1/peek", &body);
            let Ok((_, text)) = answer else { return false };
            let value: serde_json::Value = serde_json::from_str(&text).unwrap_or_default();
            let charges = value["charges"].as_array().cloned().unwrap_or_default();
            let own = charges
                .iter()
                .find(|charge| charge["rule"] == rule)
                .and_then(|own| own["remaining"].as_u64());
            found = PLENTY - own.unwrap_or(PLENTY);
            value["source"] == "store"
        });
        found
    };
    let load = stage.load();
    load.goes_on(millis(700));
    let from = load.now();
    // A slot of a user that is not that of the rule for all.
    let all = key_of(&cluster, "r0:3:all:").expect("the rule for all is somewhere");
    let owner = cluster.master_of(cluster.slot_of(&all)).port();
    let other = cluster.nodes().iter().find(|node| {
        node.port() != owner && node.command(&["ROLE"]).array()[0] == Reply::Text("master".into())
    });
    let other = other.expect("there are three masters");
    other.stop_signal();
    load.goes_on(millis(1200));
    let go = load.now();
    other.continue_signal();
    load.goes_on(millis(2500));
    let run = stage.end(load);
    let mut judge = Judge::new(context, &run);
    judge.no_errors();
    judge.latency();
    judge.alone("meanwhile", from, go);
    cluster.wait_until_ok();
    // Of what was decided alone the budget for all may have been charged and given back; what never
    // was given back is at most what was on its way when a call had no answer.
    let charged = used("all", "both:0");
    let by_store = run
        .record
        .answers
        .iter()
        .filter(|a| a.allowed() && a.source == Some(Source::Store))
        .count() as u64;
    let alone =
        run.record.answers.iter().filter(|answer| answer.source == Some(Source::Fallback)).count()
            as u64;
    let leaked = charged.saturating_sub(by_store);
    judge.say(format!(
        "{charged} charged to all, {by_store} passed by the store, {leaked} of {alone} leaked"
    ));
    judge.holds((by_store..=by_store + alone).contains(&charged), || {
        format!("{charged} are charged to all")
    });
    let most = (alone / 5).max(20);
    judge.holds(!context.strict || leaked <= most, || {
        format!("{leaked} were never given back, at most {most}")
    });
    judge.end(&format!("one of two slots down for 1.2 s at {}/s", run.rate))
}

/// The key whose name has this in it.
fn key_of(cluster: &Cluster, part: &str) -> Option<String> {
    cluster.nodes().iter().find_map(|node| match node.command(&["KEYS", "tg1:*"]) {
        Reply::Array(keys) => keys
            .iter()
            .find_map(|key| {
                if let Reply::Text(key) = key { Some(key) } else { None }
                    .filter(|k| k.contains(part))
            })
            .cloned(),
        _ => None,
    })
}
