//! Healthy clusters: one call for one subject, several for several, no limit exceeded, and no
//! charge left by a denial.
// Long because the helpers that start and share clusters are used by most of these tests.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread;
use std::time::Duration;

use tidegate::redis::Redis;
use tidegate::{Check, Id, Limits, ManualClock, Op, Retry, Store};
use tidegate_testkit::{Cluster, Flavor, Reply, wait_until};

use super::{ask, at, left, limits, runtime};
use crate::conformance::{Random, StepsBack, Trial};

pub(crate) const FLAVORS: [Flavor; 2] = [Flavor::Redis7, Flavor::Valkey9];

/// A cluster that concurrent tests share, each in its own namespace; they must not break it.
pub(crate) fn shared(flavor: Flavor) -> Arc<Cluster> {
    static CLUSTERS: Mutex<Vec<(Flavor, Weak<Cluster>)>> = Mutex::new(Vec::new());
    let mut clusters = CLUSTERS.lock().unwrap_or_else(PoisonError::into_inner);
    let known =
        clusters.iter().find_map(|(known, cluster)| cluster.upgrade().filter(|_| *known == flavor));
    known.unwrap_or_else(|| {
        let cluster = Arc::new(Cluster::patient(flavor, Duration::from_secs(5)));
        clusters.retain(|(known, _)| *known != flavor);
        clusters.push((flavor, Arc::downgrade(&cluster)));
        cluster
    })
}

/// Runs a test on both kinds of cluster in parallel, and finds keys without an expiry.
pub(crate) fn on_clusters(
    start: impl Fn(Flavor) -> Arc<Cluster> + Sync,
    test: impl Fn(&Cluster) + Sync,
) {
    thread::scope(|scope| {
        for flavor in FLAVORS {
            let (start, test) = (&start, &test);
            let run = thread::Builder::new().name(format!("on a cluster of {flavor}"));
            let run = run.spawn_scoped(scope, move || {
                let cluster = start(flavor);
                test(&cluster);
                assert_eq!(cluster.keys_without_ttl("tg1:"), Vec::<String>::new());
            });
            run.unwrap();
        }
    });
}

fn on_shared(test: impl Fn(&Cluster) + Sync) {
    on_clusters(shared, test);
}

/// The slot of a key, found by its name, which ends with it.
pub(crate) fn slot_of(cluster: &Cluster, key: &str) -> u16 {
    let name = cluster
        .nodes()
        .iter()
        .filter_map(|node| node.try_command(&["KEYS", "tg1:*"]).ok())
        .find_map(|names| {
            names
                .array()
                .iter()
                .map(|name| name.text().to_owned())
                .find(|name| name.ends_with(&format!(":{key}")))
        });
    cluster.slot_of(&name.unwrap_or_else(|| panic!("{key} is on no node")))
}

/// One key on each of the three masters, in the order of the nodes, charged once.
pub(crate) async fn one_per_master(
    cluster: &Cluster,
    redis: &Redis,
    limits: &Limits,
    stem: &str,
) -> Vec<String> {
    let mut found: Vec<Option<String>> = vec![None; 3];
    for n in 0..200 {
        let key = format!("{stem}:{n}");
        let _ = ask(redis, &key, limits).await.unwrap();
        let port = cluster.master_of(slot_of(cluster, &key)).port();
        let master = cluster.nodes().iter().take(3).position(|node| node.port() == port);
        let place = &mut found[master.expect("the first three nodes are the masters")];
        place.get_or_insert(key);
        if let [Some(a), Some(b), Some(c)] = &found[..] {
            return vec![a.clone(), b.clone(), c.clone()];
        }
    }
    panic!("200 keys leave a master out: {found:?}")
}

#[test]
fn all_limits_of_one_subject_are_one_call() {
    on_shared(|cluster| {
        runtime().block_on(async {
            let redis = at(&cluster.url()).namespace("one-call").build().unwrap();
            let many =
                limits("10/s; 120/min; 1000/h window; 5000/day sliding; 9 concurrent ttl 1s");
            for n in 0..50_u64 {
                let key = format!("user:{n}:{{x}}");
                assert!(ask(&redis, &key, &many).await.unwrap().allowed());
                assert_eq!(redis.stats().calls, 2 * n + 1, "one decision, one call");
                let check = Check::of(Op::Peek).charge_named("rule", &key, &many, 1);
                assert_eq!(redis.decide(&check).await.unwrap().charges().len(), 5);
                assert_eq!(redis.stats().calls, 2 * n + 2, "under the name of a rule too");
            }
        });
    });
}

/// Three subjects on three masters: the one that is used up denies, the others keep every unit.
#[test]
fn a_denial_of_one_slot_leaves_the_others_unchanged() {
    const LIMITS: [&str; 7] = [
        "5/h",
        "5/1000d window",
        "5/1000d window from first hit",
        "5/1000d estimate",
        "5/1000d sliding",
        "5/1000d log",
        "5 concurrent ttl 1h",
    ];
    on_shared(|cluster| {
        runtime().block_on(async {
            for (number, limit) in LIMITS.into_iter().enumerate() {
                let limits = limits(limit);
                for place in 0..3 {
                    let clock = ManualClock::new();
                    clock.set(tidegate::Timestamp::from_secs(1_700_000_000));
                    let name = format!("deny{number}-{place}");
                    let redis = at(&cluster.url()).namespace(name).clock(clock).build().unwrap();
                    let keys = one_per_master(cluster, &redis, &limits, "user").await;
                    let together = |op| {
                        keys.iter().fold(Check::of(op), |check, key| {
                            check.charge(key.as_str(), &limits, 1)
                        })
                    };
                    let all = redis.decide(&together(Op::Check)).await.unwrap();
                    assert!(all.allowed(), "{limit}");
                    assert!(
                        all.charges().iter().all(|charge| charge.remaining == 3),
                        "{limit}: {all:?}"
                    );
                    for _ in 0..3 {
                        assert!(ask(&redis, &keys[place], &limits).await.unwrap().allowed());
                    }
                    // From a store without observations, which cannot know the slot to call first.
                    let stranger = at(&cluster.url()).namespace(format!("deny{number}-{place}"));
                    let clock = ManualClock::new();
                    clock.set(tidegate::Timestamp::from_secs(1_700_000_000));
                    let stranger = stranger.clock(clock).build().unwrap();
                    for redis in [&redis, &stranger] {
                        let before = redis.stats().calls;
                        let denied = redis.decide(&together(Op::Check)).await.unwrap();
                        assert!(
                            !denied.allowed() && denied.retry() != Retry::Now,
                            "{limit}: {denied:?}"
                        );
                        let calls = redis.stats().calls - before;
                        assert!(calls <= 6, "{limit}: {calls} calls");
                        for (at, charge) in denied.charges().iter().enumerate() {
                            assert_eq!(charge.allowed, at != place, "{limit}, {at}");
                            assert_eq!(
                                charge.remaining,
                                if at == place { 0 } else { 3 },
                                "{limit}, {at}"
                            );
                        }
                        for (at, key) in keys.iter().enumerate() {
                            let expected = if at == place { 0 } else { 3 };
                            assert_eq!(left(redis, key, &limits).await, expected, "{limit}, {at}");
                        }
                    }
                    // A store that remembers the used-up key calls its slot first and charges
                    // nothing.
                    let small =
                        matches!(limit.split(' ').nth(1), None | Some("window" | "estimate"));
                    if small {
                        let before = redis.stats().calls;
                        assert!(!redis.decide(&together(Op::Check)).await.unwrap().allowed());
                        assert_eq!(
                            redis.stats().calls - before,
                            3,
                            "{limit}: one denies, two say how they stand"
                        );
                    }
                }
            }
        });
    });
}

/// The cluster decides over several slots what the core decides over a plain map, in every field.
/// What must differ:
///
/// - A clock that goes back. A charge that was given back leaves the state aged to its moment.
/// - A key whose limit changes between calls. What was converted for a charge stays converted after
///   it was given back.
/// - An id that some subjects of a `take` know and others do not. Each slot answers for itself; the
///   core, which sees all of them, takes nothing anywhere. An id is meant for one call, and then
///   all know it or none does.
/// - The id of a decision over a `concurrent` limit without one. The store adds one, to be able to
///   give the lease back.
#[test]
fn over_several_slots_the_answers_are_those_of_the_core() {
    const HISTORIES: u64 = 4;
    let steps = std::env::var("TIDEGATE_CLUSTER_STEPS")
        .ok()
        .and_then(|steps| steps.parse().ok())
        .unwrap_or(20_000);
    let steps: usize = steps / FLAVORS.len() / 4;
    let seed: u64 =
        std::env::var("TIDEGATE_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1);
    on_shared(|cluster| {
        let runtime = runtime();
        let url = cluster.url();
        let histories: Vec<_> = (0..HISTORIES)
            .map(|history| {
                let builder = at(&url).namespace(format!("core{history}"));
                runtime.spawn(async move {
                    let clock = ManualClock::new();
                    let redis = builder.clock(clock.clone()).build().unwrap();
                    let stores: &[(&str, &dyn Store)] = &[("cluster", &redis)];
                    let seed = seed + 1000 * history;
                    let trial = Trial {
                        stores,
                        clock: &clock,
                        forget: None,
                        steps_back: StepsBack::Never,
                        steady: true,
                        model: false,
                        seed,
                    };
                    trial.run(steps).await;
                    assert!(
                        redis.stats().calls > steps as u64 * 5 / 4,
                        "some checks were over several slots"
                    );
                    assert_eq!(
                        redis.stats().regressions,
                        0,
                        "nothing was lost, so nothing may be restored"
                    );
                    assert_eq!(redis.stats().repairs, 0);
                })
            })
            .collect();
        for history in histories {
            runtime.block_on(history).unwrap();
        }
    });
}

/// Each subject gives as much as the one with the least left; also leases, which otherwise end
/// completely.
#[test]
fn taking_from_several_slots_takes_the_same_from_all() {
    on_shared(|cluster| {
        runtime().block_on(async {
            let redis = at(&cluster.url()).namespace("take").build().unwrap();
            for kind in ["concurrent ttl 1h", "/1000d window", "/1000d log"] {
                let [rich, poor, empty] =
                    [9, 4, 1].map(|amount| limits(&format!("{amount} {kind}").replace(" /", "/")));
                let keys = one_per_master(cluster, &redis, &rich, kind).await;
                for key in &keys {
                    let reset = Check::of(Op::Reset).charge(key.as_str(), &rich, 0);
                    assert!(redis.decide(&reset).await.unwrap().allowed());
                }
                let take =
                    Check::of(Op::Take).charge(&keys[0], &rich, 6).charge(&keys[1], &poor, 6);
                let taken = redis.decide(&take).await.unwrap();
                assert!(
                    taken.allowed() && taken.charges().iter().all(|charge| charge.granted == 4),
                    "{kind}: {taken:?}"
                );
                assert_eq!(left(&redis, &keys[0], &rich).await, 5, "{kind}");
                assert_eq!(left(&redis, &keys[1], &poor).await, 0, "{kind}");
                // The smaller limit is called first. If the larger has less left, the surplus is
                // given back.
                for key in &keys {
                    let reset = Check::of(Op::Reset).charge(key.as_str(), &rich, 0);
                    assert!(redis.decide(&reset).await.unwrap().allowed());
                }
                assert!(
                    redis.decide(&Check::new().charge(&keys[0], &rich, 7)).await.unwrap().allowed()
                );
                let taken = redis.decide(&take).await.unwrap();
                assert!(
                    taken.allowed() && taken.charges().iter().all(|charge| charge.granted == 2),
                    "{kind}: {taken:?}"
                );
                assert_eq!(left(&redis, &keys[0], &rich).await, 0, "{kind}");
                assert_eq!(left(&redis, &keys[1], &poor).await, 2, "{kind}");
                let refund = Check::of(Op::Refund).charge(&keys[0], &rich, 4);
                assert_eq!(redis.decide(&refund).await.unwrap().granted(), 4, "{kind}");
                assert!(
                    redis.decide(&Check::new().charge(&keys[1], &poor, 2)).await.unwrap().allowed()
                );
                // One has nothing left: none gives, and each reports whether it would have.
                let take =
                    Check::of(Op::Take).charge(&keys[0], &rich, 6).charge(&keys[1], &poor, 6);
                let take = take.charge(&keys[2], &empty, 6);
                let denied = redis.decide(&take).await.unwrap();
                let would: Vec<bool> =
                    denied.charges().iter().map(|charge| charge.allowed).collect();
                assert_eq!((denied.allowed(), would), (false, vec![true, false, true]), "{kind}");
                assert_eq!(left(&redis, &keys[0], &rich).await, 4, "{kind}");
                assert_eq!(left(&redis, &keys[2], &empty).await, 1, "{kind}");
                // Without an id, a give-back ends the newest leases, on both sides.
                let refund =
                    Check::of(Op::Refund).charge(&keys[0], &rich, 3).charge(&keys[1], &poor, 3);
                let back = redis.decide(&refund).await.unwrap();
                assert!(
                    back.charges().iter().all(|charge| charge.granted == 3),
                    "{kind}: {back:?}"
                );
                assert_eq!(left(&redis, &keys[0], &rich).await, 7, "{kind}");
                assert_eq!(left(&redis, &keys[1], &poor).await, 3, "{kind}");
            }
        });
    });
}

/// A repeated call under the same id takes nothing again, and gives nothing back.
#[test]
fn taking_again_under_the_same_id_changes_nothing() {
    on_shared(|cluster| {
        runtime().block_on(async {
            let redis = at(&cluster.url()).namespace("take-again").build().unwrap();
            for kind in ["concurrent ttl 1h", "/1000d window", "/1000d log"] {
                let [rich, poor] =
                    [9, 4].map(|amount| limits(&format!("{amount} {kind}").replace(" /", "/")));
                let keys = one_per_master(cluster, &redis, &rich, kind).await;
                for key in &keys {
                    let reset = Check::of(Op::Reset).charge(key.as_str(), &rich, 0);
                    assert!(redis.decide(&reset).await.unwrap().allowed());
                }
                let take = Check::of(Op::Take)
                    .charge(&keys[0], &rich, 6)
                    .charge(&keys[1], &poor, 6)
                    .with_id(Id(7));
                for round in 0..3 {
                    assert!(redis.decide(&take).await.unwrap().allowed(), "{kind}, {round}");
                    assert_eq!(left(&redis, &keys[0], &rich).await, 5, "{kind}, {round}");
                    assert_eq!(left(&redis, &keys[1], &poor).await, 0, "{kind}, {round}");
                }
            }
        });
    });
}

/// An id of zero is no id: two calls with it are charged twice.
#[test]
fn an_id_of_zero_is_no_id() {
    on_shared(|cluster| {
        runtime().block_on(async {
            let redis = at(&cluster.url()).namespace("id-zero").build().unwrap();
            for limit in ["9 concurrent ttl 1h", "9/1000d window"] {
                let limits = limits(limit);
                let keys = one_per_master(cluster, &redis, &limits, limit).await;
                let before = left(&redis, &keys[0], &limits).await;
                let check = Check::new()
                    .charge(&keys[0], &limits, 1)
                    .charge(&keys[1], &limits, 1)
                    .with_id(Id(0));
                for round in 1..=3 {
                    assert!(redis.decide(&check).await.unwrap().allowed(), "{limit}");
                    assert_eq!(left(&redis, &keys[0], &limits).await, before - round, "{limit}");
                }
            }
        });
    });
}

/// A slot without an answer is no denial: the others give back their charges, even under a limit
/// that counts denials.
#[test]
fn no_answer_from_one_slot_charges_no_other() {
    on_shared(|cluster| {
        runtime().block_on(async {
            let redis = at(&cluster.url()).namespace("no-answer").build().unwrap();
            for limit in ["9/1000d window count rejected", "9/1000d log count rejected", "9/h"] {
                let limits = limits(limit);
                let keys = one_per_master(cluster, &redis, &limits, limit).await;
                let before = left(&redis, &keys[0], &limits).await;
                // Another program has replaced the state of the second by a list.
                let names = cluster
                    .nodes()
                    .iter()
                    .filter_map(|node| node.try_command(&["KEYS", "tg1:*"]).ok());
                let end = format!(":{}", keys[1]);
                let broken: Vec<String> = names
                    .flat_map(|names| {
                        names.array().iter().map(|name| name.text().to_owned()).collect::<Vec<_>>()
                    })
                    .collect();
                let broken = broken.iter().find(|name| name.ends_with(&end)).unwrap();
                let node = cluster.master_of(cluster.slot_of(broken));
                node.command(&["DEL", broken]);
                node.command(&["RPUSH", broken, "x"]);
                let check = Check::new().charge(&keys[0], &limits, 1).charge(&keys[1], &limits, 1);
                for _ in 0..3 {
                    assert!(redis.decide(&check).await.is_err(), "{limit}");
                    assert_eq!(left(&redis, &keys[0], &limits).await, before, "{limit}");
                }
                node.command(&["DEL", broken]);
            }
        });
    });
}

/// Sixteen concurrent tasks: the limits of each user and of all together allow exactly their
/// amount, and no unit that a denied check gave back is lost.
#[test]
fn concurrent_checks_never_exceed_a_limit() {
    const USERS: usize = 40;
    const TASKS: u64 = 16;
    const ASKS: u64 = 200;
    const TOTAL: u64 = 1_000;
    const PER_USER: u64 = 60;
    let kinds = [
        format!("1/h burst {PER_USER}"),
        format!("{PER_USER}/1000d window"),
        format!("{PER_USER}/1000d estimate"),
        format!("{PER_USER}/1000d sliding"),
        format!("{PER_USER}/1000d log"),
    ];
    on_shared(|cluster| {
        let runtime = runtime();
        let per_user: Arc<Vec<Limits>> = Arc::new(kinds.iter().map(|kind| limits(kind)).collect());
        let for_all = limits(&format!("{TOTAL}/1000d window"));
        let admitted: Arc<Vec<AtomicU64>> =
            Arc::new((0..USERS).map(|_| AtomicU64::new(0)).collect());
        let redis =
            runtime.block_on(async { at(&cluster.url()).namespace("concurrent").build() }).unwrap();
        let tasks: Vec<_> = (0..TASKS)
            .map(|task| {
                let (redis, per_user, for_all) =
                    (redis.clone(), Arc::clone(&per_user), for_all.clone());
                let admitted = Arc::clone(&admitted);
                runtime.spawn(async move {
                    let mut random = Random(task);
                    for _ in 0..ASKS {
                        let user = usize::try_from(random.below(USERS as u64)).unwrap();
                        let key = format!("user:{user}");
                        let check = Check::new().charge(&key, &per_user[user % per_user.len()], 1);
                        let check = check.charge("for_all", &for_all, 1);
                        if redis.decide(&check).await.unwrap().allowed() {
                            admitted[user].fetch_add(1, Ordering::Relaxed);
                        }
                    }
                })
            })
            .collect();
        tasks.into_iter().for_each(|task| runtime.block_on(task).unwrap());
        let sum = || admitted.iter().map(|count| count.load(Ordering::Relaxed)).sum::<u64>();
        assert!(sum() <= TOTAL, "{} admitted", sum());
        runtime.block_on(async {
            // A check may have been denied because another held a unit briefly. Now the rest is
            // allowed, one check at a time.
            for user in (0..USERS).cycle().take(USERS * 60) {
                let key = format!("user:{user}");
                let check = Check::new().charge(&key, &per_user[user % per_user.len()], 1);
                let check = check.charge("for_all", &for_all, 1);
                if !redis.decide(&check).await.unwrap().allowed() {
                    if left(&redis, "for_all", &for_all).await == 0 {
                        break;
                    }
                    continue;
                }
                admitted[user].fetch_add(1, Ordering::Relaxed);
            }
            assert_eq!(sum(), TOTAL);
            assert_eq!(left(&redis, "for_all", &for_all).await, 0);
        });
        for (user, count) in admitted.iter().enumerate() {
            let count = count.load(Ordering::Relaxed);
            assert!(count <= PER_USER, "user {user}: {count}");
            let limits = &per_user[user % per_user.len()];
            // A bucket gives back only what cannot have drained; the rest drains in microseconds.
            wait_until("the bucket has drained the last moments", Duration::from_secs(5), || {
                runtime.block_on(left(&redis, &format!("user:{user}"), limits)) == PER_USER - count
                    || !kinds[user % kinds.len()].contains("burst")
            });
            let left = runtime.block_on(left(&redis, &format!("user:{user}"), limits));
            assert_eq!(left, PER_USER - count, "user {user}, {}", kinds[user % kinds.len()]);
        }
        assert_eq!(redis.stats().regressions, 0, "nothing was lost, so nothing may be restored");
    });
}

/// Every call declares its keys, all of one slot.
#[test]
fn no_call_touches_what_it_did_not_declare() {
    on_shared(|cluster| {
        for node in cluster.nodes() {
            // Scripts that declare no keys may be allowed to cross slots; this one declares them.
            let reply = node.command(&["CONFIG", "GET", "*cross-slot*"]);
            assert!(
                matches!(&reply, Reply::Array(found) if found.iter().all(|word| word != &Reply::Text("yes".into())))
            );
        }
        let runtime = runtime();
        let redis =
            runtime.block_on(async { at(&cluster.url()).namespace("declared").build() }).unwrap();
        let all =
            limits("9/h; 9/h window; 9/h sliding; 9/h estimate; 9/h log; 9 concurrent ttl 1h");
        for op in [
            Op::Check,
            Op::Peek,
            Op::Take,
            Op::Debit,
            Op::Refund,
            Op::Reset,
            Op::Settle,
            Op::Release,
            Op::Book { max_wait_us: 1 },
            Op::Unbook { idle_at: tidegate::Timestamp::EPOCH },
        ] {
            for key in 0..20 {
                let (one, other) = (format!("one:{key}"), format!("other:{key}"));
                for id in [None, Some(tidegate::Id(7))] {
                    let check = Check::of(op).charge(&one, &all, 1).charge(&other, &all, 1);
                    let check = if let Some(id) = id { check.with_id(id) } else { check };
                    let _ = runtime
                        .block_on(redis.decide(&check))
                        .unwrap_or_else(|error| panic!("{op:?}: {error}"));
                }
            }
        }
    });
}
