//! `cargo xtask bench resilience-server [REQUESTS_PER_SECOND [fixed] [resp]]`: a server over a real
//! Redis that is stopped under load and goes on, asked through its listeners for RESP and HTTP; and
//! how much it still answers at ten times the load that it can serve.
//!
//! Requests are sent when they are due, whatever the answers do. At the same time, over connections
//! of their own, a tenth as many are about nothing, which shows what the machine itself adds. If
//! Redis cannot decide that many, the rate is lower, unless it is `fixed`. With `resp` only
//! that listener is measured, and nothing else. The server has a core of its own;
//! clients and Redis share the other, where Redis goes first, as if it had a machine of its
//! own.

mod load;

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use tidegate_server::config::Config;
use tidegate_server::{Options, start};
use tidegate_testkit::{AbsenceWatch, Absences, Awake, Flavor, Server};

use self::load::{Kind, Load, Protocol, ServerAnswer, load};
use crate::cores::{CLIENTS, SERVERS, go_first, stay_on};
use crate::server::{Own, until_left_alone};

type Failure = Box<dyn std::error::Error>;

/// How long a server waits for Redis.
const DEADLINE: Duration = tidegate::resilience::DEFAULT_DEADLINE;
/// An answer that comes later is no use: the deadline and 5 ms.
const IN_TIME: Duration = Duration::from_millis(20);

pub fn run(args: &[&str]) {
    // The clients have one core.
    let threads = if matches!(args, ["serve", _]) { 2 } else { 1 };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(threads)
        .enable_all()
        .build()
        .expect("a runtime");
    let done = match args {
        ["serve", url] => runtime.block_on(serve(url)),
        [] => runtime.block_on(all(20_000, false, true)),
        [rate, options @ ..] if options.iter().all(|option| ["fixed", "resp"].contains(option)) => {
            let (fixed, http) = (options.contains(&"fixed"), !options.contains(&"resp"));
            rate.parse()
                .map_err(Failure::from)
                .and_then(|rate| runtime.block_on(all(rate, fixed, http)))
        }
        _ => {
            Err("expected nothing, or how many requests a second, and perhaps fixed and resp"
                .into())
        }
    };
    if let Err(error) = done {
        eprintln!("resilience-server {}: {error}", args.join(" "));
        std::process::exit(1);
    }
}

/// The server, as a process of its own.
async fn serve(url: &str) -> Result<(), Failure> {
    let text = format!(
        "store: {url}\nresilience: {{ nodes: 1 }}\nlisten: {{ http: 127.0.0.1:0, resp: 127.0.0.1:0, grpc: off }}\nlog: {{ level: off }}\n"
    );
    let running = start(Config::parse(&text, "bench")?, Options::default()).await?;
    let (http, resp) = (running.http.ok_or("no listener")?, running.resp.ok_or("no listener")?);
    tokio::task::block_in_place(|| until_left_alone(http, resp));
    Ok(())
}

async fn all(rate: u64, fixed: bool, http: bool) -> Result<(), Failure> {
    // What it takes to wake a processor that the host gave to another VM is not what is
    // measured.
    let _awake = Awake::keep();
    stay_on(CLIENTS);
    let redis = Server::start(Flavor::Redis7);
    go_first(redis.pid());
    stay_on(SERVERS);
    let own = Own::start_as(&["resilience-server", "serve", &redis.url()]);
    stay_on(CLIENTS);
    stopped(&redis, Protocol::Resp, own.resp, rate, fixed).await?;
    if !http {
        return Ok(());
    }
    stopped(&redis, Protocol::Http, own.http, rate, fixed).await?;
    goodput(own.resp).await
}

/// How long they took; and how long without what the host did not let processors run meanwhile.
fn line(name: &str, answers: &[ServerAnswer], absences: &Absences) {
    let sorted = |of: &dyn Fn(&ServerAnswer) -> Duration| {
        let mut took: Vec<Duration> = answers.iter().map(of).collect();
        took.sort();
        took
    };
    let at = |took: &[Duration], per_mille: usize| {
        took.get((took.len() * per_mille / 1000).min(took.len().saturating_sub(1)))
            .copied()
            .unwrap_or_default()
    };
    let there = |answer: &ServerAnswer| {
        answer.took.saturating_sub(absences.within(answer.asked, answer.asked + answer.took))
    };
    let (took, less) = (sorted(&|answer| answer.took), sorted(&there));
    let alone = answers.iter().filter(|answer| answer.kind == Kind::Alone).count();
    println!(
        "  {name:<26} p50 {:>5.2}  p99 {:>5.2}  max {:>5.1} ms; while the machine ran p99 {:>5.2}  max {:>5.1} ms; of {}, {alone} without Redis",
        ms(at(&took, 500)),
        ms(at(&took, 990)),
        ms(at(&took, 1000)),
        ms(at(&less, 990)),
        ms(at(&less, 1000)),
        answers.len()
    );
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1000.0
}

async fn stopped(
    redis: &Server,
    protocol: Protocol,
    at: SocketAddr,
    rate: u64,
    fixed: bool,
) -> Result<(), Failure> {
    let second = Duration::from_secs(1);
    let questions: Vec<Vec<u8>> = (0..1000).map(|number| protocol.question(number)).collect();
    // As much as this machine can offer, and Redis decide.
    let mut rate = rate;
    loop {
        let tried = load(protocol, at, rate, second, &questions).await?;
        let by_store =
            |answer: &&ServerAnswer| answer.took <= IN_TIME && answer.kind == Kind::Store;
        let good = tried.answers.iter().filter(by_store).count();
        if fixed || good as u64 * 100 >= rate * 99 || rate < 2000 {
            break;
        }
        rate = rate * 3 / 4;
    }
    println!(
        "{protocol:?}, {rate} requests a second over {} connections; a tenth as many about nothing",
        protocol.connections()
    );
    let begin = |rate: u64, questions: Vec<Vec<u8>>| {
        tokio::spawn(async move {
            load(protocol, at, rate, 6 * second, &questions)
                .await
                .map_err(|error| error.to_string())
        })
    };
    let watch = AbsenceWatch::begin();
    let (loading, beside) = (begin(rate, questions), begin(rate / 10, vec![protocol.nothing()]));
    tokio::time::sleep(2 * second).await;
    let stop = Instant::now();
    tokio::task::block_in_place(|| redis.stop_signal());
    tokio::time::sleep(2 * second).await;
    let go_on = Instant::now();
    redis.continue_signal();
    let Load { answers, unsent } = loading.await??;
    let nothing = beside.await??.answers;
    let absences = watch.end();
    let between = |answers: &[ServerAnswer], from: Instant, to: Instant| -> Vec<ServerAnswer> {
        answers.iter().copied().filter(|answer| answer.asked >= from && answer.asked < to).collect()
    };
    let of = |from: Instant, to: Instant| between(&answers, from, to);
    let (open, far) = (stop + Duration::from_millis(100), go_on + 60 * second);
    for (name, from, to) in [
        ("Redis answers", stop - 60 * second, stop),
        ("stopped, all of it", stop, go_on),
        ("stopped, after 100 ms", open, go_on),
        ("after it goes on", go_on, far),
    ] {
        line(name, &of(from, to), &absences);
        line("  about nothing", &between(&nothing, from, to), &absences);
    }
    let errors = answers.iter().filter(|answer| answer.kind == Kind::Error).count();
    let after = of(go_on, far);
    let back = after
        .iter()
        .filter(|answer| answer.kind == Kind::Store)
        .map(|answer| answer.asked - go_on)
        .min();
    let last = after
        .iter()
        .filter(|answer| answer.kind == Kind::Alone)
        .map(|answer| answer.asked - go_on)
        .max();
    let alone = |answers: Vec<ServerAnswer>| {
        answers.iter().filter(|answer| answer.kind == Kind::Alone).count()
    };
    println!(
        "  without Redis: {} before the stop, {} later than 500 ms after it goes on",
        alone(of(stop - 60 * second, stop)),
        alone(of(go_on + second / 2, far))
    );
    // As `cargo xtask faults F1` has it: the end of the last twentieth of a second of which more
    // than a tenth was decided without Redis; and how many such there were while the machine let
    // requests about nothing wait as long as a call to Redis may take.
    let (slice, mut in_sync, mut busy) = (second / 20, Duration::ZERO, 0);
    for from in (0..40).map(|at| go_on + slice * at) {
        let of_slice = of(from, from + slice);
        let noise = between(&nothing, from, from + slice)
            .iter()
            .map(|answer| answer.took)
            .max()
            .unwrap_or_default();
        if alone(of_slice.clone()) * 10 > of_slice.len() {
            match noise >= DEADLINE && in_sync > Duration::ZERO {
                true => busy += 1,
                false => in_sync = from + slice - go_on,
            }
        }
    }
    println!(
        "  in sync {in_sync:?} after it goes on, beside {busy} twentieths of a second that the machine was busy"
    );
    println!(
        "  errors {errors}, not sent {unsent}; first answer of Redis {back:?} after it goes on, last one without it {last:?}"
    );
    Ok(())
}

async fn goodput(at: SocketAddr) -> Result<(), Failure> {
    println!("RESP, as much as it can do and ten times that; answers within 10 ms, a second");
    let protocol = Protocol::Resp;
    let questions: Vec<Vec<u8>> = (0..1000).map(|number| protocol.question(number)).collect();
    let lasts = Duration::from_secs(2);
    let measure = async |rate: u64| -> Result<(u64, u64), Failure> {
        let Load { answers, unsent } = load(protocol, at, rate, lasts, &questions).await?;
        let good = |of: &dyn Fn(&ServerAnswer) -> bool| {
            answers.iter().filter(|answer| answer.took <= IN_TIME && of(answer)).count() as u64
                / lasts.as_secs()
        };
        let (all, store) = (
            good(&|answer| answer.kind != Kind::Error),
            good(&|answer| answer.kind == Kind::Store),
        );
        println!(
            "  {rate:>7} offered   {all:>7} answered, {store:>6} of them by Redis; {} given up",
            unsent / lasts.as_secs()
        );
        Ok((all, store))
    };
    let (mut best, mut peak) = (0, (0, 0));
    for rate in [5_000, 10_000, 15_000, 20_000, 30_000, 40_000] {
        let (all, store) = measure(rate).await?;
        if store > peak.1 {
            best = rate;
        }
        peak = (peak.0.max(all), peak.1.max(store));
    }
    let (all, store) = measure(best * 10).await?;
    println!(
        "  at ten times {best}: {} % of the peak of all answers, {} % of those of Redis",
        100 * all / peak.0.max(1),
        100 * store / peak.1.max(1)
    );
    Ok(())
}
