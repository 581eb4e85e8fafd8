//! How much of a limit is in use, counted without knowledge of the product: a bucket
//! that drains, or a count for each window.

use std::collections::BTreeMap;

#[derive(Clone, Debug)]
pub(crate) struct Level {
    window_us: Option<u64>,
    per_us: f64,
    used: f64,
    at: u64,
    /// By the number of the window; clocks may go back a little.
    windows: BTreeMap<u64, f64>,
    last: u64,
}

impl Level {
    pub(crate) fn new(window_us: Option<u64>, per_us: f64) -> Self {
        Level { window_us, per_us, used: 0.0, at: 0, windows: BTreeMap::new(), last: 0 }
    }

    /// The limit is another; what is in use stays.
    pub(crate) fn rule(&mut self, window_us: Option<u64>, per_us: f64) {
        if self.window_us != window_us {
            self.windows.clear();
        }
        (self.window_us, self.per_us) = (window_us, per_us);
    }

    pub(crate) fn add(&mut self, units: f64, at: u64) {
        if let Some(window_us) = self.window_us {
            self.last = at / window_us;
            *self.windows.entry(self.last).or_default() += units;
            return;
        }
        self.used = (self.used - at.saturating_sub(self.at) as f64 * self.per_us).max(0.0) + units;
        self.at = self.at.max(at);
    }

    /// The clock goes back: windows that it comes to again are new ones, but the last if that was
    /// not over.
    pub(crate) fn clock_goes_back(&mut self, from: u64) {
        if let Some(window_us) = self.window_us {
            let last = self.last;
            self.windows.retain(|window, _| *window == last && from / window_us == last);
        }
    }

    /// What is in use in the last window is so in the one that began then.
    pub(crate) fn rebase(&mut self, start: u64) {
        if let Some(window_us) = self.window_us {
            let used = self.windows.remove(&self.last).unwrap_or(0.0);
            self.last = start / window_us;
            self.windows.insert(self.last, used);
        }
    }

    /// In use after the last addition.
    pub(crate) fn used(&self) -> f64 {
        match self.window_us {
            Some(_) => self.windows.get(&self.last).copied().unwrap_or(0.0),
            None => self.used,
        }
    }

    pub(crate) fn give_back(&mut self, units: f64) {
        self.used = (self.used - units).max(0.0);
        if let Some(last) = self.windows.get_mut(&self.last) {
            *last = (*last - units).max(0.0);
        }
    }

    pub(crate) fn forget(&mut self) {
        (self.used, self.at) = (0.0, 0);
        self.windows.clear();
    }
}
