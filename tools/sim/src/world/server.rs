//! The server: commands one after the other, its clock, and what it loses.

use super::{Event, WALL_US, World};
use crate::check::Failure;
use crate::redis::{Redis, Reply, write};
use crate::sabotage::Sabotage;
use crate::script::{decisions, kept, rule_of};

impl World<'_> {
    pub(super) fn wall(&self) -> u64 {
        WALL_US.saturating_add_signed(self.server.offset_us) + self.now
    }

    pub(super) fn server_works(&mut self) {
        if !self.server.working && !self.server.queue.is_empty() {
            self.server.working = true;
            let at = self.now.max(self.server.free_at).max(self.server.stall_until);
            self.at(at, Event::ServerWorks);
        }
    }

    /// The server does what is next.
    pub(super) fn serve(&mut self) -> Result<(), Failure> {
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
    pub(super) fn execute(
        &mut self,
        conn: usize,
        words: &[Vec<u8>],
    ) -> Result<(Reply, Vec<usize>), Failure> {
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
    pub(super) fn losing(&mut self, what: impl FnOnce(&mut Redis)) {
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

    pub(super) fn step_clock(&mut self, by_us: i64) {
        self.checks.clock_stepped(by_us, self.wall(), self.now);
        self.server.offset_us += by_us;
    }
}
