//! Before the first decision: connects, loads the script, and tests that decisions work.

use std::ops::RangeInclusive;
use std::time::Duration;

use tidegate_core::Op;
use tokio::time::Instant;

use super::Redis;
use super::call::CallHead;
use super::inspect::{SlotRange, failure_of, missing_rights, probe, slot_ranges};
use tidegate_redis_client::{Failure, NodeId, Outcome, Value};

/// The timeout of one step, or that of a call if that is longer.
const PATIENCE: Duration = Duration::from_secs(5);

/// The ends of the range of slots. A node of a cluster usually has slots at one end at most.
const FIRST_SLOTS: RangeInclusive<u16> = 0..=1023;
const LAST_SLOTS: RangeInclusive<u16> = 15_360..=16_383;

impl Redis {
    /// Connects to every server that takes writes, loads the script there, and makes one decision
    /// on a key of its own. Optional: it saves the first call the time, and finds early what would
    /// make every call fail.
    ///
    /// # Errors
    /// If a server cannot be reached or does not decide. [`Failure::is_permanent`] is true if
    /// waiting cannot help: wrong credentials, missing rights, a database that does not exist, a
    /// replica, a certificate that is not trusted, no scripting.
    pub async fn prepare(&self) -> Result<(), Failure> {
        let masters = self.shared.router.masters(self.within()).await?;
        for master in &masters {
            self.run(master, &["SCRIPT", "LOAD", self.shared.script.text()]).await?;
        }
        for slots in self.slots_of_each(&masters).await? {
            self.can_decide(slots).await?;
        }
        // A cluster node at a redis:// URL decides its own slots and refuses the others.
        if !self.shared.router.is_cluster() {
            self.decides(LAST_SLOTS).await?;
        }
        Ok(())
    }

    fn within(&self) -> Instant {
        Instant::now() + self.shared.timeout.max(PATIENCE)
    }

    async fn run(&self, server: &NodeId, words: &[&str]) -> Result<Value, Failure> {
        match self.shared.router.command(server, words, self.within()).await {
            Outcome::Applied(value) => Ok(value),
            Outcome::NotApplied(failure) | Outcome::Unknown(failure) => Err(failure),
        }
    }

    /// Some slots of every server that takes writes.
    async fn slots_of_each(&self, masters: &[NodeId]) -> Result<Vec<RangeInclusive<u16>>, Failure> {
        match masters.first() {
            Some(first) if self.shared.router.is_cluster() => {
                let slots = self.run(first, &["CLUSTER", "SLOTS"]).await?;
                Ok(slot_ranges(&slots).into_iter().map(|SlotRange { slots, .. }| slots).collect())
            }
            _ => Ok(vec![FIRST_SLOTS]),
        }
    }

    /// Makes a decision on a key in these slots.
    async fn decides(&self, slots: RangeInclusive<u16>) -> Result<(), Failure> {
        let Some(charge) = probe(&self.shared.keys, &slots) else { return Ok(()) };
        let head = CallHead { op: Op::Check, id: None, time: self.shared.time(), denied: false };
        let decision =
            self.shared.call(head, &[self.shared.named(&charge)], &[None], self.within()).await;
        decision.map(|_| ()).map_err(failure_of)
    }

    /// Makes a decision on a key in these slots, and runs every command that decisions need.
    async fn can_decide(&self, slots: RangeInclusive<u16>) -> Result<(), Failure> {
        let Some(charge) = probe(&self.shared.keys, &slots) else { return Ok(()) };
        let named = self.shared.named(&charge);
        let head = CallHead { op: Op::Check, id: None, time: self.shared.time(), denied: false };
        let decision =
            self.shared.call(head, std::slice::from_ref(&named), &[None], self.within()).await;
        // Last, because it deletes the key. It names missing rights, which the decision does not.
        let rights = self.rights(named.slot, &named.name, self.within()).await;
        if let Some(failure) = missing_rights(&rights, &self.pattern()) {
            return Err(failure);
        }
        decision.map(|_| ()).map_err(failure_of)
    }
}
