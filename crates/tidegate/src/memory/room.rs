//! Room for keys: where the record of a charge is kept, and what happens in a full store.

use std::sync::atomic::Ordering;

use tidegate_core::{Op, Record, Timestamp};

use super::inner::MemoryInner;
use super::overflow::{HeldRecord, MemoryCharge, Placement};
use super::shard::Shard;
use super::slots::Hash;
use crate::store::Overflow;

/// What needs room.
#[derive(Clone, Copy)]
pub(super) enum RoomFor {
    /// A new key, in a slot or in the list, if its shard has fewer than `most` keys.
    Key { most: usize, is_listed: bool },
    /// More state of a known key.
    Growth,
}

impl MemoryInner {
    /// The record of a key, and where to store it afterwards. `added` new slots of the shard are
    /// taken by other charges of the check.
    pub(super) fn load(
        &self,
        shard: &mut Shard,
        hash: Hash,
        (op, input): (Op, &MemoryCharge<'_>),
        added: usize,
        now: Timestamp,
    ) -> HeldRecord {
        let may_grow = input.may_grow(op);
        let mut is_there = shard.find(hash).is_ok();
        if is_there {
            let has_room = !may_grow || self.make_room(shard, hash, RoomFor::Growth, now);
            match shard.find(hash) {
                Ok(index) if has_room => {
                    return HeldRecord {
                        record: shard.take(index, &self.limits),
                        placement: Placement::Slot,
                    };
                }
                Ok(_) => {}
                // The key was idle and was removed to make room.
                Err(_) => is_there = false,
            }
        }
        let most = self.max_keys_per_shard.saturating_sub(added);
        if !is_there
            && self.make_room(shard, hash, RoomFor::Key { most, is_listed: input.is_listed() }, now)
        {
            return HeldRecord { record: Record::default(), placement: Placement::Slot };
        }
        self.without_room.fetch_add(1, Ordering::Relaxed);
        // The shared record would have to grow, too; and the usage of a known key must not be
        // forgotten because it wants more.
        let is_stuck = is_there || may_grow && self.bytes.load(Ordering::Relaxed) >= self.max_bytes;
        match input.overflow.unwrap_or(self.overflow) {
            Overflow::SharedBucket if is_stuck => HeldRecord::exhausted(input, now),
            Overflow::SharedBucket => {
                HeldRecord { record: Record::default(), placement: Placement::Shared }
            }
            Overflow::AllowNew => {
                HeldRecord { record: Record::default(), placement: Placement::Nowhere }
            }
            Overflow::DenyNew => HeldRecord::exhausted(input, now),
        }
    }

    /// Whether a shard has room.
    #[inline]
    pub(super) fn has_room(&self, shard: &Shard, more: RoomFor) -> bool {
        let bytes = self.bytes.load(Ordering::Relaxed);
        match more {
            RoomFor::Key { most, is_listed } => {
                let more = shard.bytes_for_one_more(is_listed);
                shard.len() < most && bytes.saturating_add(more) <= self.max_bytes
            }
            RoomFor::Growth => bytes < self.max_bytes,
        }
    }

    /// Whether a shard has room, if necessary after the removal of idle keys.
    pub(super) fn make_room(
        &self,
        shard: &mut Shard,
        hash: Hash,
        more: RoomFor,
        now: Timestamp,
    ) -> bool {
        if self.has_room(shard, more) {
            return true;
        }
        shard.look_for_idle(&self.limits, now);
        if shard.is_spacious() {
            shard.rebuild(&self.limits, now);
            self.publish_lines(hash, shard);
        }
        shard.count(&self.bytes);
        self.has_room(shard, more)
    }

    pub(super) fn store(
        &self,
        shard: &mut Shard,
        hash: Hash,
        input: &MemoryCharge<'_>,
        held: HeldRecord,
        now: Timestamp,
    ) {
        match (held.placement, shard.find(hash)) {
            (Placement::Slot, Ok(index)) => {
                shard.put(index, held.record, input.limit, &self.limits, now)
            }
            (Placement::Slot, Err(index)) => {
                shard.add(hash, index, held.record, input.limit, &self.limits, now);
                self.publish_lines(hash, shard);
            }
            _ => {}
        }
        shard.count(&self.bytes);
    }
}
