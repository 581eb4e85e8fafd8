//! What must hold, looked at while it happens. The world tells what it sees: requests and answers,
//! calls that a server executed, answers that reached a node, and what went wrong. Nothing in here
//! asks the product but for its counters.

mod answers;
mod lent;
mod level;
mod local;
mod store;
mod totals;

use std::collections::{BTreeMap, BTreeSet};

use tidegate::resilience::{OnFailure, SyncMode};
use tidegate::{Algorithm, Op};

use self::lent::Lent;
use self::level::Level;
use crate::plan::{Ask, Fault, Kind, MS, Plan, Rule};
use crate::script::Done;

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
/// For how long the answer of a store may still come after its request has ended.
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
    /// A request was answered by it.
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
    /// When a node may have got something that others had not heard of.
    eased_at: Option<u64>,
    /// What passed by the store or by leave of it: units and when, of a window by the server's
    /// clock, of a bucket by one that follows it but never goes back. So steps back may not let
    /// anything pass that real time does not.
    passed: Vec<(u64, u64)>,
    clock_stepped: bool,
    /// How often the server's clock went back: so many windows may have been there once more.
    steps_back: u64,
    /// Nodes that ended with something that they had allowed and not charged.
    ended: u64,
}

/// What is known of one rule on one node, as long as it lives.
struct Own {
    lent: Lent,
    /// What it allowed without the store.
    alone: Level,
    /// Allowed, to be charged afterwards, less what was taken back, and charged.
    owed: i64,
    let_pass: u64,
    debited: u64,
    took_back: bool,
    /// The last request to forget everything.
    reset_at: Option<u64>,
    checks_asked: u64,
    checks_executed: u64,
    /// Denials about it that reached the node, of checks on something that may be lent.
    denials_heard: u64,
    /// When a request last ended without the answer of the store, which may still come.
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

    /// The client has disconnected.
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

    /// Checks the requests that wait. `ran` says how long a node has run.
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
}

impl Own {
    fn let_pass(&mut self, cost: u64, asked_at: u64) {
        self.let_pass += cost;
        // What was requested before everything was forgotten may have passed before it, too, though
        // it is answered only now.
        if self.reset_at.is_none_or(|reset| reset < asked_at) {
            self.owed += i64::try_from(cost).unwrap_or(0);
        }
    }
}

/// The most a node may have allowed and not charged: five per cent over the other nodes,
/// everything for a single one.
fn cap(capacity: u64, nodes: u64) -> u64 {
    if nodes <= 1 { capacity } else { (capacity * 50 / 1000 / (nodes - 1)).max(1).min(capacity) }
}
