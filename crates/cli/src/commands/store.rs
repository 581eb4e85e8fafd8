//! The store that `--store` names, if it is not in this process; and what to do when it has no answer.

use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use tidegate::{Failure, FailureKind, NoAnswer, Redis, RedisBuilder, RedisUrl, StoreError};
use tokio::runtime::Runtime;

use crate::args::StoreUrl;

/// How long a call may take. Somebody waits at a terminal, and nothing else waits for them.
const PATIENCE: Duration = Duration::from_secs(10);

/// How long connecting may take; less, so that it is known what was waited for.
const CONNECTING: Duration = Duration::from_secs(3);

/// A store on a server.
pub(super) struct Remote {
    pub(super) redis: Redis,
    /// Where it is, without credentials.
    pub(super) shown: String,
    pub(super) runtime: Runtime,
}

impl Remote {
    /// `None` for `memory`. Connects when it is used first.
    pub(super) fn open(url: &StoreUrl, set: impl FnOnce(RedisBuilder) -> RedisBuilder) -> Result<Option<Self>> {
        if url.0.eq_ignore_ascii_case("memory") {
            return Ok(None);
        }
        let url: RedisUrl = url.0.parse().context("--store: expected `memory` or the URL of a server")?;
        let shown = url.to_string();
        // A thread of its own, so that something happens while this one reads and writes files.
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.context("could not start a runtime")?;
        let builder = set(Redis::builder(url).timeout(PATIENCE).connect_timeout(CONNECTING));
        let redis = {
            let _inside = runtime.enter();
            builder.build().context("--store")?
        };
        Ok(Some(Remote { redis, shown, runtime }))
    }

    pub(super) fn run<F: Future>(&self, future: F) -> F::Output {
        self.runtime.block_on(future)
    }

    /// Connects to all servers, or says why not.
    pub(super) fn prepare(&self) -> Result<()> {
        self.run(self.redis.prepare()).map_err(|failure| no_server(&self.shown, &failure))
    }
}

/// The lack of an answer, with what to do about it.
pub(super) fn explained(error: StoreError) -> anyhow::Error {
    let failure = match &error {
        StoreError::Unavailable(cause) => cause.downcast_ref::<NoAnswer>().map(NoAnswer::failure),
        _ => None,
    };
    match failure.and_then(hint) {
        Some(hint) => anyhow!("{error}\n{hint}"),
        None => error.into(),
    }
}

/// Why a server cannot be used, with what to do about it.
pub(super) fn no_server(shown: &str, failure: &Failure) -> anyhow::Error {
    match hint(failure) {
        Some(hint) => anyhow!("{shown}: {failure}\n{hint}"),
        None => anyhow!("{shown}: {failure}"),
    }
}

fn hint(failure: &Failure) -> Option<&'static str> {
    Some(match failure.kind() {
        FailureKind::Refused => {
            "Is it running there? `redis-server --port 6379` or `valkey-server --port 6379` starts one; another address goes into \
             the URL: redis://HOST:PORT."
        }
        FailureKind::Unresolved => {
            "Is the name right? For Sentinel, the name of the service follows the hosts: redis+sentinel://HOST/SERVICE."
        }
        FailureKind::NoAuth => {
            "Put user and password into the URL: redis://USER:PASSWORD@HOST, or redis://:PASSWORD@HOST without a user. \
             TIDEGATE_STORE keeps it out of the list of processes."
        }
        FailureKind::WrongPass => {
            "Check user and password. Characters such as @ : / ? # % are percent-encoded in a URL: p@ss is written p%40ss."
        }
        FailureKind::Tls => {
            "If a certificate authority of your own has signed its certificate, name it: rediss://HOST?ca=FILE; if it wants one from you: \
             cert=FILE&key=FILE. A server without TLS is redis://."
        }
        FailureKind::Timeout => "Is the address right, and no firewall in between?",
        FailureKind::Disconnected | FailureKind::Protocol => {
            "Does it speak another protocol there? A server with TLS is rediss://; Sentinel is redis+sentinel://."
        }
        FailureKind::NoPerm => "`tidegate doctor --store URL` names the rights that are missing.",
        FailureKind::Moved | FailureKind::CrossSlot => "It is part of a cluster: write redis+cluster://.",
        FailureKind::ReadOnly => {
            "It is a replica. Name the primary, or let Sentinel find it: redis+sentinel://H1,H2,H3/SERVICE."
        }
        FailureKind::Other if failure.to_string().contains("cluster support disabled") => {
            "It is a single server: write redis:// instead of redis+cluster://."
        }
        FailureKind::Other if failure.to_string().contains("rejected SENTINEL") => {
            "It is not a sentinel, which usually listens on port 26379; a server is redis://."
        }
        _ => return None,
    })
}
