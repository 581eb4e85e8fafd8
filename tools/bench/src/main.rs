//! `cargo run --release -- memory`: decisions in memory, Tidegate beside governor and beside the
//! bound of the machine; `-- redis`: decisions in Redis, beside plain scripts, redis-cell and a
//! bare client; `-- server`: the listeners, beside Redis, redis-cell and a bare axum; `-- grpc`:
//! Envoy's protocol, beside bare tonic; `-- attack`, `-- connections`: what others notice of an
//! attack, and what many connections take; `-- near`, `-- resilience-server`: what stands before a
//! remote store, while that stops and goes on; in a program, and behind the listeners.
//!
//! Every contender is measured in turns within one run, many short rounds each, and the median
//! round counts: on a noisy machine the ratio of medians is worth more than any single number.

mod attack;
mod bound;
mod callgrind;
mod contenders;
mod cores;
mod grpc;
mod memory;
mod proxy;
mod redis;
mod resilience;
mod resilience_server;
mod server;
mod tower;
mod wire;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let mut words = args.iter().map(String::as_str);
    match words.next() {
        Some("memory") => memory::run(&words.collect::<Vec<_>>()),
        Some("bytes") => memory::bytes(&words.collect::<Vec<_>>()),
        Some("slowest") => memory::slowest(),
        Some("parts") => memory::parts(),
        Some("redis") => redis::run(&words.collect::<Vec<_>>()),
        Some("server") => server::run(&words.collect::<Vec<_>>()),
        Some("attack") => attack::run(&words.collect::<Vec<_>>()),
        Some("connections") => attack::connections(&words.collect::<Vec<_>>()),
        Some("grpc") => grpc::run(&words.collect::<Vec<_>>()),
        Some("tower") => tower::run(&words.collect::<Vec<_>>()),
        Some("proxy") => proxy::run(&words.collect::<Vec<_>>()),
        Some("resilience") => resilience::run(&words.collect::<Vec<_>>()),
        Some("resilience-server") => resilience_server::run(&words.collect::<Vec<_>>()),
        Some("wire") => wire::run(&words.collect::<Vec<_>>()),
        Some("instructions") => memory::instructions(&words.collect::<Vec<_>>()),
        _ => {
            eprintln!(
                "usage: bench memory [KEYS…] | bytes CONTENDER KEYS | slowest | parts | instructions CONTENDER\n       \
                 | redis [cpu | throughput | bytes | calls | all] [redis62 | redis7 | redis8 | valkey9] | wire [CALLERS…]\n       \
                 | server [resp [DEPTH…] | http | all] | grpc [ROUNDS] | tower [ROUNDS | instructions] | proxy [ROUNDS]\n       \
                 | attack [http | proxy] | connections [NUMBER] | resilience [REQUESTS_PER_SECOND] | resilience-server [REQUESTS_PER_SECOND]"
            );
            std::process::exit(2);
        }
    }
}
