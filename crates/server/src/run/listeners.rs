//! The listeners: their addresses, and the protocol that each of them serves.

use std::net::SocketAddr;
use std::sync::Arc;

use tokio::net::TcpListener;

use super::tasks::Tasks;
use crate::auth::Guard;
use crate::config::{Config, Listen};
use crate::engine::Engine;
use crate::http::Endpoints;
use crate::listen::tls::Tls;
use crate::listen::{Listener, SharedBounds};
use crate::observe::Observer;
use crate::protocol::Protocol;
use crate::start_error::StartError;
use crate::{grpc, http, proxy, resp};

/// What all listeners have in common.
pub(super) struct Binder {
    /// Whether listeners may listen beyond this machine: clients are known, or it was allowed.
    pub(super) may_be_open: bool,
    pub(super) tls: Option<Tls>,
    pub(super) bounds: SharedBounds,
    pub(super) observer: Observer,
}

impl Binder {
    async fn bind(
        &self,
        protocol: Protocol,
        address: Option<SocketAddr>,
    ) -> Result<Option<Listener>, StartError> {
        let Some(address) = address else { return Ok(None) };
        let name = protocol.name();
        if !address.ip().is_loopback() && !self.may_be_open {
            return Err(StartError::Open { protocol: name, address });
        }
        let listener = TcpListener::bind(address).await;
        let listener =
            listener.map_err(|source| StartError::Listen { protocol: name, address, source })?;
        let (tls, bounds, observer) =
            (self.tls.clone(), self.bounds.clone(), self.observer.clone());
        Ok(Some(Listener::new(protocol, listener, tls, bounds, observer)))
    }
}

/// The open listeners; `None` is closed.
pub(super) struct Listeners {
    http: Option<Listener>,
    grpc: Option<Listener>,
    resp: Option<Listener>,
    admin: Option<Listener>,
    proxy: Option<Listener>,
}

impl Listeners {
    pub(super) async fn bind(binder: Binder, config: &Config) -> Result<Self, StartError> {
        let listen = &config.listen;
        let http = binder.bind(Protocol::Http, listen.http).await?;
        let grpc = binder.bind(Protocol::Grpc, listen.grpc).await?;
        let resp = binder.bind(Protocol::Resp, listen.resp).await?;
        let admin = binder.bind(Protocol::Admin, listen.admin).await?;
        // The proxy requires no token: the upstream authenticates, and the rules limit.
        let binder = Binder { may_be_open: true, ..binder };
        let proxy = listen.proxy.filter(|_| config.proxy.is_some());
        let proxy = binder.bind(Protocol::Proxy, proxy).await?;
        Ok(Listeners { http, grpc, resp, admin, proxy })
    }

    /// The address of each listener.
    pub(super) fn addresses(&self) -> Listen {
        let at = |entrance: &Option<Listener>| entrance.as_ref().and_then(Listener::address);
        Listen {
            http: at(&self.http),
            grpc: at(&self.grpc),
            resp: at(&self.resp),
            admin: at(&self.admin),
            proxy: at(&self.proxy),
        }
    }

    /// Serves its protocol at each listener.
    pub(super) fn serve(
        self,
        tasks: &mut Tasks,
        engine: &Engine,
        guard: &Arc<Guard>,
        config: &Config,
    ) {
        let (health, stopped) = (tasks.health.clone(), tasks.stopped.clone());
        let has_admin_listener = self.admin.is_some();
        let part = if has_admin_listener { Endpoints::Checks } else { Endpoints::All };
        for (entrance, part) in [(self.http, part), (self.admin, Endpoints::Admin)] {
            let Some(entrance) = entrance else { continue };
            let (engine, guard) = (engine.for_protocol(entrance.protocol()), Arc::clone(guard));
            let (health, stopped) = (health.clone(), stopped.clone());
            tasks.set.spawn(http::serve_at(entrance, engine, guard, health, part, stopped));
        }
        if let Some(entrance) = self.grpc {
            let (engine, guard) = (engine.for_protocol(Protocol::Grpc), Arc::clone(guard));
            tasks.set.spawn(grpc::serve_at(entrance, engine, guard, health, stopped.clone()));
        }
        if let Some(entrance) = self.resp {
            let settings = resp::RespSettings {
                patience: config.bounds.patience,
                has_admin_calls: !has_admin_listener,
                ..resp::RespSettings::default()
            };
            let (engine, guard) = (engine.for_protocol(Protocol::Resp), Arc::clone(guard));
            tasks.set.spawn(resp::serve_at(entrance, engine, guard, settings, stopped.clone()));
        }
        if let (Some(entrance), Some(settings)) = (self.proxy, config.proxy.clone()) {
            let engine = engine.for_protocol(Protocol::Proxy);
            tasks.set.spawn(proxy::serve_at(entrance, engine, settings, stopped));
        }
    }
}
