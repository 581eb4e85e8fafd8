//! Before a server of tonic, asked by a client of tonic.

use prost::Message;
use tidegate::resilience::OnFailure;
use tidegate::store::Deciding;
use tidegate::tower::{RateLimitLayer, Rule, key};
use tidegate::{Check, ManualClock, Store, StoreError};
use tokio::net::TcpListener;
use tonic::Code;
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Channel, Server};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;

use crate::still;

async fn client(layer: RateLimitLayer) -> HealthClient<Channel> {
    let (_reporter, service) = tonic_health::server::health_reporter();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let at = listener.local_addr().unwrap();
    let server = Server::builder().layer(layer).add_service(service);
    tokio::spawn(server.serve_with_incoming(TcpIncoming::from(listener)));
    HealthClient::new(
        Channel::from_shared(format!("http://{at}")).unwrap().connect().await.unwrap(),
    )
}

fn question() -> HealthCheckRequest {
    HealthCheckRequest { service: String::new() }
}

#[derive(Clone, PartialEq, Message)]
struct Status {
    #[prost(int32, tag = "1")]
    code: i32,
    #[prost(string, tag = "2")]
    message: String,
    #[prost(message, repeated, tag = "3")]
    details: Vec<Any>,
}

#[derive(Clone, PartialEq, Message)]
struct Any {
    #[prost(string, tag = "1")]
    type_url: String,
    #[prost(bytes = "vec", tag = "2")]
    value: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
struct RetryInfo {
    #[prost(message, optional, tag = "1")]
    retry_delay: Option<Delay>,
}

#[derive(Clone, PartialEq, Message)]
struct Delay {
    #[prost(int64, tag = "1")]
    seconds: i64,
    #[prost(int32, tag = "2")]
    nanos: i32,
}

#[derive(Clone, PartialEq, Message)]
struct QuotaFailure {
    #[prost(message, repeated, tag = "1")]
    violations: Vec<Violation>,
}

#[derive(Clone, PartialEq, Message)]
struct Violation {
    #[prost(string, tag = "1")]
    subject: String,
    #[prost(string, tag = "2")]
    description: String,
}

#[tokio::test]
async fn calls_are_exhausted_with_details() {
    let rule = Rule::new("calls", "2/3s".parse().unwrap(), key::peer_ip());
    let mut client = client(RateLimitLayer::rules([rule]).memory(still().1)).await;
    for left in ["1", "0"] {
        let answer = client.check(question()).await.unwrap();
        let told = answer.metadata().get("ratelimit").unwrap().to_str().unwrap();
        assert!(told.starts_with(&format!("\"calls\";r={left};")), "{told}");
    }
    let status = client.check(question()).await.unwrap_err();
    assert_eq!(
        (status.code(), status.message()),
        (Code::ResourceExhausted, "Too many requests. Try again in 2 seconds.")
    );
    assert_eq!(status.metadata().get("grpc-retry-pushback-ms").unwrap(), "1500");
    assert_eq!(status.metadata().get("ratelimit").unwrap(), "\"calls\";r=0;t=2");

    let details = Status::decode(status.details()).unwrap();
    assert_eq!((details.code, details.message.as_str()), (8, status.message()));
    let [retry, quota] = &details.details[..] else { panic!("{details:?}") };
    assert_eq!(retry.type_url, "type.googleapis.com/google.rpc.RetryInfo");
    let retry = RetryInfo::decode(&retry.value[..]).unwrap();
    assert_eq!(retry.retry_delay, Some(Delay { seconds: 1, nanos: 500_000_000 }));
    assert_eq!(quota.type_url, "type.googleapis.com/google.rpc.QuotaFailure");
    let quota = QuotaFailure::decode(&quota.value[..]).unwrap();
    assert_eq!(
        quota.violations,
        [Violation { subject: "calls".into(), description: "rate limit".into() }]
    );
}

#[tokio::test]
async fn a_request_that_can_never_pass_should_not_be_retried() {
    let rule = Rule::new("calls", "1/s".parse().unwrap(), key::global()).cost(2);
    let mut client = client(RateLimitLayer::rules([rule]).grpc()).await;
    let status = client.check(question()).await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted);
    assert_eq!(status.metadata().get("grpc-retry-pushback-ms").unwrap(), "-1");
    assert_eq!(
        Status::decode(status.details()).unwrap().details.len(),
        1,
        "there is no time to come back"
    );
}

#[tokio::test]
async fn calls_that_fail_can_be_counted() {
    // A health service knows no such service, and says so with a status.
    let rule = Rule::new("unknown", "2/h".parse().unwrap(), key::peer_ip())
        .charge_when(|response| response.grpc_status().is_some_and(|code| code != 0));
    let mut client = client(RateLimitLayer::rules([rule]).memory(still().1)).await;
    for _ in 0..5 {
        client.check(question()).await.unwrap();
    }
    for _ in 0..2 {
        let status = client.check(HealthCheckRequest { service: "x".into() }).await.unwrap_err();
        assert_eq!(status.code(), Code::NotFound);
    }
    assert_eq!(client.check(question()).await.unwrap_err().code(), Code::ResourceExhausted);
}

struct Broken;

impl Store for Broken {
    fn decide<'a>(&'a self, _check: &'a Check<'a>) -> Deciding<'a> {
        Box::pin(async { Err(StoreError::Unavailable("it is gone".into())) })
    }
}

#[tokio::test]
async fn a_store_that_fails_is_unavailable() {
    let layer = RateLimitLayer::new("1/s".parse().unwrap(), key::global())
        .store(Broken, ManualClock::new())
        .on_failure(OnFailure::Closed);
    let status = client(layer).await.check(question()).await.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable);
}

#[tokio::test]
async fn a_stream_holds_its_lease_until_it_is_dropped() {
    let rule = Rule::new("streams", "1 concurrent ttl 10m".parse().unwrap(), key::global());
    let mut client = client(RateLimitLayer::rules([rule]).memory(still().1)).await;
    for _ in 0..5 {
        client.check(question()).await.unwrap();
    }
    let mut stream = client.watch(question()).await.unwrap().into_inner();
    assert!(stream.message().await.unwrap().is_some());
    assert_eq!(client.check(question()).await.unwrap_err().code(), Code::ResourceExhausted);
    drop(stream); // which resets the stream of HTTP/2
    let free = async { while client.check(question()).await.is_err() {} };
    tokio::time::timeout(std::time::Duration::from_secs(20), free).await.unwrap();
}
