//! More requests than usual: after a restart, at the turn of a window, in a storm of retries, on
//! one key.

use std::collections::BTreeMap;

use tidegate_testkit::{Flavor, Server};

use super::nodes::{hot, leased};
use super::{Context, millis};
use crate::judge::{Judge, Judged};
use crate::load::{Ask, Class, Source};
use crate::stage::{Setup, Stage};

/// How many connections a server has taken so far, and how busy it has been.
fn numbers(redis: &Server) -> BTreeMap<String, f64> {
    let info = redis.command(&["INFO", "everything"]).text().to_owned();
    let pairs = info.lines().filter_map(|line| line.split_once(':'));
    pairs.filter_map(|(name, value)| Some((name.to_owned(), value.trim().parse().ok()?))).collect()
}

/// The server comes back, and all nodes reconnect.
pub(crate) fn f40(context: &Context) -> Judged {
    const NODES: usize = 12;
    let redis = Server::start(Flavor::Redis7);
    let stage = Stage::start(context, &Setup::new(&redis.url(), NODES)).rate(1200);
    let load = stage.load();
    load.goes_on(millis(1000));
    let busy = |redis: &Server| numbers(redis)["used_cpu_user"] + numbers(redis)["used_cpu_sys"];
    let before = busy(&redis);
    load.goes_on(millis(2000));
    let steady = busy(&redis) - before;
    redis.kill();
    load.goes_on(millis(1500));
    redis.restart();
    let go = load.now();
    let at_once = busy(&redis);
    load.goes_on(millis(2000));
    let after = busy(&redis) - at_once;
    let connections = numbers(&redis)["total_connections_received"];
    load.settles();
    let run = stage.end(load);
    let mut judge = Judge::new(context, &run);
    judge.no_errors();
    judge.latency();
    judge.back(go, millis(1000));
    // The kit asks over connections of its own: a few.
    let most = (NODES * 2 * 2 + 20) as f64;
    judge.say(format!(
        "{connections} connections within 2 s, busy {:.0} % of before",
        100.0 * after / steady.max(0.001)
    ));
    judge.holds(connections <= most, || format!("{connections} connections, at most {most}"));
    judge.holds(!context.strict || after <= steady * 1.2 + 0.05, || {
        format!("busy {after} s after {steady} s before")
    });
    judge.end(&format!("restarted under {NODES} nodes at {}/s", run.rate))
}

/// All clients come back at the moment the window begins.
pub(crate) fn f41(context: &Context) -> Judged {
    const AMOUNT: u64 = 200;
    let redis = Server::start(Flavor::Redis7);
    let mix = vec![Class {
        name: "herd",
        ask: Ask::Limit(format!("{AMOUNT}/2s window")),
        keys: 1,
        weight: 1,
    }];
    let stage = Stage::start(context, &Setup::new(&redis.url(), 2)).asks(mix).rate(200);
    let load = stage.load();
    // Calm, and at every full two seconds a burst.
    for _ in 0..3 {
        let now =
            std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("after 1970");
        let to_next = 2_000_000 - u64::try_from(now.as_micros() % 2_000_000).expect("it is small");
        load.goes_on(std::time::Duration::from_micros(to_next));
        load.set_rate(context.scaled(12_000));
        load.goes_on(millis(300));
        load.set_rate(context.scaled(200));
    }
    load.goes_on(millis(500));
    let run = stage.end(load);
    let mut judge = Judge::new(context, &run);
    judge.no_errors();
    judge.latency();
    // Windows are the store's: none passes more than its amount and what nodes may allow without
    // it.
    let span = run.record.lasted.as_secs() / 2 + 2;
    let passed = judge.passed("herd", 0, |answer| answer.source != Some(Source::Fallback));
    let alone = judge.passed("herd", 0, |answer| answer.source == Some(Source::Fallback));
    judge.say(format!("{passed} passed in {span} windows of {AMOUNT}, {alone} alone"));
    judge.holds(passed <= span * AMOUNT && alone <= span * AMOUNT, || {
        format!("{passed} and {alone} alone passed")
    });
    judge.end(&format!("a herd of {}/s at the turn of the window", context.scaled(12_000)))
}

/// Ten times the load.
pub(crate) fn f42(context: &Context) -> Judged {
    let redis = Server::start(Flavor::Redis7);
    // Nearly every client is denied, and retries immediately.
    let mix = vec![Class { name: "storm", ask: Ask::Limit("100/s".into()), keys: 20, weight: 1 }];
    let stage = Stage::start(context, &Setup::new(&redis.url(), 2)).asks(mix).rate(2500);
    let load = stage.load();
    load.goes_on(millis(1500));
    let from = load.now();
    load.set_rate(context.scaled(25_000));
    load.goes_on(millis(2000));
    let to = load.now();
    load.set_rate(context.scaled(2500));
    load.goes_on(millis(1500));
    let run = stage.end(load);
    let mut judge = Judge::new(context, &run);
    judge.no_errors();
    let good = |from: std::time::Duration, to: std::time::Duration| {
        let within = |answer: &&crate::load::Answer| answer.end() >= from && answer.end() < to;
        let allowed =
            run.record.answers.iter().filter(within).filter(|answer| answer.allowed()).count();
        allowed as f64 / (to - from).as_secs_f64()
    };
    let (calm, storm) = (good(millis(500), from), good(from + millis(200), to));
    judge.say(format!("allowed {calm:.0}/s before and {storm:.0}/s in the storm"));
    judge.figure("goodput_before", calm);
    judge.figure("goodput_storm", storm);
    judge.holds(!context.strict || storm >= 0.9 * calm, || {
        format!("{storm:.0}/s passed, and {calm:.0}/s before")
    });
    // What was there at first, and what came back, for each key: once with the store, once for all
    // nodes alone.
    let most = 100 + 100 * (run.record.lasted.as_secs() + 1);
    for key in 0..20 {
        let there = judge.passed("storm", key, |answer| answer.source != Some(Source::Fallback));
        let alone = judge.passed("storm", key, |answer| answer.source == Some(Source::Fallback));
        judge.holds(there <= most && alone <= most, || {
            format!("{there} and {alone} alone passed, at most {most} each")
        });
    }
    judge.end(&format!("a storm of retries at {}/s", context.scaled(25_000)))
}

/// One key that all clients use.
pub(crate) fn f43(context: &Context) -> Judged {
    let amount = context.scaled(40_000);
    let redis = Server::start(Flavor::Redis7);
    let stage = Stage::start(context, &Setup::new(&redis.url(), 2).rules(&leased(amount)))
        .asks(hot(1))
        .rate(10_000);
    let load = stage.load();
    load.goes_on(millis(1000));
    let calls = |redis: &Server| {
        let stats = redis.command(&["INFO", "commandstats"]).text().to_owned();
        let line = stats.lines().find_map(|line| line.strip_prefix("cmdstat_evalsha:calls="));
        line.and_then(|rest| rest.split(',').next()?.parse::<f64>().ok()).unwrap_or(0.0)
    };
    let (before, from) = (calls(&redis), load.now());
    load.goes_on(millis(2000));
    let (each, to) = ((calls(&redis) - before) / 2.0 / 2.0, load.now());
    // More is requested than there is.
    load.goes_on(millis(2500));
    let run = stage.end(load);
    let mut judge = Judge::new(context, &run);
    judge.no_errors();
    judge.latency();
    let asked = run.record.between(from, to).count();
    judge.say(format!("{each:.0} calls a second and node for {} requests", asked / 4));
    judge.figure("calls_per_second_and_node", each);
    judge.holds(!context.strict || each <= 50.0, || {
        format!("{each} calls a second and node, at most 50")
    });
    judge.budgets("hot", amount);
    judge.end(&format!("one key at {}/s", run.rate))
}
