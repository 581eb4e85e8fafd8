//! Records while they are decided, and the shared records of charges that found the store full.

use std::sync::atomic::{AtomicUsize, Ordering};

use tidegate_core::{Algorithm, Id, Limit, Op, Record, Timestamp};

use crate::store::Overflow;

/// The maximum number of limits with a shared record. A check over several limits may exceed it by
/// a few.
const MAX_OVERFLOWS: usize = 1024;

/// The shared records of charges that found the store full.
#[derive(Debug, Default)]
pub(super) struct Overflows {
    /// By limit and index of the charge in its check, so that two charges of one check do not share
    /// a record.
    records: Vec<(Limit, usize, Record)>,
    /// The bytes that are included in the store's counter.
    counted: usize,
}

/// One charge of a check.
#[derive(Clone, Copy)]
pub(super) struct MemoryCharge<'a> {
    pub(super) limit: &'a Limit,
    /// Its index in the check.
    pub(super) ordinal: usize,
    pub(super) cost: u64,
    pub(super) reserved: u64,
    pub(super) id: Option<Id>,
    /// What happens to it in a full store; the default is the store's setting.
    pub(super) overflow: Option<Overflow>,
}

impl<'a> MemoryCharge<'a> {
    /// Whether its state is kept in the list beside the table.
    pub(super) fn is_listed(&self) -> bool {
        let in_a_slot = match self.limit.algorithm() {
            Algorithm::Bucket(_) => true,
            Algorithm::Window(window) => !window.from_first_hit,
            _ => false,
        };
        !in_a_slot || self.id.is_some()
    }

    /// Whether it may enlarge the state of a known key.
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

/// A record while it is decided.
pub(super) struct HeldRecord {
    pub(super) record: Record,
    pub(super) placement: Placement,
}

impl HeldRecord {
    /// A record that is used up, for a charge that is denied because the store is full. It is not
    /// kept.
    pub(super) fn exhausted(charge: &MemoryCharge<'_>, now: Timestamp) -> HeldRecord {
        let mut record = Record::default();
        let everything =
            tidegate_core::Charge::new(charge.limit, &mut record, charge.limit.capacity());
        let _ = tidegate_core::decide(Op::Check, &mut [everything], now);
        HeldRecord { record, placement: Placement::Nowhere }
    }

    /// A reset of one key must not forget the usage of others in a shared record.
    pub(super) fn spare_others(&mut self, op: Op) {
        if let (Op::Reset, Placement::Shared) = (op, &self.placement) {
            self.placement = Placement::Nowhere;
        }
    }
}

/// Where a record is stored after the decision.
pub(super) enum Placement {
    /// In the slot of its key, which is added if there is state to keep.
    Slot,
    /// In the shared record of its limit.
    Shared,
    /// It is discarded.
    Nowhere,
}

impl Overflows {
    /// Takes the shared record of a limit until [`store`](Overflows::store) puts it back, or an
    /// exhausted one if there are too many.
    pub(super) fn load(&mut self, charge: &MemoryCharge<'_>, now: Timestamp) -> HeldRecord {
        if let Some(record) = self.find(charge) {
            return HeldRecord { record: std::mem::take(record), placement: Placement::Shared };
        }
        if self.records.len() >= MAX_OVERFLOWS {
            self.records.retain(|(_, _, record)| now < record.idle_at());
        }
        if self.records.len() >= MAX_OVERFLOWS {
            return HeldRecord::exhausted(charge, now);
        }
        HeldRecord { record: Record::default(), placement: Placement::Shared }
    }

    pub(super) fn store(&mut self, charge: &MemoryCharge<'_>, record: Record, bytes: &AtomicUsize) {
        match self.find(charge) {
            Some(kept) => *kept = record,
            None => self.records.push((*charge.limit, charge.ordinal, record)),
        }
        let heap: usize = self.records.iter().map(|(_, _, record)| record.heap_bytes()).sum();
        let now = heap + self.records.capacity() * size_of::<(Limit, usize, Record)>();
        bytes.fetch_add(now.wrapping_sub(self.counted), Ordering::Relaxed);
        self.counted = now;
    }

    fn find(&mut self, charge: &MemoryCharge<'_>) -> Option<&mut Record> {
        let known = |entry: &&mut (Limit, usize, Record)| {
            (&entry.0, entry.1) == (charge.limit, charge.ordinal)
        };
        self.records.iter_mut().find(known).map(|(_, _, record)| record)
    }
}
