//! What nodes answer by the store, or from units that the store gave them.

use tidegate::resilience::{ResilienceStats, SyncMode};
use tidegate::{Decision, Op, Source};

use super::{ALIVE, Checks, Executed, Failure, Holds, LONGEST_US, Life, Open, cap};
use crate::node::Answer;
use crate::plan::MS;
use crate::script::rule_of;

impl Checks {
    /// A request was answered.
    #[allow(clippy::too_many_arguments, reason = "all of it is what the world saw")]
    pub(crate) fn answer(
        &mut self,
        number: usize,
        answer: &Answer,
        now: u64,
        clock_us: u64,
        wall_us: u64,
        used: impl Fn(usize) -> Option<f64>,
        stats: impl Fn() -> ResilienceStats,
    ) -> Holds {
        let fail = |law, text: String| {
            Err(Failure { law, at: now, text: format!("request {number}: {text}") })
        };
        let Some(open) = self.open.remove(&number) else {
            return fail("answered once", "a second answer, or one without a request".into());
        };
        self.answered += 1;
        let gives_back = !matches!(open.ask.op, Op::Check | Op::Peek);
        let decision = match answer {
            Ok(decision) => decision,
            Err(_) if gives_back => return Ok(()),
            Err(error) => return fail("always an answer", format!("{error}")),
        };
        let source = decision.source();
        self.sources[source as usize % 3] += 1;
        let steady = now >= self.calm_at + 2000 * MS;
        if steady && source == Source::Fallback {
            return fail(
                "in sync two seconds after the last fault",
                format!("node {} decided alone", open.node),
            );
        }
        if gives_back {
            return Ok(());
        }
        if decision.charges().len() != open.ask.parts.len() {
            return fail(
                "an answer to every charge",
                format!("{} of {}", decision.charges().len(), open.ask.parts.len()),
            );
        }
        let takes = open.ask.op == Op::Check && open.ask.parts.iter().any(|&(_, cost)| cost > 0);
        if !takes {
            return Ok(());
        }
        if steady && decision.allowed() {
            open.ask.parts.iter().for_each(|&(rule, cost)| self.steady[rule] += cost);
        }
        match source {
            Source::Store => {
                self.by_the_store(&open, decision).or_else(|(law, text)| fail(law, text))
            }
            Source::Local if decision.allowed() => {
                self.here(&open, now, wall_us, &stats).or_else(|(law, text)| fail(law, text))
            }
            Source::Local => self
                .denied_here(&open, now, used)
                .or_else(|text| fail("nothing is denied unnecessarily", text)),
            _ => self
                .alone(&open, decision, now, clock_us, &stats)
                .or_else(|(law, text)| fail(law, text)),
        }
    }

    /// The store has decided: there must be a call of this node that it executed meanwhile, that
    /// decided just so, and that answered no other request. What it did not decide was spent
    /// here.
    pub(super) fn by_the_store(
        &mut self,
        open: &Open,
        decision: &Decision,
    ) -> Result<(), (&'static str, String)> {
        let life = &mut self.lives[open.node];
        let matches = |executed: &Executed| {
            let Executed { at, done, delivered, taken, .. } = executed;
            let own = |charge: &crate::script::Charged| {
                rule_of(&charge.key)
                    .is_some_and(|rule| open.ask.parts.contains(&(rule, charge.cost)))
            };
            !taken
                && delivered.is_some()
                && *at >= open.asked_at
                && done.op == b'c'
                && done.id == open.ask.id
                && done.allowed == decision.allowed()
                && done.charges.iter().all(own)
        };
        // What it says nothing about may have been spent here. One that would not do may be the
        // answer to a client that did not wait for it.
        let Life { own, executed: all, .. } = &mut *life;
        let would_do = |executed: &Executed| {
            let says = |rule| {
                executed.done.charges.iter().any(|charge| rule_of(&charge.key) == Some(rule))
            };
            open.ask.parts.iter().all(|&(rule, cost)| match self.budgets[rule].sync {
                SyncMode::Async => true,
                SyncMode::Lease => says(rule) || own[rule].lent.live(open.asked_at) >= cost,
                SyncMode::Direct => says(rule),
            })
        };
        // The one that says most about it, and of those the oldest.
        let oldest = all.iter_mut().filter(|executed| matches(executed));
        let most = |executed: &&mut Executed| (would_do(executed), executed.done.charges.len());
        let Some(executed) = oldest.rev().max_by_key(most) else {
            let text = format!(
                "the store decided {:?} on node {}, but no such answer reached it",
                open.ask.parts, open.node
            );
            return Err(("no pass without a charge", text));
        };
        executed.taken = true;
        if !decision.allowed() {
            return Ok(());
        }
        let by_store: Vec<usize> =
            executed.done.charges.iter().filter_map(|charge| rule_of(&charge.key)).collect();
        let (wall_us, forward_us) = (executed.done.wall_us, executed.forward_us);
        for &(rule, cost) in &open.ask.parts {
            let budget = &mut self.budgets[rule];
            budget.passed.push((if budget.window { wall_us } else { forward_us }, cost));
            if by_store.contains(&rule) {
                continue;
            }
            let own = &mut life.own[rule];
            match budget.sync {
                SyncMode::Lease => {
                    // It was spent somewhere between question and answer, when the lease may have
                    // lived a little longer.
                    own.lent.spend(cost, open.asked_at).map_err(|live| {
                        (ALIVE, format!("{cost} of r{rule} were spent, {live} were lent and live"))
                    })?;
                    life.spent_least += cost;
                    life.spent_most += cost;
                }
                SyncMode::Async => own.let_pass(cost, open.asked_at),
                SyncMode::Direct => {
                    return Err((
                        "no pass without a charge",
                        format!("no store has decided about r{rule}"),
                    ));
                }
            }
        }
        Ok(())
    }

    /// It passed by leave of the store: units that were taken ahead and live, or that will be
    /// charged and are few.
    pub(super) fn here(
        &mut self,
        open: &Open,
        now: u64,
        wall_us: u64,
        stats: &impl Fn() -> ResilienceStats,
    ) -> Result<(), (&'static str, String)> {
        let life = &mut self.lives[open.node];
        for &(rule, cost) in &open.ask.parts {
            let (budget, own) = (&mut self.budgets[rule], &mut life.own[rule]);
            budget.passed.push((if budget.window { wall_us } else { now + self.stepped_us }, cost));
            match budget.sync {
                SyncMode::Lease => {
                    let since = open.asked_at.max(now.saturating_sub(LONGEST_US));
                    own.lent.spend(cost, since).map_err(|live| {
                        let node = open.node;
                        let text = format!(
                            "node {node} spent {cost} of r{rule}, but {live} were lent to it and live"
                        );
                        (ALIVE, text)
                    })?;
                    life.spent_least += cost;
                    life.spent_most += cost;
                }
                SyncMode::Async => {
                    own.let_pass(cost, open.asked_at);
                    let nodes = if self.told { self.nodes } else { stats().nodes };
                    let cap = cap(budget.capacity, nodes);
                    if own.owed > i64::try_from(cap).unwrap_or(i64::MAX) {
                        let text = format!(
                            "node {} has allowed {} of r{rule} that are not charged, of at most {cap}",
                            open.node, own.owed
                        );
                        return Err(("no more is owed than the cap", text));
                    }
                }
                SyncMode::Direct => {
                    return Err((
                        "no pass without a charge",
                        format!("node {} let r{rule} pass by itself", open.node),
                    ));
                }
            }
        }
        Ok(())
    }
}
