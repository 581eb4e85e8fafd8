//! The headers and bodies that clients get, from one layer and from nested ones.

use std::sync::Arc;

use axum::http::StatusCode;
use tidegate::Limits;
use tidegate::http::headers::HeaderFamilies;
use tidegate::tower::{RateLimitLayer, Rule, key};
use tower::{Layer, ServiceExt};

use crate::{answer, behind, request, still};

fn limits(text: &str) -> Limits {
    text.parse().unwrap()
}

const IETF: HeaderFamilies = HeaderFamilies::IETF;

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
    let (passed, denied) = ask(fresh().headers(HeaderFamilies::GITHUB)).await;
    assert!(
        passed.starts_with("x-ratelimit-limit x-ratelimit-remaining x-ratelimit-reset"),
        "{passed}"
    );
    assert!(denied.starts_with("retry-after x-ratelimit-limit"), "{denied}");
    let (passed, _) = ask(fresh().headers(HeaderFamilies::DRAFT_7)).await;
    assert_eq!(passed, "ratelimit ratelimit-policy");
    assert_eq!(
        ask(fresh().headers(HeaderFamilies::NONE)).await,
        (String::new(), "retry-after".into())
    );
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
    for families in [HeaderFamilies::IETF, HeaderFamilies::ALL] {
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
    let shown = |families: HeaderFamilies, text: &str| {
        RateLimitLayer::rules([Rule::new("api", limits(text), key::global())])
            .headers(families)
            .memory(still().1)
    };
    for families in [HeaderFamilies::IETF, HeaderFamilies::ALL] {
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
    let families = [
        HeaderFamilies::IETF,
        HeaderFamilies::DRAFT_7,
        HeaderFamilies::GITHUB,
        HeaderFamilies::ALL,
        HeaderFamilies::NONE,
    ];
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
