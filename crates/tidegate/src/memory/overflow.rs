//! Records at work, and what becomes of those that find no place.

use tidegate_core::{Id, Limit, Op, Record, Timestamp};

/// The most limits that can have a shared state for overflowing keys.
const MAX_OVERFLOWS: usize = 1024;

/// What happens to a new key when every place is taken by a key that is in use. A key in use is never forgotten for a new one.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Overflow {
    /// All keys that find no place share one state per limit: together they get what one key gets.
    #[default]
    SharedBucket,
    /// New keys are denied.
    DenyNew,
    /// New keys are allowed and not counted.
    AllowNew,
}

/// The shared states of keys that found no place.
#[derive(Debug, Default)]
pub(super) struct Overflows {
    /// By limit and by which charge of a call it was, so that no two charges of one call share a record.
    records: Vec<(Limit, usize, Record)>,
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
}

impl<'a> Ask<'a> {
    pub(super) fn charge(&self, record: &'a mut Record) -> tidegate_core::Charge<'a> {
        tidegate_core::Charge { limit: self.limit, record, cost: self.cost, reserved: self.reserved, id: self.id }
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
    /// The shared record of a limit, which there is then; or an exhausted one if there are too many.
    pub(super) fn load(&mut self, ask: &Ask<'_>, now: Timestamp) -> Held {
        if let Some(record) = self.find(ask) {
            return Held { record: record.clone(), home: Home::Shared };
        }
        self.records.retain(|(_, _, record)| now < record.idle_at());
        if self.records.len() >= MAX_OVERFLOWS {
            return Held::exhausted(ask, now);
        }
        self.records.push((*ask.limit, ask.ordinal, Record::default()));
        Held { record: Record::default(), home: Home::Shared }
    }

    pub(super) fn store(&mut self, ask: &Ask<'_>, record: Record) {
        if let Some(kept) = self.find(ask) {
            *kept = record;
        }
    }

    fn find(&mut self, ask: &Ask<'_>) -> Option<&mut Record> {
        let known = |entry: &&mut (Limit, usize, Record)| (&entry.0, entry.1) == (ask.limit, ask.ordinal);
        self.records.iter_mut().find(known).map(|(_, _, record)| record)
    }
}
