//! The line between nodes and store.

use std::process::Command;
use std::time::Duration;

use tidegate_testkit::{Fault, FaultProxy, Flavor, Server};

use super::{Context, millis};
use crate::inject::{firewall, open_wall};
use crate::judge::{Judge, Judged};
use crate::load::Source;
use crate::stage::{Relay, Run, Scene, Setup, Stage, TIGHT_KEYS, left};

/// What holds whatever the line does, as long as the server itself is well: the budgets, and
/// nothing charged twice.
fn line<'a>(context: &'a Context, run: &'a Run, redis: &Server) -> Judge<'a> {
    let mut judge = Judge::new(context, run);
    judge.no_errors();
    judge.latency();
    judge.budgets("tight", context.tight());
    judge.charged_once("tight", context.tight(), |key| left(&redis.url(), key, context.tight()));
    judge
}

/// A proxy that does this to everything, or to so many of a hundred.
fn by_proxy(
    context: &Context,
    rate: u64,
    percent: u8,
    fault: Fault,
    back: Duration,
    what: &str,
) -> Judged {
    let redis = Server::start(Flavor::Redis7);
    let proxy = FaultProxy::with_seed(&redis, context.seed);
    let stage = Stage::start(context, &Setup::new(proxy.url(), 2)).rate(rate);
    let scene = stage.play(
        [700, 2500, 1500],
        || if percent == 100 { proxy.set(fault) } else { proxy.sometimes(percent, fault) },
        || proxy.set(Fault::Pass),
    );
    let mut judge = line(context, &scene.run, &redis);
    judge.alone("meanwhile", scene.from, scene.go);
    judge.back(scene.go, back);
    let counts = proxy.counts();
    judge.say(format!("{} pieces hit, {} connections", counts.faults, counts.connections));
    judge.holds(counts.faults > 0, || "nothing was hit".into());
    judge.end(&format!("{what} at {}/s", scene.run.rate))
}

/// Requests arrive, answers are lost, connections stay open.
pub(crate) fn f32(context: &Context) -> Judged {
    by_proxy(context, 4000, 100, Fault::SwallowReplies, millis(1000), "answers lost for 2.5 s")
}

/// Cut after the request, before the answer.
pub(crate) fn f33(context: &Context) -> Judged {
    by_proxy(
        context,
        1000,
        2,
        Fault::CutAfterRequest,
        millis(500),
        "one connection in 50 cut before the answer",
    )
}

/// Answers come in crumbs.
pub(crate) fn f35(context: &Context) -> Judged {
    let fault = Fault::Drip { bytes: 1, pause: millis(10) };
    by_proxy(context, 1000, 100, fault, millis(1500), "answers of 100 bytes a second")
}

/// Nonsense instead of answers.
pub(crate) fn f36(context: &Context) -> Judged {
    by_proxy(context, 1000, 20, Fault::Garbage, millis(1000), "one answer in five is nonsense")
}

/// A server in a network of its own, where packets can be thrown away.
fn by_wall(
    context: &Context,
    nodes: usize,
    rules: impl FnOnce(u16) -> Vec<String>,
    what: &str,
) -> (Scene, Server, String) {
    let redis = Server::start(Flavor::Redis7);
    let stage = Stage::start(context, &Setup::new(&redis.url(), nodes)).rate(2000);
    let rules = rules(redis.port());
    let scene = stage.play([700, 2000, 2500], || firewall(&rules), open_wall);
    let what = format!("{what} at {}/s", scene.run.rate);
    (scene, redis, what)
}

/// Nothing arrives.
pub(crate) fn f31(context: &Context) -> Judged {
    let (scene, redis, what) = by_wall(
        context,
        2,
        |port| vec![format!("tcp dport {port} drop")],
        "packets to the server thrown away for 2 s",
    );
    let mut judge = line(context, &scene.run, &redis);
    judge.open_after(scene.from, scene.go, millis(100));
    judge.back(scene.go, millis(1000));
    judge.end(&what)
}

/// Some packets are lost, both ways.
pub(crate) fn f34(context: &Context) -> Judged {
    let lossy = |port: u16| {
        ["dport", "sport"]
            .map(|side| format!("tcp {side} {port} numgen random mod 100 < 10 drop"))
            .to_vec()
    };
    let (scene, redis, what) = by_wall(context, 2, lossy, "one packet in ten lost for 2 s");
    let mut judge = line(context, &scene.run, &redis);
    judge.alone("meanwhile", scene.from, scene.go);
    judge.back(scene.go, millis(1000));
    judge.end(&what)
}

/// Some nodes are cut off, and the others are not.
pub(crate) fn f39(context: &Context) -> Judged {
    // The same server by as many addresses as there are nodes.
    let addresses = ["127.0.0.11", "127.0.0.12", "127.0.0.13"];
    let redis = Server::builder(Flavor::Redis7)
        .args("--bind", &[&["127.0.0.1"][..], &addresses].concat())
        .start();
    let stores = addresses.map(|address| format!("redis://{address}:{}", redis.port()));
    let stage = Stage::start(context, &Setup::each(stores.to_vec()));
    let cut = [format!("ip daddr {} tcp dport {} drop", addresses[0], redis.port())];
    let scene = stage.play([500, 2000, 2000], || firewall(&cut), open_wall);
    let mut judge = line(context, &scene.run, &redis);
    let share = context.tight() / 3;
    for (key, node) in (0..TIGHT_KEYS).flat_map(|key| (0..3).map(move |node| (key, node))) {
        let alone =
            judge.passed("tight", key, |a| a.node == node && a.source == Some(Source::Fallback));
        judge.holds(alone <= share, || {
            format!("tight:{key}: node {node} allowed {alone} without the store, at most {share}")
        });
    }
    // The other two run on a machine that may be too busy for them; then their shares count
    // as well.
    let connected = |from, to| scene.run.record.between(from, to).filter(|answer| answer.node > 0);
    let alone =
        connected(scene.from, scene.go).filter(|a| a.source == Some(Source::Fallback)).count();
    let all = connected(scene.from, scene.go).count();
    judge.say(format!("the connected two decided {alone} of {all} alone"));
    if context.strict {
        judge.admitted("tight", context.tight() + share);
        judge.holds(alone * 100 <= all, || {
            format!("the connected two decided {alone} of {all} alone")
        });
    }
    judge.back(scene.go, millis(1000));
    judge.end(&format!("one node of three cut off for 2 s at {}/s", scene.run.rate))
}

/// A name that cannot be resolved, and then leads elsewhere.
pub(crate) fn f38(context: &Context) -> Judged {
    let first = Server::start(Flavor::Redis7);
    let second = Server::start(Flavor::Redis7);
    // The second one is to be found at the same port of another address.
    let _relay = Relay::at("127.0.0.2", first.port(), second.port());
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let hosts = folder.path().join("hosts");
    let write = |line: &str| {
        std::fs::write(&hosts, format!("127.0.0.1 localhost\n{line}\n"))
            .expect("a temporary file can be written");
    };
    write("127.0.0.1 store.test");
    // Of this process and those that it starts alone: their mounts are their own.
    let mounted = Command::new("mount").arg("--bind").arg(&hosts).arg("/etc/hosts").status();
    assert!(
        mounted.is_ok_and(|status| status.success()),
        "mount --bind: expected mounts of our own"
    );
    let stage =
        Stage::start(context, &Setup::new(&format!("redis://store.test:{}", first.port()), 2));
    let load = stage.load();
    load.goes_on(millis(500));
    let gone = load.now();
    write("");
    load.goes_on(millis(1000));
    let from = load.now();
    write("127.0.0.2 store.test");
    first.kill();
    load.goes_on(millis(2500));
    load.settles();
    let run = stage.end(load);
    let mut judge = Judge::new(context, &run);
    judge.no_errors();
    judge.latency();
    let alone = judge.alone("without a name", gone, from);
    judge.holds(!context.strict || alone < 0.01, || {
        format!("{alone} were decided alone without need")
    });
    judge.back(from, millis(1000));
    judge.lost("tight", context.tight(), from, from);
    judge.end(&format!("a name gone for 1 s, then elsewhere, at {}/s", run.rate))
}
