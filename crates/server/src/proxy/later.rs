//! What a request came to, once there is a response: rules that count some responses only, or by their size or time, are settled.
//!
//! It happens whatever becomes of the response: who holds this drops it when it is over, or when the client has gone.

use std::borrow::Cow;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use axum::http::StatusCode;
use tidegate::{Decision, Id};
use tokio::time::Instant;

use super::fields::Headers;
use crate::gate::{Gate, Ruling};
use crate::rules::{Attributes, Match, Measure, Settle};

#[derive(Debug)]
pub(super) struct Later {
    gate: Gate,
    /// Under which it was taken.
    id: Id,
    open: Vec<Match>,
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
            _ => Some(String::from_utf8_lossy(self.headers.line(name.strip_prefix("header.")?, 0)?)),
        }
    }
}

impl Later {
    /// What is to be settled of these, if anything; rules in shadow mode that took nothing have nothing.
    pub(super) fn of(gate: &Gate, id: Option<Id>, mut open: Vec<Match>, ruling: &Ruling) -> Option<Self> {
        let id = id?;
        let took =
            |one: &Match| ruling.shadow.iter().all(|shadow| shadow.allowed || !Arc::ptr_eq(&shadow.rule, &one.rule));
        open.retain(took);
        (!open.is_empty()).then(|| Later { gate: gate.clone(), id, open, began: Instant::now(), bytes: 0 })
    }

    /// Whether something is left to settle.
    pub(super) fn is_open(&self) -> bool {
        !self.open.is_empty()
    }

    /// The response has begun: settles what is known by now, and has the ruling say what is left.
    pub(super) async fn begin(&mut self, status: StatusCode, headers: &impl Headers, ruling: &mut Ruling) {
        let head = Head { status, headers };
        for one in std::mem::take(&mut self.open) {
            let cost = match &one.rule.settle {
                _ if !one.rule.counts(&head) => Some(0),
                Some(settle @ Settle { by: Measure::Header(name), .. }) => {
                    let said = headers.line(name, 0).and_then(|value| std::str::from_utf8(value).ok());
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
                    if let Ok(Some(decision)) = self.gate.settle(&one, self.id, cost).await {
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
    let own = own.filter(|(charge, _)| Arc::ptr_eq(&charge.rule, &settled.rule) && charge.key == settled.key);
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
                let (gate, id) = (self.gate.clone(), self.id);
                soon(async move { _ = gate.settle(&one, id, cost).await });
            }
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
