//! The atomics of what is read without a lock. `tools/loom/` compiles the same files with atomics of its
//! own, which try every order.

pub(crate) use std::sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering, fence};
