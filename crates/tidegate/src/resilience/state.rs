//! The state of the store as this node knows it: the one value behind log lines, events, readiness
//! and metrics.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use super::nodes::NodesFrom;
use crate::store::OnFailure;

/// Whether the store decides, as far as this node knows; of a cluster, whether all parts do.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum StoreState {
    /// The store decides.
    #[default]
    Healthy,
    /// The store does not answer: it is down, cut off or too slow. The node uses it again as soon as
    /// it answers.
    Unreachable {
        /// What went wrong.
        why: Arc<str>,
        /// How to fix it; may be empty.
        advice: &'static str,
    },
    /// The store answers and takes no charges: wrong credentials, missing rights or commands, a
    /// replica, no memory left, a cluster that is down. The node uses it again as soon as it takes
    /// one.
    Refused {
        /// What went wrong.
        why: Arc<str>,
        /// How to fix it; may be empty.
        advice: &'static str,
        /// Whether waiting cannot fix it: the configuration has to change, here or on the server.
        is_permanent: bool,
    },
}

impl StoreState {
    /// Whether the store decides.
    pub fn is_healthy(&self) -> bool {
        *self == StoreState::Healthy
    }

    /// Whether the store refuses in a way that waiting cannot fix.
    pub fn is_permanent(&self) -> bool {
        matches!(self, StoreState::Refused { is_permanent: true, .. })
    }

    /// `healthy`, `unreachable` or `refused`.
    pub fn name(&self) -> &'static str {
        match self {
            StoreState::Healthy => "healthy",
            StoreState::Unreachable { .. } => "unreachable",
            StoreState::Refused { .. } => "refused",
        }
    }

    /// What went wrong; empty while the store is healthy.
    pub fn why(&self) -> &str {
        match self {
            StoreState::Healthy => "",
            StoreState::Unreachable { why, .. } | StoreState::Refused { why, .. } => why,
        }
    }

    /// How to fix it; may be empty.
    pub fn advice(&self) -> &'static str {
        match self {
            StoreState::Healthy => "",
            StoreState::Unreachable { advice, .. } | StoreState::Refused { advice, .. } => advice,
        }
    }
}

/// The state of the store, and how limits are enforced without it. See
/// [`Resilient::status`](crate::resilience::Resilient::status).
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct StoreStatus {
    /// The state.
    pub state: StoreState,
    /// The number of nodes that divides limits without the store.
    pub nodes: u64,
    /// The source of that number.
    pub nodes_from: NodesFrom,
    /// What happens without the store to charges whose policy does not say.
    pub on_failure: OnFailure,
}

impl StoreStatus {
    pub(super) fn new(
        state: StoreState,
        nodes: u64,
        nodes_from: NodesFrom,
        on_failure: OnFailure,
    ) -> Self {
        StoreStatus { state, nodes, nodes_from, on_failure }
    }

    /// How limits are enforced while the store does not decide, as in `1/3 of each limit on this node
    /// (3 nodes, counted)`.
    ///
    /// It is about charges without a policy of their own; for the others see
    /// [`enforced_by`](StoreStatus::enforced_by).
    pub fn enforced(&self) -> String {
        self.enforced_by(self.on_failure)
    }

    /// How limits with this policy are enforced while the store does not decide.
    pub fn enforced_by(&self, on_failure: OnFailure) -> String {
        let (nodes, from) = (self.nodes, self.nodes_from);
        match (on_failure, nodes) {
            (OnFailure::Open, _) => "no limit is enforced (on_store_failure: open)".into(),
            (OnFailure::Closed, _) => "everything is denied (on_store_failure: closed)".into(),
            (OnFailure::Local, 1) => format!("each limit in full on this node (1 node, {from})"),
            (OnFailure::Local, _) => {
                format!("1/{nodes} of each limit on this node ({nodes} nodes, {from})")
            }
        }
    }
}

/// For log lines and messages: `unreachable: no connection to …; enforced meanwhile: 1/3 of each limit …`.
impl fmt::Display for StoreStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.state.is_healthy() {
            return f.write_str(self.state.name());
        }
        write!(
            f,
            "{}: {}; enforced meanwhile: {}",
            self.state.name(),
            self.state.why(),
            self.enforced()
        )
    }
}

/// The outages of the parts of the store. A part without an outage is healthy.
#[derive(Debug, Default)]
pub(super) struct Outages(BTreeMap<usize, StoreState>);

/// What [`Outages::set`] has changed.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct OutageChange {
    /// The part was healthy before, so it needs a task that probes it.
    pub(super) begins: bool,
    /// The state of the store has changed.
    pub(super) changes_store: bool,
}

impl Outages {
    /// The state of the store: that of its worst part.
    pub(super) fn state(&self) -> StoreState {
        let refused = self.0.values().find(|state| matches!(state, StoreState::Refused { .. }));
        refused.or_else(|| self.0.values().next()).cloned().unwrap_or_default()
    }

    pub(super) fn is_refused(&self, part: usize) -> bool {
        matches!(self.0.get(&part), Some(StoreState::Refused { .. }))
    }

    /// Sets the state of a part that is not healthy.
    pub(super) fn set(&mut self, part: usize, state: StoreState) -> OutageChange {
        let before = self.state();
        let begins = self.0.insert(part, state).is_none();
        OutageChange { begins, changes_store: self.state().name() != before.name() }
    }

    /// Removes the outage of a part. Returns whether the state of the store has changed.
    pub(super) fn end(&mut self, part: usize) -> bool {
        let before = self.state();
        self.0.remove(&part);
        self.state().name() != before.name()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unreachable() -> StoreState {
        StoreState::Unreachable { why: "gone".into(), advice: "" }
    }

    fn refused() -> StoreState {
        StoreState::Refused { why: "WRONGPASS".into(), advice: "", is_permanent: true }
    }

    #[test]
    fn the_state_of_the_store_is_that_of_its_worst_part() {
        let mut outages = Outages::default();
        assert!(outages.state().is_healthy());
        assert_eq!(
            outages.set(3, unreachable()),
            OutageChange { begins: true, changes_store: true }
        );
        assert_eq!(
            outages.set(5, unreachable()),
            OutageChange { begins: true, changes_store: false }
        );
        assert_eq!(outages.set(5, refused()), OutageChange { begins: false, changes_store: true });
        assert_eq!(
            (outages.state(), outages.is_refused(3), outages.is_refused(5)),
            (refused(), false, true)
        );
        assert!(outages.end(5), "one is still unreachable");
        assert_eq!(outages.state(), unreachable());
        assert!(outages.end(3) && outages.state().is_healthy());
    }

    #[test]
    fn a_status_says_how_limits_are_enforced_and_for_how_many_nodes() {
        let status =
            |nodes, from, policy| StoreStatus::new(refused(), nodes, from, policy).to_string();
        for (status, expected) in [
            (
                status(1, NodesFrom::Assumed, OnFailure::Local),
                "refused: WRONGPASS; enforced meanwhile: each limit in full on this node (1 node, assumed: the store was never reached)",
            ),
            (
                status(3, NodesFrom::Counted, OnFailure::Local),
                "refused: WRONGPASS; enforced meanwhile: 1/3 of each limit on this node (3 nodes, counted)",
            ),
            (
                status(3, NodesFrom::Configured, OnFailure::Closed),
                "refused: WRONGPASS; enforced meanwhile: everything is denied (on_store_failure: closed)",
            ),
        ] {
            assert_eq!(status, expected);
        }
    }
}
