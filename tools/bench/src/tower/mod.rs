//! `cargo xtask bench tower`: an axum service with and without the layer, in one run; `cargo xtask
//! bench tower instructions` counts what each executes.
//!
//! The service does next to nothing, so that what the layer adds shows; another one reads and
//! writes a little JSON, as most do. Each contender is a process of its own, asked in turns by the
//! same connections in lockstep; what counts is the processor time that the server spends on a
//! request. It has one thread: how two of them wake each other up costs more, and varies more, than
//! what is measured. Server and connections share one processor for the same reason: so the server
//! always finds all requests waiting, not now one and now ten. Processes are started anew a few
//! times, because where one lies in memory makes a difference, too. How far the service is from
//! itself, started twice, shows how far any of it can be believed.
//!
//! `Router::layer` puts a layer into every route, behind a box for the service, one for its future
//! and one for the body; a layer that does nothing shows what axum takes for that. Put around the
//! router, as `layer.layer(app)`, it needs none of them.

mod load;
mod serve;

use std::process::{Command, Stdio, exit};

use self::load::{CONNECTIONS, Connections, Exchange};
use crate::callgrind::Counter;
use crate::redis::pipe::cpu_ns;
use crate::server::{Own, median};

/// How often every process is started, and how many rounds of requests follow.
const STARTS: usize = 6;
const ROUNDS: usize = 25;
/// How often every connection asks in a round.
const TIMES: usize = 40;
/// Instructions hardly differ between rounds, and valgrind takes its time.
const COUNTED: usize = 3;

/// What is measured, and what it is called on the command line.
const CONTENDERS: [(&str, &str); 12] = [
    ("axum", "bare"),
    ("axum, once more", "bare"),
    ("Router::layer, which does nothing", "nothing"),
    ("Router::layer, by peer", "peer"),
    ("Router::layer, by header", "header"),
    ("the same without axum(), by header", "header-plain"),
    ("around the router, by peer", "peer-around"),
    ("around the router, by header", "header-around"),
    ("the same by peer, telling nothing", "peer-silent"),
    ("bound: two headers, always the same", "two-headers"),
    ("axum, JSON in and out", "json"),
    ("the same, layer around, by peer", "json-peer"),
];

/// Whom it is measured by: the same service without the layer.
fn without(what: &str) -> &'static str {
    if what.starts_with("json") { "json" } else { "bare" }
}

pub fn run(args: &[&str]) {
    match args {
        [] => measure(ROUNDS, &CONTENDERS),
        ["instructions"] => instructions(),
        ["serve", what] => serve::serve(what),
        [rounds, whom @ ..] if rounds.parse::<usize>().is_ok() => {
            measure(rounds.parse().expect("a number"), &chosen(whom));
        }
        _ => {
            eprintln!(
                "tower {}: expected a number of rounds, and perhaps whom to measure; or instructions",
                args.join(" ")
            );
            exit(2);
        }
    }
}

/// Stays on one processor, and so do the processes that it starts.
fn stay() {
    let own = std::process::id().to_string();
    let stays =
        Command::new("taskset").args(["-p", "-c", "0", &own]).stdout(Stdio::null()).status();
    assert!(stays.is_ok_and(|status| status.success()), "taskset: apt-get install -y util-linux");
}

/// These, and the services that they are measured by; all, if none is named.
fn chosen(whom: &[&str]) -> Vec<(&'static str, &'static str)> {
    if let Some(unknown) =
        whom.iter().find(|whom| !CONTENDERS.iter().any(|(_, what)| what == *whom))
    {
        eprintln!(
            "tower: {unknown}: expected one of {}",
            CONTENDERS.map(|(_, what)| what).join(", ")
        );
        exit(2);
    }
    let is_chosen = |(_, what): &(&str, &str)| {
        whom.is_empty() || whom.contains(what) || whom.iter().any(|chosen| without(chosen) == *what)
    };
    CONTENDERS.into_iter().filter(is_chosen).collect()
}

fn measure(rounds: usize, whom: &[(&str, &str)]) {
    stay();
    let mut costs = vec![Vec::new(); whom.len()];
    for _ in 0..STARTS {
        let own: Vec<Own> =
            whom.iter().map(|(_, what)| Own::start_as(&["tower", "serve", what])).collect();
        let mut clients: Vec<Connections> = own
            .iter()
            .zip(whom)
            .map(|(own, (_, what))| Connections::at(own.http, &Exchange::with(what)))
            .collect();
        clients.iter_mut().for_each(|client| client.ask(TIMES));
        for round in 0..rounds {
            let mut order: Vec<usize> = (0..whom.len()).collect();
            // Each follows each other one, sooner or later.
            order.rotate_left(round % whom.len());
            if round % 2 == 1 {
                order.reverse();
            }
            for index in order {
                let pid = own[index].child.id();
                let before = cpu_ns(pid);
                clients[index].ask(TIMES);
                costs[index]
                    .push((cpu_ns(pid) - before) as f64 / 1e3 / (TIMES * CONNECTIONS) as f64);
            }
        }
    }
    println!(
        "\naxum with the layer, 1000000/s, {CONNECTIONS} connections: us of server CPU for a request, median of {STARTS} times {rounds} interleaved rounds of {} requests",
        TIMES * CONNECTIONS
    );
    table(whom, &costs, 2);
}

fn instructions() {
    stay();
    let folder = tempfile::tempdir().expect("a folder for a moment");
    println!(
        "\naxum with the layer, 1000000/s, {CONNECTIONS} connections: instructions outside the kernel for a request, median of {COUNTED} rounds of {} requests",
        TIMES * CONNECTIONS
    );
    let mut costs = Vec::new();
    for (index, (_, what)) in CONTENDERS.iter().enumerate() {
        let file = folder.path().join(index.to_string());
        let written = format!("--callgrind-out-file={}", file.display());
        let valgrind = ["valgrind", "--tool=callgrind", "--log-file=/dev/null", &written];
        let own = Own::start_under(&valgrind, &["tower", "serve", what]);
        let (mut client, mut counter) =
            (Connections::at(own.http, &Exchange::with(what)), Counter::of(own.child.id(), &file));
        client.ask(TIMES);
        counter.since();
        let counted = |_| {
            client.ask(TIMES);
            counter.since() / (TIMES * CONNECTIONS) as f64
        };
        costs.push((0..COUNTED).map(counted).collect());
    }
    table(&CONTENDERS, &costs, 0);
}

/// Each beside its service without the layer, in the same round: two that ran one after the other
/// had the same neighbours on the machine.
fn table(whom: &[(&str, &str)], costs: &[Vec<f64>], digits: usize) {
    for ((label, what), own) in whom.iter().zip(costs) {
        let without = whom
            .iter()
            .position(|(_, other)| *other == without(what))
            .expect("it is measured as well");
        let mut ratios: Vec<f64> =
            own.iter().zip(&costs[without]).map(|(own, without)| own / without).collect();
        ratios.sort_by(f64::total_cmp);
        let (low, high) = (ratios[ratios.len() / 4], ratios[ratios.len() * 3 / 4]);
        println!(
            "  {label:<36} {:>8.digits$}   {:>6.3}x of it without (half of the rounds: {low:.3}x to {high:.3}x)",
            median(own),
            median(&ratios)
        );
    }
}
