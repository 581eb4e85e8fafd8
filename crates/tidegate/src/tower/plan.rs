//! The general path, from a request to a ruling: which rules apply, what they cost, and what the
//! store decides.

use std::borrow::Cow;
use std::sync::Arc;

use ::http::{Request, StatusCode, Uri};
use tidegate_core::{Algorithm, Decision, Limits, Source};

use super::budget_headers::{BudgetHeaders, limits_of};
use super::completion::Completion;
use super::head::RequestHead;
use super::key::{self, KeyResult};
use super::layer::{Setup, name_of};
use super::per_request::{BoxFuture, MaybeReady};
use super::rule::{Meter, Payment, Rule};
use super::text::KeyText;
use crate::http::denial::DenialResponse;
use crate::http::{Missing, RefusedPath, Target};
use crate::store::{Check, OnFailure, Policy, Scope, StoreError, Subject};

/// What the layer does with a request.
pub(super) enum Ruling {
    /// It calls the service.
    Allow(AllowedRequest),
    /// It responds with 429.
    Deny(Box<DeniedRequest>),
    /// It responds with 403: the request lacks the key of a rule that denies such requests.
    MissingKey,
    /// It responds with 503: there is no decision, and the layer fails closed.
    Unavailable,
    /// It responds with 500: the layer is not set up for its rules, and this is how to fix it.
    Misconfigured(&'static str),
    /// It responds with an error of the client.
    Invalid(InvalidRequest),
}

/// Why no rule can be applied to a request.
pub(super) struct InvalidRequest {
    pub(super) status: StatusCode,
    pub(super) why: Arc<str>,
}

/// What is left to do for an allowed request.
#[derive(Default)]
pub(super) struct AllowedRequest {
    pub(super) headers: BudgetHeaders,
    pub(super) completions: Vec<Completion>,
}

/// What a denial is made from.
pub(super) struct DeniedRequest {
    pub(super) decision: Decision,
    /// The name of the rule that binds.
    pub(super) rule: String,
    /// The headers and body for the client.
    pub(super) reply: DenialResponse,
}

/// A rule that applies to a request, with everything that it reads from it.
struct AppliedRule {
    index: usize,
    limits: Limits,
    key: String,
    cost: u64,
}

/// Starts to rule on a request. Everything is read from the head before the future is returned.
pub(super) fn start(
    setup: &Arc<Setup>,
    head: &RequestHead<'_>,
    meter: Option<Meter>,
) -> Result<BoxFuture<Ruling>, Ruling> {
    let setup = Arc::clone(setup);
    if setup.is_async {
        let pending = pending_rules(&setup, head);
        return Ok(Box::pin(async move {
            match resolve(&setup, pending).await {
                Ok(applied) => decide(&setup, applied, meter).await,
                Err(ruling) => ruling,
            }
        }));
    }
    let applied = applied_rules(&setup, head)?;
    Ok(Box::pin(async move { decide(&setup, applied, meter).await }))
}

/// Normalizes the target of a request, or returns why it is refused.
#[inline(never)]
pub(super) fn normalize_path<A>(setup: &Setup, request: &mut Request<A>) -> Option<Ruling> {
    let target = request.uri().path_and_query()?.as_str();
    let sent = match setup.paths.read(target) {
        Ok(Target { sent: Cow::Borrowed(_), .. }) => return None,
        Ok(Target { sent: Cow::Owned(sent), .. }) => sent,
        Err(refused) => {
            let is_long = matches!(refused, RefusedPath::TooLong(_));
            let status = if is_long { StatusCode::URI_TOO_LONG } else { StatusCode::BAD_REQUEST };
            let why = refused.to_string().into();
            return Some(Ruling::Invalid(InvalidRequest { status, why }));
        }
    };
    let mut parts = request.uri().clone().into_parts();
    parts.path_and_query = sent.parse().ok();
    *request.uri_mut() = Uri::from_parts(parts).ok()?;
    None
}

/// Whether a rule applies to a request with this key. An error is a ruling without the store.
pub(super) fn rule_applies(rule: &Rule, found: KeyResult) -> Result<bool, Ruling> {
    match (found, rule.missing) {
        (KeyResult::Misconfigured(advice), _) => Err(Ruling::Misconfigured(advice)),
        (KeyResult::Invalid(why), _) => {
            Err(Ruling::Invalid(InvalidRequest { status: StatusCode::BAD_REQUEST, why }))
        }
        (KeyResult::Found, _) | (_, Missing::Share) => Ok(true),
        (_, Missing::Skip) => Ok(false),
        // A rule in shadow mode denies nothing, and without a key it has no budget to charge.
        (_, Missing::Deny) if rule.is_shadow => Ok(false),
        (_, Missing::Deny) => Err(Ruling::MissingKey),
    }
}

fn applied_rules(setup: &Setup, head: &RequestHead<'_>) -> Result<Vec<AppliedRule>, Ruling> {
    let mut applied = Vec::with_capacity(setup.rules.len());
    for (index, rule) in setup.rules.iter().enumerate() {
        if let (MaybeReady::Ready(false), MaybeReady::Ready(cost), MaybeReady::Ready(limits)) =
            (rule.skip.get(head), rule.cost.get(head), rule.limits.get(head))
        {
            let mut key = KeyText::new();
            if !rule_applies(rule, rule.key.find(head, &mut key))? {
                continue;
            }
            applied.push(AppliedRule { index, limits, key: key.into_string(), cost });
        }
    }
    Ok(applied)
}

/// A rule whose functions were called, and may not have returned.
struct PendingRule {
    index: usize,
    skip: MaybeReady<bool>,
    cost: MaybeReady<u64>,
    limits: MaybeReady<Limits>,
    key: BoxFuture<(KeyResult, String)>,
}

fn pending_rules(setup: &Setup, head: &RequestHead<'_>) -> Vec<PendingRule> {
    let call = |(index, rule): (usize, &Rule)| PendingRule {
        index,
        skip: rule.skip.get(head),
        cost: rule.cost.get(head),
        limits: rule.limits.get(head),
        key: rule.key.find_async(head),
    };
    setup.rules.iter().enumerate().map(call).collect()
}

async fn resolve(setup: &Setup, pending: Vec<PendingRule>) -> Result<Vec<AppliedRule>, Ruling> {
    let mut applied = Vec::with_capacity(pending.len());
    for rule in pending {
        if !rule.skip.wait().await {
            let (found, key) = rule.key.await;
            if !rule_applies(&setup.rules[rule.index], found)? {
                continue;
            }
            let key = key::digest_if_long(key.as_bytes()).unwrap_or(key);
            let (cost, limits) = (rule.cost.wait().await, rule.limits.wait().await);
            applied.push(AppliedRule { index: rule.index, limits, key, cost });
        }
    }
    Ok(applied)
}

const TOO_MANY: &str =
    "the rules that apply have more than 64 limits together: expected fewer, or several layers";

/// Decides the enforced rules in one check, then each rule in shadow mode in its own.
async fn decide(setup: &Arc<Setup>, applied: Vec<AppliedRule>, meter: Option<Meter>) -> Ruling {
    let (shadow, enforced): (Vec<_>, Vec<_>) =
        applied.into_iter().partition(|applied| setup.rules[applied.index].is_shadow);
    let mut allowed = AllowedRequest::default();
    if !enforced.is_empty() {
        match check(setup, &enforced, meter.clone(), false).await {
            Ok(checked) if checked.decision.allowed() => {
                setup.outage.answered();
                allowed.headers = checked.headers;
                allowed.completions.extend(checked.completion);
            }
            // A node that fails closed has denied without the store: that is an outage, not a
            // denial.
            Ok(checked)
                if checked.decision.source() == Source::Fallback
                    && setup.on_failure == Some(OnFailure::Closed) =>
            {
                return Ruling::Unavailable;
            }
            Ok(Checked { decision, denied, .. }) => {
                setup.outage.answered();
                let (rule, reply) = *denied.expect("an enforced denial has a reply");
                return Ruling::Deny(Box::new(DeniedRequest { decision, rule, reply }));
            }
            // Allowing the request would mean no limits at all for this layer.
            Err(StoreError::Invalid(_)) => return Ruling::Misconfigured(TOO_MANY),
            Err(error) => {
                setup.outage.failed(&error, setup.on_failure);
                if setup.on_failure == Some(OnFailure::Closed) {
                    return Ruling::Unavailable;
                }
            }
        }
    }
    for rule in shadow {
        match check(setup, &[rule], meter.clone(), true).await {
            Ok(checked) => {
                setup.outage.answered();
                allowed.completions.extend(checked.completion);
            }
            Err(error) => setup.outage.failed(&error, setup.on_failure),
        }
    }
    Ruling::Allow(allowed)
}

/// A decision of the store, and what follows from it.
struct Checked {
    decision: Decision,
    headers: BudgetHeaders,
    completion: Option<Completion>,
    /// For an enforced denial, the rule that binds and the reply.
    denied: Option<Box<(String, DenialResponse)>>,
}

async fn check(
    setup: &Arc<Setup>,
    applied: &[AppliedRule],
    meter: Option<Meter>,
    is_shadow: bool,
) -> Result<Checked, StoreError> {
    let store = &setup.store;
    let mut check =
        Check::new().policy(Policy { on_failure: setup.on_failure, ..Policy::default() });
    let mut payments: Vec<(usize, Payment)> = Vec::new();
    for one in applied {
        let rule = &setup.rules[one.index];
        let subject = Subject {
            scope: Scope::Rule(Cow::Borrowed(&rule.name)),
            key: Cow::Borrowed(one.key.as_bytes()),
        };
        let before = check.charges().len();
        check = check.charge_subject(subject, &one.limits, one.cost);
        // Leases are not settled; they end.
        let own = (before..check.charges().len()).filter(|index| !is_lease(&check, *index));
        if !matches!(rule.payment, Payment::Before) {
            payments.extend(own.map(|index| (index, rule.payment.clone())));
        }
    }
    let leases: Vec<usize> =
        (0..check.charges().len()).filter(|index| is_lease(&check, *index)).collect();
    let started = store.clock.now();
    let (decision, check) = if payments.is_empty() && leases.is_empty() {
        (store.backend.decide(&check).await?, check)
    } else {
        let check = check.with_id(store.next_id());
        (store.decide_or_undo(&check).await?, check)
    };
    let decision = if is_shadow { decision.with_source(Source::Shadow) } else { decision };
    setup.observe(check.charges(), &decision, is_shadow);
    let (mut headers, mut denied) = (BudgetHeaders::None, None);
    match decision.allowed() {
        _ if is_shadow => {}
        true => headers = setup.budget_headers(check.charges(), &decision),
        false => {
            let rule = check
                .charges()
                .get(decision.binding_index())
                .map(name_of)
                .unwrap_or_default()
                .to_owned();
            let reply = DenialResponse::of(&decision, &limits_of(check.charges()), setup.families);
            denied = Some(Box::new((rule, reply)));
        }
    }
    let has_more_to_do = decision.allowed() && !(payments.is_empty() && leases.is_empty());
    let completion = has_more_to_do.then(|| Completion {
        setup: Arc::clone(setup),
        check: check.into_owned(),
        decision: decision.clone(),
        payments,
        leases,
        started,
        bytes: 0,
        meter,
        is_shadow,
    });
    Ok(Checked { decision, headers, completion, denied })
}

fn is_lease(check: &Check<'_>, index: usize) -> bool {
    matches!(check.charges()[index].limit.algorithm(), Algorithm::Concurrent(_))
}
