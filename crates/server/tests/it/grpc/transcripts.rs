//! Every transcript through the gRPC listener, over a memory and over a real server: the same
//! decisions, with the same numbers.
//!
//! Envoy's protocol can ask for checks, for a look at one unit, and for refunds. What else a
//! transcript does, is done behind the listener, so that the story goes on; beside it a memory of
//! its own decides every line, and every number that the listener shows must be the one of that
//! decision.

use std::fs;
use std::path::Path;
use std::time::Duration;

use tidegate::redis::Redis;
use tidegate::{Algorithm, Check, Decision, Id, Limits, ManualClock, Memory, Op, Retry};
use tidegate_server::auth::Auth;
use tidegate_server::backend::Backend;
use tidegate_testkit::{Flavor, Server};
use tidegate_trace::{Event, Line};

use super::{Protocol, back, descriptor, hits, request, shown};

#[test]
fn every_transcript_holds_in_memory() {
    replay_all(|clock, _| Backend::Memory(Memory::builder().clock(clock).build()));
}

#[test]
fn every_transcript_holds_in_redis() {
    let server = Server::start(Flavor::Redis7);
    replay_all(|clock, story| {
        let builder = Redis::builder(server.url().parse().unwrap())
            .timeout(Duration::from_secs(10))
            .clock(clock);
        Backend::Redis(builder.namespace(format!("story-{story}")).build().unwrap())
    });
}

fn replay_all(store: impl Fn(ManualClock, usize) -> Backend) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/transcripts");
    let (mut stories, mut asked, mut wrong) = (0, 0, Vec::new());
    for entry in fs::read_dir(&folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "txt") {
            continue;
        }
        let text = fs::read_to_string(&path).unwrap();
        let lines: Vec<(u64, Line<'_>)> = (1..)
            .zip(text.lines())
            .map(|(number, text)| (number, Line::parse(text, number).unwrap()))
            .collect();
        for (_, line) in &lines {
            let Line::Limit { text: limit, .. } = line else { continue };
            let clock = ManualClock::new();
            stories += 1;
            // Redis needs a runtime to be built in; the listener brings its own later.
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            let backend = runtime.block_on(async { store(clock.clone(), stories) });
            for what in replay(limit, &lines, backend, clock, &mut asked) {
                wrong.push(format!(
                    "{}: {limit}: {what}",
                    path.file_name().unwrap().to_string_lossy()
                ));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(stories >= 25 && asked >= 200, "{asked} questions in {stories} stories");
}

fn replay(
    limit: &str,
    lines: &[(u64, Line<'_>)],
    backend: Backend,
    clock: ManualClock,
    asked: &mut usize,
) -> Vec<String> {
    let domain = format!(
        "domain: story\ndescriptors: [{{ key: key, rate_limit: {{ limit: {limit:?} }} }}]\n"
    );
    let protocol = Protocol::over(backend, clock.clone(), "", &domain, Auth::default());
    let beside = Memory::builder().clock(clock.clone()).build();
    let limits: Limits = limit.parse().unwrap();
    let leases = limits.iter().any(|limit| matches!(limit.algorithm(), Algorithm::Concurrent(_)));
    let mut wrong = Vec::new();
    for (number, line) in lines {
        let Line::Event(event) = line else { continue };
        clock.set(event.at);
        let id = (leases && event.op != Op::Refund).then_some(Id(*number));
        let mut check = Check::of(event.op).charge(event.key, &limits, event.cost);
        if let Some(id) = id {
            check = check.with_id(id);
        }
        let decision = beside.decide(&check).unwrap();
        let entries = [("key", event.key)];
        let question = match (event.op, event.cost, id) {
            (Op::Check, 1.., None) => hits(&entries, event.cost),
            (Op::Peek, 1, None) => hits(&entries, 0),
            (Op::Refund, _, None) => back(&entries, event.cost),
            _ => {
                let found = protocol.engine.domains().find("story", &entries, event.cost).unwrap();
                let ruling = protocol.engine.check_rules(event.op, vec![found.charge], id);
                let said = protocol.runtime.block_on(ruling).unwrap();
                if said.decision.as_ref().map(Decision::allowed) != Some(decision.allowed()) {
                    wrong.push(format!(
                        "line {number}: behind the listener {said:?}: expected {decision:?}"
                    ));
                }
                continue;
            }
        };
        *asked += 1;
        let found = shown(&protocol.ask(request("story", vec![question])).unwrap());
        let expected = expected(event, &decision);
        if !found.starts_with(&expected.0) || !found.ends_with(&expected.1) {
            wrong.push(format!("line {number}: {found:?}: expected {expected:?}"));
        }
    }
    assert_eq!(protocol.one_of("story", descriptor(&[("nobody", "x")])), "ok: ok left 0");
    wrong
}

/// How the answer begins, and how it ends; which unit it is in is no part of the decision.
fn expected(event: &Event<'_>, decision: &Decision) -> (String, String) {
    let over = !decision.allowed() && event.op != Op::Refund;
    let code = if over { "over" } else { "ok" };
    let seconds = |micros: u64| micros.div_ceil(1_000_000);
    let wait = match decision.retry() {
        Retry::After(micros) if over => seconds(micros),
        _ => seconds(decision.binding().reset_after_us),
    };
    let left = if over { 0 } else { decision.remaining().min(u32::MAX.into()) };
    (
        format!("{code}: {code} {}/", decision.amount().min(u32::MAX.into())),
        format!(" left {left} in {wait}s"),
    )
}

impl Protocol {
    fn one_of(&self, domain: &str, descriptor: super::Descriptor) -> String {
        shown(&self.ask(request(domain, vec![descriptor])).unwrap())
    }
}
