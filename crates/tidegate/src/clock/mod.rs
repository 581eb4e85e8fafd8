//! Clocks: the source of the time for decisions.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

mod system;

pub use system::SystemClock;
use tidegate_core::Timestamp;
use tokio::sync::Notify;

/// A clock: the system's, or a manual one for tests.
///
/// ```
/// use tidegate::{Clock, ManualClock, Memory, SystemClock};
/// let clocks: [Clock; 2] = [SystemClock::new().into(), ManualClock::new().into()];
/// let stores = clocks.map(|clock| Memory::builder().clock(clock).build());
/// ```
#[derive(Clone, Debug)]
pub enum Clock {
    /// The system's clock.
    System(SystemClock),
    /// A manual clock.
    Manual(ManualClock),
}

impl Clock {
    /// The time now.
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

/// A clock for tests, which moves only when it is set or advanced. Clones are the same clock.
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
    /// The start on the runtime's clock, if that one is added.
    since: Option<tokio::time::Instant>,
}

impl ManualClock {
    /// Creates a clock at the Unix epoch.
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates a clock at the Unix epoch that moves with tokio's clock, which tests can pause.
    /// [`advance`](ManualClock::advance) adds to it, as if the machine had slept.
    pub fn with_runtime() -> Self {
        let since = Some(tokio::time::Instant::now());
        ManualClock { inner: Arc::new(Manual { since, ..Manual::default() }) }
    }

    /// The time now.
    #[inline]
    pub fn now(&self) -> Timestamp {
        let own = Timestamp::from_kept_micros(self.inner.now_us.load(Ordering::Acquire));
        match self.inner.since {
            None => own,
            Some(since) => own.after(since.elapsed()),
        }
    }

    /// Sets the time, which may be earlier.
    pub fn set(&self, now: Timestamp) {
        self.inner.now_us.store(now.as_micros(), Ordering::Release);
        self.inner.moved.notify_waiters();
    }

    /// Moves the time forward.
    pub fn advance(&self, by: Duration) {
        // One atomic step, so that two concurrent calls add up.
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
                // The runtime's clock moves it, or another call does.
                Some(_) => {
                    _ = tokio::time::timeout(Duration::from_micros(then.micros_since(now)), moved)
                        .await
                }
            }
        }
    }
}
