//! The server from outside.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod cell;
mod clients;
mod doors;
mod exchanges;
mod forward;
#[cfg(feature = "fuzzing")]
mod fuzz;
mod gateways;
mod grpc;
mod http;
mod near;
mod observed;
mod openapi;
mod pages;
mod proxy;
mod reload;
mod resp;
mod security;
mod shadow;
mod transcripts;
