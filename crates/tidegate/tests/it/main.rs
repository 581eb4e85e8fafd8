//! The library from outside: stores, limiter, waiting.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod acquire;
mod conformance;
mod limiter;
mod memory;
mod overflow;
mod threads;
mod transcripts;
