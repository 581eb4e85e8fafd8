//! What adds up: the counters of each node, and what passed in all.

use tidegate::resilience::{ResilienceStats, SyncMode};

use super::level::Level;
use super::{Checks, Failure, Holds, cap};
use crate::plan::MS;

impl Checks {
    /// What a node counts of its leases adds up.
    pub(crate) fn counted(
        &self,
        node: usize,
        stats: &ResilienceStats,
        last: bool,
        now: u64,
    ) -> Holds {
        let gone = stats.lease_units_spent
            + stats.lease_units_returned
            + stats.lease_units_expired
            + stats.lease_units_held;
        let fits = if last {
            gone == stats.lease_units_granted
        } else {
            gone <= stats.lease_units_granted
        };
        if !fits {
            let text = format!("node {node}: {stats:?}");
            return Err(Failure { law: "leases are conserved", at: now, text });
        }
        if !last {
            return Ok(());
        }
        let fail =
            |law, text: String| Err(Failure { law, at: now, text: format!("node {node}: {text}") });
        if (stats.lease_units_held, stats.unsynced_units, stats.in_flight) != (0, 0, 0) {
            return fail("nothing is left behind", format!("{stats:?}"));
        }
        let life = &self.lives[node];
        if !(life.spent_least..=life.spent_most).contains(&stats.lease_units_spent) {
            let text = format!(
                "{} lease units were spent, requests that passed took {} to {}",
                stats.lease_units_spent, life.spent_least, life.spent_most
            );
            return fail("every unit spent let a request pass", text);
        }
        let (least, most) = life.fail_open;
        if !(least..=most).contains(&stats.fail_open) {
            let text = format!("{} were counted of {least} to {most}", stats.fail_open);
            return fail("what passes uncharged is counted", text);
        }
        for (rule, own) in life.own.iter().enumerate() {
            if self.budgets[rule].sync == SyncMode::Async
                && !own.took_back
                && own.debited < own.let_pass
            {
                return fail(
                    "no pass without a charge",
                    format!("of r{rule} {} passed, {} were charged", own.let_pass, own.debited),
                );
            }
        }
        let most = 6 + now / (850 * MS);
        if stats.opened > most {
            return fail(
                "the breaker does not flap",
                format!("it opened {} times in {} ms", stats.opened, now / MS),
            );
        }
        Ok(())
    }

    /// When all is over: what passed by leave of the store is within the bounds of each mode, and
    /// at the end as much passed as should.
    pub(crate) fn finish(&mut self, now: u64, steady_us: u64, least: &[u64]) -> Holds {
        if let Some((number, open)) = self.open.iter().next() {
            let text = format!("request {number} of node {} was never answered", open.node);
            return Err(Failure { law: "answered once", at: now, text });
        }
        for (rule, budget) in self.budgets.iter_mut().enumerate() {
            let passed = self.steady[rule];
            let expected = least[rule] * steady_us / 1_000_000 * 3 / 4;
            if passed < expected.saturating_sub(2) {
                let text = format!(
                    "r{rule}: {passed} passed in the last {} ms, expected at least {expected}",
                    steady_us / MS
                );
                return Err(Failure { law: "as much passes as should", at: now, text });
            }
            if !self.told {
                continue;
            }
            let lent = budget.capacity * self.lease_error_per_mille / 1000;
            let unsynced = cap(budget.capacity, self.nodes);
            let beyond = match budget.sync {
                SyncMode::Direct => 0,
                SyncMode::Lease if budget.window && !budget.clock_stepped => 0,
                SyncMode::Lease => lent,
                SyncMode::Async => (self.nodes - 1 + budget.ended) * unsynced,
            };
            // A window that the clock comes to again is another one, with all that its mode allows.
            let windows = if budget.window { 1 + budget.steps_back } else { 1 };
            let allowed = (windows * (budget.capacity + beyond)) as f64 + budget.excused;
            let mut level = Level::new(
                budget.window.then_some(budget.period_us),
                budget.per_second as f64 / budget.period_us as f64,
            );
            budget.passed.sort_unstable();
            for &(wall, units) in &budget.passed {
                level.add(units as f64, wall);
                if level.used() > allowed + 1e-6 {
                    let text = format!(
                        "{:.3} of r{rule} ({:?}, limit {}) passed by leave of the store, at most {allowed:.3} may: {beyond} by its mode, {:.3} for what was lost or given back",
                        level.used(),
                        budget.sync,
                        budget.capacity,
                        budget.excused
                    );
                    return Err(Failure { law: "not beyond the bound", at: now, text });
                }
            }
        }
        Ok(())
    }
}
