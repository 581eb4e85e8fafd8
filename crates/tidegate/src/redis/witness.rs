//! What this process has seen of the keys it asks about, so that a server that has forgotten can be
//! told.
//!
//! A failover to a replica that lagged behind, an eviction, a FLUSHALL, a step of the clock: the
//! state of a key is gone or older than what its last answer said. Every call brings along what
//! this process has seen of the key, and the script goes on from the larger of the two (`join` in
//! `lua/`). Larger means stricter, so nothing is admitted that would not have been without it, and
//! whatever was given back in between is known by its epoch and not charged again. What is larger
//! than can be right is cut to that, and what was restored is then what is remembered: a memory
//! restores once.
//!
//! The table is small and never grows: each key has four places where it can be, and takes the one
//! that matters least.

use parking_lot::Mutex;
use siphasher::sip128::{Hasher128, SipHasher13};
use tidegate_core::{Reading, State, Timestamp};

use super::call::Found;
use tidegate_redis_client::Chance;

/// Epoch and state: at most those of an estimate.
const MOST_BYTES: usize = 7 + 28;
/// The longest scale, that of a bucket.
const MOST_SCALE: usize = 16;
/// Places in which one key can be.
const WAYS: usize = 4;
/// Places behind one lock.
const SETS_PER_SHARD: usize = 256;

/// What was seen of the keys asked about lately.
pub(crate) struct Witness {
    secret: (u64, u64),
    shards: Box<[Mutex<Vec<Memory>>]>,
}

/// What was seen of one key.
#[derive(Clone, Copy)]
struct Memory {
    key: u128,
    /// From when on it is worth nothing, by the time of this process.
    ends_at: Timestamp,
    /// From when on the key is idle, by the clock that judged it.
    idle_at: Timestamp,
    scale: [u8; MOST_SCALE],
    seen: [u8; MOST_BYTES],
    seen_len: u8,
}

const NOTHING: Memory = Memory {
    key: 0,
    ends_at: Timestamp::EPOCH,
    idle_at: Timestamp::EPOCH,
    scale: [0; MOST_SCALE],
    seen: [0; MOST_BYTES],
    seen_len: 0,
};

impl Memory {
    fn epoch(&self) -> &[u8] {
        &self.seen[..7]
    }
}

impl Witness {
    /// Remembers about `keys` keys; none at all if it is zero.
    pub(crate) fn new(keys: usize, chance: &Chance) -> Self {
        let shards = keys.div_ceil(WAYS * SETS_PER_SHARD);
        Witness {
            secret: (chance.number(), chance.number()),
            shards: (0..shards).map(|_| Mutex::new(Vec::new())).collect(),
        }
    }

    /// What was seen of `name` in this scale, if it still matters at `now`, a time of this process.
    pub(crate) fn recall(&self, name: &[u8], scale: &[u8], now: Timestamp) -> Option<Vec<u8>> {
        let (key, shard, set) = self.place(name)?;
        let memories = shard.lock();
        let memory = memories.get(set..set + WAYS)?.iter().find(|memory| memory.key == key)?;
        let same_scale = memory.scale == padded(scale);
        (same_scale && memory.ends_at > now)
            .then(|| memory.seen[..usize::from(memory.seen_len)].to_vec())
    }

    /// Remembers what an answer said about `name`, that was decided at `judged_at` by the clock
    /// that judges and is here `now`. What is remembered ends as soon as the key would be idle, in
    /// the time of this process: a clock that steps does not make it last longer.
    pub(crate) fn remember(
        &self,
        name: &[u8],
        scale: &[u8],
        found: &Found,
        judged_at: Timestamp,
        now: Timestamp,
    ) {
        let Found { reading: Reading::State(state), seen, restored, .. } = found else { return };
        if seen.len() < 7 || seen.len() > MOST_BYTES {
            return;
        }
        let Some((key, shard, set)) = self.place(name) else { return };
        let mut memories = shard.lock();
        if memories.is_empty() {
            memories.resize(WAYS * SETS_PER_SHARD, NOTHING);
        }
        let Some(ways) = memories.get_mut(set..set + WAYS) else { return };
        let idle_at = match state {
            State::Bucket { level, .. } if level.units == 0 => Timestamp::EPOCH,
            state => state.idle_at(),
        };
        let ends_at = now.after_micros(idle_at.micros_since(judged_at));
        let mut new = Memory { key, ends_at, idle_at, scale: padded(scale), ..NOTHING };
        new.seen[..seen.len()].copy_from_slice(seen);
        new.seen_len = u8::try_from(seen.len()).unwrap_or(0);
        if let Some(old) = ways.iter_mut().find(|memory| memory.key == key) {
            // Answers may overtake each other. Whatever is later, or stricter, is what to remember;
            // but what was restored is all of the old memory that can be right, and keeping more
            // would restore it again at every call.
            let same = old.scale == new.scale && old.ends_at > now && !restored;
            if !same
                || new.epoch() > old.epoch()
                || new.idle_at > old.idle_at
                || more_used(state, old, &new)
            {
                *old = new;
            }
        } else if new.ends_at > now
            && let Some(least) = ways.iter_mut().min_by_key(|memory| memory.ends_at)
        {
            *least = new;
        }
    }

    /// Forgets everything.
    pub(crate) fn forget(&self) {
        self.shards.iter().for_each(|shard| shard.lock().clear());
    }

    fn place(&self, name: &[u8]) -> Option<(u128, &Mutex<Vec<Memory>>, usize)> {
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

/// Of two states that end at the same moment, as those of one window do, the one with more in it.
/// Numbers are written most significant byte first, so the bytes compare like the numbers.
fn more_used(state: &State, old: &Memory, new: &Memory) -> bool {
    let counts = match state {
        State::Window { .. } => 14..21,
        State::Estimate { .. } => 21..35,
        _ => return new.idle_at >= old.idle_at,
    };
    new.idle_at == old.idle_at && new.seen[counts.clone()] > old.seen[counts]
}

fn padded(scale: &[u8]) -> [u8; MOST_SCALE] {
    let mut padded = [0; MOST_SCALE];
    let len = scale.len().min(MOST_SCALE);
    padded[..len].copy_from_slice(&scale[..len]);
    padded
}
