//! Events for `tracing`, as a program with a subscriber sees them: a real Redis that dies and comes
//! back.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::convert::Infallible;
use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::http::{Request, Response};
use tidegate::redis::Redis;
use tidegate::resilience::Resilient;
use tidegate::tower::{RateLimitLayer, Rule, key};
use tidegate::{Limiter, Source};
use tidegate_testkit::{ClockShim, Fault, FaultProxy, Flavor, Server, wait_until};
use tower::{Layer, ServiceExt, service_fn};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

const BOUND: Duration = Duration::from_secs(20);

/// Keeps every event of the library as a line.
#[derive(Clone, Default)]
struct Captured(Arc<Mutex<Vec<(Level, String)>>>);

impl Captured {
    fn lines(&self) -> Vec<(Level, String)> {
        self.0.lock().unwrap().clone()
    }

    fn count(&self, part: &str) -> usize {
        self.lines().iter().filter(|(_, line)| line.contains(part)).count()
    }
}

struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.0 += &format!("{}={value:?} ", field.name());
    }
}

impl Subscriber for Captured {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("tidegate")
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut line = Line(String::new());
        event.record(&mut line);
        self.0.lock().unwrap().push((*event.metadata().level(), line.0));
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// One subscriber for the process: everything that is tested about events is tested here.
#[test]
fn a_program_hears_when_limits_are_not_enforced_as_configured() {
    let captured = Captured::default();
    tracing::subscriber::set_global_default(captured.clone()).unwrap();
    a_store_that_dies(&captured);
    a_call_that_has_no_answer(&captured);
    a_store_behind_a_layer_that_dies(&captured);
    a_store_that_forgets(&captured);
    a_store_whose_clock_goes_back(&captured);
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
}

fn a_store_that_dies(captured: &Captured) {
    let server = Server::start(Flavor::Redis7);
    let runtime = runtime();
    let (resilient, limiter) = runtime.block_on(async {
        let redis = Redis::new(&server.url()).unwrap();
        redis.prepare().await.unwrap();
        let resilient =
            Resilient::builder(redis).deadline(Duration::from_millis(50)).nodes(3).build();
        (
            resilient.clone(),
            Limiter::builder("1000000/s".parse().unwrap()).resilient(resilient).build(),
        )
    });
    let ask = || runtime.block_on(async { limiter.check("k").await.unwrap().source() });
    wait_until("the store decides", BOUND, || ask() == Source::Store);
    assert_eq!(captured.lines(), [], "all is well");
    server.kill();
    wait_until("an event says so", BOUND, || {
        assert_eq!(ask(), Source::Fallback);
        captured.count("the store is unreachable") == 1
    });
    let is_outage = |line: &&(Level, String)| !line.1.contains("had no decision");
    let outages = || captured.lines().iter().filter(is_outage).cloned().collect::<Vec<_>>();
    let (level, line) = outages().remove(0);
    assert_eq!(level, Level::WARN);
    for part in
        ["why=", "nodes=3", "nodes_from=\"configured\"", "enforced=1/3 of each limit on this node"]
    {
        assert!(line.contains(part), "{part} is missing: {line}");
    }
    server.restart();
    wait_until("the store decides again", BOUND, || ask() == Source::Store);
    wait_until("an event says so", BOUND, || captured.count("the store decides again") == 1);
    assert_eq!(
        outages().len(),
        2,
        "one when it begins and one when it ends: {:?}",
        captured.lines()
    );
    runtime.block_on(resilient.close());
}

/// A single call that has no answer is an event, too; the next when there are twice as many.
fn a_call_that_has_no_answer(captured: &Captured) {
    let server = Server::start(Flavor::Redis7);
    let proxy = FaultProxy::start(&server);
    let (runtime, deadline) = (runtime(), Duration::from_millis(100));
    let resilient = runtime.block_on(async {
        let redis = Redis::builder(proxy.url().parse().unwrap()).timeout(deadline).build().unwrap();
        redis.prepare().await.unwrap();
        Resilient::builder(redis).deadline(deadline).nodes(1).build()
    });
    let limiter = runtime.block_on(async {
        Limiter::builder("1000000/s".parse().unwrap()).resilient(resilient.clone()).build()
    });
    let ask = || runtime.block_on(async { limiter.check("k").await.unwrap().source() });
    wait_until("the store decides", BOUND, || ask() == Source::Store);
    let (before, misses) = (captured.lines().len(), resilient.stats().misses);
    let reply = deadline * 3 / 2;
    proxy.once(Fault::Delay { request: Duration::ZERO, reply, jitter: Duration::ZERO });
    assert_eq!(ask(), Source::Fallback);
    let lines = captured.lines().split_off(before);
    let (level, line) = lines.first().unwrap_or_else(|| panic!("no event after {misses} misses"));
    assert_eq!(*level, Level::WARN);
    for part in ["a call to the store had no decision", "total=1", "why="] {
        assert!(line.contains(part), "{part} is missing: {line}");
    }
    runtime.block_on(resilient.close());
}

/// A layer straight over Redis passes every request while Redis is down, and says so once; the same
/// for a rule in shadow mode.
fn a_store_behind_a_layer_that_dies(captured: &Captured) {
    let server = Server::start(Flavor::Valkey9);
    let runtime = runtime();
    for is_shadow in [false, true] {
        let rule = Rule::new("all", "1000000/s".parse().unwrap(), key::global());
        let rule = if is_shadow { rule.shadow() } else { rule };
        let redis = runtime.block_on(async { Redis::new(&server.url()) }).unwrap();
        let answer =
            |_: Request<String>| async { Ok::<_, Infallible>(Response::new(String::new())) };
        let service = RateLimitLayer::rules([rule]).redis(redis).layer(service_fn(answer));
        let ask = || {
            let request = Request::new(String::new());
            runtime.block_on(service.clone().oneshot(request)).unwrap().status().as_u16()
        };
        assert_eq!(ask(), 200);
        let before = captured.lines().len();
        let lines = || captured.lines().split_off(before);
        server.kill();
        (0..3).for_each(|_| assert_eq!(ask(), 200));
        let [(level, line)] = &lines()[..] else { panic!("expected one event: {:?}", lines()) };
        assert_eq!(*level, Level::WARN);
        for part in
            ["the store has no answer", "why=", "no limit is enforced, every request passes"]
        {
            assert!(line.contains(part), "{part} is missing: {line}");
        }
        server.restart();
        wait_until("an event says that it is over", BOUND, || ask() == 200 && lines().len() == 2);
        assert!(lines()[1].1.contains("the store decides again"), "{:?}", lines());
    }
}

/// What the server has forgotten and this process remembers is restored, and an event says so; the
/// next when there are twice as many.
fn a_store_that_forgets(captured: &Captured) {
    let server = Server::start(Flavor::Valkey9);
    let runtime = runtime();
    let limiter = runtime.block_on(async {
        Limiter::builder("10/h window".parse().unwrap())
            .redis(Redis::new(&server.url()).unwrap())
            .build()
    });
    let before = captured.lines().len();
    for _ in 0..4 {
        assert!(runtime.block_on(async { limiter.check("k").await }).unwrap().allowed());
        server.command(&["FLUSHALL"]);
    }
    let lines = captured.lines().split_off(before);
    let totals: Vec<bool> =
        ["total=1", "total=2"].map(|part| lines.iter().any(|(_, line)| line.contains(part))).into();
    assert!(
        lines.len() == 2 && totals == [true, true],
        "three were restored, and two events are enough: {lines:?}"
    );
    assert!(
        lines[0].1.contains("the store has lost state that this process remembers"),
        "{lines:?}"
    );
}

/// One event for a step, however many keys were ahead of the clock.
fn a_store_whose_clock_goes_back(captured: &Captured) {
    let shim = ClockShim::build();
    shim.set(3600);
    let builder = Server::builder(Flavor::Redis7);
    let server = shim
        .environment()
        .iter()
        .fold(builder, |builder, (name, value)| builder.env(name, value))
        .start();
    let runtime = runtime();
    let redis = runtime
        .block_on(async { Redis::builder(server.url().parse().unwrap()).timeout(BOUND).build() })
        .unwrap();
    let limiter = runtime
        .block_on(async { Limiter::builder("10/h".parse().unwrap()).redis(redis.clone()).build() });
    let before = captured.lines().len();
    for ahead in [3600, 0] {
        shim.set(ahead);
        for key in 0..4 {
            assert!(
                runtime
                    .block_on(async { limiter.check(&format!("k{key}")).await })
                    .unwrap()
                    .allowed()
            );
        }
    }
    let lines = captured.lines().split_off(before);
    assert_eq!(redis.stats().clock_regressions, 4);
    assert_eq!(lines.len(), 1, "{lines:?}");
    let (level, line) = &lines[0];
    assert!(
        *level == Level::WARN
            && line.contains("the clock of the store went back")
            && line.contains("by="),
        "{line}"
    );
    // A second step, long before the first is forgotten.
    shim.set(-86_400);
    for key in 0..4 {
        assert!(
            runtime.block_on(async { limiter.check(&format!("k{key}")).await }).unwrap().allowed()
        );
    }
    assert_eq!(redis.stats().clock_regressions, 8);
    let lines = captured.lines().split_off(before);
    assert_eq!(lines.len(), 2, "one event for each step: {lines:?}");
}
