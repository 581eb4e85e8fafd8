//! One test binary: the core against slow models, and against the laws it must obey.
#![allow(clippy::cast_possible_truncation, reason = "random words are cut to size on purpose")]

mod draw;
mod laws;
