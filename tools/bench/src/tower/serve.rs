//! The contenders: the same service, with and without the layer.

use std::convert::Infallible;
use std::net::SocketAddr;

use axum::extract::Request;
use axum::http::{HeaderName, HeaderValue};
use axum::response::Response;
use axum::routing::{get, post};
use axum::{Json, Router, ServiceExt};
use serde::{Deserialize, Serialize};
use tidegate::http::headers::HeaderFamilies;
use tidegate::tower::{Key, RateLimitLayer, key};
use tokio::net::TcpListener;
use tower::util::MapResponseLayer;
use tower::{Layer, Service};

use crate::server::until_left_alone;

pub(super) fn serve(what: &str) {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .expect("a runtime");
    let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).expect("a port");
    let at = listener.local_addr().expect("an address");
    // Routes are made once and not for every request; `axum::serve` does that by itself for a
    // router that nothing is around.
    let app: Router = Router::new().route("/", get(|| async { "hello" })).with_state(());
    let json: Router = Router::new().route("/", post(take)).with_state(());
    let what = what.to_owned();
    let nothing = MapResponseLayer::new(|response: Response| response);
    runtime.spawn(async move {
        match what.as_str() {
            "bare" => inside(listener, app).await,
            "nothing" => inside(listener, app.layer(nothing)).await,
            "peer" => inside(listener, app.layer(limits(key::peer_ip()).axum())).await,
            "header" => inside(listener, app.layer(limits(key::header("x-api-key")).axum())).await,
            "header-plain" => inside(listener, app.layer(limits(key::header("x-api-key")))).await,
            "peer-around" => around(listener, limits(key::peer_ip()), app).await,
            "peer-silent" => {
                around(listener, limits(key::peer_ip()).headers(HeaderFamilies::NONE), app).await
            }
            "two-headers" => {
                served(listener, MapResponseLayer::new(with_two_headers).layer(app)).await
            }
            "json" => served(listener, json).await,
            "json-peer" => around(listener, limits(key::peer_ip()), json).await,
            "header-around" => around(listener, limits(key::header("x-api-key")), app).await,
            _ => panic!("{what}: expected the name of a contender"),
        }
    });
    until_left_alone(at, at);
}

fn limits(key: Key) -> RateLimitLayer {
    RateLimitLayer::new("1000000/s".parse().expect("a limit"), key)
}

async fn inside(listener: TcpListener, app: Router) {
    let app = app.into_make_service_with_connect_info::<SocketAddr>();
    axum::serve(listener, app).await.expect("a service");
}

async fn around(listener: TcpListener, layer: RateLimitLayer, app: Router) {
    served(listener, layer.axum().layer(app)).await;
}

async fn served<S>(listener: TcpListener, app: S)
where
    S: Service<Request, Response = Response, Error = Infallible, Future: Send>
        + Clone
        + Send
        + 'static,
{
    let app = ServiceExt::<Request>::into_make_service_with_connect_info::<SocketAddr>(app);
    axum::serve(listener, app).await.expect("a service");
}

/// The least that any layer must do to report a limit: the two headers of the IETF's draft, here
/// without anything to decide, and without writing them.
fn with_two_headers(mut response: Response) -> Response {
    let headers = response.headers_mut();
    headers.append(
        HeaderName::from_static("ratelimit-policy"),
        HeaderValue::from_static(r#""default";q=1000000;w=1"#),
    );
    headers.append(
        HeaderName::from_static("ratelimit"),
        HeaderValue::from_static(r#""default";r=999999;t=1"#),
    );
    response
}

#[derive(Deserialize)]
struct Order {
    customer: String,
    items: Vec<Item>,
    note: String,
}

#[derive(Deserialize, Serialize)]
struct Item {
    id: u64,
    amount: u64,
}

#[derive(Serialize)]
struct Receipt {
    customer: String,
    items: Vec<Item>,
    accepted: u64,
    note: String,
}

/// What most services do at least: read something, write something.
async fn take(Json(Order { customer, items, note }): Json<Order>) -> Json<Receipt> {
    let accepted = items.iter().map(|item| item.amount).sum();
    Json(Receipt { customer, items, accepted, note })
}
