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
/// The same tests without the short way, on which everything has to be as it is with it.
#[path = "proxy/mod.rs"]
#[allow(clippy::duplicate_mod, reason = "each of them must hold on both ways")]
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
