//! A store in Redis or Valkey: connects at the start, checks that it can be used, and logs changes
//! of its state.

use std::fmt;
use std::path::Path;
use std::time::Duration;

use tidegate::redis::inspect::SlowStore;
use tidegate::redis::{Failure, Redis, RedisError, RedisUrl};
use tidegate::resilience::{Resilient, StoreState};

use crate::config::Config;
use crate::engine::Engine;
use crate::observe::Observer;
use crate::observe::log::Field;
use crate::start_error::StartError;
use crate::store_problem;

/// How long the start waits for the store to connect and decide; or this many deadlines, if that is
/// longer.
const CONNECTING: Duration = Duration::from_secs(1);
const DEADLINES: u32 = 5;
/// How long a check without a start waits.
const CHECKING: Duration = Duration::from_secs(4);
/// The number of decisions that are measured at the start, and the longest time for that.
const SAMPLES: usize = 5;
const MEASURING: Duration = Duration::from_millis(500);

/// The result of the check of a store.
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct StoreCheck {
    /// Why it cannot be reached, if so.
    pub unreachable: Option<Failure>,
    /// Decisions take too large a part of the deadline.
    pub slow: Option<SlowStore>,
    /// It did not answer within this time.
    pub unknown_after: Option<Duration>,
}

/// Connects to the store of a configuration and checks whether `serve` can use it. `memory` needs
/// no check.
///
/// # Errors
/// If the store's URL cannot be used, or the store refuses charges permanently. An unreachable
/// store is not an error.
pub async fn check_store(config: &Config) -> Result<StoreCheck, StartError> {
    match config.store.as_str() {
        "memory" => Ok(StoreCheck::default()),
        _ => Ok(connect_within(config, CHECKING).await?.1),
    }
}

/// The remote store of a configuration, connected if that is possible.
pub(crate) async fn connect(config: &Config) -> Result<(Redis, StoreCheck), StartError> {
    connect_within(config, CONNECTING).await
}

async fn connect_within(
    config: &Config,
    patience: Duration,
) -> Result<(Redis, StoreCheck), StartError> {
    let deadline = config.resilience.deadline;
    let url: RedisUrl = config.store.parse().map_err(RedisError::from)?;
    let shown = url.to_string();
    let redis = build(url, config.store_secret_file.as_deref(), deadline)?;
    let patience = patience.max(deadline * DEADLINES);
    let check = match tokio::time::timeout(patience, redis.prepare()).await {
        Ok(Ok(())) => {
            StoreCheck { slow: too_slow(&redis, deadline).await, ..StoreCheck::default() }
        }
        Ok(Err(failure)) if failure.is_permanent() => {
            let (why, advice) = (failure.to_string(), failure.advice());
            return Err(StartError::StoreRefuses { store: shown, why, advice });
        }
        Ok(Err(failure)) => StoreCheck { unreachable: Some(failure), ..StoreCheck::default() },
        Err(_) => StoreCheck { unknown_after: Some(patience), ..StoreCheck::default() },
    };
    Ok((redis, check))
}

/// Whether decisions take too large a part of the deadline, measured now.
async fn too_slow(redis: &Redis, deadline: Duration) -> Option<SlowStore> {
    redis.measure(SAMPLES, MEASURING).await.ok()?.too_slow_for(deadline)
}

/// The remote store of a configuration, without the resilience layer: a call without a response
/// within `timeout` is an error. `None` if state is kept in memory.
///
/// # Errors
/// If the URL or the file with its secret cannot be used.
pub fn remote_store(config: &Config, timeout: Duration) -> Result<Option<Redis>, StartError> {
    match config.store.as_str() {
        "memory" => Ok(None),
        url => {
            let url: RedisUrl = url.parse().map_err(RedisError::from)?;
            build(url, config.store_secret_file.as_deref(), timeout).map(Some)
        }
    }
}

/// A store at this URL, with the secret in this file.
fn build(
    url: RedisUrl,
    secret_file: Option<&Path>,
    deadline: Duration,
) -> Result<Redis, StartError> {
    let has_secret = url.has_secret();
    let builder = Redis::builder(url).timeout(deadline);
    let Some(file) = secret_file else { return Ok(builder.build()?) };
    let wrong = |problem: &dyn fmt::Display| {
        StartError::StoreSecret(format!("{}: {problem}", file.display()))
    };
    if has_secret {
        return Err(wrong(&"the URL of the store brings a secret, too: expected one of them"));
    }
    let secret = tidegate_bounded::files::read_text_file(
        file,
        tidegate_bounded::files::MAX_SECRET_FILE_BYTES,
    )
    .map_err(|error| wrong(&error))?;
    match builder.secret(secret.trim_end_matches(['\r', '\n'])).build() {
        Err(RedisError::Secret(invalid)) => Err(wrong(&invalid)),
        built => Ok(built?),
    }
}

/// The resilience layer before a remote store.
pub(crate) fn resilient(redis: &Redis, config: &Config) -> Resilient {
    let settings = &config.resilience;
    let mut resilient = Resilient::builder(redis.clone())
        .deadline(settings.deadline)
        .max_in_flight(settings.max_in_flight as usize)
        .on_failure(config.on_store_failure.into())
        .lease_error_per_mille(u64::from(settings.lease_error_percent) * 10)
        .async_period(settings.async_period);
    if let Some(nodes) = settings.nodes {
        resilient = resilient.nodes(nodes.into());
    }
    if let Some(units) = settings.async_cap {
        resilient = resilient.async_cap(units.into());
    }
    resilient.build()
}

/// Logs every change of the store's state once, every step back of its clock once, and why calls
/// failed, a few times a second.
pub(crate) fn report(resilient: &Resilient, redis: &Redis, engine: &Engine) {
    let (observer, rules) = (engine.observer(), engine.rules_reader());
    let (observer, why, clock) = (observer.clone(), observer.clone(), observer.clone());
    redis.on_clock_step(move |by| {
        let seconds = format!("{:.1}", by.as_secs_f64());
        let meaning = "what was used stays used and drains from the new time on; aligned windows may end early";
        let advice = "let the clocks of all store hosts follow a time server that slews instead of stepping";
        let fields: [Field<'_>; 3] = [("at_least_seconds", &seconds), ("meaning", &meaning), ("advice", &advice)];
        clock.log().warn("the clock of the store went back", &fields);
    });
    resilient.on_miss(move |error| why.missed(error));
    resilient.on_state(move |status| {
        let enforced = rules()
            .map_or_else(|| status.enforced(), |rules| store_problem::enforced(status, &rules));
        let (state, from) = (&status.state, status.nodes_from.name());
        let (reason, advice) = (state.why(), state.advice());
        let fields: [Field<'_>; 6] = [
            ("store", &state.name()),
            ("why", &reason),
            ("enforced", &enforced),
            ("nodes", &status.nodes),
            ("nodes_from", &from),
            ("advice", &advice),
        ];
        let fields = if advice.is_empty() { &fields[..5] } else { &fields };
        match state {
            StoreState::Healthy => observer.log().info("the store decides again", &fields[..1]),
            StoreState::Unreachable { .. } => {
                observer.log().warn("the store is unreachable: this node decides locally", fields);
            }
            _ => {
                observer.log().warn("the store refuses charges: this node decides locally", fields)
            }
        }
    });
}

/// Logs problems that the check at the start has found.
pub(crate) fn report_check(check: &StoreCheck, observer: &Observer) {
    if let Some(slow) = &check.slow {
        observer.log().warn("the store is slow", &[("why", slow)]);
    }
    if let Some(waited) = check.unknown_after {
        let why = unknown(waited);
        let advice = "tidegate doctor --store URL measures a decision";
        observer.log().warn("the store was not checked", &[("why", &why), ("advice", &advice)]);
    }
}

/// The message for a store that did not answer the check.
pub(crate) fn unknown(waited: Duration) -> String {
    format!(
        "it did not answer the start check within {waited:?}: whether it decides in time is not known"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The start does not wait longer for the store than its patience.
    #[tokio::test]
    async fn a_check_that_takes_too_long_finds_nothing_out() {
        let server = tidegate_testkit::Server::start(tidegate_testkit::Flavor::Redis7);
        server.stop_signal();
        let text =
            format!("store: {}\nresilience: {{ deadline_ms: 1 }}\nrules: []\n", server.url());
        let config = Config::parse(&text, "test").unwrap();
        let (_, check) = connect_within(&config, Duration::from_millis(20)).await.unwrap();
        assert_eq!(check.unknown_after, Some(Duration::from_millis(20)), "{check:?}");
        assert_eq!(
            unknown(Duration::from_millis(20)),
            "it did not answer the start check within 20ms: whether it decides in time is not known"
        );
    }
}
