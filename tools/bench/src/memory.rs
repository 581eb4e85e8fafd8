//! Decisions in memory.

use std::fmt::Write;
use std::hint::black_box;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tidegate::{Limit, ManualClock, Memory};

use crate::contenders::{
    Contender, ENDLESS, Flat16, Governor, GovernorWithoutClock, Nothing, SHORT, Tidegate,
};

const ROUNDS: usize = 11;
const BATCH: usize = 16;

fn name(key: usize) -> String {
    format!("user:{key:08}")
}

/// As many keys as one thread holds at a time: their text stays in the cache, as that of a request
/// which has just been read does. From a longer list it would have to come from memory, and how
/// much of that the processor guesses differs from one contender to the other.
const HELD: usize = 1000;

/// Keys in an order that no prefetcher guesses, written into the same memory again and again.
struct Keys {
    state: u64,
    among: usize,
    held: Vec<(String, u64)>,
}

impl Keys {
    fn new(among: usize, seed: u64) -> Self {
        Keys { state: seed, among, held: vec![(name(0), 1); HELD] }
    }

    fn next(&mut self) -> &[(String, u64)] {
        for (key, _) in &mut self.held {
            self.state = self
                .state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            let number = ((u128::from(self.state) * self.among as u128) >> 64) as usize;
            key.clear();
            write!(key, "user:{number:08}").expect("a string");
        }
        &self.held
    }
}

/// All threads begin at the same time, as nearly as they can, and none is asleep then.
struct Together {
    arrived: AtomicUsize,
    threads: usize,
}

impl Together {
    fn wait(&self) {
        let turn = self.arrived.fetch_add(1, Ordering::AcqRel) / self.threads;
        while self.arrived.load(Ordering::Acquire) / self.threads == turn {
            std::hint::spin_loop();
        }
    }
}

/// Nanoseconds per decision: what the slowest thread took for its keys, over the keys of all
/// threads.
fn round(contender: &dyn Contender, keys: &mut [Keys], times: usize, many: bool) -> f64 {
    let together = Together { arrived: AtomicUsize::new(0), threads: keys.len() };
    let decisions = keys.len() * times * HELD;
    let longest = std::thread::scope(|scope| {
        let threads: Vec<_> = keys
            .iter_mut()
            .map(|keys| {
                let together = &together;
                scope.spawn(move || {
                    let mut allowed = Vec::new();
                    let mut took = Duration::ZERO;
                    for _ in 0..times {
                        let keys = keys.next();
                        together.wait();
                        let start = Instant::now();
                        if many {
                            for batch in keys.chunks(BATCH) {
                                black_box(contender.check_many(batch, &mut allowed));
                            }
                        } else {
                            for (key, _) in keys {
                                black_box(contender.check(key));
                            }
                        }
                        took += start.elapsed();
                    }
                    took
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).max().expect("a thread")
    });
    longest.as_nanos() as f64 / decisions as f64
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

pub fn run(args: &[&str]) {
    let sizes: Vec<usize> =
        args.iter().filter_map(|arg| arg.parse::<f64>().ok()).map(|n| n as usize).collect();
    let sizes = if sizes.is_empty() { vec![1_000, 1_000_000] } else { sizes };
    println!(
        "ns per decision (wall time / decisions over all threads), median of {ROUNDS} interleaved rounds"
    );
    // Few keys use up their burst within the first rounds and are denied from then on, and a denial
    // is cheaper than a charge: so they are measured once more with a burst that lasts.
    let lots = |keys| if keys < 100_000 { &[SHORT, ENDLESS][..] } else { &[ENDLESS] };
    for (keys, burst) in
        sizes.into_iter().flat_map(|keys| lots(keys).iter().map(move |burst| (keys, *burst)))
    {
        let (ours, governor, flat) = (
            Tidegate::with_burst(keys, burst),
            Governor::with_burst(burst),
            Flat16::with_burst(keys, burst),
        );
        let contenders: [&dyn Contender; 4] = [&ours, &governor, &flat, &Nothing];
        for contender in contenders {
            for key in 0..keys {
                contender.check(&name(key));
            }
        }
        for threads in [1, 2] {
            let mut times = vec![Vec::new(); contenders.len() + 2];
            for turn in 0..ROUNDS {
                let all = |thread| Keys::new(keys, (turn * 7 + thread + 1) as u64 * 0x9e37_79b9);
                let mut measure = |place: usize, contender: &dyn Contender, many| {
                    let mut all: Vec<_> = (0..threads).map(all).collect();
                    times[place].push(round(contender, &mut all, 500, many));
                };
                for (place, contender) in contenders.iter().enumerate() {
                    measure(place, *contender, false);
                }
                measure(contenders.len(), &ours, true);
                measure(contenders.len() + 1, &flat, true);
            }
            let medians: Vec<f64> = times.into_iter().map(median).collect();
            let rival = medians[1];
            let what = if burst == SHORT { "denied" } else { "allowed" };
            println!("\n{keys} keys, {threads} thread(s), {what}");
            let labels = [
                "tidegate",
                "governor",
                "bound: flat16",
                "the loop alone",
                "tidegate, batches of 16",
                "bound: flat16, batches of 16",
            ];
            for (label, ns) in labels.iter().zip(&medians) {
                println!(
                    "  {label:<29} {ns:>8.1} ns   governor / it = {:>5.2}   it / flat16 = {:>5.2}",
                    rival / ns,
                    ns / medians[2]
                );
            }
        }
    }
}

fn rss() -> usize {
    let status = std::fs::read_to_string("/proc/self/statm").expect("linux");
    status.split(' ').nth(1).and_then(|pages| pages.parse::<usize>().ok()).expect("a number") * 4096
}

/// Resident bytes per live key, the whole process counted.
pub fn bytes(args: &[&str]) {
    let keys = args.get(1).and_then(|arg| arg.parse::<f64>().ok()).unwrap_or(1e6) as usize;
    let (ours, governor) = (Tidegate::new(keys), Governor::new());
    let contender: &dyn Contender =
        if args.first() == Some(&"governor") { &governor } else { &ours };
    let before = rss();
    for key in 0..keys {
        contender.check(&name(key));
    }
    let used = rss() - before;
    // While many millions of keys are filled in, the first become idle again and make room.
    let kept = if contender.name() == "tidegate" { ours.memory().len() } else { keys };
    println!(
        "{} {kept} keys kept: {:.1} resident bytes per key",
        contender.name(),
        used as f64 / kept as f64
    );
    if contender.name() == "tidegate" {
        println!(
            "  of which allocated in tables: {:.1}",
            ours.memory().allocated_bytes() as f64 / kept as f64
        );
    }
}

/// The slowest single decision while a million keys fill and expire. Whatever else the machine does
/// makes some of five million slow, so each is followed by doing nothing for as long: what becomes
/// slow there is not ours. What is ours is there in every round, so that the best round is the one
/// to look at.
pub fn slowest() {
    const ROUNDS: usize = 5;
    let mut best = Duration::MAX;
    for number in 1..=ROUNDS {
        let (decisions, nothing, kept) = slowest_of_a_round();
        println!(
            "round {number}: decisions {decisions}; nothing for as long {nothing}; {kept} keys kept"
        );
        best = best.min(decisions.slowest);
    }
    println!("slowest of 5e6 decisions in the best of {ROUNDS} rounds: {best:?}");
}

#[derive(Default)]
struct Slowest {
    slowest: Duration,
    over_a_millisecond: usize,
}

impl Slowest {
    fn count(&mut self, took: Duration) {
        self.slowest = self.slowest.max(took);
        self.over_a_millisecond += usize::from(took > Duration::from_millis(1));
    }
}

impl std::fmt::Display for Slowest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "at most {:?}, {} above 1 ms", self.slowest, self.over_a_millisecond)
    }
}

fn slowest_of_a_round() -> (Slowest, Slowest, usize) {
    let clock = ManualClock::new();
    let memory = Memory::builder().clock(clock.clone()).build();
    let limit: Limit = "10/s".parse().expect("a limit");
    let (mut decisions, mut nothing) = (Slowest::default(), Slowest::default());
    for wave in 0..5 {
        for key in 0..1_000_000 {
            let name = format!("user:{wave}:{key}");
            if key % 1000 == 0 {
                clock.advance(Duration::from_millis(1));
            }
            let start = Instant::now();
            black_box(memory.check(&name, &limit, 1));
            let took = start.elapsed();
            decisions.count(took);
            // Not as long as one that was slow by accident: that would make up for the accident
            // with a calm time.
            let long = took.min(Duration::from_micros(10));
            let start = Instant::now();
            while start.elapsed() < long {
                std::hint::spin_loop();
            }
            nothing.count(start.elapsed());
        }
    }
    (decisions, nothing, memory.len())
}

/// A fixed amount of work for `valgrind --tool=callgrind --toggle-collect='*on_purpose*'`: ten
/// thousand decisions, written into a loop as a program would write them, on a clock that stands
/// still.
pub fn instructions(args: &[&str]) {
    let keys = 1000;
    let names: Vec<String> = (0..keys).map(name).collect();
    let known = |contender: &dyn Contender| {
        names.iter().for_each(|name| _ = black_box(contender.check(name)))
    };
    let who = args.first().copied().unwrap_or("tidegate");
    match who {
        "governor" => {
            let governor = GovernorWithoutClock::new();
            known(&governor);
            measured_on_purpose(&names, |name| governor.ask(name));
        }
        "flat16" => {
            let flat = Flat16::without_clock(keys);
            known(&flat);
            measured_on_purpose(&names, |name| flat.ask(name));
        }
        _ => {
            let ours = Tidegate::without_clock(keys);
            known(&ours);
            measured_on_purpose(&names, |name| ours.ask(name));
        }
    }
    println!("{who}: {} decisions on {keys} keys", 10 * names.len());
}

#[inline(never)]
fn measured_on_purpose(names: &[String], ask: impl Fn(&String) -> bool) {
    for _ in 0..10 {
        for name in names {
            black_box(ask(name));
        }
    }
}

/// Parts of a decision in a loop, to see what each costs.
pub fn parts() {
    let keys = 1000;
    let names: Vec<String> = (0..keys).map(name).collect();
    let time = |label: &str, f: &dyn Fn(&String)| {
        let mut times = Vec::new();
        for _ in 0..15 {
            let start = Instant::now();
            for _ in 0..300 {
                for name in &names {
                    f(name);
                }
            }
            times.push(start.elapsed().as_nanos() as f64 / 300_000.0);
        }
        println!("{label:<32} {:>6.1} ns", median(times));
    };
    let (ours, still) = (Tidegate::new(keys), Tidegate::without_clock(keys));
    let (governor, flat) = (Governor::new(), Flat16::new(keys));
    let clock = tidegate::SystemClock::new();
    let raw = quanta::Clock::new();
    time("nothing", &|name| {
        black_box(name);
    });
    time("clock", &|_| {
        black_box(clock.now());
    });
    time("quanta raw", &|_| {
        black_box(raw.raw());
    });
    time("tidegate", &|name| {
        black_box(ours.check(name));
    });
    time("tidegate without clock", &|name| {
        black_box(still.check(name));
    });
    time("governor", &|name| {
        black_box(governor.check(name));
    });
    time("flat16", &|name| {
        black_box(flat.check(name));
    });
    let mutex = parking_lot::Mutex::new(0u64);
    time("parking_lot lock+unlock", &|_| {
        *mutex.lock() += 1;
    });
    let mutex = std::sync::Mutex::new(0u64);
    time("std lock+unlock", &|_| {
        *mutex.lock().unwrap() += 1;
    });
    // What the memory store's own lock does without contention.
    let taken = std::sync::atomic::AtomicBool::new(false);
    time("taken and given back by a store", &|_| {
        use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
        let _ = black_box(taken.compare_exchange(false, true, Acquire, Relaxed));
        taken.store(false, Release);
    });
}
