//! The server from outside.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod doors;
mod http;
mod reload;
mod resp;
mod transcripts;
