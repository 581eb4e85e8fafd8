//! Durations such as `499ms` or `1.5s`, exact to the microsecond.

use std::borrow::Cow;
use std::fmt;

use tidegate_core::MAX_WAIT_US;

/// Parses `0`, `499ms`, `1.5s`, `250us`, `2m`, `1h` or `1d` into microseconds, without rounding.
///
/// # Errors
/// What was expected instead.
pub fn duration(text: &str) -> Result<u64, Cow<'static, str>> {
    const FORM: &str = "a number and a unit (us, ms, s, m, h or d), as in 0, 499ms or 1.5s";
    let end = text.find(|c: char| c != '.' && !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let (whole, fraction) = match number.split_once('.') {
        Some((_, "")) => return Err(FORM.into()),
        Some((whole, fraction)) => (whole, fraction),
        None => (number, ""),
    };
    if whole.is_empty() || fraction.contains('.') {
        return Err(FORM.into());
    }
    let unit_us: u128 = match unit {
        "" if number.bytes().all(|byte| matches!(byte, b'0' | b'.')) => 1,
        "" => {
            return Err(format!("a unit after {} (us, ms, s, m, h or d)", shortened(number)).into());
        }
        "us" | "µs" | "μs" => 1,
        "ms" => 1_000,
        "s" => 1_000_000,
        "m" | "min" => 60_000_000,
        "h" => 3_600_000_000,
        "d" => 86_400_000_000,
        _ => return Err(FORM.into()),
    };
    // Trailing zeros have no value; a day has eleven digits that do.
    let fraction = fraction.trim_end_matches('0');
    if fraction.len() > 11 {
        return Err("no part of a microsecond".into());
    }
    let too_long = || Cow::from(format!("at most {MAX_WAIT_US}us, about 142 years"));
    let whole: u64 = whole.parse().map_err(|_| too_long())?;
    let scale = (0..fraction.len()).fold(1, |scale: u128, _| scale * 10);
    let part: u128 = if fraction.is_empty() { 0 } else { fraction.parse().map_err(|_| FORM)? };
    if !(part * unit_us).is_multiple_of(scale) {
        return Err("no part of a microsecond".into());
    }
    let micros = u128::from(whole) * unit_us + part * unit_us / scale;
    u64::try_from(micros).ok().filter(|micros| *micros <= MAX_WAIT_US).ok_or_else(too_long)
}

fn shortened(text: &str) -> &str {
    text.get(..20).unwrap_or(text)
}

/// Microseconds that display as [`duration`] parses them: `0`, `250us`, `499ms`, `1.5s`, `2m`, `1h`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Micros(pub u64);

impl fmt::Display for Micros {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [(u64, &str); 3] =
            [(86_400_000_000, "d"), (3_600_000_000, "h"), (60_000_000, "m")];
        let micros = self.0;
        if micros == 0 {
            return f.write_str("0");
        }
        if let Some((unit, name)) = UNITS.iter().find(|(unit, _)| micros.is_multiple_of(*unit)) {
            return write!(f, "{}{name}", micros / unit);
        }
        let (unit, digits, name) = match micros {
            1_000_000.. => (1_000_000, 6, "s"),
            1_000.. => (1_000, 3, "ms"),
            _ => (1, 0, "us"),
        };
        let part = micros % unit;
        if part == 0 {
            return write!(f, "{}{name}", micros / unit);
        }
        let part = format!("{part:0digits$}");
        write!(f, "{}.{}{name}", micros / unit, part.trim_end_matches('0'))
    }
}
