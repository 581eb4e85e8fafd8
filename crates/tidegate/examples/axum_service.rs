//! A web service with limits: ten a second for each address, and answers that say so.
//!
//! `cargo run -p tidegate --features axum --example axum_service`

#![allow(clippy::print_stdout, reason = "an example shows what it does")]

use std::net::SocketAddr;

use axum::Router;
use axum::routing::get;
use tidegate::tower::{RateLimitLayer, key};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    // The layer is this line; it gets the address of the client from `connect_info` below.
    let limits = RateLimitLayer::new("10/s burst 2; 120/m".parse()?, key::peer_ip());
    let app = Router::new().route("/", get(|| async { "hello\n" })).layer(limits);

    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let at = listener.local_addr()?;
    tokio::spawn(async move {
        axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await
    });

    // Here the example is its own client, and asks three times.
    for _ in 0..3 {
        let mut connection = TcpStream::connect(at).await?;
        connection
            .write_all(b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            .await?;
        let mut answer = String::new();
        connection.read_to_string(&mut answer).await?;
        let told = |line: &&str| {
            line.starts_with("HTTP/") || line.contains("ratelimit") || line.contains("retry-after")
        };
        answer.lines().filter(told).for_each(|line| println!("{line}"));
        println!();
    }
    Ok(())
}
