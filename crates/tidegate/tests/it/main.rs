//! The library from outside: stores, limiter, waiting.

mod acquire;
mod conformance;
mod limiter;
mod memory;
mod overflow;
mod threads;
mod transcripts;
