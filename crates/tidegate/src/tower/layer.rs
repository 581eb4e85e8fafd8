//! The layer and its settings.

use std::fmt;
use std::sync::Arc;

use crate::http::headers::{Families, Item};
use ::http::{HeaderValue, Response};
use tidegate_core::{Algorithm, Decision, Limits};
use tower_layer::Layer;

use super::denial::Denial;
use super::key::Key;
use super::outage::Outage;
use super::rule::{Pay, Rule};
use super::service::RateLimit;
use super::tell::Fixed;
use crate::batch::Prepared;
use crate::clock::Clock;
use crate::http::PathPolicy;
use crate::limiter::{Backend, StoreHandle};
use crate::memory::Memory;
use crate::resilience::{OnFailure, Resilient};
use crate::store::{Charge, Scope, Store};

/// Limits requests before they reach a service. Clones, and all services that it is put around,
/// share their budgets.
///
/// ```
/// use tidegate::tower::{RateLimitLayer, Rule, key, of};
/// let layer = RateLimitLayer::rules([
///     // Both must have room; if one has not, nothing is taken from the other.
///     Rule::new("per-ip", "10/s; 120/m".parse()?, key::peer_ip()),
///     Rule::new("everybody", "1000/s".parse()?, key::everybody()).skip(of(|head| head.path() == "/healthz")),
/// ]);
/// # Ok::<(), tidegate::ParseError>(())
/// ```
#[derive(Clone, Debug)]
pub struct RateLimitLayer {
    setup: Arc<Setup>,
}

/// Everything that the services share.
#[derive(Clone)]
pub(super) struct Setup {
    pub(super) rules: Vec<Rule>,
    pub(super) store: Arc<StoreHandle>,
    pub(super) on_failure: Option<OnFailure>,
    /// Whether the store answers.
    pub(super) outage: Arc<Outage>,
    pub(super) grpc: bool,
    pub(super) denied: Option<Arc<dyn Fn(&Denial<'_>) -> Response<String> + Send + Sync>>,
    pub(super) observer: Option<Arc<dyn Fn(&Seen<'_>) + Send + Sync>>,
    /// Some rule waits for an async function.
    pub(super) later: bool,
    /// Some rule is settled by what the service writes.
    pub(super) metered: bool,
    pub(super) families: Families,
    /// Which targets are refused.
    pub(super) paths: PathPolicy,
    /// Some rule may look at the path.
    pub(super) of_path: bool,
    /// The names and limits that clients read, if they are always the same.
    pub(super) fixed: Option<Fixed>,
    /// The short way, if there is one.
    pub(super) short: Option<Short>,
}

/// One rule with one limit, in memory, and nothing to do afterwards: what is always the same of it,
/// in one place.
#[derive(Clone)]
pub(super) struct Short {
    pub(super) prepared: Prepared,
    /// What every request costs, if that is always the same and no request is excepted.
    pub(super) cost: Option<u64>,
    /// If the key is nothing but the other end of the connection: how many bits of IPv6 count.
    pub(super) peer: Option<u8>,
    /// If clients are told the usual: the rule's name in the headers, and its limit.
    pub(super) usual: Option<(Item, HeaderValue)>,
}

/// A decision, for whoever counts or logs them.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Seen<'a> {
    /// The rule that binds: of several that were asked together, the one that denied, or has the
    /// least left.
    pub rule: &'a str,
    /// What was decided.
    pub decision: &'a Decision,
    /// The rule is in shadow mode: whatever was decided, the request passed.
    pub shadow: bool,
}

impl RateLimitLayer {
    /// One rule, named `default`.
    pub fn new(limits: Limits, key: Key) -> Self {
        Self::rules([Rule::new("default", limits, key)])
    }

    /// Several rules. A request must find room under all of them, or nothing is taken.
    pub fn rules(rules: impl IntoIterator<Item = Rule>) -> Self {
        let rules: Vec<Rule> = rules.into_iter().collect();
        let later = |rule: &Rule| {
            rule.limits.is_later()
                || rule.cost.is_later()
                || rule.skip.is_later()
                || rule.key.is_later()
        };
        let of_path = |rule: &Rule| {
            rule.key.is_of_path()
                || rule.limits.value().is_none()
                || rule.cost.value().is_none()
                || rule.skip.value().is_none()
        };
        let rules_of_path = rules.iter().any(of_path);
        let mut setup = Setup {
            later: rules.iter().any(later),
            metered: rules.iter().any(|rule| matches!(rule.pay, Pay::Metered)),
            fixed: Fixed::of(&rules),
            rules,
            store: Arc::new(StoreHandle::of_memory(Memory::new())),
            on_failure: None,
            outage: Arc::default(),
            grpc: false,
            denied: None,
            observer: None,
            families: Families::IETF,
            paths: PathPolicy::default(),
            of_path: rules_of_path,
            short: None,
        };
        setup.short = setup.find_short();
        RateLimitLayer { setup: Arc::new(setup) }
    }

    fn with(mut self, change: impl FnOnce(&mut Setup)) -> Self {
        let setup = Arc::make_mut(&mut self.setup);
        change(setup);
        setup.short = setup.find_short();
        self
    }

    fn with_store(self, store: StoreHandle) -> Self {
        self.with(|setup| setup.store = Arc::new(store))
    }

    /// Keeps state in this memory store, and judges by its clock: a
    /// [`ManualClock`](crate::ManualClock) in tests.
    pub fn memory(self, memory: Memory) -> Self {
        self.with_store(StoreHandle::of_memory(memory))
    }

    /// Keeps state in any store; `clock` measures how long requests take.
    pub fn store(self, store: impl Store, clock: impl Into<Clock>) -> Self {
        self.with_store(StoreHandle::new(Backend::Other(Box::new(store)), clock.into()))
    }

    /// Keeps state in Redis or Valkey. Put [`Resilient`] before it, so that there is an answer in
    /// time whatever happens.
    #[cfg(feature = "redis")]
    pub fn redis(self, redis: crate::redis::Redis) -> Self {
        self.store(redis, crate::SystemClock::new())
    }

    /// Keeps state in a remote store, with [`Resilient`] before it.
    pub fn resilient(self, resilient: Resilient) -> Self {
        let clock = resilient.clock().clone();
        self.store(resilient, clock)
    }

    /// What happens when the store has no answer. With `Closed`, requests are answered with 503:
    /// that is not a denial. With `Open`, or if nothing is said, they pass. `Local` is for a store
    /// with [`Resilient`] before it; without, it is the same as `Open`.
    pub fn on_failure(self, policy: OnFailure) -> Self {
        self.with(|setup| setup.on_failure = Some(policy))
    }

    /// Which headers tell clients about their budget: those of the IETF's latest draft unless told
    /// otherwise. With `Families::NONE` they are told nothing but, on a denial, when to come back.
    pub fn headers(self, families: Families) -> Self {
        self.with(|setup| setup.families = families)
    }

    /// Which targets are refused with 400, or rewritten, where a rule has a function or is [by the
    /// path](super::key::path): by default those that services read as different paths, such as
    /// `/v1%2fsearch` and `/x/../v1/search`. Rules and the service get the same target.
    ///
    /// ```
    /// use tidegate::http::{EscapedSlashes, PathPolicy};
    /// use tidegate::tower::{RateLimitLayer, key};
    /// // `/files/a%2Fb` is the file `a/b`, and the service does not take that for a slash of its path.
    /// let paths = PathPolicy { escaped_slashes: EscapedSlashes::Keep, ..PathPolicy::default() };
    /// let layer = RateLimitLayer::new("10/s".parse()?, key::path()).paths(paths);
    /// # Ok::<(), tidegate::ParseError>(())
    /// ```
    pub fn paths(self, policy: PathPolicy) -> Self {
        self.with(|setup| setup.paths = policy)
    }

    /// All denials are in the words of gRPC. Otherwise those are that answer a request with the
    /// content type of gRPC.
    pub fn grpc(self) -> Self {
        self.with(|setup| setup.grpc = true)
    }

    /// Answers denials in your own way. The headers that tell about the budget are added to it, and
    /// [`Denial::response`] is what it would have been.
    pub fn denied(
        self,
        answer: impl Fn(&Denial<'_>) -> Response<String> + Send + Sync + 'static,
    ) -> Self {
        self.with(|setup| setup.denied = Some(Arc::new(answer)))
    }

    /// The same for axum, with responses that are its own: for `Router::layer`, and to stand around
    /// a whole [`Router`](axum::Router), which costs least.
    ///
    /// ```no_run
    /// # async fn serve() -> Result<(), Box<dyn std::error::Error>> {
    /// use std::net::SocketAddr;
    /// use axum::{Router, ServiceExt, extract::Request, routing::get};
    /// use tidegate::tower::{RateLimitLayer, key};
    /// use tower_layer::Layer;
    /// let limits = RateLimitLayer::new("10/s".parse()?, key::peer_ip()).axum();
    /// // Axum makes routes of handlers when the router gets its state: once, and not for every request.
    /// let router: Router = Router::new().route("/", get(|| async { "hello" })).with_state(());
    /// let app = limits.layer(router);
    /// let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    /// axum::serve(listener, ServiceExt::<Request>::into_make_service_with_connect_info::<SocketAddr>(app)).await?;
    /// # Ok(())
    /// # }
    /// ```
    #[cfg(feature = "axum")]
    pub fn axum(self) -> super::AxumLayer {
        super::AxumLayer(self)
    }

    /// Is called with every decision: for metrics, and to see what rules in shadow mode would do.
    /// It should be quick.
    pub fn observe(self, observer: impl Fn(&Seen<'_>) + Send + Sync + 'static) -> Self {
        self.with(|setup| setup.observer = Some(Arc::new(observer)))
    }
}

impl<S> Layer<S> for RateLimitLayer {
    type Service = RateLimit<S>;

    fn layer(&self, inner: S) -> RateLimit<S> {
        RateLimit::new(inner, Arc::clone(&self.setup))
    }
}

impl Short {
    /// The one rule that there is.
    pub(super) fn rule<'a>(&self, setup: &'a Setup) -> &'a Rule {
        &setup.rules[0]
    }
}

impl Setup {
    /// The memory store, if that is where state is kept.
    pub(super) fn memory(&self) -> Option<&Memory> {
        match &self.store.backend {
            Backend::Memory(memory) => Some(memory),
            Backend::Other(_) => None,
        }
    }

    /// The short way, if there is only one rule with only one limit, and nothing else to mind: no
    /// waiting, no paying afterwards, no lease.
    fn find_short(&self) -> Option<Short> {
        let ([rule], false, Some(memory)) = (&self.rules[..], self.later, self.memory()) else {
            return None;
        };
        let [limit] = rule.limits.value()?.as_slice() else { return None };
        let plain = matches!(rule.pay, Pay::Before) && !rule.shadow && self.observer.is_none();
        let scope = Scope::Rule((&*rule.name).into());
        if !plain || matches!(limit.algorithm(), Algorithm::Concurrent(_)) {
            return None;
        }
        let policy = self.fixed.as_ref().map(|fixed| fixed.policy.clone());
        let usual =
            if self.families == Families::IETF { Item::of(&rule.name).zip(policy) } else { None };
        let cost =
            if rule.skip.value() == Some(&false) { rule.cost.value().copied() } else { None };
        Some(Short { prepared: memory.prepare(&scope, limit), cost, peer: rule.key.peer(), usual })
    }

    pub(super) fn observe(&self, charges: &[Charge<'_>], decision: &Decision, shadow: bool) {
        if let Some(observer) = &self.observer {
            let rule = charges.get(decision.binding_index()).map(name_of).unwrap_or_default();
            observer(&Seen { rule, decision, shadow });
        }
    }
}

/// The rule that a charge is of.
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
