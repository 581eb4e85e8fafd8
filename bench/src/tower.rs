//! `cargo xtask bench tower`: an axum service with and without the layer, in one run.
//!
//! The service does next to nothing, so that what the layer adds shows. Each contender is a process of its own, loaded by wrk in turns; what counts
//! is the processor time that the server spends on a request. A layer that does nothing shows what axum itself takes for having one.

use std::net::SocketAddr;
use std::process::{Command, exit};

use axum::Router;
use axum::routing::get;
use tidegate::tower::{RateLimitLayer, key};
use tower::util::MapResponseLayer;

use crate::server::{Contender, Own, table, until_left_alone, wrk};

const ROUNDS: usize = 15;
const CONNECTIONS: &str = "50";
const ROUND: &str = "1s";

pub fn run(args: &[&str]) {
    match args {
        [] => measure(ROUNDS),
        ["serve", what] => serve(what),
        [rounds] if rounds.parse::<usize>().is_ok() => measure(rounds.parse().expect("a number")),
        _ => {
            eprintln!("tower {}: expected a number of rounds", args.join(" "));
            exit(2);
        }
    }
}

const BARE: &str = "axum";

fn measure(rounds: usize) {
    let kinds = [
        (BARE, "bare"),
        ("axum, a layer that does nothing", "nothing"),
        ("axum, 1000000/s by peer", "peer"),
        ("axum, 1000000/s by header", "header"),
    ];
    let own: Vec<Own> = kinds.iter().map(|(_, what)| Own::start_as(&["tower", "serve", what])).collect();
    let mut contenders: Vec<Contender> = kinds
        .iter()
        .zip(&own)
        .map(|((label, _), own)| Contender::new(label, own.child.id(), own.http.port(), &[]))
        .collect();
    for round in 0..rounds {
        let mut order: Vec<usize> = (0..contenders.len()).collect();
        if round % 2 == 1 {
            order.reverse();
        }
        for index in order {
            contenders[index].round(|port, _| {
                let mut load = Command::new("wrk");
                load.args(["-t1", &format!("-c{CONNECTIONS}"), &format!("-d{ROUND}"), "-H", "x-api-key: user:0000007"]);
                wrk(load.arg(format!("http://127.0.0.1:{port}/")))
            });
        }
    }
    println!(
        "\naxum with the layer, {CONNECTIONS} connections, wrk with one thread: median of {rounds} interleaved rounds of {ROUND}"
    );
    table(&contenders, &[BARE, "axum, a layer that does nothing"]);
}

fn serve(what: &str) {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime");
    let app = Router::new().route("/", get(|| async { "hello" }));
    let limits = || "1000000/s".parse().expect("a limit");
    let app = match what {
        "nothing" => app.layer(MapResponseLayer::new(|response: axum::response::Response| response)),
        "peer" => app.layer(RateLimitLayer::new(limits(), key::peer_ip())),
        "header" => app.layer(RateLimitLayer::new(limits(), key::header("x-api-key"))),
        _ => app,
    };
    let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).expect("a port");
    let at = listener.local_addr().expect("an address");
    runtime.spawn(async move { axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await });
    until_left_alone(at, at);
}
