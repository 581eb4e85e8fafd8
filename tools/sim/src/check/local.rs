//! What nodes answer by themselves: certain denials, and decisions without a store.

use tidegate::resilience::{OnFailure, ResilienceStats, SyncMode};
use tidegate::{Decision, Op};

use super::{Budget, CERTAIN_US, Checks, Executed, Open, STRAY_US};
use crate::script::rule_of;

impl Checks {
    /// Denied from what the store had said: it would have said the same, unless something was given
    /// back.
    pub(super) fn denied_here(
        &self,
        open: &Open,
        now: u64,
        used: impl Fn(usize) -> Option<f64>,
    ) -> Result<(), String> {
        let [(rule, cost)] = open.ask.parts[..] else { return Ok(()) };
        let budget = &self.budgets[rule];
        let used = used(rule);
        // A state ends as the limit that wrote it says. If the limit became slower by half since
        // then, the store has told those who were denied to come back only when the same would have
        // drained at the new pace.
        let certain = if used.is_none() { 2 * CERTAIN_US } else { CERTAIN_US };
        if budget.sync == SyncMode::Async
            || budget.eased_at.is_some_and(|eased| now <= eased + certain)
        {
            return Ok(());
        }
        let (capacity, used) = (open.capacity, used.unwrap_or(0.0));
        let ahead = if budget.sync == SyncMode::Direct {
            self.ahead_of(open, rule, cost, now)
        } else {
            0.0
        };
        if used + ahead + cost as f64 > capacity as f64 - 1e-6 {
            return Ok(());
        }
        Err(format!(
            "{cost} of r{rule} was denied on node {} with {used:.3} of {capacity} in use",
            open.node
        ))
    }

    /// What this node had sent about a rule before that costs no more and is not answered: it
    /// counts as taken, unless the server has counted it already. If that was denied, the next one
    /// behind it is denied like it, so what has drained since does not count.
    pub(super) fn ahead_of(&self, open: &Open, rule: usize, cost: u64, now: u64) -> f64 {
        // Of a request about several rules, those that are decided here are not sent: what is left
        // may be one charge.
        let sent = |other: &Open| {
            let mut parts =
                other.ask.parts.iter().filter(|part| self.budgets[part.0].sync == SyncMode::Direct);
            match (parts.next(), parts.next()) {
                (Some(&(own, less)), None) if own == rule && less <= cost => {
                    Some((less, other.asked_at))
                }
                _ => None,
            }
        };
        let before = self.open.values().filter(|other| {
            let plain = matches!(other.ask.op, Op::Check) && other.ask.id.is_none();
            other.node == open.node && plain && other.asked_at <= open.asked_at
        });
        let (units, since) = before
            .filter_map(sent)
            .fold((0, now), |(units, since), (cost, asked_at)| (units + cost, since.min(asked_at)));
        if units == 0 {
            return 0.0;
        }
        let (life, budget) = (&self.lives[open.node], &self.budgets[rule]);
        let of_it = |executed: &&Executed| {
            let Executed { at, done, taken, .. } = executed;
            let own = matches!(&done.charges[..], [charge] if rule_of(&charge.key) == Some(rule));
            !taken && *at >= since && done.op == b'c' && own
        };
        let executed = || life.executed.iter().filter(of_it);
        let strays = life.own[rule].stray_at.is_some_and(|left| left + STRAY_US > since);
        let counted: u64 = executed()
            .filter(|executed| executed.done.allowed)
            .map(|it| it.done.charges[0].cost)
            .sum();
        let drained = if budget.window {
            0.0
        } else {
            (now - since) as f64 * budget.per_second as f64 / budget.period_us as f64
        };
        units.saturating_sub(if strays { 0 } else { counted }) as f64 + drained
    }

    /// This node has decided alone.
    pub(super) fn alone(
        &mut self,
        open: &Open,
        decision: &Decision,
        now: u64,
        clock_us: u64,
        stats: &impl Fn() -> ResilienceStats,
    ) -> Result<(), (&'static str, String)> {
        let life = &mut self.lives[open.node];
        // There was an answer, in time, to the only question that can have been this one.
        let stray = |rule: usize| {
            life.own[rule].stray_at.is_some_and(|left| left + STRAY_US > open.asked_at)
        };
        let strays = open.ask.parts.iter().any(|&(rule, _)| stray(rule));
        if let ([(rule, cost)], false, false) = (&open.ask.parts[..], open.crowded, strays) {
            let unused = life.executed.iter().rev().take(50).find(|executed| {
                let Executed { at, done, delivered, taken, .. } = executed;
                let same = done.op == b'c' && done.id == open.ask.id && done.charges.len() == 1;
                !taken
                    && *at >= open.asked_at
                    && delivered.is_some_and(|delivered| delivered < now)
                    && same
                    && done.charges[0].cost == *cost
                    && rule_of(&done.charges[0].key) == Some(*rule)
            });
            if unused.is_some() {
                return Err((
                    "degraded if and only if there was no answer",
                    format!("the store had answered about r{rule} in time"),
                ));
            }
        }
        for &(rule, _) in &open.ask.parts {
            life.own[rule].stray_at = Some(now);
        }
        if !decision.allowed() {
            return Ok(());
        }
        let believed = if self.told { self.nodes } else { stats().nodes };
        life.fewest = life.fewest.min(believed);
        let single = open.ask.parts.len() == 1;
        let (mut uncharged, mut perhaps) = (false, false);
        for &(rule, cost) in &open.ask.parts {
            let (budget, own) = (&self.budgets[rule], &mut life.own[rule]);
            match budget.policy {
                OnFailure::Closed if single || budget.sync == SyncMode::Direct => {
                    return Err((
                        "policies",
                        format!("r{rule} is closed without an answer, and something passed"),
                    ));
                }
                // What could be spent here was perhaps not decided alone.
                OnFailure::Open => {
                    let surely = cost > 0 && (single || budget.sync == SyncMode::Direct);
                    (uncharged, perhaps) = (uncharged || surely, perhaps || cost > 0);
                }
                _ => {}
            }
            if !single && budget.sync != SyncMode::Direct {
                // Spent here, or decided locally: an observer cannot know.
                match budget.sync {
                    SyncMode::Lease => {
                        life.spent_most += cost;
                        own.lent.perhaps(cost);
                    }
                    _ => own.took_back = true,
                }
                continue;
            }
            if budget.policy != OnFailure::Local {
                continue;
            }
            let (share, period_us, rate) = share(budget, life.fewest);
            own.alone.rule(budget.window.then_some(period_us), rate);
            own.alone.add(cost as f64, clock_us);
            if own.alone.used() > share + 1e-6 {
                let text = format!(
                    "node {} allowed {:.3} of r{rule} alone, its share is {share:.3} per {period_us} us",
                    open.node,
                    own.alone.used()
                );
                return Err(("alone within its share", text));
            }
        }
        life.fail_open.0 += u64::from(uncharged);
        life.fail_open.1 += u64::from(perhaps);
        Ok(())
    }
}

/// What one of `nodes` may allow without the store: its burst or window, how long that is, and
/// units per microsecond.
fn share(budget: &Budget, nodes: u64) -> (f64, u64, f64) {
    let nodes = nodes.max(1);
    let rate = budget.per_second as f64 / budget.period_us as f64 / nodes as f64;
    if budget.window {
        return match budget.capacity / nodes {
            0 => (1.0, budget.period_us * nodes.div_ceil(budget.capacity), rate),
            share => (share as f64, budget.period_us, rate),
        };
    }
    ((budget.capacity / nodes).max(1) as f64, budget.period_us, rate)
}
