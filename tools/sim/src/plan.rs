//! Everything a seed decides before anything happens: the nodes, the requests, and what goes
//! wrong.

use std::fmt;

use tidegate::resilience::{OnFailure, Policy, SyncMode};
use tidegate::{Limits, Op};

use crate::random::Random;

/// One millisecond.
pub const MS: u64 = 1000;

/// A run.
#[derive(Clone, Debug)]
pub struct Plan {
    pub seed: u64,
    pub nodes: u64,
    /// Whether nodes are configured with their number, or count.
    pub told_nodes: bool,
    pub lease_error_per_mille: u64,
    pub rules: Vec<Rule>,
    /// Replies come in pieces.
    pub split: bool,
    pub boot_us: Vec<u64>,
    /// When faults end.
    pub calm_at: u64,
    pub requests: Vec<Request>,
    pub faults: Vec<Fault>,
    /// What the network does at its best: from and to, in microseconds.
    pub delay_us: (u64, u64),
}

/// A budget that all nodes share: one key under one limit.
#[derive(Clone, Debug)]
pub struct Rule {
    pub name: String,
    pub limits: Limits,
    pub policy: Policy,
    /// The limit it may be changed to, and back.
    pub other: Limits,
}

/// A request to a node.
#[derive(Clone, Debug)]
pub struct Request {
    pub at: u64,
    pub node: usize,
    pub ask: Ask,
    /// The client disconnects after so long.
    pub cancel_after: Option<u64>,
}

/// The content of a request.
#[derive(Clone, Debug)]
pub struct Ask {
    pub op: Op,
    /// Rules and costs.
    pub parts: Vec<(usize, u64)>,
    pub id: Option<u64>,
}

/// Something goes wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    pub at: u64,
    pub kind: Kind,
}

/// What goes wrong. Times are in milliseconds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Every packet of a node takes longer.
    Delay {
        node: usize,
        by: u64,
        during: u64,
    },
    /// Its connections are cut: what is on its way is lost.
    Cut {
        node: usize,
    },
    /// The next call of it is done, and then the connection is cut.
    CutAfter {
        node: usize,
    },
    /// Nothing comes through; it is not lost.
    Hole {
        node: usize,
        during: u64,
    },
    /// Connections are cut, and new ones refused.
    Refuse {
        node: usize,
        during: u64,
    },
    /// The server does nothing.
    Stall {
        during: u64,
    },
    /// Each command takes so many microseconds.
    Slow {
        each_us: u64,
        during: u64,
    },
    /// It answers calls with an error.
    Says {
        error: &'static str,
        during: u64,
    },
    /// It may not write.
    NoWrites {
        error: &'static str,
        during: u64,
    },
    ForgetScripts,
    /// It is gone for a while, and comes back with what it had so long before.
    Restart {
        down: u64,
        lost: u64,
    },
    /// It comes back empty.
    RestartEmpty {
        down: u64,
    },
    /// A replica that lagged takes its place, on a host whose clock may be behind. Old connections
    /// lead to what is a replica now.
    Failover {
        lag: u64,
        behind: u64,
    },
    FlushAll,
    Evict {
        rule: usize,
    },
    /// Its clock steps, in milliseconds.
    ClockStep {
        by: i64,
    },
    /// A node is killed, and another takes its place.
    Crash {
        node: usize,
        down: u64,
    },
    /// A node gives back what it holds, and is started anew.
    RestartNode {
        node: usize,
    },
    /// A node does not run.
    Pause {
        node: usize,
        during: u64,
    },
    /// The machine of a node sleeps: its timers stand still.
    Sleep {
        node: usize,
        during: u64,
    },
    /// The limit of a rule is changed, on one node after the other.
    Change {
        rule: usize,
        other: bool,
    },
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:>9.3} ms  {:?}", self.at as f64 / 1000.0, self.kind)
    }
}

impl Plan {
    /// The plan of a seed.
    pub fn new(seed: u64) -> Plan {
        let mut random = Random::new(seed, "plan");
        let nodes = random.between(1, 6);
        let rules: Vec<Rule> = (0..random.between(1, 3)).map(|at| rule(at, &mut random)).collect();
        let calm_at = random.between(800, 2500) * MS;
        let mut plan = Plan {
            seed,
            nodes,
            told_nodes: random.below(3) > 0,
            lease_error_per_mille: random.pick(&[10, 10, 50, 100]),
            split: random.once_in(2),
            boot_us: (0..nodes).map(|_| random.below(5_000_000_000)).collect(),
            calm_at,
            requests: Vec::new(),
            faults: Vec::new(),
            delay_us: random.pick(&[(20, 100), (50, 400), (200, 1200)]),
            rules,
        };
        plan.requests = requests(&plan, Random::new(seed, "requests"));
        plan.faults = faults(&plan, Random::new(seed, "faults"));
        plan
    }
}

const LIMITS: &[(&str, &str)] = &[
    ("300/s window", "200/s window"),
    ("300/s", "450/s"),
    ("2000/s burst 500", "1000/s burst 500"),
    ("1000/s window", "1500/s window"),
    ("20/s", "10/s"),
    ("5/s window", "8/s window"),
    ("20000/s window", "10000/s window"),
    ("20000/s burst 10000", "30000/s burst 8000"),
];

fn rule(at: u64, random: &mut Random) -> Rule {
    let (limit, other) = random.pick(LIMITS);
    let sync = random.pick(&[SyncMode::Direct, SyncMode::Lease, SyncMode::Async]);
    let policy = random.pick(&[
        None,
        None,
        Some(OnFailure::Local),
        Some(OnFailure::Closed),
        Some(OnFailure::Open),
    ]);
    Rule {
        name: format!("r{at}"),
        limits: limit.parse().expect("it is a limit"),
        other: other.parse().expect("it is a limit"),
        policy: Policy { sync, on_failure: policy, ..Policy::default() },
    }
}

impl Rule {
    /// The most it allows in one moment.
    pub fn capacity(&self) -> u64 {
        self.limits.as_slice().first().map_or(1, tidegate::Limit::capacity)
    }

    /// How much passes in a second.
    pub fn per_second(&self) -> u64 {
        self.limits.as_slice().first().map_or(1, |limit| limit.algorithm().amount())
    }
}

/// Requests until the faults end.
fn requests(plan: &Plan, mut random: Random) -> Vec<Request> {
    let cancels = random.once_in(2).then(|| random.between(2, 30));
    let refunds = random.once_in(2).then(|| random.between(5, 60));
    let several = random.once_in(2).then(|| random.between(2, 20));
    let ids = random.once_in(3).then(|| random.between(2, 20));
    let resets = random.once_in(4).then(|| random.between(50, 300));
    let mut requests = Vec::new();
    // Each rule is offered up to three times what it allows, in up to a few hundred requests a
    // second.
    for (at, rule) in plan.rules.iter().enumerate() {
        let offered = rule.per_second() * random.between(1, 12) / 4 + 4;
        let each = offered.div_ceil(random.between(60, 250)).max(1);
        let pause = 1_000_000 * each / offered;
        let favourite = random.once_in(3).then(|| random.below(plan.nodes));
        let mut now = random.below(20 * MS);
        let mut last = now;
        while now < plan.calm_at {
            let node = favourite
                .filter(|_| random.below(8) > 0)
                .unwrap_or_else(|| random.below(plan.nodes));
            let mut ask =
                Ask { op: Op::Check, parts: vec![(at, random.between(1, each * 2 - 1))], id: None };
            if once(&mut random, refunds) {
                ask.op = Op::Refund;
            } else if once(&mut random, resets) {
                ask.op = Op::Reset;
            } else if plan.rules.len() > 1 && once(&mut random, several) {
                let other = (at + 1) % plan.rules.len();
                ask.parts
                    .push((other, random.between(1, plan.rules[other].per_second().div_ceil(100))));
            } else if once(&mut random, ids) {
                ask.id = Some(random.number() | 1);
            } else if random.once_in(60) {
                ask.parts[0].1 = random.pick(&[0, rule.capacity(), rule.capacity() + 1]);
            } else if random.once_in(60) {
                ask.op = Op::Peek;
            }
            let cancel_after = once(&mut random, cancels).then(|| random.below(6 * MS));
            requests.push(Request {
                at: now,
                node: usize::try_from(node).unwrap_or(0),
                ask,
                cancel_after,
            });
            // Now and then many at one moment, and a long pause.
            let burst = random.once_in(3) && now - last < 5 * MS;
            last = now;
            now += if burst { 0 } else { random.around(pause) };
            if random.once_in(150) {
                now += random.between(50, 500) * MS;
            }
        }
    }
    for (at, rule) in plan.rules.iter().enumerate() {
        calm(plan, at, rule, &mut random, &mut requests);
    }
    requests.sort_by_key(|request| request.at);
    requests
}

/// Requests after the last fault: few for two seconds, and then one and a half times as many as may
/// pass.
fn calm(plan: &Plan, at: usize, rule: &Rule, random: &mut Random, requests: &mut Vec<Request>) {
    let (few, many) = (rule.per_second().div_ceil(1000), rule.per_second().div_ceil(100));
    let steady = plan.calm_at + 2000 * MS;
    let mut now = plan.calm_at + random.below(10 * MS);
    while now < steady + 1000 * MS {
        let cost = if now < steady { few } else { many };
        let node = usize::try_from(random.below(plan.nodes)).unwrap_or(0);
        requests.push(Request {
            at: now,
            node,
            ask: Ask { op: Op::Check, parts: vec![(at, cost)], id: None },
            cancel_after: None,
        });
        now += if now < steady {
            random.between(10 * MS, 50 * MS)
        } else {
            1_000_000 * many * 2 / 3 / rule.per_second()
        };
    }
}

fn once(random: &mut Random, times: Option<u64>) -> bool {
    times.is_some_and(|times| random.once_in(times))
}

/// What goes wrong: each kind or not at all, the chosen ones more or less often.
fn faults(plan: &Plan, mut random: Random) -> Vec<Fault> {
    let mut faults = Vec::new();
    for kind in 0..20 {
        if random.once_in(2) {
            continue;
        }
        let often = random.between(1, 4);
        for _ in 0..random.between(1, often) {
            let at = random.below(plan.calm_at);
            let node = usize::try_from(random.below(plan.nodes)).unwrap_or(0);
            let rule = usize::try_from(random.below(plan.rules.len() as u64)).unwrap_or(0);
            let during = random.pick(&[3, 10, 40, 100, 300, 700]);
            let during = random.between(1, during);
            let kind = match kind {
                0 => Kind::Delay { node, by: random.between(1, 12), during },
                1 => Kind::Cut { node },
                2 => Kind::CutAfter { node },
                3 => Kind::Hole { node, during },
                4 => Kind::Refuse { node, during },
                5 => Kind::Stall { during },
                6 => Kind::Slow { each_us: random.between(200, 4000), during },
                7 => Kind::Says { error: random.pick(&[LOADING, BUSY]), during },
                8 => Kind::NoWrites {
                    error: random.pick(&[OOM, MISCONF, crate::redis::READONLY]),
                    during,
                },
                9 => Kind::ForgetScripts,
                10 => Kind::Restart { down: during, lost: random.below(1000) },
                11 => Kind::RestartEmpty { down: during },
                12 => {
                    let behind = random.pick(&[0, 0, 500, 5_000, 600_000, 90_000_000]);
                    Kind::Failover { lag: random.below(300), behind }
                }
                13 => Kind::FlushAll,
                14 => Kind::Evict { rule },
                15 => {
                    let most = random.pick(&[3_000, 3_000, 60_000, 3_500_000, 90_000_000]);
                    let by = i64::try_from(random.between(1, most)).unwrap_or(1);
                    Kind::ClockStep { by: if random.once_in(2) { by } else { -by } }
                }
                16 => Kind::Crash { node, down: during },
                17 => Kind::RestartNode { node },
                18 if random.once_in(2) => Kind::Sleep { node, during: random.between(1, 2000) },
                18 => Kind::Pause { node, during: random.between(1, 2000) },
                _ => Kind::Change { rule, other: random.once_in(2) },
            };
            faults.push(Fault { at, kind });
        }
    }
    faults.sort_by_key(|fault| fault.at);
    faults
}

const LOADING: &str = "LOADING Redis is loading the dataset in memory";
const BUSY: &str =
    "BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.";
const OOM: &str = "OOM command not allowed when used memory > 'maxmemory'.";
const MISCONF: &str = "MISCONF Redis is configured to save RDB snapshots, but it's currently unable to persist to disk.";
