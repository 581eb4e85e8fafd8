//! Whether this server should get requests, and what is not as configured: the response of
//! `/readyz` and of health over gRPC.
//!
//! The response is text: `ready`, `degraded` or `not ready`, then a line for each reason, `store:
//! …`. Only `not ready` is a 503: a load balancer should send requests elsewhere. `degraded` means
//! that requests are answered, but not as the configuration says.

use std::fmt;

use crate::engine::Engine;
use crate::probe::StoreProbe;
use crate::store_problem::store_problem;
use crate::supervise::Health;
use axum::body::Body;
use axum::http::{HeaderValue, Response, StatusCode, header};

/// The reasons why the server is not fully ready; empty if it is.
#[derive(Debug, Default)]
pub(crate) struct Readiness(Vec<Reason>);

/// A reason why the server is not fully ready.
#[derive(Debug)]
pub(crate) struct Reason {
    /// The part of the server, in one word.
    pub(crate) about: &'static str,
    /// What is wrong, and how requests are handled meanwhile.
    pub(crate) text: String,
    /// Whether requests should go to another server.
    pub(crate) is_fatal: bool,
}

impl Readiness {
    /// Checks the process, the store and the configuration.
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

    /// The response of `/readyz`; only its first word if `is_brief`.
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
        let reason = |about, is_fatal| Reason { about, text: "is unavailable".into(), is_fatal };
        for (reasons, ready, text) in [
            (vec![], true, "ready\n"),
            (vec![reason("store", false)], true, "degraded\nstore: is unavailable\n"),
            (
                vec![reason("store", true), reason("config", false)],
                false,
                "not ready\nstore: is unavailable\nconfig: is unavailable\n",
            ),
        ] {
            let readiness = Readiness(reasons);
            assert_eq!((readiness.is_ready(), readiness.to_string().as_str()), (ready, text));
        }
    }
}
