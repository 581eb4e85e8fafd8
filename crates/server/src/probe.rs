//! Whether the store decides, found out by a real decision: at most ten times a second, however
//! often `/readyz` and health over gRPC are called.

use std::sync::Arc;
use std::time::Duration;

use tidegate::{Check, Limit, Op, Period};
use tokio::sync::Mutex;
use tokio::time::Instant;

use crate::engine::Engine;
use crate::protocol::Protocol;

/// How long a result is reused: the store is called at most ten times a second, however often
/// readiness is requested.
const FRESH: Duration = Duration::from_millis(100);

/// A real decision by the store, shared by all requests for readiness. Clones share it.
#[derive(Clone, Debug, Default)]
pub(crate) struct StoreProbe {
    last: Arc<Mutex<Option<(Instant, ProbeResult)>>>,
}

/// Why the store does not decide, if so.
pub(crate) type ProbeResult = Result<(), Arc<str>>;

impl StoreProbe {
    /// Returns the last result if it is fresh. Otherwise calls the store; calls that arrive
    /// meanwhile wait for the same result.
    pub(crate) async fn ask(&self, engine: &Engine) -> ProbeResult {
        let mut last = Arc::clone(&self.last).lock_owned().await;
        if let Some((at, result)) = &*last
            && at.elapsed() < FRESH
        {
            return result.clone();
        }
        let engine = engine.for_protocol(Protocol::Internal);
        // In a task of its own: otherwise a client that disconnects would cancel the probe for the
        // others.
        let probe = tokio::spawn(async move {
            let limit = Limit::bucket(1, Period::SECOND).build().expect("one a second is a limit");
            let check = Check::of(Op::Peek).charge("tidegate-readyz", [&limit], 1);
            let result =
                engine.check(&check).await.map(|_| ()).map_err(|error| error.to_string().into());
            *last = Some((Instant::now(), ProbeResult::clone(&result)));
            result
        });
        probe.await.unwrap_or_else(|_| Err("the probe of the store panicked".into()))
    }
}
