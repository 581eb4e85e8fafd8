//! The layer and its settings.

use std::fmt;
use std::sync::Arc;

use ::http::Response;
use tidegate_core::{Decision, Limits};
use tower_layer::Layer;

use super::budget_headers::FixedPolicy;
use super::denial::Denial;
use super::fast_path::FastPath;
use super::key::Key;
use super::outage::LayerOutage;
use super::rule::{Payment, Rule};
use super::service::RateLimit;
use crate::clock::Clock;
use crate::http::PathPolicy;
use crate::http::headers::HeaderFamilies;
use crate::limiter::{Backend, StoreHandle};
use crate::memory::Memory;
use crate::resilience::Resilient;
use crate::store::{Charge, OnFailure, Scope, Store};

/// Limits requests before they reach a service. Clones, and all services inside the layer, share
/// their budgets.
///
/// ```
/// use tidegate::tower::{RateLimitLayer, Rule, key, per_request};
/// let layer = RateLimitLayer::rules([
///     // Both must have room; if one has not, nothing is taken from the other.
///     Rule::new("per-ip", "10/s; 120/m".parse()?, key::peer_ip()),
///     Rule::new("global", "1000/s".parse()?, key::global())
///         .skip(per_request(|head| head.path() == "/healthz")),
/// ]);
/// # Ok::<(), tidegate::ParseError>(())
/// ```
#[derive(Clone, Debug)]
pub struct RateLimitLayer {
    setup: Arc<Setup>,
}

/// The settings, which all services share.
#[derive(Clone)]
pub(super) struct Setup {
    pub(super) rules: Vec<Rule>,
    pub(super) store: Arc<StoreHandle>,
    pub(super) on_failure: Option<OnFailure>,
    pub(super) outage: Arc<LayerOutage>,
    pub(super) grpc: bool,
    pub(super) denied: Option<Arc<dyn Fn(&Denial<'_>) -> Response<String> + Send + Sync>>,
    pub(super) observer: Option<Arc<dyn Fn(&ObservedDecision<'_>) + Send + Sync>>,
    /// Whether a rule has an async function.
    pub(super) is_async: bool,
    /// Whether a rule is settled by a [`Meter`](super::Meter).
    pub(super) has_meter: bool,
    pub(super) families: HeaderFamilies,
    /// Which targets are refused.
    pub(super) paths: PathPolicy,
    /// Whether a rule may read the path.
    pub(super) uses_path: bool,
    /// The policies for clients, if they are the same for all requests.
    pub(super) fixed: Option<FixedPolicy>,
    /// The fast path, if the settings allow one.
    pub(super) fast_path: Option<FastPath>,
}

/// A decision, as an [observer](RateLimitLayer::observe) gets it.
///
/// ```
/// use tidegate::tower::{ObservedDecision, RateLimitLayer, key};
/// let log = |observed: &ObservedDecision<'_>| {
///     if !observed.decision.allowed() && !observed.shadow {
///         println!("denied by {}", observed.rule);
///     }
/// };
/// let layer = RateLimitLayer::new("10/s".parse()?, key::peer_ip()).observe(log);
/// # Ok::<(), tidegate::ParseError>(())
/// ```
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct ObservedDecision<'a> {
    /// The rule that binds: the one that denied, or the one with the least left.
    pub rule: &'a str,
    /// The decision over all limits that were checked.
    pub decision: &'a Decision,
    /// Whether the rule is in shadow mode, so that the request was allowed in any case.
    pub shadow: bool,
}

impl RateLimitLayer {
    /// Creates a layer of one rule, named `default`.
    pub fn new(limits: Limits, key: Key) -> Self {
        Self::rules([Rule::new("default", limits, key)])
    }

    /// Creates a layer of several rules. A request is allowed if all of them have room; otherwise
    /// nothing is taken.
    pub fn rules(rules: impl IntoIterator<Item = Rule>) -> Self {
        let rules: Vec<Rule> = rules.into_iter().collect();
        let is_async = |rule: &Rule| {
            rule.limits.is_async()
                || rule.cost.is_async()
                || rule.skip.is_async()
                || rule.key.is_async()
        };
        let uses_path = |rule: &Rule| {
            rule.key.uses_path()
                || rule.limits.value().is_none()
                || rule.cost.value().is_none()
                || rule.skip.value().is_none()
        };
        let uses_path = rules.iter().any(uses_path);
        let mut setup = Setup {
            is_async: rules.iter().any(is_async),
            has_meter: rules.iter().any(|rule| matches!(rule.payment, Payment::Metered)),
            fixed: FixedPolicy::of(&rules),
            rules,
            store: Arc::new(StoreHandle::of_memory(Memory::new())),
            on_failure: None,
            outage: Arc::default(),
            grpc: false,
            denied: None,
            observer: None,
            families: HeaderFamilies::IETF,
            paths: PathPolicy::default(),
            uses_path,
            fast_path: None,
        };
        setup.fast_path = FastPath::of(&setup);
        RateLimitLayer { setup: Arc::new(setup) }
    }

    fn with(mut self, change: impl FnOnce(&mut Setup)) -> Self {
        let setup = Arc::make_mut(&mut self.setup);
        change(setup);
        setup.fast_path = FastPath::of(setup);
        self
    }

    fn with_store(self, store: StoreHandle) -> Self {
        self.with(|setup| setup.store = Arc::new(store))
    }

    /// Keeps state in this memory store and uses its clock: in tests a
    /// [`ManualClock`](crate::ManualClock).
    pub fn memory(self, memory: Memory) -> Self {
        self.with_store(StoreHandle::of_memory(memory))
    }

    /// Keeps state in any store; `clock` measures the duration of requests.
    pub fn store(self, store: impl Store, clock: impl Into<Clock>) -> Self {
        self.with_store(StoreHandle::new(Backend::Other(Box::new(store)), clock.into()))
    }

    /// Keeps state in Redis or Valkey. With [`Resilient`] before it, requests are decided in time
    /// even if it does not answer.
    #[cfg(feature = "redis")]
    pub fn redis(self, redis: crate::redis::Redis) -> Self {
        self.store(redis, crate::SystemClock::new())
    }

    /// Keeps state in a remote store behind the resilience layer.
    pub fn resilient(self, resilient: Resilient) -> Self {
        let clock = resilient.clock().clone();
        self.store(resilient, clock)
    }

    /// Sets what happens when the store does not answer. With `Closed`, the response is 503, which
    /// is not a denial. With `Open`, the default, requests are allowed. `Local` needs [`Resilient`]
    /// before the store; without it, it is the same as `Open`.
    pub fn on_failure(self, policy: OnFailure) -> Self {
        self.with(|setup| setup.on_failure = Some(policy))
    }

    /// Sets the headers that show clients their budget; the default are those of the IETF's latest
    /// draft. With `HeaderFamilies::NONE` there is only `Retry-After`, on a denial.
    pub fn headers(self, families: HeaderFamilies) -> Self {
        self.with(|setup| setup.families = families)
    }

    /// Sets which request targets are refused with 400 or rewritten, if a rule has a function or is
    /// [by the path](super::key::path). The default are targets that services read as different
    /// paths, such as `/v1%2fsearch` and `/x/../v1/search`. Rules and the service get the same
    /// target.
    ///
    /// ```
    /// use tidegate::http::{EscapedSlashes, PathPolicy};
    /// use tidegate::tower::{RateLimitLayer, key};
    /// // `/files/a%2Fb` is the file `a/b`: the service does not read `%2F` as a slash.
    /// let paths = PathPolicy { escaped_slashes: EscapedSlashes::Keep, ..PathPolicy::default() };
    /// let layer = RateLimitLayer::new("10/s".parse()?, key::path()).paths(paths);
    /// # Ok::<(), tidegate::ParseError>(())
    /// ```
    pub fn paths(self, policy: PathPolicy) -> Self {
        self.with(|setup| setup.paths = policy)
    }

    /// Denies all requests in the form of gRPC. By default only requests with the content type of
    /// gRPC are denied so.
    pub fn grpc(self) -> Self {
        self.with(|setup| setup.grpc = true)
    }

    /// Sets the response to denied requests. The layer adds the headers that show the budget;
    /// [`Denial::response`] is the default response.
    pub fn denied(
        self,
        answer: impl Fn(&Denial<'_>) -> Response<String> + Send + Sync + 'static,
    ) -> Self {
        self.with(|setup| setup.denied = Some(Arc::new(answer)))
    }

    /// Returns the layer with axum's own response type: for `Router::layer`, or around a complete
    /// [`Router`](axum::Router), which costs least.
    ///
    /// ```no_run
    /// # async fn serve() -> Result<(), Box<dyn std::error::Error>> {
    /// use std::net::SocketAddr;
    /// use axum::{Router, ServiceExt, extract::Request, routing::get};
    /// use tidegate::tower::{RateLimitLayer, key};
    /// use tower_layer::Layer;
    /// let limits = RateLimitLayer::new("10/s".parse()?, key::peer_ip()).axum();
    /// // With its state, axum builds the routes of the router here, and not for every request.
    /// let router: Router = Router::new().route("/", get(|| async { "hello" })).with_state(());
    /// let app = limits.layer(router);
    /// let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    /// let make = ServiceExt::<Request>::into_make_service_with_connect_info::<SocketAddr>(app);
    /// axum::serve(listener, make).await?;
    /// # Ok(())
    /// # }
    /// ```
    #[cfg(feature = "axum")]
    pub fn axum(self) -> super::AxumLayer {
        super::AxumLayer(self)
    }

    /// Calls `observer` with every decision: for metrics, and to see what rules in shadow mode
    /// would do. It runs before the response and must not block.
    pub fn observe(self, observer: impl Fn(&ObservedDecision<'_>) + Send + Sync + 'static) -> Self {
        self.with(|setup| setup.observer = Some(Arc::new(observer)))
    }
}

#[cfg(test)]
impl RateLimitLayer {
    pub(super) fn without_fast_path(mut self) -> Self {
        Arc::make_mut(&mut self.setup).fast_path = None;
        self
    }

    pub(super) fn has_fast_path(&self) -> bool {
        self.setup.fast_path.is_some()
    }
}

impl<S> Layer<S> for RateLimitLayer {
    type Service = RateLimit<S>;

    fn layer(&self, inner: S) -> RateLimit<S> {
        RateLimit::new(inner, Arc::clone(&self.setup))
    }
}

impl Setup {
    /// The memory store, if the layer has one.
    pub(super) fn memory(&self) -> Option<&Memory> {
        match &self.store.backend {
            Backend::Memory(memory) => Some(memory),
            Backend::Other(_) => None,
        }
    }

    pub(super) fn observe(&self, charges: &[Charge<'_>], decision: &Decision, shadow: bool) {
        if let Some(observer) = &self.observer {
            let rule = charges.get(decision.binding_index()).map(name_of).unwrap_or_default();
            observer(&ObservedDecision { rule, decision, shadow });
        }
    }
}

/// The name of the rule that a charge belongs to.
pub(super) fn name_of<'a>(charge: &'a Charge<'_>) -> &'a str {
    match &charge.subject.scope {
        Scope::Rule(name) => name,
        Scope::AdHoc => "",
    }
}

impl fmt::Debug for Setup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Setup")
            .field("rules", &self.rules)
            .field("on_failure", &self.on_failure)
            .finish_non_exhaustive()
    }
}
