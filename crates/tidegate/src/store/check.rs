//! Checks: what a store decides.

use std::borrow::Cow;

use tidegate_core::{Algorithm, Id, Limit, Limits, Op};

use super::policy::Policy;

/// The maximum number of charges in a check.
pub const MAX_CHARGES: usize = 64;
/// The maximum length of a key, in bytes.
pub const MAX_KEY_BYTES: usize = 1024;

/// Why no store can decide a check.
///
/// ```
/// use tidegate::{Check, InvalidCheck};
/// assert_eq!(Check::new().validate(), Err(InvalidCheck::Empty));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidCheck {
    /// The check has no charges.
    #[error("no charges: expected at least one key with a limit")]
    Empty,
    /// The check has too many charges.
    #[error("{charges} charges: expected at most {MAX_CHARGES}")]
    TooManyCharges {
        /// The number of its charges.
        charges: usize,
    },
    /// A key is too long.
    #[error("a key of {bytes} bytes: expected at most {MAX_KEY_BYTES}")]
    KeyTooLong {
        /// The length of the key.
        bytes: usize,
    },
    /// The costs of a `take` differ. A `take` grants the same number of units from every charge.
    #[error(
        "take asks for {first} of one limit and {other} of another: \
         expected the same cost everywhere"
    )]
    UnevenTake {
        /// The cost of the first charge.
        first: u64,
        /// The cost of one that differs.
        other: u64,
    },
}

/// An operation on one or more charges, decided together: all or nothing.
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
    /// The policy of charges that are added from now on.
    policy: Policy,
}

/// The charges of a check. A single charge needs no allocation.
#[derive(Clone, Debug)]
enum Charges<'a> {
    One(Charge<'a>),
    /// No charge, or several.
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

/// One limit on one key, and the units to take.
///
/// ```
/// use tidegate::{Check, Limit};
/// let limit: Limit = "10/s".parse()?;
/// let check = Check::new().charge("user:7", [&limit], 3);
/// let charge = &check.charges()[0];
/// assert_eq!((charge.limit, charge.cost), (limit, 3));
/// # Ok::<(), tidegate::ParseError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Charge<'a> {
    /// The key and its scope.
    pub subject: Subject<'a>,
    /// The limit.
    pub limit: Limit,
    /// The index of the limit among those of the subject. State belongs to subject and position.
    pub position: u16,
    /// The units to take.
    pub cost: u64,
    /// For `settle`: the units that were charged before.
    pub reserved: u64,
    /// What happens if the store cannot decide it as usual.
    pub policy: Policy,
}

/// A key within a scope. Equal keys in different scopes are independent.
///
/// ```
/// use tidegate::{Check, Limit, Scope, Subject};
/// let limit: Limit = "10/s".parse()?;
/// let subject = Subject { scope: Scope::Rule("logins".into()), key: b"user:7".into() };
/// let check = Check::new().charge_subject(subject, [&limit], 1);
/// # Ok::<(), tidegate::ParseError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Subject<'a> {
    /// The scope.
    pub scope: Scope<'a>,
    /// The key.
    pub key: Cow<'a, [u8]>,
}

/// The namespace of a key.
///
/// ```
/// use tidegate::{Limit, Memory, Scope};
/// let (memory, limit): (Memory, Limit) = (Memory::new(), "1/s".parse()?);
/// let scopes = ["logins", "uploads"].map(|name| Scope::Rule(name.into()));
/// let [a, b] = scopes.map(|scope| memory.prepare(&scope, &limit));
/// assert!(a.check("user:7", 1).allowed && b.check("user:7", 1).allowed);
/// # Ok::<(), tidegate::ParseError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Scope<'a> {
    /// The scope of limits without a name. State belongs to key, algorithm and position, so two
    /// callers that use one key with different algorithms are independent.
    AdHoc,
    /// The scope of a named rule. State belongs to name, key and position, so a rule that changes
    /// keeps the usage of its keys.
    Rule(Cow<'a, str>),
}

impl Charge<'_> {
    /// The charge with an owned key and name.
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
    /// Creates a check without charges.
    #[allow(
        clippy::new_without_default,
        reason = "a check without charges is not one that can be decided"
    )]
    pub fn new() -> Self {
        Self::of(Op::Check)
    }

    /// Creates another operation without charges.
    pub fn of(op: Op) -> Self {
        Check { op, charges: Charges::Many(Vec::new()), id: None, policy: Policy::default() }
    }

    /// Sets the policy of charges that are added from now on. The resilience layer
    /// ([`Resilient`](crate::resilience::Resilient)) follows it, and a memory store that is full.
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

    /// Adds a charge of `cost` for each of `limits` on `key` in the scope of a named rule or
    /// budget.
    ///
    /// Without a name, the state of a limit belongs to its position among the limits of its key, so
    /// two budgets of one key must be listed in the same order in every check. With names, each
    /// budget can also be checked separately.
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

    /// Adds a charge of `cost` for each of `limits` on `subject`. A limit that is listed twice gets
    /// one charge of the sum.
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

    /// Sets the id by which the charge can be settled, refunded or released. A check with the id of
    /// an earlier one is not charged again.
    pub fn with_id(mut self, id: Id) -> Self {
        self.id = Some(id);
        self
    }

    /// For `settle`: sets the units at which every charge was reserved.
    pub fn reserving(mut self, units: u64) -> Self {
        self.charges.as_mut_slice().iter_mut().for_each(|charge| charge.reserved = units);
        self
    }

    /// The operation.
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

    /// The id, if there is one.
    pub fn id(&self) -> Option<Id> {
        self.id
    }

    /// The check with owned keys and names.
    pub(crate) fn into_owned(self) -> Check<'static> {
        let charges = match self.charges {
            Charges::One(charge) => Charges::One(charge.into_owned()),
            Charges::Many(charges) => {
                Charges::Many(charges.into_iter().map(Charge::into_owned).collect())
            }
        };
        Check { op: self.op, charges, id: self.id, policy: self.policy }
    }

    /// The check without charges on `concurrent` limits, whose leases are not settled but end.
    /// Hidden because only the server of this workspace needs it.
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

    /// The check with other charges.
    pub(crate) fn with_charges(&self, charges: Vec<Charge<'a>>) -> Self {
        Check { op: self.op, charges: Charges::Many(charges), id: self.id, policy: self.policy }
    }

    /// The check with another operation.
    pub(crate) fn into_op(mut self, op: Op) -> Self {
        self.op = op;
        self
    }

    /// The check without its id.
    pub(crate) fn without_id(mut self) -> Self {
        self.id = None;
        self
    }

    pub(crate) fn charges_mut(&mut self) -> &mut [Charge<'a>] {
        self.charges.as_mut_slice()
    }

    /// Returns an error if no store can decide the check.
    ///
    /// # Errors
    /// Why it cannot be decided.
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

/// The limits without repetitions, in the order of a check's charges.
pub(crate) fn distinct(limits: &Limits) -> Vec<&Limit> {
    let mut distinct = Vec::with_capacity(limits.as_slice().len());
    for limit in limits {
        if !distinct.contains(&limit) {
            distinct.push(limit);
        }
    }
    distinct
}
