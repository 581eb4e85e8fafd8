//! A budget of tokens for a model that answers as a stream: an estimate is taken first, and what
//! was used is settled when the stream ends, or when the reader has had enough.
//!
//! `cargo run -p tidegate --features axum --example llm_budget`

#![allow(clippy::print_stdout, reason = "an example shows what it does")]

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::{Body, Bytes};
use axum::http::Request;
use axum::routing::post;
use axum::{Extension, Router};
use http_body::Frame;
use http_body_util::BodyExt;
use tidegate::tower::{Meter, RateLimitLayer, Rule, key, per_request};
use tidegate::{ManualClock, Memory};
use tower::ServiceExt;

/// A model that streams words and writes down what they cost.
struct Words {
    left: u32,
    meter: Meter,
}

impl http_body::Body for Words {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if self.left == 0 {
            return Poll::Ready(None);
        }
        self.left -= 1;
        self.meter.add(100);
        Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(b"word ")))))
    }
}

async fn complete(Extension(meter): Extension<Meter>) -> Body {
    Body::new(Words { left: 5, meter })
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let limits = RateLimitLayer::rules([
        Rule::new("requests", "10/min".parse()?, key::bearer()),
        // The estimate is what the client allows for at most, or a thousand.
        Rule::new("tokens", "3000/min".parse()?, key::bearer())
            .cost(per_request(|head| {
                head.header("x-max-tokens")
                    .and_then(|text| text.parse().ok())
                    .unwrap_or(1000)
                    .max(1)
            }))
            .settle_metered(),
    ])
    .memory(Memory::builder().clock(ManualClock::new()).build());
    let app = Router::new().route("/complete", post(complete)).layer(limits);

    for (pieces, most) in [(9, None), (2, None), (9, Some("2500")), (9, Some("2000"))] {
        let mut request = Request::post("/complete").header("authorization", "Bearer secret");
        if let Some(most) = most {
            request = request.header("x-max-tokens", most);
        }
        let mut response = app.clone().oneshot(request.body(Body::empty())?).await?;
        let told = response.headers()["ratelimit"].to_str()?.to_owned();
        let mut read = 0;
        while read < pieces && response.body_mut().frame().await.transpose()?.is_some() {
            read += 1;
        }
        println!("{} after the estimate: {told}; read {read} pieces", response.status().as_u16());
        drop(response); // the client has gone, or the stream is over: what was used is settled
    }
    Ok(())
}
