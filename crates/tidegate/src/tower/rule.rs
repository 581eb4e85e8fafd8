//! One rule of the layer: limits, whose budget, how much, and when it is paid.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tidegate_core::Limits;

use super::head::ResponseHead;
use super::key::Key;
use super::of::Of;
use crate::http::Missing;

/// Limits for some requests: how much, for whom, at what cost.
///
/// ```
/// use tidegate::tower::{Rule, key};
/// // Five failed logins a minute for each address; those that succeed cost nothing.
/// let rule = Rule::new("logins", "5/min".parse()?, key::peer_ip()).charge_when(|response| response.status == 401);
/// # Ok::<(), tidegate::ParseError>(())
/// ```
#[derive(Clone, Debug)]
#[must_use = "a rule does nothing until a layer has it"]
pub struct Rule {
    pub(super) name: Arc<str>,
    pub(super) limits: Of<Limits>,
    pub(super) key: Key,
    pub(super) missing: Missing,
    pub(super) cost: Of<u64>,
    pub(super) skip: Of<bool>,
    pub(super) shadow: bool,
    pub(super) pay: Pay,
}

/// When the cost is known.
#[derive(Clone)]
pub(super) enum Pay {
    /// Before the request is served.
    Before,
    /// When the response has begun: all of it, or nothing.
    When(Arc<dyn Fn(&ResponseHead<'_>) -> bool + Send + Sync>),
    /// When the response has begun: so much, or what was estimated.
    Told(Arc<dyn Fn(&ResponseHead<'_>) -> Option<u64> + Send + Sync>),
    /// When the response is over: a unit for each so many bytes of it.
    Bytes(u64),
    /// When the response is over: a unit for each such time.
    Time(Duration),
    /// When the response is over: what the meter says.
    Metered,
}

impl Rule {
    /// Limits on requests with the same key. The name is shown to clients, and the state is known
    /// by it and the key: limits that change keep what was used, and rules with the same name over
    /// one store share their budgets.
    pub fn new(name: impl Into<Arc<str>>, limits: Limits, key: Key) -> Self {
        let (limits, cost, skip) = (limits.into(), 1.into(), false.into());
        Rule {
            name: name.into(),
            limits,
            key,
            missing: Missing::Share,
            cost,
            skip,
            shadow: false,
            pay: Pay::Before,
        }
    }

    /// Other limits, which may depend on the request: plans, tiers.
    pub fn limit(mut self, limits: impl Into<Of<Limits>>) -> Self {
        self.limits = limits.into();
        self
    }

    /// What happens to requests for which no key is found, because a header is missing, say; of a
    /// key of [several parts](Key::and) one that is missing is enough. Unless told otherwise they
    /// share one budget. With [`Missing::Deny`] they are answered with 403, over gRPC with
    /// PERMISSION_DENIED, and no rule is charged.
    ///
    /// ```
    /// use tidegate::http::Missing;
    /// use tidegate::tower::{Rule, key};
    /// let rule = Rule::new("per-key", "100/min".parse()?, key::header("x-api-key")).missing(Missing::Deny);
    /// # Ok::<(), tidegate::ParseError>(())
    /// ```
    pub fn missing(mut self, missing: Missing) -> Self {
        self.missing = missing;
        self
    }

    /// How much a request costs, or, for one that is settled afterwards, the estimate; 1 unless
    /// told otherwise. A request that costs 0 passes.
    pub fn cost(mut self, cost: impl Into<Of<u64>>) -> Self {
        self.cost = cost.into();
        self
    }

    /// Requests for which this says `true` are none of this rule's business.
    pub fn skip(mut self, skip: impl Into<Of<bool>>) -> Self {
        self.skip = skip.into();
        self
    }

    /// The rule counts and is [observed](super::RateLimitLayer::observe), but denies nothing and
    /// shows nothing to clients: for trying a limit out.
    pub fn shadow(mut self) -> Self {
        self.shadow = true;
        self
    }

    /// Only responses for which this says `true` cost anything: failed logins, say.
    ///
    /// The cost is taken before the request is served and given back if it was not due, so that
    /// many at once cannot all slip through. If the client goes away before there is a response, it
    /// stays taken.
    pub fn charge_when(
        mut self,
        due: impl Fn(&ResponseHead<'_>) -> bool + Send + Sync + 'static,
    ) -> Self {
        self.pay = Pay::When(Arc::new(due));
        self
    }

    /// The true cost is read from the response: a header, an extension. The [`cost`](Rule::cost) is
    /// taken before, as an estimate; what is missing is taken and what is too much is given back.
    /// `None` leaves the estimate.
    pub fn settle(
        mut self,
        cost: impl Fn(&ResponseHead<'_>) -> Option<u64> + Send + Sync + 'static,
    ) -> Self {
        self.pay = Pay::Told(Arc::new(cost));
        self
    }

    /// The true cost is the size of the response's body: a unit for each `bytes`, rounded up,
    /// counted while it is sent. A client that goes away pays for what it was sent.
    pub fn settle_bytes(mut self, bytes: u64) -> Self {
        self.pay = Pay::Bytes(bytes.max(1));
        self
    }

    /// The true cost is how long the request took, from its arrival to the end of its response: a
    /// unit for each `unit`, rounded up.
    pub fn settle_time(mut self, unit: Duration) -> Self {
        self.pay = Pay::Time(unit.max(Duration::from_micros(1)));
        self
    }

    /// The true cost is what the service writes into a [`Meter`], which it finds in the request's
    /// extensions, until the response is over: the tokens of a model that answers as a stream, say.
    /// If it writes nothing, the estimate stays.
    pub fn settle_metered(mut self) -> Self {
        self.pay = Pay::Metered;
        self
    }
}

impl fmt::Debug for Pay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Pay::Before => f.write_str("before"),
            Pay::When(_) => f.write_str("when due"),
            Pay::Told(_) => f.write_str("as told"),
            Pay::Bytes(bytes) => write!(f, "by {bytes} bytes"),
            Pay::Time(unit) => write!(f, "by {unit:?}"),
            Pay::Metered => f.write_str("metered"),
        }
    }
}

/// Where a service writes what a request has cost; see [`Rule::settle_metered`]. Clones are the
/// same meter.
#[derive(Clone, Debug)]
pub struct Meter(Arc<AtomicU64>);

/// Nothing has been written. A cost that high is none.
const UNWRITTEN: u64 = u64::MAX;

impl Meter {
    pub(super) fn new() -> Self {
        Meter(Arc::new(AtomicU64::new(UNWRITTEN)))
    }

    /// Adds to what was written.
    pub fn add(&self, units: u64) {
        let more = |now| {
            Some(
                if now == UNWRITTEN { units } else { u64::saturating_add(now, units) }
                    .min(UNWRITTEN - 1),
            )
        };
        let _ = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
    }

    /// Forgets what was written and writes this.
    pub fn set(&self, units: u64) {
        self.0.store(units.min(UNWRITTEN - 1), Ordering::Relaxed);
    }

    /// What was written, if anything.
    pub fn read(&self) -> Option<u64> {
        Some(self.0.load(Ordering::Relaxed)).filter(|units| *units != UNWRITTEN)
    }
}
