//! The layer by itself: limits, headers, denials, failure, cancellation.

use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use axum::body::Body;
use axum::http::{Request, Response, StatusCode};
use tidegate::http::headers::Families;
use tidegate::resilience::{OnFailure, Resilient};
use tidegate::store::Deciding;
use tidegate::tower::{RateLimitLayer, Rule, key, per_request, per_request_async};
use tidegate::{Check, Limits, ManualClock, Store, StoreError};
use tower::{Layer, Service, ServiceExt};

use crate::{answer, behind, request, still};

fn limits(text: &str) -> Limits {
    text.parse().unwrap()
}

const IETF: Families = Families::IETF;

#[tokio::test]
async fn requests_are_allowed_until_the_limit_and_again_after_the_wait() {
    let (clock, memory) = still();
    let layer = RateLimitLayer::new(limits("2/s"), key::peer_ip()).memory(memory);
    let service = behind(&layer);
    for left in ["1", "0"] {
        let passed = service.ask(request("192.0.2.7", "/a")).await;
        assert_eq!((passed.status, passed.body.as_str()), (200, "/a"));
        assert_eq!(passed.header("ratelimit-policy"), r#""default";q=2;w=1"#);
        assert_eq!(passed.header("ratelimit"), format!(r#""default";r={left};t=1"#));
        assert_eq!(passed.header("retry-after"), "");
    }
    let denied = service.ask(request("192.0.2.7", "/a")).await;
    assert_eq!((denied.status, denied.header("retry-after")), (429, "1"));
    assert_eq!(denied.header("ratelimit"), r#""default";r=0;t=1"#);
    assert_eq!(denied.header("content-type"), "application/problem+json");
    assert_eq!(denied.header("cache-control"), "no-store");
    assert!(
        denied.body.contains(r#""violated-policies":["default"],"retry_after_secs":1"#),
        "{}",
        denied.body
    );
    assert_eq!(service.calls(), 2, "a denial never reaches the service");
    assert_eq!(
        service.ask(request("192.0.2.8", "/a")).await.status,
        200,
        "others have their own budget"
    );

    clock.advance(Duration::from_millis(499));
    assert_eq!(service.ask(request("192.0.2.7", "/a")).await.status, 429);
    clock.advance(Duration::from_millis(1));
    assert_eq!(service.ask(request("192.0.2.7", "/a")).await.status, 200);
}

#[tokio::test]
async fn clones_and_other_services_share_one_state() {
    let (_clock, memory) = still();
    let layer = RateLimitLayer::new(limits("2/s"), key::global()).memory(memory);
    let (one, other) = (behind(&layer), behind(&layer.clone()));
    assert_eq!(one.ask(request("192.0.2.1", "/")).await.status, 200);
    assert_eq!(other.ask(request("192.0.2.2", "/")).await.status, 200);
    assert_eq!(one.ask(request("192.0.2.3", "/")).await.status, 429);
    assert_eq!(other.ask(request("192.0.2.4", "/")).await.status, 429);
}

#[tokio::test]
async fn several_rules_are_all_or_nothing() {
    let (clock, memory) = still();
    let layer = RateLimitLayer::rules([
        Rule::new("per-ip", limits("10/s; 100/m"), key::peer_ip()),
        Rule::new("global", limits("2/min"), key::global()),
    ])
    .memory(memory);
    let service = behind(&layer);
    for _ in 0..2 {
        assert_eq!(service.ask(request("192.0.2.7", "/")).await.status, 200);
    }
    for _ in 0..20 {
        let denied = service.ask(request("192.0.2.7", "/")).await;
        assert_eq!(denied.status, 429);
        assert!(denied.body.contains(r#"["global"]"#), "{}", denied.body);
        assert_eq!(denied.header("ratelimit"), r#""global";r=0;t=30"#, "{denied:?}");
        assert_eq!(denied.header("retry-after"), "30");
    }
    assert_eq!(service.calls(), 2);
    clock.advance(Duration::from_secs(30));
    let passed = service.ask(request("192.0.2.7", "/")).await;
    assert_eq!(
        passed.header("ratelimit"),
        r#""per-ip 10/s";r=9;t=1, "per-ip 100/m";r=99;t=1, "global";r=0;t=30"#,
        "a denial takes nothing from the others"
    );
    assert_eq!(
        passed.header("ratelimit-policy"),
        r#""per-ip 10/s";q=10;w=1, "per-ip 100/m";q=100;w=60, "global";q=2;w=60"#
    );
}

#[tokio::test]
async fn cost_limit_skip_and_key_can_be_functions() {
    let (_clock, memory) = still();
    let rule = Rule::new(
        "api",
        limits("1/h"),
        key::per_request(|head| head.header("x-user").map(str::to_owned)),
    )
    .limit(per_request(|head| {
        if head.header("x-plan") == Some("pro") { "10/s".parse() } else { "2/s".parse() }.unwrap()
    }))
    .cost(per_request(|head| if head.uri.path() == "/dear" { 2 } else { 1 }))
    .skip(per_request(|head| head.uri.path() == "/healthz"));
    let layer = RateLimitLayer::rules([rule]).memory(memory.clone());
    let service = behind(&layer);
    let ask = async |user: &str, plan: &str, path: &str| {
        let mut request = request("192.0.2.7", path);
        request.headers_mut().insert("x-user", user.parse().unwrap());
        request.headers_mut().insert("x-plan", plan.parse().unwrap());
        service.ask(request).await
    };
    assert_eq!(ask("ann", "free", "/dear").await.header("ratelimit"), r#""api";r=0;t=1"#);
    assert_eq!(ask("ann", "free", "/").await.status, 429);
    let free = ask("ann", "free", "/healthz").await;
    assert_eq!((free.status, free.header("ratelimit")), (200, ""));
    assert_eq!(ask("bob", "pro", "/dear").await.header("ratelimit"), r#""api";r=8;t=1"#);
    assert_eq!(
        ask("ann", "pro", "/").await.header("ratelimit"),
        r#""api";r=7;t=1"#,
        "what was used stays used"
    );

    // The same, as async functions that are pending first.
    let (_clock, memory) = still();
    let rule = Rule::new(
        "api",
        limits("1/h"),
        key::per_request_async(|head| {
            let user = head.header("x-user").map(str::to_owned);
            async move {
                tokio::task::yield_now().await;
                user
            }
        })
        .and(key::path()),
    )
    .limit(per_request_async(|head| {
        let pro = head.header("x-plan") == Some("pro");
        async move {
            tokio::task::yield_now().await;
            if pro { limits("10/s") } else { limits("2/s") }
        }
    }))
    .cost(per_request_async(|head| {
        let cost = if head.uri.path() == "/dear" { 2 } else { 1 };
        async move { cost }
    }))
    .skip(per_request_async(|head| std::future::ready(head.uri.path() == "/healthz")));
    let layer = RateLimitLayer::rules([rule]).memory(memory);
    let service = behind(&layer);
    let ask = async |user: &str, plan: &str, path: &str| {
        let mut request = request("192.0.2.7", path);
        request.headers_mut().insert("x-user", user.parse().unwrap());
        request.headers_mut().insert("x-plan", plan.parse().unwrap());
        service.ask(request).await
    };
    assert_eq!(ask("ann", "free", "/dear").await.header("ratelimit"), r#""api";r=0;t=1"#);
    assert_eq!(ask("ann", "free", "/dear").await.status, 429);
    assert_eq!(ask("ann", "free", "/").await.status, 200, "another path is another key");
    assert_eq!(ask("ann", "free", "/healthz").await.header("ratelimit"), "");
    assert_eq!(ask("bob", "pro", "/dear").await.header("ratelimit"), r#""api";r=8;t=1"#);
}

#[tokio::test]
async fn shadow_rules_count_and_deny_nothing() {
    let (_clock, memory) = still();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let layer = RateLimitLayer::rules([
        Rule::new("real", limits("3/s"), key::peer_ip()),
        Rule::new("trial", limits("1/s"), key::peer_ip()).shadow(),
    ])
    .memory(memory)
    .observe({
        let seen = Arc::clone(&seen);
        move |decision| {
            let word = if decision.decision.allowed() { "allow" } else { "deny" };
            seen.lock().unwrap().push(format!(
                "{} {word} {}",
                decision.rule,
                decision.decision.source().name()
            ));
        }
    });
    let service = behind(&layer);
    for _ in 0..3 {
        let passed = service.ask(request("192.0.2.7", "/")).await;
        assert_eq!(passed.status, 200);
        assert!(!passed.header("ratelimit").contains("trial"), "clients do not see it");
    }
    assert_eq!(service.ask(request("192.0.2.7", "/")).await.status, 429);
    let expected = [
        "real allow store",
        "trial allow shadow",
        "real allow store",
        "trial deny shadow",
        "real allow store",
        "trial deny shadow",
        "real deny store",
    ];
    assert_eq!(*seen.lock().unwrap(), expected);
}

#[tokio::test]
async fn headers_are_those_that_were_chosen() {
    let (_clock, memory) = still();
    let layer = RateLimitLayer::new(limits("2/min"), key::peer_ip()).memory(memory);
    let ask = async |layer: RateLimitLayer| {
        let names = |answer: &crate::Answer| {
            let mut names: Vec<_> =
                answer.headers.keys().map(|name| name.as_str().to_owned()).collect();
            names.retain(|name| name.contains("ratelimit") || name == "retry-after");
            names.sort();
            names.join(" ")
        };
        let service = behind(&layer);
        let passed = service.ask(request("192.0.2.1", "/")).await;
        service.ask(request("192.0.2.1", "/")).await;
        let denied = service.ask(request("192.0.2.1", "/")).await;
        assert_eq!(denied.status, 429);
        (names(&passed), names(&denied))
    };
    let fresh = || layer.clone().memory(still().1);
    let expected = ("ratelimit ratelimit-policy", "ratelimit ratelimit-policy retry-after");
    assert_eq!(ask(fresh().headers(IETF)).await, (expected.0.into(), expected.1.into()));
    let (passed, denied) = ask(fresh().headers(Families::GITHUB)).await;
    assert!(
        passed.starts_with("x-ratelimit-limit x-ratelimit-remaining x-ratelimit-reset"),
        "{passed}"
    );
    assert!(denied.starts_with("retry-after x-ratelimit-limit"), "{denied}");
    let (passed, _) = ask(fresh().headers(Families::DRAFT_7)).await;
    assert_eq!(passed, "ratelimit ratelimit-policy");
    assert_eq!(ask(fresh().headers(Families::NONE)).await, (String::new(), "retry-after".into()));
}

#[tokio::test]
async fn denials_have_the_accepted_form() {
    let (_clock, memory) = still();
    let layer = RateLimitLayer::new(limits("1/h window"), key::global()).memory(memory);
    let service = behind(&layer);
    service.ask(request("192.0.2.7", "/")).await;
    for (accept, kind, body) in [
        ("*/*", "application/problem+json", r#""status":429"#),
        (
            "application/json",
            "application/json",
            r#""violated-policies":["default"],"retry_after_secs":3600}"#,
        ),
        (
            "text/plain",
            "text/plain; charset=utf-8",
            "Too many requests. Try again in 3600 seconds. Violated policies: default.\n",
        ),
    ] {
        let mut request = request("192.0.2.7", "/");
        request.headers_mut().insert("accept", accept.parse().unwrap());
        let denied = service.ask(request).await;
        assert_eq!((denied.status, denied.header("content-type")), (429, kind));
        assert!(denied.body.contains(body), "{}", denied.body);
    }
    // One that can never pass has no time to come back.
    let never = RateLimitLayer::rules([Rule::new("x", limits("1/s"), key::global()).cost(2)])
        .memory(still().1);
    let denied = behind(&never).ask(request("192.0.2.7", "/")).await;
    assert_eq!((denied.status, denied.header("retry-after")), (429, ""));

    // An answer of one's own.
    let own = layer.denied(|denial| {
        let mut response = denial.response();
        *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
        *response.body_mut() = format!("{} is over for {}", denial.rule, denial.head.uri.path());
        response
    });
    let denied = behind(&own).ask(request("192.0.2.7", "/x")).await;
    assert_eq!((denied.status, denied.body.as_str()), (503, "default is over for /x"));
    assert_eq!(denied.header("retry-after"), "3600", "the headers are added");
}

/// A store that never answers, or says that it cannot.
struct Broken {
    hangs: bool,
}

impl Store for Broken {
    fn decide<'a>(&'a self, _check: &'a Check<'a>) -> Deciding<'a> {
        let hangs = self.hangs;
        Box::pin(async move {
            if hangs {
                std::future::pending::<()>().await;
            }
            Err(StoreError::Unavailable("it is gone".into()))
        })
    }
}

#[tokio::test]
async fn a_failing_store_denies_no_request() {
    let layer = RateLimitLayer::new(limits("1/s"), key::peer_ip());
    let open = layer.clone().store(Broken { hangs: false }, ManualClock::new());
    let service = behind(&open);
    for _ in 0..3 {
        let passed = service.ask(request("192.0.2.7", "/")).await;
        assert_eq!((passed.status, passed.header("ratelimit")), (200, ""));
    }
    let closed = open.on_failure(OnFailure::Closed);
    let service = behind(&closed);
    let refused = service.ask(request("192.0.2.7", "/")).await;
    assert_eq!((refused.status, refused.header("retry-after")), (503, ""));
    assert!(refused.body.contains("no answer"), "{}", refused.body);
    assert_eq!(service.calls(), 0);
}

#[tokio::test]
async fn the_resilience_layer_keeps_the_policy_for_failures() {
    let layer = || {
        let resilient =
            Resilient::builder(Broken { hangs: false }).clock(ManualClock::new()).nodes(1).build();
        RateLimitLayer::new(limits("2/h"), key::peer_ip()).resilient(resilient)
    };
    let closed = layer().on_failure(OnFailure::Closed);
    assert_eq!(
        behind(&closed).ask(request("192.0.2.7", "/")).await.status,
        503,
        "that is not a denial"
    );
    let open = behind(&layer().on_failure(OnFailure::Open));
    let local = behind(&layer());
    for expected in [200, 200, 429] {
        assert_eq!(open.ask(request("192.0.2.7", "/")).await.status, 200);
        assert_eq!(
            local.ask(request("192.0.2.7", "/")).await.status,
            expected,
            "alone, it keeps to the limit"
        );
    }
}

/// A service that is ready once for each `poll_ready`, and panics if it is called without.
#[derive(Debug)]
struct Strict {
    ready: bool,
}

impl Clone for Strict {
    fn clone(&self) -> Self {
        Strict { ready: false }
    }
}

impl Service<Request<Body>> for Strict {
    type Response = Response<Body>;
    type Error = std::convert::Infallible;
    type Future = std::future::Ready<Result<Response<Body>, Self::Error>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.ready = true;
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<Body>) -> Self::Future {
        assert!(
            std::mem::take(&mut self.ready),
            "it must be called only when it has said that it is ready"
        );
        std::future::ready(Ok(Response::new(Body::empty())))
    }
}

#[tokio::test]
async fn the_service_that_is_ready_is_the_one_that_is_called() {
    let plain = RateLimitLayer::new(limits("10/s"), key::global());
    let later = RateLimitLayer::rules([Rule::new("x", limits("10/s"), key::global()).cost(
        per_request_async(|_| async {
            tokio::task::yield_now().await;
            1
        }),
    )]);
    for layer in [plain, later] {
        let mut service = layer.layer(Strict { ready: false });
        for _ in 0..3 {
            let response =
                service.ready().await.unwrap().call(request("192.0.2.7", "/")).await.unwrap();
            assert_eq!(response.status(), 200);
        }
    }
}

#[tokio::test]
async fn a_request_dropped_before_the_decision_leaves_nothing() {
    let layer = RateLimitLayer::new(limits("1/s"), key::peer_ip())
        .store(Broken { hangs: true }, ManualClock::new());
    let service = behind(&layer);
    {
        let mut asking = pin!(service.service.clone().oneshot(request("192.0.2.7", "/")));
        assert!(asking.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    }
    assert_eq!(service.calls(), 0);
}

#[tokio::test]
async fn a_missing_peer_address_is_500_with_advice() {
    let layer = RateLimitLayer::new(limits("1/s"), key::peer_ip());
    let request = Request::builder().uri("/").body(Body::empty()).unwrap();
    let told = answer(behind(&layer).service.oneshot(request).await.unwrap()).await;
    assert_eq!(told.status, 500);
    assert!(told.body.contains("into_make_service_with_connect_info"), "{}", told.body);
}

#[tokio::test]
async fn more_limits_than_a_check_can_have_are_500() {
    let rules =
        (0..65).map(|index| Rule::new(format!("rule-{index}"), limits("1/s"), key::global()));
    let told = behind(&RateLimitLayer::rules(rules)).ask(request("192.0.2.7", "/")).await;
    assert_eq!(told.status, 500);
    assert!(told.body.contains("64 limits"), "{}", told.body);
}

#[tokio::test]
async fn nested_layers_add_the_headers_of_both() {
    let (_clock, memory) = still();
    let outer = RateLimitLayer::rules([Rule::new("outer", limits("9/s"), key::global())])
        .memory(memory.clone());
    let inner =
        RateLimitLayer::rules([Rule::new("inner", limits("1/s"), key::global())]).memory(memory);
    let calls = Arc::default();
    let service = outer.layer(inner.layer(crate::echo(&calls)));
    let told = answer(service.clone().oneshot(request("192.0.2.7", "/")).await.unwrap()).await;
    let lines: Vec<_> =
        told.headers.get_all("ratelimit").iter().map(|line| line.to_str().unwrap()).collect();
    assert_eq!(lines, [r#""inner";r=0;t=1"#, r#""outer";r=8;t=1"#]);
    let told = answer(service.oneshot(request("192.0.2.7", "/")).await.unwrap()).await;
    assert_eq!((told.status, told.header("retry-after")), (429, "1"));
    let lines: Vec<_> =
        told.headers.get_all("ratelimit").iter().map(|line| line.to_str().unwrap()).collect();
    assert_eq!(lines, [r#""inner";r=0;t=1"#], "a denial says nothing about the layer around it");
}

/// Layers that were given no names are all called `default`.
#[tokio::test]
async fn nested_layers_of_one_name_get_unique_names() {
    for families in [Families::IETF, Families::ALL] {
        let layer = |text: &str| {
            RateLimitLayer::new(limits(text), key::global()).headers(families).memory(still().1)
        };
        let calls = Arc::default();
        let service = layer("9/s").layer(layer("5/s").layer(crate::echo(&calls)));
        let told = answer(service.oneshot(request("192.0.2.7", "/")).await.unwrap()).await;
        let lines = |name: &str| -> Vec<String> {
            told.headers
                .get_all(name)
                .iter()
                .map(|line| line.to_str().unwrap().to_owned())
                .collect()
        };
        assert_eq!(lines("ratelimit-policy"), [r#""default";q=5;w=1"#, r#""default #2";q=9;w=1"#]);
        assert_eq!(lines("ratelimit"), [r#""default";r=4;t=1"#, r#""default #2";r=8;t=1"#]);
    }
}

/// A rule with several limits, one of them twice: every policy has a name of its own, the same in
/// headers and body.
#[tokio::test]
async fn every_limit_of_a_rule_has_a_name() {
    let shown = |families: Families, text: &str| {
        RateLimitLayer::rules([Rule::new("api", limits(text), key::global())])
            .headers(families)
            .memory(still().1)
    };
    for families in [Families::IETF, Families::ALL] {
        let service = behind(&shown(families, "4/s; 3/m window; 4/s"));
        let passed = service.ask(request("192.0.2.7", "/")).await;
        assert_eq!(
            passed.header("ratelimit-policy"),
            r#""api 4/s";q=4;w=1, "api 3/m window";q=3;w=60"#
        );
        assert!(
            passed.header("ratelimit").starts_with(r#""api 4/s";r=2;t=1, "api 3/m window";r=2;t="#),
            "{passed:?}"
        );
        let denied = loop {
            let answer = service.ask(request("192.0.2.7", "/")).await;
            if answer.status == 429 {
                break answer;
            }
        };
        assert_eq!(denied.header("ratelimit-policy"), r#""api 4/s";q=4;w=1"#, "{denied:?}");
        assert!(
            denied.body.contains(r#""violated-policies":["api 4/s"],"retry_after_secs":1}"#),
            "{denied:?}"
        );
        // The same limit twice is one limit that costs twice.
        let service = behind(&shown(families, "4/s; 4/s"));
        let passed = service.ask(request("192.0.2.7", "/")).await;
        assert_eq!(passed.header("ratelimit-policy"), r#""api";q=4;w=1"#);
        assert_eq!(passed.header("ratelimit"), r#""api";r=2;t=1"#);
    }
}

/// Whatever form a client asks for, and whichever headers are sent: no name of a rule that did not
/// deny, and none of one in shadow mode.
#[tokio::test]
async fn a_denied_client_learns_nothing_about_other_rules() {
    let families =
        [Families::IETF, Families::DRAFT_7, Families::GITHUB, Families::ALL, Families::NONE];
    for families in families {
        let layer = RateLimitLayer::rules([
            Rule::new("denying", limits("1/h window; 7777/h"), key::global()),
            Rule::new("other", limits("4242/m"), key::global()),
            Rule::new("trial", limits("1/h"), key::global()).shadow(),
        ])
        .headers(families)
        .memory(still().1);
        let service = behind(&layer);
        assert_eq!(service.ask(request("192.0.2.7", "/")).await.status, 200);
        for accept in ["*/*", "application/json", "text/plain", "application/grpc"] {
            let mut request = request("192.0.2.7", "/");
            let name = if accept == "application/grpc" { "content-type" } else { "accept" };
            request.headers_mut().insert(name, accept.parse().unwrap());
            let denied = service.ask(request).await;
            let details = denied.header("grpc-status-details-bin");
            let details = String::from_utf8_lossy(&unpadded(details)).into_owned();
            let whole = format!("{denied:?} {details}");
            assert!(whole.contains("denying 1/h window"), "{families} {accept}: {whole}");
            for hidden in [
                "other",
                "trial",
                "4242",
                "4241",
                "7777",
                "7776",
                "t_us",
                "charges",
                "tidegate-mode",
            ] {
                assert!(!whole.contains(hidden), "{families} {accept} {hidden}: {whole}");
            }
            if name == "accept" && accept != "text/plain" {
                let expected = r#"{"type":"https://iana.org/assignments/http-problem-types#quota-exceeded","title":"Request cannot be satisfied as assigned quota has been exceeded","status":429,"detail":"Too many requests. Try again in 3600 seconds.","violated-policies":["denying 1/h window"],"retry_after_secs":3600}"#;
                assert_eq!(denied.body, expected);
            }
        }
    }
}

/// The bytes of base64 without padding.
fn unpadded(text: &str) -> Vec<u8> {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let (mut bits, mut held, mut out) = (0_u32, 0, Vec::new());
    for byte in text.bytes() {
        let digit = DIGITS.iter().position(|own| *own == byte).unwrap();
        (bits, held) = (bits << 6 | u32::try_from(digit).unwrap(), held + 6);
        if held >= 8 {
            held -= 8;
            out.push(u8::try_from(bits >> held & 0xff).unwrap());
        }
    }
    out
}
