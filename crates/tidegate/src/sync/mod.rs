//! The atomics of values that are read without a lock, and the protocol by which they are read.
//! `tools/loom/` compiles [`version`] with atomics of its own, which try every order.

pub(crate) mod version;

pub(crate) use std::sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering, fence};
