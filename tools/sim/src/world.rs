//! The world: one thread, one clock, one queue of what happens next. It carries bytes between nodes
//! and the server, lets requests come in, and lets things go wrong when the plan says so.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};
use std::hash::Hasher;
use std::sync::Arc;

use tidegate::resilience::BreakerState;
use tidegate::Source;
use tokio::task::AbortHandle;

use crate::check::{Checks, Failure};
use crate::net::{Phase, SharedPipe, happened};
use crate::node::Node;
use crate::plan::{Kind, MS, Plan, Rule};
use crate::random::Random;
use crate::redis::{Client, Redis, Reply, parse, write};
use crate::sabotage::Sabotage;
use crate::script::{decisions, kept, rule_of};

/// What the server's clock says when the world begins.
const WALL_US: u64 = 1_700_000_000_000_000;
/// How long after the last fault everybody must be in sync, how long it is watched whether they
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
    /// What happened, if it was to be told.
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

    /// Lets a node run, and carries away what it did.
    fn step(&mut self, number: usize) -> Result<(), Failure> {
        let now = self.now;
        let place = &mut self.places[number];
        let Some(node) = &mut place.node else { return Ok(()) };
        if now < place.stopped_until {
            return Ok(());
        }
        place.ran += now - place.stepped_at;
        place.stepped_at = now;
        node.step(now);
        for (request, answer) in node.answers() {
            self.answered(number, request, &answer)?;
        }
        self.carry(number);
        let place = &mut self.places[number];
        if place.leaving && place.node.as_ref().is_some_and(Node::is_closed) {
            self.node_ends(number, 0);
        }
        Ok(())
    }

    fn answered(
        &mut self,
        number: usize,
        request: usize,
        answer: &crate::node::Answer,
    ) -> Result<(), Failure> {
        let now = self.now;
        let wall = self.wall();
        let (source, allowed) = match answer {
            Ok(decision) => (decision.source() as u64, u64::from(decision.allowed())),
            Err(_) => (9, 9),
        };
        if self.sabotage == Some(Sabotage::LoseAnswers) && request % 500 == 7 {
            return Ok(());
        }
        self.tasks.remove(&request);
        self.note(&[1, number as u64, request as u64, source, allowed], || match answer {
            Ok(decision) => {
                let said = if decision.allowed() { "passes" } else { "denied" };
                format!(
                    "node {number}: request {request} {said} ({:?}), {} left",
                    decision.source(),
                    decision.remaining()
                )
            }
            Err(error) => format!("node {number}: request {request} fails: {error}"),
        });
        let changed;
        let answer = match (self.sabotage, answer) {
            (Some(Sabotage::HideFallback), Ok(decision))
                if decision.source() == Source::Fallback =>
            {
                changed = Ok(decision.clone().with_source(Source::Store));
                &changed
            }
            _ => answer,
        };
        let Some(node) = &self.places[number].node else { return Ok(()) };
        let (redis, keys, rules) = (&*self.redis, &self.server.keys, &self.places[number].rules);
        let used = |rule: usize| {
            let mut data = redis.data();
            data.wall_us = wall;
            let entry = data.live(keys.get(&rule)?)?;
            Some(kept(&entry.value, wall, rules[rule].limits.as_slice().first())?.used(wall))
        };
        self.checks.answer(request, answer, now, node.clock_at(now), wall, used, || node.stats())
    }

    /// Carries away what a node has written, and sees to the connections it wants.
    fn carry(&mut self, number: usize) {
        let Some(node) = &self.places[number].node else { return };
        for pipe in node.dialled() {
            let conn = self.conns.len();
            let (at, client) = (self.now, Client::default());
            let life = self.places[number].life;
            self.conns.push(Conn {
                node: number,
                life,
                pipe,
                alive: true,
                input: Vec::new(),
                client,
                to_server_at: at,
                to_client_at: at,
            });
            self.places[number].conns.push(conn);
            let arrives = self.now + self.delay(number);
            self.at(arrives, Event::Dialled(conn));
        }
        let mut at = 0;
        while let Some(&conn) = self.places[number].conns.get(at) {
            at += 1;
            let (bytes, dropped) = {
                let mut pipe = self.conns[conn].pipe.lock();
                (std::mem::take(&mut pipe.outbox), pipe.dropped)
            };
            if !bytes.is_empty() && self.conns[conn].alive {
                let arrives = (self.now + self.delay(number)).max(self.conns[conn].to_server_at);
                self.conns[conn].to_server_at = arrives;
                self.at(arrives, Event::ToServer { conn, bytes });
            }
            if dropped || !self.conns[conn].alive {
                self.conns[conn].alive = false;
                at -= 1;
                self.places[number].conns.remove(at);
            }
        }
    }

    /// How long something takes on its way from or to a node.
    fn delay(&mut self, number: usize) -> u64 {
        let (least, most) = self.plan.delay_us;
        let place = &self.places[number];
        let (by, until) = place.delay;
        let more = if self.now < until { by } else { 0 };
        self.random.between(least, most)
            + if more > 0 { self.random.between(more / 2, more) } else { 0 }
    }

    fn wall(&self) -> u64 {
        WALL_US.saturating_add_signed(self.server.offset_us) + self.now
    }

    fn cut(&mut self, conn: usize) {
        let own = &mut self.conns[conn];
        if own.alive {
            own.alive = false;
            happened(&own.pipe, |pipe| {
                pipe.phase =
                    if pipe.phase == Phase::Dialing { Phase::Refused } else { Phase::Reset }
            });
        }
    }

    fn cut_node(&mut self, number: usize) {
        self.places[number].conns.clone().into_iter().for_each(|conn| self.cut(conn));
    }

    fn cut_all(&mut self) {
        (0..self.places.len()).for_each(|number| self.cut_node(number));
        self.server.queue.clear();
    }

    fn happens(&mut self, event: Event) -> Result<(), Failure> {
        let now = self.now;
        match event {
            Event::Request(number) => self.request(number),
            Event::Cancel(number) => {
                if let Some(task) = self.tasks.remove(&number) {
                    task.abort();
                    self.note(&[2, number as u64], || {
                        format!("the client of request {number} goes away")
                    });
                    self.checks.cancelled(number, now);
                    let node = self.plan.requests[number].node;
                    self.places[node].inbox.retain(|waiting| *waiting != number);
                    return self.step(node);
                }
                Ok(())
            }
            Event::HoleEnds(number) => self.hole_ends(number),
            Event::Fault(number) => self.fault(&self.plan.faults[number].kind.clone()),
            Event::Change { node, rule, other } => {
                let place = &mut self.places[node];
                let of = &self.plan.rules[rule];
                Arc::make_mut(&mut place.rules)[rule].limits =
                    if other { of.other.clone() } else { of.limits.clone() };
                self.checks.limit_changed(rule, now);
                Ok(())
            }
            Event::Dialled(conn) => {
                let number = self.conns[conn].node;
                let place = &mut self.places[number];
                if now < place.hole_until {
                    place.held.push(Event::Dialled(conn));
                    return Ok(());
                }
                let refused = now < place.refuse_until || now < self.server.down_until;
                if !self.conns[conn].alive {
                    return Ok(());
                }
                self.conns[conn].alive = !refused;
                self.note(&[3, conn as u64, u64::from(refused)], || {
                    format!(
                        "node {number}: connection {conn} {}",
                        if refused { "is refused" } else { "is made" }
                    )
                });
                happened(&self.conns[conn].pipe, |pipe| {
                    pipe.phase = if refused { Phase::Refused } else { Phase::Up }
                });
                self.step(number)
            }
            Event::ToServer { conn, bytes } => {
                let number = self.conns[conn].node;
                let place = &mut self.places[number];
                if now < place.hole_until {
                    place.held.push(Event::ToServer { conn, bytes });
                    return Ok(());
                }
                // What was on its way when the client closed arrives all the same; what was cut
                // does not.
                if self.conns[conn].pipe.lock().phase == Phase::Reset {
                    return Ok(());
                }
                let own = &mut self.conns[conn];
                own.input.extend_from_slice(&bytes);
                let mut commands = Vec::new();
                while let Some((words, length)) = parse(&own.input) {
                    own.input.drain(..length);
                    commands.push((conn, words));
                }
                self.server.queue.extend(commands);
                self.server_works();
                Ok(())
            }
            Event::ToClient { conn, bytes, executed, life } => {
                let number = self.conns[conn].node;
                let place = &mut self.places[number];
                if now < place.hole_until {
                    place.held.push(Event::ToClient { conn, bytes, executed, life });
                    return Ok(());
                }
                if !self.conns[conn].alive || self.places[number].life != life {
                    return Ok(());
                }
                for executed in executed {
                    self.checks.delivered(number, executed, now);
                }
                happened(&self.conns[conn].pipe, |pipe| pipe.inbox.extend_from_slice(&bytes));
                self.step(number)
            }
            Event::ServerWorks => {
                self.server.working = false;
                self.serve()
            }
            Event::NodeUp(number) => {
                let place = &mut self.places[number];
                if now < place.stopped_until {
                    return Ok(());
                }
                if place.node.is_none() {
                    self.note(&[4, number as u64], || format!("node {number} starts"));
                    let node =
                        Node::start(&self.believed(), number as u64, self.places[number].life, now);
                    let place = &mut self.places[number];
                    (place.node, place.stepped_at) = (Some(node), now);
                } else {
                    self.note(&[5, number as u64], || format!("node {number} goes on"));
                    let place = &mut self.places[number];
                    place.stepped_at = now;
                    let asleep = std::mem::take(&mut place.asleep);
                    if let Some(node) = &mut place.node {
                        if self.sabotage == Some(Sabotage::StoppedClock) {
                            node.clock_stood_until(now);
                        }
                        if asleep {
                            node.slept_until(now);
                        }
                    }
                }
                let waiting = std::mem::take(&mut self.places[number].inbox);
                for request in waiting {
                    self.request(request)?;
                }
                self.step(number)
            }
        }
    }

    fn request(&mut self, number: usize) -> Result<(), Failure> {
        let request = &self.plan.requests[number];
        let now = self.now;
        let place = &mut self.places[request.node];
        if now < place.stopped_until && place.node.is_some() {
            place.inbox.push(number); // it waits where connections wait to be accepted
            return Ok(());
        }
        let Some(node) = &place.node else { return Ok(()) };
        if place.leaving {
            return Ok(());
        }
        let Some(task) = node.ask(number, &request.ask, &place.rules) else { return Ok(()) };
        self.tasks.insert(number, task);
        self.checks.asked(
            number,
            request.node,
            &request.ask,
            &place.rules,
            now,
            place.ran + (now - place.stepped_at),
        );
        self.note(&[6, number as u64], || {
            format!("node {}: request {number} {:?}", request.node, request.ask)
        });
        if let Some(after) = request.cancel_after {
            self.at(now + after, Event::Cancel(number));
        }
        self.step(request.node)
    }

    fn server_works(&mut self) {
        if !self.server.working && !self.server.queue.is_empty() {
            self.server.working = true;
            let at = self.now.max(self.server.free_at).max(self.server.stall_until);
            self.at(at, Event::ServerWorks);
        }
    }

    /// The server does what is next.
    fn serve(&mut self) -> Result<(), Failure> {
        let now = self.now;
        if now < self.server.stall_until {
            self.server_works();
            return Ok(());
        }
        let Some((conn, words)) = self.server.queue.pop_front() else { return Ok(()) };
        let number = self.conns[conn].node;
        let (each, until) = self.server.slow;
        let took = self.random.between(10, 60) + if now < until { each } else { 0 };
        self.server.free_at = now + took;
        let (reply, executed) = self.execute(conn, &words)?;
        let place = &mut self.places[number];
        if !executed.is_empty() && std::mem::take(&mut place.cut_after) {
            self.note(&[7, conn as u64], || {
                format!("node {number}: connection {conn} is cut after the call was done")
            });
            self.cut(conn);
            if self.sabotage == Some(Sabotage::Replay) {
                self.execute(conn, &words)?;
            }
            self.server_works();
            return self.step(number);
        }
        let mut bytes = Vec::new();
        write(&reply, &self.conns[conn].client, &mut bytes);
        let life = self.conns[conn].life;
        let mut arrives = (now + took + self.delay(number)).max(self.conns[conn].to_client_at);
        if self.plan.split && bytes.len() > 1 && self.random.once_in(3) {
            let at = usize::try_from(self.random.between(1, bytes.len() as u64 - 1)).unwrap_or(1);
            let rest = bytes.split_off(at);
            self.at(
                arrives,
                Event::ToClient {
                    conn,
                    bytes: std::mem::replace(&mut bytes, rest),
                    executed: Vec::new(),
                    life,
                },
            );
            arrives += self.random.below(300);
        }
        self.conns[conn].to_client_at = arrives;
        self.at(arrives, Event::ToClient { conn, bytes, executed, life });
        self.server_works();
        Ok(())
    }

    /// Executes a command. Says which decisions were made by it.
    fn execute(&mut self, conn: usize, words: &[Vec<u8>]) -> Result<(Reply, Vec<usize>), Failure> {
        let now = self.now;
        let wall = self.wall();
        let number = self.conns[conn].node;
        self.redis.set_time(wall, now);
        self.redis.data().no_writes =
            (now < self.server.no_writes.1).then_some(self.server.no_writes.0);
        let name = words.first().map(|word| word.to_ascii_uppercase()).unwrap_or_default();
        let script = name.starts_with(b"EVAL");
        if now < self.server.says.1 && (script || self.server.says.0.starts_with("LOADING")) {
            let error = self.server.says.0;
            self.note(&[8, number as u64], || format!("server: to node {number}: {error}"));
            return Ok((Reply::Error(error.into()), Vec::new()));
        }
        let forgets = self.sabotage == Some(Sabotage::ForgetWrites) && self.random.once_in(20);
        let before = forgets.then(|| self.redis.data().entries.clone());
        let reply = self.redis.command(&mut self.conns[conn].client, words);
        if let Some(before) = before {
            self.redis.data().entries = before;
        }
        let answer = match &reply {
            Reply::Bulk(answer) if script => answer,
            Reply::Error(error) => {
                self.note(&[8, number as u64], || format!("server: to node {number}: {error}"));
                return Ok((reply, Vec::new()));
            }
            _ => return Ok((reply, Vec::new())),
        };
        let Some(decisions) = decisions(words, answer) else {
            let text = format!("a call of node {number} was not understood: {words:?}");
            return Err(Failure { law: "an observer understands every call", at: now, text });
        };
        let mut executed = Vec::new();
        for done in decisions {
            for charge in &done.charges {
                if let Some(rule) = rule_of(&charge.key) {
                    self.server.keys.entry(rule).or_insert_with(|| charge.key.clone());
                }
                let numbers = [
                    10,
                    number as u64,
                    u64::from(done.op),
                    charge.cost,
                    charge.granted,
                    u64::from(done.allowed),
                ];
                self.note(&numbers, || {
                    let op = char::from(done.op);
                    let key = String::from_utf8_lossy(&charge.key)
                        .split_once('}')
                        .map_or(String::new(), |(_, name)| name.into());
                    format!(
                        "server: node {number} {op} {key} {} -> {}, {} units",
                        charge.cost, done.allowed, charge.granted
                    )
                });
            }
            let lives = self.conns[conn].life == self.places[number].life;
            executed.push(self.checks.executed(number, lives, done, now)?);
        }
        Ok((reply, executed))
    }

    /// Does something to what the server keeps, and tells how much of each rule was lost by it.
    fn losing(&mut self, what: impl FnOnce(&mut Redis)) {
        let wall = self.wall();
        self.redis.set_time(wall, self.now);
        let keys: Vec<(usize, Vec<u8>)> =
            self.server.keys.iter().map(|(rule, key)| (*rule, key.clone())).collect();
        let used = |redis: &Redis, key: &[u8]| {
            let mut data = redis.data();
            data.live(key)
                .and_then(|entry| kept(&entry.value, wall, None))
                .map_or(0.0, |kept| kept.used(wall))
        };
        let before: Vec<f64> = keys.iter().map(|(_, key)| used(self.redis, key)).collect();
        what(self.redis);
        for ((rule, key), before) in keys.iter().zip(before) {
            let lost = (before - used(self.redis, key)).max(0.0);
            self.checks.lost(*rule, lost, self.now);
        }
    }

    fn fault(&mut self, kind: &Kind) -> Result<(), Failure> {
        let now = self.now;
        self.note(&[11], || format!("FAULT {kind:?}"));
        match *kind {
            Kind::Delay { node, by, during } => {
                self.places[node].delay = (by * MS, now + during * MS)
            }
            Kind::Cut { node } => {
                self.cut_node(node);
                return self.step(node);
            }
            Kind::CutAfter { node } => self.places[node].cut_after = true,
            Kind::Hole { node, during } => {
                self.places[node].hole_until = now + during * MS;
                self.at(now + during * MS, Event::HoleEnds(node));
            }
            Kind::Refuse { node, during } => {
                self.places[node].refuse_until = now + during * MS;
                self.cut_node(node);
                return self.step(node);
            }
            Kind::Stall { during } => self.server.stall_until = now + during * MS,
            Kind::Slow { each_us, during } => self.server.slow = (each_us, now + during * MS),
            Kind::Says { error, during } => self.server.says = (error, now + during * MS),
            Kind::NoWrites { error, during } => self.server.no_writes = (error, now + during * MS),
            Kind::ForgetScripts => self.redis.forget_scripts(),
            Kind::Restart { down, lost } => {
                self.losing(|redis| redis.data().roll_back(lost * MS));
                self.redis.forget_scripts();
                self.server.down_until = now + down * MS;
                self.cut_all();
            }
            Kind::RestartEmpty { down } => {
                self.losing(|redis| redis.data().flush());
                self.redis.forget_scripts();
                self.server.down_until = now + down * MS;
                self.cut_all();
            }
            Kind::Failover { lag, behind } => {
                self.losing(|redis| redis.data().roll_back(lag * MS));
                if behind > 0 {
                    self.step_clock(-i64::try_from(behind * MS).unwrap_or(0));
                }
                self.conns
                    .iter_mut()
                    .filter(|conn| conn.alive)
                    .for_each(|conn| conn.client.replica = true);
            }
            Kind::FlushAll => self.losing(|redis| redis.data().flush()),
            Kind::Evict { rule } => {
                if let Some(key) = self.server.keys.get(&rule).cloned() {
                    self.losing(|redis| redis.data().evict(&key));
                }
            }
            Kind::ClockStep { by } => self.step_clock(by * 1000),
            Kind::Crash { node, down } => self.node_ends(node, down * MS),
            Kind::RestartNode { node } => {
                let place = &mut self.places[node];
                if now >= place.stopped_until
                    && let Some(running) = &place.node
                {
                    running.close();
                    place.leaving = true;
                    return self.step(node);
                }
            }
            Kind::Pause { node, during } | Kind::Sleep { node, during } => {
                let place = &mut self.places[node];
                if place.node.is_some() && now >= place.stopped_until {
                    place.asleep = matches!(kind, Kind::Sleep { .. });
                    // On the grain of its timers.
                    let until = (now + during * MS) / MS * MS;
                    if until > now {
                        place.stopped_until = until;
                        self.at(until, Event::NodeUp(node));
                    }
                }
            }
            Kind::Change { rule, other } => {
                for node in 0..self.places.len() {
                    // Sooner or later, but never before what came first: in the end all nodes have
                    // the same.
                    let at =
                        (now + self.random.below(100 * MS)).max(self.places[node].changed_at + 1);
                    self.places[node].changed_at = at;
                    self.at(at, Event::Change { node, rule, other });
                }
            }
        }
        Ok(())
    }

    fn step_clock(&mut self, by_us: i64) {
        self.checks.clock_stepped(by_us, self.wall(), self.now);
        self.server.offset_us += by_us;
    }

    /// A node ends, as when it is killed; another starts a while later.
    fn node_ends(&mut self, number: usize, down_us: u64) {
        self.cut_node(number);
        let place = &mut self.places[number];
        if place.node.take().is_none() {
            return;
        }
        place.life += 1;
        (place.leaving, place.asleep, place.cut_after) = (false, false, false);
        place.inbox.clear();
        place.conns.clear();
        let up = (self.now + down_us).div_ceil(MS) * MS;
        place.stopped_until = up;
        self.checks.ended(number);
        let requests = &self.plan.requests;
        self.tasks.retain(|request, _| requests[*request].node != number);
        self.note(&[12, number as u64], || format!("node {number} is gone"));
        self.at(up, Event::NodeUp(number));
    }

    /// Nothing goes wrong from here on, and whatever does is over.
    fn calm_down(&mut self) -> Result<(), Failure> {
        let now = self.now;
        self.note(&[13], || "all faults end".into());
        self.calm = true;
        let held = self.sabotage == Some(Sabotage::LeaveAHole);
        for (number, place) in self.places.iter_mut().enumerate() {
            place.delay = (0, 0);
            place.hole_until =
                if held && number == 0 && place.hole_until > now { u64::MAX / 2 } else { now };
            (place.refuse_until, place.cut_after) = (now, false);
            place.stopped_until = place.stopped_until.min(now);
        }
        let server = &mut self.server;
        (server.stall_until, server.slow.1, server.says.1, server.no_writes.1, server.down_until) =
            (now, now, now, now, now);
        for number in 0..self.places.len() {
            self.at(now, Event::NodeUp(number));
            self.hole_ends(number)?;
        }
        Ok(())
    }

    /// What was held back arrives, unless another hole has begun meanwhile.
    fn hole_ends(&mut self, number: usize) -> Result<(), Failure> {
        let place = &mut self.places[number];
        if self.now < place.hole_until {
            return Ok(());
        }
        std::mem::take(&mut place.held).into_iter().try_for_each(|event| self.happens(event))
    }
}
