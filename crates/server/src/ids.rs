//! Ids of reservations and leases for callers that bring none.

use std::hash::{BuildHasher, RandomState};

use tidegate::Id;

/// A random id that is hard to guess and fits into 53 bits, the integers that a JSON number holds
/// in every language.
pub(crate) fn fresh_id() -> Id {
    Id(RandomState::new().hash_one(0) >> 11 | 1)
}
