//! Time that somebody else measured: whole microseconds since the Unix epoch.
//!
//! The core never asks what time it is. It is told, and it only compares, adds and floors.

use core::fmt;
use core::time::Duration;

/// One more than the largest number the exact domain knows: 2^53.
///
/// Lua's numbers are doubles, and integers below 2^53 are exact in a double. Everything Tidegate
/// computes stays below it, so that Rust and a Redis script agree to the bit.
pub const EXACT: u64 = 1 << 53;

/// The longest wait that is ever reported, in microseconds (about 142 years).
pub const MAX_WAIT_US: u64 = (1 << 52) - 1;

/// How far a store's own clock may be behind a state before the state is rebased, in microseconds:
/// one second.
pub const CLOCK_TOLERANCE_US: u64 = 1_000_000;

/// A moment: whole microseconds since the Unix epoch.
///
/// Moments after the year 2112 are taken as the last one that is exact ([`Timestamp::MAX`]).
/// ```
/// use tidegate_core::Timestamp;
/// assert_eq!(Timestamp::from_secs(1).as_micros(), 1_000_000);
/// assert!(Timestamp::EPOCH < Timestamp::from_micros(1));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Timestamp(u64);

impl Timestamp {
    /// Midnight, 1 January 1970 UTC.
    pub const EPOCH: Timestamp = Timestamp(0);
    /// The last moment that can be judged: late in 2112.
    pub const MAX: Timestamp = Timestamp((1 << 52) - 1);

    /// The moment so many microseconds after the epoch, at most [`Timestamp::MAX`].
    pub const fn from_micros(micros: u64) -> Self {
        if micros > Self::MAX.0 { Self::MAX } else { Timestamp(micros) }
    }

    /// The moment of which [`as_micros`](Timestamp::as_micros) said this: what a store has kept is
    /// not judged again.
    #[inline(always)]
    pub const fn from_kept_micros(micros: u64) -> Self {
        debug_assert!(micros < EXACT, "it was a moment when it was kept");
        Timestamp(micros)
    }

    /// The moment so many milliseconds after the epoch, at most [`Timestamp::MAX`].
    pub const fn from_millis(millis: u64) -> Self {
        Self::from_micros(millis.saturating_mul(1_000))
    }

    /// The moment so many seconds after the epoch, at most [`Timestamp::MAX`].
    pub const fn from_secs(secs: u64) -> Self {
        Self::from_micros(secs.saturating_mul(1_000_000))
    }

    /// Microseconds since the epoch.
    pub const fn as_micros(self) -> u64 {
        self.0
    }

    /// The moment `micros` microseconds later, at most [`Timestamp::MAX`].
    #[must_use]
    pub const fn after_micros(self, micros: u64) -> Self {
        Self::from_micros(self.0.saturating_add(micros))
    }

    /// The moment `duration` later, at most [`Timestamp::MAX`]; what is left of a microsecond is
    /// dropped.
    #[must_use]
    pub fn after(self, duration: Duration) -> Self {
        self.after_micros(u64::try_from(duration.as_micros()).unwrap_or(u64::MAX))
    }

    /// The moment `micros` later, which may lie beyond [`Timestamp::MAX`]: for moments that are
    /// only compared.
    pub(crate) const fn plus(self, micros: u64) -> Self {
        Timestamp(self.0.saturating_add(micros))
    }

    /// The moment `micros` earlier, at the earliest [`Timestamp::EPOCH`].
    pub(crate) const fn minus(self, micros: u64) -> Self {
        Timestamp(self.0.saturating_sub(micros))
    }

    /// The last multiple of `micros` that is not after this moment.
    #[must_use]
    pub(crate) const fn floor_to(self, micros: u64) -> Self {
        Timestamp(self.0 - self.0 % micros)
    }

    /// Microseconds from `earlier` to this moment; zero if it is not earlier.
    pub const fn micros_since(self, earlier: Timestamp) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

impl fmt::Debug for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}us", self.0)
    }
}

/// How long an amount lasts, or a step, or a lease: whole microseconds.
///
/// Any number can be written down here; zero and lengths outside the exact domain are refused
/// when a [`Limit`](crate::Limit) is built from it, by an error that names the parameter.
/// ```
/// use tidegate_core::Period;
/// assert_eq!(Period::seconds(60), Period::MINUTE);
/// assert_eq!(Period::millis(1500).to_string(), "1500ms");
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Period(u64);

impl Period {
    /// One microsecond.
    pub const MICROSECOND: Period = Period(1);
    /// One millisecond.
    pub const MILLISECOND: Period = Period(1_000);
    /// One second.
    pub const SECOND: Period = Period(1_000_000);
    /// One minute.
    pub const MINUTE: Period = Period(60 * Self::SECOND.0);
    /// One hour.
    pub const HOUR: Period = Period(60 * Self::MINUTE.0);
    /// One day of 24 hours.
    pub const DAY: Period = Period(24 * Self::HOUR.0);
    /// One week of seven days. Epoch weeks begin on Thursdays.
    pub const WEEK: Period = Period(7 * Self::DAY.0);
    /// The longest period a limit may have: 2^51 - 1 microseconds, about 71 years.
    pub const MAX: Period = Period((1 << 51) - 1);

    /// So many microseconds.
    pub const fn micros(n: u64) -> Self {
        Period(n)
    }
    /// So many milliseconds.
    pub const fn millis(n: u64) -> Self {
        Period(n.saturating_mul(Self::MILLISECOND.0))
    }
    /// So many seconds.
    pub const fn seconds(n: u64) -> Self {
        Period(n.saturating_mul(Self::SECOND.0))
    }
    /// So many minutes.
    pub const fn minutes(n: u64) -> Self {
        Period(n.saturating_mul(Self::MINUTE.0))
    }
    /// So many hours.
    pub const fn hours(n: u64) -> Self {
        Period(n.saturating_mul(Self::HOUR.0))
    }
    /// So many days.
    pub const fn days(n: u64) -> Self {
        Period(n.saturating_mul(Self::DAY.0))
    }
    /// So many weeks.
    pub const fn weeks(n: u64) -> Self {
        Period(n.saturating_mul(Self::WEEK.0))
    }

    /// Its length in microseconds.
    pub const fn as_micros(self) -> u64 {
        self.0
    }

    /// Its length as a [`Duration`].
    pub const fn as_duration(self) -> Duration {
        Duration::from_micros(self.0)
    }

    /// How many of the largest unit that divides it, and that unit's name: `(20, "s")`.
    pub(crate) fn in_largest_unit(self) -> (u64, &'static str) {
        const UNITS: [(u64, &str); 6] = [
            (Period::WEEK.0, "w"),
            (Period::DAY.0, "d"),
            (Period::HOUR.0, "h"),
            (Period::MINUTE.0, "m"),
            (Period::SECOND.0, "s"),
            (Period::MILLISECOND.0, "ms"),
        ];
        match UNITS.iter().find(|(micros, _)| self.0 >= *micros && self.0.is_multiple_of(*micros)) {
            Some((micros, name)) => (self.0 / micros, name),
            None => (self.0, "us"),
        }
    }
}

/// Fractions of a microsecond are dropped.
impl From<Duration> for Period {
    fn from(duration: Duration) -> Self {
        Period(u64::try_from(duration.as_micros()).unwrap_or(u64::MAX))
    }
}

/// The largest unit that divides it: `20s`, `1500ms`, `1d`.
impl fmt::Display for Period {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (n, unit) = self.in_largest_unit();
        write!(f, "{n}{unit}")
    }
}

impl fmt::Debug for Period {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
