//! The store that `--store` names, if it is a server, and the advice when it does not answer.

use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use tidegate::StoreError;
use tidegate::redis::{Failure, NoAnswer, Redis, RedisBuilder, RedisUrl};
use tokio::runtime::Runtime;

use crate::args::StoreUrl;

/// The timeout of a call. A person waits at a terminal, so it can be long.
const TIMEOUT: Duration = Duration::from_secs(10);

/// The timeout for connecting; shorter, so that the error can tell the two apart.
const CONNECTING: Duration = Duration::from_secs(3);

/// A store on a server.
pub(super) struct Remote {
    pub(super) redis: Redis,
    /// The URL without credentials.
    pub(super) shown: String,
    pub(super) runtime: Runtime,
}

impl Remote {
    /// Opens the store; `None` for `memory`. It connects on first use.
    pub(super) fn open(
        url: &StoreUrl,
        set: impl FnOnce(RedisBuilder) -> RedisBuilder,
    ) -> Result<Option<Self>> {
        if url.0.eq_ignore_ascii_case("memory") {
            return Ok(None);
        }
        if url.0.starts_with("http://") || url.0.starts_with("https://") {
            bail!(
                "--store: a Redis or Valkey is redis://HOST:PORT; a Tidegate server is given with --server URL"
            );
        }
        let url: RedisUrl = url.0.parse().context("--store")?;
        let shown = url.to_string();
        // A separate thread, so that calls progress while this one reads and writes files.
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.context("could not start a runtime")?;
        let builder = set(Redis::builder(url).timeout(TIMEOUT).connect_timeout(CONNECTING));
        let redis = {
            let _inside = runtime.enter();
            builder.build().context("--store")?
        };
        Ok(Some(Remote { redis, shown, runtime }))
    }

    pub(super) fn run<F: Future>(&self, future: F) -> F::Output {
        self.runtime.block_on(future)
    }

    /// Connects to all servers.
    pub(super) fn prepare(&self) -> Result<()> {
        self.run(self.redis.prepare()).map_err(|failure| no_server(&self.shown, &failure))
    }
}

/// A store error, with advice.
pub(super) fn explained(error: StoreError) -> anyhow::Error {
    let failure = match &error {
        StoreError::Unavailable(cause) => cause.downcast_ref::<NoAnswer>().map(NoAnswer::failure),
        _ => None,
    };
    match failure.map(Failure::advice) {
        Some(advice) if !advice.is_empty() => anyhow!("{error}\n{advice}"),
        _ => error.into(),
    }
}

/// Why a server cannot be used, with advice.
pub(super) fn no_server(shown: &str, failure: &Failure) -> anyhow::Error {
    match failure.advice() {
        "" => anyhow!("{shown}: {failure}"),
        advice => anyhow!("{shown}: {failure}\n{advice}"),
    }
}
