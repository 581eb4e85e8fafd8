//! `cargo xtask bench tower`: an axum service with and without the layer, in one run.
//!
//! The service does next to nothing, so that what the layer adds shows. Each contender is a process of its own, loaded by wrk in turns; what counts
//! is the processor time that the server spends on a request. It has one thread: how two of them wake each other up costs more, and varies more, than what is measured.
//!
//! `Router::layer` puts a layer into every route, behind a box for the service, one for its future and one for the body; a layer that does nothing shows what axum takes for that.
//! Put around the router, as `layer.layer(app)`, it needs none of them.

use std::net::SocketAddr;
use std::process::{Command, exit};

use axum::extract::Request;
use axum::routing::get;
use axum::{Router, ServiceExt};
use tidegate::tower::{RateLimitLayer, key};
use tower::Layer;
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
const NOTHING: &str = "Router::layer, which does nothing";

fn measure(rounds: usize) {
    let kinds = [
        (BARE, "bare"),
        (NOTHING, "nothing"),
        ("Router::layer, by peer", "peer"),
        ("Router::layer, by header", "header"),
        ("around the router, by peer", "peer-around"),
        ("around the router, by header", "header-around"),
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
        "\naxum with the layer, 1000000/s, {CONNECTIONS} connections, wrk with one thread: median of {rounds} interleaved rounds of {ROUND}"
    );
    table(&contenders, &[BARE, NOTHING]);
}

fn serve(what: &str) {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime");
    let app = Router::new().route("/", get(|| async { "hello" }));
    let (key, around) = match what.strip_suffix("-around") {
        Some(key) => (key, true),
        None => (what, false),
    };
    let layer = match key {
        "peer" => Some(RateLimitLayer::new("1000000/s".parse().expect("a limit"), key::peer_ip())),
        "header" => Some(RateLimitLayer::new("1000000/s".parse().expect("a limit"), key::header("x-api-key"))),
        _ => None,
    };
    let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).expect("a port");
    let at = listener.local_addr().expect("an address");
    match (layer, around) {
        (Some(layer), true) => {
            let app = ServiceExt::<Request>::into_make_service_with_connect_info::<SocketAddr>(layer.axum().layer(app));
            runtime.spawn(async move { axum::serve(listener, app).await });
        }
        (layer, _) => {
            let app = match (layer, what) {
                (Some(layer), _) => app.layer(layer.axum()),
                (None, "nothing") => app.layer(MapResponseLayer::new(|response: axum::response::Response| response)),
                (None, _) => app,
            };
            let app = app.into_make_service_with_connect_info::<SocketAddr>();
            runtime.spawn(async move { axum::serve(listener, app).await });
        }
    }
    until_left_alone(at, at);
}
