//! Limits whose numbers are held, so that they are not given to other limits.

use std::sync::atomic::Ordering;

use tidegate_core::Limit;

use super::Memory;

/// The held number of a limit, if it has one.
#[derive(Debug)]
pub(super) struct Pinned {
    pub(super) memory: Memory,
    number: Option<u32>,
    is_reserved: bool,
}

impl Pinned {
    /// Holds the number of a limit while this value lives.
    pub(super) fn new(memory: &Memory, limit: &Limit, is_reserved: bool) -> Self {
        Pinned {
            memory: memory.clone(),
            number: memory.inner.limits.hold(limit, is_reserved),
            is_reserved,
        }
    }

    pub(super) fn number(&self) -> Option<u32> {
        self.number
    }
}

impl Clone for Pinned {
    fn clone(&self) -> Self {
        // `self` holds the number, so it is not freed meanwhile.
        if let Some(entry) = self.number.and_then(|number| self.memory.inner.limits.entry(number)) {
            entry.holders.fetch_add(1, Ordering::Relaxed);
            entry.reserved.fetch_add(u32::from(self.is_reserved), Ordering::Relaxed);
        }
        Pinned { memory: self.memory.clone(), ..*self }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if let Some(number) = self.number {
            self.memory.inner.limits.release(number, self.is_reserved);
        }
    }
}

/// Limits whose numbers are reserved while this value lives; see [`Memory::reserve_limits`].
#[derive(Clone, Debug)]
#[must_use = "the limits are reserved for as long as it lives"]
pub struct ReservedLimits {
    _pinned: Vec<Pinned>,
}

impl ReservedLimits {
    pub(super) fn new<'a>(memory: &Memory, limits: impl IntoIterator<Item = &'a Limit>) -> Self {
        ReservedLimits {
            _pinned: limits.into_iter().map(|limit| Pinned::new(memory, limit, true)).collect(),
        }
    }
}
