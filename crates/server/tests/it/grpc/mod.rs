//! The gRPC listener, through a tonic client: what is answered to whom.

mod envoy;
mod json;
mod lifecycle;
mod proto;
mod transcripts;

use std::net::SocketAddr;
use std::time::Duration;

use prost::Message;
use prost_types::value::Kind;
use tidegate::{ManualClock, Memory, Timestamp};
use tidegate_server::auth::Auth;
use tidegate_server::backend::Backend;
use tidegate_server::config::Config;
use tidegate_server::engine::Engine;
use tidegate_server::grpc::message::{
    Code, Descriptor, Entry, Override, RateLimitRequest, RateLimitResponse,
};
use tidegate_server::grpc::{SERVICE, serve};
use tidegate_server::rules::envoy::Domains;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::sync::watch;
use tonic::Status;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Channel, Endpoint};
use tonic_prost::ProstCodec;

/// Twenty seconds into a minute, 800 into an hour, 80 000 into a day.
const BEGIN: Timestamp = Timestamp::from_secs(1_700_000_000);

struct Protocol {
    at: SocketAddr,
    clock: ManualClock,
    engine: Engine,
    down: watch::Sender<bool>,
    served: Option<tokio::task::JoinHandle<std::io::Result<()>>>,
    runtime: Runtime,
    channel: Channel,
}

impl Protocol {
    /// Over a memory whose clock stands still; `config` is the text of a rules file, `domain` of a
    /// file for Envoy.
    fn open(config: &str, domain: &str) -> Protocol {
        let clock = ManualClock::new();
        clock.set(BEGIN);
        let memory = Memory::builder().clock(clock.clone()).build();
        Protocol::over(Backend::Memory(memory), clock, config, domain, Auth::default())
    }

    fn over(
        store: Backend,
        clock: ManualClock,
        config: &str,
        domain: &str,
        auth: Auth,
    ) -> Protocol {
        let config = Config::parse(config, "test").unwrap();
        let engine = Engine::new(store, config.rules);
        engine.settings().set_envoy_options(config.envoy.options);
        let mut domains = Domains::default();
        if !domain.is_empty() {
            domains.add(domain, "test").unwrap();
        }
        engine.set_domains(domains);
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
        let at = listener.local_addr().unwrap();
        let (down, stopped) = watch::channel(false);
        let served = Some(runtime.spawn(serve(listener, engine.clone(), auth, stopped)));
        let endpoint =
            Endpoint::from_shared(format!("http://{at}")).unwrap().timeout(Duration::from_secs(20));
        let channel = runtime.block_on(async { endpoint.connect_lazy() });
        Protocol { at, clock, engine, down, served, runtime, channel }
    }

    fn ask(&self, request: RateLimitRequest) -> Result<RateLimitResponse, Status> {
        self.runtime.block_on(ask(self.channel.clone(), request, None))
    }

    /// What is answered to one descriptor: whether it is over, and its only status in short.
    fn one(&self, descriptor: Descriptor) -> String {
        let response = self.ask(request("edge", vec![descriptor])).unwrap();
        assert_eq!(response.overall_code, response.statuses[0].code);
        shown(&response)
    }

    /// What is answered to several.
    fn all(&self, descriptors: Vec<Descriptor>) -> String {
        shown(&self.ask(request("edge", descriptors)).unwrap())
    }
}

impl Drop for Protocol {
    fn drop(&mut self) {
        let _ = self.down.send(true);
        let served = self.served.take().unwrap();
        let closed = self
            .runtime
            .block_on(async { tokio::time::timeout(Duration::from_secs(10), served).await });
        if !std::thread::panicking() {
            closed.expect("the listener closes in ten seconds").unwrap().unwrap();
        }
    }
}

async fn ask(
    channel: Channel,
    request: RateLimitRequest,
    token: Option<&str>,
) -> Result<RateLimitResponse, Status> {
    let mut client = tonic::client::Grpc::new(channel);
    client.ready().await.map_err(|error| Status::unavailable(error.to_string()))?;
    let path = PathAndQuery::try_from(format!("/{SERVICE}/ShouldRateLimit")).unwrap();
    let mut request = tonic::Request::new(request);
    if let Some(token) = token {
        request.metadata_mut().insert("authorization", format!("Bearer {token}").parse().unwrap());
    }
    let codec = ProstCodec::<RateLimitRequest, RateLimitResponse>::default();
    client.unary(request, path, codec).await.map(tonic::Response::into_inner)
}

fn request(domain: &str, descriptors: Vec<Descriptor>) -> RateLimitRequest {
    RateLimitRequest { domain: domain.into(), descriptors, hits_addend: 0 }
}

fn descriptor(entries: &[(&str, &str)]) -> Descriptor {
    let entries =
        entries.iter().map(|(key, value)| Entry { key: (*key).into(), value: (*value).into() });
    Descriptor { entries: entries.collect(), ..Descriptor::default() }
}

fn hits(entries: &[(&str, &str)], hits: u64) -> Descriptor {
    Descriptor { hits_addend: Some(hits), ..descriptor(entries) }
}

fn back(entries: &[(&str, &str)], hits: u64) -> Descriptor {
    Descriptor { hits_addend: Some(hits), is_negative_hits: true, ..descriptor(entries) }
}

/// `OVER: ok 5/2 "name" left 3 in 40s; over …`: the overall code, then each status.
fn shown(response: &RateLimitResponse) -> String {
    let code = |code: i32| match Code::try_from(code) {
        Ok(Code::Ok) => "ok",
        Ok(Code::OverLimit) => "over",
        _ => "unknown",
    };
    let statuses = response.statuses.iter().map(|status| {
        let mut text = code(status.code).to_string();
        if let Some(limit) = &status.current_limit {
            text += &format!(" {}/{}", limit.requests_per_unit, limit.unit);
            if !limit.name.is_empty() {
                text += &format!(" {}", limit.name);
            }
        }
        text += &format!(" left {}", status.limit_remaining);
        if let Some(wait) = &status.duration_until_reset {
            assert_eq!(wait.nanos, 0);
            text += &format!(" in {}s", wait.seconds);
        }
        text
    });
    format!("{}: {}", code(response.overall_code), statuses.collect::<Vec<_>>().join("; "))
}

fn metadata(response: &RateLimitResponse) -> String {
    let fields = response.dynamic_metadata.as_ref().map(|fields| &fields.fields);
    let shown =
        fields.into_iter().flatten().map(|(name, value)| format!("{name}={}", value_text(value)));
    shown.collect::<Vec<_>>().join(" ")
}

fn value_text(value: &prost_types::Value) -> String {
    match value.kind.as_ref().unwrap() {
        Kind::BoolValue(truth) => truth.to_string(),
        Kind::NumberValue(number) => number.to_string(),
        Kind::StringValue(text) => text.clone(),
        Kind::ListValue(list) => {
            format!("[{}]", list.values.iter().map(value_text).collect::<Vec<_>>().join(","))
        }
        Kind::StructValue(fields) => {
            let each =
                fields.fields.iter().map(|(name, value)| format!("{name}={}", value_text(value)));
            format!("{{{}}}", each.collect::<Vec<_>>().join(" "))
        }
        other => format!("{other:?}"),
    }
}

const EDGE: &str = "\
domain: edge
descriptors:
  - key: user
    rate_limit: { unit: minute, requests_per_unit: 5 }
  - key: user
    value: vip
    rate_limit: { unlimited: true }
  - key: user
    value: banned
    rate_limit: { unit: hour, requests_per_unit: 0 }
  - key: path
    rate_limit: { unit: day, requests_per_unit: 100, name: any-path }
  - key: path
    value: /search
    rate_limit: { unit: second, requests_per_unit: 2, name: search, replaces: [{ name: any-path }] }
  - key: trial
    shadow_mode: true
    rate_limit: { unit: minute, requests_per_unit: 1 }
  - key: api
    rate_limit: { limit: 30/min burst 2; 5/7d window }
";

#[test]
fn a_descriptor_is_answered_with_its_limit_and_what_is_left() {
    let protocol = Protocol::open("", EDGE);
    assert_eq!(protocol.one(descriptor(&[("user", "a")])), "ok: ok 5/2 left 4 in 40s");
    assert_eq!(protocol.one(hits(&[("user", "a")], 4)), "ok: ok 5/2 left 0 in 40s");
    assert_eq!(protocol.one(descriptor(&[("user", "a")])), "over: over 5/2 left 0 in 40s");
    protocol.clock.advance(Duration::from_millis(39_500));
    assert_eq!(
        protocol.one(descriptor(&[("user", "a")])),
        "over: over 5/2 left 0 in 1s",
        "rounded up, never early"
    );
    protocol.clock.advance(Duration::from_millis(500));
    assert_eq!(protocol.one(descriptor(&[("user", "a")])), "ok: ok 5/2 left 4 in 60s");
    assert_eq!(protocol.one(descriptor(&[("user", "vip")])), "ok: ok left 4294967295");
    assert_eq!(protocol.one(descriptor(&[("user", "banned")])), "over: over 0/3 left 0 in 3600s");
    assert_eq!(protocol.one(descriptor(&[("nobody", "x")])), "ok: ok left 0", "no rule, no limit");
    assert_eq!(
        protocol.one(descriptor(&[("user", "a"), ("path", "/")])),
        "ok: ok left 0",
        "a limit counts at its own depth"
    );
    let elsewhere = protocol.ask(request("elsewhere", vec![descriptor(&[("user", "a")])])).unwrap();
    assert_eq!(shown(&elsewhere), "ok: ok left 0");
}

#[test]
fn hits_of_the_descriptor_win_over_those_of_the_request() {
    let protocol = Protocol::open("", EDGE);
    let ask = |hits_addend, descriptor| {
        let request =
            RateLimitRequest { domain: "edge".into(), descriptors: vec![descriptor], hits_addend };
        shown(&protocol.ask(request).unwrap())
    };
    let user: &[(&str, &str)] = &[("user", "h")];
    assert_eq!(ask(0, descriptor(user)), "ok: ok 5/2 left 4 in 40s", "0 of the request means 1");
    assert_eq!(ask(2, descriptor(user)), "ok: ok 5/2 left 2 in 40s");
    assert_eq!(ask(9, hits(user, 1)), "ok: ok 5/2 left 1 in 40s");
    assert_eq!(ask(9, hits(user, 0)), "ok: ok 5/2 left 1 in 40s", "0 of a descriptor only looks");
    assert_eq!(ask(0, hits(user, 6)), "over: over 5/2 left 0 in 40s", "more than it can ever hold");
    assert_eq!(ask(0, hits(user, u64::MAX)), "over: over 5/2 left 0 in 40s");
    assert_eq!(ask(0, hits(user, 1)), "ok: ok 5/2 left 0 in 40s", "what was denied took nothing");
    assert_eq!(ask(0, hits(user, 0)), "over: over 5/2 left 0 in 40s", "one more would not pass");
    assert_eq!(ask(0, back(user, 2)), "ok: ok 5/2 left 2 in 40s", "given back");
    assert_eq!(ask(0, back(user, u64::MAX)), "ok: ok 5/2 left 5 in 0s", "never above full");
    assert_eq!(
        ask(3, Descriptor { is_negative_hits: true, ..descriptor(user) }),
        "ok: ok 5/2 left 5 in 0s"
    );
}

#[test]
fn one_over_its_limit_spares_all_the_others() {
    let protocol = Protocol::open("", EDGE);
    let both = || vec![descriptor(&[("user", "a")]), descriptor(&[("path", "/")])];
    for left in (0..5).rev() {
        let (path, wait) = (95 + left, 86_400 - 80_000);
        assert_eq!(
            protocol.all(both()),
            format!("ok: ok 5/2 left {left} in 40s; ok 100/4 any-path left {path} in {wait}s")
        );
    }
    assert_eq!(
        protocol.all(both()),
        "over: over 5/2 left 0 in 40s; ok 100/4 any-path left 95 in 6400s"
    );
    assert_eq!(
        protocol.one(hits(&[("path", "/")], 0)),
        "ok: ok 100/4 any-path left 95 in 6400s",
        "nothing was taken"
    );
    // One that only looks denies as well, and one that gives back never.
    let looks =
        vec![hits(&[("user", "a")], 0), descriptor(&[("path", "/")]), back(&[("path", "/x")], 1)];
    assert_eq!(
        protocol.all(looks),
        "over: over 5/2 left 0 in 40s; ok 100/4 any-path left 95 in 6400s; ok 100/4 any-path left 100 in 0s"
    );
}

#[test]
fn counted_as_the_original_does_what_is_rejected_takes_what_is_left() {
    let protocol = Protocol::open("envoy: { compat: count_rejected }\n", EDGE);
    let both = |hits| {
        let first = Descriptor { hits_addend: Some(hits), ..descriptor(&[("user", "a")]) };
        vec![first, descriptor(&[("path", "/")])]
    };
    assert_eq!(
        protocol.all(both(3)),
        "ok: ok 5/2 left 2 in 40s; ok 100/4 any-path left 99 in 6400s"
    );
    assert_eq!(
        protocol.all(both(3)),
        "over: over 5/2 left 0 in 40s; ok 100/4 any-path left 98 in 6400s"
    );
    assert_eq!(
        protocol.all(both(1)),
        "over: over 5/2 left 0 in 40s; ok 100/4 any-path left 97 in 6400s"
    );
}

#[test]
fn shadows_and_replaced_limits_do_not_count() {
    let protocol = Protocol::open("", EDGE);
    let ask = || protocol.ask(request("edge", vec![descriptor(&[("trial", "t")])])).unwrap();
    let first = ask();
    assert_eq!(
        (shown(&first), metadata(&first)),
        ("ok: ok 1/2 left 0 in 40s".into(), String::new())
    );
    let second = ask();
    assert_eq!(shown(&second), "ok: ok 1/2 left 0 in 40s");
    assert_eq!(
        metadata(&second),
        "shadow=[edge.trial]",
        "the caller can see what would have been denied"
    );
    let paths = vec![descriptor(&[("path", "/")]), descriptor(&[("path", "/search")])];
    assert_eq!(protocol.all(paths.clone()), "ok: ok left 0; ok 2/1 search left 1 in 1s");
    assert_eq!(protocol.all(paths), "ok: ok left 0; ok 2/1 search left 0 in 1s");
    assert_eq!(
        protocol.one(descriptor(&[("path", "/")])),
        "ok: ok 100/4 any-path left 99 in 6400s"
    );
}

#[test]
fn any_notation_stands_behind_envoy() {
    let protocol = Protocol::open("", EDGE);
    assert_eq!(
        protocol.one(descriptor(&[("api", "k")])),
        "ok: ok 2/0 left 1 in 2s",
        "a bucket of two, full in four seconds"
    );
    assert_eq!(protocol.one(descriptor(&[("api", "k")])), "ok: ok 2/0 left 0 in 4s");
    assert_eq!(protocol.one(descriptor(&[("api", "k")])), "over: over 2/0 left 0 in 2s");
    for _ in 0..3 {
        protocol.clock.advance(Duration::from_secs(2));
        protocol.one(descriptor(&[("api", "k")]));
    }
    protocol.clock.advance(Duration::from_secs(10));
    let answer = protocol.one(descriptor(&[("api", "k")]));
    assert!(answer.starts_with("over: over 5/7 left 0 in "), "the other limit binds: {answer}");
}

#[test]
fn several_quotas_deny_only_together() {
    let quota = "\
domain: edge
descriptors:
  - { key: model, value: a, quota_mode: true, metadata: { route: a }, rate_limit: { unit: minute, requests_per_unit: 1 } }
  - { key: model, value: b, quota_mode: true, metadata: { route: b }, rate_limit: { unit: minute, requests_per_unit: 2 } }
  - { key: user, rate_limit: { unit: minute, requests_per_unit: 9 } }
";
    let protocol = Protocol::open("", quota);
    let models = || {
        vec![
            descriptor(&[("model", "a")]),
            descriptor(&[("model", "b")]),
            descriptor(&[("user", "u")]),
        ]
    };
    let ask = || {
        let response = protocol.ask(request("edge", models())).unwrap();
        (shown(&response), metadata(&response))
    };
    let (answer, told) = ask();
    assert_eq!(answer, "ok: ok 1/2 left 0 in 40s; ok 2/2 left 1 in 40s; ok 9/2 left 8 in 40s");
    assert_eq!(told, "metadata={route=a} quotaModeEnabled=true quotaModeViolations=[]");
    let (answer, told) = ask();
    assert_eq!(answer, "ok: over 1/2 left 0 in 40s; ok 2/2 left 0 in 40s; ok 9/2 left 7 in 40s");
    assert_eq!(told, "metadata={route=b} quotaModeEnabled=true quotaModeViolations=[0]");
    let (answer, told) = ask();
    assert_eq!(
        answer,
        "over: over 1/2 left 0 in 40s; over 2/2 left 0 in 40s; ok 9/2 left 7 in 40s"
    );
    assert_eq!(told, "quotaModeEnabled=true quotaModeViolations=[0,1]");
    assert_eq!(
        protocol.one(descriptor(&[("model", "a")])),
        "over: over 1/2 left 0 in 40s",
        "alone it is a limit"
    );
}

#[test]
fn descriptors_tell_their_metadata_under_its_own_name() {
    let told = "\
domain: edge
descriptors:
  - { key: a, metadata: { shadow: mine, to: { blue: 1 }, first: a }, rate_limit: { unit: minute, requests_per_unit: 1 } }
  - { key: b, metadata: { to: { blue: 2, green: 3 }, first: b }, rate_limit: { unit: minute, requests_per_unit: 2 } }
";
    let protocol = Protocol::open("envoy: { compat: count_rejected }\n", told);
    let both = || vec![descriptor(&[("a", "x")]), descriptor(&[("b", "x")])];
    let ask = |descriptors| metadata(&protocol.ask(request("edge", descriptors)).unwrap());
    assert_eq!(
        ask(both()),
        "metadata={first=a shadow=mine to={blue=1 green=3}}",
        "merged, the first value stays"
    );
    assert_eq!(
        ask(both()),
        "metadata={first=b to={blue=2 green=3}}",
        "only of descriptors within their limit"
    );
    assert_eq!(ask(both()), "", "none is");
}

#[test]
fn a_limit_in_the_request_wins_unless_it_may_not() {
    let over = |requests, unit| Descriptor {
        limit: Some(Override { requests_per_unit: requests, unit }),
        ..descriptor(&[("user", "vip")])
    };
    let protocol = Protocol::open("", EDGE);
    assert_eq!(protocol.one(over(2, 3)), "ok: ok 2/3 left 1 in 2800s");
    assert_eq!(protocol.one(over(2, 3)), "ok: ok 2/3 left 0 in 2800s");
    assert_eq!(protocol.one(over(2, 3)), "over: over 2/3 left 0 in 2800s");
    assert_eq!(protocol.one(over(3, 3)), "ok: ok 3/3 left 0 in 2800s", "what was used stays used");
    assert_eq!(protocol.one(over(0, 1)), "over: over 0/1 left 0 in 1s");
    let unknown = protocol.ask(request("edge", vec![over(2, 0)])).unwrap_err();
    assert_eq!(
        unknown.message(),
        "descriptors[0].limit.unit is 0: expected 1 (second) to 7 (week)"
    );
    let elsewhere = protocol.ask(request("elsewhere", vec![over(2, 3)])).unwrap();
    assert_eq!(shown(&elsewhere), "ok: ok left 0", "the domain must exist");
    let capped = Protocol::open("envoy: { overrides: 1 }\n", EDGE);
    assert_eq!(capped.one(over(1000, 3)), "ok: ok 1/3 left 0 in 2800s");
    let off = Protocol::open("envoy: { overrides: off }\n", EDGE);
    assert_eq!(off.one(over(1, 3)), "ok: ok left 4294967295", "as the domain says");
}

/// Envoy shows the limit of a status to clients, who must not see a rule in shadow mode.
#[test]
fn a_descriptor_with_only_a_shadow_rule_carries_no_limit() {
    let rules = "\
rules:
  - { name: secret-trial, mode: shadow, when: { user: '*' }, by: [user], limit: 1/min window }
  - { name: per-ip, when: { ip: '*' }, by: [ip], limit: 2/min window }
";
    let protocol = Protocol::open(rules, "");
    let both =
        || request("edge", vec![descriptor(&[("user", "a")]), descriptor(&[("ip", "192.0.2.8")])]);
    for expected in
        ["ok: ok left 0; ok 2/2 per-ip left 1 in 40s", "ok: ok left 0; ok 2/2 per-ip left 0 in 40s"]
    {
        assert_eq!(shown(&protocol.ask(both()).unwrap()), expected);
    }
    let denied = protocol.ask(both()).unwrap();
    assert_eq!(shown(&denied), "over: ok left 0; over 2/2 per-ip left 0 in 40s");
    assert!(denied.statuses[0].current_limit.is_none(), "{denied:?}");
    assert_eq!(metadata(&denied), "shadow=[secret-trial]", "operators see it");
}

#[test]
fn other_domains_are_decided_by_the_rules_file() {
    let rules = "\
rules:
  - { name: per-ip, by: [ip], limit: 2/min window }
  - { name: search, when: { domain: edge, path: /search* }, by: [user], limit: 10/h window, cost: 5 }
  - { name: all, limit: 100/day window }
  - { name: trial, mode: shadow, by: [user], limit: 1/min window }
";
    let protocol = Protocol::open(rules, "");
    // One request with one descriptor is the same as its attributes through any other listener.
    let first =
        descriptor(&[("remote_address", "192.0.2.7"), ("path", "/search/x"), ("user", "a")]);
    let response = protocol.ask(request("edge", vec![first.clone()])).unwrap();
    assert_eq!(
        (shown(&response).as_str(), metadata(&response).as_str()),
        ("ok: ok 2/2 per-ip left 1 in 40s", "")
    );
    let response = protocol.ask(request("edge", vec![first.clone()])).unwrap();
    assert_eq!(shown(&response), "ok: ok 2/2 per-ip left 0 in 40s");
    assert_eq!(metadata(&response), "shadow=[trial]");
    assert_eq!(
        protocol.one(first.clone()),
        "over: over 10/3 search left 0 in 2800s",
        "the longest wait binds"
    );
    protocol.clock.advance(Duration::from_secs(40));
    // Several descriptors are one request: each rule charges it once for each of its budgets.
    let apart =
        vec![descriptor(&[("ip", "192.0.2.8")]), descriptor(&[("user", "b"), ("path", "/search")])];
    assert_eq!(
        protocol.all(apart.clone()),
        "ok: ok 2/2 per-ip left 1 in 60s; ok 10/3 search left 5 in 2760s"
    );
    let all = protocol.ask(request("other", vec![descriptor(&[("user", "x")])])).unwrap();
    assert_eq!(
        all.statuses[0].current_limit.as_ref().unwrap().name,
        "per-ip",
        "it left out its address: {all:?}"
    );
    let matches = protocol.engine.matching(&[("x", "y")][..], 1).unwrap();
    let ruling = protocol
        .runtime
        .block_on(protocol.engine.check_rules(tidegate::Op::Peek, matches, None))
        .unwrap();
    let all = ruling.charges.iter().position(|charged| &*charged.rule.name == "all").unwrap();
    assert_eq!(
        ruling.decision.unwrap().charges()[all].remaining,
        96,
        "four requests, whatever they were made of"
    );
}

#[test]
fn headers_and_a_body_are_sent_if_wanted() {
    let protocol = Protocol::open("envoy: { headers: [ietf], body: problem }\n", EDGE);
    let ask = |hits_addend| {
        let descriptors = vec![descriptor(&[("user", "a")])];
        protocol.ask(RateLimitRequest { domain: "edge".into(), descriptors, hits_addend }).unwrap()
    };
    let text = |response: &RateLimitResponse| {
        let headers = response.response_headers_to_add.iter();
        headers
            .map(|header| format!("{}: {}", header.key, header.value))
            .collect::<Vec<_>>()
            .join("\n")
    };
    let allowed = ask(5);
    assert_eq!(
        text(&allowed),
        "ratelimit-policy: \"edge.user\";q=5;w=60\nratelimit: \"edge.user\";r=0;t=40"
    );
    assert!(allowed.raw_body.is_empty());
    let denied = ask(1);
    assert!(
        text(&denied).ends_with("\nretry-after: 40\ncontent-type: application/problem+json"),
        "{}",
        text(&denied)
    );
    let body: serde_json::Value = serde_json::from_slice(&denied.raw_body).unwrap();
    assert_eq!(
        (&body["status"], &body["violated-policies"][0]),
        (&429.into(), &"edge.user".into())
    );
    assert_eq!(body["detail"], "Too many requests. Try again in 40 seconds.");
    let plain =
        Protocol::open("", EDGE).ask(request("edge", vec![descriptor(&[("user", "a")])])).unwrap();
    assert!(plain.response_headers_to_add.is_empty() && plain.request_headers_to_add.is_empty());
}

/// Two descriptors that lead to one rule are two policies; a denial is about the one that denied.
#[test]
fn policies_that_envoy_tells_its_client_have_names_of_their_own() {
    let rules = "envoy: { headers: [ietf], body: problem }\nrules:\n  - { name: per-user, by: [user], limit: 2/min }\n";
    let protocol = Protocol::open(rules, EDGE);
    let ask = |users: &[&str]| {
        let response = protocol.ask(request(
            "by-rules",
            users.iter().map(|user| descriptor(&[("user", user)])).collect(),
        ));
        let response = response.unwrap();
        let policy =
            response.response_headers_to_add.iter().find(|header| header.key == "ratelimit-policy");
        (
            response.overall_code,
            policy.unwrap().value.clone(),
            String::from_utf8(response.raw_body).unwrap(),
        )
    };
    let (code, policy, _) = ask(&["a", "b"]);
    assert_eq!(
        (code, policy.as_str()),
        (1, "\"per-user 2/m\";q=2;w=60, \"per-user 2/m #2\";q=2;w=60")
    );
    ask(&["b"]);
    let (code, policy, body) = ask(&["a", "b"]);
    assert_eq!((code, policy.as_str()), (2, "\"per-user 2/m #2\";q=2;w=60"));
    assert!(body.contains(r#""violated-policies":["per-user 2/m #2"]"#), "{body}");
}

/// Envoy's protocol knows no 403: what a rule wants is in the metadata. What Envoy's own
/// configuration never lets pass is over its limit.
#[test]
fn the_status_of_a_rule_that_denies_is_in_the_metadata() {
    let rules = "\
envoy: { headers: [ietf], body: problem }
rules:
  - { name: shut, when: { user: a }, limit: deny }
  - { name: hidden, when: { user: b }, limit: deny, deny_status: 429 }
  - { name: all, limit: 100/min }
";
    let zero = "domain: zero\ndescriptors:\n  - { key: user, rate_limit: { unit: minute, requests_per_unit: 0 } }\n";
    let protocol = Protocol::open(rules, zero);
    for (domain, user, status, policy) in [
        ("d", "a", Some(403.0), "shut"),
        ("d", "b", Some(429.0), "hidden"),
        ("zero", "a", None, "zero.user"),
    ] {
        let response = protocol.ask(request(domain, vec![descriptor(&[("user", user)])])).unwrap();
        assert_eq!(response.overall_code, 2);
        let told = response
            .dynamic_metadata
            .and_then(|metadata| metadata.fields.get("deny_status")?.kind.clone());
        assert_eq!(told, status.map(prost_types::value::Kind::NumberValue), "{domain} {user}");
        let headers: Vec<&str> =
            response.response_headers_to_add.iter().map(|header| header.key.as_str()).collect();
        assert_eq!(headers, ["content-type"], "nothing about other rules");
        let body = String::from_utf8(response.raw_body).unwrap();
        let end = format!(
            r#""status":429,"detail":"Too many requests.","violated-policies":["{policy}"],"retry_after_secs":null}}"#
        );
        assert!(body.ends_with(&end), "{body}");
    }
}

#[test]
fn too_much_and_too_little_are_mistakes() {
    let protocol = Protocol::open("", EDGE);
    let long = "x".repeat(1025);
    let many = |count: usize| vec![descriptor(&[("user", "a")]); count];
    for (request, expected) in [
        (request("", many(1)), "rate limit domain must not be empty".to_string()),
        (request("edge", vec![]), "rate limit descriptor list must not be empty".into()),
        (request("edge", many(65)), "65 descriptors: expected at most 64".into()),
        (request(&long, many(1)), "domain has 1025 bytes: expected at most 1024".into()),
        (
            request("edge", vec![descriptor(&[("a", "b"); 33])]),
            "descriptors[0] has 33 entries: expected at most 32".into(),
        ),
        (
            request("edge", vec![descriptor(&[("a", "b"), ("c", &long)])]),
            "descriptors[0].entries[1].value has 1025 bytes: expected at most 1024".into(),
        ),
    ] {
        let status = protocol.ask(request).unwrap_err();
        assert_eq!(
            (status.code(), status.message()),
            (tonic::Code::InvalidArgument, expected.as_str())
        );
    }
    assert!(protocol.ask(request("edge", many(64))).is_ok());
    let key = "k".repeat(1024);
    let wide = request("edge", vec![descriptor(&[(key.as_str(), key.as_str()); 32]); 2]);
    assert!(wide.encoded_len() > 64 << 10);
    assert_eq!(
        protocol.ask(wide).unwrap_err().code(),
        tonic::Code::OutOfRange,
        "a message of more than 64 KiB"
    );
    // Keys that no store takes do not let anybody escape.
    let deep = "domain: edge\ndescriptors: [{ key: a, descriptors: [{ key: b, rate_limit: { unit: minute, requests_per_unit: 1 } }] }]\n";
    let protocol = Protocol::open("", deep);
    let wide = || descriptor(&[("a", &key), ("b", &key)]);
    assert_eq!(protocol.one(wide()), "ok: ok 1/2 left 0 in 40s");
    assert_eq!(protocol.one(wide()), "over: over 1/2 left 0 in 40s");
}
