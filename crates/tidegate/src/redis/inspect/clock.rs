//! Compares the server's clock with this machine's, and judges round trips.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::{Finding, Severity, Topic};
use tidegate_redis_client::Value;

/// The least difference that people notice.
const NOTICEABLE_US: u64 = 1_000_000;
/// A third of the default deadline of the resilience layer.
const FAR: Duration = Duration::from_millis(5);

/// One reading of the server's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ClockReading {
    /// How far the server's clock is ahead of this machine's, with an error of half the round trip.
    pub(super) ahead_us: i64,
    pub(super) round_trip: Duration,
}

impl ClockReading {
    /// `sent_us` is this machine's clock when TIME was sent. The server is assumed to have read its
    /// own clock half a round trip later.
    pub(super) fn new(sent_us: u64, server_us: u64, round_trip: Duration) -> Self {
        let half = u64::try_from(round_trip.as_micros() / 2).unwrap_or(u64::MAX);
        let ours = i64::try_from(sent_us.saturating_add(half)).unwrap_or(i64::MAX);
        let theirs = i64::try_from(server_us).unwrap_or(i64::MAX);
        ClockReading { ahead_us: theirs.saturating_sub(ours), round_trip }
    }
}

/// This machine's clock, in microseconds since 1970.
pub(super) fn wall_us() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}

/// Decodes the reply to `TIME`: seconds and microseconds.
pub(super) fn time_us(time: &Value) -> Option<u64> {
    let [seconds, micros] = time.as_array()? else { return None };
    let (seconds, micros) =
        (u64::try_from(seconds.as_int()?).ok()?, u64::try_from(micros.as_int()?).ok()?);
    seconds.checked_mul(1_000_000)?.checked_add(micros)
}

pub(super) fn judge_clock(reading: &ClockReading) -> Finding {
    let size = reading.ahead_us.unsigned_abs();
    // Half the round trip is not known, and may be all of the difference.
    let unsure = u64::try_from(reading.round_trip.as_micros() / 2).unwrap_or(u64::MAX);
    if size <= NOTICEABLE_US.saturating_add(unsure) {
        return Finding::ok(Topic::Clock, "within a second of this machine's");
    }
    let way = if reading.ahead_us > 0 { "ahead of" } else { "behind" };
    Finding::new(Severity::Warning, Topic::Clock, format!("{} {way} this machine's", seconds(size)))
        .because(
            "Decisions are right all the same: the server's clock judges, here and for everybody else. But moments at which \
             something resets, as headers and logs tell them, are by its clock, and look wrong by that much to whoever reads them here.",
        )
        .advise("Let both machines follow the same time servers (chrony, ntpd).")
}

/// Compares the clocks of a cluster's servers; `None` if they agree.
pub(super) fn judge_spread(ahead_us: &[i64]) -> Option<Finding> {
    let spread = ahead_us.iter().max()?.saturating_sub(*ahead_us.iter().min()?).unsigned_abs();
    if spread <= NOTICEABLE_US {
        return None;
    }
    let found = format!("the servers' clocks are up to {} apart", seconds(spread));
    let why = "A slot that moves to another server is judged by another clock from then on: what regrows meanwhile jumps by that \
               much, once.";
    let finding = Finding::new(Severity::Warning, Topic::Clock, found).because(why);
    Some(finding.advise("Let all of them follow the same time servers (chrony, ntpd)."))
}

/// One finding for the fastest round trips to all servers, which differ only a little.
pub(super) fn judge_round_trips(best: &[(String, Duration)]) -> Option<Finding> {
    let (resilient, far) =
        (best.iter().map(|(_, trip)| *trip).min()?, best.iter().map(|(_, trip)| *trip).max()?);
    let servers = best.iter().map(|(server, _)| server.clone()).collect();
    let found = match best {
        [_] => format!("{} at best", millis(resilient)),
        _ => {
            format!("{} at best to the nearest, {} to the farthest", millis(resilient), millis(far))
        }
    };
    if far <= FAR {
        return Some(Finding { servers, ..Finding::ok(Topic::RoundTrip, found) });
    }
    let finding = Finding::new(Severity::Warning, Topic::RoundTrip, found)
        .because("Every decision takes a round trip; one that takes longer than resilience.deadline_ms, 15 by default, is made without the store.")
        .advise("Keep the servers near their callers, or set resilience.deadline_ms to at least three round trips.");
    Some(Finding { servers, ..finding })
}

/// `3.2 s`, cut off.
fn seconds(micros: u64) -> String {
    format!("{}.{} s", micros / 1_000_000, micros % 1_000_000 / 100_000)
}

/// `0.18 ms`, rounded up.
fn millis(duration: Duration) -> String {
    let hundredths = duration.as_micros().div_ceil(10);
    format!("{}.{:02} ms", hundredths / 100, hundredths % 100)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_the_round_trip_is_taken_off() {
        let trip = Duration::from_millis(100);
        assert_eq!(ClockReading::new(1_000_000, 1_050_000, trip).ahead_us, 0);
        assert_eq!(ClockReading::new(1_000_000, 5_050_000, trip).ahead_us, 4_000_000);
        assert_eq!(ClockReading::new(9_000_000, 5_050_000, trip).ahead_us, -4_000_000);
    }

    #[test]
    fn a_difference_of_more_than_a_second_is_a_warning() {
        let judged = |ahead_us, millis| {
            judge_clock(&ClockReading { ahead_us, round_trip: Duration::from_millis(millis) })
        };
        for (ahead_us, millis, severity, found) in [
            (0, 1, Severity::Ok, "within a second of this machine's"),
            (-1_000_000, 1, Severity::Ok, "within a second of this machine's"),
            (1_400_000, 1000, Severity::Ok, "within a second of this machine's"), // within the error
            (1_400_000, 1, Severity::Warning, "1.4 s ahead of this machine's"),
            (-3_725_000_000, 1, Severity::Warning, "3725.0 s behind this machine's"),
        ] {
            let finding = judged(ahead_us, millis);
            assert_eq!((finding.severity, finding.found.as_str()), (severity, found));
        }
        assert!(judged(2_000_000, 1).why.starts_with("Decisions are right all the same"));
        assert_eq!(judge_spread(&[0, 900_000, -100_000]), None);
        assert_eq!(judge_spread(&[]), None);
        assert_eq!(judge_spread(&[0, 3_000_000]).unwrap().severity, Severity::Warning);
    }

    #[test]
    fn the_reply_to_time_is_decoded() {
        let time = |seconds: &str, micros: &str| {
            Value::Array(vec![Value::Bulk(seconds.into()), Value::Bulk(micros.into())])
        };
        assert_eq!(time_us(&time("1700000000", "42")), Some(1_700_000_000_000_042));
        for wrong in [
            Value::Nil,
            Value::Int(1),
            time("x", "1"),
            time("-1", "1"),
            time("99999999999999999", "1"),
        ] {
            assert_eq!(time_us(&wrong), None);
        }
    }

    #[test]
    fn a_far_server_is_a_warning() {
        let trip = |micros| (String::from("s"), Duration::from_micros(micros));
        let one = judge_round_trips(&[trip(181)]).unwrap();
        assert_eq!((one.severity, one.found.as_str()), (Severity::Ok, "0.19 ms at best"));
        let two = judge_round_trips(&[trip(181), trip(60_000)]).unwrap();
        let found = "0.19 ms at best to the nearest, 60.00 ms to the farthest";
        assert_eq!(
            (two.severity, two.found.as_str(), two.servers.len()),
            (Severity::Warning, found, 2)
        );
        assert_eq!(judge_round_trips(&[]), None);
    }
}
