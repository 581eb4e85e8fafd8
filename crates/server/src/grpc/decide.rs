//! Decides one request of Envoy's protocol: descriptors to budgets, one call to the engine,
//! verdicts to a response.
//!
//! A domain of the Envoy configuration is matched by its tree, one limit per descriptor. Any other
//! domain is matched by the rules file, where each descriptor is a set of attributes. All budgets
//! of a request are charged in one call, all or nothing.

use std::sync::Arc;

use tidegate::http::DEFAULT_IPV6_PREFIX;
use tidegate::{Limit, Op, Source, Verdict};

use super::message::{Descriptor, RateLimitRequest, RateLimitResponse};
use super::{Problem, reply};
use crate::engine::{Engine, EngineError};
use crate::rules::envoy::{DescriptorLimit, Domains, EnvoyOptions, Unit, override_key};
use crate::rules::{self, Attributes, Budget, Cost, Match, Mode, Rule, Rules};
use crate::ruling::Ruling;

/// The most descriptors of one request.
pub const MAX_DESCRIPTORS: usize = 64;
/// The most entries of one descriptor.
pub const MAX_ENTRIES: usize = 32;
/// The longest domain, key or value, in bytes.
pub const MAX_TEXT_BYTES: usize = 1024;

/// The namespace of limits that requests bring. No rule can have this name.
const OVERRIDE: &str = "envoy:override";

/// Decides a request.
pub(crate) async fn decide(
    engine: &Engine,
    request: &RateLimitRequest,
) -> Result<RateLimitResponse, Problem> {
    bounded(request)?;
    let options = engine.settings().envoy_options();
    let mut request_budgets = engine
        .with_rules(|domains, rules| RequestBudgets::of(domains, rules, &options, request))?;
    if let Some(why) = &request_budgets.warning {
        engine.observer().misnamed(engine.protocol(), why);
    }
    let over = if options.count_rejected {
        request_budgets.charge_each(engine).await?
    } else {
        request_budgets.charge_all(engine).await?
    };
    Ok(reply::of(&request_budgets, over, &options, || {
        engine.settings().response_options().deny_status
    }))
}

/// The budgets of a request and their verdicts.
pub(super) struct RequestBudgets {
    /// The budgets.
    pub(super) budgets: Vec<DrawnBudget>,
    /// For each descriptor, in order, its budgets.
    pub(super) lines: Vec<Vec<usize>>,
    /// The ruling on the last charge.
    pub(super) ruling: Option<Ruling>,
    /// Whether this node decided in place of the store.
    pub(super) degraded: bool,
    /// Why no rule can match: no descriptor has an entry that a rule reads.
    pub(super) warning: Option<String>,
}

/// A budget that a request charges, peeks at or refunds.
pub(super) struct DrawnBudget {
    pub(super) found: Match,
    wants: Wants,
    /// The descriptor of the Envoy configuration, if it is from there.
    pub(super) limited: Option<Arc<DescriptorLimit>>,
    /// Its limit as Envoy states limits.
    pub(super) stated: Option<(u32, Unit)>,
    /// Its name in the response.
    pub(super) name: Arc<str>,
    pub(super) verdict: BudgetVerdict,
}

/// What a descriptor does to its budget.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Wants {
    /// It charges hits.
    Charge,
    /// It checks whether one more hit is allowed.
    Peek,
    /// It refunds hits.
    Refund,
}

/// The verdict on a budget.
#[derive(Clone, Default)]
pub(super) struct BudgetVerdict {
    /// Whether less is left than the descriptor needs.
    pub(super) over: bool,
    /// The binding limit and its verdict.
    pub(super) limit: Option<(Limit, Verdict)>,
}

impl DrawnBudget {
    fn new(found: Match, wants: Wants) -> DrawnBudget {
        let name = Arc::clone(&found.rule.name);
        DrawnBudget {
            found,
            wants,
            limited: None,
            stated: None,
            name,
            verdict: BudgetVerdict::default(),
        }
    }

    pub(super) fn shadow(&self) -> bool {
        self.found.rule.mode == Mode::Shadow
    }

    pub(super) fn quota(&self) -> bool {
        self.limited.as_ref().is_some_and(|limited| limited.quota) && !self.shadow()
    }

    /// Whether it denies the request on its own.
    pub(super) fn denies(&self) -> bool {
        self.verdict.over && self.wants != Wants::Refund && !self.shadow()
    }
}

impl RequestBudgets {
    fn of(
        domains: &Domains,
        rules: &Rules,
        options: &EnvoyOptions,
        request: &RateLimitRequest,
    ) -> Result<RequestBudgets, Problem> {
        let lines = Vec::with_capacity(request.descriptors.len());
        let budgets = Vec::with_capacity(request.descriptors.len());
        let mut request_budgets =
            RequestBudgets { budgets, lines, ruling: None, degraded: false, warning: None };
        let in_domain = domains.contains(&request.domain);
        let mut by_rules = Vec::new();
        for (at, descriptor) in request.descriptors.iter().enumerate() {
            let (wants, hits) = wanted(request, descriptor);
            let brought = descriptor.limit.as_ref().filter(|_| in_domain || !rules.is_empty());
            let line = match (brought, options.overrides) {
                (Some(limit), Some(most)) => {
                    let unit = Unit::from_number(limit.unit).ok_or_else(|| {
                        let found = limit.unit;
                        Problem::Invalid(format!(
                            "descriptors[{at}].limit.unit is {found}: expected 1 (second) to 7 (week)"
                        ))
                    })?;
                    let stated = (limit.requests_per_unit.min(most), unit);
                    Some(request_budgets.draw(overridden(
                        &request.domain,
                        descriptor,
                        stated,
                        hits,
                        wants,
                    )))
                }
                _ if in_domain => {
                    domains.find(&request.domain, &descriptor.entries, hits).map(|found| {
                        let name = found.limited.name.clone().unwrap_or_default();
                        let (stated, limited) = (found.limited.stated, Some(found.limited));
                        request_budgets.draw(DrawnBudget {
                            limited,
                            stated,
                            name,
                            ..DrawnBudget::new(found.charge, wants)
                        })
                    })
                }
                _ => {
                    by_rules.push((at, wants, hits));
                    None
                }
            };
            request_budgets.lines.push(line.into_iter().collect());
        }
        request_budgets.match_rules(rules, request, &by_rules)?;
        if !by_rules.is_empty() && !rules.is_empty() && !rules.looks_at("domain") {
            let entries = by_rules.iter().flat_map(|(at, ..)| &request.descriptors[*at].entries);
            request_budgets.warning =
                rules.unknown(entries.map(|entry| match entry.key.as_str() {
                    "remote_address" => "ip",
                    key => key,
                }));
        }
        request_budgets.drop_replaced();
        Ok(request_budgets)
    }

    fn draw(&mut self, drawn: DrawnBudget) -> usize {
        self.budgets.push(drawn);
        self.budgets.len() - 1
    }

    /// A rule charges a request once per budget, however many descriptors lead to it. It applies to
    /// the descriptors that have all attributes of its `by`. If none does, it applies to the first
    /// descriptor it matches, so that a client cannot avoid it by omitting an attribute.
    fn match_rules(
        &mut self,
        rules: &Rules,
        request: &RateLimitRequest,
        lines: &[(usize, Wants, u64)],
    ) -> Result<(), Problem> {
        let mut found = Vec::new();
        for &(at, wants, hits) in lines {
            let attributes =
                Described { domain: &request.domain, descriptor: &request.descriptors[at] };
            for one in rules.applying(&attributes, hits).map_err(EngineError::from)? {
                let whole = one.rule.lacking(&attributes).is_none();
                found.push((at, wants, whole, one));
            }
        }
        let whole_somewhere: Vec<bool> = found
            .iter()
            .map(|(.., one)| found.iter().any(|(_, _, whole, other)| *whole && same(one, other)))
            .collect();
        let mut first: Vec<Arc<Rule>> = Vec::new();
        let mut kept = Vec::with_capacity(found.len());
        for ((at, wants, whole, one), elsewhere) in found.into_iter().zip(whole_somewhere) {
            if !whole {
                if elsewhere || first.iter().any(|rule| Arc::ptr_eq(rule, &one.rule)) {
                    continue;
                }
                first.push(Arc::clone(&one.rule));
            }
            kept.push((at, wants, one));
        }
        // One exempt descriptor exempts the request.
        rules::exempt(&mut kept, |(.., one)| one);
        for (at, wants, one) in kept {
            let known = self.budgets.iter().position(|drawn| {
                drawn.wants == wants && same(&drawn.found, &one) && drawn.found.key == one.key
            });
            let index = match known {
                Some(index) => {
                    let cost = &mut self.budgets[index].found.cost;
                    *cost = one.cost.max(*cost);
                    index
                }
                None => self.draw(DrawnBudget::new(one, wants)),
            };
            self.lines[at].push(index);
        }
        Ok(())
    }

    /// A limit that another one replaces does not count.
    fn drop_replaced(&mut self) {
        let limited = || self.budgets.iter().filter_map(|drawn| drawn.limited.as_ref());
        if limited().all(|limited| limited.replaces.is_empty()) {
            return;
        }
        let replaced = |drawn: &DrawnBudget| {
            let name = drawn.limited.as_ref().and_then(|limited| limited.name.as_ref());
            name.is_some_and(|name| limited().any(|other| other.replaces.contains(name)))
        };
        let gone: Vec<bool> = self.budgets.iter().map(replaced).collect();
        self.lines.iter_mut().for_each(|line| line.retain(|index| !gone[*index]));
    }

    fn select(&self, choose: impl Fn(&DrawnBudget) -> bool) -> Vec<usize> {
        let counted = |index: &usize| self.lines.iter().any(|line| line.contains(index));
        (0..self.budgets.len())
            .filter(|index| choose(&self.budgets[*index]) && counted(index))
            .collect()
    }

    /// Charges all budgets or none, and returns whether the request is denied.
    async fn charge_all(&mut self, engine: &Engine) -> Result<bool, EngineError> {
        let returned = self.select(|drawn| drawn.wants == Wants::Refund);
        self.apply(engine, Op::Refund, &returned).await?;
        // A single quota denies as any limit does; several deny only together, so each is checked
        // on its own.
        let mut quota = self.select(|drawn| drawn.quota() && drawn.wants != Wants::Refund);
        if quota.len() == 1 {
            quota.clear();
        }
        let looked = self.select(|drawn| drawn.wants == Wants::Peek);
        let looked: Vec<usize> =
            looked.into_iter().filter(|index| !quota.contains(index)).collect();
        let mut allowed = self.apply(engine, Op::Peek, &looked).await?;
        if !quota.is_empty() {
            let mut any = false;
            for index in &quota {
                any |= self.apply(engine, Op::Peek, &[*index]).await?;
            }
            allowed &= any;
        }
        let taken = self.select(|drawn| drawn.wants == Wants::Charge);
        let taken: Vec<usize> = taken.into_iter().filter(|index| !quota.contains(index)).collect();
        let op = if allowed { Op::Check } else { Op::Peek };
        allowed &= self.apply(engine, op, &taken).await?;
        if allowed {
            for index in quota
                .into_iter()
                .filter(|index| self.budgets[*index].wants == Wants::Charge)
                .collect::<Vec<_>>()
            {
                self.apply(engine, Op::Check, &[index]).await?;
            }
        }
        Ok(!allowed)
    }

    /// Charges each budget on its own; a denied one is charged what is left. Returns whether the
    /// request is denied.
    async fn charge_each(&mut self, engine: &Engine) -> Result<bool, EngineError> {
        for index in self.select(|_| true) {
            let op = match self.budgets[index].wants {
                Wants::Charge => Op::Check,
                Wants::Peek => Op::Peek,
                Wants::Refund => Op::Refund,
            };
            if !self.apply(engine, op, &[index]).await? && op == Op::Check {
                let verdict = self.budgets[index].verdict.clone();
                self.apply(engine, Op::Take, &[index]).await?;
                self.budgets[index].verdict = verdict;
            }
        }
        let singly = self.select(|drawn| drawn.denies() && !drawn.quota());
        let quota = self.select(|drawn| drawn.quota() && drawn.wants != Wants::Refund);
        Ok(!singly.is_empty()
            || (!quota.is_empty() && quota.iter().all(|index| self.budgets[*index].verdict.over)))
    }

    /// Applies `op` to some of the budgets, stores their verdicts, and returns whether all are
    /// allowed.
    async fn apply(
        &mut self,
        engine: &Engine,
        op: Op,
        which: &[usize],
    ) -> Result<bool, EngineError> {
        if which.is_empty() {
            return Ok(true);
        }
        let found = which.iter().map(|index| self.budgets[*index].found.clone()).collect();
        let ruling = engine.check_rules(op, found, None).await?;
        let mut shadows = ruling.shadow.iter();
        for index in which {
            let drawn = &mut self.budgets[*index];
            drawn.verdict = if drawn.shadow() {
                shadowed(&drawn.found, shadows.next())
            } else {
                verdict_of(&drawn.found, &ruling)
            };
        }
        self.degraded |=
            ruling.decision.as_ref().is_some_and(|decision| decision.source() == Source::Fallback);
        let allowed = ruling.allowed;
        if op != Op::Refund {
            self.ruling = Some(ruling);
        }
        Ok(allowed)
    }
}

/// Whether both are matches of one rule.
fn same(one: &Match, other: &Match) -> bool {
    Arc::ptr_eq(&one.rule, &other.rule)
}

/// The verdict on one of several matches.
fn verdict_of(found: &Match, ruling: &Ruling) -> BudgetVerdict {
    if found.budget == Budget::Deny {
        return BudgetVerdict { over: true, limit: None };
    }
    let Some(decision) = &ruling.decision else { return BudgetVerdict::default() };
    let own = ruling.charges.iter().zip(decision.charges());
    let own = own
        .filter(|(charged, _)| Arc::ptr_eq(&charged.rule, &found.rule) && charged.key == found.key);
    let binding = own.reduce(|best, next| if binds_more(next.1, best.1) { next } else { best });
    match binding {
        Some((charged, verdict)) => {
            BudgetVerdict { over: !verdict.allowed, limit: Some((charged.limit, *verdict)) }
        }
        None => BudgetVerdict::default(),
    }
}

fn shadowed(found: &Match, said: Option<&crate::ruling::Shadowed>) -> BudgetVerdict {
    let Some(said) = said else { return BudgetVerdict::default() };
    let limit = match (&found.budget, &said.decision) {
        (Budget::Limits(limits), Some(decision)) => {
            limits.iter().nth(decision.binding_index()).map(|limit| (*limit, *decision.binding()))
        }
        _ => None,
    };
    BudgetVerdict { over: !said.allowed, limit }
}

/// Whether `one` binds before `other`: of denials the longest wait, otherwise the least that is
/// left.
pub(super) fn binds_more(one: &Verdict, other: &Verdict) -> bool {
    let wait = |verdict: &Verdict| verdict.retry.micros().unwrap_or(u64::MAX);
    match (one.allowed, other.allowed) {
        (false, false) => wait(one) > wait(other),
        (true, true) => {
            u128::from(one.remaining) * u128::from(other.amount)
                < u128::from(other.remaining) * u128::from(one.amount)
        }
        (one, _) => !one,
    }
}

/// What a descriptor wants, and how much of it.
fn wanted(request: &RateLimitRequest, descriptor: &Descriptor) -> (Wants, u64) {
    let hits = descriptor.hits_addend.unwrap_or_else(|| u64::from(request.hits_addend.max(1)));
    match (descriptor.is_negative_hits, hits) {
        (true, hits) => (Wants::Refund, hits),
        // Zero hits charge nothing and check whether one more hit is allowed.
        (false, 0) => (Wants::Peek, 1),
        (false, hits) => (Wants::Charge, hits),
    }
}

/// The budget of a limit that the request brings.
fn overridden(
    domain: &str,
    descriptor: &Descriptor,
    stated: (u32, Unit),
    cost: u64,
    wants: Wants,
) -> DrawnBudget {
    let entries = descriptor.entries.iter().map(|entry| (entry.key.as_str(), entry.value.as_str()));
    let budget = stated.1.budget(stated.0);
    let rule = Rule {
        name: OVERRIDE.into(),
        when: Vec::new(),
        by: Vec::new(),
        missing: Default::default(),
        budget: budget.clone(),
        cost: Cost::Fixed(1),
        overrides: Vec::new(),
        mode: Mode::Enforce,
        refunds: true,
        overflow: None,
        on_store_failure: None,
        sync: Default::default(),
        charge_when: Vec::new(),
        settle: None,
        deny_status: None,
        ipv6_prefix: DEFAULT_IPV6_PREFIX,
    };
    let found = Match {
        rule: Arc::new(rule),
        key: override_key(domain, entries),
        budget,
        cost,
        missing: None,
    };
    DrawnBudget { stated: Some(stated), name: "".into(), ..DrawnBudget::new(found, wants) }
}

/// A descriptor as attributes: its entries and the domain. `ip` is Envoy's `remote_address`, too.
struct Described<'a> {
    domain: &'a str,
    descriptor: &'a Descriptor,
}

impl Attributes for Described<'_> {
    fn get(&self, name: &str) -> Option<std::borrow::Cow<'_, str>> {
        let entry = |name: &str| self.descriptor.entries.iter().find(|entry| entry.key == name);
        let value = match name {
            "domain" => Some(self.domain),
            "ip" => {
                entry("ip").or_else(|| entry("remote_address")).map(|entry| entry.value.as_str())
            }
            name => entry(name).map(|entry| entry.value.as_str()),
        };
        value.map(Into::into)
    }
}

/// Checks the size limits of a request.
fn bounded(request: &RateLimitRequest) -> Result<(), Problem> {
    let invalid = |text: String| Err(Problem::Invalid(text));
    let long = |place: String, text: &str| {
        invalid(format!("{place} has {} bytes: expected at most {MAX_TEXT_BYTES}", text.len()))
    };
    if request.domain.is_empty() {
        return invalid("rate limit domain must not be empty".into());
    }
    if request.domain.len() > MAX_TEXT_BYTES {
        return long("domain".into(), &request.domain);
    }
    if request.descriptors.is_empty() {
        return invalid("rate limit descriptor list must not be empty".into());
    }
    if request.descriptors.len() > MAX_DESCRIPTORS {
        return invalid(format!(
            "{} descriptors: expected at most {MAX_DESCRIPTORS}",
            request.descriptors.len()
        ));
    }
    for (at, descriptor) in request.descriptors.iter().enumerate() {
        if descriptor.entries.len() > MAX_ENTRIES {
            let found = descriptor.entries.len();
            return invalid(format!(
                "descriptors[{at}] has {found} entries: expected at most {MAX_ENTRIES}"
            ));
        }
        for (number, entry) in descriptor.entries.iter().enumerate() {
            for (part, text) in [("key", &entry.key), ("value", &entry.value)] {
                if text.len() > MAX_TEXT_BYTES {
                    return long(format!("descriptors[{at}].entries[{number}].{part}"), text);
                }
            }
        }
    }
    Ok(())
}
