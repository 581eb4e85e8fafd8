//! The nodes: each runs when its time has come, gets requests, and ends.

use tidegate::Source;

use super::{Event, World};
use crate::check::Failure;
use crate::node::Node;
use crate::plan::MS;
use crate::sabotage::Sabotage;
use crate::script::kept;

impl World<'_> {
    /// Lets a node run, and carries away what it did.
    pub(super) fn step(&mut self, number: usize) -> Result<(), Failure> {
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

    pub(super) fn answered(
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

    pub(super) fn request(&mut self, number: usize) -> Result<(), Failure> {
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

    /// A node ends, as when it is killed; another starts a while later.
    pub(super) fn node_ends(&mut self, number: usize, down_us: u64) {
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
}
