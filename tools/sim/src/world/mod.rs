//! The world: one thread, one clock, one queue of what happens next. It carries bytes between nodes
//! and the server, lets requests come in, and lets things go wrong when the plan says so.

mod events;
mod faults;
mod network;
mod nodes;
mod server;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};
use std::hash::Hasher;
use std::sync::Arc;

use tidegate::resilience::BreakerState;
use tokio::task::AbortHandle;

use crate::check::{Checks, Failure};
use crate::net::SharedPipe;
use crate::node::Node;
use crate::plan::{MS, Plan, Rule};
use crate::random::Random;
use crate::redis::{Client, Redis};
use crate::sabotage::Sabotage;

/// What the server's clock says when the world begins.
const WALL_US: u64 = 1_700_000_000_000_000;
/// How long after the last fault all nodes must be in sync, how long it is watched whether they
/// stay, and the time to end.
const RECOVERY: u64 = 2000 * MS;
const STEADY: u64 = 1000 * MS;
const ENDING: u64 = 300 * MS;

/// What a run came to.
#[derive(Clone, Debug)]
pub struct Outcome {
    pub failure: Option<Failure>,
    /// Of everything that happened.
    pub hash: u64,
    pub answered: u64,
    /// Answers by the store, by leave of it, and alone.
    pub sources: [u64; 3],
    /// What happened, if it was recorded.
    pub timeline: Vec<(u64, String)>,
}

enum Event {
    Request(usize),
    Cancel(usize),
    Fault(usize),
    /// The limit of a rule changes on a node.
    Change {
        node: usize,
        rule: usize,
        other: bool,
    },
    Dialled(usize),
    ToServer {
        conn: usize,
        bytes: Vec<u8>,
    },
    ToClient {
        conn: usize,
        bytes: Vec<u8>,
        executed: Vec<usize>,
        life: u64,
    },
    ServerWorks,
    /// A node that is down or paused goes on.
    NodeUp(usize),
    HoleEnds(usize),
}

/// One connection, as the network and the server see it.
struct Conn {
    node: usize,
    life: u64,
    pipe: SharedPipe,
    alive: bool,
    input: Vec<u8>,
    client: Client,
    /// Nothing overtakes anything on a connection.
    to_server_at: u64,
    to_client_at: u64,
}

/// How a node stands.
struct Place {
    node: Option<Node>,
    life: u64,
    rules: Arc<Vec<Rule>>,
    conns: Vec<usize>,
    inbox: Vec<usize>,
    /// Not before this does it run again.
    stopped_until: u64,
    asleep: bool,
    /// How long it has run, but for pauses.
    ran: u64,
    stepped_at: u64,
    delay: (u64, u64),
    hole_until: u64,
    /// When it has the last of the limits that were changed.
    changed_at: u64,
    /// What came to the hole, in its order: it arrives when that ends, before anything that was
    /// sent later.
    held: Vec<Event>,
    refuse_until: u64,
    cut_after: bool,
    leaving: bool,
}

struct Server {
    queue: VecDeque<(usize, Vec<Vec<u8>>)>,
    working: bool,
    free_at: u64,
    stall_until: u64,
    slow: (u64, u64),
    says: (&'static str, u64),
    no_writes: (&'static str, u64),
    down_until: u64,
    offset_us: i64,
    keys: BTreeMap<usize, Vec<u8>>,
}

pub struct World<'a> {
    plan: &'a Plan,
    redis: &'a mut Redis,
    sabotage: Option<Sabotage>,
    now: u64,
    queue: BinaryHeap<Reverse<(u64, u64)>>,
    events: BTreeMap<u64, Event>,
    next: u64,
    conns: Vec<Conn>,
    places: Vec<Place>,
    server: Server,
    tasks: BTreeMap<usize, AbortHandle>,
    random: Random,
    checks: Checks,
    hash: std::hash::DefaultHasher,
    timeline: Option<Vec<(u64, String)>>,
    calm: bool,
    counted: u64,
}

/// Runs a plan on a server, which is cleared first.
pub fn run(plan: &Plan, redis: &mut Redis, sabotage: Option<Sabotage>, told: bool) -> Outcome {
    redis.clear();
    if sabotage == Some(Sabotage::WaitForTheClock) {
        redis.change_scripts("local ahead = 1000001", "local ahead = 3600000000");
    }
    let mut world = World {
        plan,
        redis,
        sabotage,
        now: 0,
        queue: BinaryHeap::new(),
        events: BTreeMap::new(),
        next: 0,
        conns: Vec::new(),
        places: Vec::new(),
        server: Server {
            queue: VecDeque::new(),
            working: false,
            free_at: 0,
            stall_until: 0,
            slow: (0, 0),
            says: ("", 0),
            no_writes: ("", 0),
            down_until: 0,
            offset_us: 0,
            keys: BTreeMap::new(),
        },
        tasks: BTreeMap::new(),
        random: Random::new(plan.seed, "network"),
        checks: Checks::new(plan),
        hash: std::hash::DefaultHasher::new(),
        timeline: told.then(Vec::new),
        calm: false,
        counted: 0,
    };
    let failure = world.run().err();
    Outcome {
        failure,
        hash: world.hash.finish(),
        answered: world.checks.answered,
        sources: world.checks.sources,
        timeline: world.timeline.unwrap_or_default(),
    }
}

impl World<'_> {
    fn run(&mut self) -> Result<(), Failure> {
        let plan = self.plan;
        for number in 0..plan.nodes {
            let node = Node::start(&self.believed(), number, 0, 0);
            self.places.push(Place {
                node: Some(node),
                life: 0,
                rules: Arc::new(plan.rules.clone()),
                conns: Vec::new(),
                inbox: Vec::new(),
                stopped_until: 0,
                asleep: false,
                ran: 0,
                stepped_at: 0,
                delay: (0, 0),
                hole_until: 0,
                changed_at: 0,
                held: Vec::new(),
                refuse_until: 0,
                cut_after: false,
                leaving: false,
            });
        }
        for (number, request) in plan.requests.iter().enumerate() {
            self.at(request.at, Event::Request(number));
        }
        for (number, fault) in plan.faults.iter().enumerate() {
            self.at(fault.at, Event::Fault(number));
        }
        self.run_until(plan.calm_at)?;
        self.calm_down()?;
        self.run_until(plan.calm_at + RECOVERY)?;
        for (number, place) in self.places.iter().enumerate() {
            let breaker = place.node.as_ref().map(|node| node.stats().breaker);
            if breaker != Some(BreakerState::Closed) {
                let text = format!("node {number}: the breaker is {breaker:?}");
                return Err(Failure {
                    law: "in sync two seconds after the last fault",
                    at: self.now,
                    text,
                });
            }
        }
        self.run_until(plan.calm_at + RECOVERY + STEADY)?;
        self.run_until(self.now + 20 * MS)?;
        for number in 0..self.places.len() {
            if let Some(node) = &self.places[number].node {
                node.close();
            }
            self.step(number)?;
        }
        self.run_until(self.now + ENDING)?;
        // Nodes go on counting each other: a call may just be under way.
        for _ in 0..20 {
            if self
                .places
                .iter()
                .any(|place| place.node.as_ref().is_some_and(|node| node.stats().in_flight > 0))
            {
                self.run_until(self.now + MS)?;
            }
        }
        let now = self.now;
        for (number, place) in self.places.iter().enumerate() {
            let Some(node) = &place.node else { continue };
            if !node.is_closed() {
                return Err(Failure {
                    law: "nothing is left behind",
                    at: now,
                    text: format!("node {number} does not end"),
                });
            }
            self.checks.counted(number, &node.stats(), true, now)?;
        }
        let least: Vec<u64> = plan
            .rules
            .iter()
            .map(|rule| {
                let rates = [&rule.limits, &rule.other]
                    .map(|limits| limits.as_slice()[0].algorithm().amount());
                rates.into_iter().min().unwrap_or(0).min(rule.per_second())
            })
            .collect();
        self.checks.finish(now, STEADY, &least)
    }

    /// The plan as nodes know it.
    fn believed(&self) -> Plan {
        let mut plan = Plan { requests: Vec::new(), faults: Vec::new(), ..self.plan.clone() };
        if self.sabotage == Some(Sabotage::WholeShare) {
            (plan.nodes, plan.told_nodes) = (1, true);
        }
        plan
    }

    fn at(&mut self, at: u64, event: Event) {
        self.queue.push(Reverse((at, self.next)));
        self.events.insert(self.next, event);
        self.next += 1;
    }

    /// Takes down that something has happened.
    fn note(&mut self, numbers: &[u64], text: impl FnOnce() -> String) {
        self.hash.write_u64(self.now);
        numbers.iter().for_each(|number| self.hash.write_u64(*number));
        if let Some(timeline) = &mut self.timeline {
            timeline.push((self.now, text()));
        }
    }

    fn run_until(&mut self, end: u64) -> Result<(), Failure> {
        loop {
            let tick = (self.now / MS + 1) * MS;
            let next = self.queue.peek().map_or(u64::MAX, |Reverse((at, _))| *at);
            if next.min(tick) > end {
                self.now = end;
                return Ok(());
            }
            if next < tick {
                self.now = self.now.max(next);
                let Some(Reverse((_, number))) = self.queue.pop() else { continue };
                let Some(event) = self.events.remove(&number) else { continue };
                self.happens(event)?;
                continue;
            }
            self.now = tick;
            self.tick()?;
        }
    }

    fn tick(&mut self) -> Result<(), Failure> {
        for number in 0..self.places.len() {
            self.step(number)?;
        }
        let (now, places) = (self.now, &self.places);
        self.checks.tick(now, |node| places[node].ran)?;
        if now >= self.counted + 50 * MS {
            self.counted = now;
            for (number, place) in self.places.iter().enumerate() {
                if let Some(node) = &place.node {
                    self.checks.counted(number, &node.stats(), false, now)?;
                }
            }
        }
        Ok(())
    }
}
