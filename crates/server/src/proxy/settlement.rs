//! What a request came to, once there is a response: rules that count some responses only, or by
//! their size or time, are settled, and leases of `concurrent` limits end.
//!
//! It happens whatever becomes of the response: the owner of a [`Later`] drops it when the last
//! byte is on its way, when the client has gone, or when there is no response.

use std::borrow::Cow;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use axum::http::StatusCode;
use tidegate::{Decision, Id, Op, Source};
use tokio::time::Instant;

use super::fields::Headers;
use crate::engine::{Engine, EngineError};
use crate::ids::fresh_id;
use crate::rules::outcome::is_concurrent;
use crate::rules::{Attributes, Match, Measure, Settle};
use crate::ruling::Ruling;

#[derive(Debug)]
pub(super) struct Later {
    engine: Engine,
    /// Under which it was taken.
    id: Id,
    /// What is to be settled.
    open: Vec<Match>,
    /// What ends with the response.
    leases: Vec<Match>,
    /// What granted the leases.
    source: Source,
    began: Instant,
    /// Of the response's body, so far.
    pub(super) bytes: u64,
}

/// What is known of a response.
struct Head<'a, H> {
    status: StatusCode,
    headers: &'a H,
}

impl<H: Headers> Attributes for Head<'_, H> {
    fn get(&self, name: &str) -> Option<Cow<'_, str>> {
        match name {
            "status" => Some(Cow::Borrowed(self.status.as_str())),
            _ => {
                Some(String::from_utf8_lossy(self.headers.line(name.strip_prefix("header.")?, 0)?))
            }
        }
    }
}

impl Later {
    /// Rules on what was found, and keeps what is done about it when there is a response.
    ///
    /// # Errors
    /// As [`Engine::rule_on`].
    pub(super) async fn rule(
        engine: &Engine,
        found: Vec<Match>,
    ) -> Result<(Ruling, Option<Box<Self>>), EngineError> {
        let id = fresh_id();
        let settled = found.iter().filter(|one| one.rule.is_settled_later()).cloned().collect();
        let leases = found.iter().filter(|one| one.is_lease()).cloned().collect();
        let (open, source, began) = (Vec::new(), Source::Store, Instant::now());
        // From here on leases may be held. They end also if the client goes, or the store does not
        // answer, before there is a ruling.
        let mut later =
            Box::new(Later { engine: engine.clone(), id, open, leases, source, began, bytes: 0 });
        let ruling = engine.rule_on(Op::Check, found, Some(id)).await?;
        later.ruled(settled, &ruling);
        Ok((ruling, Some(later).filter(|later| later.is_open())))
    }

    /// Forgets what took nothing: everything if the request was denied, otherwise what rules in
    /// shadow mode denied.
    fn ruled(&mut self, settled: Vec<Match>, ruling: &Ruling) {
        self.source = ruling.decision.as_ref().map_or(Source::Store, Decision::source);
        if !ruling.allowed {
            // Without an answer of the store this node denied it, but the store may have taken it.
            if self.source != Source::Fallback {
                self.leases.clear();
            }
            return;
        }
        let took = |one: &Match| {
            ruling
                .shadow
                .iter()
                .all(|shadow| shadow.allowed || !Arc::ptr_eq(&shadow.rule, &one.rule))
        };
        self.open = settled;
        self.open.retain(took);
        self.leases.retain(took);
        self.began = Instant::now();
    }

    /// Whether something is left to do.
    pub(super) fn is_open(&self) -> bool {
        !self.open.is_empty() || !self.leases.is_empty()
    }

    /// The response has begun: settles what is known by now, and has the ruling say what is left.
    pub(super) async fn begin(
        &mut self,
        status: StatusCode,
        headers: &impl Headers,
        ruling: &mut Ruling,
    ) {
        let head = Head { status, headers };
        for one in std::mem::take(&mut self.open) {
            let cost = match &one.rule.settle {
                _ if !one.rule.counts(&head) => Some(0),
                Some(settle @ Settle { by: Measure::Header(name), .. }) => {
                    let said =
                        headers.line(name, 0).and_then(|value| std::str::from_utf8(value).ok());
                    let measured = said.and_then(|value| value.trim().parse().ok());
                    // Without a number, what was taken stays taken.
                    measured.map_or(Some(one.cost), |measured| Some(settle.cost(measured)))
                }
                Some(_) => None,
                None => Some(one.cost),
            };
            match cost {
                None => self.open.push(one),
                Some(cost) if cost == one.cost => {}
                Some(cost) => {
                    if let Ok(Some(decision)) = self.engine.settle(&one, self.id, cost).await {
                        amend(ruling, &one, &decision);
                    }
                }
            }
        }
    }
}

/// Puts what was settled in place of what was said before.
fn amend(ruling: &mut Ruling, settled: &Match, decision: &Decision) {
    let Some(before) = &ruling.decision else { return };
    let mut verdicts = before.charges().to_vec();
    let own = ruling.charges.iter().zip(&mut verdicts);
    let own = own.filter(|(charge, _)| {
        Arc::ptr_eq(&charge.rule, &settled.rule)
            && charge.key == settled.key
            && !is_concurrent(&charge.limit)
    });
    for ((_, verdict), after) in own.zip(decision.charges()) {
        *verdict = *after;
    }
    let source = before.source();
    ruling.decision = Some(Decision::of_many(verdicts, true, decision.at()).with_source(source));
}

impl Drop for Later {
    fn drop(&mut self) {
        let millis = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX);
        for one in std::mem::take(&mut self.open) {
            let cost = match &one.rule.settle {
                Some(settle @ Settle { by: Measure::Bytes, .. }) => settle.cost(self.bytes),
                Some(settle @ Settle { by: Measure::Millis, .. }) => settle.cost(millis),
                // Nobody knows what it would have come to: what was taken stays taken.
                _ => continue,
            };
            if cost != one.cost {
                let (engine, id) = (self.engine.clone(), self.id);
                soon(async move { _ = engine.settle(&one, id, cost).await });
            }
        }
        for one in &self.leases {
            self.engine.release(one, self.id, self.source);
        }
    }
}

/// Does it at once if that is possible, as with state in this process; otherwise as a task.
fn soon(work: impl Future<Output = ()> + Send + 'static) {
    let mut work = Box::pin(work);
    if pin!(&mut work).poll(&mut Context::from_waker(Waker::noop())) == Poll::Pending
        && let Ok(runtime) = tokio::runtime::Handle::try_current()
    {
        runtime.spawn(work);
    }
}

#[cfg(test)]
mod tests {
    use tidegate::{ManualClock, Memory};

    use super::*;
    use crate::backend::Backend;
    use crate::config::Config;
    use crate::panics::caught;

    #[tokio::test]
    async fn leases_end_when_a_request_panics_or_is_dropped() {
        let text = "rules:\n  - { name: a, limit: 1 concurrent ttl 10m; 9/h }\n  - { name: b, mode: shadow, limit: 1 concurrent ttl 10m }\n";
        let rules = Config::parse(text, "test").unwrap().rules;
        let engine = Engine::new(
            Backend::Memory(Memory::builder().clock(ManualClock::new()).build()),
            rules,
        );
        let found = || engine.matching(&[("ip", "192.0.2.7")][..], 1).unwrap();
        let free = async || {
            let shadow = |ruling: &Ruling| ruling.shadow.iter().all(|shadow| shadow.allowed);
            engine
                .rule_on(Op::Peek, found(), None)
                .await
                .is_ok_and(|ruling| ruling.allowed && shadow(&ruling))
        };
        let panicked = caught(async {
            let (ruling, later) = Later::rule(&engine, found()).await.unwrap();
            assert!(ruling.allowed && later.is_some());
            assert!(!free().await);
            panic!("on purpose");
        });
        assert!(panicked.await.is_none());
        assert!(free().await, "after a panic");
        let (_, later) = Later::rule(&engine, found()).await.unwrap();
        let denied = Later::rule(&engine, found()).await.unwrap();
        assert!(!denied.0.allowed && denied.1.is_none(), "what was denied holds nothing");
        assert!(!free().await);
        drop(later);
        assert!(free().await, "after it was dropped");
    }
}
