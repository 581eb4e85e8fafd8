//! State in Redis outlives the program that wrote it, and during an upgrade two releases share it.
//! So the keys and values of the format `tg1` must not change by a byte: this release writes what
//! the file has, and reads what the file has like the release that wrote it. Record 0033 says how
//! to change the format.

use std::collections::BTreeSet;

use tidegate::redis::Redis;
use tidegate::{Check, Decision, Id, Limits, ManualClock, Op, Store, Timestamp};
use tidegate_testkit::{Flavor, Reply, Server};

use super::{runtime, store};

const FILE: &str = include_str!("../../../../../testdata/formats/tg1.txt");

/// The start of the times in the file.
const EPOCH: Timestamp = Timestamp::from_micros(1_700_000_000_000_000);

/// One line of the file: the calls, the stored keys, and the answer afterwards.
struct Case<'a> {
    name: &'a str,
    limits: Limits,
    asked: Vec<Asked>,
    /// The key and its value.
    kept: Vec<(&'a str, Vec<u8>)>,
    then: Asked,
    said: &'a str,
}

/// `check 3 #7 @200000`: an operation, its cost, its id if it has one, and when.
#[derive(Clone, Copy)]
struct Asked {
    op: Op,
    cost: u64,
    id: Option<Id>,
    at: u64,
}

impl Asked {
    fn parse(text: &str) -> Asked {
        let mut asked = Asked { op: Op::Check, cost: 1, id: None, at: 0 };
        for word in text.split_whitespace() {
            match word.split_at(1) {
                ("#", id) => asked.id = Some(Id(id.parse().unwrap())),
                ("@", at) => asked.at = at.parse().unwrap(),
                _ if word.starts_with(|first: char| first.is_ascii_digit()) => {
                    asked.cost = word.parse().unwrap()
                }
                _ => {
                    let ops = [Op::Check, Op::Debit, Op::Refund, Op::Settle, Op::Release, Op::Peek];
                    asked.op = ops.into_iter().find(|op| op.name() == word).expect("an operation");
                }
            }
        }
        asked
    }

    /// Runs the operation, as a rule in a namespace.
    async fn ask(self, redis: &Redis, clock: &ManualClock, limits: &Limits) -> Decision {
        clock.set(EPOCH.after_micros(self.at));
        let mut check = Check::of(self.op).charge_named("per-user", "user:7", limits, self.cost);
        if self.op == Op::Settle {
            check = check.reserving(1);
        }
        if let Some(id) = self.id {
            check = check.with_id(id);
        }
        redis.decide(&check).await.unwrap()
    }
}

impl Case<'_> {
    fn parse(line: &str) -> Case<'_> {
        let parts: Vec<&str> = line.split('|').map(str::trim).collect();
        let [name, limits, asked, kept, then, said] = parts[..] else {
            panic!("six parts: {line}")
        };
        let kept = kept.split_whitespace().map(|pair| {
            let (key, value) = pair.split_once('=').expect("a key and its value");
            let pairs = value.as_bytes().chunks(2).map(|two| std::str::from_utf8(two).unwrap());
            (key, pairs.map(|two| u8::from_str_radix(two, 16).unwrap()).collect())
        });
        let asked = asked.split(',').map(Asked::parse).collect();
        Case {
            name,
            limits: limits.parse().unwrap(),
            asked,
            kept: kept.collect(),
            then: Asked::parse(then),
            said,
        }
    }

    fn all() -> impl Iterator<Item = Case<'static>> {
        FILE.lines().filter(|line| !line.starts_with('#') && !line.is_empty()).map(Case::parse)
    }
}

/// All fields of a decision, as text.
fn said(decision: &Decision) -> String {
    let retry =
        decision.retry_after().map_or("never".to_owned(), |wait| wait.as_micros().to_string());
    format!(
        "{} {} left, retry {retry}, reset {}",
        if decision.allowed() { "allowed" } else { "denied" },
        decision.remaining(),
        decision.reset_after().as_micros()
    )
}

/// All keys of Tidegate with their values.
fn kept(server: &Server) -> Vec<(String, Vec<u8>)> {
    let bytes = |reply: &Reply| match reply {
        Reply::Text(text) => text.clone().into_bytes(),
        Reply::Bytes(bytes) => bytes.clone(),
        other => panic!("a value: {other:?}"),
    };
    let reply = server.command(&["KEYS", "tg1:*"]);
    let mut names: Vec<Vec<u8>> = reply.array().iter().map(bytes).collect();
    names.sort();
    let value = |name: &Vec<u8>| bytes(&server.command(&[b"GET".as_slice(), name]));
    names.iter().map(|name| (String::from_utf8(name.clone()).unwrap(), value(name))).collect()
}

fn written(kept: &[(String, Vec<u8>)]) -> String {
    let hex = |value: &[u8]| value.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    kept.iter().map(|(name, value)| format!("{name}={}", hex(value))).collect::<Vec<_>>().join(" ")
}

#[test]
fn every_algorithm_is_in_the_file() {
    let letters = Case::all().flat_map(|case| case.kept.into_iter().map(|(_, value)| value[0]));
    let letters: BTreeSet<u8> = letters.collect();
    assert_eq!(letters, b"bcelsw".iter().copied().collect());
}

#[test]
fn keys_and_values_are_written_as_before() {
    let mut changed = String::new();
    for flavor in [Flavor::Redis7, Flavor::Valkey9] {
        let server = Server::start(flavor);
        runtime().block_on(async {
            for case in Case::all() {
                server.command(&["FLUSHALL"]);
                let clock = ManualClock::new();
                let redis = store(&server)
                    .namespace("shop")
                    .clock(clock.clone())
                    .witness_keys(0)
                    .build()
                    .unwrap();
                for asked in &case.asked {
                    let _ = asked.ask(&redis, &clock, &case.limits).await;
                }
                let now = kept(&server);
                let then = said(&case.then.ask(&redis, &clock, &case.limits).await);
                let before =
                    case.kept.iter().map(|(name, value)| ((*name).to_owned(), value.clone()));
                if now != before.collect::<Vec<_>>() || then != case.said {
                    changed += &format!("{}: {} | {then}\n", case.name, written(&now));
                }
            }
        });
    }
    assert!(
        changed.is_empty(),
        "what is kept in Redis has another form than the format tg1 has, and programs of other releases would misread it: see decision 0033. It is now\n{changed}"
    );
}

#[test]
fn state_of_an_earlier_release_is_read() {
    for flavor in [Flavor::Redis7, Flavor::Valkey9] {
        let server = Server::start(flavor);
        runtime().block_on(async {
            for case in Case::all() {
                server.command(&["FLUSHALL"]);
                for (name, value) in &case.kept {
                    server.command(&[b"SET".as_slice(), name.as_bytes(), value, b"PX", b"3600000"]);
                }
                let clock = ManualClock::new();
                let redis = store(&server).namespace("shop").clock(clock.clone()).build().unwrap();
                let then = case.then.ask(&redis, &clock, &case.limits).await;
                assert_eq!(said(&then), case.said, "{}", case.name);
                assert_eq!(redis.stats().repairs, 0, "{}: it was taken for damage", case.name);
            }
        });
    }
}
