//! Starting and stopping: a configuration becomes open doors, and an order to stop becomes closed ones with every accepted request answered.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use tidegate::{Memory, Redis, RedisError};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::config::Config;
use crate::gate::{Backend, Door, Gate};
use crate::resp::Auth;
use crate::{http, reload, resp};

/// How long requests that were accepted may take to finish after the order to stop.
pub const DRAIN: Duration = Duration::from_secs(10);

/// Rules for whoever starts without any: enough to try every door.
pub const BUILT_IN: &str = "\
rules:
  - name: per-ip
    by: [ip]
    limit: 10/s; 120/m
  - name: everyone
    limit: 1000/s
";

/// Open doors.
#[derive(Debug)]
pub struct Running {
    /// Where HTTP listens.
    pub http: Option<SocketAddr>,
    /// Where RESP listens.
    pub resp: Option<SocketAddr>,
    gate: Gate,
    stop: watch::Sender<bool>,
    doors: JoinSet<io::Result<()>>,
}

/// The doors could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// An address cannot be listened on.
    #[error("cannot listen on {address} for {door}: {source}")]
    Listen {
        /// Which door.
        door: &'static str,
        /// Where.
        address: SocketAddr,
        /// Why not.
        source: io::Error,
    },
    /// A door would be open to everybody.
    #[error(
        "{door} would listen on {address}, open to everybody: expected a loopback address, or --insecure to say that this is meant"
    )]
    Open {
        /// Which door.
        door: &'static str,
        /// Where.
        address: SocketAddr,
    },
    /// The store's URL cannot be used.
    #[error("store: {0}")]
    Store(#[from] RedisError),
}

/// What is not in the rules file.
#[derive(Debug, Default)]
pub struct Options {
    /// The file the rules came from, to be read again when it changes.
    pub rules_file: Option<PathBuf>,
    /// Addresses beyond this machine are meant.
    pub insecure: bool,
    /// The word for checks and the word for everything, for the RESP door.
    pub auth: Auth,
}

/// Opens the doors.
///
/// # Errors
/// If an address or the store cannot be used.
pub async fn start(config: Config, options: Options) -> Result<Running, StartError> {
    let store = match config.store.as_str() {
        "memory" => Backend::Memory(Memory::new()),
        url => Backend::Redis(Redis::new(url)?),
    };
    start_over(store, config, options).await
}

/// The same over a store that the caller brings, whatever the configuration says.
///
/// # Errors
/// If an address cannot be used.
pub async fn start_over(store: Backend, config: Config, options: Options) -> Result<Running, StartError> {
    let closed_to_strangers = options.auth.checks.is_some();
    let http = listen("http", config.listen.http, options.insecure).await?;
    let resp = listen("resp", config.listen.resp, options.insecure || closed_to_strangers).await?;
    let gate = Gate::new(store, config.rules);
    let (stop, stopped) = watch::channel(false);
    let mut doors = JoinSet::new();
    let address = |listener: &Option<TcpListener>| listener.as_ref().and_then(|listener| listener.local_addr().ok());
    let (http_at, resp_at) = (address(&http), address(&resp));
    if let Some(listener) = http {
        doors.spawn(http::serve(listener, gate.at(Door::Http), stopped.clone()));
    }
    if let Some(listener) = resp {
        doors.spawn(resp::serve(
            listener,
            gate.at(Door::Resp),
            options.auth,
            resp::Settings::default(),
            stopped.clone(),
        ));
    }
    if let Some(file) = options.rules_file {
        doors.spawn(reload::watch(file, gate.clone(), stopped));
    }
    Ok(Running { http: http_at, resp: resp_at, gate, stop, doors })
}

async fn listen(door: &'static str, at: Option<SocketAddr>, open: bool) -> Result<Option<TcpListener>, StartError> {
    let Some(address) = at else { return Ok(None) };
    if !address.ip().is_loopback() && !open {
        return Err(StartError::Open { door, address });
    }
    TcpListener::bind(address).await.map(Some).map_err(|source| StartError::Listen { door, address, source })
}

impl Running {
    /// The gate behind the doors.
    pub fn gate(&self) -> &Gate {
        &self.gate
    }

    /// Closes the doors, waits for what was accepted, at most [`DRAIN`]; says whether everything was answered.
    pub async fn stop(mut self) -> bool {
        let _ = self.stop.send(true);
        let drained = async { while self.doors.join_next().await.is_some() {} };
        tokio::time::timeout(DRAIN, drained).await.is_ok()
    }
}
