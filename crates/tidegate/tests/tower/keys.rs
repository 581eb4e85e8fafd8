//! Whose budget it is.

use axum::body::Body;
use axum::http::Request;
use tidegate::http::ClientIp;
use tidegate::http::Missing;
use tidegate::tower::{Key, RateLimitLayer, Rule, key};

use crate::{behind, request, still};

/// Whether two requests draw on one budget.
async fn same(by: Key, one: Request<Body>, other: Request<Body>) -> bool {
    let layer = RateLimitLayer::new("1/h".parse().unwrap(), by).memory(still().1);
    let service = behind(&layer);
    assert_eq!(service.ask(one).await.status, 200);
    service.ask(other).await.status == 429
}

fn with(headers: &[(&'static str, &str)]) -> Request<Body> {
    let mut request = request("192.0.2.7", "/");
    for (name, value) in headers {
        request.headers_mut().append(*name, value.parse().unwrap());
    }
    request
}

#[tokio::test]
async fn key_headers_are_trimmed_and_must_occur_once() {
    let header = || key::header("x-api-key");
    // As it can arrive over HTTP/2.
    let spaced = |value: &'static str| {
        let mut request = with(&[]);
        request.headers_mut().insert("x-api-key", axum::http::HeaderValue::from_static(value));
        request
    };
    for value in [" KEY", "KEY ", "\tKEY\t "] {
        assert!(same(header(), with(&[("x-api-key", "KEY")]), spaced(value)).await, "{value:?}");
    }
    let twice = |name| with(&[(name, "Bearer a"), (name, "Bearer b")]);
    for (by, name) in [
        (header(), "x-api-key"),
        (header().and(key::peer_ip()), "x-api-key"),
        (header().or(key::peer_ip()), "x-api-key"),
        (key::bearer(), "authorization"),
        (key::host(), "host"),
    ] {
        for missing in [Missing::Share, Missing::Skip, Missing::Deny] {
            let rule = Rule::new("a", "1/h".parse().unwrap(), by.clone()).missing(missing);
            let answer = behind(&RateLimitLayer::rules([rule])).ask(twice(name)).await;
            let expected = format!("header {name} is there more than once: expected it once");
            assert!(answer.status == 400 && answer.body.contains(&expected), "{name}: {answer:?}");
        }
    }
    let free = RateLimitLayer::new("1/h".parse().unwrap(), key::peer_ip());
    assert_eq!(behind(&free).ask(twice("x-api-key")).await.status, 200, "no rule looks at it");
}

#[tokio::test]
async fn targets_that_services_read_in_different_ways_are_refused_where_a_rule_is_by_the_path() {
    use tidegate::http::{DotSegments, EscapedSlashes, PathPolicy};
    use tidegate::tower::per_request;
    let limit = || "1000/h".parse().unwrap();
    let by_path = RateLimitLayer::new(limit(), key::path());
    let by_function =
        RateLimitLayer::new(limit(), key::per_request(|head| Some(head.path().into_owned())));
    let skipping =
        Rule::new("a", limit(), key::global()).skip(per_request(|head| head.path() == "/healthz"));
    let layers = [by_path.clone(), by_function, RateLimitLayer::rules([skipping])];
    for target in
        ["/v1%2fsearch", "/x/..%2flogin", "/x/../login", "/v1/chat/..;/x", "/v1\\search", "/a%00"]
    {
        for layer in &layers {
            let answer = behind(layer).ask(request("192.0.2.7", target)).await;
            let begin =
                r#"{"type":"about:blank","title":"Bad Request","status":400,"detail":"path \"/"#;
            assert!(answer.status == 400 && answer.body.starts_with(begin), "{target}: {answer:?}");
        }
        let by_peer = RateLimitLayer::new(limit(), key::peer_ip());
        assert_eq!(
            behind(&by_peer).ask(request("192.0.2.7", target)).await.status,
            200,
            "no rule looks at the path"
        );
    }
    let long = format!("/{}", "a".repeat(9000));
    assert_eq!(behind(&by_path).ask(request("192.0.2.7", &long)).await.status, 414);
    let rewriting =
        PathPolicy { escaped_slashes: EscapedSlashes::Decode, dot_segments: DotSegments::Resolve };
    let layer =
        RateLimitLayer::new("1/h".parse().unwrap(), key::path()).memory(still().1).paths(rewriting);
    let service = behind(&layer);
    assert_eq!(service.ask(request("192.0.2.7", "/x/..%2flogin?q")).await.status, 200);
    assert_eq!(
        service.ask(request("192.0.2.7", "/login")).await.status,
        429,
        "it is the same path"
    );
}

#[tokio::test]
async fn different_requests_have_different_keys() {
    let behind_proxy = || key::client_ip(ClientIp::behind("192.0.2.0/24".parse().unwrap()));
    let forwarded = |client| with(&[("x-forwarded-for", client)]);
    assert!(same(behind_proxy(), forwarded("203.0.113.1"), forwarded("203.0.113.1")).await);
    assert!(!same(behind_proxy(), forwarded("203.0.113.1"), forwarded("203.0.113.2")).await);
    assert!(
        same(key::peer_ip(), forwarded("203.0.113.1"), forwarded("203.0.113.2")).await,
        "no header is trusted"
    );
    assert!(
        same(key::peer_ip(), request("2001:db8::1", "/"), request("2001:db8::2", "/")).await,
        "one network"
    );
    assert!(
        !same(key::peer_ip(), request("2001:db8::1", "/"), request("2001:db8:0:1::1", "/")).await
    );

    let header = || key::header("X-Api-Key");
    assert!(same(header(), with(&[("x-api-key", "a")]), with(&[("x-api-key", "a")])).await);
    assert!(!same(header(), with(&[("x-api-key", "a")]), with(&[("x-api-key", "b")])).await);
    assert!(
        same(header(), with(&[]), with(&[("x-api-key", "")])).await,
        "those without one share a budget"
    );

    let token = |token: &str| with(&[("authorization", &format!("Bearer {token}"))]);
    assert!(
        same(key::bearer(), token("secret"), with(&[("authorization", "bearer secret")])).await
    );
    assert!(!same(key::bearer(), token("secret"), token("other")).await);
    assert!(same(key::bearer(), with(&[("authorization", "Basic eDp5")]), with(&[])).await);
    let long = "x".repeat(5000);
    assert!(
        !same(key::bearer(), token(&format!("{long}1")), token(&format!("{long}2"))).await,
        "however long they are"
    );
    let long_key = |end| with(&[("x-api-key", &format!("{long}{end}"))]);
    assert!(!same(header(), long_key("1"), long_key("2")).await);
    assert!(same(header(), long_key("1"), long_key("1")).await);

    assert!(
        same(
            key::path(),
            request("192.0.2.7", "/v1/search?q=1"),
            request("192.0.2.7", "/v1//%73earch;a")
        )
        .await
    );
    assert!(!same(key::path(), request("192.0.2.7", "/a"), request("192.0.2.7", "/b")).await);
    assert!(
        same(key::host(), with(&[("host", "A.example:80")]), with(&[("host", "a.example")])).await
    );
    assert!(same(key::method(), with(&[]), with(&[])).await);
}

#[tokio::test]
async fn keys_can_be_combined() {
    let pair = || key::header("a").and(key::header("b"));
    assert!(!same(pair(), with(&[("a", "1"), ("b", "2")]), with(&[("a", "1"), ("b", "3")])).await);
    assert!(
        !same(pair(), with(&[("a", "1|b:2")]), with(&[("a", "1"), ("b", "2")])).await,
        "pieces stay pieces"
    );
    assert!(!same(pair(), with(&[("a", "1%7Cb:2")]), with(&[("a", "1|b:2")])).await);

    // Without a key the address is used; a header cannot imitate an address.
    let or = || key::header("x-api-key").or(key::peer_ip());
    assert!(!same(or(), request("192.0.2.8", "/"), with(&[("x-api-key", "192.0.2.8")])).await);
    assert!(!same(or(), request("192.0.2.8", "/"), with(&[("x-api-key", "ip:192.0.2.8")])).await);
    assert!(!same(or(), request("192.0.2.8", "/"), request("192.0.2.9", "/")).await);
}

#[tokio::test]
async fn keys_can_come_from_extensions() {
    #[derive(Clone)]
    struct User {
        id: u64,
    }
    let user = |id| {
        let mut request = request("192.0.2.7", "/");
        request.extensions_mut().insert(User { id });
        request
    };
    let by_user = || key::extension(|user: &User| user.id);
    assert!(same(by_user(), user(7), user(7)).await);
    assert!(!same(by_user(), user(7), user(8)).await);
    let later = || {
        key::per_request_async(|head| {
            let id = head.extension::<User>().map(|user| user.id);
            async move { id }
        })
    };
    assert!(same(later().or(key::peer_ip()), user(7), user(7)).await);
    assert!(!same(later().or(key::peer_ip()), user(7), request("192.0.2.7", "/")).await);
}

#[test]
#[should_panic(expected = "header \"x y\"")]
fn an_invalid_header_name_panics() {
    let _ = key::header("x y");
}

/// How requests without a key, with a part of it and with all of it are answered, twice each.
async fn answered(layer: &RateLimitLayer) -> [[u16; 2]; 3] {
    let service = behind(&layer.clone().memory(still().1));
    let mut statuses = [[0; 2]; 3];
    let lacking: [&[(&str, &str)]; 3] =
        [&[], &[("x-user", "a")], &[("x-user", "a"), ("x-key", "k")]];
    for (headers, statuses) in lacking.into_iter().zip(&mut statuses) {
        for status in statuses {
            *status = service.ask(with(headers)).await.status;
        }
    }
    statuses
}

/// One rule with one limit, two rules, and async functions take different ways: all agree.
#[tokio::test]
async fn requests_without_a_key_share_a_budget_or_skip_the_rule_or_are_denied() {
    let user = || key::header("x-user");
    let async_user = || {
        key::per_request_async(|head| {
            std::future::ready(head.headers.get("x-user").map(|value| value.len()))
        })
    };
    for (missing, expected) in [
        (Missing::Share, [[200, 429], [200, 429], [200, 429]]),
        (Missing::Skip, [[200, 200], [200, 200], [200, 429]]),
        (Missing::Deny, [[403, 403], [403, 403], [200, 429]]),
    ] {
        for by in [user().and(key::header("x-key")), async_user().and(key::header("x-key"))] {
            let rule = || Rule::new("r", "1/h".parse().unwrap(), by.clone()).missing(missing);
            let other = || Rule::new("other", "100/h".parse().unwrap(), key::global());
            assert_eq!(answered(&RateLimitLayer::rules([rule()])).await, expected, "{missing:?}");
            assert_eq!(
                answered(&RateLimitLayer::rules([other(), rule()])).await,
                expected,
                "{missing:?}"
            );
        }
    }
    // In shadow mode nothing is denied.
    let shadow = Rule::new("r", "1/h".parse().unwrap(), user()).missing(Missing::Deny).shadow();
    assert_eq!(answered(&RateLimitLayer::rules([shadow])).await, [[200; 2]; 3]);
}

#[tokio::test]
async fn a_denial_without_a_key_has_a_reason_and_charges_nothing() {
    let rule = Rule::new("r", "1/h".parse().unwrap(), key::header("x-key")).missing(Missing::Deny);
    let all = Rule::new("all", "1/h".parse().unwrap(), key::global());
    let service = behind(&RateLimitLayer::rules([all, rule]).memory(still().1));
    let denied = service.ask(with(&[])).await;
    assert_eq!((denied.status, denied.header("content-type")), (403, "application/problem+json"));
    assert_eq!(
        denied.body,
        r#"{"type":"about:blank","title":"Forbidden","status":403,"detail":"The request lacks the key that its rate limit is by, such as a header."}"#
    );
    let grpc = service.ask(with(&[("content-type", "application/grpc")])).await;
    assert_eq!((grpc.status, grpc.header("grpc-status")), (200, "7"));
    assert_eq!(service.calls(), 0);
    assert_eq!(
        service.ask(with(&[("x-key", "k")])).await.status,
        200,
        "nothing was charged before"
    );
}
