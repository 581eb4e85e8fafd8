//! Leases: units of a budget that this node has taken ahead and spends by itself. A state machine
//! without a clock or a store.
//!
//! A key that is asked about often is given a lease: the store is asked in the background for as
//! many units as the key needs for a moment, and never for more than this node may hold. They are
//! charged there at once, so nobody else can spend them; here they are worth something until they
//! expire. A request that finds none left waits for what is on its way, if anything is; otherwise,
//! or if that is not enough, it goes to the store by itself, as if there were no leases.

use std::collections::VecDeque;
use std::sync::Arc;

use tidegate_core::{Algorithm, Id, Limit, Timestamp, Verdict};
use tokio::sync::Notify;

use super::last_answer::LastAnswer;
use crate::store::Charge;

/// The time over which demand is measured, and for about which units are taken ahead.
const MOMENT_US: u64 = 100_000;
/// Fewer units than this in a moment are not worth a lease.
const LITTLE: u64 = 4;
/// Fewer units than this are asked for when none is left.
const SMALL: u64 = 100;
/// How long a lease lives.
pub(crate) const LIFE_US: u64 = 1_000_000;
/// The end of a window on this machine's clock may be off by this much.
const SLACK_US: u64 = 10_000;
/// A lease that is not spent for so long is given back, and so is one that will expire within this
/// time.
const IDLE_US: u64 = 250_000;
const NEARLY_OVER_US: u64 = 100_000;
/// So many times its part a node may hold that has nobody beside it.
const ALONE: u128 = 5;
/// How long to wait after the store had nothing to give.
const PAUSE_US: u64 = 20_000;

/// What this node holds of one key.
#[derive(Debug)]
pub(crate) struct Lease {
    pub(crate) charge: Charge<'static>,
    limit: u64,
    grants: VecDeque<Grant>,
    /// Units that were asked for and have not been answered.
    asked: u64,
    not_before: Timestamp,
    seen: Option<LastAnswer>,
    moment: Timestamp,
    demand: u64,
    demand_before: u64,
    last_asked: Timestamp,
    last_spent: Timestamp,
    /// Whoever waits for what was asked for.
    news: Arc<Notify>,
}

/// Units that were taken in one call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Grant {
    pub(crate) id: Id,
    pub(crate) left: u64,
    /// How many they were.
    taken: u64,
    expires: Timestamp,
}

impl Grant {
    /// Units that may have been taken and will not be spent.
    pub(crate) fn unknown(id: Id, units: u64) -> Self {
        Grant { id, left: units, taken: units, expires: Timestamp::EPOCH }
    }

    pub(crate) fn can_be_given_back(&self) -> bool {
        self.id != Id::NONE && self.left > 0
    }

    /// Whether nothing of it was spent. Only then it makes no difference whether it is given back
    /// once or twice: of what is known by an id the store gives back no more than there is, but who
    /// says twice that 3 of 5 come back has said that all 5 do.
    pub(crate) fn is_whole(&self) -> bool {
        self.left == self.taken
    }
}

/// The most units one node may hold, so that neither what passes too early nor what is denied in
/// vain is more than a part of the limit.
///
/// Where taking ahead moves something in time, all nodes together may hold that part. Of a window
/// nothing is spent after its end, and of a slow bucket no more drains while a lease lives than
/// that part: there it is only what the *others* hold that is denied in vain. A node that is alone
/// denies nobody in vain, and may hold a few times as much: what is lost when it dies.
pub(crate) fn most(limit: &Limit, error_per_mille: u64, nodes: u64) -> u64 {
    let part = u128::from(limit.capacity()) * u128::from(error_per_mille) / 1000;
    let moves = match limit.algorithm() {
        Algorithm::Window(_) => false,
        Algorithm::Bucket(bucket) => {
            u128::from(LIFE_US) * u128::from(bucket.amount) > part * u128::from(bucket.period)
        }
        _ => true,
    };
    let part = match nodes {
        0 | 1 if !moves => part * ALONE,
        nodes if !moves => part / u128::from(nodes - 1),
        nodes => part / u128::from(nodes.max(1)),
    };
    u64::try_from(part).unwrap_or(u64::MAX).min(limit.capacity())
}

/// Whether units of it can be taken ahead at all.
pub(crate) fn lends(limit: &Limit) -> bool {
    !limit.counts_rejected() && !matches!(limit.algorithm(), Algorithm::Concurrent(_))
}

impl Lease {
    pub(crate) fn new(charge: Charge<'static>, limit: u64, now: Timestamp) -> Self {
        Lease {
            charge,
            limit,
            grants: VecDeque::new(),
            asked: 0,
            not_before: now,
            seen: None,
            moment: now,
            demand: 0,
            demand_before: 0,
            last_asked: now,
            last_spent: now,
            news: Arc::default(),
        }
    }

    /// Whether this is a lease under the same limit.
    pub(crate) fn is_under(&self, limit: u64) -> bool {
        self.limit == limit
    }

    /// Units that can be spent.
    pub(crate) fn held(&self) -> u64 {
        self.grants.iter().map(|grant| grant.left).sum()
    }

    /// Drops what has expired; says how many units that were.
    pub(crate) fn expire(&mut self, now: Timestamp) -> u64 {
        let before = self.held();
        self.grants.retain(|grant| now < grant.expires && grant.left > 0);
        before - self.held()
    }

    /// Spends `cost` if so much is held; says what is told to the client.
    pub(crate) fn spend(&mut self, cost: u64, now: Timestamp) -> Option<Verdict> {
        self.wanted(cost, now);
        if self.held() < cost {
            return None;
        }
        let mut due = cost;
        for grant in &mut self.grants {
            let part = due.min(grant.left);
            (grant.left, due) = (grant.left - part, due - part);
        }
        self.grants.retain(|grant| grant.left > 0);
        self.last_spent = now;
        let (limit, held) = (&self.charge.limit, self.held());
        let seen = self.seen?;
        let remaining = seen.left(limit, now).saturating_add(held).min(limit.capacity());
        Some(Verdict { granted: cost, ..seen.verdict(limit, remaining, 0, now) })
    }

    /// Takes back what was spent a moment ago, because the request was denied elsewhere. It is
    /// worth something until `until`, as it was before; says whether that is still to come.
    pub(crate) fn unspend(&mut self, cost: u64, until: Timestamp, now: Timestamp) -> bool {
        if now >= until {
            return false;
        }
        match self.grants.iter_mut().find(|grant| grant.expires == until) {
            Some(grant) => grant.left += cost,
            // What it was taken from is used up. Nobody can give it back any more, but it can be
            // spent.
            None => self.grants.push_front(Grant {
                id: Id::NONE,
                left: cost,
                taken: cost,
                expires: until,
            }),
        }
        true
    }

    /// Until when what can be spent now can be spent at least.
    pub(crate) fn expires(&self) -> Timestamp {
        self.grants.front().map_or(Timestamp::EPOCH, |grant| grant.expires)
    }

    fn wanted(&mut self, cost: u64, now: Timestamp) {
        self.last_asked = now;
        let passed_us = now.micros_since(self.moment);
        if passed_us >= MOMENT_US {
            self.demand_before = if passed_us < 2 * MOMENT_US { self.demand } else { 0 };
            (self.moment, self.demand) = (now, 0);
        }
        self.demand = self.demand.saturating_add(cost);
    }

    /// How many units to ask the store for, if it is time; `most` may be held.
    pub(crate) fn ask(&mut self, most: u64, now: Timestamp) -> Option<u64> {
        let demand = self.demand.max(self.demand_before);
        if demand < LITTLE || now < self.not_before {
            return None;
        }
        // Enough for two moments; asked for when half of it is gone, so that it does not run dry
        // meanwhile, and again when half of what is on its way will be. A small one would be gone
        // anyway before more comes: then each call brings as much as may be held. What is on its
        // way counts as held: there it may be charged already.
        let wanted = demand.saturating_mul(2).min(most);
        let (held, low) =
            (self.held().saturating_add(self.asked), if wanted < SMALL { 0 } else { wanted / 2 });
        if wanted < 2 || held > low {
            return None;
        }
        let units = wanted - held;
        self.asked += units;
        Some(units)
    }

    /// For whoever would rather wait for what was asked for than ask again.
    pub(crate) fn news(&self) -> Option<Arc<Notify>> {
        (self.asked > 0).then(|| Arc::clone(&self.news))
    }

    /// The store has answered what was asked for: `asked` units.
    pub(crate) fn granted(&mut self, id: Id, asked: u64, units: u64, seen: LastAnswer) {
        self.asked = self.asked.saturating_sub(asked);
        self.news.notify_waiters();
        self.seen = Some(seen);
        if units == 0 {
            self.not_before = seen.answered.after_micros(PAUSE_US);
            return;
        }
        // From the moment the question was sent: the store charged it later than that.
        let mut expires = seen.sent.after_micros(LIFE_US);
        if let Algorithm::Window(_) = self.charge.limit.algorithm() {
            // What was taken from one window is not spent in the next.
            let end = seen.reset_at().as_micros().saturating_sub(SLACK_US);
            expires = expires.min(Timestamp::from_micros(end));
        }
        self.grants.push_back(Grant { id, left: units, taken: units, expires });
        self.last_spent = seen.answered;
    }

    /// There was no answer to what was asked for: `asked` units.
    pub(crate) fn not_granted(&mut self, asked: u64, now: Timestamp) {
        self.asked = self.asked.saturating_sub(asked);
        self.news.notify_waiters();
        self.not_before = now.after_micros(PAUSE_US);
    }

    /// What should be given back now; all of it, if `all`.
    pub(crate) fn returned(&mut self, all: bool, now: Timestamp) -> Vec<Grant> {
        let idle = all || now.micros_since(self.last_spent) >= IDLE_US;
        let over = |grant: &Grant| idle || grant.expires.micros_since(now) <= NEARLY_OVER_US;
        let back = self.grants.iter().copied().filter(over).collect();
        self.grants.retain(|grant| !over(grant));
        back
    }

    /// Whether nobody would miss it.
    pub(crate) fn is_idle(&self, now: Timestamp) -> bool {
        self.grants.is_empty()
            && self.asked == 0
            && now.micros_since(self.last_asked) >= 10 * LIFE_US
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_may_be_held_follows_from_what_it_can_do_wrong() {
        for (limit, nodes, expected) in [
            ("2000/h window", 1, 100),
            ("2000/h window", 2, 20),
            ("4000/h window", 2, 40),
            ("4000/h window", 5, 10),
            ("2000/h", 1, 100),
            ("4000/h", 2, 40),
            // So fast that a lease moves more than its part in time.
            ("2000/s", 1, 20),
            ("4000/s", 2, 20),
            ("4000/99s", 2, 20),
            ("4000/100s", 2, 40),
            ("2000/h sliding step 1m", 1, 20),
            ("4000/h log", 2, 20),
            ("10/h window", 1, 0),
        ] {
            assert_eq!(most(&limit.parse().unwrap(), 10, nodes), expected, "{limit} over {nodes}");
        }
    }

    /// What is held and what is on its way are never more than may be held, however the answers
    /// come.
    #[test]
    fn what_is_on_its_way_counts_as_held() {
        let limit: Limit = "1000000/h window".parse().unwrap();
        let limits: tidegate_core::Limits = "1000000/h window".parse().unwrap();
        let check = crate::store::Check::new().charge("k", &limits, 1);
        let charge = check.charges()[0].clone().into_owned();
        let most = most(&limit, 1, 2);
        assert_eq!(most, 1000);
        let mut now = Timestamp::from_secs(1);
        let mut lease = Lease::new(charge, 1, now);
        let (mut on_its_way, mut random) = (VecDeque::new(), 1_u64);
        let (mut calls, mut spent, mut at_once) = (0, 0, 0);
        for _ in 0..100_000 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            now = now.after_micros(random >> 62);
            spent += u64::from(lease.spend(1, now).is_some());
            if let Some(units) = lease.ask(most, now) {
                on_its_way.push_back(units);
                calls += 1;
            }
            at_once = at_once.max(on_its_way.len());
            assert!(lease.held() + on_its_way.iter().sum::<u64>() <= most);
            if (random >> 32).is_multiple_of(100)
                && let Some(units) = on_its_way.pop_front()
            {
                let verdict = Verdict {
                    remaining: 1000,
                    reset_after_us: 1_000_000_000,
                    ..Verdict::default()
                };
                lease.granted(Id(calls), units, units, LastAnswer::new(1, &verdict, now, now, now));
            }
        }
        assert!(at_once >= 2, "more is asked for before the last has come");
        assert!(spent > 90_000, "{spent} were spent in {calls} calls");
    }
}
