//! Plans by API key: the limits of a customer are looked up while the request waits; requests
//! without a key are limited by address.
//!
//! `cargo run -p tidegate --features axum --example api_tiers`

#![allow(clippy::print_stdout, reason = "an example shows what it does")]

use std::net::SocketAddr;

use axum::Router;
use axum::body::Body;
use axum::extract::ConnectInfo;
use axum::http::Request;
use axum::routing::get;
use tidegate::tower::{RateLimitLayer, Rule, key, per_request, per_request_async};
use tidegate::{Limits, ManualClock, Memory};
use tower::ServiceExt;

/// Which plan a key has: yours to look up, in a cache or a database.
async fn plan_of(key: Option<String>) -> Limits {
    let limits = match key.as_deref() {
        Some("acme") => "1000/min burst 100",
        Some("initech") => "100/min",
        _ => "2/min",
    };
    limits.parse().expect("a limit")
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let plans = Rule::new("plan", "2/min".parse()?, key::header("x-api-key").or(key::peer_ip()))
        .limit(per_request_async(|head| plan_of(head.header("x-api-key").map(str::to_owned))))
        .cost(per_request(|head| if head.path() == "/report" { 10 } else { 1 }))
        .skip(per_request(|head| head.path() == "/healthz"));
    let limits =
        RateLimitLayer::rules([plans]).memory(Memory::builder().clock(ManualClock::new()).build());
    let app = Router::new()
        .route("/", get(|| async { "hello" }))
        .route("/report", get(|| async { "a long report" }))
        .route("/healthz", get(|| async { "ok" }))
        .layer(limits);

    for (key, path) in [
        ("acme", "/report"),
        ("initech", "/report"),
        ("initech", "/"),
        ("", "/"),
        ("", "/report"),
        ("", "/healthz"),
    ] {
        let mut request =
            Request::get(path).extension(ConnectInfo(SocketAddr::from(([192, 0, 2, 7], 40_000))));
        if !key.is_empty() {
            request = request.header("x-api-key", key);
        }
        let response = app.clone().oneshot(request.body(Body::empty())?).await?;
        let told = response
            .headers()
            .get("ratelimit")
            .and_then(|value| value.to_str().ok())
            .unwrap_or("no limit");
        println!("{key:<8} {path:<9} -> {}  {told}", response.status().as_u16());
    }
    Ok(())
}
