//! Rules and settings that change without a restart, also for open connections.

use std::sync::Arc;

use arc_swap::{ArcSwap, Guard};
use parking_lot::Mutex;
use tidegate::http::ClientIp;
use tidegate::memory::ReservedLimits;

use crate::backend::Backend;
use crate::observe::Metrics;
use crate::response_options::ResponseOptions;
use crate::rules::envoy::{Domains, EnvoyOptions};
use crate::rules::{Budget, Mode, RequestPolicy, Rules};

/// The rules and domains in force.
#[derive(Debug)]
pub(crate) struct LiveRules {
    rules: ArcSwap<Rules>,
    domains: ArcSwap<Domains>,
    /// Keeps the limits of all rules in the memory store, so that limits that callers bring cannot
    /// displace them.
    reserved: Mutex<Option<ReservedLimits>>,
}

impl LiveRules {
    pub(crate) fn new(rules: Rules) -> Self {
        let (rules, domains) = (ArcSwap::from_pointee(rules), ArcSwap::default());
        LiveRules { rules, domains, reserved: Mutex::default() }
    }

    pub(crate) fn rules(&self) -> Arc<Rules> {
        self.rules.load_full()
    }

    pub(crate) fn set_rules(&self, rules: Rules) {
        self.rules.store(Arc::new(rules));
    }

    pub(crate) fn domains(&self) -> Arc<Domains> {
        self.domains.load_full()
    }

    pub(crate) fn set_domains(&self, domains: Domains) {
        self.domains.store(Arc::new(domains));
    }

    pub(crate) fn with<T>(&self, look_up: impl FnOnce(&Domains, &Rules) -> T) -> T {
        look_up(&self.domains.load(), &self.rules.load())
    }

    /// Reserves the limits of all rules in a memory store, and names all rules in the metrics.
    pub(crate) fn publish(&self, store: &Backend, metrics: &Metrics) {
        let (rules, domains) = (self.rules.load(), self.domains.load());
        let all = || rules.iter().chain(domains.rules());
        if let Backend::Memory(memory) = store {
            let budgets = all().flat_map(|rule| {
                rule.overrides.iter().map(|other| &other.budget).chain([&rule.budget])
            });
            let limits = budgets.flat_map(|budget| match budget {
                Budget::Limits(limits) => limits.as_slice(),
                Budget::Unlimited | Budget::Deny | Budget::Exempt => &[],
            });
            let reserved = memory.reserve_limits(limits);
            *self.reserved.lock() = Some(reserved);
        }
        metrics.set_rules(all().map(|rule| (&rule.name, rule.mode == Mode::Shadow)));
    }
}

/// Settings that protocols read for every request.
#[derive(Debug)]
pub struct LiveSettings {
    envoy_options: ArcSwap<EnvoyOptions>,
    response_options: ArcSwap<ResponseOptions>,
    clients: ArcSwap<ClientIp>,
    requests: ArcSwap<RequestPolicy>,
}

impl Default for LiveSettings {
    fn default() -> Self {
        LiveSettings {
            envoy_options: ArcSwap::default(),
            response_options: ArcSwap::default(),
            clients: ArcSwap::from_pointee(ClientIp::of_peer()),
            requests: ArcSwap::default(),
        }
    }
}

impl LiveSettings {
    /// The options of Envoy's rate limit service.
    pub fn envoy_options(&self) -> EnvoyOptions {
        **self.envoy_options.load()
    }

    /// Replaces the options of Envoy's rate limit service.
    pub fn set_envoy_options(&self, envoy_options: EnvoyOptions) {
        self.envoy_options.store(Arc::new(envoy_options));
    }

    /// The options of responses over HTTP.
    pub fn response_options(&self) -> ResponseOptions {
        **self.response_options.load()
    }

    /// Replaces the options of responses over HTTP.
    pub fn set_response_options(&self, response_options: ResponseOptions) {
        self.response_options.store(Arc::new(response_options));
    }

    /// How the address of a client is found.
    pub fn clients(&self) -> Guard<Arc<ClientIp>> {
        self.clients.load()
    }

    /// Replaces how the address of a client is found.
    pub fn set_clients(&self, clients: ClientIp) {
        self.clients.store(Arc::new(clients));
    }

    /// Which paths and headers of a request are accepted for matching.
    pub fn requests(&self) -> Guard<Arc<RequestPolicy>> {
        self.requests.load()
    }

    /// Replaces which paths and headers of a request are accepted for matching.
    pub fn set_requests(&self, requests: RequestPolicy) {
        self.requests.store(Arc::new(requests));
    }
}
