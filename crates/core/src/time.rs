//! Time as an argument: integer microseconds since the Unix epoch.
//!
//! The core reads no clock. It compares, adds and floors the times it is given.

use core::fmt;
use core::time::Duration;

/// The end of the exact domain: every number is below 2^53.
///
/// Lua's numbers are doubles, and integers below 2^53 are exact in a double. Everything Tidegate
/// computes stays below it, so that Rust and a Redis script agree to the bit.
pub const EXACT: u64 = 1 << 53;

/// The longest wait that is ever reported, in microseconds (about 142 years).
pub const MAX_WAIT_US: u64 = (1 << 52) - 1;

/// How far a store's own clock may be behind a state before the state is rebased, in microseconds:
/// one second.
pub const CLOCK_TOLERANCE_US: u64 = 1_000_000;

/// A point in time: integer microseconds since the Unix epoch.
///
/// Times after the year 2112 count as the last exact one, [`Timestamp::MAX`].
///
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
    /// The last exact time, late in 2112.
    pub const MAX: Timestamp = Timestamp((1 << 52) - 1);

    /// The time this many microseconds after the epoch, at most [`Timestamp::MAX`].
    pub const fn from_micros(micros: u64) -> Self {
        if micros > Self::MAX.0 { Self::MAX } else { Timestamp(micros) }
    }

    /// The time with this value of [`as_micros`](Timestamp::as_micros), unchecked: for values that a
    /// store has kept.
    #[inline(always)]
    pub const fn from_kept_micros(micros: u64) -> Self {
        debug_assert!(micros < EXACT, "it was a moment when it was kept");
        Timestamp(micros)
    }

    /// The time this many milliseconds after the epoch, at most [`Timestamp::MAX`].
    pub const fn from_millis(millis: u64) -> Self {
        Self::from_micros(millis.saturating_mul(1_000))
    }

    /// The time this many seconds after the epoch, at most [`Timestamp::MAX`].
    pub const fn from_secs(secs: u64) -> Self {
        Self::from_micros(secs.saturating_mul(1_000_000))
    }

    /// Microseconds since the epoch.
    pub const fn as_micros(self) -> u64 {
        self.0
    }

    /// The time `micros` microseconds later, at most [`Timestamp::MAX`].
    #[must_use]
    pub const fn after_micros(self, micros: u64) -> Self {
        Self::from_micros(self.0.saturating_add(micros))
    }

    /// The time `duration` later, at most [`Timestamp::MAX`], rounded down to microseconds.
    #[must_use]
    pub fn after(self, duration: Duration) -> Self {
        self.after_micros(u64::try_from(duration.as_micros()).unwrap_or(u64::MAX))
    }

    /// The time `micros` later, possibly beyond [`Timestamp::MAX`]: for times that are only
    /// compared.
    pub(crate) const fn plus(self, micros: u64) -> Self {
        Timestamp(self.0.saturating_add(micros))
    }

    /// The time `micros` earlier, at the earliest [`Timestamp::EPOCH`].
    pub(crate) const fn minus(self, micros: u64) -> Self {
        Timestamp(self.0.saturating_sub(micros))
    }

    /// The last multiple of `micros` that is not after this time.
    #[must_use]
    pub(crate) const fn floor_to(self, micros: u64) -> Self {
        Timestamp(self.0 - self.0 % micros)
    }

    /// Microseconds from `earlier` to this time; zero if it is not earlier.
    pub const fn micros_since(self, earlier: Timestamp) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

impl fmt::Debug for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}us", self.0)
    }
}

/// The length of a period, a step or a lease: integer microseconds.
///
/// It can hold any number. Building a [`Limit`](crate::Limit) from zero or from a length outside
/// the exact domain is an error that names the parameter.
///
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

    /// A period of this many microseconds.
    pub const fn micros(n: u64) -> Self {
        Period(n)
    }
    /// A period of this many milliseconds.
    pub const fn millis(n: u64) -> Self {
        Period(n.saturating_mul(Self::MILLISECOND.0))
    }
    /// A period of this many seconds.
    pub const fn seconds(n: u64) -> Self {
        Period(n.saturating_mul(Self::SECOND.0))
    }
    /// A period of this many minutes.
    pub const fn minutes(n: u64) -> Self {
        Period(n.saturating_mul(Self::MINUTE.0))
    }
    /// A period of this many hours.
    pub const fn hours(n: u64) -> Self {
        Period(n.saturating_mul(Self::HOUR.0))
    }
    /// A period of this many days.
    pub const fn days(n: u64) -> Self {
        Period(n.saturating_mul(Self::DAY.0))
    }
    /// A period of this many weeks.
    pub const fn weeks(n: u64) -> Self {
        Period(n.saturating_mul(Self::WEEK.0))
    }

    /// The length in microseconds.
    pub const fn as_micros(self) -> u64 {
        self.0
    }

    /// The length as a [`Duration`].
    pub const fn as_duration(self) -> Duration {
        Duration::from_micros(self.0)
    }

    /// The count and the name of the largest unit that divides it: `(20, "s")`.
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

/// Displays it in the largest unit that divides it: `20s`, `1500ms`, `1d`.
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
