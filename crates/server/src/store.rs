//! A store in Redis or Valkey: connects at the start, finds out whether it can be used, and reports how it fares.

use std::fmt;
use std::path::Path;
use std::time::Duration;

use tidegate::{Failure, Near, Redis, RedisError, RedisUrl, SlowStore, StoreState};

use crate::config::Config;
use crate::observe::Observer;
use crate::observe::log::Field;
use crate::run::StartError;

/// How long a server may take at the start to connect and decide, before the start goes on without it.
const CONNECTING: Duration = Duration::from_secs(1);
/// How many decisions are measured at the start, and for how long at most.
const SAMPLES: usize = 5;
const MEASURING: Duration = Duration::from_millis(500);

/// What was found out about the store before the start.
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct StoreCheck {
    /// Why it cannot be reached, if it cannot.
    pub unreachable: Option<Failure>,
    /// Decisions take too large a part of the deadline.
    pub slow: Option<SlowStore>,
}

/// Connects to the store that a configuration names and finds out whether `serve` could use it. Nothing is found out about `memory`.
///
/// # Errors
/// If the store's URL cannot be used, or the store refuses in a way that waiting cannot mend. A store that is only unreachable is no error.
pub async fn check_store(config: &Config) -> Result<StoreCheck, StartError> {
    match config.store.as_str() {
        "memory" => Ok(StoreCheck::default()),
        _ => Ok(connect(config).await?.1),
    }
}

/// The remote store of a configuration, connected if that is possible.
pub(crate) async fn connect(config: &Config) -> Result<(Redis, StoreCheck), StartError> {
    let deadline = config.near.deadline;
    let url: RedisUrl = config.store.parse().map_err(RedisError::from)?;
    let shown = url.to_string();
    let redis = build(url, config.store_secret_file.as_deref(), deadline)?;
    let check = match tokio::time::timeout(CONNECTING, redis.prepare()).await {
        Ok(Ok(())) => StoreCheck { slow: too_slow(&redis, deadline).await, ..StoreCheck::default() },
        Ok(Err(failure)) if failure.is_permanent() => return Err(StartError::StoreRefuses { store: shown, failure }),
        Ok(Err(failure)) => StoreCheck { unreachable: Some(failure), ..StoreCheck::default() },
        Err(_) => StoreCheck::default(), // a probe with the usual deadline finds out what that means
    };
    Ok((redis, check))
}

/// Whether decisions take too large a part of the deadline, measured now.
async fn too_slow(redis: &Redis, deadline: Duration) -> Option<SlowStore> {
    redis.measure(SAMPLES, MEASURING).await.ok()?.too_slow_for(deadline)
}

/// The remote store that a configuration names, without the resilience layer: a call that has no answer within `timeout` is an error. Nothing, if state is
/// kept in the server's own memory.
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
fn build(url: RedisUrl, secret_file: Option<&Path>, deadline: Duration) -> Result<Redis, StartError> {
    let has_secret = url.has_secret();
    let builder = Redis::builder(url).timeout(deadline);
    let Some(file) = secret_file else { return Ok(builder.build()?) };
    let wrong = |problem: &dyn fmt::Display| StartError::StoreSecret(format!("{}: {problem}", file.display()));
    if has_secret {
        return Err(wrong(&"the URL of the store brings a secret, too: expected one of them"));
    }
    let secret = std::fs::read_to_string(file).map_err(|error| wrong(&error))?;
    match builder.secret(secret.trim_end_matches(['\r', '\n'])).build() {
        Err(RedisError::Secret(invalid)) => Err(wrong(&invalid)),
        built => Ok(built?),
    }
}

/// The resilience layer before a remote store.
pub(crate) fn near(redis: &Redis, config: &Config) -> Near {
    let settings = &config.near;
    let mut near = Near::builder(redis.clone())
        .deadline(settings.deadline)
        .max_in_flight(settings.max_in_flight as usize)
        .on_failure(config.on_store_failure.into())
        .lease_error_per_mille(u64::from(settings.lease_error_percent) * 10)
        .async_period(settings.async_period);
    if let Some(nodes) = settings.nodes {
        near = near.nodes(nodes.into());
    }
    if let Some(units) = settings.async_cap {
        near = near.async_cap(units.into());
    }
    near.build()
}

/// Logs every change of the store's state once, every step back of its clock once, and why single calls came to nothing, a few times a second.
pub(crate) fn report(near: &Near, redis: &Redis, observer: &Observer) {
    let (observer, why, clock) = (observer.clone(), observer.clone(), observer.clone());
    redis.on_clock_step(move |by| {
        let seconds = format!("{:.1}", by.as_secs_f64());
        let meaning = "what was used stays used and drains from the new time on; aligned windows may end early";
        let advice = "let the clocks of all store hosts follow a time server that slews instead of stepping";
        let fields: [Field<'_>; 3] = [("at_least_seconds", &seconds), ("meaning", &meaning), ("advice", &advice)];
        clock.log().warn("the clock of the store went back", &fields);
    });
    near.on_miss(move |error| why.missed(error));
    near.on_state(move |status| {
        let (state, enforced, from) = (&status.state, status.enforced(), status.nodes_from.name());
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
            _ => observer.log().warn("the store refuses charges: this node decides locally", fields),
        }
    });
}

/// Logs that decisions take too long.
pub(crate) fn report_slow(slow: &SlowStore, observer: &Observer) {
    observer.log().warn("the store is slow", &[("why", slow)]);
}
