//! `cargo run --release -- grpc`: Envoy's rate limit service over gRPC, Tidegate's listener beside
//! bare tonic.
//!
//! Each server is a process of its own with a runtime of its own. The bare one has the same
//! messages and answers every request with the same constant; what Tidegate adds is the whole
//! decision. One client asks both in turns, many short rounds each: connections times concurrent
//! once on each. Beside requests per second it shows the server's processor time per request, which
//! a busy machine disturbs less.

use std::convert::Infallible;
use std::fs;
use std::future::{Ready, ready};
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use tidegate_server::config::Config;
use tidegate_server::grpc::SERVICE;
use tidegate_server::grpc::message::{
    CurrentLimit, Descriptor, DescriptorStatus, Entry, RateLimitRequest, RateLimitResponse,
};
use tonic::body::Body;
use tonic::codegen::{BoxFuture, Service, http};
use tonic::server::{Grpc, NamedService, UnaryService};
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Response, Status};
use tonic_prost::ProstCodec;

const ROUNDS: usize = 9;
const ROUND: Duration = Duration::from_millis(500);
const KEYS: u64 = 100_000;
/// Connections, and concurrent requests on each.
const SHAPES: [(usize, usize); 3] = [(1, 1), (50, 1), (10, 32)];

pub(crate) fn run(words: &[&str]) {
    if let ["serve", which] = words {
        return serve(which);
    }
    let rounds = words.first().map_or(ROUNDS, |word| word.parse().expect("a number of rounds"));
    let servers = [Server::start("tidegate"), Server::start("bare")];
    let runtime =
        tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime");
    println!(
        "requests per second and processor time of the server per request, median of {rounds} interleaved rounds of {ROUND:?}\n"
    );
    for (connections, streams) in SHAPES {
        let mut measured: [Vec<Round>; 2] = Default::default();
        let channels = servers.each_ref().map(|server| {
            let endpoint =
                Endpoint::from_shared(format!("http://{}", server.address)).expect("an address");
            let connect = || runtime.block_on(endpoint.connect()).expect("a connection");
            (0..connections).map(|_| connect()).collect::<Vec<_>>()
        });
        for round in 0..=rounds {
            for (which, server) in servers.iter().enumerate() {
                let one = measure(&runtime, server, &channels[which], streams);
                // The first fills the caches.
                if round > 0 {
                    measured[which].push(one);
                }
            }
        }
        println!("{connections} connection(s), {streams} concurrent request(s) on each");
        let [ours, bare] = measured.map(|rounds| Round::median(&rounds));
        for (name, round) in [("tidegate", &ours), ("bare tonic", &bare)] {
            println!(
                "  {name:<10} {:>8.0} requests/s   x {:.2}   server {:>5.1} us   x {:.2}",
                round.requests,
                round.requests / bare.requests,
                round.server_us,
                round.server_us / bare.server_us
            );
        }
        println!();
    }
}

/// A server in a process of its own.
struct Server {
    child: Child,
    address: String,
}

impl Server {
    fn start(which: &str) -> Server {
        let program = std::env::current_exe().expect("a program");
        let mut child = Command::new(program)
            .args(["grpc", "serve", which])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a server");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("it is piped"))
            .read_line(&mut line)
            .expect("an address");
        Server { child, address: line.trim().into() }
    }

    /// What all its threads have used.
    fn processor_time(&self) -> Duration {
        let tasks =
            fs::read_dir(format!("/proc/{}/task", self.child.id())).expect("/proc, so Linux");
        let of = |task: std::io::Result<fs::DirEntry>| {
            let text = fs::read_to_string(task.ok()?.path().join("schedstat")).ok()?;
            text.split(' ').next()?.parse::<u64>().ok()
        };
        Duration::from_nanos(tasks.filter_map(of).sum())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill().and_then(|()| self.child.wait());
    }
}

struct Round {
    requests: f64,
    server_us: f64,
}

impl Round {
    fn median(rounds: &[Round]) -> Round {
        let of = |field: fn(&Round) -> f64| {
            let mut values: Vec<f64> = rounds.iter().map(field).collect();
            values.sort_by(f64::total_cmp);
            values[values.len() / 2]
        };
        Round { requests: of(|round| round.requests), server_us: of(|round| round.server_us) }
    }
}

fn measure(
    runtime: &tokio::runtime::Runtime,
    server: &Server,
    channels: &[Channel],
    streams: usize,
) -> Round {
    let (done, total) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let (before, start) = (server.processor_time(), Instant::now());
    runtime.block_on(async {
        let callers: Vec<_> = channels
            .iter()
            .flat_map(|channel| std::iter::repeat_n(channel, streams))
            .zip(0_u64..)
            .map(|(channel, caller)| {
                let (channel, done, total) =
                    (channel.clone(), Arc::clone(&done), Arc::clone(&total));
                tokio::spawn(async move {
                    let mut calls = 0;
                    while !done.load(Ordering::Relaxed) {
                        ask(channel.clone(), caller * 7919 + calls * 104_729).await;
                        calls += 1;
                    }
                    total.fetch_add(calls, Ordering::Relaxed);
                })
            })
            .collect();
        tokio::time::sleep(ROUND).await;
        done.store(true, Ordering::Relaxed);
        for caller in callers {
            caller.await.expect("a caller");
        }
    });
    let (elapsed, requests) = (start.elapsed().as_secs_f64(), total.load(Ordering::Relaxed) as f64);
    Round {
        requests: requests / elapsed,
        server_us: (server.processor_time() - before).as_secs_f64() * 1e6 / requests,
    }
}

async fn ask(channel: Channel, number: u64) {
    let mut client = tonic::client::Grpc::new(channel);
    client.ready().await.expect("a connection");
    let path = http::uri::PathAndQuery::from_static(
        "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit",
    );
    let entries = vec![
        Entry { key: "generic_key".into(), value: "search".into() },
        Entry { key: "user".into(), value: format!("user-{}", number % KEYS) },
    ];
    let request = RateLimitRequest {
        domain: "edge".into(),
        descriptors: vec![Descriptor { entries, ..Descriptor::default() }],
        hits_addend: 0,
    };
    let codec = ProstCodec::<RateLimitRequest, RateLimitResponse>::default();
    let answer =
        client.unary(Request::new(request), path, codec).await.expect("an answer").into_inner();
    assert!(answer.overall_code == 1 && answer.statuses.len() == 1, "{answer:?}");
}

/// Serves until the process that started it ends.
fn serve(which: &str) {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime");
    let say = |address: std::net::SocketAddr| {
        println!("{address}");
        let _ = std::io::stdout().flush();
    };
    match which {
        "tidegate" => {
            let folder = tempfile::tempdir().expect("a folder");
            let domain = "domain: edge\ndescriptors: [{ key: generic_key, value: search, descriptors: [{ key: user, rate_limit: { unit: hour, requests_per_unit: 1000000000 } }] }]\n";
            fs::write(folder.path().join("edge.yaml"), domain).expect("a file");
            let config = format!(
                "listen: {{ http: off, resp: off, grpc: 127.0.0.1:0 }}\nenvoy: {{ config: {:?} }}\n",
                folder.path()
            );
            let config = Config::parse(&config, "bench").expect("a configuration");
            let running = runtime
                .block_on(tidegate_server::start(config, Default::default()))
                .expect("listeners");
            say(running.grpc.expect("it listens"));
            until_alone();
        }
        _ => {
            let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
            say(listener.local_addr().expect("an address"));
            runtime.spawn(async move {
                listener.set_nonblocking(true).expect("a socket");
                let listener = tokio::net::TcpListener::from_std(listener).expect("a socket");
                let incoming =
                    tonic::transport::server::TcpIncoming::from(listener).with_nodelay(Some(true));
                tonic::transport::Server::builder()
                    .add_service(Bare)
                    .serve_with_incoming(incoming)
                    .await
            });
            until_alone();
        }
    }
}

/// The other end of standard input is closed when the parent ends.
fn until_alone() {
    let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
}

/// The same service without a decision: what tonic generates, by hand.
#[derive(Clone)]
struct Bare;

impl NamedService for Bare {
    const NAME: &'static str = SERVICE;
}

impl Service<http::Request<Body>> for Bare {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Self::Response, Infallible>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        Box::pin(async move {
            let codec = ProstCodec::<RateLimitResponse, RateLimitRequest>::default();
            Ok(Grpc::new(codec).unary(Constant, request).await)
        })
    }
}

struct Constant;

impl UnaryService<RateLimitRequest> for Constant {
    type Response = RateLimitResponse;
    type Future = Ready<Result<Response<RateLimitResponse>, Status>>;

    fn call(&mut self, _: Request<RateLimitRequest>) -> Self::Future {
        let current_limit =
            Some(CurrentLimit { requests_per_unit: 1_000_000_000, unit: 3, name: String::new() });
        let status = DescriptorStatus {
            code: 1,
            current_limit,
            limit_remaining: 999_999_999,
            duration_until_reset: Some(prost_types::Duration { seconds: 3000, nanos: 0 }),
            quota: None,
        };
        ready(Ok(Response::new(RateLimitResponse {
            overall_code: 1,
            statuses: vec![status],
            ..RateLimitResponse::default()
        })))
    }
}
