//! One test binary: the core against slow models, and against the laws it must obey.
#![allow(clippy::cast_possible_truncation, reason = "random words are cut to size on purpose")]
#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod check;
mod docs;
mod draw;
mod laws;
mod model;
mod naive;
mod names;
mod notation;
mod transcripts;
