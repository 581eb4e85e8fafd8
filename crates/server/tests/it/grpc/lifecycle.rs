//! From start to stop: health, reflection, tokens, files that change, a store that goes away, and
//! the order to stop.

use std::fs;
use std::os::unix::fs::symlink;
use std::time::Duration;

use tidegate::redis::Redis;
use tidegate::{ManualClock, Memory};
use tidegate_server::auth::Auth;
use tidegate_server::backend::Backend;
use tidegate_server::config::Config;
use tidegate_server::grpc::SERVICE;
use tidegate_server::{Options, start};
use tidegate_testkit::{Flavor, Server, wait_until};
use tonic::codegen::tokio_stream::StreamExt;
use tonic::transport::{Channel, Endpoint};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use tonic_reflection::pb::v1::ServerReflectionRequest;
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;

use super::{EDGE, Protocol, ask, descriptor, request, shown};

const BOUND: Duration = Duration::from_secs(20);

fn about(service: &str) -> HealthCheckRequest {
    HealthCheckRequest { service: service.into() }
}

#[test]
fn health_follows_readiness() {
    let server = Server::start(Flavor::Redis7);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let redis = runtime.block_on(async { Redis::new(&server.url()).unwrap() });
    let protocol =
        Protocol::over(Backend::Redis(redis), ManualClock::new(), "", EDGE, Auth::default());
    let health = || {
        let mut client = HealthClient::new(protocol.channel.clone());
        protocol
            .runtime
            .block_on(async { client.check(about(SERVICE)).await })
            .unwrap()
            .into_inner()
            .status()
    };
    assert_eq!(health(), ServingStatus::Serving);
    let ask = || protocol.ask(request("edge", vec![descriptor(&[("user", "a")])]));
    assert!(ask().is_ok());
    server.kill();
    wait_until("it is known to be gone", BOUND, || health() == ServingStatus::NotServing);
    assert_eq!(
        ask().unwrap_err().code(),
        tonic::Code::Unavailable,
        "no answer is no answer: Envoy decides what then"
    );
    server.restart();
    wait_until("it is back", BOUND, || health() == ServingStatus::Serving);
    wait_until("it answers", BOUND, || ask().is_ok());
    let mut client = HealthClient::new(protocol.channel.clone());
    let unknown =
        protocol.runtime.block_on(async { client.check(about("x.Y")).await }).unwrap_err();
    assert_eq!(unknown.code(), tonic::Code::NotFound);
}

#[test]
fn whoever_watches_is_told_that_it_stops() {
    let protocol = Protocol::open("", EDGE);
    let mut client = HealthClient::new(protocol.channel.clone());
    let mut news =
        protocol.runtime.block_on(async { client.watch(about("")).await }).unwrap().into_inner();
    let mut next = || protocol.runtime.block_on(news.next()).map(|told| told.unwrap().status());
    assert_eq!(next(), Some(ServingStatus::Serving));
    protocol.down.send(true).unwrap();
    assert_eq!(next(), Some(ServingStatus::NotServing));
    assert_eq!(next(), None);
}

#[test]
fn services_can_be_found_by_reflection() {
    let protocol = Protocol::open("", EDGE);
    let ask = |question: MessageRequest| {
        let mut client = ServerReflectionClient::new(protocol.channel.clone());
        let request =
            ServerReflectionRequest { host: String::new(), message_request: Some(question) };
        let stream = tonic::codegen::tokio_stream::once(request);
        protocol.runtime.block_on(async {
            let mut answers = client.server_reflection_info(stream).await.unwrap().into_inner();
            answers.next().await.unwrap().unwrap().message_response.unwrap()
        })
    };
    let MessageResponse::ListServicesResponse(list) =
        ask(MessageRequest::ListServices(String::new()))
    else {
        panic!("not a list")
    };
    let names: Vec<&str> = list.service.iter().map(|service| service.name.as_str()).collect();
    assert!(names.contains(&SERVICE) && names.contains(&"grpc.health.v1.Health"), "{names:?}");
    let file = ask(MessageRequest::FileContainingSymbol(format!("{SERVICE}.ShouldRateLimit")));
    assert!(
        matches!(file, MessageResponse::FileDescriptorResponse(files) if !files.file_descriptor_proto.is_empty())
    );
    let unit = ask(MessageRequest::FileByFilename("google/protobuf/wrappers.proto".into()));
    assert!(
        matches!(unit, MessageResponse::FileDescriptorResponse(_)),
        "what it imports is there too"
    );
}

#[test]
fn a_token_lets_in_and_health_needs_none() {
    let auth = Auth { checks: Some("open".into()), admin: Some("sesame".into()) };
    let protocol =
        Protocol::over(Backend::Memory(Memory::new()), ManualClock::new(), "", EDGE, auth);
    let with = |token| {
        let question = request("edge", vec![descriptor(&[("user", "vip")])]);
        protocol
            .runtime
            .block_on(ask(protocol.channel.clone(), question, token))
            .map_err(|status| status.code())
    };
    assert_eq!(with(None), Err(tonic::Code::Unauthenticated));
    assert_eq!(with(Some("wrong")), Err(tonic::Code::Unauthenticated));
    assert!(with(Some("open")).is_ok() && with(Some("sesame")).is_ok());
    let mut client = HealthClient::new(protocol.channel.clone());
    assert!(protocol.runtime.block_on(async { client.check(about("")).await }).is_ok());
}

#[test]
fn what_is_not_there_is_unimplemented() {
    let protocol = Protocol::open("", EDGE);
    for path in ["/envoy.service.ratelimit.v3.RateLimitService/ShouldNot", "/x.Y/Z", "/"] {
        let codec =
            tonic_prost::ProstCodec::<super::RateLimitRequest, super::RateLimitResponse>::default();
        let status = protocol.runtime.block_on(async {
            let mut client = tonic::client::Grpc::new(protocol.channel.clone());
            client.ready().await.unwrap();
            client
                .unary(tonic::Request::new(request("edge", vec![])), path.parse().unwrap(), codec)
                .await
                .unwrap_err()
        });
        assert_eq!(status.code(), tonic::Code::Unimplemented, "{path}");
    }
}

/// As Kubernetes mounts a ConfigMap: files are links through `..data`, which is swapped for
/// another.
#[test]
fn a_folder_that_changes_is_read_and_a_bad_one_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let domain = |requests: u32| {
        format!(
            "domain: edge\ndescriptors: [{{ key: user, rate_limit: {{ unit: year, requests_per_unit: {requests} }} }}]\n"
        )
    };
    let put = |version: &str, text: &str| {
        fs::create_dir(at(version)).unwrap();
        fs::write(at(version).join("edge.yaml"), text).unwrap();
        symlink(version, at("..data_tmp")).unwrap();
        fs::rename(at("..data_tmp"), at("..data")).unwrap();
    };
    put("..1", &domain(5));
    symlink("..data/edge.yaml", at("edge.yaml")).unwrap();
    let config = format!(
        "listen: {{ http: off, resp: off, grpc: 127.0.0.1:0 }}\nenvoy: {{ config: {:?} }}\n",
        folder.path()
    );
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let running = runtime
        .block_on(start(Config::parse(&config, "test").unwrap(), Options::default()))
        .unwrap();
    let endpoint = Endpoint::from_shared(format!("http://{}", running.grpc.unwrap())).unwrap();
    let channel: Channel = runtime.block_on(endpoint.connect()).unwrap();
    let left = |hits| {
        let question = request("edge", vec![super::hits(&[("user", "a")], hits)]);
        let answer = shown(&runtime.block_on(ask(channel.clone(), question, None)).unwrap());
        answer.split(" in ").next().unwrap().to_string()
    };
    assert_eq!(left(2), "ok: ok 5/6 left 3");
    put("..2", &domain(9));
    wait_until("the new limit counts", BOUND, || left(0) == "ok: ok 9/6 left 7");
    put(
        "..3",
        "domain: edge\ndescriptors: [{ key: user, rate_limit: { unit: aeon, requests_per_unit: 1 } }]\n",
    );
    let known = running.engine().domains();
    // A second file counts only together with a first that is right; until then the last good ones
    // do.
    fs::write(at("other.yaml"), "domain: other\n").unwrap();
    put("..4", &domain(7));
    wait_until("the good limit counts", BOUND, || left(0) == "ok: ok 7/6 left 5");
    assert_eq!(running.engine().domains().names(), ["edge", "other"]);
    assert_eq!(known.names(), ["edge"]);
    fs::write(at("other.yaml"), domain(1)).unwrap();
    assert_eq!(
        left(0),
        "ok: ok 7/6 left 5",
        "a domain in two files is a mistake, and what was good stays"
    );
    assert!(runtime.block_on(running.stop()));
}

#[test]
fn a_folder_with_a_mistake_does_not_start() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("a.yaml"), "domain: a\ndescriptors:\n  - kee: x\n").unwrap();
    let config = format!(
        "listen: {{ http: off, resp: off, grpc: off }}\nenvoy: {{ config: {:?} }}\n",
        folder.path()
    );
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let error = runtime
        .block_on(start(Config::parse(&config, "test").unwrap(), Options::default()))
        .unwrap_err();
    assert!(
        error
            .to_string()
            .ends_with("a.yaml:3:5: config error, unknown key 'kee': did you mean key?"),
        "{error}"
    );
}

#[test]
fn the_order_to_stop_under_load_loses_nothing_that_was_accepted() {
    let domain = "domain: edge\ndescriptors: [{ key: user, rate_limit: { unit: year, requests_per_unit: 1000000 } }]\n";
    let protocol = Protocol::open("", domain);
    let question = || request("edge", vec![descriptor(&[("user", "a")])]);
    let counts = protocol.runtime.block_on(async {
        let mut callers = tokio::task::JoinSet::new();
        for _ in 0..8 {
            // A connection each, so that each is told to go.
            let endpoint = Endpoint::from_shared(format!("http://{}", protocol.at)).unwrap();
            let channel = endpoint.connect().await.unwrap();
            let down = protocol.down.clone();
            callers.spawn(async move {
                let mut answered = 0_u64;
                while let Ok(answer) = ask(channel.clone(), question(), None).await {
                    assert_eq!(answer.overall_code, 1);
                    answered += 1;
                    if answered == 200 {
                        let _ = down.send(true);
                    }
                }
                assert!(*down.borrow(), "before the order everybody was answered");
                answered
            });
        }
        callers.join_all().await
    });
    // Whatever was decided was also answered: what callers have seen is what was taken.
    let found = protocol.engine.domains().find("edge", &[("user", "a")], 1).unwrap();
    let ruling = protocol
        .runtime
        .block_on(protocol.engine.check_rules(tidegate::Op::Peek, vec![found.charge], None))
        .unwrap();
    assert_eq!(
        1_000_000 - ruling.decision.unwrap().remaining(),
        counts.iter().sum::<u64>(),
        "{counts:?}"
    );
}

/// Nobody listens where the store should be.
#[test]
fn an_answer_without_the_store_is_marked() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let redis =
        runtime.block_on(async { tidegate::redis::Redis::new("redis://127.0.0.1:1/") }).unwrap();
    let resilient = runtime.block_on(async {
        tidegate::resilience::Resilient::builder(redis.clone()).nodes(1).build()
    });
    let config = "rules:\n  - { name: per-ip, by: [ip], limit: 2/min }\n";
    let protocol = Protocol::over(
        Backend::Resilient(resilient, redis),
        ManualClock::new(),
        config,
        "",
        Auth::default(),
    );
    let response = protocol.ask(request("edge", vec![descriptor(&[("ip", "192.0.2.7")])])).unwrap();
    let mode =
        response.request_headers_to_add.iter().find(|header| header.key == "x-tidegate-mode");
    assert_eq!(mode.expect("a header that says so").value, "fallback");
    assert!(response.response_headers_to_add.is_empty(), "clients are not told");
    let metadata = response.dynamic_metadata.unwrap();
    assert!(
        metadata.fields.contains_key("degraded") && metadata.fields.contains_key("source"),
        "{metadata:?}"
    );
}
