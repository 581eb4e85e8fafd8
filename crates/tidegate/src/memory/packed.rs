//! The packing of states into the two words of a slot.

use tidegate_core::algorithm::bucket::Level;
use tidegate_core::algorithm::window::Count;
use tidegate_core::{Algorithm, EXACT, Limit, Record, State, Timestamp};

use super::interned::Interned;

/// Bits of a slot's word that hold a number below 2^53; the other eleven hold half of the tag.
const NUMBER_BITS: u32 = 53;
const NUMBER: u64 = (1 << NUMBER_BITS) - 1;
const TAG_BITS: u32 = 64 - NUMBER_BITS;
const TAG: u32 = (1 << TAG_BITS) - 1;
/// The tag of a slot whose record is in the list. Others are numbers of limits.
pub(super) const LISTED: u32 = (1 << (2 * TAG_BITS)) - 1;
/// A tag that no slot has.
const NO_TAG: u32 = 0;

/// The tag of a limit's states, as in the two words of a slot.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LimitTag {
    low: u64,
    high: u64,
}

impl LimitTag {
    fn new(tag: u32) -> Self {
        LimitTag {
            low: u64::from(tag & TAG) << NUMBER_BITS,
            high: u64::from(tag >> TAG_BITS) << NUMBER_BITS,
        }
    }

    /// The tag of a limit's number. Without a number, a tag that no slot has.
    pub(crate) fn of(number: Option<u32>) -> Self {
        LimitTag::new(number.map_or(NO_TAG, |number| number + FIRST_TAG))
    }

    /// The numbers of a slot with this tag.
    #[inline(always)]
    pub(crate) fn unpack(self, (low, high): (u64, u64)) -> Option<(u64, u64)> {
        let (first, second) = (low ^ self.low, high ^ self.high);
        ((first | second) >> NUMBER_BITS == 0).then_some((first, second))
    }

    /// The words of a slot with this tag. Numbers of states are below 2^53.
    #[inline(always)]
    pub(crate) fn pack(self, (first, second): (u64, u64)) -> (u64, u64) {
        debug_assert!((first | second) >> NUMBER_BITS == 0, "{first} {second}");
        (first | self.low, second | self.high)
    }
}

/// Two numbers and a tag.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Packed {
    pub(super) tag: u32,
    pub(super) first: u64,
    pub(super) second: u64,
}

impl Packed {
    #[inline]
    #[allow(clippy::cast_possible_truncation, reason = "eleven bits remain after the shift")]
    pub(crate) fn of((low, high): (u64, u64)) -> Self {
        let tag = ((high >> NUMBER_BITS) as u32) << TAG_BITS | (low >> NUMBER_BITS) as u32;
        Packed { tag, first: low & NUMBER, second: high & NUMBER }
    }

    /// Whether `limit` wrote it. False if the state is in the list, or was read during a write.
    #[inline]
    pub(crate) fn is_of(self, limit: &Limit, limits: &Interned) -> bool {
        limits.is(self.tag.wrapping_sub(FIRST_TAG), limit)
    }

    /// The state that it is, if it is not in the list.
    pub(super) fn state(self, limits: &Interned) -> State {
        limits.state(self.tag.wrapping_sub(FIRST_TAG), (self.first, self.second))
    }

    #[inline]
    pub(crate) fn tag(self) -> LimitTag {
        LimitTag::new(self.tag)
    }

    /// The words of a slot. The upper half of the tag is never zero, because a zero word marks an
    /// empty slot.
    pub(super) fn words(self) -> (u64, u64) {
        self.tag().pack((self.first & NUMBER, self.second & NUMBER))
    }
}

/// The first tag, so that the upper half of tags is never zero.
pub(super) const FIRST_TAG: u32 = TAG + 1;

/// The record of two numbers that `limit` wrote, if the limit packs its states and the numbers are
/// valid.
pub(crate) fn record_of(limit: &Limit, [first, second]: [u64; 2]) -> Option<Record> {
    let packs = match limit.algorithm() {
        Algorithm::Bucket(_) => second < EXACT,
        Algorithm::Window(window) => !window.from_first_hit && second <= Timestamp::MAX.as_micros(),
        _ => false,
    };
    (packs && first < EXACT)
        .then(|| Record { state: unpack((first, second), limit), ..Record::default() })
}

/// A state as two numbers, if it can be packed and its limit has a number.
pub(super) fn pack(record: &Record, limit: &Limit, limits: &Interned) -> Option<Packed> {
    if !record.receipts.is_empty() || !record.state.fits(limit.algorithm()) {
        return None;
    }
    let (first, second) = match record.state {
        State::Bucket { level, .. } => (level.units, level.at),
        // An aligned window's start follows from any moment in it.
        State::Window { count, from_first_hit: false, .. } => (count.used, count.last),
        _ => return None,
    };
    let tag = tag_of(limit, limits)?;
    Some(Packed { tag, first, second: second.as_micros() })
}

/// The tag of states that `limit` wrote, if it has a number.
pub(super) fn tag_of(limit: &Limit, limits: &Interned) -> Option<u32> {
    limits.number(limit).map(|number| number + FIRST_TAG)
}

/// The state that [`pack`] packed.
fn unpack(numbers: (u64, u64), limit: &Limit) -> State {
    match limit.algorithm() {
        Algorithm::Bucket(bucket) => State::Bucket { rate: bucket.rate, level: level_of(numbers) },
        Algorithm::Window(window) => {
            let count = count_of(numbers, window.period);
            State::Window { period: window.period, from_first_hit: window.from_first_hit, count }
        }
        _ => State::Idle,
    }
}

/// A bucket's level from its two numbers.
#[inline(always)]
pub(crate) fn level_of((units, at): (u64, u64)) -> Level {
    Level { units, at: Timestamp::from_kept_micros(at) }
}

/// A window's count from its two numbers.
#[inline(always)]
pub(crate) fn count_of((used, last): (u64, u64), period: u64) -> Count {
    let start = Timestamp::from_micros(last - last % period);
    Count { start, last: Timestamp::from_micros(last), used }
}
