//! Before the first decision: connects, loads the script, and finds out whether decisions can be
//! made at all.

use std::ops::RangeInclusive;
use std::time::Duration;

use tidegate_core::Op;
use tokio::time::Instant;

use super::Redis;
use super::call::Head;
use super::inspect::{Shard, missing_rights, probe, shards};
use super::measure::failure_of;
use tidegate_redis_client::{Failure, NodeId, Outcome};

/// How long one step may take, if a call may not take longer.
const PATIENCE: Duration = Duration::from_secs(5);

/// The ends of the range of slots. A node of a cluster of several has slots of one of them, as a
/// rule.
const FIRST_SLOTS: RangeInclusive<u16> = 0..=1023;
const LAST_SLOTS: RangeInclusive<u16> = 15_360..=16_383;

impl Redis {
    /// Connects to every server that takes writes, loads the script there, and makes one decision
    /// on a key of its own. Optional: it spares the first call the time, and finds at once what no
    /// call could succeed with.
    ///
    /// # Errors
    /// If a server cannot be reached or does not decide. [`Failure::is_permanent`] tells whether
    /// waiting can mend it: not wrong credentials, missing rights, a database that does not exist,
    /// a replica, a certificate that is not trusted, no scripting.
    pub async fn prepare(&self) -> Result<(), Failure> {
        let masters = self.inner.router.masters(self.within()).await?;
        for master in &masters {
            self.run(master, &["SCRIPT", "LOAD", self.inner.script.text()]).await?;
        }
        for slots in self.slots_of_each(&masters).await? {
            self.can_decide(slots).await?;
        }
        // A node of a cluster at a redis:// URL decides about its own slots and refuses the others.
        if !self.inner.router.is_cluster() {
            self.decides(LAST_SLOTS).await?;
        }
        Ok(())
    }

    fn within(&self) -> Instant {
        Instant::now() + self.inner.timeout.max(PATIENCE)
    }

    async fn run(&self, server: &NodeId, words: &[&str]) -> Result<super::Value, Failure> {
        match self.inner.router.command(server, words, self.within()).await {
            Outcome::Applied(value) => Ok(value),
            Outcome::NotApplied(failure) | Outcome::Unknown(failure) => Err(failure),
        }
    }

    /// Some slots of every server that takes writes.
    async fn slots_of_each(&self, masters: &[NodeId]) -> Result<Vec<RangeInclusive<u16>>, Failure> {
        match masters.first() {
            Some(first) if self.inner.router.is_cluster() => {
                let slots = self.run(first, &["CLUSTER", "SLOTS"]).await?;
                Ok(shards(&slots).into_iter().map(|Shard { slots, .. }| slots).collect())
            }
            _ => Ok(vec![FIRST_SLOTS]),
        }
    }

    /// Makes a decision on a key in these slots.
    async fn decides(&self, slots: RangeInclusive<u16>) -> Result<(), Failure> {
        let Some(charge) = probe(&self.inner.keys, &slots) else { return Ok(()) };
        let head = Head { op: Op::Check, id: None, time: self.inner.time(), denied: false };
        let decision =
            self.inner.call(head, &[self.inner.ask(&charge)], &[None], self.within()).await;
        decision.map(|_| ()).map_err(failure_of)
    }

    /// Makes a decision on a key in these slots, and tries every command that decisions need.
    async fn can_decide(&self, slots: RangeInclusive<u16>) -> Result<(), Failure> {
        let Some(charge) = probe(&self.inner.keys, &slots) else { return Ok(()) };
        let asked = self.inner.ask(&charge);
        let head = Head { op: Op::Check, id: None, time: self.inner.time(), denied: false };
        let decision =
            self.inner.call(head, std::slice::from_ref(&asked), &[None], self.within()).await;
        // Last, because it deletes the key. It names what the failed decision does not.
        let rights = self.rights(asked.slot, &asked.name, self.within()).await;
        if let Some(failure) = missing_rights(&rights, &self.pattern()) {
            return Err(failure);
        }
        decision.map(|_| ()).map_err(failure_of)
    }
}
