//! What one call costs the server: CPU time of all its threads, which is there to be trusted on a
//! busy machine too.

use tidegate_testkit::{Flavor, Server};

use super::pipe::{Batches, DEPTH, Pipe, cpu_ns};
use super::recorder::Command;
use super::{Ask, KEYS, load, median, name, recorded, server, words};
use crate::callgrind::Counter;

const ROUNDS: usize = 25;
/// Batches of a round.
const COUNT: usize = 32;
const PER_ROUND: usize = COUNT * DEPTH;
/// Instructions hardly differ between rounds, and valgrind takes its time.
const COUNTED: usize = 3;
/// Enough places in the witness that none is taken away.
const WITNESS: usize = 8 * KEYS;

/// What is measured, and beside what.
struct RedisContender {
    label: &'static str,
    beside: Option<&'static str>,
    batches: Batches,
    cost: Vec<f64>,
}

pub fn run(flavor: Flavor) {
    let server = server(flavor, &[]);
    let mut contenders = contenders(&server, true);
    measure(&server, &mut contenders, ROUNDS, || cpu_ns(server.pid()) as f64 / 1e3);
    println!(
        "\n{flavor}: us of server CPU per call at P={DEPTH}, median of {ROUNDS} interleaved rounds of {PER_ROUND} calls on {KEYS} keys"
    );
    print(&contenders, 2);
}

/// The same, but instructions of the server instead of its time: a number that a busy machine does
/// not change.
pub fn instructions(flavor: Flavor) {
    let server = server(
        flavor,
        &["valgrind", "--tool=callgrind", "--trace-children=yes", "--callgrind-out-file=counted"],
    );
    let mut contenders = contenders(&server, false);
    let (mut counter, mut total) =
        (Counter::of(server.pid(), &server.folder().join("counted")), 0.0);
    let so_far = || {
        total += counter.since();
        total
    };
    measure(&server, &mut contenders, COUNTED, so_far);
    println!(
        "\n{flavor}: instructions of the server per call at P={DEPTH}, median of {COUNTED} interleaved rounds of {PER_ROUND} calls on {KEYS} keys"
    );
    print(&contenders, 0);
}

/// `so_far` is what the server has used since it began, in the unit that is printed.
fn measure(
    server: &Server,
    contenders: &mut [RedisContender],
    rounds: usize,
    mut so_far: impl FnMut() -> f64,
) {
    let mut pipe = Pipe::to(server);
    for contender in contenders.iter_mut() {
        pipe.send(&mut contender.batches, COUNT);
    }
    for round in 0..rounds {
        // In turns, and every other round backwards, so that none always follows the same
        // neighbour.
        let mut order: Vec<usize> = (0..contenders.len()).collect();
        if round % 2 == 1 {
            order.reverse();
        }
        for index in order {
            let contender = &mut contenders[index];
            let before = so_far();
            pipe.send(&mut contender.batches, COUNT);
            contender.cost.push((so_far() - before) / PER_ROUND as f64);
        }
    }
}

fn print(contenders: &[RedisContender], digits: usize) {
    for RedisContender { label, beside, cost, .. } in contenders {
        print!("  {label:<44} {:>8.digits$}", median(cost.clone()));
        let rival = contenders.iter().find(|rival| Some(rival.label) == *beside);
        match rival {
            // Two that ran in the same round had the same neighbours on the machine.
            Some(rival) => {
                let ratios =
                    cost.iter().zip(&rival.cost).map(|(ours, theirs)| ours / theirs).collect();
                println!("   {:.2}x {}", median(ratios), rival.label);
            }
            None => println!(),
        }
    }
}

const GCRA: &str = "plain GCRA script, allowed";
const GCRA_DENIED: &str = "plain GCRA script, denied";
const WINDOW: &str = "plain window script (INCR, PTTL)";
const COUNTER: &str = "plain counter script (INCR)";
const WINDOW_SET: &str = "plain window script (SET NX, INCRBY, PTTL)";
const CELL: &str = "redis-cell CL.THROTTLE, allowed";

/// Those that a promise is about, or all.
fn contenders(server: &Server, all_of_them: bool) -> Vec<RedisContender> {
    let mut all = Vec::new();
    let mut add = |label, beside, commands: Vec<Command>| {
        all.push(RedisContender {
            label,
            beside,
            batches: Batches::of(&commands),
            cost: Vec::new(),
        });
    };
    let keys =
        |command: &dyn Fn(usize) -> Command| -> Vec<Command> { (0..KEYS).map(command).collect() };

    add("INCR", None, keys(&|key| words(["INCR", &name("incr", key)])));
    let one = load(server, "return 1");
    add("script: return 1", None, keys(&|key| words(["EVALSHA", &one, "1", &name("one", key)])));
    let cell = |prefix: &str, burst: &str, rate: &str| {
        keys(&|key| words(["CL.THROTTLE", &name(prefix, key), burst, rate, "3600", "1"]))
    };
    add(CELL, None, cell("cell", "1000000", "1000000"));
    add("redis-cell CL.THROTTLE, denied", None, cell("cell-denied", "0", "1"));
    let sha = load(server, include_str!("gcra.lua"));
    let gcra = |prefix: &str, rate: &str| {
        keys(&|key| words(["EVALSHA", &sha, "1", &name(prefix, key), rate, "3600", rate, "1"]))
    };
    add(GCRA, None, gcra("gcra", "1000000"));
    add(GCRA_DENIED, None, gcra("gcra-denied", "1"));
    for (label, prefix, script) in [
        (COUNTER, "counter", include_str!("counter.lua")),
        (WINDOW, "window", include_str!("window.lua")),
        (WINDOW_SET, "window-set", include_str!("window_set.lua")),
    ] {
        let sha = load(server, script);
        add(
            label,
            None,
            keys(&|key| words(["EVALSHA", &sha, "1", &name(prefix, key), "1000000", "3600000"])),
        );
    }

    let sha = load(server, include_str!("window_bound.lua"));
    let state = "x".repeat(21);
    add(
        "bound: TIME, GET, SETRANGE, no decision",
        Some(WINDOW),
        keys(&|key| words(["EVALSHA", &sha, "1", &name("bound", key), &state])),
    );

    add("bucket, allowed", Some(GCRA), recorded(server, 'a', "1000000/h", Ask::Check, 0, 1));
    add(
        "bucket, allowed, witness",
        Some(GCRA),
        recorded(server, 'b', "1000000/h", Ask::Check, WITNESS, 2),
    );
    add("bucket, denied", Some(GCRA_DENIED), recorded(server, 'c', "1/h", Ask::Check, 0, 2));
    add(
        "bucket, denied, witness",
        Some(GCRA_DENIED),
        recorded(server, 'd', "1/h", Ask::Check, WITNESS, 2),
    );
    let window = |letter, witness, rounds| {
        staggered(server, recorded(server, letter, "1000000/h window", Ask::Check, witness, rounds))
    };
    add("window, allowed", Some(WINDOW), window('e', 0, 1));
    add("window, allowed, witness", Some(WINDOW), window('f', WITNESS, 2));
    add("window, allowed, witness (again)", Some(COUNTER), window('g', WITNESS, 2));
    add(
        "window, denied, witness",
        Some(WINDOW),
        recorded(server, 'h', "1/d window", Ask::Check, WITNESS, 2),
    );
    if !all_of_them {
        return all;
    }
    add(
        "sliding, allowed",
        Some(GCRA),
        recorded(server, 'i', "1000000/h sliding", Ask::Check, WITNESS, 1),
    );
    add(
        "estimate, allowed",
        Some(GCRA),
        recorded(server, 'j', "1000000/h estimate", Ask::Check, 0, 1),
    );
    add(
        "estimate, allowed, witness",
        Some(GCRA),
        recorded(server, 'k', "1000000/h estimate", Ask::Check, WITNESS, 2),
    );
    add(
        "log, allowed, 3 to 24 hits kept",
        Some(GCRA),
        recorded(server, 'l', "1000/h log", Ask::Check, WITNESS, 2),
    );
    add(
        "concurrent, taken or released",
        Some(GCRA),
        recorded(server, 'z', "100 concurrent ttl 1h", Ask::LeaseAndRelease, 0, 1),
    );
    add(
        "three buckets, allowed, witness",
        Some(GCRA),
        recorded(server, 'm', "1000000/m; 1000000/h; 1000000/d", Ask::Check, WITNESS, 2),
    );
    all
}

/// One hit of a window in 64 is written as a whole. So that as many of every round are, and not all
/// of one round, each key has had another number of hits.
fn staggered(server: &Server, calls: Vec<Command>) -> Vec<Command> {
    let earlier: Vec<Command> =
        calls.iter().enumerate().flat_map(|(key, call)| vec![call.clone(); key % 64]).collect();
    Pipe::to(server).send(&mut Batches::of(&earlier), earlier.len() / DEPTH);
    calls
}
