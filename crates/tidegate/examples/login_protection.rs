//! Passwords cannot be guessed fast: only logins that fail count, per address and per account.
//!
//! `cargo run -p tidegate --features axum --example login_protection`

#![allow(clippy::print_stdout, reason = "an example shows what it does")]

use std::net::{IpAddr, SocketAddr};

use axum::Router;
use axum::body::Body;
use axum::extract::ConnectInfo;
use axum::http::{HeaderMap, Request, StatusCode};
use axum::routing::post;
use tidegate::tower::{RateLimitLayer, Rule, key};
use tidegate::{ManualClock, Memory};
use tower::ServiceExt;

async fn login(headers: HeaderMap) -> StatusCode {
    let right = headers.get("x-password").is_some_and(|password| password == "correct horse");
    if right { StatusCode::OK } else { StatusCode::UNAUTHORIZED }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let clock = ManualClock::new();
    let failed =
        |response: &tidegate::tower::ResponseHead<'_>| response.status == StatusCode::UNAUTHORIZED;
    let limits = RateLimitLayer::rules([
        // One address tries many accounts …
        Rule::new("failures-per-ip", "3/min".parse()?, key::peer_ip()).charge_when(failed),
        // … or many addresses try one account.
        Rule::new("failures-per-account", "10/h".parse()?, key::header("x-account"))
            .charge_when(failed),
    ])
    .memory(Memory::builder().clock(clock.clone()).build());
    let app = Router::new().route("/login", post(login).layer(limits));

    let ask = async |from: [u8; 4], password: &str| -> Result<(), Box<dyn std::error::Error>> {
        let mut request =
            Request::post("/login").header("x-account", "ann").header("x-password", password);
        request = request.extension(ConnectInfo(SocketAddr::from((from, 40_000))));
        let response = app.clone().oneshot(request.body(Body::empty())?).await?;
        let retry = response.headers().get("retry-after").and_then(|value| value.to_str().ok());
        let retry = retry.map(|secs| format!(", come back in {secs} s")).unwrap_or_default();
        println!("{} {password:<14} -> {}{retry}", IpAddr::from(from), response.status());
        Ok(())
    };
    ask([192, 0, 2, 7], "correct horse").await?; // costs nothing, however often
    for guess in ["123456", "password", "letmein", "qwerty"] {
        ask([192, 0, 2, 66], guess).await?;
    }
    ask([192, 0, 2, 66], "correct horse").await?; // not even the right one, for now
    ask([192, 0, 2, 7], "correct horse").await?; // another client is not locked out
    clock.advance(std::time::Duration::from_secs(20));
    ask([192, 0, 2, 66], "iloveyou").await?; // one more guess every 20 seconds
    Ok(())
}
