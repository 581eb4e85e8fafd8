//! An exact rate limiter for Rust programs: every algorithm, one key or many, with weights, all or
//! nothing.
//!
//! ```
//! use tidegate::Limiter;
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // Ten a second and a hundred and twenty a minute, per user; state in memory.
//! let limiter = Limiter::new("10/s; 120/m".parse()?);
//! let decision = limiter.check("user:7").cost(3).await?;
//! assert!(decision.allowed());
//! assert_eq!(decision.remaining(), 7);
//! # Ok(()) }
//! ```
//!
//! Without a runtime, and in nanoseconds, straight from the memory store:
//! ```
//! use tidegate::{Limit, Memory};
//! let memory = Memory::new();
//! let limit: Limit = "10/s".parse()?;
//! assert!(memory.allows("user:7", &limit, 1));
//! # Ok::<(), tidegate::ParseError>(())
//! ```
//!
//! In tests, on a clock that moves when told to:
//! ```
//! use std::time::Duration;
//! use tidegate::{Limiter, Limits, ManualClock, Memory};
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let clock = ManualClock::new();
//! let limits: Limits = "1/s".parse()?;
//! let limiter = Limiter::builder(limits).memory(Memory::builder().clock(clock.clone()).build()).build();
//! assert!(limiter.check("k").await?.allowed());
//! assert_eq!(limiter.check("k").await?.retry_after(), Some(Duration::from_secs(1)));
//! clock.advance(Duration::from_secs(1));
//! assert!(limiter.check("k").await?.allowed());
//! # Ok(()) }
//! ```
//!
//! In reading order: [`Limiter`] is what a program holds. It asks a [`Store`], by default
//! [`Memory`], which keeps the state and the [`Clock`]. A [`Check`] goes in, a [`Decision`] comes
//! out; a denial is a decision, a [`StoreError`] is the lack of one. The rule itself is in
//! [`tidegate_core`], whose types are re-exported here.

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

/// The code on the pages is compiled and run with the tests.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/library.md")]
struct PageOnTheLibrary;

/// The same for the page on Redis.
#[cfg(all(doctest, feature = "redis"))]
#[doc = include_str!("../../../docs/redis.md")]
struct PageOnRedis;

/// And the page on clients.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/client-ip.md")]
struct PageOnClients;

/// And the page on the layer.
#[cfg(all(doctest, feature = "axum"))]
#[doc = include_str!("../../../docs/tower.md")]
struct PageOnTheLayer;

/// And the README.
#[cfg(all(doctest, feature = "axum", feature = "redis"))]
#[doc = include_str!("../../../README.md")]
struct Readme;
