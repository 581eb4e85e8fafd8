//! Settles a request by its response: the final cost of rules that count only some responses, or
//! count by size or time, and the end of `concurrent` leases.
//!
//! Dropping a [`Settlement`] completes it, so it happens in every case: when the last byte is sent,
//! when the client disconnects, or when there is no response.

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

/// What is still to be settled for one request.
#[derive(Debug)]
pub(super) struct Settlement {
    engine: Engine,
    /// The id of the original charge.
    id: Id,
    /// Charges whose final cost is not known yet.
    open: Vec<Match>,
    /// Leases that end with the response.
    leases: Vec<Match>,
    /// The source that granted the leases.
    source: Source,
    began: Instant,
    /// Bytes of the response's body so far.
    pub(super) bytes: u64,
}

/// The attributes that the head of a response supplies.
struct ResponseAttributes<'a, H> {
    status: StatusCode,
    headers: &'a H,
}

impl<H: Headers> Attributes for ResponseAttributes<'_, H> {
    fn get(&self, name: &str) -> Option<Cow<'_, str>> {
        match name {
            "status" => Some(Cow::Borrowed(self.status.as_str())),
            _ => {
                Some(String::from_utf8_lossy(self.headers.line(name.strip_prefix("header.")?, 0)?))
            }
        }
    }
}

impl Settlement {
    /// Checks the matched rules, and returns the ruling with the settlement that it needs.
    ///
    /// # Errors
    /// As [`Engine::check_rules`].
    pub(super) async fn check(
        engine: &Engine,
        found: Vec<Match>,
    ) -> Result<(Ruling, Option<Box<Self>>), EngineError> {
        let id = fresh_id();
        let settled = found.iter().filter(|one| one.rule.is_settled_later()).cloned().collect();
        let leases = found.iter().filter(|one| one.is_lease()).cloned().collect();
        let (open, source, began) = (Vec::new(), Source::Store, Instant::now());
        // From here on the store may hold leases. They end on drop even if the client disconnects
        // or the store does not answer before there is a ruling.
        let mut settlement = Box::new(Settlement {
            engine: engine.clone(),
            id,
            open,
            leases,
            source,
            began,
            bytes: 0,
        });
        let ruling = engine.check_rules(Op::Check, found, Some(id)).await?;
        settlement.keep_charged(settled, &ruling);
        Ok((ruling, Some(settlement).filter(|settlement| settlement.is_open())))
    }

    /// Drops what charged nothing: everything if the request was denied, otherwise the rules in
    /// shadow mode that denied it.
    fn keep_charged(&mut self, settled: Vec<Match>, ruling: &Ruling) {
        self.source = ruling.decision.as_ref().map_or(Source::Store, Decision::source);
        if !ruling.allowed {
            // If the store did not answer and the fallback denied, the store may have granted it.
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

    /// Whether anything is left to settle or release.
    pub(super) fn is_open(&self) -> bool {
        !self.open.is_empty() || !self.leases.is_empty()
    }

    /// Settles what the head of the response decides, and updates the ruling with the result.
    pub(super) async fn begin(
        &mut self,
        status: StatusCode,
        headers: &impl Headers,
        ruling: &mut Ruling,
    ) {
        let head = ResponseAttributes { status, headers };
        for one in std::mem::take(&mut self.open) {
            let cost = match &one.rule.settle {
                _ if !one.rule.counts(&head) => Some(0),
                Some(settle @ Settle { by: Measure::Header(name), .. }) => {
                    let said =
                        headers.line(name, 0).and_then(|value| std::str::from_utf8(value).ok());
                    let measured = said.and_then(|value| value.trim().parse().ok());
                    // Without a number, the original charge stays.
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

/// Replaces the verdicts of a charge with those of its settlement.
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

impl Drop for Settlement {
    fn drop(&mut self) {
        let millis = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX);
        for one in std::mem::take(&mut self.open) {
            let cost = match &one.rule.settle {
                Some(settle @ Settle { by: Measure::Bytes, .. }) => settle.cost(self.bytes),
                Some(settle @ Settle { by: Measure::Millis, .. }) => settle.cost(millis),
                // The outcome is unknown: the original charge stays.
                _ => continue,
            };
            if cost != one.cost {
                let (engine, id) = (self.engine.clone(), self.id);
                settle_in_background(async move { _ = engine.settle(&one, id, cost).await });
            }
        }
        for one in &self.leases {
            self.engine.release(one, self.id, self.source);
        }
    }
}

/// Runs `work` immediately if it need not wait, as with the memory store; otherwise as a task.
fn settle_in_background(work: impl Future<Output = ()> + Send + 'static) {
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
                .check_rules(Op::Peek, found(), None)
                .await
                .is_ok_and(|ruling| ruling.allowed && shadow(&ruling))
        };
        let panicked = caught(async {
            let (ruling, settlement) = Settlement::check(&engine, found()).await.unwrap();
            assert!(ruling.allowed && settlement.is_some());
            assert!(!free().await);
            panic!("on purpose");
        });
        assert!(panicked.await.is_none());
        assert!(free().await, "after a panic");
        let (_, settlement) = Settlement::check(&engine, found()).await.unwrap();
        let denied = Settlement::check(&engine, found()).await.unwrap();
        assert!(!denied.0.allowed && denied.1.is_none(), "a denied request holds no lease");
        assert!(!free().await);
        drop(settlement);
        assert!(free().await, "after it was dropped");
    }
}
