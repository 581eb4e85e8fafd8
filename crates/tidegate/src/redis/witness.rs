//! Remembers the state of recently used keys, so that a server that lost it can restore it.
//!
//! After a failover to a replica that lagged, an eviction, a FLUSHALL or a step of the clock, the
//! state of a key is gone or older than its last answer. Every call carries what this process has
//! observed of the key, and the script continues from the larger of the two (`join` in `lua/`).
//! Larger means stricter, so an observation never allows more; a give-back in between is recognised
//! by its epoch and not charged again. An observation larger than the limit allows is cut to that,
//! and the restored state replaces it: an observation restores once.
//!
//! The table has a fixed size: each key has four slots where it can be, and takes the one that
//! expires first.

use parking_lot::Mutex;
use siphasher::sip128::{Hasher128, SipHasher13};
use tidegate_core::{Reading, State, Timestamp};

use super::call::ChargeAnswer;
use tidegate_redis_client::Chance;

/// The longest epoch and state, those of an estimate.
const MAX_BYTES: usize = 7 + 28;
/// The longest scale, that of a bucket.
const MAX_SCALE: usize = 16;
/// Slots in which one key can be.
const WAYS: usize = 4;
/// Sets of slots behind one lock.
const SETS_PER_SHARD: usize = 256;

/// The states of recently used keys.
pub(crate) struct Witness {
    secret: (u64, u64),
    shards: Box<[Mutex<Vec<Observation>>]>,
}

/// The last observed state of a key.
#[derive(Clone, Copy)]
struct Observation {
    key: u128,
    /// When it expires, by the time of this process.
    ends_at: Timestamp,
    /// When the key is idle, by the clock that decided.
    idle_at: Timestamp,
    scale: [u8; MAX_SCALE],
    seen: [u8; MAX_BYTES],
    seen_len: u8,
}

const EMPTY: Observation = Observation {
    key: 0,
    ends_at: Timestamp::EPOCH,
    idle_at: Timestamp::EPOCH,
    scale: [0; MAX_SCALE],
    seen: [0; MAX_BYTES],
    seen_len: 0,
};

impl Observation {
    fn epoch(&self) -> &[u8] {
        &self.seen[..7]
    }
}

impl Witness {
    /// A witness of about `keys` keys; of none if it is zero.
    pub(crate) fn new(keys: usize, chance: &Chance) -> Self {
        let shards = keys.div_ceil(WAYS * SETS_PER_SHARD);
        Witness {
            secret: (chance.number(), chance.number()),
            shards: (0..shards).map(|_| Mutex::new(Vec::new())).collect(),
        }
    }

    /// The observation of `name` in this scale, unless it has expired at `now`, a time of this
    /// process.
    pub(crate) fn recall(&self, name: &[u8], scale: &[u8], now: Timestamp) -> Option<Vec<u8>> {
        let (key, shard, set) = self.place(name)?;
        let observations = shard.lock();
        let observation =
            observations.get(set..set + WAYS)?.iter().find(|observation| observation.key == key)?;
        let same_scale = observation.scale == padded(scale);
        (same_scale && observation.ends_at > now)
            .then(|| observation.seen[..usize::from(observation.seen_len)].to_vec())
    }

    /// Remembers an answer about `name`, decided at `judged_at` by the deciding clock, which is
    /// `now` in this process. It expires when the key would be idle, by the time of this process,
    /// so a clock step does not extend it.
    pub(crate) fn remember(
        &self,
        name: &[u8],
        scale: &[u8],
        found: &ChargeAnswer,
        judged_at: Timestamp,
        now: Timestamp,
    ) {
        let ChargeAnswer { reading: Reading::State(state), seen, restored, .. } = found else {
            return;
        };
        if seen.len() < 7 || seen.len() > MAX_BYTES {
            return;
        }
        let Some((key, shard, set)) = self.place(name) else { return };
        let mut observations = shard.lock();
        if observations.is_empty() {
            observations.resize(WAYS * SETS_PER_SHARD, EMPTY);
        }
        let Some(ways) = observations.get_mut(set..set + WAYS) else { return };
        let idle_at = match state {
            State::Bucket { level, .. } if level.units == 0 => Timestamp::EPOCH,
            state => state.idle_at(),
        };
        let ends_at = now.after_micros(idle_at.micros_since(judged_at));
        let mut new = Observation { key, ends_at, idle_at, scale: padded(scale), ..EMPTY };
        new.seen[..seen.len()].copy_from_slice(seen);
        new.seen_len = u8::try_from(seen.len()).unwrap_or(0);
        if let Some(old) = ways.iter_mut().find(|observation| observation.key == key) {
            // Answers may overtake each other: keep the later or stricter one. But a restored state
            // is all of the old observation that can be right; keeping the old one would restore it
            // at every call.
            let same = old.scale == new.scale && old.ends_at > now && !restored;
            if !same
                || new.epoch() > old.epoch()
                || new.idle_at > old.idle_at
                || more_used(state, old, &new)
            {
                *old = new;
            }
        } else if new.ends_at > now
            && let Some(least) = ways.iter_mut().min_by_key(|observation| observation.ends_at)
        {
            *least = new;
        }
    }

    /// Forgets all keys.
    pub(crate) fn forget(&self) {
        self.shards.iter().for_each(|shard| shard.lock().clear());
    }

    fn place(&self, name: &[u8]) -> Option<(u128, &Mutex<Vec<Observation>>, usize)> {
        if self.shards.is_empty() {
            return None;
        }
        let mut hasher = SipHasher13::new_with_keys(self.secret.0, self.secret.1);
        std::hash::Hasher::write(&mut hasher, name);
        let hash = hasher.finish128();
        let shard = usize::try_from(hash.h1 % self.shards.len() as u64).ok()?;
        let set = usize::try_from(hash.h2 % SETS_PER_SHARD as u64).ok()? * WAYS;
        Some((hash.as_u128() | 1, self.shards.get(shard)?, set))
    }
}

/// Whether the new one of two states that expire at the same moment, as those of one window do, has
/// more in it. Numbers are big-endian, so their bytes compare like the numbers.
fn more_used(state: &State, old: &Observation, new: &Observation) -> bool {
    let counts = match state {
        State::Window { .. } => 14..21,
        State::Estimate { .. } => 21..35,
        _ => return new.idle_at >= old.idle_at,
    };
    new.idle_at == old.idle_at && new.seen[counts.clone()] > old.seen[counts]
}

fn padded(scale: &[u8]) -> [u8; MAX_SCALE] {
    let mut padded = [0; MAX_SCALE];
    let len = scale.len().min(MAX_SCALE);
    padded[..len].copy_from_slice(&scale[..len]);
    padded
}
