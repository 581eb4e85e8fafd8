//! From a request to a ruling: which rules apply, what they cost, and what the store says.

use std::borrow::Cow;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use crate::http::denial::Reply;
use crate::http::headers::Told;
use ::http::{Request, StatusCode, Uri};
use tidegate_core::{Algorithm, Decision, Limits, Source, Timestamp, Verdict};

use super::after::After;
use super::head::Head;
use super::key::{self, Found};
use super::layer::{Setup, Short, name_of};
use super::of::{Got, Later};
use super::rule::{Meter, Pay, Rule};
use super::tell::{Tell, limits_of};
use super::text::Text;
use crate::http::Missing;
use crate::http::{RefusedPath, Target};
use crate::resilience::{OnFailure, Policy};
use crate::store::{Check, Scope, StoreError, Subject};

/// What becomes of a request.
pub(super) enum Ruling {
    /// It goes on.
    Pass(Passed),
    /// It is denied.
    Deny(Box<Denied>),
    /// It lacks the key of a rule that denies such requests.
    Refuse,
    /// There was no decision, and without one nothing passes.
    Closed,
    /// The program is not set up for its rules.
    Mistake(&'static str),
    /// It cannot be judged, and this is why.
    Unfit(Unfit),
}

/// Why a request cannot be judged.
pub(super) struct Unfit {
    pub(super) status: StatusCode,
    pub(super) why: Arc<str>,
}

/// What is left to do for a request that goes on.
#[derive(Default)]
pub(super) struct Passed {
    pub(super) tell: Tell,
    pub(super) after: Vec<After>,
}

/// What there is to say to one that does not.
pub(super) struct Denied {
    pub(super) decision: Decision,
    /// The rule that binds.
    pub(super) rule: String,
    /// What its client is told.
    pub(super) reply: Reply,
}

/// A ruling, at once or later.
pub(super) enum Start {
    Ruled(Ruling),
    Later(Later<Ruling>),
}

/// A rule that applies, and everything it depends on.
struct Drawn {
    rule: usize,
    limits: Limits,
    key: String,
    cost: u64,
}

pub(super) fn start(setup: &Arc<Setup>, head: &Head<'_>, meter: Option<Meter>) -> Start {
    if setup.later {
        let starting = starting(setup, head);
        let setup = Arc::clone(setup);
        return Start::Later(Box::pin(async move {
            match wait(&setup, starting).await {
                Ok(drawn) => decide(&setup, drawn, meter).await,
                Err(ruling) => ruling,
            }
        }));
    }
    let drawn = match drawn_now(setup, head) {
        Ok(drawn) => drawn,
        Err(ruling) => return Start::Ruled(ruling),
    };
    if setup.memory().is_some() {
        // The memory store answers at once, so one poll is enough.
        let mut deciding = pin!(decide(setup, drawn, meter));
        return match deciding.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(ruling) => Start::Ruled(ruling),
            Poll::Pending => unreachable!("the memory store answers at once"),
        };
    }
    let setup = Arc::clone(setup);
    Start::Later(Box::pin(async move { decide(&setup, drawn, meter).await }))
}

/// Makes the target of a request one that services read in one way, or says why that cannot be.
#[inline(never)]
pub(super) fn check_path<A>(setup: &Setup, request: &mut Request<A>) -> Option<Ruling> {
    let target = request.uri().path_and_query()?.as_str();
    let sent = match setup.paths.read(target) {
        Ok(Target { sent: Cow::Borrowed(_), .. }) => return None,
        Ok(Target { sent: Cow::Owned(sent), .. }) => sent,
        Err(refused) => {
            let long = matches!(refused, RefusedPath::TooLong(_));
            let status = if long { StatusCode::URI_TOO_LONG } else { StatusCode::BAD_REQUEST };
            return Some(Ruling::Unfit(Unfit { status, why: refused.to_string().into() }));
        }
    };
    let mut parts = request.uri().clone().into_parts();
    parts.path_and_query = sent.parse().ok();
    *request.uri_mut() = Uri::from_parts(parts).ok()?;
    None
}

/// What came of the short way.
pub(super) enum Quick {
    /// It goes on, and nothing is left to do but to tell the client.
    Pass(Tell),
    /// Anything else.
    Ruled(Box<Ruling>),
}

/// The short way, if there is one and nothing has to be waited for.
pub(super) fn quickly(setup: &Setup, short: &Short, head: &Head<'_>) -> Option<Quick> {
    let cost = match short.cost {
        Some(cost) => cost,
        None => {
            let Got::Now(skip) = short.rule(setup).skip.get(head) else { return None };
            if skip {
                return Some(Quick::Pass(Tell::Nothing));
            }
            let Got::Now(cost) = short.rule(setup).cost.get(head) else { return None };
            cost
        }
    };
    let mut key = Text::new();
    let found = match short.peer {
        Some(ipv6_prefix) => key::push_peer(head, ipv6_prefix, &mut key),
        None => short.rule(setup).key.now(head, &mut key),
    };
    if found != Found::Key {
        match drawn_on(short.rule(setup), found) {
            Ok(true) => {}
            Ok(false) => return Some(Quick::Pass(Tell::Nothing)),
            Err(ruling) => return Some(Quick::Ruled(Box::new(ruling))),
        }
    }
    let now = short.prepared.memory().clock().now();
    let verdict: Verdict = short.prepared.check_at(key.as_bytes(), cost, now);
    Some(match &short.usual {
        Some((item, policy)) if verdict.allowed => {
            let mut told = Told::empty();
            told.tell(item, verdict.remaining, verdict.amount, verdict.next_after_us);
            Quick::Pass(Tell::usual(policy, &told))
        }
        _ => ruled(setup, short, verdict, now),
    })
}

/// What there is to say if it is not the usual.
#[inline(never)]
fn ruled(setup: &Setup, short: &Short, verdict: Verdict, now: Timestamp) -> Quick {
    let rule = short.rule(setup);
    let decision = Decision::of_one(verdict, verdict.allowed, now);
    let limits = [(&*rule.name, short.prepared.limit())];
    if verdict.allowed {
        return Quick::Pass(setup.tell_named(&limits, &decision));
    }
    let reply = Reply::to(&decision, &limits, setup.families);
    Quick::Ruled(Box::new(Ruling::Deny(Box::new(Denied {
        decision,
        rule: rule.name.to_string(),
        reply,
    }))))
}

/// Whether a rule applies for which this key was found; or what becomes of the request without
/// asking the store.
fn drawn_on(rule: &Rule, found: Found) -> Result<bool, Ruling> {
    match (found, rule.missing) {
        (Found::Mistake(mistake), _) => Err(Ruling::Mistake(mistake)),
        (Found::Unfit(why), _) => {
            Err(Ruling::Unfit(Unfit { status: StatusCode::BAD_REQUEST, why }))
        }
        (Found::Key, _) | (_, Missing::Share) => Ok(true),
        (_, Missing::Skip) => Ok(false),
        // A rule in shadow mode denies nothing, and there is no budget that it could count on.
        (_, Missing::Deny) if rule.shadow => Ok(false),
        (_, Missing::Deny) => Err(Ruling::Refuse),
    }
}

fn drawn_now(setup: &Setup, head: &Head<'_>) -> Result<Vec<Drawn>, Ruling> {
    let mut drawn = Vec::with_capacity(setup.rules.len());
    for (index, rule) in setup.rules.iter().enumerate() {
        if let (Got::Now(false), Got::Now(cost), Got::Now(limits)) =
            (rule.skip.get(head), rule.cost.get(head), rule.limits.get(head))
        {
            let mut key = Text::new();
            if !drawn_on(rule, rule.key.now(head, &mut key))? {
                continue;
            }
            drawn.push(Drawn { rule: index, limits, key: key.into_string(), cost });
        }
    }
    Ok(drawn)
}

/// A rule whose functions have been called, but not all have returned.
struct Starting {
    rule: usize,
    skip: Got<bool>,
    cost: Got<u64>,
    limits: Got<Limits>,
    key: Later<(Found, String)>,
}

fn starting(setup: &Setup, head: &Head<'_>) -> Vec<Starting> {
    let start = |(index, rule): (usize, &Rule)| Starting {
        rule: index,
        skip: rule.skip.get(head),
        cost: rule.cost.get(head),
        limits: rule.limits.get(head),
        key: rule.key.later(head),
    };
    setup.rules.iter().enumerate().map(start).collect()
}

async fn wait(setup: &Setup, starting: Vec<Starting>) -> Result<Vec<Drawn>, Ruling> {
    let mut drawn = Vec::with_capacity(starting.len());
    for rule in starting {
        if !rule.skip.wait().await {
            let (found, key) = rule.key.await;
            if !drawn_on(&setup.rules[rule.rule], found)? {
                continue;
            }
            let key = key::bounded(key.as_bytes()).unwrap_or(key);
            let (cost, limits) = (rule.cost.wait().await, rule.limits.wait().await);
            drawn.push(Drawn { rule: rule.rule, limits, key, cost });
        }
    }
    Ok(drawn)
}

const TOO_MANY: &str =
    "the rules that apply have more than 64 limits together: expected fewer, or several layers";

/// Asks the store: all rules that are enforced together, then each that is in shadow by itself.
async fn decide(setup: &Arc<Setup>, drawn: Vec<Drawn>, meter: Option<Meter>) -> Ruling {
    let (shadow, enforced): (Vec<_>, Vec<_>) =
        drawn.into_iter().partition(|drawn| setup.rules[drawn.rule].shadow);
    let mut passed = Passed::default();
    if !enforced.is_empty() {
        match ask(setup, &enforced, meter.clone(), false).await {
            Ok(asked) if asked.decision.allowed() => {
                setup.outage.answered();
                passed.tell = asked.tell;
                passed.after.extend(asked.after);
            }
            // Decided without the store, where that means no: the store has failed, nobody has been
            // denied.
            Ok(asked)
                if asked.decision.source() == Source::Fallback
                    && setup.on_failure == Some(OnFailure::Closed) =>
            {
                return Ruling::Closed;
            }
            Ok(Asked { decision, denied, .. }) => {
                setup.outage.answered();
                let (rule, reply) =
                    *denied.expect("what was denied and is not in shadow mode has a reply");
                return Ruling::Deny(Box::new(Denied { decision, rule, reply }));
            }
            // To let everything pass because of that would be to have no limits at all.
            Err(StoreError::Invalid(_)) => return Ruling::Mistake(TOO_MANY),
            Err(error) => {
                setup.outage.failed(&error, setup.on_failure);
                if setup.on_failure == Some(OnFailure::Closed) {
                    return Ruling::Closed;
                }
            }
        }
    }
    for drawn in shadow {
        match ask(setup, &[drawn], meter.clone(), true).await {
            Ok(asked) => {
                setup.outage.answered();
                passed.after.extend(asked.after);
            }
            Err(error) => setup.outage.failed(&error, setup.on_failure),
        }
    }
    Ruling::Pass(passed)
}

struct Asked {
    decision: Decision,
    tell: Tell,
    after: Option<After>,
    /// The rule that binds and what the client is told, if it is denied.
    denied: Option<Box<(String, Reply)>>,
}

async fn ask(
    setup: &Arc<Setup>,
    drawn: &[Drawn],
    meter: Option<Meter>,
    shadow: bool,
) -> Result<Asked, StoreError> {
    let store = &setup.store;
    let mut check =
        Check::new().policy(Policy { on_failure: setup.on_failure, ..Policy::default() });
    let mut pays: Vec<(usize, Pay)> = Vec::new();
    for one in drawn {
        let rule = &setup.rules[one.rule];
        let subject = Subject {
            scope: Scope::Rule(Cow::Borrowed(&rule.name)),
            key: Cow::Borrowed(one.key.as_bytes()),
        };
        let before = check.charges().len();
        check = check.charge_subject(subject, &one.limits, one.cost);
        // Leases are not paid for; they end.
        let own = (before..check.charges().len()).filter(|index| !is_lease(&check, *index));
        if !matches!(rule.pay, Pay::Before) {
            pays.extend(own.map(|index| (index, rule.pay.clone())));
        }
    }
    let leases: Vec<usize> =
        (0..check.charges().len()).filter(|index| is_lease(&check, *index)).collect();
    let started = store.clock.now();
    let (decision, check) = if pays.is_empty() && leases.is_empty() {
        (store.backend.decide(&check).await?, check)
    } else {
        let check = check.with_id(store.next_id());
        (store.decide_or_undo(&check).await?, check)
    };
    let decision = if shadow { decision.with_source(Source::Shadow) } else { decision };
    setup.observe(check.charges(), &decision, shadow);
    let (mut tell, mut denied) = (Tell::Nothing, None);
    match decision.allowed() {
        _ if shadow => {}
        true => tell = setup.tell(check.charges(), &decision),
        false => {
            let rule = check
                .charges()
                .get(decision.binding_index())
                .map(name_of)
                .unwrap_or_default()
                .to_owned();
            let reply = Reply::to(&decision, &limits_of(check.charges()), setup.families);
            denied = Some(Box::new((rule, reply)));
        }
    }
    let taken = decision.allowed() && !(pays.is_empty() && leases.is_empty());
    let after = taken.then(|| After {
        setup: Arc::clone(setup),
        check: check.into_owned(),
        decision: decision.clone(),
        pays,
        leases,
        started,
        bytes: 0,
        meter,
        shadow,
        begun: false,
    });
    Ok(Asked { decision, tell, after, denied })
}

fn is_lease(check: &Check<'_>, index: usize) -> bool {
    matches!(check.charges()[index].limit.algorithm(), Algorithm::Concurrent(_))
}
