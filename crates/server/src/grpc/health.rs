//! Health as gRPC clients ask for it: a real decision through the real path, no constant.

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

/// How often somebody who watches is told anew, if there is something new.
const EVERY: Duration = Duration::from_secs(1);

/// How many looks until the same is told again.
const REPEAT: u32 = 30;

/// Whether decisions can be had.
#[derive(Clone)]
pub(super) struct Health {
    engine: Engine,
    tasks: supervise::Health,
    shutdown: watch::Receiver<bool>,
}

impl Health {
    pub(super) fn new(
        engine: Engine,
        tasks: supervise::Health,
        shutdown: watch::Receiver<bool>,
    ) -> Health {
        Health { engine: engine.for_protocol(Protocol::Internal), tasks, shutdown }
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
impl health_server::Health for Health {
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
            let mut told = None;
            for look in 0_u32.. {
                let now = if known { health.status().await } else { ServingStatus::ServiceUnknown };
                // The same news now and then keep the connection from being taken for an idle one.
                let news_or_old = told != Some(now) || look.is_multiple_of(REPEAT);
                if news_or_old && news.send(Ok(answer(now))).await.is_err() {
                    return;
                }
                told = Some(now);
                if *shutdown.borrow() {
                    return; // the last news was that we stop
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
