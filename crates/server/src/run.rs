//! Starting and stopping: a configuration becomes open listeners, and an order to stop becomes
//! closed ones with every accepted request answered.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tidegate::redis::RedisUrl;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::auth::{Auth, Guard, Secret};
use crate::backend::Backend;
use crate::config::{Config, Overlay, TokenFiles};
use crate::engine::Engine;
use crate::http::Part;
use crate::listen::tls::Tls;
use crate::listen::{Entrance, SharedBounds};
use crate::memory::snapshot::{self, Held, Restored, Saver};
use crate::observe::{Log, Observer};
use crate::protocol::Protocol;
use crate::reload::{ConfigFile, WatchedSource};
use crate::rules::Rule;
use crate::rules::envoy::Domains;
use crate::start_error::StartError;
use crate::store::StoreCheck;
use crate::supervise::Health;
use crate::watchdog::Watchdog;
use crate::{grpc, http, proxy, reload, resp, store, supervise};

/// How long requests that were accepted may take to finish after the order to stop. With the last
/// lines of the log, ten seconds at most.
pub const DRAIN: Duration = Duration::from_secs(9);

/// How long giving back to the store may take at the end.
const GIVING_BACK: Duration = Duration::from_millis(500);

/// Rules for whoever starts without any: enough to try every listener.
pub const BUILT_IN: &str = "\
rules:
  - name: per-ip
    by: [ip]
    limit: 10/s; 120/m
  - name: everyone
    limit: 1000/s
";

/// Open listeners.
#[derive(Debug)]
pub struct Running {
    /// Where HTTP listens.
    pub http: Option<SocketAddr>,
    /// Where gRPC listens.
    pub grpc: Option<SocketAddr>,
    /// Where RESP listens.
    pub resp: Option<SocketAddr>,
    /// Where HTTP listens for those who look after it.
    pub admin: Option<SocketAddr>,
    /// Where the proxy listens.
    pub proxy: Option<SocketAddr>,
    engine: Engine,
    stop: watch::Sender<bool>,
    protocols: JoinSet<io::Result<()>>,
    saver: Option<Saver>,
    _watchdog: Watchdog,
}

/// What is not in the rules file.
#[derive(Debug, Default)]
pub struct Options {
    /// The file the configuration came from, to be reloaded when it changes.
    pub rules_file: Option<PathBuf>,
    /// What overrides that file, also when it has changed. The configuration that `start` gets has
    /// it already.
    pub overlay: Overlay,
    /// Rules that apply beside those of the file, also when it has changed.
    pub more_rules: Vec<Rule>,
    /// Addresses beyond this machine are meant.
    pub insecure: bool,
    /// The token for checks and the one for everything; those that are missing are read from the
    /// files that the configuration names.
    pub auth: Auth,
    /// The arguments of the process that have a token as their value, which other users can see.
    pub tokens_in_arguments: Vec<&'static str>,
}

/// Opens the listeners.
///
/// # Errors
/// If an address, the store, a certificate or a token cannot be used.
pub async fn start(config: Config, options: Options) -> Result<Running, StartError> {
    let store = match config.store.as_str() {
        "memory" => memory(&config).await?,
        _ => {
            let (redis, check) = store::connect(&config).await?;
            let resilient = store::resilient(&redis, &config);
            Opened {
                store: Backend::Resilient(resilient, redis),
                found: None,
                checked: Some(check),
            }
        }
    };
    open(store, config, options).await
}

/// A store, and what was found out when it was opened.
struct Opened {
    store: Backend,
    /// It is to be kept in a file, and this was in it.
    found: Option<(Restored, Held)>,
    /// It is the one that the configuration names, and this was found out about it.
    checked: Option<StoreCheck>,
}

impl Opened {
    fn of(store: Backend) -> Self {
        Opened { store, found: None, checked: None }
    }
}

/// A store in memory, with what was saved of it, if that is wanted.
async fn memory(config: &Config) -> Result<Opened, StartError> {
    let builder = config.memory.builder();
    let Some(settings) = config.memory.snapshot() else {
        return Ok(Opened::of(Backend::Memory(builder.build())));
    };
    let file = settings.file.display().to_string();
    let wrong = |source: io::Error| StartError::Snapshot { file, source };
    let opened = tokio::task::spawn_blocking(move || snapshot::open(&settings, builder)).await;
    let (memory, found, held) =
        opened.unwrap_or_else(|error| Err(io::Error::other(error))).map_err(wrong)?;
    Ok(Opened { found: Some((found, held)), ..Opened::of(Backend::Memory(memory)) })
}

/// The same over a store that the caller brings, whatever the configuration says.
///
/// # Errors
/// If an address, a certificate or a token cannot be used.
pub async fn start_over(
    store: Backend,
    config: Config,
    options: Options,
) -> Result<Running, StartError> {
    open(Opened::of(store), config, options).await
}

/// Opens the listeners over a store.
async fn open(opened: Opened, config: Config, options: Options) -> Result<Running, StartError> {
    let Opened { store, found, checked } = opened;
    let (started_with, bounds) = (config.clone(), SharedBounds::from(config.bounds.clone()));
    let observer =
        Observer::new(Log::to(io::stderr(), config.log.level, config.log.format), &config.log);
    let tls = config.tls.clone().map(Tls::load).transpose()?;
    let token = |own: Option<Secret>, file: &Option<PathBuf>| match (own, file) {
        (None, Some(file)) => Secret::read(file).map(Some).map_err(StartError::Token),
        (own, _) => Ok(own),
    };
    // Tokens that were said outright stay; those in files are read again when they change.
    let token_files = TokenFiles {
        checks: config.tokens.checks.clone().filter(|_| options.auth.checks.is_none()),
        admin: config.tokens.admin.clone().filter(|_| options.auth.admin.is_none()),
    };
    let auth = Auth {
        checks: token(options.auth.checks, &config.tokens.checks)?,
        admin: token(options.auth.admin, &config.tokens.admin)?,
    };
    let guard = if config.listen.is_beyond_loopback() {
        Guard::beyond_loopback(auth.clone()).map_err(StartError::ShortToken)?
    } else {
        Guard::new(auth.clone())
    };
    guard.set_hosts(config.http.hosts.clone());
    let guard = Arc::new(guard);
    let known = auth.checks.is_some() || tls.as_ref().is_some_and(Tls::knows_clients);
    let house = House {
        open: known || config.insecure || options.insecure,
        tls: tls.clone(),
        bounds: bounds.clone(),
        observer: observer.clone(),
    };
    let http = house.entrance(Protocol::Http, config.listen.http).await?;
    let grpc = house.entrance(Protocol::Grpc, config.listen.grpc).await?;
    let resp = house.entrance(Protocol::Resp, config.listen.resp).await?;
    let admin = house.entrance(Protocol::Admin, config.listen.admin).await?;
    observer.log().findings(&started_with.warnings());
    observer.log().findings(&started_with.warnings_of_options(&options.more_rules));
    for option in &options.tokens_in_arguments {
        let advice = format!("use {option}-file FILE or {}", variable(option));
        let fields: [crate::observe::log::Field<'_>; 2] = [("option", option), ("advice", &advice)];
        observer.log().warn(
            "every user of this machine can see a token among the arguments of a process",
            &fields,
        );
    }
    // The proxy is for everybody: who may come is for the upstream to say, and how often for the
    // rules.
    let front = House { open: true, ..house };
    let proxy = front
        .entrance(Protocol::Proxy, config.listen.proxy.filter(|_| config.proxy.is_some()))
        .await?;
    let clients = config.clients();
    let engine = Engine::observed(
        store,
        config.rules.clone().and(&options.more_rules).with_ipv6_prefix(clients.prefix()),
        observer.clone(),
    );
    if let Backend::Resilient(resilient, redis) = engine.store() {
        store::report(resilient, redis, &engine);
        let state = resilient.probe().await.state;
        if checked.is_some() && state.is_permanent() {
            let shown = config
                .store
                .parse()
                .map_or_else(|_| config.store.clone(), |url: RedisUrl| url.to_string());
            return Err(StartError::StoreRefuses {
                store: shown,
                why: state.why().into(),
                advice: state.advice(),
            });
        }
    }
    if let Some(check) = checked {
        store::report_check(&check, &observer);
    }
    engine.settings().set_envoy_options(config.envoy.options);
    engine.settings().set_response_options(config.http.response_options());
    engine.settings().set_requests(config.requests());
    engine.settings().set_clients(clients);
    if let Some(folder) = &config.envoy.config {
        let domains = Domains::load(folder)?;
        observer.log().findings(domains.warnings());
        engine.set_domains(domains);
    }
    let health = Health::default();
    let (stop, stopped) = watch::channel(false);
    let memory = match engine.store() {
        Backend::Memory(memory) => Some(memory.clone()),
        Backend::Redis(_) | Backend::Resilient(..) => None,
    };
    let saver = match (&memory, found, config.memory.snapshot()) {
        (Some(memory), Some((found, held)), Some(settings)) => {
            found.tell(&settings, &observer);
            // A file that may not be longer is an error then, and not the end of the process.
            let too_long = rustix::process::Signal::XFSZ.as_raw();
            let _ =
                tokio::signal::unix::signal(tokio::signal::unix::SignalKind::from_raw(too_long));
            let file = settings.file.display().to_string();
            let saver = Saver::start(memory.clone(), settings, held, observer.clone());
            Some(saver.map_err(|source| StartError::Snapshot { file, source })?)
        }
        _ => None,
    };
    let enter = memory.map(|memory| move || _ = memory.len());
    let watchdog = Watchdog::start(enter, observer.clone(), health.clone());
    let mut protocols = JoinSet::new();
    let (http_at, grpc_at, resp_at, admin_at, proxy_at) =
        (at(&http), at(&grpc), at(&resp), at(&admin), at(&proxy));
    let part = if admin.is_some() { Part::Checks } else { Part::Whole };
    for (entrance, part) in [(http, part), (admin, Part::Admin)] {
        if let Some(entrance) = entrance {
            let (engine, guard, health) =
                (engine.at(entrance.protocol()), Arc::clone(&guard), health.clone());
            protocols.spawn(http::serve_at(entrance, engine, guard, health, part, stopped.clone()));
        }
    }
    if let Some(entrance) = grpc {
        let (engine, guard, health) =
            (engine.at(Protocol::Grpc), Arc::clone(&guard), health.clone());
        protocols.spawn(grpc::serve_at(entrance, engine, guard, health, stopped.clone()));
    }
    if let Some(entrance) = resp {
        let settings = resp::Settings {
            patience: config.bounds.patience,
            has_admin_calls: config.listen.admin.is_none(),
            ..resp::Settings::default()
        };
        protocols.spawn(resp::serve_at(
            entrance,
            engine.at(Protocol::Resp),
            Arc::clone(&guard),
            settings,
            stopped.clone(),
        ));
    }
    if let (Some(entrance), Some(settings)) = (proxy, config.proxy) {
        protocols.spawn(proxy::serve_at(
            entrance,
            engine.at(Protocol::Proxy),
            settings,
            stopped.clone(),
        ));
    }
    if let Some(tls) = tls {
        let (own, watching) = (observer.clone(), observer.clone());
        let task = move || tls.clone().watch(watching.clone());
        protocols.spawn(supervise::keep(
            "certificates",
            task,
            own,
            health.clone(),
            stopped.clone(),
        ));
    }
    let has_files = token_files != TokenFiles::default();
    let (overlay, more_rules) = (options.overlay, options.more_rules);
    let configuration = |file| {
        WatchedSource::Configuration(Arc::new(ConfigFile {
            file,
            overlay,
            more_rules,
            started_with,
            bounds,
            guard: Arc::clone(&guard),
        }))
    };
    let sources = [
        ("configuration", options.rules_file.map(configuration)),
        ("domains", config.envoy.config.map(WatchedSource::Domains)),
        ("tokens", has_files.then(|| WatchedSource::Tokens(token_files, Arc::clone(&guard)))),
    ];
    for (name, source) in sources {
        if let Some(source) = source {
            // Heard from now on, before anybody can know that we are here: a hangup that nobody
            // hears would end the process.
            let _ = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::hangup());
            let watching = engine.clone();
            let task = move || reload::watch(source.clone(), watching.clone());
            protocols.spawn(supervise::keep(
                name,
                task,
                observer.clone(),
                health.clone(),
                stopped.clone(),
            ));
        }
    }
    Ok(Running {
        http: http_at,
        grpc: grpc_at,
        resp: resp_at,
        admin: admin_at,
        proxy: proxy_at,
        engine,
        stop,
        protocols,
        saver,
        _watchdog: watchdog,
    })
}

/// `TIDEGATE_ADMIN_TOKEN` of `--admin-token`.
fn variable(option: &str) -> String {
    format!("TIDEGATE_{}", option.trim_start_matches('-').replace('-', "_").to_ascii_uppercase())
}

/// What all listeners have in common.
struct House {
    /// Listeners may listen beyond this machine: because somebody asks who is there, or because it
    /// was said.
    open: bool,
    tls: Option<Tls>,
    bounds: SharedBounds,
    observer: Observer,
}

impl House {
    async fn entrance(
        &self,
        protocol: Protocol,
        address: Option<SocketAddr>,
    ) -> Result<Option<Entrance>, StartError> {
        let Some(address) = address else { return Ok(None) };
        let name = protocol.name();
        if !address.ip().is_loopback() && !self.open {
            return Err(StartError::Open { protocol: name, address });
        }
        let listener = TcpListener::bind(address).await;
        let listener =
            listener.map_err(|source| StartError::Listen { protocol: name, address, source })?;
        let (tls, bounds, observer) =
            (self.tls.clone(), self.bounds.clone(), self.observer.clone());
        Ok(Some(Entrance::new(protocol, listener, tls, bounds, observer)))
    }
}

fn at(entrance: &Option<Entrance>) -> Option<SocketAddr> {
    entrance.as_ref().and_then(Entrance::address)
}

impl Running {
    /// The engine behind the listeners.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Closes the listeners, waits for what was accepted, at most [`DRAIN`]; says whether
    /// everything was answered.
    pub async fn stop(mut self) -> bool {
        let _ = self.stop.send(true);
        let begun = Instant::now();
        let drained = async { while self.protocols.join_next().await.is_some() {} };
        let drained = tokio::time::timeout(DRAIN, drained).await.is_ok();
        if let Backend::Resilient(resilient, _) = self.engine.store() {
            // What was taken ahead is given back, and what was let pass is charged.
            let _ = tokio::time::timeout(GIVING_BACK, resilient.close()).await;
        }
        if let Some(saver) = self.saver {
            saver
                .finish(DRAIN.saturating_sub(begun.elapsed()) + GIVING_BACK, self.engine.observer())
                .await;
        }
        let log = self.engine.observer().log();
        log.info("stopped", &[("everything_answered", &drained)]);
        log.flush(Duration::from_secs(1));
        drained
    }
}
