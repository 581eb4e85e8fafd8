//! Clocks: where the time comes from that the core is told.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

mod system;

pub use system::SystemClock;
use tidegate_core::Timestamp;
use tokio::sync::Notify;

/// Says what time it is, and waits until it is later.
#[derive(Clone, Debug)]
pub enum Clock {
    /// The machine's.
    System(SystemClock),
    /// A test's.
    Manual(ManualClock),
}

impl Clock {
    /// What time it is.
    #[inline]
    pub fn now(&self) -> Timestamp {
        match self {
            Clock::System(clock) => clock.now(),
            Clock::Manual(clock) => clock.now(),
        }
    }

    /// Waits until `then`.
    pub(crate) async fn sleep_until(&self, then: Timestamp) {
        match self {
            Clock::System(clock) => loop {
                let left = then.micros_since(clock.now());
                if left == 0 {
                    return;
                }
                tokio::time::sleep(Duration::from_micros(left)).await;
            },
            Clock::Manual(clock) => clock.sleep_until(then).await,
        }
    }
}

impl Default for Clock {
    fn default() -> Self {
        Clock::System(SystemClock::new())
    }
}

impl From<SystemClock> for Clock {
    fn from(clock: SystemClock) -> Self {
        Clock::System(clock)
    }
}

impl From<ManualClock> for Clock {
    fn from(clock: ManualClock) -> Self {
        Clock::Manual(clock)
    }
}

/// A clock that stands still until it is told otherwise: for tests. Clones are the same clock.
///
/// ```
/// use std::time::Duration;
/// use tidegate::{Limit, ManualClock, Memory};
/// let clock = ManualClock::new();
/// let memory = Memory::builder().clock(clock.clone()).build();
/// let limit: Limit = "1/s".parse()?;
/// assert!(memory.check("k", &limit, 1).allowed);
/// assert!(!memory.check("k", &limit, 1).allowed);
/// clock.advance(Duration::from_secs(1));
/// assert!(memory.check("k", &limit, 1).allowed);
/// # Ok::<(), tidegate::ParseError>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct ManualClock {
    inner: Arc<Manual>,
}

#[derive(Debug, Default)]
struct Manual {
    now_us: AtomicU64,
    moved: Notify,
    /// The clock of the runtime counts, too, from here on.
    since: Option<tokio::time::Instant>,
}

impl ManualClock {
    /// A clock at the Unix epoch.
    pub fn new() -> Self {
        Self::default()
    }

    /// A clock at the Unix epoch that moves with tokio's, which tests can pause. What it is
    /// [advanced](ManualClock::advance) by is added to that, as when a machine has slept.
    pub fn with_runtime() -> Self {
        let since = Some(tokio::time::Instant::now());
        ManualClock { inner: Arc::new(Manual { since, ..Manual::default() }) }
    }

    /// What time it is.
    #[inline]
    pub fn now(&self) -> Timestamp {
        let own = Timestamp::from_kept_micros(self.inner.now_us.load(Ordering::Acquire));
        match self.inner.since {
            None => own,
            Some(since) => own.after(since.elapsed()),
        }
    }

    /// Sets the time, also to an earlier one.
    pub fn set(&self, now: Timestamp) {
        self.inner.now_us.store(now.as_micros(), Ordering::Release);
        self.inner.moved.notify_waiters();
    }

    /// Moves the time forward.
    pub fn advance(&self, by: Duration) {
        // In one step: two that move it at once move it by the sum.
        let later = |now_us| Some(Timestamp::from_micros(now_us).after(by).as_micros());
        let _ = self.inner.now_us.fetch_update(Ordering::AcqRel, Ordering::Acquire, later);
        self.inner.moved.notify_waiters();
    }

    async fn sleep_until(&self, then: Timestamp) {
        loop {
            let moved = self.inner.moved.notified();
            let now = self.now();
            if now >= then {
                return;
            }
            match self.inner.since {
                None => moved.await,
                // Whichever comes first: the runtime's clock or somebody who moves this one.
                Some(_) => {
                    _ = tokio::time::timeout(Duration::from_micros(then.micros_since(now)), moved)
                        .await
                }
            }
        }
    }
}
