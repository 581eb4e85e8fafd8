//! The server from outside.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod cell;
mod clients;
mod doors;
mod exchanges;
mod http;
mod reload;
mod resp;
mod security;
mod shadow;
mod transcripts;
