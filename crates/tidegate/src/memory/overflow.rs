//! Records at work, and what becomes of those that find no place.

use std::sync::atomic::{AtomicUsize, Ordering};

use tidegate_core::{Algorithm, Id, Limit, Op, Record, Timestamp};

use crate::store::Overflow;

/// The most limits that can have a shared state for overflowing keys; a check over several may go a
/// few beyond it.
const MAX_OVERFLOWS: usize = 1024;

/// The shared states of keys that found no place.
#[derive(Debug, Default)]
pub(super) struct Overflows {
    /// By limit and by which charge of a call it was, so that no two charges of one call share a
    /// record.
    records: Vec<(Limit, usize, Record)>,
    /// How many bytes of theirs the store knows of.
    counted: usize,
}

/// One charge of a call.
#[derive(Clone, Copy)]
pub(super) struct Ask<'a> {
    pub(super) limit: &'a Limit,
    /// Which charge of the call it is.
    pub(super) ordinal: usize,
    pub(super) cost: u64,
    pub(super) reserved: u64,
    pub(super) id: Option<Id>,
    /// What becomes of it without room, if not what the store says.
    pub(super) overflow: Option<Overflow>,
}

impl<'a> Ask<'a> {
    /// Whether its state is kept beside the table.
    pub(super) fn is_listed(&self) -> bool {
        let in_a_slot = match self.limit.algorithm() {
            Algorithm::Bucket(_) => true,
            Algorithm::Window(window) => !window.from_first_hit,
            _ => false,
        };
        !in_a_slot || self.id.is_some()
    }

    /// Whether its state may be larger afterwards than that of a key that is there.
    pub(super) fn may_grow(&self, op: Op) -> bool {
        let takes = matches!(op, Op::Check | Op::Take | Op::Debit | Op::Book { .. });
        let has_list = matches!(
            self.limit.algorithm(),
            Algorithm::Sliding(_) | Algorithm::Log(_) | Algorithm::Concurrent(_)
        );
        takes && (has_list || self.id.is_some())
    }

    pub(super) fn charge(&self, record: &'a mut Record) -> tidegate_core::Charge<'a> {
        tidegate_core::Charge {
            limit: self.limit,
            record,
            cost: self.cost,
            reserved: self.reserved,
            id: self.id,
        }
    }
}

/// A record at work.
pub(super) struct Held {
    pub(super) record: Record,
    pub(super) home: Home,
}

impl Held {
    /// Of a key that found no place: as if everything had just been used. Nothing of it is kept.
    pub(super) fn exhausted(ask: &Ask<'_>, now: Timestamp) -> Held {
        let mut record = Record::default();
        let everything = tidegate_core::Charge::new(ask.limit, &mut record, ask.limit.capacity());
        let _ = tidegate_core::decide(Op::Check, &mut [everything], now);
        Held { record, home: Home::Nowhere }
    }

    /// What others have used is not this key's to forget.
    pub(super) fn spare_others(&mut self, op: Op) {
        if let (Op::Reset, Home::Shared) = (op, &self.home) {
            self.home = Home::Nowhere;
        }
    }
}

/// Where a record is kept.
pub(super) enum Home {
    /// In the slot of its key, which is made if there is anything to keep.
    Slot,
    /// With all others that found no place.
    Shared,
    /// It is not.
    Nowhere,
}

impl Overflows {
    /// The shared record of a limit, taken out until [`store`](Overflows::store) brings it back; or
    /// an exhausted one if there are too many.
    pub(super) fn load(&mut self, ask: &Ask<'_>, now: Timestamp) -> Held {
        if let Some(record) = self.find(ask) {
            return Held { record: std::mem::take(record), home: Home::Shared };
        }
        if self.records.len() >= MAX_OVERFLOWS {
            self.records.retain(|(_, _, record)| now < record.idle_at());
        }
        if self.records.len() >= MAX_OVERFLOWS {
            return Held::exhausted(ask, now);
        }
        Held { record: Record::default(), home: Home::Shared }
    }

    pub(super) fn store(&mut self, ask: &Ask<'_>, record: Record, bytes: &AtomicUsize) {
        match self.find(ask) {
            Some(kept) => *kept = record,
            None => self.records.push((*ask.limit, ask.ordinal, record)),
        }
        let heap: usize = self.records.iter().map(|(_, _, record)| record.heap_bytes()).sum();
        let now = heap + self.records.capacity() * size_of::<(Limit, usize, Record)>();
        bytes.fetch_add(now.wrapping_sub(self.counted), Ordering::Relaxed);
        self.counted = now;
    }

    fn find(&mut self, ask: &Ask<'_>) -> Option<&mut Record> {
        let known =
            |entry: &&mut (Limit, usize, Record)| (&entry.0, entry.1) == (ask.limit, ask.ordinal);
        self.records.iter_mut().find(known).map(|(_, _, record)| record)
    }
}
