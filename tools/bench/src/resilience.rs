//! Figures of what stands before a store: a real Redis that is stopped under load and goes on,
//! leases beside one round trip each, and ten times the load: `cargo xtask bench resilience
//! [REQUESTS_PER_SECOND]`.
//!
//! Each latency is printed beside that of the same load on a store in memory, which shows what the
//! machine itself adds.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tidegate::redis::Redis;
use tidegate::resilience::{BreakerState, Policy, Resilient, SyncMode};
use tidegate::{Check, Limits, Memory, Source, Store};
use tidegate_testkit::{Flavor, Server};

type Failure = Box<dyn std::error::Error>;

/// One answer: when it was requested, how long it took, and its source.
#[derive(Clone, Copy)]
struct Answer {
    asked: Instant,
    took: Duration,
    source: Option<Source>,
}

pub fn run(args: &[&str]) {
    let rate = args.first().map_or(Ok(20_000), |rate| rate.parse());
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime");
    let done = rate.map_err(Failure::from).and_then(|rate| runtime.block_on(all(rate)));
    if let Err(error) = done {
        eprintln!("resilience {}: {error}", args.join(" "));
        std::process::exit(1);
    }
}

async fn all(rate: u64) -> Result<(), Failure> {
    let server = Server::start(Flavor::Redis7);
    stopped(&server, rate).await?;
    leases(&server).await?;
    overload(&server).await?;
    Ok(())
}

async fn resilient(server: &Server) -> Result<Resilient, Failure> {
    let redis = Redis::builder(server.url().parse()?)
        .timeout(tidegate::resilience::DEFAULT_DEADLINE)
        .build()?;
    redis.prepare().await?;
    Ok(Resilient::builder(redis).nodes(1).build())
}

/// Asks `rate` times a second for so long, whatever the answers do.
async fn load(store: Arc<dyn Store>, rate: u64, lasts: Duration) -> Vec<Answer> {
    let answers = Arc::new(Mutex::new(Vec::new()));
    let limits: Arc<Limits> = Arc::new("1000000/s".parse().expect("a limit"));
    let (began, mut sent) = (Instant::now(), 0);
    let mut tick = tokio::time::interval(Duration::from_millis(1));
    let mut tasks = tokio::task::JoinSet::new();
    while began.elapsed() < lasts {
        tick.tick().await;
        let due = rate * u64::try_from(began.elapsed().as_micros()).unwrap_or(0) / 1_000_000;
        // What one tick has to ask, one after the other in a few tasks: a task each would measure
        // the spawning.
        while sent < due {
            let (store, limits, answers) =
                (Arc::clone(&store), Arc::clone(&limits), Arc::clone(&answers));
            let number = sent;
            sent += 1;
            tasks.spawn(async move {
                let (asked, key) = (Instant::now(), format!("user:{}", number % 1000));
                let decision = store.decide(&Check::new().charge(&key, &*limits, 1)).await;
                let source = decision.ok().map(|decision| decision.source());
                answers.lock().push(Answer { asked, took: asked.elapsed(), source });
            });
        }
        while tasks.try_join_next().is_some() {}
    }
    while tasks.join_next().await.is_some() {}
    std::mem::take(&mut *answers.lock())
}

fn percentile(answers: &[Answer], per_mille: usize) -> Duration {
    let mut took: Vec<Duration> = answers.iter().map(|answer| answer.took).collect();
    took.sort();
    took.get((took.len() * per_mille / 1000).min(took.len().saturating_sub(1)))
        .copied()
        .unwrap_or_default()
}

async fn stopped(server: &Server, rate: u64) -> Result<(), Failure> {
    let idle = load(Arc::new(Memory::new()), rate, Duration::from_secs(2)).await;
    println!("{rate} requests a second");
    println!(
        "  in memory, the same load   p50 {:?}  p99 {:?}  max {:?}",
        percentile(&idle, 500),
        percentile(&idle, 990),
        percentile(&idle, 1000)
    );
    let resilient = resilient(server).await?;
    let own = resilient.clone();
    let loading =
        tokio::spawn(async move { load(Arc::new(own), rate, Duration::from_secs(6)).await });
    tokio::time::sleep(Duration::from_secs(2)).await;
    let stop = Instant::now();
    tokio::task::block_in_place(|| server.stop_signal());
    let mut opened = None;
    while stop.elapsed() < Duration::from_secs(2) {
        if opened.is_none() && resilient.stats().breaker == BreakerState::Open {
            opened = Some(Instant::now());
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let opened = opened.unwrap_or_else(Instant::now);
    let go_on = Instant::now();
    server.continue_signal();
    let answers = loading.await?;
    let errors = answers.iter().filter(|answer| answer.source.is_none()).count();
    let of = |from: Instant, to: Instant| -> Vec<Answer> {
        answers.iter().copied().filter(|answer| answer.asked >= from && answer.asked < to).collect()
    };
    let (before, during) = (of(answers[0].asked, stop), of(stop, go_on));
    let open = of(opened, go_on);
    let after: Vec<Answer> =
        answers.iter().copied().filter(|answer| answer.asked >= go_on).collect();
    let back = after
        .iter()
        .filter(|answer| answer.source == Some(Source::Store))
        .map(|answer| answer.asked)
        .min();
    let last = after
        .iter()
        .filter(|answer| answer.source == Some(Source::Fallback))
        .map(|answer| answer.asked)
        .max();
    let line = |name: &str, answers: &[Answer]| {
        let (p50, p99, max) =
            (percentile(answers, 500), percentile(answers, 990), percentile(answers, 1000));
        println!("  {name:<26} p50 {p50:?}  p99 {p99:?}  max {max:?}  of {}", answers.len());
    };
    line("Redis answers", &before);
    line("stopped, all of it", &during);
    line("stopped, breaker open", &open);
    line("after it goes on", &after);
    println!(
        "  errors {errors}; breaker open {:?} after the stop",
        opened.saturating_duration_since(stop)
    );
    println!(
        "  first answer of Redis {:?} after it goes on, last one without it {:?}",
        back.map(|back| back - go_on),
        last.map(|last| last - go_on)
    );
    let alone = |answers: &[Answer]| {
        answers.iter().filter(|answer| answer.source == Some(Source::Fallback)).count()
    };
    let from = |ms: u64| {
        after
            .iter()
            .copied()
            .filter(move |answer| answer.asked >= go_on + Duration::from_millis(ms))
    };
    let late: Vec<Answer> = from(500).collect();
    println!(
        "  without it: {} before the stop, {} after it goes on, {} of them later than 500 ms",
        alone(&before),
        alone(&after),
        alone(&late)
    );
    println!("  {:?}", resilient.stats());
    Ok(())
}

async fn leases(server: &Server) -> Result<(), Failure> {
    println!("one hot key, one after the other, as long as it is allowed");
    // More patient than usual, so that a busy machine does not measure the breaker.
    let redis = Redis::builder(server.url().parse()?).timeout(Duration::from_secs(1)).build()?;
    redis.prepare().await?;
    let resilient = Resilient::builder(redis).deadline(Duration::from_secs(1)).nodes(1).build();
    let limits = [
        ("2000/h window", 2_000),
        ("2000/h", 2_000),
        ("100000/h window", 100_000),
        ("100000000/h window", 1_000_000),
    ];
    for (limit, most) in limits {
        let limits: Limits = limit.parse()?;
        let mut direct = 0.0;
        for sync in [SyncMode::Direct, SyncMode::Lease, SyncMode::Async] {
            // A key of its own for each, so that none is denied because of another.
            let name = format!("{limit} {}", sync.name());
            let policy = Policy { sync, ..Policy::default() };
            let before = resilient.stats();
            let (began, mut passed, mut wrong) = (Instant::now(), 0_u64, 0_u64);
            while passed < most && began.elapsed() < Duration::from_secs(2) {
                let decision = resilient
                    .decide(&Check::new().policy(policy).charge(&name, &limits, 1))
                    .await?;
                wrong += u64::from(decision.source() == Source::Fallback);
                if !decision.allowed() {
                    break;
                }
                passed += 1;
                if passed.is_multiple_of(256) {
                    tokio::task::yield_now().await;
                }
            }
            let rate = passed as f64 / began.elapsed().as_secs_f64();
            let calls = resilient.stats().calls - before.calls;
            // What is beyond the limit must be denied.
            let mut beyond = 0_u64;
            while passed + beyond < most * 2
                && passed == most
                && most == limits.as_slice()[0].capacity()
            {
                let decision = resilient
                    .decide(&Check::new().policy(policy).charge(&name, &limits, 1))
                    .await?;
                if !decision.allowed() {
                    break;
                }
                beyond += 1;
            }
            if sync == SyncMode::Direct {
                direct = rate;
            }
            println!(
                "  {limit:<20} {:<7} {rate:>9.0} a second, {:>6.1} times direct; {passed} passed, {calls} calls, {beyond} beyond the limit, {wrong} without an answer",
                sync.name(),
                rate / direct,
            );
        }
    }
    resilient.close().await;
    Ok(())
}

/// An answer that comes later is no use: the deadline and 5 ms.
const IN_TIME: Duration = Duration::from_millis(20);

/// How many answers a second come in time at this rate, and how many of them are the
/// store's.
async fn goodput(resilient: &Resilient, rate: u64) -> (u64, u64) {
    const SECONDS: u64 = 2;
    let answers = load(Arc::new(resilient.clone()), rate, Duration::from_secs(SECONDS)).await;
    let good = |of: &dyn Fn(&Answer) -> bool| {
        answers.iter().filter(|answer| answer.took <= IN_TIME && of(answer)).count() as u64
            / SECONDS
    };
    let (all, store) = (
        good(&|answer| answer.source.is_some()),
        good(&|answer| answer.source == Some(Source::Store)),
    );
    println!("  {rate:>7} offered   {all:>7} answered, {store:>6} of them by Redis");
    (all, store)
}

async fn overload(server: &Server) -> Result<(), Failure> {
    println!(
        "as much as it can do and ten times that, whatever the answers do; answers within 20 ms, a second"
    );
    let resilient = resilient(server).await?;
    let (mut best, mut peak) = (0, (0, 0));
    for rate in [5_000, 10_000, 20_000, 30_000, 40_000, 60_000] {
        let (all, store) = goodput(&resilient, rate).await;
        if store > peak.1 {
            best = rate;
        }
        peak = (peak.0.max(all), peak.1.max(store));
    }
    let (all, store) = goodput(&resilient, best * 10).await;
    println!(
        "  at ten times {best}: {} % of the peak of all answers, {} % of those of Redis",
        100 * all / peak.0.max(1),
        100 * store / peak.1.max(1)
    );
    Ok(())
}
