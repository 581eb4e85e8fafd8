//! The rate at which readiness probes the store.

#![allow(clippy::print_stdout, reason = "figures for a run with --nocapture")]

use std::io::Write;
use std::net::TcpStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use tidegate_server::config::Config;
use tidegate_server::{Options, start};
use tidegate_testkit::{Flavor, Reply, Server, wait_until};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;

use crate::listeners::Http;

const BOUND: Duration = Duration::from_secs(20);
/// How long readiness is requested.
const DURATION: Duration = Duration::from_secs(1);
const READY: &str = "GET /readyz HTTP/1.1\r\nhost: tidegate\r\n\r\n";

#[test]
fn the_store_is_probed_at_most_ten_times_a_second() {
    let server = Server::start(Flavor::Redis7);
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let text = format!(
        "store: {}\nresilience: {{ nodes: 1, deadline_ms: 10000 }}\nlisten: {{ http: 127.0.0.1:0, admin: 127.0.0.1:0, grpc: 127.0.0.1:0, resp: off }}\n",
        server.url()
    );
    let running =
        runtime.block_on(start(Config::parse(&text, "test").unwrap(), Options::default())).unwrap();
    let (http, admin, grpc) =
        (running.http.unwrap(), running.admin.unwrap(), running.grpc.unwrap());
    let ready = |client: &mut Http| {
        client.send(READY);
        client.receive().unwrap().body == "ready\n"
    };
    wait_until("the store decides", BOUND, || ready(&mut Http::connect(http)));
    // What Redis itself sees of them.
    let mut monitor = server.client().unwrap();
    assert_eq!(monitor.command(&["MONITOR"]).unwrap(), Reply::Text("OK".into()));
    let seen = thread::spawn(move || {
        let mut probes = 0;
        loop {
            match monitor.receive().unwrap() {
                Reply::Text(line) if line.contains("\"it is over\"") => return probes,
                // Not what its script does.
                Reply::Text(line) => {
                    probes +=
                        u32::from(line.contains("tidegate-readyz") && !line.contains(" lua] "));
                }
                other => panic!("{other:?}"),
            }
        }
    });
    let began = Instant::now();
    let channel = tonic::transport::Endpoint::from_shared(format!("http://{grpc}")).unwrap();
    let channel = runtime.block_on(channel.connect()).unwrap();
    let (calls, is_over) = (AtomicUsize::new(0), || began.elapsed() > DURATION);
    thread::scope(|scope| {
        for at in [http, http, admin] {
            let (calls, ready) = (&calls, &ready);
            scope.spawn(move || {
                let mut client = Http::connect(at);
                while !is_over() {
                    assert!(ready(&mut client));
                    calls.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        // Clients that leave without waiting do not make the next one ask anew.
        scope.spawn(|| {
            while !is_over() {
                let mut stream = TcpStream::connect(http).unwrap();
                stream.write_all(READY.as_bytes()).unwrap();
                calls.fetch_add(1, Ordering::Relaxed);
            }
        });
        runtime.block_on(async {
            let mut client = HealthClient::new(channel);
            while !is_over() {
                client.check(HealthCheckRequest::default()).await.unwrap();
                calls.fetch_add(1, Ordering::Relaxed);
            }
        });
    });
    let took = began.elapsed();
    server.command(&["ECHO", "it is over"]);
    let (probes, calls) = (seen.join().unwrap(), calls.into_inner());
    println!("{calls} calls in {took:?}: {probes} probes");
    assert!(calls >= 3000, "{calls} calls");
    let most = took.as_millis() / 100 + 1;
    assert!(
        (3..=most).contains(&probes.into()),
        "{probes} probes in {took:?}: expected at most {most}"
    );
    assert!(runtime.block_on(running.stop()));
}
