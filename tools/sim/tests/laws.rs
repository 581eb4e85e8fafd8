//! What the simulator is worth: it does the same every time, finds what was put in on purpose, and
//! tells it shortly.

use tidegate_sim::Failure;
use tidegate_sim::plan::Plan;
use tidegate_sim::redis::Redis;
use tidegate_sim::sabotage::Sabotage;
use tidegate_sim::shrink::shrink;
use tidegate_sim::world::run;

#[test]
fn a_seed_does_the_same_every_time() {
    let seeds = || 0..12_u64;
    let mut redis = Redis::new();
    let first: Vec<_> = seeds().map(|seed| run(&Plan::new(seed), &mut redis, None, true)).collect();
    // On another thread, another server, in another order.
    let again = std::thread::spawn(move || {
        let mut redis = Redis::new();
        let mut again: Vec<_> =
            seeds().rev().map(|seed| run(&Plan::new(seed), &mut redis, None, true)).collect();
        again.reverse();
        again
    });
    let again = again.join().unwrap();
    for (seed, (first, again)) in first.iter().zip(&again).enumerate() {
        let differs =
            first.timeline.iter().zip(&again.timeline).position(|(one, other)| one != other);
        assert_eq!(
            differs.map(|at| (&first.timeline[at], &again.timeline[at])),
            None,
            "seed {seed}"
        );
        assert_eq!((first.hash, first.answered), (again.hash, again.answered), "seed {seed}");
    }
    assert!(first.iter().map(|one| one.answered).sum::<u64>() > 3000);
}

/// The first seed that finds it.
fn found(sabotage: Sabotage, most: u64, redis: &mut Redis) -> Option<(u64, Failure)> {
    (0..most).find_map(|seed| {
        run(&Plan::new(seed), redis, Some(sabotage), false).failure.map(|failure| (seed, failure))
    })
}

#[test]
fn what_is_put_in_on_purpose_is_found() {
    let mut redis = Redis::new();
    for (name, sabotage) in Sabotage::ALL {
        let Some((seed, failure)) = found(*sabotage, 300, &mut redis) else {
            panic!("{name} was not found in 300 seeds")
        };
        eprintln!("{name}: found by seed {seed}: {}", failure.law);
        assert!(
            sabotage.laws().contains(&failure.law),
            "{name} was found by another law: {failure:?}"
        );
    }
}

#[test]
fn the_list_of_faults_is_made_short() {
    let mut redis = Redis::new();
    let (seed, failure) = found(Sabotage::Replay, 300, &mut redis).expect("it is found");
    let plan = Plan::new(seed);
    let short = shrink(&plan, &failure, &mut redis, Some(Sabotage::Replay));
    assert!(short.faults.len() <= 2, "{:?}", short.faults);
    let again = run(&short, &mut redis, Some(Sabotage::Replay), true);
    assert_eq!(again.failure.map(|failure| failure.law), Some(failure.law));
    assert!(again.timeline.iter().any(|(_, text)| text.starts_with("FAULT")));
}
