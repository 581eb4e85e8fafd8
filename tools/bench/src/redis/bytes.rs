//! How much memory of the server a key takes, beside redis-cell's.

use std::time::Duration;

use tidegate_testkit::{Flavor, Server};

use super::pipe::{Batches, Pipe};
use super::{Ask, ask_all, limits, name, runtime, server, store, user, words};

const COUNT: usize = 100_032; // whole batches

pub fn run(flavor: Flavor) {
    let server = server(flavor, &[]);
    println!(
        "\n{flavor}: bytes of used_memory per key, {COUNT} keys, names of 29 bytes, one taken of each"
    );
    let cell = measured(&server, || {
        let commands: Vec<_> = (0..COUNT)
            .map(|key| words(["CL.THROTTLE", &name("cell", key), "599", "600", "3600", "1"]))
            .collect();
        let mut batches = Batches::of(&commands);
        Pipe::to(&server).send(&mut batches, COUNT / super::pipe::DEPTH);
    });
    println!("  {:<32} {cell:>7.1}", "redis-cell");
    for (limit, ask) in [
        ("600/h", Ask::Check),
        ("600/h window", Ask::Check),
        ("600/h estimate", Ask::Check),
        ("600/h sliding", Ask::Check),
        ("600/h log", Ask::Check),
        ("600 concurrent ttl 1h", Ask::Lease),
    ] {
        let bytes = measured(&server, || {
            runtime(2).block_on(async {
                ask_all(&store(&server.url(), 0), &limits(limit), 'r', COUNT, ask).await
            });
        });
        println!("  {limit:<32} {bytes:>7.1}   redis-cell's {:+.1}", bytes - cell);
    }
    let short = measured(&server, || {
        let commands: Vec<_> = (0..COUNT)
            .map(|key| words(["CL.THROTTLE", &user('r', key), "599", "600", "3600", "1"]))
            .collect();
        let mut batches = Batches::of(&commands);
        Pipe::to(&server).send(&mut batches, COUNT / super::pipe::DEPTH);
    });
    println!(
        "  {:<32} {short:>7.1}   whose names are what the caller gives, 13 bytes",
        "redis-cell, short names"
    );
}

/// How much `used_memory` grows, over the number of keys.
fn measured(server: &Server, fill: impl FnOnce()) -> f64 {
    server.command(&["FLUSHALL", "SYNC"]);
    let before = settled(server);
    fill();
    assert_eq!(server.command(&["DBSIZE"]).int(), COUNT as i64);
    (settled(server) - before) / COUNT as f64
}

/// `used_memory` when the tables have finished growing and the buffers of connections are gone:
/// when it stays the same.
fn settled(server: &Server) -> f64 {
    let read = || -> f64 {
        let info = server.command(&["INFO", "memory"]);
        let line = info.text().lines().find_map(|line| line.strip_prefix("used_memory:"));
        line.and_then(|number| number.trim().parse().ok()).expect("used_memory")
    };
    let mut before = read();
    let mut same = 0;
    for _ in 0..100 {
        std::thread::sleep(Duration::from_millis(50));
        let now = read();
        same = if (now - before).abs() < 2048.0 { same + 1 } else { 0 };
        before = now;
        if same == 8 {
            break;
        }
    }
    before
}
