//! Sums over time in a bounded number of slots, however long the trace is.
//!
//! Slots begin a microsecond wide. When there are too many, ten become one; what is shown is put
//! together from them, so that it begins and ends at round times.

use std::collections::BTreeMap;
use std::ops::AddAssign;

use tidegate_trace::Micros;

/// The most slots in use.
const MOST_SLOTS: usize = 1 << 14;

/// The requests or units of a slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Flow {
    pub(super) allowed: u64,
    pub(super) denied: u64,
}

impl Flow {
    pub(super) fn offered(self) -> u64 {
        self.allowed.saturating_add(self.denied)
    }
}

impl AddAssign for Flow {
    fn add_assign(&mut self, other: Flow) {
        self.allowed = self.allowed.saturating_add(other.allowed);
        self.denied = self.denied.saturating_add(other.denied);
    }
}

#[derive(Debug)]
pub(super) struct Timeline {
    slot_us: u64,
    slots: BTreeMap<u64, Flow>,
    /// The times of the first and the last request.
    pub(super) span: Option<(u64, u64)>,
}

impl Default for Timeline {
    fn default() -> Self {
        Timeline { slot_us: 1, slots: BTreeMap::new(), span: None }
    }
}

impl Timeline {
    pub(super) fn add(&mut self, at_us: u64, flow: Flow) {
        let (first, last) = self.span.unwrap_or((at_us, at_us));
        self.span = Some((first.min(at_us), last.max(at_us)));
        *self.slots.entry(at_us / self.slot_us).or_default() += flow;
        while self.slots.len() > MOST_SLOTS {
            self.slot_us *= 10;
            let mut wider: BTreeMap<u64, Flow> = BTreeMap::new();
            for (index, flow) in &self.slots {
                *wider.entry(index / 10).or_default() += *flow;
            }
            self.slots = wider;
        }
    }

    /// The sums over the bars of an axis.
    pub(super) fn bars(&self, axis: &Axis) -> Vec<Flow> {
        let mut bars = vec![Flow::default(); axis.bars];
        for (index, flow) in &self.slots {
            let bar = (index * self.slot_us).saturating_sub(axis.start_us) / axis.bar_us;
            if let Some(bar) = usize::try_from(bar).ok().and_then(|bar| bars.get_mut(bar)) {
                *bar += *flow;
            }
        }
        bars
    }
}

/// A division of time into bars of equal, round width.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Axis {
    pub(super) start_us: u64,
    pub(super) bar_us: u64,
    pub(super) bars: usize,
}

impl Axis {
    /// The finest round bars of which no more than `most` cover all of the timelines, and the time
    /// up to `end_us` if it is known when the trace ends.
    pub(super) fn over<'t>(
        timelines: impl Iterator<Item = &'t Timeline> + Clone,
        end_us: Option<u64>,
        most: u64,
    ) -> Axis {
        let spans = timelines.clone().filter_map(|timeline| timeline.span);
        let (first, last) =
            spans.reduce(|one, two| (one.0.min(two.0), one.1.max(two.1))).unwrap_or((0, 0));
        let last = last.max(end_us.unwrap_or(0).saturating_sub(1));
        // A trace that begins soon after the epoch is shown from the epoch, where windows begin.
        let first = if first < last / 4 { 0 } else { first };
        let finest = timelines.map(|timeline| timeline.slot_us).max().unwrap_or(1);
        let covers = |width: u64| last / width - first / width < most;
        let bar_us = round_widths()
            .find(|width| width.is_multiple_of(finest) && covers(*width))
            .unwrap_or(u64::MAX);
        let start_us = first / bar_us * bar_us;
        let bars = usize::try_from(last / bar_us - first / bar_us + 1).unwrap_or(1);
        Axis { start_us, bar_us, bars }
    }

    pub(super) fn end_us(&self) -> u64 {
        self.start_us.saturating_add(self.bar_us.saturating_mul(self.bars as u64))
    }

    /// Moments at round distances from the start, at most `most` of them, at which to write the
    /// time.
    pub(super) fn ticks(&self, most: u64) -> Vec<u64> {
        let length = self.end_us() - self.start_us;
        let Some(width) = round_widths().find(|width| length / width < most) else {
            return Vec::new();
        };
        (0..=length / width).map(|index| self.start_us + index * width).collect()
    }

    /// What to write at a moment: the time, or how long after the start it is if the start is not
    /// 0.
    pub(super) fn label(&self, at_us: u64) -> String {
        if self.start_us == 0 {
            Micros(at_us).to_string()
        } else if at_us > self.start_us {
            format!("+{}", Micros(at_us - self.start_us))
        } else if at_us.is_multiple_of(1_000_000) {
            // A time late in history is easier to read in seconds than in minutes.
            format!("{}s", at_us / 1_000_000)
        } else {
            Micros(at_us).to_string()
        }
    }
}

/// Round widths: 1, 2, 5 and 10 of every unit, and the divisors of minutes, hours and days.
fn round_widths() -> impl Iterator<Item = u64> {
    const SECOND: u64 = 1_000_000;
    let below_a_minute =
        [1, 10, 100, 1_000, 10_000, 100_000].into_iter().flat_map(|n| [n, 2 * n, 5 * n]);
    let seconds =
        [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1_200, 1_800, 3_600, 7_200, 21_600, 43_200];
    let days = (0..12).flat_map(|power| [1, 2, 5].map(|n| n * 86_400 * 10_u64.pow(power)));
    below_a_minute
        .chain(seconds.into_iter().chain(days).map(|n| n * SECOND).filter(|width| *width > 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one() -> Flow {
        Flow { allowed: 1, denied: 0 }
    }

    #[test]
    fn nothing_is_lost_when_slots_are_put_together() {
        let mut timeline = Timeline::default();
        for n in 0..100_000 {
            timeline.add(n * 7_919, one());
        }
        assert!(timeline.slots.len() <= MOST_SLOTS);
        let axis = Axis::over([&timeline].into_iter(), None, 100);
        let bars = timeline.bars(&axis);
        assert!(bars.len() <= 100);
        assert_eq!(bars.iter().map(|bar| bar.allowed).sum::<u64>(), 100_000);
    }

    #[test]
    fn axes_are_round() {
        let mut timeline = Timeline::default();
        timeline.add(0, one());
        timeline.add(9_950_000, one());
        let axis = Axis::over([&timeline].into_iter(), None, 100);
        assert_eq!(axis, Axis { start_us: 0, bar_us: 100_000, bars: 100 });
        assert_eq!(axis.ticks(12), (0..=10).map(|n| n * 1_000_000).collect::<Vec<_>>());
    }

    #[test]
    fn a_trace_far_from_the_epoch_and_a_single_moment_have_an_axis() {
        let mut timeline = Timeline::default();
        let late = (1 << 52) - 1;
        timeline.add(late, one());
        let axis = Axis::over([&timeline].into_iter(), None, 60);
        assert_eq!((axis.bars, timeline.bars(&axis)), (1, vec![one()]));
        timeline.add(0, one());
        let axis = Axis::over([&timeline].into_iter(), None, 60);
        assert!(axis.bars <= 60 && axis.ticks(10).len() <= 10);
        assert_eq!(Axis::over([].into_iter(), None, 60).bars, 1);
    }
}
