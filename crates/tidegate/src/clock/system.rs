//! The system's clock: wall time that never goes backwards, read in a few nanoseconds.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use tidegate_core::Timestamp;

use crate::raw;
use crate::sync::{AtomicU64, Ordering, version};

/// The time for which the processor's counter is trusted after a call to the operating system.
const TRUST_US: u64 = 5_000;
/// The shortest and longest time over which the speed of the counter is measured.
const SHORTEST_US: u64 = 2_000;
const LONGEST_US: u64 = 1_000_000;

/// Wall time that never goes backwards. Clones are the same clock.
///
/// It is the wall time when the clock was created, plus the time since then on a monotonic clock
/// that runs while the machine sleeps (`CLOCK_BOOTTIME`, where available). It does not follow later
/// corrections of the wall clock: a step of the wall clock must neither refill a bucket nor extend
/// a denial.
///
/// A call to the operating system costs more than a decision, so there is at most one every 5 ms.
/// In between, the time comes from the processor's cycle counter at its last measured speed.
///
/// ```
/// use tidegate::SystemClock;
/// let clock = SystemClock::new();
/// assert!(clock.now() <= clock.now());
/// ```
#[derive(Clone, Debug)]
pub struct SystemClock {
    inner: Arc<SystemClockInner>,
}

#[derive(Debug)]
struct SystemClockInner {
    counter: Counter,
    /// The difference between wall time and the monotonic clock, in microseconds.
    offset_us: u64,
    /// The version of the four numbers below; odd while they change.
    version: AtomicU64,
    /// The counter at the last call to the operating system.
    read_at: AtomicU64,
    /// The time that call returned.
    time_us: AtomicU64,
    /// The number of counts for which the counter is trusted from then on.
    trusted: AtomicU64,
    /// Microseconds per count, in units of 2^-32.
    speed: AtomicU64,
    /// The counter and the monotonic clock at the last call to the operating system.
    last: Mutex<(u64, u64)>,
}

/// The processor's cycle counter, or the one that `quanta` finds if that is not steady.
#[derive(Debug)]
struct Counter {
    is_steady: bool,
    fallback: quanta::Clock,
}

impl Counter {
    fn new() -> Self {
        Counter { is_steady: raw::cycles_are_steady(), fallback: quanta::Clock::new() }
    }

    #[inline(always)]
    fn read(&self) -> u64 {
        if self.is_steady { raw::cycles() } else { self.fallback.raw() }
    }
}

impl SystemClock {
    /// Creates a clock that agrees with the wall clock now.
    pub fn new() -> Self {
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let wall_us = u64::try_from(wall.as_micros()).unwrap_or(u64::MAX);
        let counter = Counter::new();
        let (count, forward) = both(&counter);
        let offset_us = wall_us.saturating_sub(forward);
        let inner = SystemClockInner {
            read_at: AtomicU64::new(count),
            time_us: AtomicU64::new(offset_us + forward),
            last: Mutex::new((count, forward)),
            counter,
            offset_us,
            version: AtomicU64::new(0),
            trusted: AtomicU64::new(0),
            speed: AtomicU64::new(0),
        };
        SystemClock { inner: Arc::new(inner) }
    }

    /// The time now.
    #[inline]
    pub fn now(&self) -> Timestamp {
        let inner = &*self.inner;
        let count = inner.counter.read();
        let seen = version::begin(&inner.version);
        let counted = count.wrapping_sub(inner.read_at.load(Ordering::Relaxed));
        let time_us = inner.time_us.load(Ordering::Relaxed);
        let trusted = inner.trusted.load(Ordering::Relaxed);
        let speed = inner.speed.load(Ordering::Relaxed);
        if counted < trusted && version::is_still(&inner.version, seen) {
            return Timestamp::from_micros(time_us + (counted.wrapping_mul(speed) >> 32));
        }
        inner.read_system()
    }
}

impl Default for SystemClock {
    fn default() -> Self {
        Self::new()
    }
}

impl SystemClockInner {
    /// Calls the operating system, and measures the speed of the counter since the last call.
    #[cold]
    fn read_system(&self) -> Timestamp {
        let mut last = self.last.lock();
        let (count, forward) = both(&self.counter);
        let (trusted, speed) =
            (self.trusted.load(Ordering::Relaxed), self.speed.load(Ordering::Relaxed));
        let (counted, passed_us) = (count.wrapping_sub(last.0), forward.saturating_sub(last.1));
        // The latest time that other threads may have read: never return an earlier one.
        let latest_us =
            self.time_us.load(Ordering::Relaxed) + (counted.min(trusted).wrapping_mul(speed) >> 32);
        if counted < trusted {
            return Timestamp::from_micros(latest_us); // another thread has just called
        }
        let now_us = (self.offset_us + forward).max(latest_us);
        if passed_us < SHORTEST_US {
            return Timestamp::from_micros(now_us); // too soon to measure the speed
        }
        let measured = match passed_us {
            SHORTEST_US..=LONGEST_US if counted > passed_us && counted < 1 << 40 => {
                (passed_us << 32) / counted
            }
            _ => 0,
        };
        // After a sleep of the machine or a reset of the counter the speed differs: measure again.
        let steady = speed == 0 || measured.abs_diff(speed) < speed / 64;
        let (trusted, speed) = match measured {
            0 => (0, 0),
            measured if steady => ((TRUST_US << 32) / measured.max(1), measured),
            _ => (0, 0),
        };
        *last = (count, forward);
        let written = version::take_now(&self.version);
        debug_assert!(written, "the lock is held");
        self.read_at.store(count, Ordering::Relaxed);
        self.time_us.store(now_us, Ordering::Relaxed);
        self.trusted.store(trusted, Ordering::Relaxed);
        self.speed.store(speed, Ordering::Relaxed);
        version::give_back(&self.version);
        Timestamp::from_micros(now_us)
    }
}

/// The counter and the monotonic clock at nearly the same moment: the best of a few attempts.
fn both(counter: &Counter) -> (u64, u64) {
    let attempts = (0..5).map(|_| {
        let (before, forward, after) = (counter.read(), forward_us(), counter.read());
        (after.wrapping_sub(before), before, forward)
    });
    attempts.min().map_or((0, 0), |(_, count, forward)| (count, forward))
}

/// Microseconds since boot, asleep or awake.
#[cfg(target_os = "linux")]
#[inline]
fn forward_us() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    time.tv_sec.unsigned_abs() * 1_000_000 + time.tv_nsec.unsigned_abs() / 1_000
}

/// Microseconds since the first call.
#[cfg(not(target_os = "linux"))]
fn forward_us() -> u64 {
    static START: std::sync::OnceLock<std::time::Instant> = std::sync::OnceLock::new();
    let start = START.get_or_init(std::time::Instant::now);
    u64::try_from(start.elapsed().as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Enough for the counter to be measured, trusted and measured again many times.
    const READINGS: usize = 2_000_000;

    #[test]
    fn never_goes_back_and_stays_with_the_operating_system() {
        let clock = SystemClock::new();
        let threads: Vec<_> = (0..2)
            .map(|_| {
                let clock = clock.clone();
                std::thread::spawn(move || {
                    let mut last = clock.now();
                    for _ in 0..READINGS {
                        let before = clock.inner.offset_us + forward_us();
                        let now = clock.now();
                        let after = clock.inner.offset_us + forward_us();
                        assert!(now >= last, "{now:?} after {last:?}");
                        // A counter measured over 5 ms may be off by less than a decision matters.
                        assert!(now.as_micros() + 200 >= before && now.as_micros() <= after + 200);
                        last = now;
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    }
}
