//! Units of time in Envoy's protocol and files.

use tidegate::{Algorithm, Limit, Limits, Period};

use crate::rules::Budget;

/// A unit of time, by its number in the protocol.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "they say what they are")]
pub enum Unit {
    Second = 1,
    Minute = 2,
    Hour = 3,
    Day = 4,
    Month = 5,
    Year = 6,
    Week = 7,
}

impl Unit {
    const ALL: [Unit; 7] =
        [Unit::Second, Unit::Minute, Unit::Hour, Unit::Day, Unit::Month, Unit::Year, Unit::Week];

    /// Its duration; a month is 30 days, a year 365.
    pub fn period(self) -> Period {
        match self {
            Unit::Second => Period::SECOND,
            Unit::Minute => Period::MINUTE,
            Unit::Hour => Period::HOUR,
            Unit::Day => Period::DAY,
            Unit::Week => Period::WEEK,
            Unit::Month => Period::days(30),
            Unit::Year => Period::days(365),
        }
    }

    /// The unit of this number.
    pub fn from_number(number: i32) -> Option<Unit> {
        Self::ALL.into_iter().find(|unit| *unit as i32 == number)
    }

    pub(super) fn from_word(word: &str) -> Option<Unit> {
        Some(match word.to_ascii_lowercase().as_str() {
            "second" => Unit::Second,
            "minute" => Unit::Minute,
            "hour" => Unit::Hour,
            "day" => Unit::Day,
            "week" => Unit::Week,
            "month" => Unit::Month,
            "year" => Unit::Year,
            _ => return None,
        })
    }

    /// The unit of a limit: its period, or the time to fill a bucket, if that is a unit.
    pub fn of(limit: &Limit) -> Option<Unit> {
        let period_us = match limit.algorithm() {
            Algorithm::Bucket(bucket) => bucket.fill_us(),
            Algorithm::Concurrent(_) => return None,
            other => other.period_us(),
        };
        Self::ALL.into_iter().find(|unit| unit.period().as_micros() == period_us)
    }

    /// A number of requests per unit, in windows aligned to the epoch; a denial if it is 0.
    pub fn budget(self, requests: u32) -> Budget {
        let limit = Limit::window(u64::from(requests), self.period()).build();
        limit.map_or(Budget::Deny, |limit| Budget::Limits(Limits::from(limit)))
    }
}

/// The words for units.
pub(super) const UNITS: [&str; 7] = ["second", "minute", "hour", "day", "week", "month", "year"];
