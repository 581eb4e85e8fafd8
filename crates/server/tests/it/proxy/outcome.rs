//! Costs that depend on the response.

use axum::body::Body;
use axum::http::Response;
use tidegate_testkit::wait_until;

use super::{LONG, Stage, Upstream};

/// Answers `/status/401` with that status, `/bytes/1000` with that many bytes, and `/tokens/7` with
/// a header of that value.
fn obeying() -> Upstream {
    Upstream::answering(|request| async move {
        let (kind, number) = request.uri().path()[1..].split_once('/').unwrap();
        let mut response = Response::new(Body::empty());
        match kind {
            "status" => *response.status_mut() = number.parse().unwrap(),
            "bytes" => *response.body_mut() = Body::from("x".repeat(number.parse().unwrap())),
            _ => _ = response.headers_mut().insert("x-tokens", number.parse().unwrap()),
        }
        response
    })
}

#[test]
fn only_failures_count() {
    let upstream = obeying();
    let rules = "rules:\n  - { name: failed-logins, by: ip, limit: 2/h, charge_when: { status: [401, 5*] } }\n";
    let stage = Stage::before(&upstream.http(), rules);
    let mut client = stage.connect();
    let left = |status: u16, client: &mut super::Client| {
        let answer = client.get(&format!("/status/{status}"), "");
        assert_eq!(answer.status, status);
        answer.field("x-ratelimit-remaining").unwrap().parse::<u64>().unwrap()
    };
    // Status, and what remains after it.
    for (status, remaining) in [(200, 2), (404, 2), (200, 2), (401, 1), (200, 1), (503, 0)] {
        assert_eq!(left(status, &mut client), remaining, "{status}");
    }
    assert_eq!(client.get("/status/200", "").status, 429, "the budget is used up");
}

#[test]
fn a_class_of_statuses_counts() {
    let upstream = obeying();
    let rules =
        "rules:\n  - { name: failures, by: ip, limit: 3/h, charge_when: { status: [4xx, 5XX] } }\n";
    let stage = Stage::before(&upstream.http(), rules);
    let mut client = stage.connect();
    for (status, remaining) in
        [(200, "3"), (399, "3"), (400, "2"), (499, "1"), (304, "1"), (503, "0")]
    {
        let answer = client.get(&format!("/status/{status}"), "");
        assert_eq!(
            (answer.status, answer.field("x-ratelimit-remaining")),
            (status, Some(remaining)),
            "{status}"
        );
    }
    assert_eq!(client.get("/status/200", "").status, 429);
}

#[test]
fn responses_are_charged_by_size() {
    let upstream = obeying();
    let rules = "rules:\n  - { name: egress, by: ip, limit: 100/h, settle: { by: response_bytes, per: 1000 } }\n";
    let stage = Stage::before(&upstream.http(), rules);
    let mut client = stage.connect();
    let remaining = |client: &mut super::Client| {
        client.get("/bytes/0", "").field("x-ratelimit-remaining").unwrap().parse::<u64>().unwrap()
    };
    assert_eq!(client.get("/bytes/30001", "").body.len(), 30_001);
    wait_until("31 are paid, and one is taken before", LONG, || {
        remaining(&mut client) == 100 - 31 - 1
    });
    // More than remains: it becomes a debt.
    assert_eq!(client.get("/bytes/500000", "").status, 200);
    wait_until("it is denied now", LONG, || client.get("/bytes/0", "").status == 429);
}

#[test]
fn responses_are_charged_by_a_header() {
    let upstream = obeying();
    let rules = "rules:\n  - { name: tokens, by: bearer, limit: 100/h, cost: 10, settle: header.X-Tokens }\n";
    let stage = Stage::before(&upstream.http(), rules);
    let mut client = stage.connect();
    let left = |path: &str, client: &mut super::Client| {
        let answer = client.get(path, "Authorization: Bearer abc\r\n");
        answer.field("x-ratelimit-remaining").unwrap().parse::<u64>().unwrap()
    };
    for (path, remaining) in
        [("/tokens/7", 93), ("/tokens/30", 63), ("/status/200", 53), ("/tokens/none", 43)]
    {
        assert_eq!(left(path, &mut client), remaining, "{path}");
    }
}

#[test]
fn responses_are_charged_by_duration() {
    let upstream = Upstream::answering(|request| async move {
        let millis = request.uri().path()[1..].parse().unwrap();
        tokio::time::sleep(std::time::Duration::from_millis(millis)).await;
        Response::new(Body::from("done"))
    });
    let rules = "rules:\n  - { name: time, limit: 1000000/h window from first hit, cost: 1000, settle: response_ms }\n";
    let stage = Stage::before(&upstream.http(), rules);
    let mut client = stage.connect();
    assert_eq!(client.get("/50", "").body, "done");
    let remaining = |client: &mut super::Client| {
        client.get("/0", "").field("x-ratelimit-remaining").unwrap().parse::<u64>().unwrap()
    };
    // At least 50 and far less than the 1000 charged at first; the request that reads the remaining
    // budget charges 1000 itself.
    wait_until("it is settled", LONG, || (990_000..=998_950).contains(&remaining(&mut client)));
}

#[test]
fn shadow_rules_are_settled_and_failures_of_the_upstream_count_by_status() {
    let unused = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let rules = "rules:\n  - { name: a, limit: 1/h, charge_when: { status: 200 } }\n  - { name: b, mode: shadow, limit: 1/h, charge_when: { status: 200 } }\n";
    let stage = Stage::before(&format!("http://{unused}"), rules);
    for _ in 0..3 {
        assert_eq!(
            stage.connect().get("/", "").status,
            502,
            "it costs nothing, so it is not denied"
        );
    }
    let denied = r#"tidegate_shadow_decisions_total{rule="b",outcome="denied"}"#;
    assert_eq!(stage.metric(denied), 0);
}
