//! The engine: what every listener asks. It holds the rules and the store, and is the only place
//! where the two meet.
//!
//! All rules that match a request are charged in one call, all or nothing. A rule in shadow mode is
//! asked by itself, after the others have let the request pass: it counts what it would have
//! counted if it were enforced, and denies nothing.

use std::sync::Arc;
use std::time::Instant;

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use tidegate::batch::Prepared;
use tidegate::memory::ReservedLimits;
use tidegate::resilience::OnFailure;
use tidegate::{
    Check, Decision, Id, LeaseReleaser, Limit, Op, Scope, Source, StoreError, Subject, SystemClock,
    Verdict,
};

use crate::backend::Backend;
use crate::live::LiveSettings;
use crate::observe::{Observer, Outcome};
use crate::protocol::Protocol;
use crate::reset::{self, Emptied, InvalidTarget, Target};
use crate::rules::envoy::Domains;
use crate::rules::{Attributes, Budget, HttpRequest, InvalidCost, Match, Mode, Repeated, Rules};
use crate::ruling::{Charged, Ruling, Shadowed};

/// Rules over a store, as one listener sees them. Cheap to clone; clones share everything.
#[derive(Clone, Debug)]
pub struct Engine {
    inner: Arc<Inner>,
    protocol: Protocol,
}

#[derive(Debug)]
struct Inner {
    store: Backend,
    rules: ArcSwap<Rules>,
    domains: ArcSwap<Domains>,
    settings: LiveSettings,
    observer: Observer,
    /// Ends leases, and goes on trying while the store does not answer.
    leases: LeaseReleaser,
    /// The limits of all rules, if the store is in memory: callers bring others, and must not take
    /// their room.
    reserved: Mutex<Option<ReservedLimits>>,
}

/// There is no ruling.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// The request says something that cannot be.
    #[error(transparent)]
    Cost(#[from] InvalidCost),
    /// The store has no answer, or the check is not one.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A rule that applies does not take refunds.
    #[error("rule {0} takes no refunds")]
    NoRefunds(Arc<str>),
    /// A reset names budgets that do not exist.
    #[error(transparent)]
    Target(#[from] InvalidTarget),
}

impl Engine {
    /// These rules over this store.
    pub fn new(store: Backend, rules: Rules) -> Self {
        Self::observed(store, rules, Observer::default())
    }

    /// The same, with somebody to tell what happens.
    pub fn observed(store: Backend, rules: Rules, observer: Observer) -> Self {
        let (rules, domains) = (ArcSwap::from_pointee(rules), ArcSwap::default());
        let leases = match &store {
            Backend::Memory(memory) => LeaseReleaser::of_memory(memory.clone()),
            Backend::Redis(redis) => LeaseReleaser::of_store(redis.clone(), SystemClock::new()),
            Backend::Resilient(resilient, _) => {
                LeaseReleaser::of_store(resilient.clone(), resilient.clock().clone())
            }
        };
        let reserved = Mutex::default();
        let inner = Inner {
            store,
            rules,
            domains,
            settings: LiveSettings::default(),
            observer,
            leases,
            reserved,
        };
        let engine = Engine { inner: Arc::new(inner), protocol: Protocol::default() };
        engine.name_rules();
        engine
    }

    /// Whoever is told what happens.
    pub fn observer(&self) -> &Observer {
        &self.inner.observer
    }

    /// Tells which names of rules there are, and the store which limits.
    fn name_rules(&self) {
        let (rules, domains) = (self.inner.rules.load(), self.inner.domains.load());
        if let Backend::Memory(memory) = &self.inner.store {
            let all = rules.iter().chain(domains.rules());
            let budgets = all.flat_map(|rule| {
                rule.overrides.iter().map(|other| &other.budget).chain([&rule.budget])
            });
            let limits = budgets.flat_map(|budget| match budget {
                Budget::Limits(limits) => limits.as_slice(),
                Budget::Unlimited | Budget::Deny | Budget::Exempt => &[],
            });
            let reserved = memory.reserve_limits(limits);
            *self.inner.reserved.lock() = Some(reserved);
        }
        let named =
            rules.iter().chain(domains.rules()).map(|rule| (&rule.name, rule.mode == Mode::Shadow));
        self.inner.observer.metrics().set_rules(named);
    }

    /// The same gate, for this listener: what is asked through it is counted there.
    pub fn at(&self, protocol: Protocol) -> Self {
        Engine { inner: Arc::clone(&self.inner), protocol }
    }

    /// The listener it is for.
    pub fn protocol(&self) -> Protocol {
        self.protocol
    }

    /// Decides a check whose limits the caller brings.
    ///
    /// # Errors
    /// If the check is not valid or the store has no answer.
    pub async fn decide(&self, check: &Check<'_>) -> Result<Decision, StoreError> {
        let (began, metrics) = (self.began(), self.inner.observer.metrics());
        let result = self.ask(check, began.is_some()).await;
        self.inner.observer.decided(self.protocol, check, &result);
        metrics.protocol_took(self.protocol, began);
        result
    }

    /// The time, if this question is to be timed.
    fn began(&self) -> Option<Instant> {
        let remote = self.is_far();
        self.inner.observer.metrics().clock(self.protocol, remote)
    }

    async fn ask(&self, check: &Check<'_>, timed: bool) -> Result<Decision, StoreError> {
        let began = timed.then(Instant::now);
        let result = self.inner.store.decide(check).await;
        if let Ok(decision) = &result
            && decision.source() == Source::Store
        {
            self.inner.observer.metrics().store_took(began);
        }
        result
    }

    /// The store.
    pub fn store(&self) -> &Backend {
        &self.inner.store
    }

    /// The rules as they are now.
    pub fn rules(&self) -> Arc<Rules> {
        self.inner.rules.load_full()
    }

    /// Reads the rules as they are then, for a caller that must not keep the store open; nothing,
    /// if the engine is gone.
    pub(crate) fn rules_reader(&self) -> impl Fn() -> Option<Arc<Rules>> + Send + Sync + use<> {
        let inner = Arc::downgrade(&self.inner);
        move || Some(inner.upgrade()?.rules.load_full())
    }

    /// Puts other rules in their place, at once for everybody. What was used under a name stays
    /// used.
    pub fn set_rules(&self, rules: Rules) {
        self.inner.rules.store(Arc::new(rules));
        self.name_rules();
    }

    /// Why no rule can know a request by these attributes, which is logged, too; nothing, if one
    /// can.
    pub(crate) fn unknown_attributes(&self, attributes: &[(String, String)]) -> Option<String> {
        let why =
            self.inner.rules.load().unknown(attributes.iter().map(|(name, _)| name.as_str()))?;
        self.inner.observer.misnamed(self.protocol, &why);
        Some(why)
    }

    /// The domains of Envoy's rate limit service as they are now.
    pub fn domains(&self) -> Arc<Domains> {
        self.inner.domains.load_full()
    }

    /// Puts other domains in their place, at once for everybody. What was used under a name stays
    /// used.
    pub fn set_domains(&self, domains: Domains) {
        self.inner.domains.store(Arc::new(domains));
        self.name_rules();
    }

    /// Rules and domains as they are now, for as long as it takes to look something up.
    pub(crate) fn read<T>(&self, look_up: impl FnOnce(&Domains, &Rules) -> T) -> T {
        look_up(&self.inner.domains.load(), &self.inner.rules.load())
    }

    /// The settings that change without a restart.
    pub fn settings(&self) -> &LiveSettings {
        &self.inner.settings
    }

    /// Whether a request has once, at most, what the rules look at by name.
    ///
    /// # Errors
    /// What it has more than once.
    pub(crate) fn check_repeated(&self, request: &HttpRequest<'_>) -> Result<(), Repeated> {
        let requests = self.inner.settings.requests();
        request.check_repeated(self.inner.rules.load().named(), &requests.headers)
    }

    /// Whether a request was denied only because the store has no answer, by a rule that then lets
    /// nothing pass.
    pub(crate) fn is_closed(&self, ruling: &Ruling) -> bool {
        let Some(decision) =
            ruling.decision.as_ref().filter(|decision| decision.source() == Source::Fallback)
        else {
            return false;
        };
        let unless_said = match &self.inner.store {
            Backend::Resilient(resilient, _) => resilient.status().on_failure,
            _ => return false,
        };
        let mut denied =
            ruling.charges.iter().zip(decision.charges()).filter(|(_, verdict)| !verdict.allowed);
        denied.any(|(charged, _)| {
            charged.rule.policy().on_failure.unwrap_or(unless_said) == OnFailure::Closed
        })
    }

    /// Whether whoever asks has to wait for an answer from elsewhere.
    pub(crate) fn is_far(&self) -> bool {
        !matches!(self.inner.store, Backend::Memory(_))
    }

    /// Questions that differ in nothing but their keys, if they can be answered here and now.
    pub(crate) fn prepare(&self, scope: &Scope<'_>, limit: &Limit) -> Option<Prepared> {
        let Backend::Memory(memory) = &self.inner.store else { return None };
        Some(memory.prepare(scope, limit))
    }

    /// Decides each key and cost independently, in order, as [`decide`](Engine::decide) does, at one
    /// reading of the clock. `rule` is the name of the rule whose keys they are, or empty.
    #[inline]
    pub(crate) fn check_each(
        &self,
        prepared: &Prepared,
        rule: &str,
        charges: &[(&[u8], u64)],
        mut answer: impl FnMut(&Verdict),
    ) {
        let observer = &self.inner.observer;
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

    /// Decides a request by the rules: `op` on every budget it draws on, all or nothing.
    ///
    /// # Errors
    /// If a cost is not a number, a rule does not take part in `op`, or the store has no answer.
    pub async fn rule(
        &self,
        op: Op,
        attributes: &(impl Attributes + ?Sized),
        cost: u64,
        id: Option<Id>,
    ) -> Result<Ruling, EngineError> {
        let found = self.inner.rules.load().matching(attributes, cost)?;
        self.rule_on(op, found, id).await
    }

    /// The same for what has been matched already: `op` on every budget found, all or nothing.
    ///
    /// # Errors
    /// If a rule does not take part in `op`, or the store has no answer.
    pub async fn rule_on(
        &self,
        op: Op,
        found: Vec<Match>,
        id: Option<Id>,
    ) -> Result<Ruling, EngineError> {
        let (began, observer) = (self.began(), &self.inner.observer);
        let result = self.ruling(op, found, id, began.is_some()).await;
        match &result {
            Ok(ruling) => observer.ruled(self.protocol, op, ruling),
            Err(EngineError::Store(error)) => observer.failed(self.protocol, error),
            Err(_) => observer.metrics().decided(self.protocol, Outcome::Invalid),
        }
        observer.metrics().protocol_took(self.protocol, began);
        result
    }

    async fn ruling(
        &self,
        op: Op,
        found: Vec<Match>,
        id: Option<Id>,
        timed: bool,
    ) -> Result<Ruling, EngineError> {
        let (shadow, enforced): (Vec<Match>, Vec<Match>) =
            found.into_iter().partition(|found| found.rule.mode == Mode::Shadow);
        if let (Op::Refund, None) = (op, id)
            && let Some(found) = enforced.iter().find(|found| !found.rule.refunds)
        {
            return Err(EngineError::NoRefunds(found.rule.name.clone()));
        }
        let refusing = enforced.iter().find(|found| found.budget == Budget::Deny);
        let refused_by = refusing.map(|found| Arc::clone(&found.rule));
        let refused_for = refusing.and_then(|found| found.missing.clone());
        // Where nothing may pass, nothing is charged either; how the limits stand is still told.
        let own_op = if refused_by.is_some() { Op::Peek } else { op };
        let (decision, charges) = self.charge(own_op, &enforced, id, timed).await?;
        let allowed = refused_by.is_none() && decision.as_ref().is_none_or(Decision::allowed);
        let exempting =
            enforced.iter().find(|found| found.budget == Budget::Exempt && refused_by.is_none());
        let exempted_by = exempting.map(|found| Arc::clone(&found.rule));
        let mut ruling = Ruling {
            allowed,
            decision,
            charges,
            refused_by,
            refused_for,
            exempted_by,
            shadow: Vec::new(),
        };
        for found in shadow {
            let op = if allowed { op } else { Op::Peek };
            let decision = match self.charge(op, std::slice::from_ref(&found), id, false).await {
                Ok((decision, _)) => decision,
                Err(error) => {
                    // What is only tried out must not fail what counts, which may have been charged
                    // already.
                    self.inner.observer.failed(self.protocol, &error);
                    continue;
                }
            };
            let allowed =
                found.budget != Budget::Deny && decision.as_ref().is_none_or(Decision::allowed);
            let decision = decision.map(|decision| decision.with_source(Source::Shadow));
            ruling.shadow.push(Shadowed { rule: found.rule, allowed, decision });
        }
        Ok(ruling)
    }

    /// Settles what was taken for a request under this id: its cost was `cost`. Nothing if the rule
    /// has no limits but `concurrent` ones, whose leases end by themselves.
    ///
    /// # Errors
    /// If the store has no answer.
    pub async fn settle(
        &self,
        found: &Match,
        id: Id,
        cost: u64,
    ) -> Result<Option<Decision>, StoreError> {
        let Budget::Limits(limits) = &found.budget else { return Ok(None) };
        let check = Check::of(Op::Settle).policy(found.rule.policy()).charge_subject(
            found.subject(),
            limits,
            cost,
        );
        let check = check.without_leases();
        if check.charges().is_empty() {
            return Ok(None);
        }
        let settled = self.ask(&check.reserving(found.cost).with_id(id), false).await;
        if let Err(error) = &settled {
            self.inner.observer.failed(self.protocol, error);
        }
        settled.map(Some)
    }

    /// Ends the leases that a request holds under this id, without waiting for the store. If the
    /// store granted them and does not answer, it is called again, at most until their ttl is over.
    pub(crate) fn release(&self, found: &Match, id: Id, source: Source) {
        if let Budget::Limits(limits) = &found.budget {
            let leases = Check::of(Op::Release).policy(found.rule.policy());
            self.inner.leases.release(
                leases.charge_subject(found.subject(), limits, found.cost).with_id(id),
                source,
            );
        }
    }

    /// The rules that apply to a request which costs `cost` by itself.
    ///
    /// # Errors
    /// If a cost that is read from an attribute is not a number.
    pub fn matching(
        &self,
        attributes: &(impl Attributes + ?Sized),
        cost: u64,
    ) -> Result<Vec<Match>, InvalidCost> {
        self.inner.rules.load().matching(attributes, cost)
    }

    /// What limits say about what has been matched, counted nowhere.
    pub(crate) async fn rule_quietly(
        &self,
        op: Op,
        found: Vec<Match>,
    ) -> Result<Option<Decision>, EngineError> {
        Ok(self.charge(op, &found, None, false).await?.0)
    }

    async fn charge(
        &self,
        op: Op,
        found: &[Match],
        id: Option<Id>,
        timed: bool,
    ) -> Result<(Option<Decision>, Vec<Charged>), StoreError> {
        let mut check = Check::of(op);
        for one in found {
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
                let own = found.iter().find(|one| one.subject() == charge.subject)?;
                let (rule, key) = (Arc::clone(&own.rule), own.key.clone());
                Some(Charged { rule, key, limit: charge.limit, cost: charge.cost })
            })
            .collect();
        Ok((Some(self.ask(&check, timed).await?), charges))
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
            let _decision = self.decide(&check).await?;
            let value = |name: &Arc<str>| {
                given.iter().find(|(own, _)| **own == **name).map(|(_, value)| value.clone())
            };
            let by = rule.by.iter().map(|name| (Arc::clone(name), value(name))).collect();
            emptied.push(Emptied { rule, by });
        }
        Ok(emptied)
    }
}
