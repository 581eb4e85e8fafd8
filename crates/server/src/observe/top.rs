//! The most limited keys, in bounded memory.
//!
//! Space-Saving: each shard keeps [`PLACES`] keys. A new key replaces the one with the fewest
//! denials and inherits its count as a possible error, so a count is never too small, and too large
//! by at most its `error`. Every key with more than one in `PLACES` denials of its shard is listed.
//! Two generations of [`GENERATION`] each are kept, so that the list is recent.
//!
//! Only denials are counted. A key is kept as a keyed hash, unless keys may be shown. →
//! docs/decisions/0017-top.md

use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Keys each shard keeps in one generation.
pub const PLACES: usize = 64;
/// Shards; a key always maps to the same one.
const SHARDS: usize = 16;
/// How long one generation lasts.
pub const GENERATION: Duration = Duration::from_secs(300);
/// The longest text of a key that is kept, in bytes.
const MAX_SHOWN_BYTES: usize = 256;

/// One of the most limited keys.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LimitedKey {
    /// The rule; empty for limits of callers.
    pub rule: String,
    /// The key as it is, or its keyed hash.
    pub key: String,
    /// How often it was denied: at most this often, and at least `denied - error` times.
    pub denied: u64,
    /// How much too large the count may be.
    pub error: u64,
}

/// Counts denials by key.
#[derive(Debug)]
pub struct Top {
    shards: Box<[Mutex<TopShard>]>,
    /// Different in every process.
    hashing: RandomState,
    show_keys: AtomicBool,
    started: Instant,
    /// Denials that were not counted because another thread held the lock of the shard.
    left_out: AtomicU64,
}

#[derive(Debug, Default)]
struct TopShard {
    generation: u64,
    now: Summary,
    before: Summary,
}

#[derive(Debug, Default)]
struct Summary {
    places: Vec<TopEntry>,
    /// Denials of each entry, in one array: finding the fewest reads all of them.
    denied: Vec<u64>,
    at: HashMap<u64, usize, Same>,
}

#[derive(Debug)]
struct TopEntry {
    hash: u64,
    rule: Box<str>,
    shown: Option<Box<str>>,
    error: u64,
}

/// The keys of the map are hashes already.
#[derive(Clone, Copy, Debug, Default)]
struct Same;

#[derive(Debug, Default)]
struct Folded(u64);

impl BuildHasher for Same {
    type Hasher = Folded;

    fn build_hasher(&self) -> Folded {
        Folded(0)
    }
}

impl Hasher for Folded {
    fn write(&mut self, bytes: &[u8]) {
        self.0 = bytes.iter().fold(self.0, |folded, byte| folded << 8 ^ u64::from(*byte));
    }

    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

impl Top {
    pub(crate) fn new(show_keys: bool) -> Self {
        Top {
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            hashing: RandomState::new(),
            show_keys: AtomicBool::new(show_keys),
            started: Instant::now(),
            left_out: AtomicU64::new(0),
        }
    }

    /// Counts a denial of this key, this many seconds after the start. Never blocks.
    pub(crate) fn denied(&self, rule: &str, key: &[u8], secs: u64) {
        let hash = self.hash(rule, key);
        let Some(mut shard) = self.shards[shard_of(hash)].try_lock() else {
            self.left_out.fetch_add(1, Ordering::Relaxed);
            return;
        };
        shard.turn(secs / GENERATION.as_secs());
        shard.now.count(hash, || {
            let shown = self.shows_keys().then(|| {
                let text = String::from_utf8_lossy(key);
                text[..text.floor_char_boundary(MAX_SHOWN_BYTES)].into()
            });
            (rule.into(), shown)
        });
    }

    /// Whether keys are shown as they are.
    pub(crate) fn shows_keys(&self) -> bool {
        self.show_keys.load(Ordering::Relaxed)
    }

    /// Keeps new keys as they are, or only their hashes. Keys that are listed already stay as they
    /// are.
    pub(crate) fn set_show_keys(&self, show_keys: bool) {
        self.show_keys.store(show_keys, Ordering::Relaxed);
    }

    /// The most limited keys, in descending order.
    pub fn list(&self, most: usize) -> Vec<LimitedKey> {
        let mut found = Vec::new();
        for shard in &self.shards {
            let mut shard = shard.lock();
            shard.turn(self.secs() / GENERATION.as_secs());
            found.extend(shard.limited());
        }
        found.sort_by(|a, b| b.denied.cmp(&a.denied).then_with(|| a.key.cmp(&b.key)));
        found.truncate(most);
        found
    }

    /// How long ago the oldest denial that is counted may have been.
    pub fn covers(&self) -> Duration {
        let since = self.started.elapsed();
        let in_this = Duration::from_secs(since.as_secs() % GENERATION.as_secs());
        since.min(GENERATION + in_this)
    }

    /// Denials that were not counted because of a concurrent one in the same shard.
    pub fn left_out(&self) -> u64 {
        self.left_out.load(Ordering::Relaxed)
    }

    /// The hash that stands for a key that is not shown.
    pub(crate) fn hashed(&self, rule: &str, key: &[u8]) -> String {
        format!("#{:016x}", self.hash(rule, key))
    }

    fn hash(&self, rule: &str, key: &[u8]) -> u64 {
        self.hashing.hash_one((rule, key))
    }

    /// Seconds since the start.
    pub(crate) fn secs(&self) -> u64 {
        self.started.elapsed().as_secs()
    }
}

/// The upper half, as the map uses the lower.
fn shard_of(hash: u64) -> usize {
    (hash >> 60) as usize % SHARDS
}

impl TopShard {
    fn turn(&mut self, generation: u64) {
        if generation > self.generation {
            self.before = if generation == self.generation + 1 {
                std::mem::take(&mut self.now)
            } else {
                Summary::default()
            };
            self.now = Summary::default();
            self.generation = generation;
        }
    }

    /// Both generations added. A key that one of them does not list may have had its smallest
    /// count.
    fn limited(&self) -> Vec<LimitedKey> {
        let shown = |place: &TopEntry| match &place.shown {
            Some(text) => text.to_string(),
            None => format!("#{:016x}", place.hash),
        };
        let mut found = Vec::new();
        for (own, other) in [(&self.now, &self.before), (&self.before, &self.now)] {
            for (place, denied) in own.places.iter().zip(&own.denied) {
                let twin = other.at.get(&place.hash).copied();
                if twin.is_some() && std::ptr::eq(own, &self.before) {
                    continue;
                }
                let (more, error) = match twin {
                    Some(at) => (other.denied[at], other.places[at].error),
                    None => (other.forgotten(), other.forgotten()),
                };
                found.push(LimitedKey {
                    rule: place.rule.to_string(),
                    key: shown(place),
                    denied: denied + more,
                    error: place.error + error,
                });
            }
        }
        found
    }
}

impl Summary {
    fn count(&mut self, hash: u64, describe: impl FnOnce() -> (Box<str>, Option<Box<str>>)) {
        if let Some(at) = self.at.get(&hash) {
            self.denied[*at] += 1;
            return;
        }
        let (rule, shown) = describe();
        if self.places.len() < PLACES {
            self.at.insert(hash, self.places.len());
            self.places.push(TopEntry { hash, rule, shown, error: 0 });
            self.denied.push(1);
            return;
        }
        // Few enough that looking at all of them is as quick as keeping them in order.
        let error = self.forgotten();
        let Some(at) = self.denied.iter().position(|denied| *denied == error) else { return };
        self.at.remove(&self.places[at].hash);
        self.at.insert(hash, at);
        self.places[at] = TopEntry { hash, rule, shown, error };
        self.denied[at] = error + 1;
    }

    /// How often a key that is not listed may have been denied.
    fn forgotten(&self) -> u64 {
        if self.denied.len() < PLACES { 0 } else { self.denied.iter().copied().min().unwrap_or(0) }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Counts are never too small, and too large by at most their error; a key that is denied
        /// often enough is listed.
        #[test]
        fn counts_are_within_their_errors(keys in prop::collection::vec((0u32..2000).prop_map(|n| n * n / 2000), 1..6000)) {
            let top = Top::new(true);
            let mut exact: BTreeMap<String, u64> = BTreeMap::new();
            for key in &keys {
                top.denied("r", key.to_string().as_bytes(), 0);
                *exact.entry(key.to_string()).or_default() += 1;
            }
            let list = top.list(usize::MAX);
            for one in &list {
                let truth = exact[&one.key];
                prop_assert!(one.denied >= truth && one.denied - one.error <= truth, "{one:?} but {truth}");
            }
            // All of them could have fallen into one shard.
            let certain = keys.len() as u64 / PLACES as u64;
            for (key, count) in exact.iter().filter(|(_, count)| **count > certain) {
                prop_assert!(list.iter().any(|one| one.key == **key), "{key} was denied {count} times and is not there");
            }
            prop_assert!(list.len() <= SHARDS * PLACES);
        }
    }

    #[test]
    fn generations_are_added_and_end() {
        let mut shard = TopShard::default();
        let count = |shard: &mut TopShard, hash| {
            shard.now.count(hash, || ("r".into(), Some(format!("{hash}").into())))
        };
        count(&mut shard, 1);
        shard.turn(1);
        count(&mut shard, 1);
        count(&mut shard, 2);
        let mut found: Vec<(String, u64, u64)> =
            shard.limited().into_iter().map(|one| (one.key, one.denied, one.error)).collect();
        found.sort();
        assert_eq!(found, [("1".into(), 2, 0), ("2".into(), 1, 0)]);
        shard.turn(2);
        assert_eq!(shard.limited().len(), 2);
        shard.turn(4);
        assert_eq!(shard.limited().len(), 0);
    }

    #[test]
    fn keys_are_not_shown_unless_asked() {
        let top = Top::new(false);
        top.denied("r", b"alice", 0);
        let shown = &top.list(10)[0].key;
        assert!(shown.starts_with('#') && shown.len() == 17, "{shown}");
        assert_eq!(*shown, top.hashed("r", b"alice"));
        assert_ne!(top.hashed("r", b"alice"), top.hashed("s", b"alice"));
    }
}
