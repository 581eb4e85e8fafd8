//! A rule of the layer: limits, key, cost, and when the cost is settled.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tidegate_core::Limits;

use super::head::ResponseHead;
use super::key::Key;
use super::per_request::PerRequest;
use crate::http::Missing;

/// Limits on requests with the same key, and what a request costs.
///
/// ```
/// use tidegate::tower::{Rule, key};
/// // Five failed logins a minute for each address; those that succeed cost nothing.
/// let rule = Rule::new("logins", "5/min".parse()?, key::peer_ip())
///     .charge_when(|response| response.status == 401);
/// # Ok::<(), tidegate::ParseError>(())
/// ```
#[derive(Clone, Debug)]
#[must_use = "a rule does nothing until a layer has it"]
pub struct Rule {
    pub(super) name: Arc<str>,
    pub(super) limits: PerRequest<Limits>,
    pub(super) key: Key,
    pub(super) missing: Missing,
    pub(super) cost: PerRequest<u64>,
    pub(super) skip: PerRequest<bool>,
    pub(super) is_shadow: bool,
    pub(super) payment: Payment,
}

/// When and how the true cost is known.
#[derive(Clone)]
pub(super) enum Payment {
    /// Before the request: the cost is final.
    Before,
    /// With the head of the response: the cost is due, or given back.
    IfDue(Arc<dyn Fn(&ResponseHead<'_>) -> bool + Send + Sync>),
    /// With the head of the response: the returned cost, or the estimate.
    FromHead(Arc<dyn Fn(&ResponseHead<'_>) -> Option<u64> + Send + Sync>),
    /// After the body: one unit for each of this many bytes.
    Bytes(u64),
    /// After the body: one unit for each of these durations.
    Time(Duration),
    /// After the body: the value of the meter.
    Metered,
}

impl Rule {
    /// Creates a rule. Clients see its name, and its state belongs to name and key: limits that
    /// change keep the usage of their keys, and rules with the same name over one store share their
    /// budgets.
    pub fn new(name: impl Into<Arc<str>>, limits: Limits, key: Key) -> Self {
        let (limits, cost, skip) = (limits.into(), 1.into(), false.into());
        Rule {
            name: name.into(),
            limits,
            key,
            missing: Missing::Share,
            cost,
            skip,
            is_shadow: false,
            payment: Payment::Before,
        }
    }

    /// Sets other limits, which may depend on the request: plans, tiers.
    pub fn limit(mut self, limits: impl Into<PerRequest<Limits>>) -> Self {
        self.limits = limits.into();
        self
    }

    /// Sets what happens to requests without the key, because a header is missing for example, or
    /// one of [several parts](Key::and). By default such requests share one budget. With
    /// [`Missing::Deny`] the response is 403, over gRPC PERMISSION_DENIED, and no rule is charged.
    ///
    /// ```
    /// use tidegate::http::Missing;
    /// use tidegate::tower::{Rule, key};
    /// let rule = Rule::new("per-key", "100/min".parse()?, key::header("x-api-key"))
    ///     .missing(Missing::Deny);
    /// # Ok::<(), tidegate::ParseError>(())
    /// ```
    pub fn missing(mut self, missing: Missing) -> Self {
        self.missing = missing;
        self
    }

    /// Sets the cost of a request, or the estimate for one that is settled afterwards; the default
    /// is 1. A request of cost 0 is allowed.
    pub fn cost(mut self, cost: impl Into<PerRequest<u64>>) -> Self {
        self.cost = cost.into();
        self
    }

    /// Excludes requests from this rule: those for which the value is `true`.
    pub fn skip(mut self, skip: impl Into<PerRequest<bool>>) -> Self {
        self.skip = skip.into();
        self
    }

    /// Puts the rule in shadow mode, to try it out: it counts and is
    /// [observed](super::RateLimitLayer::observe), but denies nothing and clients do not see it.
    pub fn shadow(mut self) -> Self {
        self.is_shadow = true;
        self
    }

    /// Charges only requests for whose response `is_due` returns `true`, such as failed logins.
    ///
    /// The cost is taken before the request and given back if it was not due, so that concurrent
    /// requests cannot exceed the limit. If the client disconnects before there is a response, the
    /// cost stays taken.
    pub fn charge_when(
        mut self,
        is_due: impl Fn(&ResponseHead<'_>) -> bool + Send + Sync + 'static,
    ) -> Self {
        self.payment = Payment::IfDue(Arc::new(is_due));
        self
    }

    /// Reads the true cost from the head of the response: a header, an extension. The
    /// [`cost`](Rule::cost) is taken before, as an estimate, and the difference is taken or given
    /// back. `None` leaves the estimate.
    pub fn settle(
        mut self,
        cost: impl Fn(&ResponseHead<'_>) -> Option<u64> + Send + Sync + 'static,
    ) -> Self {
        self.payment = Payment::FromHead(Arc::new(cost));
        self
    }

    /// Settles by the size of the response's body: one unit for each `bytes`, rounded up. If the
    /// client disconnects, the bytes count that were sent.
    pub fn settle_bytes(mut self, bytes: u64) -> Self {
        self.payment = Payment::Bytes(bytes.max(1));
        self
    }

    /// Settles by the duration of the request, from its arrival to the end of its response: one
    /// unit for each `unit`, rounded up.
    pub fn settle_time(mut self, unit: Duration) -> Self {
        self.payment = Payment::Time(unit.max(Duration::from_micros(1)));
        self
    }

    /// Settles by the value that the service writes, before the response is over, into the
    /// [`Meter`] in the request's extensions: the tokens of a model that streams its answer, for
    /// example. Without a value, the estimate stays.
    pub fn settle_metered(mut self) -> Self {
        self.payment = Payment::Metered;
        self
    }
}

impl fmt::Debug for Payment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Payment::Before => f.write_str("before"),
            Payment::IfDue(_) => f.write_str("if due"),
            Payment::FromHead(_) => f.write_str("from the response"),
            Payment::Bytes(bytes) => write!(f, "by {bytes} bytes"),
            Payment::Time(unit) => write!(f, "by {unit:?}"),
            Payment::Metered => f.write_str("metered"),
        }
    }
}

/// The true cost of a request, written by the service; see [`Rule::settle_metered`]. Clones share
/// their value.
///
/// ```
/// use tidegate::tower::Meter;
/// async fn handler(request: http::Request<()>) {
///     if let Some(meter) = request.extensions().get::<Meter>() {
///         meter.add(120);
///     }
/// }
/// ```
#[derive(Clone, Debug)]
pub struct Meter(Arc<AtomicU64>);

/// The value of a meter that was not written. No cost is that high.
const UNWRITTEN: u64 = u64::MAX;

impl Meter {
    pub(super) fn new() -> Self {
        Meter(Arc::new(AtomicU64::new(UNWRITTEN)))
    }

    /// Adds to the value.
    pub fn add(&self, units: u64) {
        let more = |now| {
            Some(
                if now == UNWRITTEN { units } else { u64::saturating_add(now, units) }
                    .min(UNWRITTEN - 1),
            )
        };
        let _ = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
    }

    /// Replaces the value.
    pub fn set(&self, units: u64) {
        self.0.store(units.min(UNWRITTEN - 1), Ordering::Relaxed);
    }

    /// The value, if there is one.
    pub fn read(&self) -> Option<u64> {
        Some(self.0.load(Ordering::Relaxed)).filter(|units| *units != UNWRITTEN)
    }
}
