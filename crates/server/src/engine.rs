//! The engine: rules over a store. It is the only thing that a protocol calls.
//!
//! Three calls decide. [`Engine::check`] takes limits that the caller brings,
//! [`Engine::check_rules`] the rules that match a request, and `Engine::check_batch` many keys
//! under one limit. Each is counted and logged here, once, whichever protocol made it.
//!
//! All enforced rules that match a request are charged in one call to the store, all or nothing.
//! A rule in shadow mode is charged in a call of its own after they allowed the request, and only
//! peeked at after they denied it. Its verdict is counted and denies nothing.

use std::sync::Arc;
use std::time::Instant;

use tidegate::batch::Prepared;
use tidegate::{
    Check, Decision, Id, LeaseReleaser, Limit, Op, Scope, Source, StoreError, Subject, Verdict,
};

use crate::backend::Backend;
use crate::live::{LiveRules, LiveSettings};
use crate::observe::{Observer, Outcome};
use crate::protocol::Protocol;
use crate::reset::{self, Emptied, InvalidTarget, Target};
use crate::rules::envoy::Domains;
use crate::rules::{Attributes, Budget, HttpRequest, InvalidCost, Match, Mode, Repeated, Rules};
use crate::ruling::{Charged, Ruling, Shadowed};

/// Rules over a store, for one protocol. Cheap to clone; clones share rules, store and settings.
#[derive(Clone, Debug)]
pub struct Engine {
    shared: Arc<EngineState>,
    protocol: Protocol,
}

#[derive(Debug)]
struct EngineState {
    store: Backend,
    rules: LiveRules,
    settings: LiveSettings,
    observer: Observer,
    /// Ends leases, and tries again while the store is unavailable.
    leases: LeaseReleaser,
}

/// Why there is no decision.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// The attribute that a rule reads its cost from is not a valid cost.
    #[error(transparent)]
    Cost(#[from] InvalidCost),
    /// The store has no answer, or the check is not valid.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A rule that matches takes no refunds.
    #[error("rule {0} takes no refunds")]
    NoRefunds(Arc<str>),
    /// A reset names budgets that do not exist.
    #[error(transparent)]
    Target(#[from] InvalidTarget),
}

impl Engine {
    /// These rules over this store, observed by nothing.
    pub fn new(store: Backend, rules: Rules) -> Self {
        Self::with_observer(store, rules, Observer::default())
    }

    /// These rules over this store; `observer` counts and logs decisions.
    pub fn with_observer(store: Backend, rules: Rules, observer: Observer) -> Self {
        let leases = store.lease_releaser();
        let (rules, settings) = (LiveRules::new(rules), LiveSettings::default());
        rules.publish(&store, observer.metrics());
        let shared = Arc::new(EngineState { store, rules, settings, observer, leases });
        Engine { shared, protocol: Protocol::default() }
    }

    /// The same engine for this protocol, under which its decisions are counted.
    pub fn for_protocol(&self, protocol: Protocol) -> Self {
        Engine { shared: Arc::clone(&self.shared), protocol }
    }

    /// The protocol that this engine counts its decisions under.
    pub fn protocol(&self) -> Protocol {
        self.protocol
    }

    /// Counts and logs what happens.
    pub fn observer(&self) -> &Observer {
        &self.shared.observer
    }

    /// The store.
    pub fn store(&self) -> &Backend {
        &self.shared.store
    }

    /// The settings that change without a restart.
    pub fn settings(&self) -> &LiveSettings {
        &self.shared.settings
    }

    /// The rules in force.
    pub fn rules(&self) -> Arc<Rules> {
        self.shared.rules.rules()
    }

    /// Replaces the rules. Usage is kept under the name of each rule.
    pub fn set_rules(&self, rules: Rules) {
        self.shared.rules.set_rules(rules);
        self.shared.rules.publish(&self.shared.store, self.shared.observer.metrics());
    }

    /// The domains of Envoy's rate limit service in force.
    pub fn domains(&self) -> Arc<Domains> {
        self.shared.rules.domains()
    }

    /// Replaces the domains. Usage is kept under the name of each rule.
    pub fn set_domains(&self, domains: Domains) {
        self.shared.rules.set_domains(domains);
        self.shared.rules.publish(&self.shared.store, self.shared.observer.metrics());
    }

    /// Lends domains and rules to a lookup, without a reference count.
    pub(crate) fn with_rules<T>(&self, look_up: impl FnOnce(&Domains, &Rules) -> T) -> T {
        self.shared.rules.with(look_up)
    }

    /// Reads the rules in force without keeping the store open; `None` once the engine is gone.
    pub(crate) fn rules_reader(&self) -> impl Fn() -> Option<Arc<Rules>> + Send + Sync + use<> {
        let shared = Arc::downgrade(&self.shared);
        move || Some(shared.upgrade()?.rules.rules())
    }

    /// Why these attributes match no rule, if they cannot. The reason is also logged.
    pub(crate) fn unknown_attributes(&self, attributes: &[(String, String)]) -> Option<String> {
        let names = attributes.iter().map(|(name, _)| name.as_str());
        let why = self.with_rules(|_, rules| rules.unknown(names))?;
        self.shared.observer.misnamed(self.protocol, &why);
        Some(why)
    }

    /// Checks that a request has at most one of each header and parameter that a rule reads.
    ///
    /// # Errors
    /// The first one that it repeats.
    pub(crate) fn check_repeated(&self, request: &HttpRequest<'_>) -> Result<(), Repeated> {
        let requests = self.shared.settings.requests();
        self.with_rules(|_, rules| request.check_repeated(rules.named(), &requests.headers))
    }

    /// Whether decisions come from another process.
    pub(crate) fn has_remote_store(&self) -> bool {
        !matches!(self.shared.store, Backend::Memory(_))
    }

    /// Decides a check whose limits the caller brings.
    ///
    /// # Errors
    /// If the check is not valid or the store has no answer.
    pub async fn check(&self, check: &Check<'_>) -> Result<Decision, StoreError> {
        let (began, observer) = (self.start_timer(), &self.shared.observer);
        let result = self.decide(check, began.is_some()).await;
        observer.decided(self.protocol, check, &result);
        observer.metrics().protocol_took(self.protocol, began);
        result
    }

    /// The rules that match a request which costs `cost` by itself.
    ///
    /// # Errors
    /// If a cost that is read from an attribute is not valid.
    pub fn matching(
        &self,
        attributes: &(impl Attributes + ?Sized),
        cost: u64,
    ) -> Result<Vec<Match>, InvalidCost> {
        self.with_rules(|_, rules| rules.matching(attributes, cost))
    }

    /// Applies `op` to the budgets of all matches, all or nothing.
    ///
    /// # Errors
    /// If a rule does not allow `op`, or the store has no answer.
    pub async fn check_rules(
        &self,
        op: Op,
        matches: Vec<Match>,
        id: Option<Id>,
    ) -> Result<Ruling, EngineError> {
        let (began, observer) = (self.start_timer(), &self.shared.observer);
        let result = self.rule(op, matches, id, began.is_some()).await;
        match &result {
            Ok(ruling) => observer.ruled(self.protocol, op, ruling),
            Err(EngineError::Store(error)) => observer.failed(self.protocol, error),
            Err(_) => observer.metrics().decided(self.protocol, Outcome::Invalid),
        }
        observer.metrics().protocol_took(self.protocol, began);
        result
    }

    /// Prepares batches of checks that differ only in their keys; `None` if the store is remote.
    pub(crate) fn prepare(&self, scope: &Scope<'_>, limit: &Limit) -> Option<Prepared> {
        let Backend::Memory(memory) = &self.shared.store else { return None };
        Some(memory.prepare(scope, limit))
    }

    /// Decides each key and cost independently, in order, as [`check`](Engine::check) does, at one
    /// reading of the clock, and counts them together. Denials are logged under `rule`.
    #[inline]
    pub(crate) fn check_batch(
        &self,
        prepared: &Prepared,
        rule: &str,
        charges: &[(&[u8], u64)],
        mut answer: impl FnMut(&Verdict),
    ) {
        let observer = &self.shared.observer;
        let began = observer.metrics().clock_of_some(self.protocol, charges.len() as u64);
        let (mut allowed, mut denied) = (0, 0);
        prepared.check_each(charges, |key, verdict: Verdict| {
            if verdict.allowed {
                allowed += 1;
            } else {
                denied += 1;
                observer.denied(self.protocol, rule, key);
            }
            answer(&verdict);
        });
        observer.decided_together(self.protocol, began, allowed, denied);
    }

    /// Settles a reservation at its actual cost. `None` if the rule has only `concurrent` limits,
    /// whose leases end by themselves.
    ///
    /// # Errors
    /// If the store has no answer.
    pub async fn settle(
        &self,
        matched: &Match,
        id: Id,
        cost: u64,
    ) -> Result<Option<Decision>, StoreError> {
        let Some(check) = check_of(Op::Settle, matched, cost) else { return Ok(None) };
        let check = check.without_leases();
        if check.charges().is_empty() {
            return Ok(None);
        }
        let settled = self.decide(&check.reserving(matched.cost).with_id(id), false).await;
        if let Err(error) = &settled {
            self.shared.observer.failed(self.protocol, error);
        }
        settled.map(Some)
    }

    /// Ends the leases that a request holds under this id, in the background. If the store that
    /// granted them is unavailable, the call is repeated until their ttl is over.
    pub(crate) fn release(&self, matched: &Match, id: Id, source: Source) {
        if let Some(check) = check_of(Op::Release, matched, matched.cost) {
            self.shared.leases.release(check.with_id(id), source);
        }
    }

    /// Empties the budgets that `target` names, and returns them.
    ///
    /// The budgets are reset one after the other. After an error some of them may have been reset;
    /// the same call again resets all.
    ///
    /// # Errors
    /// If there are no such budgets, or the store has no answer.
    pub async fn reset(&self, target: &Target) -> Result<Vec<Emptied>, EngineError> {
        let rules = self.rules();
        let found = reset::find(&rules, target)?;
        let mut emptied = Vec::with_capacity(found.len());
        for (rule, given) in found {
            let Some(limits) = reset::longest(&rule) else { continue };
            let key = rule.key_of(given);
            let subject = Subject { scope: Scope::Rule((&*rule.name).into()), key: (&key).into() };
            let check =
                Check::of(Op::Reset).policy(rule.policy()).charge_subject(subject, limits, 0);
            // A reset is never denied.
            let _decision = self.check(&check).await?;
            emptied.push(Emptied::new(&rule, given));
        }
        Ok(emptied)
    }

    /// The decision of these matches if nothing were charged. It is not counted.
    ///
    /// # Errors
    /// If the store has no answer.
    pub(crate) async fn peek(&self, matches: &[Match]) -> Result<Option<Decision>, EngineError> {
        Ok(self.charge(Op::Peek, matches, None, false).await?.0)
    }

    /// The time, if this check is sampled.
    fn start_timer(&self) -> Option<Instant> {
        self.shared.observer.metrics().clock(self.protocol, self.has_remote_store())
    }

    async fn decide(&self, check: &Check<'_>, timed: bool) -> Result<Decision, StoreError> {
        let began = timed.then(Instant::now);
        let result = self.shared.store.decide(check).await;
        if let Ok(decision) = &result
            && decision.source() == Source::Store
        {
            self.shared.observer.metrics().store_took(began);
        }
        result
    }

    async fn rule(
        &self,
        op: Op,
        matches: Vec<Match>,
        id: Option<Id>,
        timed: bool,
    ) -> Result<Ruling, EngineError> {
        let (shadow, enforced): (Vec<Match>, Vec<Match>) =
            matches.into_iter().partition(|matched| matched.rule.mode == Mode::Shadow);
        if let (Op::Refund, None) = (op, id)
            && let Some(matched) = enforced.iter().find(|matched| !matched.rule.refunds)
        {
            return Err(EngineError::NoRefunds(matched.rule.name.clone()));
        }
        let mut ruling = Ruling::before_limits(&enforced);
        // A request that a rule refuses charges nothing; its response still reports the limits.
        let own_op = if ruling.refused_by.is_some() { Op::Peek } else { op };
        (ruling.decision, ruling.charges) = self.charge(own_op, &enforced, id, timed).await?;
        ruling.allowed &= ruling.decision.as_ref().is_none_or(Decision::allowed);
        for matched in shadow {
            let op = if ruling.allowed { op } else { Op::Peek };
            let decision = match self.charge(op, std::slice::from_ref(&matched), id, false).await {
                Ok((decision, _)) => decision,
                Err(error) => {
                    // A failed shadow check must not fail the enforced one, which may have been
                    // charged already.
                    self.shared.observer.failed(self.protocol, &error);
                    continue;
                }
            };
            let allowed =
                matched.budget != Budget::Deny && decision.as_ref().is_none_or(Decision::allowed);
            let decision = decision.map(|decision| decision.with_source(Source::Shadow));
            ruling.shadow.push(Shadowed { rule: matched.rule, allowed, decision });
        }
        Ok(ruling)
    }

    async fn charge(
        &self,
        op: Op,
        matches: &[Match],
        id: Option<Id>,
        timed: bool,
    ) -> Result<(Option<Decision>, Vec<Charged>), StoreError> {
        let mut check = Check::of(op);
        for one in matches {
            if let Budget::Limits(limits) = &one.budget {
                check =
                    check.policy(one.rule.policy()).charge_subject(one.subject(), limits, one.cost);
            }
        }
        if check.charges().is_empty() {
            return Ok((None, Vec::new()));
        }
        if let Some(id) = id {
            check = check.with_id(id);
        }
        let charges = check
            .charges()
            .iter()
            .filter_map(|charge| {
                let own = matches.iter().find(|one| one.subject() == charge.subject)?;
                let (rule, key) = (Arc::clone(&own.rule), own.key.clone());
                Some(Charged { rule, key, limit: charge.limit, cost: charge.cost })
            })
            .collect();
        Ok((Some(self.decide(&check, timed).await?), charges))
    }
}

/// A check of the limits of one match, if it has any.
fn check_of(op: Op, matched: &Match, cost: u64) -> Option<Check<'_>> {
    let Budget::Limits(limits) = &matched.budget else { return None };
    let check = Check::of(op).policy(matched.rule.policy());
    Some(check.charge_subject(matched.subject(), limits, cost))
}
