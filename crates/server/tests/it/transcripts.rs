//! Every transcript, through the listeners for HTTP and RESP, over a memory and over real servers:
//! the same decisions, with the same numbers.
//!
//! Beside the listeners a memory of its own decides every line. What the transcript expects is
//! compared with that decision, and every number that a listener shows, also those that the
//! transcript does not mention, must be the one of that decision.

use std::fs;
use std::path::Path;
use std::time::Duration;

use serde_json::Value;
use tidegate::redis::Redis;
use tidegate::{Check, Decision, Id, Limits, ManualClock, Memory, Op, Retry, Timestamp};
use tidegate_core::Algorithm;
use tidegate_testkit::{Client, Flavor, Server};
use tidegate_trace::Line;

use crate::listeners::{Http, Listeners};

/// Somebody asks: everything but the time.
#[derive(Clone, Copy, Debug)]
struct Ask<'a> {
    key: &'a str,
    limit: &'a str,
    verb: &'a str,
    cost: u64,
    reserved: Option<u64>,
    id: Option<u64>,
}

/// One listener with a connection to it.
enum Asker {
    Http(Http),
    Resp(Client),
}

impl Asker {
    /// What is different from `decision`, if anything.
    fn differs(&mut self, ask: &Ask<'_>, decision: &Decision) -> Option<String> {
        match self {
            Asker::Http(http) => {
                let mut body =
                    serde_json::json!({"key": ask.key, "limit": ask.limit, "cost": ask.cost});
                if let Some(id) = ask.id {
                    body["id"] = id.into();
                }
                if let Some(reserved) = ask.reserved {
                    body["reserved"] = reserved.into();
                }
                let answer = http.post(&format!("/v1/{}", ask.verb), &body.to_string());
                let said: Value = serde_json::from_str(&answer.body).unwrap();
                let expected = (if decision.allowed() { 200 } else { 429 }, in_json(decision));
                let found = (answer.status, members(&said));
                let charges: Vec<_> =
                    said["charges"].as_array().into_iter().flatten().map(members).collect();
                let own: Vec<_> = decision.charges().iter().map(verdict_in_json).collect();
                (found != expected || charges != own || said["t_us"] != decision.at().as_micros())
                    .then(|| {
                        format!(
                            "HTTP: {ask:?} answered {} {}: expected {decision:?}",
                            answer.status, answer.body
                        )
                    })
            }
            Asker::Resp(client) => {
                let mut words = vec![
                    format!("TG.{}", ask.verb.to_uppercase()),
                    ask.key.into(),
                    ask.limit.into(),
                ];
                words.extend(["COST".into(), ask.cost.to_string()]);
                for (name, number) in [("RESERVED", ask.reserved), ("ID", ask.id)] {
                    words.extend(
                        number.into_iter().flat_map(|number| [name.into(), number.to_string()]),
                    );
                }
                let reply = client.command(&words).unwrap();
                let expected = in_resp(decision, ask);
                let tidegate_testkit::Reply::Array(found) = &reply else {
                    return Some(format!("RESP: {words:?} answered {reply:?}"));
                };
                let found: Vec<i64> = found.iter().map(tidegate_testkit::Reply::int).collect();
                (found != expected)
                    .then(|| format!("RESP: {words:?} answered {found:?}: expected {expected:?}"))
            }
        }
    }
}

/// The numbers of a decision, as HTTP shows them.
type Members = (Option<bool>, [Option<u64>; 5]);

fn in_json(decision: &Decision) -> Members {
    let (_, numbers) = verdict_in_json(decision.binding());
    (Some(decision.allowed()), numbers)
}

fn verdict_in_json(verdict: &tidegate::Verdict) -> Members {
    let numbers = [
        Some(verdict.granted),
        Some(verdict.remaining),
        verdict.retry.micros(),
        Some(verdict.reset_after_us),
        Some(verdict.next_after_us),
    ];
    (Some(verdict.allowed), numbers)
}

fn members(said: &Value) -> Members {
    let numbers = ["granted", "remaining", "retry_after_us", "reset_after_us", "next_after_us"];
    (said["allowed"].as_bool(), numbers.map(|name| said[name].as_u64()))
}

/// The numbers of a decision, as RESP shows them: milliseconds, rounded up.
fn in_resp(decision: &Decision, ask: &Ask<'_>) -> Vec<i64> {
    let whole = |number: u64| i64::try_from(number).unwrap();
    let retry = match decision.retry() {
        _ if decision.allowed() => 0,
        Retry::Never => -1,
        retry => whole(retry.micros().unwrap().div_ceil(1000)),
    };
    let reset = whole(decision.binding().reset_after_us.div_ceil(1000));
    let mut numbers = vec![
        i64::from(decision.allowed()),
        whole(decision.amount()),
        whole(decision.remaining()),
        retry,
        reset,
    ];
    match ask.verb {
        "take" | "refund" | "settle" | "release" => numbers.push(whole(decision.granted())),
        "reserve" | "lease" => numbers.push(whole(ask.id.unwrap())),
        _ => {}
    }
    numbers
}

/// A memory that decides beside the listeners.
struct Beside {
    memory: Memory,
    clock: ManualClock,
}

impl Beside {
    fn new() -> Beside {
        let clock = ManualClock::new();
        Beside { memory: Memory::builder().clock(clock.clone()).build(), clock }
    }

    fn decide(&self, op: Op, ask: &Ask<'_>, at: Timestamp) -> Decision {
        self.clock.set(at);
        let limits: Limits = ask.limit.parse().unwrap();
        let mut check = Check::of(op).charge(ask.key, &limits, ask.cost);
        if op == Op::Settle {
            check = check.reserving(ask.reserved.unwrap_or(0));
        }
        if let Some(id) = ask.id {
            check = check.with_id(Id(id));
        }
        self.memory.decide(&check).unwrap()
    }
}

/// Replays every transcript. Each limit of each has keys of its own, so one store serves them all;
/// a listener is as good as the other only if each has its own store, so `listeners` makes them.
fn every_transcript_holds(listeners: impl Fn(&str) -> Listeners) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/transcripts");
    let mut files: Vec<_> =
        fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| path.extension().is_some_and(|extension| extension == "txt"));
    files.sort();
    assert!(!files.is_empty(), "there are no transcripts in {}", folder.display());
    let mut wrong = Vec::new();
    for protocol in ["http", "resp"] {
        let listeners = listeners(protocol);
        let mut asker = if protocol == "http" {
            Asker::Http(listeners.http())
        } else {
            Asker::Resp(listeners.resp())
        };
        let beside = Beside::new();
        let mut stories = 0;
        for file in &files {
            let name = file.file_name().unwrap().to_string_lossy();
            let text = fs::read_to_string(file).unwrap();
            let lines: Vec<Line<'_>> =
                text.lines().map(|line| Line::parse(line, 1).unwrap()).collect();
            for limit in lines.iter().filter_map(|line| {
                if let Line::Limit { text, .. } = line { Some(*text) } else { None }
            }) {
                stories += 1;
                let limits: Limits = limit.parse().unwrap();
                let leases = limits
                    .iter()
                    .any(|limit| matches!(limit.algorithm(), Algorithm::Concurrent(_)));
                for (number, line) in (1..).zip(&lines) {
                    let Line::Event(event) = line else { continue };
                    let key = format!("{stories}/{}", event.key);
                    let id = (leases && event.op != Op::Refund).then_some(number);
                    let ask = Ask {
                        key: &key,
                        limit,
                        verb: event.op.name(),
                        cost: event.cost,
                        reserved: None,
                        id,
                    };
                    let decision = beside.decide(event.op, &ask, event.at);
                    listeners.clock.set(event.at);
                    if let Some(Err(what)) = event.expect.map(|expect| expect.compare(&decision)) {
                        wrong.push(format!("{name}:{number}: {limit}: {what}"));
                    }
                    wrong.extend(
                        asker
                            .differs(&ask, &decision)
                            .map(|what| format!("{name}:{number}: {what}")),
                    );
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{} differ:\n{}", wrong.len(), wrong.join("\n"));
}

/// What a fair die would ask: every operation there is, on few keys, under limits of every kind.
fn every_operation_is_the_same(listeners: impl Fn(&str) -> Listeners, steps: usize) {
    const LIMITS: [&str; 8] = [
        "5/s",
        "7/m burst 3",
        "6/s window",
        "9/10s sliding",
        "8/10s estimate",
        "4/s log",
        "3 concurrent ttl 2s",
        "5/s; 20/m window",
    ];
    const VERBS: [(&str, Op); 10] = [
        ("check", Op::Check),
        ("peek", Op::Peek),
        ("take", Op::Take),
        ("debit", Op::Debit),
        ("refund", Op::Refund),
        ("reset", Op::Reset),
        ("reserve", Op::Check),
        ("settle", Op::Settle),
        ("lease", Op::Check),
        ("release", Op::Release),
    ];
    for protocol in ["http", "resp"] {
        let listeners = listeners(protocol);
        let mut asker = if protocol == "http" {
            Asker::Http(listeners.http())
        } else {
            Asker::Resp(listeners.resp())
        };
        let beside = Beside::new();
        let mut dice = Dice(0x7469_6465_6761_7465);
        let mut at = 1_700_000_000_000_000;
        for step in 0..steps {
            at += dice.below(400_000);
            let number = dice.below(LIMITS.len());
            let limit = LIMITS[usize::try_from(number).unwrap()];
            let (verb, op) = VERBS[usize::try_from(dice.below(VERBS.len())).unwrap()];
            let leases = limit.contains("concurrent");
            // A lease ends by its id; nothing else can be taken out of such a limit, or given back
            // to it.
            let fits = if leases {
                matches!(verb, "check" | "peek" | "lease" | "release" | "reset")
            } else {
                !matches!(verb, "lease" | "release")
            };
            if !fits {
                continue;
            }
            let reserved = (verb == "settle").then(|| dice.below(4));
            let id = (leases || matches!(verb, "reserve" | "settle")).then(|| 1 + dice.below(6));
            let key = format!("{number}/{}", dice.below(3));
            let ask = Ask { key: &key, limit, verb, cost: dice.below(5), reserved, id };
            let now = Timestamp::from_micros(at);
            let decision = beside.decide(op, &ask, now);
            listeners.clock.set(now);
            if let Some(what) = asker.differs(&ask, &decision) {
                panic!("step {step}: {what}");
            }
        }
    }
}

/// Numbers that are the same in every run.
struct Dice(u64);

impl Dice {
    fn below(&mut self, bound: impl TryInto<u64, Error: std::fmt::Debug>) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound.try_into().unwrap()
    }
}

fn in_redis(server: &Server, namespace: &str) -> Listeners {
    let builder = Redis::builder(server.url().parse().unwrap()).timeout(Duration::from_secs(10));
    Listeners::in_redis("", builder.namespace(namespace))
}

#[test]
fn every_transcript_holds_through_every_protocol_in_memory() {
    every_transcript_holds(|_| Listeners::in_memory(""));
}

#[test]
fn every_transcript_holds_through_every_protocol_in_redis_and_valkey() {
    for flavor in [Flavor::Redis7, Flavor::Valkey9] {
        let server = Server::start(flavor);
        every_transcript_holds(|protocol| in_redis(&server, protocol));
    }
}

#[test]
fn every_operation_is_the_same_through_every_protocol() {
    every_operation_is_the_same(|_| Listeners::in_memory(""), 20_000);
    for flavor in [Flavor::Redis7, Flavor::Valkey9] {
        let server = Server::start(flavor);
        every_operation_is_the_same(|protocol| in_redis(&server, protocol), 2_000);
    }
}
