//! What the server did: each call that it executed stays within the limits.

use tidegate::resilience::SyncMode;

use super::{Checks, Executed, Failure};
use crate::script::{Done, rule_of};

impl Checks {
    /// A server has executed a call of a node. Says by which numbers to tell that the answer was
    /// delivered.
    pub(crate) fn executed(
        &mut self,
        node: usize,
        lives: bool,
        done: Done,
        now: u64,
    ) -> Result<usize, Failure> {
        let forward_us = now + self.stepped_us;
        for charge in &done.charges {
            let Some(rule) = rule_of(&charge.key) else { continue };
            if let (true, Some(start)) = (charge.rebased, charge.start) {
                self.budgets[rule].charged.rebase(start);
            }
            // What a node sent that has ended meanwhile is charged, and belongs to no node.
            let mut gone = (!lives).then(|| self.life());
            let (budget, life) =
                (&mut self.budgets[rule], gone.as_mut().unwrap_or(&mut self.lives[node]));
            let own = &mut life.own[rule];
            if done.op == b'c' && lives {
                own.checks_executed += 1;
                if own.checks_executed > own.checks_asked + own.denials_heard {
                    let text = format!(
                        "node {node} got {} checks of r{rule} and heard of {} denials for which it might give a lease back, the server executed {}",
                        own.checks_asked, own.denials_heard, own.checks_executed
                    );
                    return Err(Failure { law: "no replay", at: now, text });
                }
            }
            let units = charge.granted as f64;
            match done.op {
                b'c' | b't' | b'd' if charge.new => {
                    if done.op != b't' && (!done.allowed || charge.granted != charge.cost) {
                        let text = format!(
                            "of {} asked of r{rule} {} were charged, allowed: {}",
                            charge.cost, charge.granted, done.allowed
                        );
                        return Err(Failure { law: "all or nothing", at: now, text });
                    }
                    let at = if budget.window {
                        charge.start.unwrap_or(done.wall_us)
                    } else {
                        forward_us
                    };
                    budget.charged.add(units, at);
                    let debt = if budget.sync == SyncMode::Async { budget.capacity } else { 0 };
                    let most = (budget.capacity + debt) as f64;
                    if budget.charged.used() > most + 1e-6 {
                        let text = format!(
                            "the server has charged {:.3} of r{rule}, which may be at most {most}",
                            budget.charged.used()
                        );
                        return Err(Failure { law: "the store keeps the limit", at: now, text });
                    }
                    if done.op == b't' {
                        let lasts = charge
                            .start
                            .map(|start| (start + budget.period_us).saturating_sub(done.wall_us));
                        own.lent.granted(done.id.unwrap_or(0), charge.granted, now, lasts);
                    }
                    if done.op == b'd' && done.id.is_some_and(|id| life.debits.insert(id)) {
                        own.debited += charge.granted;
                        own.owed -= i64::try_from(charge.granted).unwrap_or(0);
                    }
                }
                b'r' if charge.granted > 0 => {
                    budget.charged.give_back(units);
                    budget.eased_at = Some(now);
                    // Ids of clients are not those of leases.
                    let lent = done.id.is_some_and(|id| own.lent.knows(id));
                    if lent && !own.lent.returned(done.id.unwrap_or(0), charge.cost) {
                        let text = format!(
                            "node {node} gave back {} of r{rule} that it had spent",
                            charge.cost
                        );
                        return Err(Failure { law: "leases are conserved", at: now, text });
                    }
                }
                b'x' => {
                    budget.charged.forget();
                    budget.eased_at = Some(now);
                }
                _ => {}
            }
        }
        let life = &mut self.lives[node];
        if !lives {
            return Ok(usize::MAX);
        }
        life.executed.push(Executed { at: now, forward_us, done, delivered: None, taken: false });
        Ok(life.executed.len() - 1)
    }

    /// The answer of a server has reached the node that asked.
    pub(crate) fn delivered(&mut self, node: usize, number: usize, now: u64) {
        let life = &mut self.lives[node];
        let Some(executed) = life.executed.get_mut(number) else { return };
        executed.delivered = Some(now);
        // Of a denial that was heard, and only then, it may ask again once it has given a lease
        // back; whatever else that was about has taken nothing either.
        let rules: Vec<usize> =
            executed.done.charges.iter().filter_map(|charge| rule_of(&charge.key)).collect();
        let leased = |rule: &usize| self.budgets[*rule].sync == SyncMode::Lease;
        if executed.done.op == b'c' && !executed.done.allowed && rules.iter().any(leased) {
            rules.iter().for_each(|&rule| life.own[rule].denials_heard += 1);
        }
        if executed.done.op == b't'
            && let (Some(rule), Some(id)) =
                (rule_of(&executed.done.charges[0].key), executed.done.id)
        {
            life.own[rule].lent.delivered(id);
        }
    }

    /// The server has so much less of a rule than before.
    pub(crate) fn lost(&mut self, rule: usize, units: f64, now: u64) {
        let budget = &mut self.budgets[rule];
        budget.charged.give_back(units);
        if budget.window && budget.clock_stepped {
            budget.charged.forget(); // what is left may be a window from before the step
        }
        budget.excused += units;
        budget.eased_at = Some(now);
        self.lives.iter_mut().for_each(|life| life.own[rule].lent.server_forgets());
    }

    /// The server's clock, which said this, has stepped by so much. What is used stays used: a
    /// bucket may let nothing more pass because its clock goes back. The edges of windows move, so
    /// one more may end in any time.
    pub(crate) fn clock_stepped(&mut self, by_us: i64, wall_us: u64, now: u64) {
        self.stepped_us += u64::try_from(by_us).unwrap_or(0);
        for budget in &mut self.budgets {
            budget.clock_stepped = true;
            budget.eased_at = Some(now);
            if by_us < 0 {
                budget.charged.clock_goes_back(wall_us);
                budget.steps_back += 1;
            }
        }
    }

    /// The limit of a rule was changed somewhere.
    pub(crate) fn limit_changed(&mut self, rule: usize, now: u64) {
        self.budgets[rule].eased_at = Some(now);
    }
}
