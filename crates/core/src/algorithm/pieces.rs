//! What `sliding`, `log` and `concurrent` have in common: usage in pieces, oldest first, each of
//! which ends completely.

use crate::time::Timestamp;

/// Microseconds until `over` units have ended, if the pieces, oldest first, have these units and
/// end at these moments.
pub(super) fn until_ended(
    over: u64,
    pieces: impl Iterator<Item = (u64, Timestamp)>,
    now: Timestamp,
) -> u64 {
    let (mut over, mut wait) = (over, 0);
    for (units, end) in pieces {
        if over == 0 {
            break;
        }
        over = over.saturating_sub(units);
        wait = end.micros_since(now);
    }
    wait
}

/// Takes `units` back from the pieces in this order, as far as they go, and returns how many it
/// took.
pub(super) fn take_back<'a>(units: u64, pieces: impl Iterator<Item = &'a mut u64>) -> u64 {
    let mut left = units;
    for piece in pieces {
        if left == 0 {
            break;
        }
        let back = left.min(*piece);
        *piece -= back;
        left -= back;
    }
    units - left
}
