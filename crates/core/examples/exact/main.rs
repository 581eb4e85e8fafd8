//! Verifies as many random decisions as you have time for, each against a checker that knows
//! nothing of the core.
//!
//! ```text
//! cargo run --release -p tidegate-core --example exact -- --ops 1e9 [--algorithm bucket] [--seed 1]
//! ```
//! A checker is O(1) amortised and keeps its own state: scaled arrival times, counters per window,
//! rings of what was admitted. It says what must be allowed and what must be left, and asserts the
//! bound that the algorithm promises. The first difference is printed with its seed and step, and
//! ends the run with status 1.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "it is a program")]
#![allow(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "it times itself; the core does not"
)]
#![allow(clippy::cast_possible_truncation, reason = "random words are cut to size on purpose")]

mod checkers;

use std::collections::{BTreeMap, VecDeque};
use std::process::ExitCode;
use std::time::Instant;

use tidegate_core::algorithm::{Kernel, bucket::Level, estimate::Pair, window::Count};
use tidegate_core::{
    Algorithm, Charge, Limit, Op, Record, Retry, Timestamp, Verdict, admit, decide, report,
};
use tidegate_trace::Random;

use checkers::{
    Answer, Arrival, Checker, Deadlines, Epoch, Every, FirstHit, Ring, Steps, TwoWindows,
};

/// The number of keys, which are checked in turn.
const KEYS: usize = 64;

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let (mut ops, mut only, mut seed) = (1_000_000, None, 1);
    while let Some(argument) = arguments.next() {
        let value = arguments.next().unwrap_or_default();
        let understood = match argument.as_str() {
            "--ops" => count(&value).map(|n| ops = n).is_some(),
            "--seed" => value.parse().map(|n| seed = n).is_ok(),
            "--algorithm" if value == "all" => true,
            "--algorithm" => {
                LIMITS.iter().any(|(name, _)| *name == value) && only.replace(value).is_none()
            }
            _ => false,
        };
        if !understood {
            eprintln!("usage: exact [--ops 1e9] [--algorithm NAME] [--seed S]");
            return ExitCode::from(2);
        }
    }
    for (name, limits) in
        LIMITS.iter().filter(|(name, _)| only.as_ref().is_none_or(|only| only == name))
    {
        match run(name, limits, ops, seed) {
            Ok(line) => println!("{line}"),
            Err(difference) => {
                eprintln!("{difference}");
                return ExitCode::FAILURE;
            }
        }
    }
    ExitCode::SUCCESS
}

/// `1000`, `1_000` or `1e9`.
fn count(text: &str) -> Option<u64> {
    let text = text.replace('_', "");
    match text.split_once(['e', 'E']) {
        Some((digits, zeros)) => {
            digits.parse::<u64>().ok()?.checked_mul(10_u64.checked_pow(zeros.parse().ok()?)?)
        }
        None => text.parse().ok(),
    }
}

/// What is run under each name. Periods are short, so that edges are met often; one of each is
/// coarse or large.
const LIMITS: [(&str, &[&str]); 7] = [
    (
        "bucket",
        &[
            "10/s",
            "7/min burst 3",
            "999983/day burst 10000000000",
            "1000000/s burst 100",
            "3/7us burst 2",
        ],
    ),
    ("window", &["10/s window", "3/7us window", "1000000000/day window"]),
    ("first-hit", &["10/s window from first hit", "3/7us window from first hit"]),
    (
        "sliding",
        &[
            "10/s sliding",
            "5/100us sliding step 7us",
            "240/h sliding step 1m lenient",
            "9/1ms sliding step 300us",
        ],
    ),
    ("estimate", &["10/s estimate", "3/7us estimate", "100000/day estimate"]),
    ("log", &["10/s log", "3/7us log", "100/min log"]),
    ("concurrent", &["10 concurrent ttl 1s", "3 concurrent ttl 7us"]),
];

fn run(name: &str, limits: &[&str], ops: u64, seed: u64) -> Result<String, String> {
    let limits: Vec<Limit> = limits.iter().map(|text| text.parse().expect("a limit")).collect();
    // Half of the keys of each limit take the fast path, if it has one.
    let mut keys: Vec<Key> =
        (0..KEYS).map(|key| Key::new(limits[key / 2 % limits.len()], key % 2 == 0)).collect();
    let mut random = Random(seed);
    let mut allowed = 0;
    let began = Instant::now();
    for step in 0..ops {
        let word = random.next();
        let key = &mut keys[word as usize % KEYS];
        let (now, cost) = key.draw(word >> 8);
        let got = key.decide(now, cost);
        let must = key.checker.ask(now, cost);
        let same = (got.allowed, got.remaining) == (must.allowed, must.left);
        if !same || !must.bounded || !key.keeps_its_word(&got, now, cost) {
            let Answer { allowed, left, bounded } = must;
            return Err(format!(
                "{name}: difference at step {step} of seed {seed}: {}, cost {cost} at {now}\n  got {got:?}\n  \
                 want allowed {allowed}, remaining {left}, bounded {bounded}; promised before: {:?}",
                key.limit, key.promise
            ));
        }
        allowed += u64::from(got.allowed);
        key.remember(now, cost, &got);
    }
    let ns = began.elapsed().as_nanos() / u128::from(ops.max(1));
    let denied = ops - allowed;
    Ok(format!(
        "{name:<10} {ops:>13} ops  {allowed:>13} allowed  {denied:>13} denied  {ns:>4} ns/op  0 differences"
    ))
}

/// The state of the core for one key: a record, or a small state for the fast path.
enum Kept {
    Record(Record),
    Bucket(Level),
    Window(Count),
    Estimate(Pair),
}

/// The fast path.
fn check<K: Kernel<State: Copy>>(
    limit: &Limit,
    kernel: &K,
    kept: &mut K::State,
    at: Timestamp,
    cost: u64,
) -> Verdict {
    let admitted = admit(limit, kernel, kept, at, cost);
    report(limit, kernel, admitted, cost)
}

/// What the last denial promised: this cost fits at this time and not before, if nothing is
/// taken until then.
#[derive(Clone, Copy, Debug)]
struct Promise {
    cost: u64,
    at: u64,
}

struct Key {
    limit: Limit,
    fast: bool,
    kept: Kept,
    checker: Box<dyn Checker>,
    now: u64,
    last: Verdict,
    promise: Option<Promise>,
}

impl Key {
    fn new(limit: Limit, fast: bool) -> Self {
        let algorithm = limit.algorithm();
        let (amount, period) = (algorithm.amount(), algorithm.period_us());
        let checker: Box<dyn Checker> = match *algorithm {
            Algorithm::Bucket(bucket) => Box::new(Arrival {
                amount: amount.into(),
                period: period.into(),
                burst: bucket.capacity.into(),
                grid: limit.grid_us(),
                arrival: 0,
                excess: 0,
                at: 0,
            }),
            Algorithm::Window(window) if window.from_first_hit => {
                Box::new(FirstHit { amount, period, start: 0, used: 0 })
            }
            Algorithm::Window(_) => Box::new(Epoch { amount, period, window: 0, used: 0 }),
            Algorithm::Sliding(sliding) => {
                let ring = (!sliding.lenient).then(|| Ring::new(amount, period));
                Box::new(Steps {
                    amount,
                    period,
                    step: sliding.step,
                    live: VecDeque::new(),
                    used: 0,
                    ring,
                })
            }
            Algorithm::Estimate(estimate) => Box::new(TwoWindows {
                amount,
                period,
                grid: estimate.grid,
                window: 0,
                previous: 0,
                current: 0,
            }),
            Algorithm::Log(_) => {
                Box::new(Every { ring: Ring::new(amount, period), live: VecDeque::new(), used: 0 })
            }
            Algorithm::Concurrent(_) => {
                Box::new(Deadlines { amount, ttl: period, live: BTreeMap::new(), used: 0 })
            }
        };
        let kept = match algorithm {
            Algorithm::Bucket(_) if fast => Kept::Bucket(Level::default()),
            Algorithm::Window(_) if fast => Kept::Window(Count::default()),
            Algorithm::Estimate(_) if fast => Kept::Estimate(Pair::default()),
            _ => Kept::Record(Record::default()),
        };
        Key {
            limit,
            fast,
            kept,
            checker,
            now: 1_700_000_000_000_000,
            last: Verdict::default(),
            promise: None,
        }
    }

    /// The next time and cost, close to the edges. At the last exact time the key starts anew.
    fn draw(&mut self, word: u64) -> (u64, u64) {
        let algorithm = self.limit.algorithm();
        let period = algorithm.period_us();
        let step = match algorithm {
            Algorithm::Sliding(sliding) => sliding.step,
            _ => (period / algorithm.amount()).max(1),
        };
        let (near, rest) = ((word >> 4) % 3, word >> 8);
        let around = |distance: u64| (distance + near).saturating_sub(1);
        let ahead = match word % 16 {
            0..5 => 0,
            5 => 1,
            6 => around(step),
            7 => around(period),
            8 => around(period - self.now % period),
            9 => around(step - self.now % step),
            10 | 11 => around(self.promise.map_or(0, |promise| promise.at - self.now)),
            12 => around(self.last.next_after_us),
            13 => around(self.last.reset_after_us),
            14 => rest % step,
            _ => rest % (2 * period),
        };
        if self.now + ahead > Timestamp::MAX.as_micros() {
            *self = Key::new(self.limit, self.fast);
            return (self.now, 1);
        }
        let cost = match (word >> 40) % 8 {
            0..4 => 1,
            4 => self.last.remaining,
            5 => self.last.remaining + 1,
            6 => (word >> 44) % (self.limit.capacity() + 2),
            _ => self.promise.map_or(0, |promise| promise.cost),
        };
        (self.now + ahead, cost)
    }

    fn decide(&mut self, now: u64, cost: u64) -> Verdict {
        let (limit, at) = (&self.limit, Timestamp::from_micros(now));
        match (&mut self.kept, limit.algorithm()) {
            (Kept::Bucket(level), Algorithm::Bucket(kernel)) => {
                check(limit, kernel, level, at, cost)
            }
            (Kept::Window(count), Algorithm::Window(kernel)) => {
                check(limit, kernel, count, at, cost)
            }
            (Kept::Estimate(pair), Algorithm::Estimate(kernel)) => {
                check(limit, kernel, pair, at, cost)
            }
            (Kept::Record(record), _) => {
                *decide(Op::Check, &mut [Charge::new(limit, record, cost)], at).binding()
            }
            _ => unreachable!("a state is made for its algorithm"),
        }
    }

    /// Checks the promise: the cost of the last denial fits from the promised time on, and until then
    /// its denials name the same time.
    fn keeps_its_word(&self, got: &Verdict, now: u64, cost: u64) -> bool {
        let promised = self.promise.filter(|promise| promise.cost == cost);
        match got.retry {
            Retry::Never => cost > self.limit.capacity(),
            Retry::Now => got.allowed && promised.is_none_or(|promise| now >= promise.at),
            Retry::After(wait) => {
                wait > 0 && promised.is_none_or(|promise| now + wait == promise.at)
            }
        }
    }

    fn remember(&mut self, now: u64, cost: u64, got: &Verdict) {
        self.now = now;
        self.last = *got;
        match got.retry {
            Retry::After(wait) => self.promise = Some(Promise { cost, at: now + wait }),
            Retry::Now if cost > 0 => self.promise = None,
            _ => self.promise = self.promise.filter(|promise| promise.at > now),
        }
    }
}
