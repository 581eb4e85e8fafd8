//! Whether this server should get requests, and what is not as configured: the answer of `/readyz`
//! and of health over gRPC.
//!
//! The answer is text: `ready`, `degraded` or `not ready`, then a line for each reason, `store: …`.
//! Only `not ready` is a 503: a load balancer should send requests elsewhere. `degraded` means that
//! requests are answered, but not as the configuration says.

use std::fmt;

use crate::engine::Engine;
use crate::probe::StoreProbe;
use crate::store_problem::store_problem;
use crate::supervise::Health;
use axum::body::Body;
use axum::http::{HeaderValue, Response, StatusCode, header};

/// What is not as it should be; nothing, if all is well.
#[derive(Debug, Default)]
pub(crate) struct Readiness(Vec<Reason>);

/// One thing that is not as it should be.
#[derive(Debug)]
pub(crate) struct Reason {
    /// What it is about, in one word.
    pub(crate) about: &'static str,
    /// What is wrong, and what happens meanwhile.
    pub(crate) text: String,
    /// Requests should go elsewhere.
    pub(crate) is_fatal: bool,
}

impl Readiness {
    /// Looks at everything.
    pub(crate) async fn of(engine: &Engine, health: &Health) -> Self {
        let mut reasons = Vec::new();
        if let Some(problem) = health.problem() {
            reasons.push(Reason { about: "process", text: problem.into(), is_fatal: true });
        }
        reasons.extend(store(engine, health.store_probe()).await);
        let differences = engine.observer().metrics().in_force().differences();
        reasons.extend(differences.into_iter().map(|text| Reason {
            about: "config",
            text,
            is_fatal: false,
        }));
        Readiness(reasons)
    }

    /// Whether requests should come here.
    pub(crate) fn is_ready(&self) -> bool {
        !self.0.iter().any(|reason| reason.is_fatal)
    }

    /// The answer of `/readyz`; only its word, if it is to be brief.
    pub(crate) fn into_response(self, is_brief: bool) -> Response<Body> {
        let mut text = self.to_string();
        if is_brief {
            text.truncate(text.find('\n').map_or(text.len(), |end| end + 1));
        }
        let mut response = Response::new(Body::from(text));
        if !self.is_ready() {
            *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
        }
        let text = HeaderValue::from_static("text/plain; charset=utf-8");
        response.headers_mut().insert(header::CONTENT_TYPE, text);
        response
    }
}

impl fmt::Display for Readiness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match (self.0.is_empty(), self.is_ready()) {
            (true, _) => "ready\n",
            (false, true) => "degraded\n",
            (false, false) => "not ready\n",
        })?;
        self.0.iter().try_for_each(|reason| writeln!(f, "{}: {}", reason.about, reason.text))
    }
}

/// A real decision through the real path, and what is known of the store besides.
async fn store(engine: &Engine, probe: &StoreProbe) -> Option<Reason> {
    if let Err(error) = probe.ask(engine).await {
        return Some(Reason { about: "store", text: error.to_string(), is_fatal: true });
    }
    let problem = store_problem(engine)?;
    let text =
        format!("{}: {}; enforced meanwhile: {}", problem.state, problem.why, problem.enforced);
    Some(Reason { about: "store", text, is_fatal: problem.denies })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_stand_below_the_word_and_one_that_is_fatal_is_enough() {
        let reason = |about, is_fatal| Reason { about, text: "is away".into(), is_fatal };
        for (reasons, ready, text) in [
            (vec![], true, "ready\n"),
            (vec![reason("store", false)], true, "degraded\nstore: is away\n"),
            (
                vec![reason("store", true), reason("config", false)],
                false,
                "not ready\nstore: is away\nconfig: is away\n",
            ),
        ] {
            let readiness = Readiness(reasons);
            assert_eq!((readiness.is_ready(), readiness.to_string().as_str()), (ready, text));
        }
    }
}
