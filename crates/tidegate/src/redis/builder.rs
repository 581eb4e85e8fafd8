//! Settings of a [`Redis`] store.

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tidegate_redis_client::{
    Chance, Connect, Connector, Failure, InvalidSecret, RedisUrl, RedisUrlError, Router, Script,
    Secret, Settings,
};
use tokio::time::Instant;

use super::coalesce::Coalescer;
use super::keys::{InvalidKeys, InvalidNamespace, Keys};
use super::shared::{Counts, Shared};
use super::steps::Steps;
use super::witness::Witness;
use super::{Redis, SCRIPT};
use crate::clock::Clock;

/// The number of keys whose state a store remembers, unless [`RedisBuilder::witness_keys`] sets
/// another.
pub const DEFAULT_WITNESS_KEYS: usize = 16_384;

/// Longer timeouts would overflow the clock.
const LONGEST_TIMEOUT: Duration = Duration::from_secs(24 * 3600);

/// A store that cannot be built.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RedisError {
    /// The URL is invalid.
    #[error(transparent)]
    Url(#[from] RedisUrlError),
    /// The namespace is invalid.
    #[error(transparent)]
    Namespace(#[from] InvalidNamespace),
    /// The secret is too short or too long.
    #[error("secret: {0}")]
    Secret(#[from] InvalidSecret),
    /// A setting is out of range, or a file that the URL names cannot be used.
    #[error("{0}")]
    Settings(Failure),
}

/// Settings of a [`Redis`] store.
#[derive(Clone, Debug)]
#[must_use = "there is no store until `build` is called"]
pub struct RedisBuilder {
    url: RedisUrl,
    namespace: Option<String>,
    secret: Option<Secret>,
    clock: Option<Clock>,
    is_stand_in: bool,
    is_coalescing: Option<bool>,
    witness_keys: usize,
    settings: Settings,
}

impl RedisBuilder {
    /// Separates the keys from those of other stores on the same server: 1 to 64 letters, digits,
    /// `.`, `_` or `-`.
    pub fn namespace(mut self, namespace: impl Into<String>) -> Self {
        self.namespace = Some(namespace.into());
        self
    }

    /// Keeps clients from choosing slots: a digest keyed by this secret spreads keys over a
    /// cluster, so a client that does not know it cannot search for keys that all fall on one
    /// server.
    ///
    /// 16 to 512 bytes, best random. Every process that shares the store needs the same secret;
    /// with another one all keys have other names and all state starts empty. It overrides a secret
    /// in the URL, and is never shown.
    pub fn secret(mut self, secret: impl Into<String>) -> Self {
        self.secret = Some(Secret::new(secret));
        self
    }

    /// The longest time of one call, everything included; 100 ms by default, at most a day. A check
    /// over several slots of a cluster is up to three calls in sequence.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.settings.timeout = timeout.min(LONGEST_TIMEOUT);
        // A connection may be without a byte for as long as a call may take.
        self.settings.silence = self.settings.silence.max(self.settings.timeout);
        self
    }

    /// The longest time to connect; 1 s by default, at most a day. Calls still end by their own
    /// timeout.
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.settings.connect_timeout = timeout.min(LONGEST_TIMEOUT);
        self
    }

    /// The number of connections to each server, 1 to 8; 1 by default, which is nearly always best.
    pub fn connections(mut self, connections: usize) -> Self {
        self.settings.connections_per_node = connections;
        self
    }

    /// The number of keys whose state this process remembers, to restore what the server loses;
    /// [`DEFAULT_WITNESS_KEYS`] by default, 0 for none.
    pub fn witness_keys(mut self, keys: usize) -> Self {
        self.witness_keys = keys;
        self
    }

    /// Decides by this clock instead of the server's: for tests and simulations, never for several
    /// machines. Keys then live for at least an hour, since this clock may run at any speed.
    pub fn clock(mut self, clock: impl Into<Clock>) -> Self {
        (self.clock, self.is_stand_in) = (Some(clock.into()), false);
        self
    }

    /// Decides by this clock as if it were the server's, which may go back: for tests of such
    /// steps.
    #[doc(hidden)]
    pub fn server_clock(mut self, clock: impl Into<Clock>) -> Self {
        (self.clock, self.is_stand_in) = (Some(clock.into()), true);
        self
    }

    /// Whether concurrent checks of one key share calls. On by default, but not with a
    /// [clock](RedisBuilder::clock) of this process. Checks keep their order; another operation on
    /// the key may overtake waiting checks.
    pub fn coalesce(mut self, is_on: bool) -> Self {
        self.is_coalescing = Some(is_on);
        self
    }

    /// Connects by streams that `connector` opens, instead of sockets and TLS: for simulations.
    pub fn connector(mut self, connector: impl Connect) -> Self {
        self.settings.connector = Some(Connector::new(connector));
        self
    }

    /// Seeds the random numbers for reconnect delays and for the order of cluster nodes, so that
    /// simulations are reproducible.
    pub fn seed(mut self, seed: u64) -> Self {
        self.settings.chance = Chance::of_seed(seed);
        self
    }

    /// Builds the store, which needs a tokio runtime. A server that is down is not an error here:
    /// connections are made in the background.
    ///
    /// # Errors
    /// If the namespace, the secret or a setting is invalid.
    pub fn build(self) -> Result<Redis, RedisError> {
        let secret = self.secret.as_ref().or(self.url.secret());
        let keys =
            Keys::new(self.namespace.as_deref(), secret).map_err(|invalid| match invalid {
                InvalidKeys::Namespace(invalid) => RedisError::Namespace(invalid),
                InvalidKeys::Secret(invalid) => RedisError::Secret(invalid),
            })?;
        let (timeout, chance) = (self.settings.timeout, self.settings.chance.clone());
        let is_coalescing = self.is_coalescing.unwrap_or(self.clock.is_none());
        let router = Router::new(self.url, self.settings).map_err(RedisError::Settings)?;
        Ok(Redis {
            shared: Arc::new(Shared {
                router,
                script: Script::new(SCRIPT),
                keys,
                witness: Witness::new(self.witness_keys, &chance),
                clock: self.clock,
                is_stand_in: self.is_stand_in,
                timeout,
                started: Instant::now(),
                latest_us: AtomicU64::new(0),
                steps: Steps::new(),
                on_clock_step: OnceLock::new(),
                counts: Counts::default(),
                coalescer: Coalescer::new(),
                is_coalescing,
                chance,
            }),
        })
    }

    pub(super) fn new(url: RedisUrl) -> Self {
        RedisBuilder {
            url,
            namespace: None,
            secret: None,
            clock: None,
            is_stand_in: false,
            is_coalescing: None,
            witness_keys: DEFAULT_WITNESS_KEYS,
            settings: Settings::default(),
        }
    }
}
