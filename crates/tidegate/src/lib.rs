//! An exact rate limiter: six algorithms, one or many limits and keys per check, all or nothing.
//!
//! # In a program
//!
//! A [`Limiter`] checks keys under limits. Its state is in memory unless configured otherwise.
//! ```
//! use tidegate::Limiter;
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // 10 a second and 120 a minute, per user.
//! let limiter = Limiter::new("10/s; 120/m".parse()?);
//! let decision = limiter.check("user:7").cost(3).await?;
//! assert!(decision.allowed());
//! assert_eq!(decision.remaining(), 7);
//! # Ok(()) }
//! ```
//!
//! The memory store can also be called directly, without async:
//! ```
//! use tidegate::{Limit, Memory};
//! let memory = Memory::new();
//! let limit: Limit = "10/s".parse()?;
//! assert!(memory.allows("user:7", &limit, 1));
//! # Ok::<(), tidegate::ParseError>(())
//! ```
//!
//! # In an axum service
//!
//! With the feature `axum`, [`tower::RateLimitLayer`](crate::tower) denies requests with 429 and
//! adds `RateLimit` headers to responses. The features `tower` and `tonic` are for other services.
#![cfg_attr(feature = "axum", doc = "```no_run")]
#![cfg_attr(not(feature = "axum"), doc = "```ignore")]
//! # async fn serve() -> Result<(), Box<dyn std::error::Error>> {
//! use std::net::SocketAddr;
//! use axum::{Router, routing::get};
//! use tidegate::tower::{RateLimitLayer, key};
//! let limits = RateLimitLayer::new("10/s".parse()?, key::peer_ip()).axum();
//! let app: Router = Router::new().route("/", get(|| async { "hello" })).layer(limits);
//! let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
//! axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?;
//! # Ok(()) }
//! ```
//!
//! # Over Redis or Valkey
//!
//! With the feature `redis`, processes share their limits. [`resilience::Resilient`] decides in
//! time even while the server does not answer.
#![cfg_attr(feature = "redis", doc = "```no_run")]
#![cfg_attr(not(feature = "redis"), doc = "```ignore")]
//! # async fn check() -> Result<(), Box<dyn std::error::Error>> {
//! use tidegate::Limiter;
//! use tidegate::redis::Redis;
//! use tidegate::resilience::Resilient;
//! let redis = Redis::builder("redis://127.0.0.1".parse()?).build()?;
//! let limiter = Limiter::builder("10/s; 120/m".parse()?)
//!     .name("per-user")
//!     .resilient(Resilient::builder(redis).build())
//!     .build();
//! let decision = limiter.check("user:7").await?;
//! # Ok(()) }
//! ```
//!
//! # In tests
//!
//! A [`ManualClock`] moves only when the test advances it.
//! ```
//! use std::time::Duration;
//! use tidegate::{Limiter, ManualClock, Memory};
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let clock = ManualClock::new();
//! let memory = Memory::builder().clock(clock.clone()).build();
//! let limiter = Limiter::builder("1/s".parse()?).memory(memory).build();
//! assert!(limiter.check("k").await?.allowed());
//! assert_eq!(limiter.check("k").await?.retry_after(), Some(Duration::from_secs(1)));
//! clock.advance(Duration::from_secs(1));
//! assert!(limiter.check("k").await?.allowed());
//! # Ok(()) }
//! ```
//!
//! # How it fits together
//!
//! A [`Limiter`] turns each call into a [`Check`], a [`Store`] decides the check by its clock, and
//! the result is a [`Decision`]. A denial is a decision; a [`StoreError`] means that there is none.
//! The stores are [`Memory`] and `redis::Redis`. The rule itself is in [`core`], whose types are
//! re-exported here.

pub mod batch;
mod clock;
mod events;
pub mod http;
mod limiter;
pub mod memory;
mod raw;
#[cfg(feature = "redis")]
pub mod redis;
pub mod resilience;
pub mod store;
mod sync;
#[cfg(feature = "tower")]
pub mod tower;

pub use clock::{Clock, ManualClock, SystemClock};
#[doc(hidden)]
pub use limiter::LeaseReleaser;
pub use limiter::{
    Acquire, AcquireError, Lease, Limiter, LimiterBuilder, LimiterCall, Pass, Reservation,
};
pub use memory::{Memory, MemoryBuilder};
pub use store::{Charge, Check, InvalidCheck, Scope, Store, StoreError, Subject};
pub use tidegate_core as core;
pub use tidegate_core::{
    Algorithm, Decision, Id, Limit, LimitError, Limits, Op, ParseError, Period, Retry, Source,
    Timestamp, Verdict,
};

/// The code of the pages is compiled and run as documentation tests.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/library.md")]
struct PageOnTheLibrary;

/// The page on Redis.
#[cfg(all(doctest, feature = "redis"))]
#[doc = include_str!("../../../docs/redis.md")]
struct PageOnRedis;

/// The page on client addresses.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/client-ip.md")]
struct PageOnClients;

/// The page on the tower layer.
#[cfg(all(doctest, feature = "axum"))]
#[doc = include_str!("../../../docs/tower.md")]
struct PageOnTheLayer;

/// And the README.
#[cfg(all(doctest, feature = "axum", feature = "redis"))]
#[doc = include_str!("../../../README.md")]
struct Readme;
