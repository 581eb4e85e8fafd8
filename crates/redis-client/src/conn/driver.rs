//! The task of a connection: connects, serves until the connection ends, reconnects.
//!
//! One attempt at a time, never one per call. The first attempt after a break starts immediately;
//! later ones wait up to twice as long each time, with full jitter. A call that arrives meanwhile
//! shortens the wait, down to a few attempts per second.

use std::future::poll_fn;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::Conn;
use super::serving::{Ended, Serving};
use crate::outcome::{Failure, FailureKind};

/// The first and the largest bound of the wait before an attempt; the wait is random below the
/// bound.
const FIRST_WAIT: Duration = Duration::from_millis(10);
const LONGEST_WAIT: Duration = Duration::from_secs(2);
/// A waiting call cuts the wait to a random time between these.
const DEMANDED_WAIT: (Duration, Duration) =
    (Duration::from_millis(100), Duration::from_millis(250));
/// The same for rejected credentials: retrying does not help, and servers log every attempt.
const REJECTED_WAIT: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
/// A connection that breaks sooner than this counts as a failed attempt.
const SHORT_LIFE: Duration = Duration::from_secs(1);

/// Starts the task. It ends when the connection is closed, or with its runtime.
pub(super) fn start(conn: &Arc<Conn>) {
    let conn = Stopping(Arc::clone(conn));
    tokio::spawn(async move { run(&conn.0).await });
}

/// Fails waiting calls when the task ends, for whatever reason.
struct Stopping(Arc<Conn>);

impl Drop for Stopping {
    fn drop(&mut self) {
        self.0.abandoned();
    }
}

async fn run(conn: &Arc<Conn>) {
    let mut failures = 0_u32;
    let mut connected_before = false;
    loop {
        conn.begin_attempt();
        let limit = conn.settings.connect_timeout;
        let opened = match tokio::time::timeout(limit, conn.dialer.open()).await {
            Ok(opened) => opened,
            Err(_) => {
                let text =
                    format!("no connection to {} within {} ms", conn.dialer, limit.as_millis());
                Err(Failure::local(FailureKind::Timeout, text))
            }
        };
        let failure = match opened {
            Ok(opened) => {
                let Some(epoch) = conn.opened() else { return };
                conn.counting.connects.one();
                if connected_before {
                    conn.counting.reconnects.one();
                }
                connected_before = true;
                let since = Instant::now();
                let mut serving = Serving::new(conn, opened, epoch);
                match poll_fn(|context| serving.poll(context)).await {
                    Ended::Stopped => return,
                    Ended::Retired => {
                        drop(serving);
                        conn.retired();
                        continue;
                    }
                    Ended::Broken(failure) if since.elapsed() >= SHORT_LIFE => {
                        drop(serving);
                        failures = 0;
                        conn.broke(&failure);
                        continue;
                    }
                    Ended::Broken(failure) => failure,
                }
            }
            Err(failure) => {
                conn.counting.failed_connects.one();
                failure
            }
        };
        conn.failed(&failure);
        failures = failures.saturating_add(1);
        wait(conn, failures, &failure).await;
        if conn.is_closed() {
            return;
        }
    }
}

/// Waits before the next attempt.
async fn wait(conn: &Conn, failures: u32, failure: &Failure) {
    let doubled = |first: Duration, longest: Duration| {
        first.saturating_mul(1 << failures.saturating_sub(1).min(16)).min(longest)
    };
    let chance = &conn.settings.chance;
    let (bound, demanded) = match failure.kind() {
        FailureKind::NoAuth | FailureKind::WrongPass | FailureKind::NoPerm => {
            let (first, longest) = REJECTED_WAIT;
            (first + chance.up_to(doubled(first, longest)), first)
        }
        _ => {
            let (least, most) = DEMANDED_WAIT;
            (chance.up_to(doubled(FIRST_WAIT, LONGEST_WAIT)), least + chance.up_to(most - least))
        }
    };
    let start = Instant::now();
    let _ = tokio::time::timeout_at(start + bound, async {
        tokio::time::sleep_until(start + demanded).await;
        conn.demanded().await;
    })
    .await;
}
