//! The server from outside.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod access;
mod attributes;
mod cell;
mod clients;
mod exchanges;
mod exempt;
mod forward;
#[cfg(feature = "fuzzing")]
mod fuzz;
mod gateways;
mod grpc;
mod http;
mod listeners;
mod missing;
mod observed;
mod openapi;
mod overflow;
mod pages;
mod proxy;
/// The same tests on the general path, without the fast path.
#[path = "proxy/mod.rs"]
#[allow(clippy::duplicate_mod, reason = "each test must hold on both paths")]
mod proxy_by_hyper;
mod readiness;
mod reload;
mod reset;
mod resilience;
mod resp;
mod security;
mod shadow;
mod strangers;
mod transactions;
mod transcripts;
