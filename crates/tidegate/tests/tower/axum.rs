//! Before a router of axum, over TCP.

use std::net::SocketAddr;

use axum::extract::Request;
use axum::routing::{get, post};
use axum::{Router, ServiceExt};
use tidegate::tower::{RateLimitLayer, Rule, key};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tower::Layer;

use crate::still;

/// Serves until the test is over.
async fn serve(app: Router) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let at = listener.local_addr().unwrap();
    tokio::spawn(async move {
        axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await
    });
    at
}

/// Sends a request on a connection of its own and returns everything that comes back.
async fn ask(at: SocketAddr, line: &str) -> String {
    let mut connection = TcpStream::connect(at).await.unwrap();
    let request = format!(
        "{line} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
    );
    connection.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    connection.read_to_string(&mut answer).await.unwrap();
    answer
}

#[tokio::test]
async fn connections_of_one_peer_share_a_budget() {
    let layer = RateLimitLayer::new("3/h".parse().unwrap(), key::peer_ip()).memory(still().1);
    let app = Router::new()
        .route("/", get(|| async { "hello" }))
        .route("/other", get(|| async { "other" }))
        .layer(layer);
    let at = serve(app).await;
    for (path, body) in [("/", "hello"), ("/other", "other"), ("/", "hello")] {
        let answer = ask(at, &format!("GET {path}")).await;
        assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
        assert!(answer.contains("ratelimit-policy: \"default\";q=3;w=3600\r\n"), "{answer}");
        assert!(
            answer.contains(&format!("content-length: {}\r\n", body.len())),
            "the size is still known: {answer}"
        );
        assert!(answer.ends_with(&format!("\r\n\r\n{body}")), "{answer}");
    }
    let denied = ask(at, "GET /").await;
    assert!(denied.starts_with("HTTP/1.1 429 Too Many Requests\r\n"), "{denied}");
    assert!(denied.contains("retry-after: 1200\r\n"), "{denied}");
    assert!(denied.ends_with('}'), "{denied}");
    let missing = ask(at, "GET /nowhere").await;
    assert!(missing.starts_with("HTTP/1.1 429"), "what is not found is limited, too: {missing}");
}

#[tokio::test]
async fn the_layer_can_wrap_a_router() {
    // A unit for each byte of a response: its body is watched, and the rule beside it only counts.
    let rules = [
        Rule::new("bytes", "12/h".parse().unwrap(), key::peer_ip()).settle_bytes(1),
        Rule::new("all", "9/h".parse().unwrap(), key::global()),
    ];
    let layer = RateLimitLayer::rules(rules).memory(still().1).axum();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let at = listener.local_addr().unwrap();
    let app = layer.layer(Router::new().route("/", get(|| async { "hello" })));
    let app = ServiceExt::<Request>::into_make_service_with_connect_info::<SocketAddr>(app);
    tokio::spawn(async move { axum::serve(listener, app).await });
    for left in [6, 1] {
        let answer = ask(at, "GET /").await;
        assert!(
            answer.starts_with("HTTP/1.1 200 OK\r\n") && answer.ends_with("\r\n\r\nhello"),
            "{answer}"
        );
        assert!(answer.contains("content-length: 5\r\n"), "the size is still known: {answer}");
        assert!(answer.contains(&format!("\"bytes\";r={}", left + 5)), "{answer}");
    }
    assert!(
        ask(at, "GET /nowhere").await.starts_with("HTTP/1.1 404"),
        "without a body it costs nothing"
    );
    assert!(ask(at, "GET /").await.ends_with("hello"), "for what is left, and a debt");
    let denied = ask(at, "GET /").await;
    assert!(denied.starts_with("HTTP/1.1 429") && denied.ends_with('}'), "{denied}");
}

#[tokio::test]
async fn routes_have_budgets_of_their_own() {
    let rule = Rule::new("routes", "1/h".parse().unwrap(), key::matched_path());
    let layer = RateLimitLayer::rules([rule]).memory(still().1);
    let app = Router::new()
        .route("/users/{id}", get(|| async { "user" }))
        .route("/teams/{id}", get(|| async { "team" }))
        .route_layer(layer);
    let at = serve(app).await;
    assert!(ask(at, "GET /users/1").await.starts_with("HTTP/1.1 200"));
    assert!(ask(at, "GET /users/2").await.starts_with("HTTP/1.1 429"), "one route for all users");
    assert!(ask(at, "GET /teams/1").await.starts_with("HTTP/1.1 200"));
}

#[tokio::test]
async fn logins_that_fail_are_counted() {
    let rule = Rule::new("logins", "2/h".parse().unwrap(), key::peer_ip())
        .charge_when(|response| response.status == 401);
    let layer = RateLimitLayer::rules([rule]).memory(still().1);
    let app = Router::new()
        .route(
            "/login",
            post(|| async { axum::http::StatusCode::UNAUTHORIZED }).layer(layer.clone()),
        )
        .route("/good", post(|| async { "welcome" }).layer(layer));
    let at = serve(app).await;
    for path in ["/good", "/login", "/good", "/good", "/login"] {
        assert!(!ask(at, &format!("POST {path}")).await.starts_with("HTTP/1.1 429"), "{path}");
    }
    assert!(ask(at, "POST /good").await.starts_with("HTTP/1.1 429"));
}
