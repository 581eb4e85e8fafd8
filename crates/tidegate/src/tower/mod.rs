//! A layer for tower: limits for any axum router, hyper or tonic service. Feature `tower`.
//!
//! ```
//! use tidegate::tower::{RateLimitLayer, key};
//! // 10 a second and 120 a minute for each address: give it to `Router::layer`.
//! let layer = RateLimitLayer::new("10/s; 120/m".parse()?, key::peer_ip());
//! # Ok::<(), tidegate::ParseError>(())
//! ```
//!
//! A [`RateLimitLayer`] has [`Rule`]s, each with limits, a [key](mod@key), and optionally a cost,
//! exceptions, and a settlement of the true cost. A request goes to the service if all rules have
//! room for it. Otherwise the response is 429, or RESOURCE_EXHAUSTED over gRPC.

#![allow(
    clippy::type_complexity,
    reason = "a function of the request behind `dyn` reads better than its alias"
)]

#[cfg(feature = "axum")]
mod axum;
mod body;
mod budget_headers;
mod completion;
mod denial;
mod fast_path;
mod grpc;
mod head;
pub mod key;
mod layer;
mod outage;
mod per_request;
mod plan;
mod rule;
mod service;
mod text;

#[cfg(feature = "axum")]
pub use self::axum::{AxumFuture, AxumLayer, AxumRateLimit};
pub use body::RateLimitBody;
pub use denial::Denial;
pub use head::{Peer, RequestHead, ResponseHead};
pub use key::Key;
pub use layer::{ObservedDecision, RateLimitLayer};
pub use per_request::{PerRequest, per_request, per_request_async};
pub use rule::{Meter, Rule};
pub use service::{RateLimit, ResponseFuture};
