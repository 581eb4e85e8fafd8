//! The library from outside: stores, limiter, waiting.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod acquire;
mod conformance;
mod dropped;
mod extremes;
mod http;
mod limiter;
mod memory;
mod model;
mod overflow;
mod readings;
#[cfg(feature = "redis")]
mod redis;
mod resilience;
mod snapshot;
mod threads;
mod transcripts;
