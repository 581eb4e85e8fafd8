//! Limits by number, so that a slot can say in two bytes which limit wrote it.

use std::collections::HashMap;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use parking_lot::RwLock;
use tidegate_core::Limit;

const CHUNK: usize = 1024;
const CHUNKS: usize = 64;

/// The most limits that get a number. States of further ones are kept in full instead.
pub(crate) const MAX_INTERNED: usize = CHUNK * CHUNKS - 1;

/// Limits by number, from 1. Numbers are never taken back; reading one takes no lock.
#[derive(Debug)]
pub(crate) struct Interned {
    numbers: RwLock<HashMap<Limit, u32>>,
    /// Who was asked for last: most programs have few limits, and comparing is cheaper than hashing.
    last: AtomicU32,
    chunks: [OnceLock<Box<[OnceLock<Limit>; CHUNK]>>; CHUNKS],
}

impl Interned {
    pub(crate) fn new() -> Self {
        Interned { numbers: RwLock::default(), last: AtomicU32::new(0), chunks: [const { OnceLock::new() }; CHUNKS] }
    }

    /// How many there are; their numbers are 1 to this.
    pub(crate) fn len(&self) -> u32 {
        u32::try_from(self.numbers.read().len()).unwrap_or(u32::MAX)
    }

    /// The limit of a number that [`number`](Interned::number) gave.
    #[inline]
    pub(crate) fn get(&self, number: u32) -> Option<&Limit> {
        let number = number as usize;
        self.chunks.get(number / CHUNK)?.get()?[number % CHUNK].get()
    }

    /// The number of a limit; `None` if there are too many.
    pub(crate) fn number(&self, limit: &Limit) -> Option<u32> {
        let last = self.last.load(Ordering::Relaxed);
        if self.get(last) == Some(limit) {
            return Some(last);
        }
        if let Some(number) = self.numbers.read().get(limit) {
            self.last.store(*number, Ordering::Relaxed);
            return Some(*number);
        }
        let mut numbers = self.numbers.write();
        if let Some(number) = numbers.get(limit) {
            return Some(*number); // somebody else was faster
        }
        let next = numbers.len() + 1;
        if next > MAX_INTERNED {
            return None;
        }
        let number = u32::try_from(next).ok()?;
        let chunk = self.chunks[next / CHUNK].get_or_init(|| Box::new([const { OnceLock::new() }; CHUNK]));
        chunk[next % CHUNK].get_or_init(|| *limit);
        numbers.insert(*limit, number);
        Some(number)
    }
}

#[cfg(test)]
mod tests {
    use tidegate_core::Period;

    use super::*;

    #[test]
    fn numbers_are_stable_and_bounded() {
        let interned = Interned::new();
        let limit = |amount: usize| Limit::window(amount as u64, Period::SECOND).build().unwrap();
        for amount in 1..=MAX_INTERNED {
            let number = interned.number(&limit(amount)).unwrap();
            assert_eq!(interned.number(&limit(amount)), Some(number));
            assert_eq!(interned.get(number), Some(&limit(amount)));
        }
        assert_eq!(interned.number(&limit(MAX_INTERNED + 1)), None);
        assert_eq!(interned.get(0), None);
    }
}
