//! A layer for tower: limits before any axum router, hyper or tonic service. Feature `tower`.
//!
//! ```
//! use tidegate::tower::{RateLimitLayer, key};
//! // Ten a second and a hundred and twenty a minute for each address. Give it to `Router::layer` or `ServiceBuilder::layer`.
//! let layer = RateLimitLayer::new("10/s; 120/m".parse()?, key::peer_ip());
//! # Ok::<(), tidegate::ParseError>(())
//! ```
//!
//! In reading order: a [`RateLimitLayer`] has [`Rule`]s, each with limits, a [key](mod@key), and
//! perhaps a cost, exceptions, and a time to pay. A request that all rules have room for goes on to
//! the service; one that is denied never reaches it, and is answered with 429, or over gRPC with
//! RESOURCE_EXHAUSTED.

#![allow(
    clippy::type_complexity,
    reason = "a function of the request behind `dyn` reads better than its alias"
)]

mod after;
#[cfg(feature = "axum")]
mod axum;
mod body;
mod denial;
mod grpc;
mod head;
pub mod key;
mod layer;
mod of;
mod outage;
mod plan;
mod rule;
mod service;
mod tell;
mod text;

#[cfg(feature = "axum")]
pub use self::axum::{AxumFuture, AxumLayer, AxumRateLimit};
pub use body::Body;
pub use denial::Denial;
pub use head::{Head, Peer, ResponseHead};
pub use key::Key;
pub use layer::{RateLimitLayer, Seen};
pub use of::{Of, of, of_async};
pub use rule::{Meter, Rule};
pub use service::{RateLimit, ResponseFuture};
