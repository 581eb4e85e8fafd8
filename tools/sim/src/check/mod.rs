//! What must hold, looked at while it happens. The world tells what it sees: requests and answers,
//! calls that a server executed, answers that reached a node, and what went wrong. Nothing in here
//! asks the product but for its counters.

mod lent;
mod level;

use std::collections::{BTreeMap, BTreeSet};

use tidegate::resilience::{OnFailure, ResilienceStats, SyncMode};
use tidegate::{Algorithm, Decision, Op, Source};

use self::lent::Lent;
use self::level::Level;
use crate::node::Answer;
use crate::plan::{Ask, Fault, Kind, MS, Plan, Rule};
use crate::script::{Done, rule_of};

/// Something that must hold did not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Which law.
    pub law: &'static str,
    pub at: u64,
    pub text: String,
}

type Holds = Result<(), Failure>;

const ALIVE: &str = "leases are spent while they live";
/// How long a request may take: a deadline, and twice the grain of the timers.
const LONGEST_US: u64 = 15 * MS + 2 * MS;
/// For how long the answer of a store may still come after nobody waits for it.
const STRAY_US: u64 = 1500 * MS;
/// How long a denial is certain without asking.
const CERTAIN_US: u64 = 1000 * MS + 20 * MS;

/// A request that has not been answered.
struct Open {
    node: usize,
    ask: Ask,
    /// The capacity of the first rule, as the node knows it.
    capacity: u64,
    asked_at: u64,
    /// How long its node had run then.
    ran: u64,
    /// Another request of the same kind was under way at the same time.
    crowded: bool,
}

/// A decision of a server.
struct Executed {
    at: u64,
    /// When that was by a clock that never goes back.
    forward_us: u64,
    done: Done,
    delivered: Option<u64>,
    /// Somebody was answered by it.
    taken: bool,
}

/// What is known of one rule.
struct Budget {
    sync: SyncMode,
    policy: OnFailure,
    /// The larger of its two limits, if it is changed.
    capacity: u64,
    per_second: u64,
    period_us: u64,
    window: bool,
    /// What the server has charged.
    charged: Level,
    /// What the server lost, or was given back, or may have counted twice because its clock
    /// stepped: this may pass beyond the limit.
    excused: f64,
    /// When somebody may have been given something that others had not heard of.
    eased_at: Option<u64>,
    /// What passed by the store or by leave of it: units and when, of a window by the server's
    /// clock, of a bucket by one that follows it but never goes back. So steps back may not let
    /// anything pass that real time does not.
    passed: Vec<(u64, u64)>,
    clock_stepped: bool,
    /// How often the server's clock went back: so many windows may have been there once more.
    steps_back: u64,
    /// Nodes that ended with something that they had let pass and not charged.
    ended: u64,
}

/// What is known of one rule on one node, as long as it lives.
struct Own {
    lent: Lent,
    /// What was let pass by it alone.
    alone: Level,
    /// Let pass to be charged afterwards, less what was taken back, and charged.
    owed: i64,
    let_pass: u64,
    debited: u64,
    took_back: bool,
    /// When somebody last asked to forget everything.
    reset_at: Option<u64>,
    checks_asked: u64,
    checks_executed: u64,
    /// Denials about it that reached the node, of checks on something that may be lent.
    denials_heard: u64,
    /// When somebody last left without the answer of the store, which may still come.
    stray_at: Option<u64>,
}

struct Life {
    own: Vec<Own>,
    executed: Vec<Executed>,
    debits: BTreeSet<u64>,
    /// At least and at most so many passed without being charged anywhere.
    fail_open: (u64, u64),
    /// The fewest nodes it has believed in, the first time it decided alone.
    fewest: u64,
    spent_least: u64,
    spent_most: u64,
}

pub(crate) struct Checks {
    nodes: u64,
    told: bool,
    lease_error_per_mille: u64,
    calm_at: u64,
    budgets: Vec<Budget>,
    lives: Vec<Life>,
    open: BTreeMap<usize, Open>,
    pub(crate) answered: u64,
    pub(crate) sources: [u64; 3],
    steady: Vec<u64>,
    /// By how much the server's clock has stepped forward.
    stepped_us: u64,
}

impl Checks {
    pub(crate) fn new(plan: &Plan) -> Self {
        let budget = |(at, rule): (usize, &Rule)| {
            let changed = plan
                .faults
                .iter()
                .any(|Fault { kind, .. }| matches!(kind, Kind::Change { rule, .. } if *rule == at));
            let mut limits = vec![rule.limits.as_slice()[0]];
            if changed {
                limits.push(rule.other.as_slice()[0]);
            }
            let most =
                |of: &dyn Fn(&tidegate::Limit) -> u64| limits.iter().map(of).max().unwrap_or(0);
            let (period_us, window) = match limits[0].algorithm() {
                Algorithm::Window(window) => (window.period, true),
                Algorithm::Bucket(bucket) => (bucket.period, false),
                other => unreachable!("no bound is written for {other:?}"),
            };
            let (capacity, amount) =
                (most(&|limit| limit.capacity()), most(&|limit| limit.algorithm().amount()));
            Budget {
                sync: rule.policy.sync,
                policy: rule.policy.on_failure.unwrap_or_default(),
                capacity,
                per_second: amount,
                period_us,
                window,
                charged: Level::new(window.then_some(period_us), amount as f64 / period_us as f64),
                excused: 0.0,
                eased_at: None,
                passed: Vec::new(),
                clock_stepped: false,
                steps_back: 0,
                ended: 0,
            }
        };
        let budgets: Vec<Budget> = plan.rules.iter().enumerate().map(budget).collect();
        let mut checks = Checks {
            nodes: plan.nodes,
            told: plan.told_nodes,
            lease_error_per_mille: plan.lease_error_per_mille,
            calm_at: plan.calm_at,
            steady: vec![0; budgets.len()],
            budgets,
            lives: Vec::new(),
            open: BTreeMap::new(),
            answered: 0,
            sources: [0; 3],
            stepped_us: 0,
        };
        checks.lives = (0..plan.nodes).map(|_| checks.life()).collect();
        checks
    }

    fn life(&self) -> Life {
        let own = self.budgets.iter().map(|budget| Own {
            lent: Lent::default(),
            alone: Level::new(budget.window.then_some(budget.period_us), 0.0),
            owed: 0,
            let_pass: 0,
            debited: 0,
            took_back: false,
            reset_at: None,
            checks_asked: 0,
            checks_executed: 0,
            denials_heard: 0,
            stray_at: None,
        });
        let (own, fewest) = (own.collect(), u64::MAX);
        Life {
            own,
            executed: Vec::new(),
            debits: BTreeSet::new(),
            fail_open: (0, 0),
            fewest,
            spent_least: 0,
            spent_most: 0,
        }
    }

    /// A request was handed to a node.
    pub(crate) fn asked(
        &mut self,
        number: usize,
        node: usize,
        ask: &Ask,
        rules: &[Rule],
        now: u64,
        ran: u64,
    ) {
        let alike = |open: &Open| {
            open.node == node
                && open.ask.parts.iter().any(|part| ask.parts.iter().any(|own| own.0 == part.0))
        };
        let mut crowded = false;
        for open in self.open.values_mut().filter(|open| alike(open)) {
            (open.crowded, crowded) = (true, true);
        }
        for &(rule, cost) in &ask.parts {
            let (own, budget) = (&mut self.lives[node].own[rule], &mut self.budgets[rule]);
            match ask.op {
                Op::Check => own.checks_asked += 1,
                Op::Refund => {
                    // It may be given back here, there, or both.
                    budget.excused += cost as f64;
                    own.alone.give_back(cost as f64);
                    own.owed -= i64::try_from(cost).unwrap_or(0);
                    own.took_back = true;
                    budget.eased_at = Some(now);
                }
                Op::Reset => {
                    budget.excused += budget.capacity as f64;
                    own.alone.forget();
                    (own.owed, own.took_back, own.reset_at) = (0, true, Some(now));
                    budget.eased_at = Some(now);
                }
                _ => {}
            }
        }
        let capacity = ask.parts.first().map_or(0, |&(rule, _)| rules[rule].capacity());
        self.open
            .insert(number, Open { node, ask: ask.clone(), capacity, asked_at: now, ran, crowded });
    }

    /// The client has gone away.
    pub(crate) fn cancelled(&mut self, number: usize, now: u64) {
        let Some(open) = self.open.remove(&number) else { return };
        for (rule, _) in open.ask.parts {
            self.lives[open.node].own[rule].stray_at = Some(now);
        }
    }

    /// A node has ended; another takes its place.
    pub(crate) fn ended(&mut self, node: usize) {
        self.open.retain(|_, open| open.node != node);
        self.lives[node] = self.life();
        self.budgets.iter_mut().for_each(|budget| budget.ended += 1);
    }

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
            // What a node sent that has ended meanwhile is charged, and nobody's.
            let mut gone = (!lives).then(|| self.life());
            let (budget, life) =
                (&mut self.budgets[rule], gone.as_mut().unwrap_or(&mut self.lives[node]));
            let own = &mut life.own[rule];
            if done.op == b'c' && lives {
                own.checks_executed += 1;
                if own.checks_executed > own.checks_asked + own.denials_heard {
                    let text = format!(
                        "node {node} was asked to check r{rule} {} times and heard of {} denials for which it might give a lease back, the server executed {}",
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
            return fail("answered once", "a second answer, or one to nobody".into());
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
                .or_else(|text| fail("nothing is denied in vain", text)),
            _ => self
                .alone(&open, decision, now, clock_us, &stats)
                .or_else(|(law, text)| fail(law, text)),
        }
    }

    /// The store has decided: there must be a call of this node that it executed meanwhile, that
    /// decided just so, and by which nobody else was answered. What it did not decide was spent
    /// here.
    fn by_the_store(
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
        // answer to somebody who did not wait for it.
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
                        format!("nobody has decided about r{rule}"),
                    ));
                }
            }
        }
        Ok(())
    }

    /// It passed by leave of the store: units that were taken ahead and live, or that will be
    /// charged and are few.
    fn here(
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
                    own.lent.spend(cost, open.asked_at.max(now.saturating_sub(LONGEST_US))).map_err(|live| {
                        (
                            ALIVE,
                            format!("node {} spent {cost} of r{rule}, but {live} were lent to it and live", open.node),
                        )
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
                            "node {} has let pass {} of r{rule} that are not charged, of at most {cap}",
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

    /// Denied from what the store had said: it would have said the same, unless something was given
    /// back.
    fn denied_here(
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
    /// counts as taken, unless the server has counted it already. If that was denied, whoever comes
    /// behind it is denied as it was, so what has drained since does not count.
    fn ahead_of(&self, open: &Open, rule: usize, cost: u64, now: u64) -> f64 {
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
    fn alone(
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
                    "degraded if and only if nobody answered",
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
                // Spent here, or alone: nobody can tell from outside.
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
                    "node {} let {:.3} of r{rule} pass alone, its share is {share:.3} per {period_us} us",
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

    /// Looks after those who wait. `ran` says how long a node has run.
    pub(crate) fn tick(&self, now: u64, ran: impl Fn(usize) -> u64) -> Holds {
        for (number, open) in &self.open {
            let waited = ran(open.node).saturating_sub(open.ran);
            let needs = if matches!(open.ask.op, Op::Check | Op::Peek | Op::Refund | Op::Reset) {
                LONGEST_US
            } else {
                u64::MAX
            };
            if waited > needs {
                let text = format!(
                    "request {number} on node {} has waited for {} ms: {:?}",
                    open.node,
                    waited / MS,
                    open.ask
                );
                return Err(Failure { law: "answered in time", at: now, text });
            }
        }
        Ok(())
    }

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

impl Own {
    fn let_pass(&mut self, cost: u64, asked_at: u64) {
        self.let_pass += cost;
        // What was asked before everything was forgotten may have passed before it, too, though it
        // is answered only now.
        if self.reset_at.is_none_or(|reset| reset < asked_at) {
            self.owed += i64::try_from(cost).unwrap_or(0);
        }
    }
}

/// The most a node may have let pass and not charged: five per cent over the other nodes,
/// everything for a single one.
fn cap(capacity: u64, nodes: u64) -> u64 {
    if nodes <= 1 { capacity } else { (capacity * 50 / 1000 / (nodes - 1)).max(1).min(capacity) }
}

/// What one of `nodes` may let pass alone: how much at once or in a window, how long that is, and
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
