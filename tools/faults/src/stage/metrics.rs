//! What a node counts, as `/metrics` tells it.

use std::collections::BTreeMap;

#[derive(Clone, Debug, Default)]
pub(crate) struct Metrics(BTreeMap<String, f64>);

impl Metrics {
    pub(super) fn parse(text: &str) -> Metrics {
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        let numbers = lines.filter_map(|line| {
            let (name, value) = line.rsplit_once(' ')?;
            Some((name.to_owned(), value.parse().ok()?))
        });
        Metrics(numbers.collect())
    }

    pub(super) fn sum(all: impl Iterator<Item = Metrics>) -> Metrics {
        let mut sum = Metrics::default();
        for (name, value) in all.flat_map(|metrics| metrics.0) {
            *sum.0.entry(name).or_default() += value;
        }
        sum
    }

    /// The number of that name and labels, as it is written; zero if there is none.
    pub(crate) fn get(&self, name: &str) -> f64 {
        self.0.get(name).copied().unwrap_or(0.0)
    }
}
