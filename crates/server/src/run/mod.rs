//! Starting and stopping: a configuration becomes open listeners, and an order to stop becomes
//! closed ones with every accepted request answered.

mod access;
mod listeners;
mod tasks;

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tidegate::Memory;
use tidegate::redis::RedisUrl;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio::task::JoinSet;

use self::access::Access;
use self::listeners::{Binder, Listeners};
use self::tasks::Tasks;
use crate::auth::Auth;
use crate::backend::Backend;
use crate::config::{Config, Overlay, TokenFiles};
use crate::engine::Engine;
use crate::listen::SharedBounds;
use crate::listen::tls::Tls;
use crate::memory::file::Held;
use crate::memory::snapshot::{self, Restored, Saver};
use crate::observe::{Log, Observer};
use crate::reload::{self, ConfigFile, WatchedSource};
use crate::rules::Rule;
use crate::rules::envoy::Domains;
use crate::start_error::StartError;
use crate::store::{self, StoreCheck};
use crate::supervise::Health;
use crate::watchdog::Watchdog;

/// How long accepted requests may take to finish after a stop. Together with the last snapshot and
/// the last lines of the log, ten seconds at most.
pub const DRAIN: Duration = Duration::from_secs(9);

/// How long the last calls to the store may take at the end.
const GIVING_BACK: Duration = Duration::from_millis(500);

/// The rules of a server that was started without any: enough to try every listener.
pub const BUILT_IN: &str = "\
rules:
  - name: per-ip
    by: [ip]
    limit: 10/s; 120/m
  - name: everyone
    limit: 1000/s
";

/// A running server.
#[derive(Debug)]
pub struct Running {
    /// The address of the HTTP listener.
    pub http: Option<SocketAddr>,
    /// The address of the gRPC listener.
    pub grpc: Option<SocketAddr>,
    /// The address of the RESP listener.
    pub resp: Option<SocketAddr>,
    /// The address of the admin listener.
    pub admin: Option<SocketAddr>,
    /// The address of the proxy.
    pub proxy: Option<SocketAddr>,
    engine: Engine,
    stop: watch::Sender<bool>,
    tasks: JoinSet<io::Result<()>>,
    saver: Option<Saver>,
    _watchdog: Watchdog,
}

/// What a server needs beside its configuration.
#[derive(Debug, Default)]
pub struct Options {
    /// The file of the configuration, which is reloaded when it changes.
    pub rules_file: Option<PathBuf>,
    /// The options that override the file, applied again after each reload. The configuration that
    /// `start` gets has them already.
    pub overlay: Overlay,
    /// Rules that apply in addition to those of the file, also after a reload.
    pub more_rules: Vec<Rule>,
    /// Whether listeners may accept any client from other machines.
    pub insecure: bool,
    /// Tokens that are given outright; missing ones are read from the files of the configuration.
    pub auth: Auth,
    /// Command line options that have a token as their value, which other users of the machine can
    /// see.
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

/// A store, and what was found when it was opened.
struct Opened {
    store: Backend,
    /// What was read from its snapshot file, if it has one.
    found: Option<(Restored, Held)>,
    /// The result of the check of a remote store.
    checked: Option<StoreCheck>,
}

impl Opened {
    fn of(store: Backend) -> Self {
        Opened { store, found: None, checked: None }
    }
}

/// Opens a store in memory, with its snapshot if it has one.
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

/// Opens the listeners over a store of the caller, instead of the one of the configuration.
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
    let Options { rules_file, overlay, more_rules, insecure, auth, tokens_in_arguments } = options;
    let bounds = SharedBounds::from(config.bounds.clone());
    let observer =
        Observer::new(Log::to(io::stderr(), config.log.level, config.log.format), &config.log);
    let tls = config.tls.clone().map(Tls::load).transpose()?;
    let access = Access::new(&config, auth)?;
    let knows_clients = access.has_check_token || tls.as_ref().is_some_and(Tls::knows_clients);
    let binder = Binder {
        may_be_open: knows_clients || config.insecure || insecure,
        tls: tls.clone(),
        bounds: bounds.clone(),
        observer: observer.clone(),
    };
    let listeners = Listeners::bind(binder, &config).await?;
    log_warnings(&observer, &config, &more_rules, &tokens_in_arguments);
    let engine = engine_over(store, &config, &more_rules, &observer);
    report_store(&engine, &config, checked).await?;
    configure(&engine, &config)?;
    let health = Health::default();
    let saver = found.map(|found| start_saver(found, &engine, &config)).transpose()?;
    let memory = in_memory(&engine);
    let enter = memory.map(|memory| move || _ = memory.len());
    let watchdog = Watchdog::start(enter, observer.clone(), health.clone());
    let (stop, stopped) = watch::channel(false);
    let mut tasks = Tasks { set: JoinSet::new(), observer: observer.clone(), health, stopped };
    let at = listeners.addresses();
    listeners.serve(&mut tasks, &engine, &access.guard, &config);
    if let Some(tls) = tls {
        let task = move || tls.clone().watch(observer.clone());
        tasks.keep("certificates", task);
    }
    let Access { guard, token_files, .. } = access;
    let domains = config.envoy.config.clone().map(WatchedSource::Domains);
    let tokens = (token_files != TokenFiles::default())
        .then(|| WatchedSource::Tokens(token_files, Arc::clone(&guard)));
    let configuration = rules_file.map(|file| {
        let started_with = config;
        let file = ConfigFile { file, overlay, more_rules, started_with, bounds, guard };
        WatchedSource::Configuration(Arc::new(file))
    });
    for (name, source) in
        [("configuration", configuration), ("domains", domains), ("tokens", tokens)]
    {
        let Some(source) = source else { continue };
        // Installed before the addresses are known: a SIGHUP without a handler ends the process.
        let _ = signal(SignalKind::hangup());
        let watching = engine.clone();
        tasks.keep(name, move || reload::watch(source.clone(), watching.clone()));
    }
    Ok(Running {
        http: at.http,
        grpc: at.grpc,
        resp: at.resp,
        admin: at.admin,
        proxy: at.proxy,
        engine,
        stop,
        tasks: tasks.set,
        saver,
        _watchdog: watchdog,
    })
}

/// Logs what works, but hardly does what its author meant.
fn log_warnings(
    observer: &Observer,
    config: &Config,
    more_rules: &[Rule],
    tokens_in_arguments: &[&str],
) {
    let log = observer.log();
    log.findings(&config.warnings());
    log.findings(&config.warnings_of_options(more_rules));
    for option in tokens_in_arguments {
        let advice = format!("use {option}-file FILE or {}", variable(option));
        log.warn(
            "every user of this machine can see a token among the arguments of a process",
            &[("option", option), ("advice", &advice)],
        );
    }
}

/// `TIDEGATE_ADMIN_TOKEN` of `--admin-token`.
fn variable(option: &str) -> String {
    format!("TIDEGATE_{}", option.trim_start_matches('-').replace('-', "_").to_ascii_uppercase())
}

/// The rules over the store.
fn engine_over(
    store: Backend,
    config: &Config,
    more_rules: &[Rule],
    observer: &Observer,
) -> Engine {
    let rules = config.rules.clone().and(more_rules);
    let rules = rules.with_ipv6_prefix(config.clients().prefix());
    Engine::with_observer(store, rules, observer.clone())
}

/// Logs the state of a remote store, now and when it changes.
async fn report_store(
    engine: &Engine,
    config: &Config,
    checked: Option<StoreCheck>,
) -> Result<(), StartError> {
    if let Backend::Resilient(resilient, redis) = engine.store() {
        store::report(resilient, redis, engine);
        let state = resilient.probe().await.state;
        if checked.is_some() && state.is_permanent() {
            let url = config.store.parse::<RedisUrl>();
            return Err(StartError::StoreRefuses {
                store: url.map_or_else(|_| config.store.clone(), |url| url.to_string()),
                why: state.why().into(),
                advice: state.advice(),
            });
        }
    }
    if let Some(check) = checked {
        store::report_check(&check, engine.observer());
    }
    Ok(())
}

/// Sets what protocols read for every request.
fn configure(engine: &Engine, config: &Config) -> Result<(), StartError> {
    let settings = engine.settings();
    settings.set_envoy_options(config.envoy.options);
    settings.set_response_options(config.http.response_options());
    settings.set_requests(config.requests());
    settings.set_clients(config.clients());
    if let Some(folder) = &config.envoy.config {
        let domains = Domains::load(folder)?;
        engine.observer().log().findings(domains.warnings());
        engine.set_domains(domains);
    }
    Ok(())
}

/// The store, if it is in memory.
fn in_memory(engine: &Engine) -> Option<Memory> {
    match engine.store() {
        Backend::Memory(memory) => Some(memory.clone()),
        Backend::Redis(_) | Backend::Resilient(..) => None,
    }
}

/// Writes snapshots from now on.
fn start_saver(
    (restored, held): (Restored, Held),
    engine: &Engine,
    config: &Config,
) -> Result<Saver, StartError> {
    let memory = in_memory(engine).expect("only a store in memory is restored from a file");
    let settings = config.memory.snapshot().expect("it was restored from the file of the settings");
    restored.tell(&settings, engine.observer());
    // A file over the size limit of the process is then an error, and not the end of the process.
    let too_long = rustix::process::Signal::XFSZ.as_raw();
    let _ = signal(SignalKind::from_raw(too_long));
    let file = settings.file.display().to_string();
    let saver = Saver::start(memory, settings, held, engine.observer().clone());
    saver.map_err(|source| StartError::Snapshot { file, source })
}

impl Running {
    /// The engine behind the listeners.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Closes the listeners, and waits for accepted requests, at most for [`DRAIN`]. Returns
    /// whether all of them were answered.
    pub async fn stop(mut self) -> bool {
        let _ = self.stop.send(true);
        let begun = Instant::now();
        let drained = async { while self.tasks.join_next().await.is_some() {} };
        let drained = tokio::time::timeout(DRAIN, drained).await.is_ok();
        if let Backend::Resilient(resilient, _) = self.engine.store() {
            // Returns leases, and charges what was allowed locally.
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
