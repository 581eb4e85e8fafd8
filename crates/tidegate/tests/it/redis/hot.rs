//! Many processes on a few hot keys of one server: each key allows exactly its limit.

use std::collections::BTreeMap;
use std::env;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use tidegate::redis::Redis;
use tidegate::{Check, Limits, Store};
use tidegate_testkit::{Flavor, Server};

use super::{assert_all_expire, at, limits, runtime};
use crate::conformance::Random;

const PROCESSES: u64 = 4;
const KEYS: u64 = 100;
/// Concurrent callers of one process.
const CALLERS: u64 = 128;

/// Over all processes. `TIDEGATE_HOT_REQUESTS=10000000` is the full run.
fn requests() -> u64 {
    env::var("TIDEGATE_HOT_REQUESTS")
        .ok()
        .and_then(|requests| requests.parse().ok())
        .unwrap_or(200_000)
}

/// Half of the checks of one key.
fn amount() -> u64 {
    requests() / KEYS / 2
}

/// The limit of a key: every algorithm gets some keys. Nothing refills before the test ends.
fn limit_of(key: u64) -> Limits {
    let amount = amount();
    limits(&match key % 7 {
        0 | 1 => format!("1/h burst {amount}"),
        2 => format!("{amount}/1000d window"),
        3 => format!("{amount}/1000d window from first hit"),
        4 => format!("{amount}/1000d estimate"),
        5 => format!("{amount}/1000d sliding"),
        _ => format!("{amount}/1000d log"),
    })
}

#[test]
fn four_processes_admit_exactly_the_limit_of_every_key() {
    let server = Server::start(Flavor::Valkey9);
    let began = Instant::now();
    let processes: Vec<_> = (0..PROCESSES)
        .map(|number| {
            let mut process = Command::new(env::current_exe().unwrap());
            process.args([
                "--exact",
                "redis::hot::one_of_the_processes",
                "--ignored",
                "--nocapture",
            ]);
            process
                .env("TIDEGATE_HOT_URL", server.url())
                .env("TIDEGATE_HOT_NUMBER", number.to_string());
            process.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap()
        })
        .collect();
    let mut admitted: BTreeMap<u64, u64> = BTreeMap::new();
    for process in processes {
        let output = process.wait_with_output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{text}");
        for line in text.lines() {
            let mut words = line.split(' ');
            if words.next() == Some("admitted") {
                let mut number = || words.next().unwrap().parse::<u64>().unwrap();
                let key = number();
                *admitted.entry(key).or_default() += number();
            }
        }
    }
    let took = began.elapsed();
    let wrong: Vec<_> = (0..KEYS)
        .map(|key| (key, admitted.get(&key).copied().unwrap_or(0)))
        .filter(|(_, count)| *count != amount())
        .map(|(key, count)| format!("key {key} ({}): {count}", limit_of(key)))
        .collect();
    println!(
        "{} requests by {PROCESSES} processes over {KEYS} keys in {took:.1?}: {} admitted, {} of {KEYS} keys differ from {}",
        requests(),
        admitted.values().sum::<u64>(),
        wrong.len(),
        amount(),
    );
    assert!(wrong.is_empty(), "expected {} each: {}", amount(), wrong.join(", "));
    assert_all_expire(&server);
}

/// The work of one process; not a test of its own.
#[test]
#[ignore = "it is started by `four_processes_admit_exactly_the_limit_of_every_key`"]
fn one_of_the_processes() {
    let Ok(url) = env::var("TIDEGATE_HOT_URL") else { return };
    let number: u64 = env::var("TIDEGATE_HOT_NUMBER").unwrap().parse().unwrap();
    let share = requests() / PROCESSES;
    let runtime = runtime();
    let admitted: Arc<Vec<AtomicU64>> = Arc::new((0..KEYS).map(|_| AtomicU64::new(0)).collect());
    let asked = Arc::new(AtomicU64::new(0));
    let redis: Redis = runtime.block_on(async { at(&url).build() }).unwrap();
    let limits: Arc<Vec<(String, Limits)>> =
        Arc::new((0..KEYS).map(|key| (format!("hot:{key}"), limit_of(key))).collect());
    let callers: Vec<_> = (0..CALLERS)
        .map(|caller| {
            let (admitted, asked) = (Arc::clone(&admitted), Arc::clone(&asked));
            let (redis, limits) = (redis.clone(), Arc::clone(&limits));
            runtime.spawn(async move {
                let mut random = Random(number * CALLERS + caller);
                while asked.fetch_add(1, Ordering::Relaxed) < share {
                    let key = usize::try_from(random.below(KEYS)).unwrap();
                    let (name, limits) = &limits[key];
                    if redis.decide(&Check::new().charge(name, limits, 1)).await.unwrap().allowed()
                    {
                        admitted[key].fetch_add(1, Ordering::Relaxed);
                    }
                }
            })
        })
        .collect();
    callers.into_iter().for_each(|caller| runtime.block_on(caller).unwrap());
    assert_eq!(redis.stats().regressions, 0, "nothing was lost, so nothing may be restored");
    println!();
    for (key, count) in admitted.iter().enumerate() {
        println!("admitted {key} {}", count.load(Ordering::Relaxed));
    }
}
