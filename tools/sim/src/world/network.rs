//! The network: carries bytes between nodes and the server, late, in pieces, or not at all.

use super::{Conn, Event, World};
use crate::check::Failure;
use crate::net::{Phase, happened};
use crate::redis::Client;

impl World<'_> {
    /// Carries away what a node has written, and sees to the connections it wants.
    pub(super) fn carry(&mut self, number: usize) {
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
    pub(super) fn delay(&mut self, number: usize) -> u64 {
        let (least, most) = self.plan.delay_us;
        let place = &self.places[number];
        let (by, until) = place.delay;
        let more = if self.now < until { by } else { 0 };
        self.random.between(least, most)
            + if more > 0 { self.random.between(more / 2, more) } else { 0 }
    }

    pub(super) fn cut(&mut self, conn: usize) {
        let own = &mut self.conns[conn];
        if own.alive {
            own.alive = false;
            happened(&own.pipe, |pipe| {
                pipe.phase =
                    if pipe.phase == Phase::Dialing { Phase::Refused } else { Phase::Reset }
            });
        }
    }

    pub(super) fn cut_node(&mut self, number: usize) {
        self.places[number].conns.clone().into_iter().for_each(|conn| self.cut(conn));
    }

    pub(super) fn cut_all(&mut self) {
        (0..self.places.len()).for_each(|number| self.cut_node(number));
        self.server.queue.clear();
    }

    /// What was held back arrives, unless another hole has begun meanwhile.
    pub(super) fn hole_ends(&mut self, number: usize) -> Result<(), Failure> {
        let place = &mut self.places[number];
        if self.now < place.hole_until {
            return Ok(());
        }
        std::mem::take(&mut place.held).into_iter().try_for_each(|event| self.happens(event))
    }
}
