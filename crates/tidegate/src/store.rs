//! The port between the limiter and whatever keeps its state: a check goes in, a decision comes
//! out.
//!
//! No get, no set, no compare-and-swap: a store is atomic by itself, and brings the clock that
//! judges.

use std::borrow::Cow;
use std::error::Error;
use std::future::Future;
use std::pin::Pin;

use tidegate_core::{Algorithm, Decision, Id, Limit, Limits, Op};

use crate::resilience::Policy;

/// The most charges one check may have.
pub const MAX_CHARGES: usize = 64;
/// The longest key, in bytes.
pub const MAX_KEY_BYTES: usize = 1024;

/// Keeps the state of every key, and the clock that judges it.
pub trait Store: Send + Sync + 'static {
    /// Decides `check` and does what it says, as one atomic step.
    fn decide<'a>(&'a self, check: &'a Check<'a>) -> Deciding<'a>;

    /// Which parts of the store would decide `check`, a bit for each, if parts can fail by
    /// themselves: the servers of a cluster. What stands before the store,
    /// [`Resilient`](crate::resilience::Resilient), keeps apart how they fare.
    fn parts(&self, _check: &Check<'_>) -> u64 {
        1
    }
}

/// What [`Store::decide`] returns.
pub type Deciding<'a> = Pin<Box<dyn Future<Output = Result<Decision, StoreError>> + Send + 'a>>;

/// There is no decision: the request was neither allowed nor denied.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The check itself is not one that can be decided; trying again will not help.
    #[error("invalid check: {0}")]
    Invalid(#[from] InvalidCheck),
    /// The store did not answer; the same check may succeed in a moment.
    #[error("the store did not answer: {0}")]
    Unavailable(#[source] Box<dyn Error + Send + Sync>),
    /// A key holds something that Tidegate did not write.
    #[error("key {key:?} holds something that Tidegate did not write: {reason}")]
    Corrupt {
        /// The key, escaped and shortened.
        key: String,
        /// What was found.
        reason: String,
    },
}

/// Each of these limits once, in the order of a check's charges.
pub(crate) fn distinct(limits: &Limits) -> Vec<&Limit> {
    let mut distinct = Vec::with_capacity(limits.as_slice().len());
    for limit in limits {
        if !distinct.contains(&limit) {
            distinct.push(limit);
        }
    }
    distinct
}

/// What is wrong with a check.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidCheck {
    /// It charges nothing.
    #[error("no charges: expected at least one key with a limit")]
    Empty,
    /// It charges too much at once.
    #[error("{charges} charges: expected at most {MAX_CHARGES}")]
    TooManyCharges {
        /// How many it has.
        charges: usize,
    },
    /// A key is too long to be kept by every store.
    #[error("a key of {bytes} bytes: expected at most {MAX_KEY_BYTES}")]
    KeyTooLong {
        /// How long it is.
        bytes: usize,
    },
    /// `take` grants the same from every charge, so all must ask for the same.
    #[error(
        "take asks for {first} of one limit and {other} of another: expected the same cost everywhere"
    )]
    UnevenTake {
        /// The cost of the first charge.
        first: u64,
        /// The cost of one that differs.
        other: u64,
    },
}

/// One or more charges that are decided together, all or nothing.
///
/// ```
/// use tidegate::{Check, Limits};
/// let per_ip: Limits = "10/s; 120/m".parse()?;
/// let global: Limits = "1000/s".parse()?;
/// let check = Check::new().charge("ip:192.0.2.7", &per_ip, 1).charge("everyone", &global, 1);
/// assert_eq!(check.charges().len(), 3);
/// # Ok::<(), tidegate::ParseError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Check<'a> {
    op: Op,
    charges: Charges<'a>,
    id: Option<Id>,
    /// Of the charges that are added next.
    policy: Policy,
}

/// The charges of a check. Most checks have one, which is held without an allocation.
#[derive(Clone, Debug)]
enum Charges<'a> {
    One(Charge<'a>),
    /// None, or several.
    Many(Vec<Charge<'a>>),
}

impl<'a> Charges<'a> {
    fn as_slice(&self) -> &[Charge<'a>] {
        match self {
            Charges::One(charge) => std::slice::from_ref(charge),
            Charges::Many(charges) => charges,
        }
    }

    fn as_mut_slice(&mut self) -> &mut [Charge<'a>] {
        match self {
            Charges::One(charge) => std::slice::from_mut(charge),
            Charges::Many(charges) => charges,
        }
    }

    fn push(&mut self, charge: Charge<'a>) {
        *self = match std::mem::replace(self, Charges::Many(Vec::new())) {
            Charges::Many(charges) if charges.is_empty() => Charges::One(charge),
            Charges::One(first) => Charges::Many(vec![first, charge]),
            Charges::Many(mut charges) => {
                charges.push(charge);
                Charges::Many(charges)
            }
        };
    }
}

/// One limit on one key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Charge<'a> {
    /// Whose budget.
    pub subject: Subject<'a>,
    /// The limit.
    pub limit: Limit,
    /// Which of the subject's limits it is. Together with the subject it says whose state this is.
    pub position: u16,
    /// How much.
    pub cost: u64,
    /// For `settle`: how much had been charged before.
    pub reserved: u64,
    /// How near to a remote store it may be decided, and what happens without an answer, or without
    /// room.
    pub policy: Policy,
}

/// Whose budget: a key within a scope. Keys of different scopes never meet.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Subject<'a> {
    /// The scope.
    pub scope: Scope<'a>,
    /// The key.
    pub key: Cow<'a, [u8]>,
}

/// Where a key belongs.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Scope<'a> {
    /// Given by the caller together with its limits. Its state is known by key, algorithm and
    /// position, so that two callers who use one key with different algorithms do not disturb each
    /// other.
    AdHoc,
    /// Of a named rule. Its state is known by name, key and position: a rule that changes keeps
    /// what was used.
    Rule(Cow<'a, str>),
}

impl Charge<'_> {
    /// The same charge, with a key and a name of its own.
    pub(crate) fn into_owned(self) -> Charge<'static> {
        let scope = match self.subject.scope {
            Scope::AdHoc => Scope::AdHoc,
            Scope::Rule(name) => Scope::Rule(Cow::Owned(name.into_owned())),
        };
        Charge {
            subject: Subject { scope, key: Cow::Owned(self.subject.key.into_owned()) },
            ..self
        }
    }
}

impl<'a> Check<'a> {
    /// A check of nothing yet.
    #[allow(
        clippy::new_without_default,
        reason = "a check without charges is not one that can be decided"
    )]
    pub fn new() -> Self {
        Self::of(Op::Check)
    }

    /// The same for another operation.
    pub fn of(op: Op) -> Self {
        Check { op, charges: Charges::Many(Vec::new()), id: None, policy: Policy::default() }
    }

    /// Charges that are added from here on are decided on these terms, by what stands before a
    /// remote store ([`Resilient`](crate::resilience::Resilient)) and by a store in memory that has no room.
    pub fn policy(mut self, policy: Policy) -> Self {
        self.policy = policy;
        self
    }

    /// Adds a charge of `cost` for each of `limits` on `key`.
    pub fn charge<K>(
        self,
        key: &'a K,
        limits: impl IntoIterator<Item = &'a Limit>,
        cost: u64,
    ) -> Self
    where
        K: AsRef<[u8]> + ?Sized,
    {
        let subject = Subject { scope: Scope::AdHoc, key: Cow::Borrowed(key.as_ref()) };
        self.charge_subject(subject, limits, cost)
    }

    /// The same under the name of a rule or budget: its state is known by that name and the key,
    /// whatever else is in the check.
    ///
    /// Without a name the state of a limit is known by its position among those of its key, so a
    /// check over two budgets of one key must always list them in the same order. With names each
    /// can also be asked about alone.
    pub fn charge_named<K>(
        self,
        name: &'a str,
        key: &'a K,
        limits: impl IntoIterator<Item = &'a Limit>,
        cost: u64,
    ) -> Self
    where
        K: AsRef<[u8]> + ?Sized,
    {
        let subject =
            Subject { scope: Scope::Rule(Cow::Borrowed(name)), key: Cow::Borrowed(key.as_ref()) };
        self.charge_subject(subject, limits, cost)
    }

    /// Adds a charge of `cost` for each of `limits` on a subject. Equal limits are charged
    /// together.
    pub fn charge_subject(
        mut self,
        subject: Subject<'a>,
        limits: impl IntoIterator<Item = &'a Limit>,
        cost: u64,
    ) -> Self {
        for limit in limits {
            let mut own =
                self.charges.as_mut_slice().iter_mut().filter(|charge| charge.subject == subject);
            if let Some(equal) = own.find(|charge| charge.limit == *limit) {
                // A key charged twice by one limit pays the sum, in one go.
                equal.cost = equal.cost.saturating_add(cost);
                continue;
            }
            let position =
                self.charges.as_slice().iter().filter(|charge| charge.subject == subject).count();
            let position = u16::try_from(position).unwrap_or(u16::MAX);
            let (subject, policy) = (subject.clone(), self.policy);
            self.charges.push(Charge {
                subject,
                limit: *limit,
                position,
                cost,
                reserved: 0,
                policy,
            });
        }
        self
    }

    /// Gives the call an id, by which it can be settled, refunded or released, and under which it
    /// is not taken twice.
    pub fn with_id(mut self, id: Id) -> Self {
        self.id = Some(id);
        self
    }

    /// For a settlement: how much every charge had been reserved at.
    pub fn reserving(mut self, units: u64) -> Self {
        self.charges.as_mut_slice().iter_mut().for_each(|charge| charge.reserved = units);
        self
    }

    /// What to do.
    pub fn op(&self) -> Op {
        self.op
    }

    /// The charges.
    pub fn charges(&self) -> &[Charge<'a>] {
        self.charges.as_slice()
    }

    /// The charge of a plain check: one charge, no id, and the store's own overflow policy.
    pub(crate) fn plain_charge(&self) -> Option<&Charge<'a>> {
        match self.charges.as_slice() {
            [charge]
                if self.op == Op::Check
                    && self.id.is_none()
                    && charge.policy.overflow.is_none() =>
            {
                Some(charge)
            }
            _ => None,
        }
    }

    /// Its id, if it has one.
    pub fn id(&self) -> Option<Id> {
        self.id
    }

    /// The same check, with keys and names of its own.
    pub(crate) fn into_owned(self) -> Check<'static> {
        let charges = match self.charges {
            Charges::One(charge) => Charges::One(charge.into_owned()),
            Charges::Many(charges) => {
                Charges::Many(charges.into_iter().map(Charge::into_owned).collect())
            }
        };
        Check { op: self.op, charges, id: self.id, policy: self.policy }
    }

    /// The same operation without charges on `concurrent` limits: leases are not settled, they end.
    #[doc(hidden)]
    pub fn without_leases(mut self) -> Self {
        let is_lease =
            |charge: &Charge<'_>| matches!(charge.limit.algorithm(), Algorithm::Concurrent(_));
        match &mut self.charges {
            Charges::One(charge) if is_lease(charge) => self.charges = Charges::Many(Vec::new()),
            Charges::One(_) => {}
            Charges::Many(charges) => charges.retain(|charge| !is_lease(charge)),
        }
        self
    }

    /// The same operation on charges that were made elsewhere.
    pub(crate) fn with_charges(&self, charges: Vec<Charge<'a>>) -> Self {
        Check { op: self.op, charges: Charges::Many(charges), id: self.id, policy: self.policy }
    }

    /// The same charges for another operation.
    pub(crate) fn into_op(mut self, op: Op) -> Self {
        self.op = op;
        self
    }

    /// The same without a name of its own.
    pub(crate) fn without_id(mut self) -> Self {
        self.id = None;
        self
    }

    pub(crate) fn charges_mut(&mut self) -> &mut [Charge<'a>] {
        self.charges.as_mut_slice()
    }

    /// Whether any store could decide it.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn validate(&self) -> Result<(), InvalidCheck> {
        let Some(first) = self.charges.as_slice().first() else { return Err(InvalidCheck::Empty) };
        if self.charges.as_slice().len() > MAX_CHARGES {
            return Err(InvalidCheck::TooManyCharges { charges: self.charges.as_slice().len() });
        }
        for charge in self.charges.as_slice() {
            if charge.subject.key.len() > MAX_KEY_BYTES {
                return Err(InvalidCheck::KeyTooLong { bytes: charge.subject.key.len() });
            }
            if self.op == Op::Take && charge.cost != first.cost {
                return Err(InvalidCheck::UnevenTake { first: first.cost, other: charge.cost });
            }
        }
        Ok(())
    }
}
