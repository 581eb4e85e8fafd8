//! A progress bar, for long traces on a terminal.

use std::io::{self, IsTerminal};

use indicatif::{ProgressBar, ProgressStyle};

use super::source::Source;

/// How often the bar moves, in requests.
const STRIDE: u64 = 1 << 14;

pub(super) struct Progress {
    bar: Option<ProgressBar>,
    requests: u64,
}

impl Progress {
    /// `hidden` if other output fills the terminal.
    pub(super) fn new(source: &Source, hidden: bool) -> Self {
        let length = source.length().filter(|_| io::stderr().is_terminal() && !hidden);
        let bar = length.map(|length| {
            let bar = ProgressBar::new(length);
            match ProgressStyle::with_template("{bar:40} {percent:>3} %  {eta} left") {
                Ok(style) => bar.with_style(style),
                Err(_) => bar,
            }
        });
        Progress { bar, requests: 0 }
    }

    /// Counts one more request.
    pub(super) fn advance(&mut self, source: &Source) {
        self.requests += 1;
        if let Some(bar) = &self.bar
            && self.requests.is_multiple_of(STRIDE)
        {
            bar.set_position(source.position());
        }
    }

    pub(super) fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
