//! Settings that change without a restart and that protocols read for every request.

use std::sync::Arc;

use arc_swap::{ArcSwap, Guard};
use tidegate::http::ClientIp;

use crate::response_options::ResponseOptions;
use crate::rules::RequestPolicy;
use crate::rules::envoy::EnvoyOptions;

/// Settings that change without a restart. Readers see the current value, also on open connections.
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
    /// How requests in Envoy's protocol are answered.
    pub fn envoy_options(&self) -> EnvoyOptions {
        **self.envoy_options.load()
    }

    /// Answers requests in Envoy's protocol this way from now on.
    pub fn set_envoy_options(&self, envoy_options: EnvoyOptions) {
        self.envoy_options.store(Arc::new(envoy_options));
    }

    /// How answers over HTTP are dressed.
    pub fn response_options(&self) -> ResponseOptions {
        **self.response_options.load()
    }

    /// Dresses answers over HTTP this way from now on.
    pub fn set_response_options(&self, response_options: ResponseOptions) {
        self.response_options.store(Arc::new(response_options));
    }

    /// How the address of a client is found, as it is set now.
    pub fn clients(&self) -> Guard<Arc<ClientIp>> {
        self.clients.load()
    }

    /// Finds the addresses of clients this way from now on, also on connections that are open.
    pub fn set_clients(&self, clients: ClientIp) {
        self.clients.store(Arc::new(clients));
    }

    /// Which requests over HTTP can be judged, as it is set now.
    pub fn requests(&self) -> Guard<Arc<RequestPolicy>> {
        self.requests.load()
    }

    /// Judges requests over HTTP this way from now on, also on connections that are open.
    pub fn set_requests(&self, requests: RequestPolicy) {
        self.requests.store(Arc::new(requests));
    }
}
