//! How much several nodes together may allow beyond the limit, in every mode, over random histories
//! with faults: the bounds of `docs/guarantees.md`.

use std::time::Duration;

use tidegate::resilience::{Policy, Resilient, SyncMode};
use tidegate::{Algorithm, Check, Limit, ManualClock, Source, Store};

use super::{Remote, limits, node};
use crate::conformance::Random;

/// One allowed request.
#[derive(Clone, Copy, Debug)]
struct Passed {
    at_us: u64,
    units: u64,
    source: Source,
}

struct History {
    passed: Vec<Passed>,
    limit: Limit,
    nodes: u64,
    /// Decisions that the store did not make.
    resilient: u64,
}

const KEY: &str = "key";

/// Runs nodes over one store from one seed, with random requests and connections that stop, lose
/// answers and fail. At the end all faults are over, and every node must notice and lose nothing.
async fn history(sync: SyncMode, limit: &str, seed: u64, faults: bool) -> History {
    let mut random = Random(seed);
    let clock = ManualClock::with_runtime();
    clock.advance(Duration::from_secs(1_000_000));
    let remote = Remote::new(&clock);
    let nodes = 1 + random.below(4);
    let lines: Vec<Remote> = (0..nodes).map(|_| remote.another_line()).collect();
    let build =
        |(at, line): (usize, &Remote)| node(line, &clock, nodes, seed * 10 + at as u64).build();
    let resilients: Vec<Resilient> = lines.iter().enumerate().map(build).collect();
    let limits = limits(limit);
    let policy = Policy { sync, ..Policy::default() };
    let mut history = History {
        passed: Vec::new(),
        limit: *limits.as_slice().first().unwrap(),
        nodes,
        resilient: 0,
    };
    for _ in 0..1500 {
        if faults && random.below(60) == 0 {
            let line = random.pick(&lines);
            line.silent(random.below(3) == 0);
            line.loses_answers(random.below(4) == 0);
            line.fails(random.below(6) == 0);
            line.delay(Duration::from_micros(*random.pick(&[0, 200, 1000, 4000, 9000])));
        }
        let resilient = random.pick(&resilients);
        let check = Check::new().policy(policy).charge(KEY, &limits, 1 + random.below(3));
        let decision = resilient.decide(&check).await.unwrap();
        if decision.source() != Source::Store {
            history.resilient += 1;
        }
        if decision.allowed() {
            let (at_us, units, source) =
                (decision.at().as_micros(), decision.granted(), decision.source());
            history.passed.push(Passed { at_us, units, source });
        }
        let pause = *random.pick(&[0, 0, 0, 100, 500, 1000, 3000]);
        if pause > 0 {
            tokio::time::sleep(Duration::from_micros(pause)).await;
        }
        if random.below(400) == 0 {
            tokio::time::sleep(Duration::from_millis(700)).await;
        }
    }
    for line in &lines {
        line.silent(false);
        line.loses_answers(false);
        line.fails(false);
        line.delay(Duration::from_micros(200));
    }
    tokio::time::sleep(Duration::from_secs(2)).await;
    for resilient in &resilients {
        let check = Check::new().policy(policy).charge(KEY, &limits, 1);
        assert_ne!(
            resilient.decide(&check).await.unwrap().source(),
            Source::Fallback,
            "seed {seed}: back after two seconds"
        );
        resilient.close().await;
        let stats = resilient.stats();
        assert_eq!(
            (stats.lease_units_held, stats.unsynced_units, stats.in_flight),
            (0, 0, 0),
            "seed {seed}"
        );
        let gone = stats.lease_units_spent + stats.lease_units_returned + stats.lease_units_expired;
        assert_eq!(
            stats.lease_units_granted, gone,
            "seed {seed}: nothing is made and nothing is lost"
        );
    }
    history
}

impl History {
    /// The most units allowed beyond the limit over all spans, of requests with one of these sources.
    fn beyond(&self, of: &[Source]) -> u64 {
        let mut passed: Vec<Passed> =
            self.passed.iter().copied().filter(|one| of.contains(&one.source)).collect();
        passed.sort_by_key(|one| one.at_us);
        let mut worst = 0;
        match self.limit.algorithm() {
            Algorithm::Window(window) => {
                let mut at = 0;
                while at < passed.len() {
                    let number = passed[at].at_us / window.period;
                    let same =
                        passed[at..].iter().take_while(|one| one.at_us / window.period == number);
                    let (count, units) =
                        same.fold((0, 0), |(count, units), one| (count + 1, units + one.units));
                    worst = worst.max(units.saturating_sub(window.amount));
                    at += count;
                }
            }
            Algorithm::Bucket(bucket) => {
                for from in 0..passed.len() {
                    let mut units = 0;
                    for one in &passed[from..] {
                        units += one.units;
                        let span = one.at_us - passed[from].at_us;
                        let may = bucket.capacity + span * bucket.amount / bucket.period;
                        worst = worst.max(units.saturating_sub(may));
                    }
                }
            }
            other => panic!("no bound is written for {other:?}"),
        }
        worst
    }
}

const ANSWERED: &[Source] = &[Source::Store, Source::Local];
const ALONE: &[Source] = &[Source::Fallback];
const LIMITS: &[&str] = &["300/s window", "300/s", "2000/s burst 500", "1000/s window"];
const SEEDS: u64 = 25;

#[tokio::test(start_paused = true)]
async fn direct_mode_exceeds_the_limit_only_by_fallback_decisions() {
    for seed in 0..SEEDS {
        for limit in LIMITS {
            let history = history(SyncMode::Direct, limit, seed, true).await;
            assert_eq!(history.beyond(ANSWERED), 0, "{limit}, seed {seed}");
            assert_eq!(
                history.beyond(ALONE),
                0,
                "{limit}, seed {seed}: the shares together are the limit"
            );
        }
    }
}

#[tokio::test(start_paused = true)]
async fn leases_move_at_most_what_all_nodes_may_hold() {
    let mut resilient = 0;
    for seed in 0..SEEDS {
        for limit in LIMITS {
            let history = history(SyncMode::Lease, limit, seed, seed % 2 == 0).await;
            let held = history.limit.capacity() / 100; // one per cent, over all nodes
            let bound = match history.limit.algorithm() {
                Algorithm::Window(_) => 0, // what was taken from one window is not spent in the next
                _ => held,
            };
            let beyond = history.beyond(ANSWERED);
            assert!(
                beyond <= bound,
                "{limit}, seed {seed}, {} nodes: {beyond} beyond, bound {bound}",
                history.nodes
            );
            assert_eq!(history.beyond(ALONE), 0, "{limit}, seed {seed}");
            resilient += history.resilient;
        }
    }
    assert!(resilient > 10_000, "only {resilient} were decided here");
}

#[tokio::test(start_paused = true)]
async fn async_mode_exceeds_the_limit_at_most_by_the_cap_of_each_other_node() {
    let mut resilient = 0;
    for seed in 0..SEEDS {
        for limit in LIMITS {
            let history = history(SyncMode::Async, limit, seed, seed % 2 == 0).await;
            let n = history.nodes;
            let capacity = history.limit.capacity();
            let cap = if n == 1 { capacity } else { (capacity * 50 / 1000 / (n - 1)).max(1) };
            let bound = (n - 1) * cap.min(capacity);
            let beyond = history.beyond(ANSWERED);
            assert!(
                beyond <= bound,
                "{limit}, seed {seed}, {n} nodes: {beyond} beyond, bound {bound}"
            );
            assert_eq!(history.beyond(ALONE), 0, "{limit}, seed {seed}");
            resilient += history.resilient;
        }
    }
    assert!(resilient > 10_000, "only {resilient} were decided here");
}
