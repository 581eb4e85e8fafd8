//! The log: every hit is kept with its time, and what is younger than one period counts.
//!
//! Exact, and the largest in memory: one entry per hit, so the amount is at most 100 000.

use alloc::collections::VecDeque;
use alloc::vec::Vec;
use core::cmp::max;

use super::pieces::{take_back, until_ended};
use super::{Kernel, Moved};
use crate::Id;
use crate::exact::exact_sum;
use crate::state::block;
use crate::time::Timestamp;

/// The parameters of a log.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub struct Log {
    /// The units in any span of one period.
    pub amount: u64,
    /// The period in microseconds.
    pub period: u64,
}

/// The state of a log for one key: every hit that still counts, oldest first.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Entries {
    entries: VecDeque<Entry>,
    total: u64,
}

/// The units charged at one time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Entry {
    /// The time of the charge.
    pub at: Timestamp,
    /// The units charged.
    pub cost: u64,
}

impl Entries {
    pub(crate) fn heap_bytes(&self) -> usize {
        block::<Entry>(self.entries.capacity())
    }

    /// Entries that a store has kept, oldest first; `None` if their sum is too large.
    pub(crate) fn from_parts(entries: Vec<Entry>) -> Option<Self> {
        let total = exact_sum(entries.iter().map(|entry| entry.cost))?;
        Some(Entries { entries: entries.into(), total })
    }

    /// The entries, oldest first; no two have the same time.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = Entry> + '_ {
        self.entries.iter().copied()
    }

    /// The sum of all entries.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Restores at the front what [`age`](Kernel::age) removed there.
    pub(crate) fn restore(&mut self, ended: &[Entry]) {
        for entry in ended.iter().rev() {
            self.total += entry.cost;
            self.entries.push_front(*entry);
        }
    }
}

impl Log {
    /// The entries that [`age`](Kernel::age) removes.
    pub(crate) fn ended(&self, log: &Entries, now: Timestamp) -> Vec<Entry> {
        let now = log.entries.back().map_or(now, |newest| max(now, newest.at));
        log.iter().take_while(|entry| now.micros_since(entry.at) >= self.period).collect()
    }

    /// What was taken later than `now`, and counted at the newest entry, counts as taken now.
    pub(crate) fn rebase(&self, log: &mut Entries, now: Timestamp) -> Moved {
        let newest = self.age(log, now);
        let mut cost = 0;
        while let Some(later) = log.entries.pop_back_if(|entry| entry.at >= now) {
            cost += later.cost;
        }
        if cost > 0 {
            log.entries.push_back(Entry { at: now, cost });
        }
        Moved::to(now, newest, self.period)
    }
}

impl Kernel for Log {
    type State = Entries;

    #[inline(always)]
    fn capacity(&self) -> u64 {
        self.amount
    }

    fn age(&self, log: &mut Entries, now: Timestamp) -> Timestamp {
        let now = log.entries.back().map_or(now, |newest| max(now, newest.at));
        while let Some(oldest) = log.entries.front() {
            if now.micros_since(oldest.at) < self.period {
                break;
            }
            log.total -= oldest.cost;
            log.entries.pop_front();
        }
        now
    }

    fn room(&self, log: &Entries, _now: Timestamp, ceiling: u64) -> u64 {
        ceiling.saturating_sub(log.total)
    }

    fn charge(&self, log: &mut Entries, now: Timestamp, cost: u64, _id: Id) -> Timestamp {
        let cost = cost.min(crate::time::EXACT - 1 - log.total);
        log.total += cost;
        match log.entries.back_mut() {
            Some(newest) if newest.at == now => newest.cost += cost,
            _ => log.entries.push_back(Entry { at: now, cost }),
        }
        now
    }

    fn wait(&self, log: &Entries, now: Timestamp, cost: u64, ceiling: u64) -> u64 {
        let over = log.total.saturating_sub(ceiling - cost);
        if over == log.total {
            return self.idle_at(log).micros_since(now); // all of it must go: no need to count
        }
        until_ended(over, log.iter().map(|entry| (entry.cost, entry.at.plus(self.period))), now)
    }

    fn give_back(
        &self,
        log: &mut Entries,
        _now: Timestamp,
        units: u64,
        charged_at: Option<Timestamp>,
    ) -> u64 {
        let charged =
            log.entries.iter_mut().rev().filter(|entry| charged_at.is_none_or(|at| at == entry.at));
        let back = take_back(units, charged.map(|entry| &mut entry.cost));
        log.entries.retain(|entry| entry.cost > 0);
        log.total -= back;
        back
    }

    fn idle_at(&self, log: &Entries) -> Timestamp {
        log.entries.back().map_or(Timestamp::EPOCH, |newest| newest.at.plus(self.period))
    }
}
