//! Whether the store decides, found out by a real decision: at most ten times a second, however
//! often `/readyz` and health over gRPC are called.

use std::sync::Arc;
use std::time::Duration;

use tidegate::{Check, Limit, Op, Period};
use tokio::sync::Mutex;
use tokio::time::Instant;

use crate::engine::Engine;
use crate::protocol::Protocol;

/// How long an answer of the store is good for: however often readiness is asked for, the store is
/// asked ten times a second at most.
const FRESH: Duration = Duration::from_millis(100);

/// A real decision by the store, shared by all that ask for readiness. Clones are the same.
#[derive(Clone, Debug, Default)]
pub(crate) struct StoreProbe {
    last: Arc<Mutex<Option<(Instant, ProbeResult)>>>,
}

/// Why the store does not decide, if so.
pub(crate) type ProbeResult = Result<(), Arc<str>>;

impl StoreProbe {
    /// The last result if it is fresh. Otherwise the store is asked, and calls that arrive
    /// meanwhile wait for the same answer.
    pub(crate) async fn ask(&self, engine: &Engine) -> ProbeResult {
        let mut last = Arc::clone(&self.last).lock_owned().await;
        if let Some((at, result)) = &*last
            && at.elapsed() < FRESH
        {
            return result.clone();
        }
        let engine = engine.at(Protocol::Internal);
        // In a task of its own: a client that leaves while it waits would otherwise have the next
        // one ask again.
        let probe = tokio::spawn(async move {
            let limit = Limit::bucket(1, Period::SECOND).build().expect("one a second is a limit");
            let check = Check::of(Op::Peek).charge("tidegate-readyz", [&limit], 1);
            let result =
                engine.decide(&check).await.map(|_| ()).map_err(|error| error.to_string().into());
            *last = Some((Instant::now(), ProbeResult::clone(&result)));
            result
        });
        probe.await.unwrap_or_else(|_| Err("the probe of the store panicked".into()))
    }
}
