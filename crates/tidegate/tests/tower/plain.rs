//! The layer by itself: limits, headers, denials, failure, cancellation.

use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use axum::body::Body;
use axum::http::{Request, Response};
use tidegate::resilience::{OnFailure, Resilient};
use tidegate::store::Deciding;
use tidegate::tower::{RateLimitLayer, Rule, key, per_request, per_request_async};
use tidegate::{Check, Limits, ManualClock, Store, StoreError};
use tower::{Layer, Service, ServiceExt};

use crate::{answer, behind, request, still};

fn limits(text: &str) -> Limits {
    text.parse().unwrap()
}

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
