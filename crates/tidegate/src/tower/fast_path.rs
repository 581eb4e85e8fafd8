//! The fast path: one rule with one limit over a memory store, decided without a future.
//!
//! It is synchronous code that cannot await, and makes no [`Check`](crate::Check). The test below
//! compares its responses with those of the general path, in `plan.rs`.

use ::http::HeaderValue;
use tidegate_core::{Algorithm, Decision, Timestamp, Verdict};

use super::budget_headers::BudgetHeaders;
use super::head::RequestHead;
use super::key::{self, KeyResult};
use super::layer::Setup;
use super::per_request::MaybeReady;
use super::plan::{DeniedRequest, Ruling, rule_applies};
use super::rule::{Payment, Rule};
use super::text::KeyText;
use crate::batch::Prepared;
use crate::http::denial::DenialResponse;
use crate::http::headers::{HeaderFamilies, QuotedName, RateLimitValue};
use crate::store::Scope;

/// What is the same for every request on the fast path.
#[derive(Clone)]
pub(super) struct FastPath {
    prepared: Prepared,
    /// The cost, if it is the same for all requests and none is skipped.
    cost: Option<u64>,
    /// The prefix length for IPv6 addresses, if the key is the peer's address.
    peer_prefix: Option<u8>,
    /// The name in the header, and the policy header, if clients get the IETF headers only.
    ietf: Option<(QuotedName, HeaderValue)>,
}

/// The result of the fast path.
pub(super) enum FastRuling {
    /// The request is allowed, and its response gets these headers.
    Allow(BudgetHeaders),
    /// Any other ruling.
    Other(Box<Ruling>),
}

impl FastPath {
    /// The fast path of a layer, if it has one rule with one constant limit, a memory store, no
    /// observer, and nothing to await or to do after the request.
    pub(super) fn of(setup: &Setup) -> Option<FastPath> {
        let ([rule], false, Some(memory)) = (&setup.rules[..], setup.is_async, setup.memory())
        else {
            return None;
        };
        let [limit] = rule.limits.value()?.as_slice() else { return None };
        let is_plain =
            matches!(rule.payment, Payment::Before) && !rule.is_shadow && setup.observer.is_none();
        if !is_plain || matches!(limit.algorithm(), Algorithm::Concurrent(_)) {
            return None;
        }
        let policy = setup.fixed.as_ref().map(|fixed| fixed.policy.clone());
        let ietf = if setup.families == HeaderFamilies::IETF {
            QuotedName::new(&rule.name).zip(policy)
        } else {
            None
        };
        let cost =
            if rule.skip.value() == Some(&false) { rule.cost.value().copied() } else { None };
        let prepared = memory.prepare(&Scope::Rule((&*rule.name).into()), limit);
        Some(FastPath { prepared, cost, peer_prefix: rule.key.peer_prefix(), ietf })
    }

    /// Rules on a request. Nothing, if a function of the rule needs the general path.
    pub(super) fn rule_on(&self, setup: &Setup, head: &RequestHead<'_>) -> Option<FastRuling> {
        let rule = &setup.rules[0];
        let cost = match self.cost {
            Some(cost) => cost,
            None => {
                let MaybeReady::Ready(skip) = rule.skip.get(head) else { return None };
                if skip {
                    return Some(FastRuling::Allow(BudgetHeaders::None));
                }
                let MaybeReady::Ready(cost) = rule.cost.get(head) else { return None };
                cost
            }
        };
        let mut key = KeyText::new();
        let found = match self.peer_prefix {
            Some(ipv6_prefix) => key::push_peer(head, ipv6_prefix, &mut key),
            None => rule.key.find(head, &mut key),
        };
        if found != KeyResult::Found {
            match rule_applies(rule, found) {
                Ok(true) => {}
                Ok(false) => return Some(FastRuling::Allow(BudgetHeaders::None)),
                Err(ruling) => return Some(FastRuling::Other(Box::new(ruling))),
            }
        }
        let now = self.prepared.memory().clock().now();
        let verdict: Verdict = self.prepared.check_at(key.as_bytes(), cost, now);
        Some(match &self.ietf {
            Some((item, policy)) if verdict.allowed => {
                let mut told = RateLimitValue::empty();
                told.write(item, verdict.remaining, verdict.amount, verdict.next_after_us);
                FastRuling::Allow(BudgetHeaders::ietf(policy, &told))
            }
            _ => self.ruling(setup, rule, verdict, now),
        })
    }

    /// A denial, or an allowed request with other headers.
    #[inline(never)]
    fn ruling(&self, setup: &Setup, rule: &Rule, verdict: Verdict, now: Timestamp) -> FastRuling {
        let decision = Decision::of_one(verdict, verdict.allowed, now);
        let limits = [(&*rule.name, self.prepared.limit())];
        if verdict.allowed {
            return FastRuling::Allow(setup.budget_headers_named(&limits, &decision));
        }
        let reply = DenialResponse::of(&decision, &limits, setup.families);
        let denied = DeniedRequest { decision, rule: rule.name.to_string(), reply };
        FastRuling::Other(Box::new(Ruling::Deny(Box::new(denied))))
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::net::IpAddr;
    use std::time::Duration;

    use ::http::{HeaderMap, Request, Response};
    use http_body_util::BodyExt;
    use proptest::prelude::*;
    use tower::{Layer, ServiceExt, service_fn};

    use super::super::{Peer, RateLimitLayer, Rule, key, per_request};
    use crate::http::Missing;
    use crate::http::headers::HeaderFamilies;
    use crate::{ManualClock, Memory};

    /// Status, headers and body.
    type Seen = (u16, HeaderMap, Vec<u8>);

    #[derive(Clone, Debug)]
    struct Call {
        peer: Option<u8>,
        header: Option<&'static str>,
        path: &'static str,
        accept: &'static str,
        advance_us: u64,
    }

    fn calls() -> impl Strategy<Value = Vec<Call>> {
        let peer = prop_oneof![4 => (0..3_u8).prop_map(Some), 1 => Just(None)];
        let header = prop::sample::select(vec![None, Some("a"), Some("b"), Some("")]);
        let path = prop::sample::select(vec!["/", "/a", "/skipped", "/a%2fb", "/x/../a"]);
        let accept = prop::sample::select(vec!["*/*", "text/plain", "application/json"]);
        let call = (peer, header, path, accept, 0..400_000_u64).prop_map(
            |(peer, header, path, accept, advance_us)| Call {
                peer,
                header,
                path,
                accept,
                advance_us,
            },
        );
        prop::collection::vec(call, 1..40)
    }

    /// A layer of one rule, as `case` says.
    fn layer(case: u8, memory: &Memory) -> RateLimitLayer {
        let limits = ["3/s", "2/s window", "4/s sliding", "2/s count rejected", "3/min log"];
        let limits = limits[usize::from(case) % limits.len()].parse().unwrap();
        let key = match case % 4 {
            0 => key::peer_ip(),
            1 => key::header("x-key"),
            2 => key::path(),
            _ => key::header("x-key").or(key::peer_ip()),
        };
        let rule = Rule::new("rule", limits, key);
        let rule = match case % 3 {
            0 => rule,
            1 => rule
                .cost(per_request(|head| if head.path() == "/a" { 2 } else { 0 }))
                .skip(per_request(|head| head.path() == "/skipped")),
            _ => rule.missing(Missing::Deny),
        };
        let families = [HeaderFamilies::IETF, HeaderFamilies::ALL, HeaderFamilies::NONE]
            [usize::from(case) % 3];
        RateLimitLayer::rules([rule]).memory(memory.clone()).headers(families)
    }

    async fn respond(layer: &RateLimitLayer, call: &Call) -> Seen {
        let mut request = Request::builder().uri(call.path).header("accept", call.accept);
        if let Some(header) = call.header {
            request = request.header("x-key", header);
        }
        let mut request = request.body(String::new()).unwrap();
        if let Some(peer) = call.peer {
            request.extensions_mut().insert(Peer(IpAddr::from([10, 0, 0, peer])));
        }
        let service = service_fn(async |_: Request<String>| {
            Ok::<_, Infallible>(Response::new(http_body_util::Full::<bytes::Bytes>::default()))
        });
        let response = layer.layer(service).oneshot(request).await.unwrap();
        let (head, body) = response.into_parts();
        let body = body.collect().await.unwrap().to_bytes().to_vec();
        (head.status.as_u16(), head.headers, body)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]

        #[test]
        fn the_fast_path_responds_like_the_general_path(case in any::<u8>(), calls in calls()) {
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            let clock = ManualClock::new();
            let stores = [(); 2].map(|()| Memory::builder().clock(clock.clone()).build());
            let [fast, general] = stores.map(|memory| layer(case, &memory));
            let general = general.without_fast_path();
            prop_assert!(fast.has_fast_path() && !general.has_fast_path());
            for call in &calls {
                clock.advance(Duration::from_micros(call.advance_us));
                let seen = runtime.block_on(respond(&fast, call));
                prop_assert_eq!(&seen, &runtime.block_on(respond(&general, call)), "{:?}", call);
            }
        }
    }
}
