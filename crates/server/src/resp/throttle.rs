//! `CL.THROTTLE`, as redis-cell answers it.
//!
//! `CL.THROTTLE key max_burst count period [quantity]` answers `[limited, limit, remaining,
//! retry_after_s, reset_after_s]`. Where it differs on purpose: parameters whose arithmetic would
//! overflow are errors; `remaining` is right at any rate; `retry_after_s` of a denial is never 0.

use tidegate::{Limit, Op, Period, Retry, Verdict};

use super::reply::whole;

const USAGE: &str = "Cell error: Store error: Usage: cl.throttle <key> <max_burst> <count per period> <period> [<quantity>]";

/// A parsed `CL.THROTTLE`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Throttle<'a> {
    pub(crate) limit: &'a Limit,
    pub(crate) op: Op,
    pub(crate) cost: u64,
}

/// The last limit and its parameters: building a limit costs more than checking it.
#[derive(Debug, Default)]
pub(crate) struct Parameters {
    last: Option<([i64; 3], Limit)>,
}

impl<'a> Throttle<'a> {
    /// Parses the words behind the name of the command.
    pub(crate) fn read(words: &[&[u8]], known: &'a mut Parameters) -> Result<Throttle<'a>, String> {
        if !(4..=5).contains(&words.len()) {
            return Err(USAGE.into());
        }
        let max_burst = integer(words[1])?;
        let count = integer(words[2])?;
        let period = integer(words[3])?;
        let quantity = words.get(4).map_or(Ok(1), |word| integer(word))?;
        if count == 0 || period == 0 {
            return Err("Cell error: Store error: Zero rates are not supported".into());
        }
        let numbers = [max_burst, count, period];
        if known.last.is_none_or(|(same, _)| same != numbers) {
            known.last = Some((numbers, limit(numbers)?));
        }
        let Some((_, limit)) = &known.last else { return Err(USAGE.into()) };
        let (op, cost) = match quantity {
            0 => (Op::Peek, 0),
            quantity if quantity < 0 => (Op::Refund, quantity.unsigned_abs()),
            quantity => (Op::Check, quantity.unsigned_abs()),
        };
        Ok(Throttle { limit, op, cost })
    }

    /// The five numbers of the answer.
    pub(crate) fn numbers(allowed: bool, verdict: &Verdict) -> [i64; 5] {
        let retry = match verdict.retry {
            Retry::After(micros) if !allowed => seconds(micros).max(1),
            _ => -1,
        };
        let limited = i64::from(!allowed);
        [
            limited,
            whole(verdict.amount),
            whole(verdict.remaining),
            retry,
            seconds(verdict.reset_after_us),
        ]
    }
}

fn limit([max_burst, count, period]: [i64; 3]) -> Result<Limit, String> {
    let positive = |name: &str, number: i64| {
        u64::try_from(number).map_err(|_| {
            format!("Cell error: Store error: {name} is {number}: expected a positive number")
        })
    };
    let (burst, count, period) =
        (positive("max_burst", max_burst)?, positive("count", count)?, positive("period", period)?);
    let limit =
        Limit::bucket(count, Period::seconds(period)).burst(burst.saturating_add(1)).build();
    limit.map_err(|error| format!("Cell error: Store error: {error}"))
}

/// Seconds, rounded up if at least a millisecond is left over.
fn seconds(micros: u64) -> i64 {
    whole(micros / 1_000_000 + u64::from(micros % 1_000_000 >= 1_000))
}

/// A decimal with an optional sign.
fn integer(word: &[u8]) -> Result<i64, String> {
    // Most numbers are a few digits.
    if (1..=18).contains(&word.len()) && word.iter().all(u8::is_ascii_digit) {
        return Ok(word.iter().fold(0, |number, digit| 10 * number + i64::from(digit - b'0')));
    }
    let text = std::str::from_utf8(word).ok();
    text.and_then(|text| text.parse().ok()).ok_or_else(|| {
        let shown: String = word.escape_ascii().to_string().chars().take(64).collect();
        format!("Cell error: Store error: Couldn't parse as integer: {shown}")
    })
}
