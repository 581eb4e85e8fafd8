//! The faults of the plan, and the end of all of them.

use super::{Event, World};
use crate::check::Failure;
use crate::plan::{Kind, MS};
use crate::sabotage::Sabotage;

impl World<'_> {
    pub(super) fn fault(&mut self, kind: &Kind) -> Result<(), Failure> {
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

    /// Nothing goes wrong from here on, and whatever does is over.
    pub(super) fn calm_down(&mut self) -> Result<(), Failure> {
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
}
