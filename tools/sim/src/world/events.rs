//! What happens next: each event of the queue, done.

use std::sync::Arc;

use super::{Event, World};
use crate::check::Failure;
use crate::net::{Phase, happened};
use crate::node::Node;
use crate::redis::parse;
use crate::sabotage::Sabotage;

impl World<'_> {
    pub(super) fn happens(&mut self, event: Event) -> Result<(), Failure> {
        let now = self.now;
        match event {
            Event::Request(number) => self.request(number),
            Event::Cancel(number) => {
                if let Some(task) = self.tasks.remove(&number) {
                    task.abort();
                    self.note(&[2, number as u64], || {
                        format!("the client of request {number} disconnects")
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
}
