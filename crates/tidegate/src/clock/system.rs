//! The machine's clock: wall time that never goes backwards, read in a few nanoseconds.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use tidegate_core::Timestamp;

use crate::raw;
use crate::sync::{AtomicU64, Ordering, version};

/// How long the processor's counter is trusted after the operating system was last asked.
const TRUST_US: u64 = 5_000;
/// The shortest and longest time over which the speed of the counter is measured.
const SHORTEST_US: u64 = 2_000;
const LONGEST_US: u64 = 1_000_000;

/// Wall time that never goes backwards. Clones are the same clock.
///
/// It is the wall clock as it was when this clock was made, plus what has passed since on a clock
/// that only goes forward and runs while the machine sleeps (`CLOCK_BOOTTIME`, where there is one).
/// It does not follow later corrections of the wall clock: a step of the wall clock must neither
/// refill a bucket nor lock anybody out.
///
/// Asking the operating system costs more than a decision, so it is asked every 5 ms at most; in
/// between the processor's cycle counter fills in, at the speed it was last measured to run at.
#[derive(Clone, Debug)]
pub struct SystemClock {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    counter: Counter,
    /// Add this to the forward clock to have the wall clock, in microseconds.
    offset_us: u64,
    /// Odd while the three numbers below are being changed.
    version: AtomicU64,
    /// The counter when the operating system was last asked,
    asked_at: AtomicU64,
    /// what it answered,
    answer_us: AtomicU64,
    /// and for how many counts the counter may be believed from there on.
    trusted: AtomicU64,
    /// Microseconds per count, in units of 2^-32.
    speed: AtomicU64,
    /// The counter and the operating system's answer itself, when it was last asked.
    asked: Mutex<(u64, u64)>,
}

/// The processor's cycle counter; where there is none that is steady, whatever `quanta` finds
/// instead.
#[derive(Debug)]
struct Counter {
    is_steady: bool,
    otherwise: quanta::Clock,
}

impl Counter {
    fn new() -> Self {
        Counter { is_steady: raw::cycles_are_steady(), otherwise: quanta::Clock::new() }
    }

    #[inline(always)]
    fn read(&self) -> u64 {
        if self.is_steady { raw::cycles() } else { self.otherwise.raw() }
    }
}

impl SystemClock {
    /// A clock that agrees with the wall clock now.
    pub fn new() -> Self {
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let wall_us = u64::try_from(wall.as_micros()).unwrap_or(u64::MAX);
        let counter = Counter::new();
        let (count, forward) = both(&counter);
        let offset_us = wall_us.saturating_sub(forward);
        let inner = Inner {
            asked_at: AtomicU64::new(count),
            answer_us: AtomicU64::new(offset_us + forward),
            asked: Mutex::new((count, forward)),
            counter,
            offset_us,
            version: AtomicU64::new(0),
            trusted: AtomicU64::new(0),
            speed: AtomicU64::new(0),
        };
        SystemClock { inner: Arc::new(inner) }
    }

    /// What time it is.
    #[inline]
    pub fn now(&self) -> Timestamp {
        let inner = &*self.inner;
        let count = inner.counter.read();
        let seen = version::begin(&inner.version);
        let counted = count.wrapping_sub(inner.asked_at.load(Ordering::Relaxed));
        let answer_us = inner.answer_us.load(Ordering::Relaxed);
        let trusted = inner.trusted.load(Ordering::Relaxed);
        let speed = inner.speed.load(Ordering::Relaxed);
        if counted < trusted && version::is_still(&inner.version, seen) {
            return Timestamp::from_micros(answer_us + (counted.wrapping_mul(speed) >> 32));
        }
        inner.ask()
    }
}

impl Default for SystemClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Inner {
    /// Asks the operating system, and measures how fast the counter ran since it was last asked.
    #[cold]
    fn ask(&self) -> Timestamp {
        let mut asked = self.asked.lock();
        let (count, forward) = both(&self.counter);
        let (trusted, speed) =
            (self.trusted.load(Ordering::Relaxed), self.speed.load(Ordering::Relaxed));
        let (counted, passed_us) = (count.wrapping_sub(asked.0), forward.saturating_sub(asked.1));
        // What the counter has made others say, at most: never say less.
        let said_us = self.answer_us.load(Ordering::Relaxed)
            + (counted.min(trusted).wrapping_mul(speed) >> 32);
        if counted < trusted {
            return Timestamp::from_micros(said_us); // somebody else has just asked
        }
        let now_us = (self.offset_us + forward).max(said_us);
        if passed_us < SHORTEST_US {
            return Timestamp::from_micros(now_us); // too soon to measure anything
        }
        let measured = match passed_us {
            SHORTEST_US..=LONGEST_US if counted > passed_us && counted < 1 << 40 => {
                (passed_us << 32) / counted
            }
            _ => 0,
        };
        // A machine that slept, or a counter that was reset, shows as another speed: then begin
        // anew.
        let steady = speed == 0 || measured.abs_diff(speed) < speed / 64;
        let (trusted, speed) = match measured {
            0 => (0, 0),
            measured if steady => ((TRUST_US << 32) / measured.max(1), measured),
            _ => (0, 0),
        };
        *asked = (count, forward);
        let written = version::take_now(&self.version);
        debug_assert!(written, "only who holds the lock writes");
        self.asked_at.store(count, Ordering::Relaxed);
        self.answer_us.store(now_us, Ordering::Relaxed);
        self.trusted.store(trusted, Ordering::Relaxed);
        self.speed.store(speed, Ordering::Relaxed);
        version::give_back(&self.version);
        Timestamp::from_micros(now_us)
    }
}

/// The counter and the forward clock at the same moment, or as near to it as a few tries can get.
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

    /// Long enough for the counter to be measured, trusted and asked again many times.
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
                        // A counter measured over 5 ms or more may be off by a little, never by a
                        // decision's worth.
                        assert!(now.as_micros() + 200 >= before && now.as_micros() <= after + 200);
                        last = now;
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    }
}
