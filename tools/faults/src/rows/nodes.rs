//! Nodes that die, stop, are paused, come late or disagree.

use std::time::Instant;

use rustix::process::Signal;
use tidegate_testkit::{Flavor, Server, wait_until};

use super::{Context, millis};
use crate::judge::{Judge, Judged, ms};
use crate::load::{Ask, Class, Outcome, Source};
use crate::stage::{Metrics, Node, PATIENCE, Setup, Stage, budget};

/// Rules for keys of which units are taken ahead, and one for all of them together.
pub(super) fn leased(amount: u64) -> String {
    format!(
        "rules:\n  - {{ name: hot, when: {{ kind: hot }}, by: [user], limit: {}, sync: lease }}\n",
        budget(amount)
    )
}

pub(super) fn hot(keys: u16) -> Vec<Class> {
    vec![Class { name: "hot", ask: Ask::Kind("hot"), keys, weight: 1 }]
}

/// What is left of a key of the rule for hot keys, as the store says.
fn left_of_hot(node: &Node, user: &str) -> u64 {
    left_of(node, &format!(r#"{{"attributes":{{"kind":"hot","user":"{user}"}}}}"#))
}

/// What is left, as a node hears from the store.
fn left_of(node: &Node, body: &str) -> u64 {
    let mut left = 0;
    wait_until("the store says what is left", PATIENCE, || {
        let Ok((_, text)) = node.http().post("/v1/peek", body) else { return false };
        let value: serde_json::Value = serde_json::from_str(&text).unwrap_or_default();
        left = value["remaining"].as_u64().unwrap_or(0);
        value["source"] == "store"
    });
    left
}

/// A node that held units dies: they are lost, and nothing passes twice.
pub(crate) fn f46(context: &Context) -> Judged {
    let amount = context.scaled(8000);
    let redis = Server::start(Flavor::Redis7);
    let mut stage =
        Stage::start(context, &Setup::new(&redis.url(), 2).rules(&leased(amount))).asks(hot(1));
    let load = stage.load();
    load.goes_on(millis(1000));
    stage.nodes[0].kill();
    load.goes_on(millis(4000));
    let run = stage.end(load);
    let mut judge = Judge::new(context, &run);
    let here = run.record.answers.iter().filter(|a| a.node == 1 && !a.outcome.is_answer()).count();
    judge.holds(here == 0, || format!("{here} requests to the other node had no answer"));
    // On a busy machine a call may miss its deadline, and then a node has its share of the limit
    // besides.
    let passed = judge.passed("hot", 0, |answer| answer.source != Some(Source::Fallback));
    let fallback = judge.passed("hot", 0, |answer| answer.source == Some(Source::Fallback));
    let lost = amount.saturating_sub(passed);
    // A hundredth of the amount over all nodes is taken ahead, and requests without an answer may
    // have been charged.
    let broken = judge.failures(|outcome| outcome == Outcome::Broken) as u64;
    judge.say(format!(
        "{passed} of {amount} passed, {fallback} alone, {broken} had no answer from the dead"
    ));
    judge.holds(passed <= amount && fallback <= amount, || {
        format!("{passed} and {fallback} alone passed, at most {amount} each")
    });
    judge.holds(fallback > 0 || lost <= amount / 100 + broken + 2, || format!("{lost} are lost"));
    judge.end(&format!("a node with leases killed at {}/s", run.rate))
}

/// A node that held units gets SIGTERM: it gives them back.
pub(crate) fn f47(context: &Context) -> Judged {
    const AMOUNT: u64 = 10_000_000;
    let redis = Server::start(Flavor::Redis7);
    let mut stage =
        Stage::start(context, &Setup::new(&redis.url(), 2).rules(&leased(AMOUNT))).asks(hot(3));
    let load = stage.load();
    load.goes_on(millis(1500));
    let began = Instant::now();
    stage.nodes[0].signal(Signal::TERM);
    let status = stage.nodes[0].ends(PATIENCE);
    let took = began.elapsed();
    load.goes_on(millis(500));
    let run = stage.end(load);
    let mut judge = Judge::new(context, &run);
    judge.holds(status.success(), || format!("the node says that something was cut off: {status}"));
    judge.say(format!("ended after {}", ms(took)));
    judge.time("the node ended after", took, millis(1000));
    // Requests on a connection that was being closed were not accepted; each that was accepted
    // has an answer.
    let bad = judge.failures(|outcome| matches!(outcome, Outcome::Error(_) | Outcome::Silent));
    judge.holds(bad == 0, || format!("{bad} requests were answered by an error"));
    let broken = judge.failures(|outcome| outcome == Outcome::Broken) as u64;
    for key in 0..3 {
        let passed = judge.passed("hot", key, |answer| answer.source != Some(Source::Fallback));
        let alone = judge.passed("hot", key, |answer| answer.source == Some(Source::Fallback));
        let mut charged = 0;
        // The other node gives back what it does not use.
        wait_until("what is not spent is given back", PATIENCE, || {
            charged = AMOUNT - left_of_hot(&stage.nodes[1], &format!("hot:{key}"));
            charged <= passed + alone + broken
        });
        judge.holds(charged >= passed, || format!("{charged} are charged, and {passed} passed"));
    }
    judge.say(format!("everything given back, {broken} on closing connections"));
    judge.end(&format!("a node with leases told to stop at {}/s", run.rate))
}

/// A node is paused while it holds units, and they are over when it goes on.
pub(crate) fn f48(context: &Context) -> Judged {
    let amount = context.scaled(8000);
    let redis = Server::start(Flavor::Redis7);
    let stage = Stage::start(context, &Setup::new(&redis.url(), 2).rules(&leased(amount)))
        .asks(hot(1))
        .rate(2000);
    let load = stage.load();
    load.goes_on(millis(1000));
    stage.nodes[0].signal(Signal::STOP);
    // The other uses up what is left.
    load.goes_on(millis(3500));
    stage.nodes[0].signal(Signal::CONT);
    load.goes_on(millis(2500));
    let run = stage.end(load);
    let mut judge = Judge::new(context, &run);
    // Clients of the paused node waited for it; no others did.
    let others =
        run.record.answers.iter().filter(|a| a.node == 1 && !a.outcome.is_answer()).count();
    judge.holds(others == 0, || format!("{others} requests to the other node had no answer"));
    let passed = judge.passed("hot", 0, |answer| answer.source != Some(Source::Fallback));
    judge.say(format!("{passed} of {amount} passed with the store"));
    judge.holds(passed <= amount, || format!("{passed} passed of {amount}"));
    judge.budgets("hot", amount);
    let expired = run.metrics.get("tidegate_lease_units_total{fate=\"expired\"}");
    judge.say(format!("{expired} units were over"));
    let held = ["granted", "spent", "returned", "expired"]
        .map(|fate| run.metrics.get(&format!("tidegate_lease_units_total{{fate=\"{fate}\"}}")));
    let kept = run.metrics.get("tidegate_lease_units_held");
    judge.holds((held[0] - held[1] - held[2] - held[3] - kept).abs() < 0.5, || {
        format!("units got lost: {held:?}, {kept}")
    });
    judge.end(&format!("a node with leases paused for 3.5 s at {}/s", run.rate))
}

/// Nodes that start during an outage and have never reached the store assume that they are alone.
pub(crate) fn f59(context: &Context) -> Judged {
    let amount = 600;
    let redis = Server::start(Flavor::Redis7);
    let setup = Setup::new(&redis.url(), 2).counted();
    let mix = vec![Class { name: "tight", ask: Ask::Limit(budget(amount)), keys: 1, weight: 1 }];
    let mut stage = Stage::start(context, &setup).asks(mix).rate(1000);
    for node in &stage.nodes {
        node.is_warm();
    }
    wait_until("the nodes have counted each other", PATIENCE, || {
        stage.nodes.iter().all(|node| {
            node.metrics().is_some_and(|metrics| (metrics.get("tidegate_nodes") - 2.0).abs() < 0.1)
        })
    });
    redis.stop_signal();
    wait_until("it is known to be unavailable", PATIENCE, || {
        stage.nodes.iter().all(|node| {
            let _ = node.http().post("/v1/check", r#"{"key":"x","limit":"1000000/s"}"#);
            node.metrics().is_some_and(|metrics| metrics.get("tidegate_breaker_open") > 0.5)
        })
    });
    // Two more that have never heard of another node.
    for _ in 0..2 {
        stage.nodes.push(Node::start(&setup.config(0)));
    }
    let load = stage.load_cold();
    load.goes_on(millis(4000));
    let run = stage.end(load);
    redis.continue_signal();
    let mut judge = Judge::new(context, &run);
    judge.no_errors();
    judge.latency();
    // Half of it each for the two that have counted each other, all of it for each that never heard
    // of others.
    for (node, most) in [(0, amount / 2), (1, amount / 2), (2, amount), (3, amount)] {
        let passed = judge.passed("tight", 0, |answer| answer.node == node);
        judge.say(format!("{passed} ≤ {most}"));
        judge.holds(passed <= most, || format!("node {node} allowed {passed}, at most {most}"));
    }
    judge.end(&format!("two of four nodes start while the store is unavailable, at {}/s", run.rate))
}

/// Nodes of the release before beside nodes of this one: every state is read and written by both.
pub(crate) fn f63(context: &Context) -> Judged {
    const NODES: usize = 4;
    // Budgets that do not come back, of every algorithm that can have one; each is used up while
    // the row runs.
    const KINDS: [(&str, &str); 5] = [
        ("bucket", "{}/1000d"),
        ("window", "{}/1000d window"),
        ("sliding", "{}/1000d sliding"),
        ("estimate", "{}/1000d estimate"),
        ("log", "{}/1000d log"),
    ];
    let (amount, leased_amount) = (context.scaled(400), context.scaled(2000));
    let redis = Server::start(Flavor::Redis7);
    let setup =
        Setup::new(&redis.url(), NODES).rules(&leased(leased_amount)).previous(NODES / 2).counted();
    let limit = |text: &str| text.replace("{}", &amount.to_string());
    let kind = |(name, text): (&'static str, &str)| Class {
        name,
        ask: Ask::Limit(limit(text)),
        keys: 2,
        weight: 3,
    };
    let mix = KINDS.into_iter().map(kind).chain(hot(1)).collect();
    let stage = Stage::start(context, &setup).asks(mix).rate(2000);
    wait_until("the nodes have counted each other", PATIENCE, || {
        let all = |metrics: Metrics| (metrics.get("tidegate_nodes") - NODES as f64).abs() < 0.1;
        stage.nodes.iter().all(|node| node.metrics().is_some_and(all))
    });
    let load = stage.load();
    load.goes_on(millis(5000));
    load.settles();
    let run = stage.end(load);
    let mut judge = Judge::new(context, &run);
    judge.no_errors();
    for (name, text) in KINDS {
        judge.budgets(name, amount);
        // Every node reports the same, and it is what was allowed.
        judge.charged_once(name, amount, |key| {
            let body = format!(r#"{{"key":"{key}","limit":"{}"}}"#, limit(text));
            let said: Vec<u64> = stage.nodes.iter().map(|node| left_of(node, &body)).collect();
            assert!(
                said.iter().all(|left| *left == said[0]),
                "{key}: the nodes say that {said:?} are left"
            );
            said[0]
        });
    }
    judge.budgets("hot", leased_amount);
    let old = run
        .record
        .answers
        .iter()
        .filter(|a| usize::from(a.node) < NODES / 2 && a.allowed())
        .count();
    let new = run
        .record
        .answers
        .iter()
        .filter(|a| usize::from(a.node) >= NODES / 2 && a.allowed())
        .count();
    judge.say(format!("{old} allowed by the release before, {new} by this one"));
    judge.holds(old > 0 && new > 0, || "one of the releases allowed nothing".into());
    judge.end(&format!("two nodes of each of two releases at {}/s", run.rate))
}

/// A node in a crash loop, beside one that is well.
pub(crate) fn f65(context: &Context) -> Judged {
    let redis = Server::start(Flavor::Redis7);
    let stage = Stage::start(context, &Setup::new(&redis.url(), 2));
    let config = Setup::new(&redis.url(), 2).config(0);
    let load = stage.load();
    load.goes_on(millis(500));
    let commands = |redis: &Server| {
        // Not the kit's own questions, and not those of the nodes under load.
        let stats = redis.command(&["INFO", "commandstats"]).text().to_owned();
        let count = |name: &str| {
            let line =
                stats.lines().find_map(|line| line.strip_prefix(&format!("cmdstat_{name}:calls=")));
            line.and_then(|rest| rest.split(',').next()?.parse::<f64>().ok()).unwrap_or(0.0)
        };
        count("hello")
            + count("auth")
            + count("select")
            + count("client|setname")
            + count("script|load")
    };
    let before = commands(&redis);
    let mut restarts = 0;
    let end = Instant::now() + millis(3000);
    let mut passed_there = 0;
    while Instant::now() < end {
        let mut node = Node::start(&config);
        restarts += 1;
        let mut http = node.http();
        for _ in 0..20 {
            let body = format!(r#"{{"key":"tight:0","limit":"{}"}}"#, budget(context.tight()));
            let answer = http.post("/v1/check", &body);
            passed_there += u64::from(
                answer.is_ok_and(|(status, body)| status == 200 && !body.contains("fallback")),
            );
        }
        node.kill();
    }
    let each = (commands(&redis) - before) / f64::from(restarts);
    let run = stage.end(load);
    let mut judge = Judge::new(context, &run);
    judge.no_errors();
    judge.latency();
    let passed =
        judge.passed("tight", 0, |answer| answer.source != Some(Source::Fallback)) + passed_there;
    judge.say(format!(
        "{restarts} restarts, {each:.1} commands each, {passed} ≤ {} passed",
        context.tight()
    ));
    judge.holds(passed <= context.tight(), || format!("{passed} passed of {}", context.tight()));
    judge.holds(each <= 3.0, || format!("{each} commands to start, at most 3"));
    judge.end(&format!("a third node crashes over and over at {}/s", run.rate))
}

/// Two nodes with different files, as while a new one is being rolled out.
pub(crate) fn f58(context: &Context) -> Judged {
    let (small, large) = (context.tight(), 2 * context.tight());
    let rules = |amount: u64| {
        format!(
            "rules:\n  - {{ name: each, when: {{ kind: roll }}, by: [user], limit: {} }}\n",
            budget(amount)
        )
    };
    let redis = Server::start(Flavor::Redis7);
    let mix = vec![Class { name: "roll", ask: Ask::Kind("roll"), keys: 5, weight: 1 }];
    let mut stage = Stage::start(context, &Setup::new(&redis.url(), 1).rules(&rules(small)))
        .asks(mix)
        .rate(800);
    stage.nodes.push(Node::start(&Setup::new(&redis.url(), 1).rules(&rules(large)).config(0)));
    let load = stage.load();
    load.goes_on(millis(6000));
    let run = stage.end(load);
    let mut judge = Judge::new(context, &run);
    judge.no_errors();
    judge.latency();
    for key in 0..5 {
        let passed = judge.passed("roll", key, |answer| answer.source != Some(Source::Fallback));
        judge.holds(passed <= large, || format!("roll:{key}: {passed} passed, at most {large}"));
    }
    judge.admitted("roll", large + small + large);
    judge.at_most("tidegate_store_events_total{event=\"regression\"}", 0.0);
    judge.end(&format!("limits of {small} and {large} side by side at {}/s", run.rate))
}

/// A master of a cluster is not needed to see that nothing is left behind: nodes die between taking
/// from one slot and another.
pub(crate) fn f45(context: &Context) -> Judged {
    const AMOUNT: u64 = 10_000_000;
    let cluster = tidegate_testkit::Cluster::patient(Flavor::Valkey9, millis(5000));
    let rules = format!(
        "rules:\n  - {{ name: each, by: [user], limit: {limit} }}\n  - {{ name: all, limit: {limit} }}\n",
        limit = budget(AMOUNT)
    );
    let mix = vec![Class { name: "both", ask: Ask::Kind("any"), keys: 40, weight: 1 }];
    let mut stage =
        Stage::start(context, &Setup::new(&cluster.url(), 2).rules(&rules)).asks(mix).rate(600);
    let (mut by_store, mut unknown) = (0_u64, 0_u64);
    for round in 0..4 {
        let load = stage.load();
        load.goes_on(millis(500));
        stage.nodes[round % 2].kill();
        load.goes_on(millis(100));
        let record = load.end();
        by_store += record
            .answers
            .iter()
            .filter(|a| a.allowed() && a.source == Some(Source::Store))
            .count() as u64;
        let no_answer = |a: &&crate::load::Answer| {
            a.source != Some(Source::Store) && a.outcome != Outcome::Refused
        };
        unknown += record.answers.iter().filter(no_answer).count() as u64;
        stage.nodes[round % 2].start_again();
    }
    let load = stage.load();
    load.goes_on(millis(300));
    let run = stage.end(load);
    by_store += run
        .record
        .answers
        .iter()
        .filter(|a| a.allowed() && a.source == Some(Source::Store))
        .count() as u64;
    unknown += run.record.answers.iter().filter(|a| a.source != Some(Source::Store)).count() as u64;
    let mut judge = Judge::new(context, &run);
    judge.no_errors();
    let mut charged = 0;
    wait_until("the store says what is left", PATIENCE, || {
        let answer = stage.nodes[0].http().post("/v1/peek", r#"{"attributes":{"user":"none"}}"#);
        let Ok((_, text)) = answer else { return false };
        let value: serde_json::Value = serde_json::from_str(&text).unwrap_or_default();
        let own = value["charges"]
            .as_array()
            .and_then(|all| all.iter().find(|own| own["rule"] == "all").cloned());
        charged = AMOUNT - own.and_then(|own| own["remaining"].as_u64()).unwrap_or(AMOUNT);
        value["source"] == "store"
    });
    // The warm-up asks without attributes of these rules: it is not among them.
    judge.say(format!("{by_store} passed, {charged} charged, {unknown} unknown"));
    judge.holds(charged >= by_store, || format!("{charged} are charged, and {by_store} passed"));
    judge.holds(charged <= by_store + unknown, || {
        format!("{charged} are charged, {by_store} passed, {unknown} unknown")
    });
    let keys = cluster.keys_without_ttl("tg1:");
    judge.holds(keys.is_empty(), || format!("keys without an end: {keys:?}"));
    judge.end(&format!("nodes killed in the middle of checks over two slots at {}/s", run.rate))
}
