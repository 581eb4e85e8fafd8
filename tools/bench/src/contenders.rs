//! What is measured: each decides one string key at the current time, and is called through the
//! same trait.

use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use governor::clock::FakeRelativeClock;
use governor::middleware::NoOpMiddleware;
use governor::nanos::Nanos;
use governor::state::keyed::DashMapStateStore;
use governor::{DefaultKeyedRateLimiter, Quota, RateLimiter};
use tidegate::batch::Prepared;
use tidegate::{Clock, Limit, ManualClock, Memory, Scope, SystemClock};

/// Decides whether `key` may pass now.
#[allow(clippy::ptr_arg, reason = "governor looks a `String` up by `&String`")]
pub trait Contender: Sync {
    fn name(&self) -> &'static str;
    fn check(&self, key: &String) -> bool;
    /// Decides a few keys in one call, if that is better than one by one. `allowed` is a list
    /// that the caller keeps.
    fn check_many(&self, keys: &[(String, u64)], _allowed: &mut Vec<bool>) -> usize {
        keys.iter().filter(|(key, _)| self.check(key)).count()
    }
}

pub struct Tidegate {
    prepared: Prepared,
}

/// One unit comes back in this time.
const HOUR: Duration = Duration::from_secs(3600);

/// A burst that is never used up.
pub const ENDLESS: u32 = 400_000;
/// A burst that is used up soon.
pub const SHORT: u32 = 600;

impl Tidegate {
    pub fn new(keys: usize) -> Self {
        Self::with_burst(keys, SHORT)
    }

    pub fn with_burst(keys: usize, burst: u32) -> Self {
        Self::on(keys, burst, SystemClock::new().into())
    }

    /// The same on a clock that stands still, to count instructions without it.
    pub fn without_clock(keys: usize) -> Self {
        Self::on(keys, SHORT, ManualClock::new().into())
    }

    fn on(keys: usize, burst: u32, clock: Clock) -> Self {
        // One an hour: a key that was hit once stays live for the whole run.
        let limit: Limit = format!("24/d burst {burst}").parse().expect("a limit");
        Tidegate {
            prepared: Memory::builder()
                .max_keys((keys * 2).max(1 << 20))
                .clock(clock)
                .build()
                .prepare(&Scope::AdHoc, &limit),
        }
    }

    pub fn memory(&self) -> &Memory {
        self.prepared.memory()
    }

    #[inline(always)]
    pub fn ask(&self, key: &str) -> bool {
        self.prepared.allows(key, 1)
    }
}

impl Contender for Tidegate {
    fn name(&self) -> &'static str {
        "tidegate"
    }
    #[inline(never)]
    fn check(&self, key: &String) -> bool {
        self.ask(key)
    }
    fn check_many(&self, keys: &[(String, u64)], allowed: &mut Vec<bool>) -> usize {
        allowed.clear();
        self.prepared.check_each(keys, |_, is_allowed: bool| allowed.push(is_allowed));
        allowed.iter().filter(|allowed| **allowed).count()
    }
}

pub struct Governor(DefaultKeyedRateLimiter<String>);

impl Governor {
    pub fn new() -> Self {
        Self::with_burst(SHORT)
    }

    pub fn with_burst(burst: u32) -> Self {
        let quota = Quota::with_period(HOUR).expect("not zero");
        Governor(RateLimiter::keyed(quota.allow_burst(NonZeroU32::new(burst).expect("not zero"))))
    }
}

impl Contender for Governor {
    fn name(&self) -> &'static str {
        "governor"
    }
    #[inline(never)]
    fn check(&self, key: &String) -> bool {
        self.0.check_key(key).is_ok()
    }
}

/// Governor on a clock that stands still.
type Still =
    RateLimiter<String, DashMapStateStore<String>, FakeRelativeClock, NoOpMiddleware<Nanos>>;

pub struct GovernorWithoutClock(Still);

impl GovernorWithoutClock {
    pub fn new() -> Self {
        let quota = Quota::with_period(HOUR).expect("not zero");
        GovernorWithoutClock(RateLimiter::new(
            quota.allow_burst(NonZeroU32::new(SHORT).expect("not zero")),
            DashMapStateStore::default(),
            FakeRelativeClock::default(),
        ))
    }

    #[inline(always)]
    pub fn ask(&self, key: &String) -> bool {
        self.0.check_key(key).is_ok()
    }
}

impl Contender for GovernorWithoutClock {
    fn name(&self) -> &'static str {
        "governor"
    }
    #[inline(never)]
    fn check(&self, key: &String) -> bool {
        self.ask(key)
    }
}

/// Between two that pass, in counts of the clock, more or less.
const INTERVAL: u64 = 3_600_000_000_000;

/// The bound for one call at a time: a flat table of sixteen bytes a key, a hash that no client
/// attacks, one compare-and-swap. It keeps 64 bits of hash and one rounded timestamp, never grows
/// and never forgets: no product could ship it.
pub struct Flat16 {
    slots: Vec<(AtomicU64, AtomicU64)>,
    burst: u64,
    clock: Option<quanta::Clock>,
}

impl Flat16 {
    pub fn new(keys: usize) -> Self {
        Self::with_burst(keys, SHORT)
    }

    pub fn with_burst(keys: usize, burst: u32) -> Self {
        let slots = (keys * 2).next_power_of_two();
        Flat16 {
            slots: on_huge_pages(slots),
            burst: u64::from(burst) * INTERVAL,
            clock: Some(quanta::Clock::new()),
        }
    }

    pub fn without_clock(keys: usize) -> Self {
        Flat16 { clock: None, ..Self::new(keys) }
    }
}

impl Contender for Flat16 {
    fn name(&self) -> &'static str {
        "flat16"
    }
    #[inline(never)]
    fn check(&self, key: &String) -> bool {
        self.ask(key)
    }
    /// The bound for batches: the clock is read once, and the slots of all keys are on their way
    /// before the first is decided.
    fn check_many(&self, keys: &[(String, u64)], _allowed: &mut Vec<bool>) -> usize {
        let now = self.now();
        let mut hashes = [0; 16];
        for (hash, (key, _)) in hashes.iter_mut().zip(keys) {
            *hash = self.hash(key);
            #[cfg(target_arch = "x86_64")]
            // SAFETY: a prefetch reads nothing the program can see and does not fault.
            unsafe {
                use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
                _mm_prefetch::<_MM_HINT_T0>((&raw const self.slots[self.home(*hash)]).cast());
            }
        }
        hashes.iter().take(keys.len()).filter(|hash| self.decide(**hash, now)).count()
    }
}

impl Flat16 {
    #[inline(always)]
    pub fn ask(&self, key: &str) -> bool {
        self.decide(self.hash(key), self.now())
    }

    fn now(&self) -> u64 {
        self.clock.as_ref().map_or(0, quanta::Clock::raw)
    }

    /// Of keys of 8 to 16 bytes, as they are here.
    #[inline(always)]
    fn hash(&self, key: &str) -> u64 {
        const ODD: u128 = 0x9e37_79b9_7f4a_7c15;
        let bytes = key.as_bytes();
        let word = |at: usize| {
            bytes
                .get(at..at + 8)
                .map_or(0, |word| u64::from_le_bytes(word.try_into().expect("eight")))
        };
        let product = u128::from(word(0)) * ODD;
        let mixed = product as u64 ^ (product >> 64) as u64 ^ word(bytes.len().saturating_sub(8));
        let product = u128::from(mixed) * ODD;
        let hash = product as u64 ^ (product >> 64) as u64;
        hash | 1
    }

    fn home(&self, hash: u64) -> usize {
        (hash >> 7) as usize & (self.slots.len() - 1)
    }

    #[inline(always)]
    fn decide(&self, hash: u64, now: u64) -> bool {
        let mut index = self.home(hash);
        loop {
            let (tag, tat) = &self.slots[index];
            let seen = tag.load(Ordering::Acquire);
            if seen == 0 {
                let _ = tag.compare_exchange(0, hash, Ordering::AcqRel, Ordering::Acquire);
                continue;
            }
            if seen != hash {
                index = (index + 1) & (self.slots.len() - 1);
                continue;
            }
            let old = tat.load(Ordering::Acquire);
            let new = old.max(now) + INTERVAL;
            if new > now + self.burst {
                return false;
            }
            if tat.compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire).is_ok() {
                return true;
            }
        }
    }
}

/// Zeroes where a random one is found as fast as the system can: on huge pages, as our own tables
/// are.
fn on_huge_pages(count: usize) -> Vec<(AtomicU64, AtomicU64)> {
    const HUGE: usize = 1 << 21;
    let mut slots: Vec<(AtomicU64, AtomicU64)> = Vec::with_capacity(count);
    let (start, bytes) = (slots.as_ptr().addr(), count * size_of::<(AtomicU64, AtomicU64)>());
    let (from, to) = (start.next_multiple_of(HUGE), (start + bytes) / HUGE * HUGE);
    if to > from {
        // SAFETY: whole pages of memory that is ours, and nothing is written.
        let done =
            unsafe { libc::madvise(from as *mut libc::c_void, to - from, libc::MADV_HUGEPAGE) };
        assert_eq!(done, 0, "huge pages: {}", std::io::Error::last_os_error());
    }
    slots.resize_with(count, Default::default);
    slots
}

/// Decides nothing: what the loop around the others costs.
pub struct Nothing;

impl Contender for Nothing {
    fn name(&self) -> &'static str {
        "nothing"
    }
    #[inline(never)]
    fn check(&self, key: &String) -> bool {
        !key.is_empty()
    }
}
