//! A real Envoy asks: its own 429, its own headers, what it does with hits, shadows and our
//! absence.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use tidegate_testkit::{Envoy, wait_until};

use super::Protocol;

/// Answers every request with 200, and with what Envoy has added to it.
fn upstream() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap();
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            thread::spawn(move || {
                let mut reader = BufReader::new(stream);
                loop {
                    let mut head = String::new();
                    while !head.ends_with("\r\n\r\n") {
                        if reader.read_line(&mut head).unwrap_or(0) == 0 {
                            return;
                        }
                    }
                    let answer = "HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nhi\n";
                    if reader.get_mut().write_all(answer.as_bytes()).is_err() {
                        return;
                    }
                }
            });
        }
    });
    at
}

/// Envoy in front of `upstream`, asking `limiter`. Every path has descriptors of its own.
fn config(upstream: SocketAddr, limiter: SocketAddr, deny_without: bool) -> String {
    let route = |prefix: &str, limits: &str| {
        format!(
            "             - {{ match: {{ prefix: {prefix} }}, route: {{ cluster: upstream, rate_limits: [{limits}] }} }}\n"
        )
    };
    let key = |value: &str| {
        format!(
            "{{ actions: [{{ generic_key: {{ descriptor_key: what, descriptor_value: {value} }} }}] }}"
        )
    };
    let user = "{ actions: [{ request_headers: { header_name: x-user, descriptor_key: user } }] }";
    // Hits are read from where the filter itself is configured.
    let costly = "             - { match: { prefix: /costly }, route: { cluster: upstream }, typed_per_filter_config: { envoy.filters.http.ratelimit: { \"@type\": type.googleapis.com/envoy.extensions.filters.http.ratelimit.v3.RateLimitPerRoute, rate_limits: [{ actions: [{ generic_key: { descriptor_key: what, descriptor_value: costly } }], hits_addend: { number: 3 } }] } } }\n";
    let routes = [
        route("/user", user),
        route("/both", &format!("{user}, {}", key("all"))),
        costly.into(),
        route("/shadow", &key("shadow")),
        route("/address", "{ actions: [{ remote_address: {} }] }"),
        route("/", &key("nothing")),
    ]
    .concat();
    let cluster = |name: &str, at: SocketAddr, options: &str| {
        format!(
            "  - name: {name}\n    connect_timeout: 1s\n    type: STATIC\n{options}    load_assignment: {{ cluster_name: {name}, endpoints: [{{ lb_endpoints: [{{ endpoint: {{ address: {{ socket_address: {{ address: {}, port_value: {} }} }} }} }}] }}] }}\n",
            at.ip(),
            at.port()
        )
    };
    let http2 = "    typed_extension_protocol_options:\n      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:\n        \"@type\": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions\n        explicit_http_config: { http2_protocol_options: {} }\n    health_checks: [{ timeout: 1s, interval: 0.2s, unhealthy_threshold: 1000, healthy_threshold: 1, grpc_health_check: { service_name: envoy.service.ratelimit.v3.RateLimitService } }]\n";
    format!(
        "static_resources:
  listeners:
  - name: edge
    address: {{ socket_address: {{ address: 127.0.0.1, port_value: 0 }} }}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          \"@type\": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: edge
          use_remote_address: true
          route_config:
           virtual_hosts:
           - name: all
             domains: ['*']
             routes:
{routes}          http_filters:
          - name: envoy.filters.http.ratelimit
            typed_config:
              \"@type\": type.googleapis.com/envoy.extensions.filters.http.ratelimit.v3.RateLimit
              domain: edge
              timeout: 5s
              failure_mode_deny: {deny_without}
              enable_x_ratelimit_headers: DRAFT_VERSION_03
              rate_limit_service: {{ transport_api_version: V3, grpc_service: {{ envoy_grpc: {{ cluster_name: tidegate }} }} }}
          - name: envoy.filters.http.router
            typed_config: {{ \"@type\": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router }}
  clusters:
{}{}",
        cluster("upstream", upstream, ""),
        cluster("tidegate", limiter, http2)
    )
}

/// Status and headers of one GET.
fn get(at: SocketAddr, path: &str, user: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(at).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    write!(
        stream,
        "GET {path} HTTP/1.1\r\nhost: edge\r\nx-user: {user}\r\nconnection: close\r\n\r\n"
    )
    .unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let head = text.split("\r\n\r\n").next().unwrap_or_default().to_ascii_lowercase();
    (
        head.split(' ').nth(1).unwrap_or_else(|| panic!("{text:?}")).parse().unwrap(),
        text.to_ascii_lowercase(),
    )
}

fn header<'a>(head: &'a str, name: &str) -> Option<&'a str> {
    head.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": ")).map(str::trim)
}

const DOMAIN: &str = "\
domain: edge
descriptors:
  - key: user
    rate_limit: { unit: minute, requests_per_unit: 2, name: per-user }
  - key: what
    value: all
    rate_limit: { unit: hour, requests_per_unit: 3 }
  - key: what
    value: costly
    rate_limit: { unit: minute, requests_per_unit: 7 }
  - key: what
    value: shadow
    shadow_mode: true
    rate_limit: { unit: minute, requests_per_unit: 1 }
  - key: remote_address
    rate_limit: { limit: 60/min burst 3 }
";

#[test]
fn envoy_limits_as_it_is_told() {
    let protocol = Protocol::open("", DOMAIN);
    let envoy = Envoy::start(&config(upstream(), protocol.at, false));
    let ask = |path: &str, user: &str| get(envoy.address(), path, user);
    let health = || envoy.counter("cluster.tidegate.health_check.success");
    wait_until("envoy finds us healthy", Duration::from_secs(30), || health() > 0);

    let (status, head) = ask("/user", "a");
    assert_eq!(status, 200, "{head}\n{}", envoy.log());
    assert_eq!(header(&head, "x-ratelimit-limit"), Some("2, 2;w=60;name=\"per-user\""), "{head}");
    assert_eq!(
        (header(&head, "x-ratelimit-remaining"), header(&head, "x-ratelimit-reset")),
        (Some("1"), Some("40"))
    );
    assert_eq!(ask("/user", "a").0, 200);
    let (status, head) = ask("/user", "a");
    assert_eq!(status, 429, "{head}");
    assert_eq!(header(&head, "x-envoy-ratelimited"), Some("true"), "{head}");
    assert_eq!(
        (header(&head, "x-ratelimit-remaining"), header(&head, "x-ratelimit-reset")),
        (Some("0"), Some("40"))
    );
    assert_eq!(ask("/user", "b").0, 200, "everybody has a budget");

    // Two descriptors: one denies, and the other keeps what it has.
    assert_eq!((ask("/both", "c").0, ask("/both", "c").0, ask("/both", "c").0), (200, 200, 429));
    assert_eq!(ask("/both", "d").0, 200, "the third of three: the denial took nothing");
    let (status, head) = ask("/both", "d");
    assert_eq!((status, header(&head, "x-ratelimit-remaining")), (429, Some("0")), "{head}");

    // Three hits each of seven.
    let (_, head) = ask("/costly", "-");
    assert_eq!(header(&head, "x-ratelimit-remaining"), Some("4"), "{head}");
    assert_eq!((ask("/costly", "-").0, ask("/costly", "-").0), (200, 429));

    // Shadows deny nothing, and say so.
    let (first, second) = (ask("/shadow", "-"), ask("/shadow", "-"));
    assert_eq!((first.0, second.0), (200, 200));
    assert_eq!(header(&second.1, "x-ratelimit-remaining"), Some("0"), "{}", second.1);

    // A bucket, which Envoy knows nothing of: one more each second.
    let address = || ask("/address", "-");
    assert_eq!((address().0, address().0, address().0), (200, 200, 200));
    let (status, head) = address();
    assert_eq!((status, header(&head, "x-ratelimit-reset")), (429, Some("1")), "{head}");
    protocol.clock.advance(Duration::from_secs(1));
    assert_eq!((address().0, address().0), (200, 429));

    let (status, head) = ask("/", "-");
    assert_eq!((status, header(&head, "x-ratelimit-limit")), (200, None), "no rule, no limit");
    assert_eq!(
        envoy.counter("cluster.upstream.ratelimit.over_limit"),
        6,
        "envoy has counted the same"
    );
    assert_eq!(envoy.counter("cluster.upstream.ratelimit.error"), 0);
}

#[test]
fn headers_and_body_reach_the_client() {
    let protocol = Protocol::open("envoy: { headers: [ietf], body: problem }\n", DOMAIN);
    let envoy = Envoy::start(&config(upstream(), protocol.at, false));
    let (status, head) = get(envoy.address(), "/user", "a");
    assert_eq!(
        (status, header(&head, "ratelimit")),
        (200, Some("\"edge.user\";r=1;t=40")),
        "{head}"
    );
    get(envoy.address(), "/user", "a");
    let (status, head) = get(envoy.address(), "/user", "a");
    assert_eq!(
        (status, header(&head, "content-type")),
        (429, Some("application/problem+json")),
        "{head}"
    );
    assert!(
        head.contains("quota-exceeded") && head.contains("\"violated-policies\":[\"edge.user\"]"),
        "{head}"
    );
    assert!(header(&head, "retry-after").is_some(), "{head}");
}

#[test]
fn without_us_envoy_does_what_it_was_told_for_that_case() {
    for (deny_without, expected) in [(false, 200), (true, 500)] {
        let protocol = Protocol::open("", DOMAIN);
        let envoy = Envoy::start(&config(upstream(), protocol.at, deny_without));
        assert_eq!(
            (get(envoy.address(), "/user", "a").0, get(envoy.address(), "/user", "a").0),
            (200, 200)
        );
        assert_eq!(get(envoy.address(), "/user", "a").0, 429);
        drop(protocol);
        assert_eq!(get(envoy.address(), "/user", "a").0, expected, "{}", envoy.log());
        assert!(envoy.counter("cluster.upstream.ratelimit.error") > 0);
    }
}
