//! Clusters that lose a master under load: a planned failover fails no call, a death stays within
//! the bound.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tidegate::redis::Redis;
use tidegate::{Check, Limits, Store};
use tidegate_testkit::{Cluster, wait_until};
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;

use super::cluster::{on_clusters, one_per_master, slot_of};
use super::{at, left, limits, runtime};

/// A budget that the test cannot use up, and that does not refill while it runs.
pub(crate) const BUDGET: u64 = 10_000_000;
/// Concurrent callers, each with at most one call in flight.
pub(crate) const CALLERS: u64 = 8;

/// A generous timeout for a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Callers that call without a pause.
pub(crate) struct Load {
    counts: Arc<Counts>,
    tasks: Vec<JoinHandle<()>>,
}

#[derive(Default)]
struct Counts {
    stop: AtomicBool,
    admitted: AtomicU64,
    /// Calls without an answer, charged or not.
    failed: AtomicU64,
    last_failure: std::sync::Mutex<Option<(Instant, String)>>,
}

impl Load {
    /// Every caller charges one unit of every key, in one check.
    pub(crate) fn start(
        runtime: &Runtime,
        redis: &Redis,
        keys: &[String],
        limits: &Limits,
    ) -> Load {
        let counts = Arc::new(Counts::default());
        let task = |_| {
            let (counts, redis, keys, limits) =
                (Arc::clone(&counts), redis.clone(), keys.to_vec(), limits.clone());
            runtime.spawn(async move {
                while !counts.stop.load(Ordering::Relaxed) {
                    let check = keys
                        .iter()
                        .fold(Check::new(), |check, key| check.charge(key.as_str(), &limits, 1));
                    match redis.decide(&check).await {
                        Ok(decision) => {
                            assert!(decision.allowed(), "there is plenty: {decision:?}");
                            counts.admitted.fetch_add(1, Ordering::Relaxed);
                        }
                        Err(error) => {
                            counts.failed.fetch_add(1, Ordering::Relaxed);
                            *counts.last_failure.lock().unwrap() =
                                Some((Instant::now(), error.to_string()));
                            // A refused caller pauses before its next call.
                            tokio::time::sleep(Duration::from_millis(2)).await;
                        }
                    }
                }
            })
        };
        let tasks = (0..CALLERS).map(task).collect();
        Load { counts, tasks }
    }

    pub(crate) fn admitted(&self) -> u64 {
        self.counts.admitted.load(Ordering::Relaxed)
    }

    pub(crate) fn failed(&self) -> u64 {
        self.counts.failed.load(Ordering::Relaxed)
    }

    /// When a call last failed, and why.
    pub(crate) fn last_failure(&self) -> Option<(Instant, String)> {
        self.counts.last_failure.lock().unwrap().clone()
    }

    /// Waits until this many more checks were allowed.
    pub(crate) fn goes_on(&self, what: &str, more: u64) {
        let from = self.admitted();
        wait_until(what, PATIENCE, || self.admitted() >= from + more);
    }

    /// Stops all callers.
    pub(crate) fn stop(&mut self, runtime: &Runtime) {
        self.counts.stop.store(true, Ordering::Relaxed);
        self.tasks.drain(..).for_each(|task| runtime.block_on(task).unwrap());
    }
}

const KINDS: [&str; 3] = ["window", "estimate", "bucket"];

/// A limit of this kind that the test cannot use up: [`BUDGET`], or a tenth of it for a bucket.
pub(crate) fn plenty(kind: &str) -> Limits {
    // A bucket refills continuously; this one by less than a unit in ten minutes.
    limits(&if kind == "bucket" {
        format!("1/10min burst {}", BUDGET / 10)
    } else {
        format!("{BUDGET}/1000d {kind}")
    })
}

fn fresh(flavor: tidegate_testkit::Flavor) -> Arc<Cluster> {
    Arc::new(Cluster::start(flavor))
}

fn patient(flavor: tidegate_testkit::Flavor) -> Arc<Cluster> {
    Arc::new(Cluster::patient(flavor, Duration::from_secs(20)))
}

/// A planned failover under load. The old master holds calls back until the new one has all data,
/// and then redirects them: no call fails, and none is charged twice or not at all. A third master
/// may learn that the old one has no slots before it learns the new owner, and answer CLUSTERDOWN
/// for some milliseconds; the client retries.
#[test]
fn a_planned_failover_fails_no_call_and_exceeds_no_limit() {
    on_clusters(patient, |cluster| {
        let runtime = runtime();
        for (master, kind) in KINDS.into_iter().enumerate() {
            let limits = plenty(kind);
            let redis =
                runtime.block_on(async { at(&cluster.url()).namespace(kind).build() }).unwrap();
            let mut keys = runtime.block_on(one_per_master(cluster, &redis, &limits, "user"));
            keys.rotate_left(master);
            let budget = runtime.block_on(left(&redis, &keys[0], &limits));
            let mut one = Load::start(&runtime, &redis, &keys[..1], &limits);
            let mut all = Load::start(&runtime, &redis, &keys, &limits);
            one.goes_on("calls go on", 200);
            let slot = slot_of(cluster, &keys[0]);
            for _ in 0..2 {
                cluster.failover(slot);
                one.goes_on("single calls go on", 200);
                all.goes_on("calls over several slots go on", 50);
            }
            one.stop(&runtime);
            all.stop(&runtime);
            let failures = (one.last_failure(), all.last_failure());
            assert_eq!((one.failed(), all.failed()), (0, 0), "{kind}: {failures:?}");
            runtime.block_on(async {
                let (one, all) = (one.admitted(), all.admitted());
                assert_eq!(
                    left(&redis, &keys[0], &limits).await,
                    budget - one - all,
                    "{kind}: {:?}",
                    redis.stats()
                );
                for key in &keys[1..] {
                    assert_eq!(left(&redis, key, &limits).await, budget - all, "{kind}");
                }
            });
            assert_eq!(redis.stats().regressions, 0, "{kind}: nothing was lost");
        }
    });
}

/// A master dies. Until its replica is elected its slots have no answers; the caller restores what
/// was not replicated; the total stays within the budget and the calls in flight.
#[test]
fn a_dead_master_costs_at_most_the_calls_in_flight() {
    on_clusters(fresh, |cluster| {
        let runtime = runtime();
        let limits = plenty("window");
        let build =
            |witness| at(&cluster.url()).timeout(Duration::from_millis(500)).witness_keys(witness);
        let build = |name, witness| {
            runtime.block_on(async { build(witness).namespace(name).build() }).unwrap()
        };
        let (redis, forgetful) = (build("seen", 1000), build("forgotten", 0));
        let patient =
            runtime.block_on(async { at(&cluster.url()).namespace("seen").build() }).unwrap();
        let keys = runtime.block_on(one_per_master(cluster, &patient, &limits, "user"));
        let (dying, living) = (&keys[0], &keys[1]);
        let slot = slot_of(cluster, dying);

        for node in cluster.nodes() {
            node.command(&["CONFIG", "SET", "cluster-require-full-coverage", "no"]);
        }
        let mut load = Load::start(&runtime, &redis, &keys[..1], &limits);
        let mut elsewhere = Load::start(&runtime, &redis, &keys[2..], &limits);
        let mut unseen = Load::start(&runtime, &forgetful, &keys[..1], &limits);
        load.goes_on("calls go on", 500);
        unseen.goes_on("calls go on", 500);
        assert_eq!(load.failed(), 0, "{:?}", load.last_failure());
        let killed = Instant::now();
        cluster.kill_master_of(slot);
        a_shard_that_is_down(&runtime, &redis, dying, living, &limits);
        cluster.wait_for_failover(slot);
        let elected = Instant::now();
        load.goes_on("calls go on by themselves", 500);
        unseen.goes_on("calls go on by themselves", 500);
        load.stop(&runtime);
        unseen.stop(&runtime);
        elsewhere.stop(&runtime);
        assert_eq!(
            elsewhere.failed(),
            0,
            "only the slots of the dead are gone: {:?}",
            elsewhere.last_failure()
        );

        let (last, why) =
            load.last_failure().expect("a call must have failed while there was no master");
        assert!(
            last < elected + Duration::from_secs(5),
            "{why}, {:?} after the election",
            last - elected
        );
        let (admitted, failed) = (load.admitted() + 1, load.failed());
        let left_here = runtime.block_on(left(&redis, dying, &limits));
        let over = (admitted + left_here).saturating_sub(BUDGET);
        println!(
            "{}: killed; elected after {:?}, last failure {:?} after that; {admitted} admitted, {failed} failed, \
             {over} too many (at most {CALLERS} may be), {} regressions",
            cluster.nodes()[0].flavor(),
            elected - killed,
            last.saturating_duration_since(elected),
            redis.stats().regressions,
        );
        assert!(over <= CALLERS, "{over} too many: {:?}", redis.stats());
        // Charges without an answer are lost to the caller: at most one per failure.
        assert!(BUDGET - left_here <= admitted + failed + 1, "{left_here} left after {admitted}");
        let left_there = runtime.block_on(left(&forgetful, dying, &limits));
        println!(
            "without a witness: {} too many",
            (unseen.admitted() + left_there).saturating_sub(BUDGET)
        );
        let mut again = Load::start(&runtime, &redis, &keys[..2], &limits);
        again.goes_on("calls go on", 300);
        again.stop(&runtime);
        assert_eq!(again.failed(), 0, "{:?}", again.last_failure());
    });
}

/// A check over two slots of which one is down fails, and the charge of the other is given back.
fn a_shard_that_is_down(runtime: &Runtime, redis: &Redis, down: &str, up: &str, limits: &Limits) {
    runtime.block_on(async {
        let before = left(redis, up, limits).await;
        let check = Check::new().charge(up, limits, 1).charge(down, limits, 1);
        for _ in 0..5 {
            let error = redis.decide(&check).await.expect_err("its master is dead");
            assert!(error.to_string().starts_with("the store did not answer"), "{error}");
            assert_eq!(left(redis, up, limits).await, before, "after {error}");
        }
    });
}
