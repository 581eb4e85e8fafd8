//! State in Redis or Valkey.

#[allow(dead_code, unused_imports, reason = "the store that uses it comes next")]
pub(crate) mod wire;

pub use wire::{Failure, FailureKind, RedisUrl, RedisUrlError};
