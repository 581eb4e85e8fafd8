//! The gRPC health service. Each check makes a real decision.

use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tonic::codegen::async_trait;
use tonic::codegen::tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse, health_server};

use super::SERVICE;
use crate::engine::Engine;
use crate::protocol::Protocol;
use crate::readiness::Readiness;
use crate::supervise;

/// How often a watched status is checked.
const EVERY: Duration = Duration::from_secs(1);

/// After this many checks an unchanged status is sent again.
const REPEAT: u32 = 30;

/// Reports whether the server decides.
#[derive(Clone)]
pub(super) struct HealthService {
    engine: Engine,
    tasks: supervise::Health,
    shutdown: watch::Receiver<bool>,
}

impl HealthService {
    pub(super) fn new(
        engine: Engine,
        tasks: supervise::Health,
        shutdown: watch::Receiver<bool>,
    ) -> HealthService {
        HealthService { engine: engine.for_protocol(Protocol::Internal), tasks, shutdown }
    }

    async fn status(&self) -> ServingStatus {
        let ready =
            !*self.shutdown.borrow() && Readiness::of(&self.engine, &self.tasks).await.is_ready();
        if ready { ServingStatus::Serving } else { ServingStatus::NotServing }
    }
}

fn known(service: &str) -> bool {
    service.is_empty() || service == SERVICE
}

fn answer(status: ServingStatus) -> HealthCheckResponse {
    HealthCheckResponse { status: status.into() }
}

#[async_trait]
impl health_server::Health for HealthService {
    async fn check(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<HealthCheckResponse>, Status> {
        if !known(&request.get_ref().service) {
            return Err(Status::not_found(format!(
                "no such service: expected nothing or {SERVICE}"
            )));
        }
        Ok(Response::new(answer(self.status().await)))
    }

    type WatchStream = ReceiverStream<Result<HealthCheckResponse, Status>>;

    async fn watch(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let (news, stream) = mpsc::channel(1);
        let (health, mut shutdown) = (self.clone(), self.shutdown.clone());
        let known = known(&request.get_ref().service);
        tokio::spawn(async move {
            let mut sent = None;
            for check in 0_u32.. {
                let now = if known { health.status().await } else { ServingStatus::ServiceUnknown };
                // Repeating the status keeps the connection from looking idle.
                let is_due = sent != Some(now) || check.is_multiple_of(REPEAT);
                if is_due && news.send(Ok(answer(now))).await.is_err() {
                    return;
                }
                sent = Some(now);
                if *shutdown.borrow() {
                    return; // the client knows that the server stops
                }
                tokio::select! {
                    () = tokio::time::sleep(EVERY) => {}
                    () = news.closed() => return,
                    _ = shutdown.wait_for(|down| *down) => {}
                }
            }
        });
        Ok(Response::new(ReceiverStream::new(stream)))
    }
}
