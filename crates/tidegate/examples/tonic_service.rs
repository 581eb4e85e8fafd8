//! A gRPC service with limits: denials are gRPC statuses, with the wait for clients that retry.
//!
//! `cargo run -p tidegate --features tonic --example tonic_service`

#![allow(clippy::print_stdout, reason = "an example shows what it does")]

use tidegate::tower::{RateLimitLayer, key};
use tokio::net::TcpListener;
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Channel, Server};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let limits = RateLimitLayer::new("2/3s".parse()?, key::peer_ip());
    let (_reporter, service) = tonic_health::server::health_reporter();
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let at = listener.local_addr()?;
    let server = Server::builder().layer(limits).add_service(service);
    tokio::spawn(server.serve_with_incoming(TcpIncoming::from(listener)));

    let mut client =
        HealthClient::new(Channel::from_shared(format!("http://{at}"))?.connect().await?);
    for _ in 0..3 {
        match client.check(HealthCheckRequest::default()).await {
            Ok(answer) => println!("ok, {:?}", answer.metadata().get("ratelimit")),
            Err(status) => {
                println!("{:?}: {}", status.code(), status.message());
                println!(
                    "grpc-retry-pushback-ms: {:?}",
                    status.metadata().get("grpc-retry-pushback-ms")
                );
            }
        }
    }
    Ok(())
}
