//! Whether the running configuration is that of the files.

use std::collections::BTreeMap;

use parking_lot::Mutex;

/// Files whose content is not in force, and why. `/readyz` and `tidegate_config_in_force` report
/// it.
#[derive(Debug, Default)]
pub struct InForce {
    differences: Mutex<BTreeMap<&'static str, String>>,
}

impl InForce {
    /// Sets how a source (`configuration`, `rules`, `tokens`, `certificates`) differs; `None` if it
    /// does not. Returns whether the difference has changed.
    pub(crate) fn set(&self, source: &'static str, difference: Option<String>) -> bool {
        let mut differences = self.differences.lock();
        let before = differences.remove(source);
        let is_other = before != difference;
        if let Some(difference) = difference {
            differences.insert(source, difference);
        }
        is_other
    }

    /// Whether the content of all files is in force.
    pub fn is_whole(&self) -> bool {
        self.differences.lock().is_empty()
    }

    /// A sentence for each source that differs.
    pub fn differences(&self) -> Vec<String> {
        self.differences.lock().values().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_source_has_its_own_difference() {
        let in_force = InForce::default();
        assert!(in_force.is_whole());
        assert!(!in_force.set("tokens", None), "nothing has changed");
        assert!(in_force.set("tokens", Some("token-file is empty".into())));
        assert!(in_force.set("configuration", Some("listen.http needs a restart".into())));
        assert!(!in_force.set("tokens", Some("token-file is empty".into())), "that is known");
        assert_eq!(in_force.differences(), ["listen.http needs a restart", "token-file is empty"]);
        assert!(in_force.set("configuration", None) && in_force.set("tokens", None));
        assert!(in_force.is_whole());
    }
}
