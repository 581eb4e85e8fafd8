//! `cargo xtask sim`: runs seeds, and tells of the first that fails.

use std::collections::BTreeMap;
use std::io::Write;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use tidegate_sim::Failure;
use tidegate_sim::plan::Plan;
use tidegate_sim::redis::Redis;
use tidegate_sim::sabotage::Sabotage;
use tidegate_sim::shrink::shrink;
use tidegate_sim::world::run;

const HELP: &str = "\
cargo xtask sim [--seeds N] [--from S] [--seed S] [--verbose] [--sabotage NAME]

  --seeds N        runs so many seeds (default 2000), on all processors, each seed on one thread
  --from S         begins with this seed (default 0)
  --seed S         runs one seed
  --verbose        tells everything that happens in it
  --all            goes on after a seed that fails, and lists at the end which seeds broke which law
  --sabotage NAME  puts in a fault on purpose, which must be found: stopped-clock, whole-share, replay, forget-writes,
                   hide-fallback, lose-answers, leave-a-hole, wait-for-the-clock
";

/// Prints, also if the reader closes the pipe.
macro_rules! say {
    ($($word:tt)*) => {
        let _ = writeln!(std::io::stdout(), $($word)*);
    };
}

struct Args {
    seeds: u64,
    from: u64,
    seed: Option<u64>,
    verbose: bool,
    all: bool,
    sabotage: Option<(String, Sabotage)>,
}

fn args() -> Result<Args, String> {
    let mut args =
        Args { seeds: 2000, from: 0, seed: None, verbose: false, all: false, sabotage: None };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or(format!("{word}: expected a value\n\n{HELP}"));
        let number =
            |text: String| text.parse::<u64>().map_err(|_| format!("{text:?}: expected a number"));
        match &*word {
            "--seeds" => args.seeds = number(value()?)?,
            "--from" => args.from = number(value()?)?,
            "--seed" => args.seed = Some(number(value()?)?),
            "--verbose" => args.verbose = true,
            "--all" => args.all = true,
            "--sabotage" => {
                let name = value()?;
                let sabotage = Sabotage::named(&name)
                    .ok_or(format!("--sabotage {name}: expected one of these\n\n{HELP}"))?;
                args.sabotage = Some((name, sabotage));
            }
            "--help" | "-h" => return Err(HELP.into()),
            other => return Err(format!("{other}: expected one of these\n\n{HELP}")),
        }
    }
    Ok(args)
}

fn main() -> ExitCode {
    let args = match args() {
        Ok(args) => args,
        Err(text) => {
            eprintln!("{text}");
            return ExitCode::FAILURE;
        }
    };
    let sabotage = args.sabotage.as_ref().map(|(_, sabotage)| *sabotage);
    if let Some(seed) = args.seed {
        let plan = Plan::new(seed);
        let mut redis = Redis::new();
        let outcome = run(&plan, &mut redis, sabotage, args.verbose);
        if args.verbose {
            tell(&outcome.timeline);
        }
        say!(
            "seed {seed}: {} answers ({:?} by the store, near, alone), hash {:016x}",
            outcome.answered,
            outcome.sources,
            outcome.hash
        );
        return match outcome.failure {
            Some(failure) => {
                report(seed, &plan, &failure, &args, &mut redis);
                ExitCode::FAILURE
            }
            None => ExitCode::SUCCESS,
        };
    }
    let start = Instant::now();
    let (next, stop) = (AtomicU64::new(args.from), AtomicBool::new(false));
    let failed: Mutex<Vec<(u64, Failure)>> = Mutex::default();
    let totals = [const { AtomicU64::new(0) }; 4];
    let threads = std::thread::available_parallelism().map_or(2, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                let mut redis = Redis::new();
                while !stop.load(Ordering::Relaxed) {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= args.from + args.seeds {
                        return;
                    }
                    let outcome = run(&Plan::new(seed), &mut redis, sabotage, false);
                    totals[3].fetch_add(outcome.answered, Ordering::Relaxed);
                    for (total, own) in totals.iter().zip(outcome.sources) {
                        total.fetch_add(own, Ordering::Relaxed);
                    }
                    if let Some(failure) = outcome.failure {
                        stop.store(!args.all, Ordering::Relaxed);
                        failed
                            .lock()
                            .unwrap_or_else(std::sync::PoisonError::into_inner)
                            .push((seed, failure));
                    }
                }
            });
        }
    });
    let [store, resilient, alone, answered] = totals.map(AtomicU64::into_inner);
    let mut failed = failed.into_inner().unwrap_or_default();
    failed.sort_by_key(|(seed, _)| *seed);
    if args.all {
        let mut laws: BTreeMap<&str, Vec<u64>> = BTreeMap::new();
        failed.iter().for_each(|(seed, failure)| laws.entry(failure.law).or_default().push(*seed));
        for (law, seeds) in laws {
            say!("{law}: {} seeds, {:?}", seeds.len(), &seeds[..seeds.len().min(12)]);
        }
    } else if let Some((seed, failure)) = failed.into_iter().next() {
        report(seed, &Plan::new(seed), &failure, &args, &mut Redis::new());
        return ExitCode::FAILURE;
    }
    let told = if args.all { "" } else { ", nothing failed" };
    say!(
        "{} seeds, {answered} answers ({store} by the store, {resilient} without it, {alone} alone){told}, {:.1} s",
        args.seeds,
        start.elapsed().as_secs_f64()
    );
    ExitCode::SUCCESS
}

/// Tells of a seed that failed: what, how to see it again, the shortest list of faults, and what
/// happened.
fn report(seed: u64, plan: &Plan, failure: &Failure, args: &Args, redis: &mut Redis) {
    say!(
        "seed {seed} fails: {}\n  {} (at {:.3} ms)",
        failure.law,
        failure.text,
        failure.at as f64 / 1000.0
    );
    let sabotage =
        args.sabotage.as_ref().map(|(name, _)| format!(" --sabotage {name}")).unwrap_or_default();
    say!("\nto see it again: cargo xtask sim --seed {seed}{sabotage} --verbose\n");
    let sabotage = args.sabotage.as_ref().map(|(_, sabotage)| *sabotage);
    let short = shrink(plan, failure, redis, sabotage);
    say!(
        "{} nodes{}, faults: {} of {} are enough",
        plan.nodes,
        if plan.told_nodes { ", who know that" } else { "" },
        short.faults.len(),
        plan.faults.len()
    );
    for fault in &short.faults {
        say!("  {fault}");
    }
    for rule in &plan.rules {
        say!("  {}: {} {:?}", rule.name, rule.limits, rule.policy);
    }
    let again = run(&short, redis, sabotage, true);
    if let Some(failure) = &again.failure {
        say!("\nwith these: {}\n  {}\n\nthe last that happened:", failure.law, failure.text);
    }
    let from = again.timeline.len().saturating_sub(60);
    tell(&again.timeline[from..]);
}

fn tell(timeline: &[(u64, String)]) {
    for (at, text) in timeline {
        say!("{:>12.3}  {text}", *at as f64 / 1000.0);
    }
}
