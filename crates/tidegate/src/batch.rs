//! Checks of many keys under one limit, in one call.

pub use crate::memory::{Gate, Series};
