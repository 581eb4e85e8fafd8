//! Tidegate as a network service: a rules file, and listeners for HTTP, gRPC and Redis clients. A
//! library that the binary `tidegate` runs.
//!
//! A request takes one path: a listener reads bytes, the [`rules`] turn attributes into charges,
//! the engine calls the store, and the protocol encodes the decision.

pub mod auth;
pub mod backend;
pub mod browser;
pub mod config;
mod digits;
pub mod engine;
pub mod explain;
pub mod findings;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
pub mod grpc;
pub mod guesses;
pub mod http;
mod ids;
pub mod listen;
pub mod live;
mod memory;
mod nearest;
pub mod observe;
mod panics;
mod parse;
mod preflight;
mod probe;
mod problem;
pub mod protocol;
pub mod proxy;
mod readiness;
mod reload;
pub mod reset;
pub mod resp;
pub mod response_options;
pub mod rules;
pub mod ruling;
mod run;
mod start_error;
mod store;
mod store_problem;
mod supervise;
mod threads;
mod watchdog;

pub use memory::{Bytes, MemorySettings};
pub use preflight::preflight;
pub use run::{BUILT_IN, DRAIN, Options, Running, start, start_over};
pub use start_error::StartError;
pub use store::{StoreCheck, check_store, remote_store};
pub use store_problem::{StoreProblem, store_problem};
pub use threads::{MAX_THREADS, Threads};
