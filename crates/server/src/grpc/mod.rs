//! The gRPC listener: Envoy's rate limit service, health and reflection.
//!
//! The [listener](crate::listen) has connections, their limits, TLS and tokens; this module routes
//! paths to services.

pub(crate) mod decide;
mod fast_path;
mod health;
pub(crate) mod json;
pub mod message;
mod reply;

use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http;
use tidegate::StoreError;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::time::timeout;
use tonic::codec::{BufferSettings, Codec};
use tonic::server::{Grpc, UnaryService};
use tonic::{Code, Request, Response, Status};
use tonic_health::pb::health_server::HealthServer;
use tonic_prost::ProstCodec;
use tower_service::Service;

pub use self::decide::{MAX_DESCRIPTORS, MAX_ENTRIES, MAX_TEXT_BYTES};
use self::fast_path::GrpcFastPath;
use self::message::{RateLimitRequest, RateLimitResponse};
use crate::auth::{Auth, Guard, May};
use crate::engine::{Engine, EngineError};
use crate::listen::http::{Access, Application, HttpServer};
use crate::listen::{Bounds, Listener};
use crate::protocol::Protocol;
use crate::supervise;

/// The largest message, in bytes.
pub const MAX_MESSAGE_BYTES: usize = 64 << 10;
/// Initial buffer size: messages are small.
const BUFFER_BYTES: usize = 1024;

/// The full name of the service.
pub const SERVICE: &str = "envoy.service.ratelimit.v3.RateLimitService";
const SHOULD_RATE_LIMIT: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";
const HEALTH: &str = "/grpc.health.v1.Health/";
/// The compiled `.proto` files.
const DESCRIPTORS: &[u8] = include_bytes!("rls.bin");

/// Why there is no response.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Problem {
    /// The request is not valid.
    #[error("{0}")]
    Invalid(String),
    /// The engine has no answer.
    #[error(transparent)]
    Engine(#[from] EngineError),
}

impl Problem {
    /// Whether the caller made the mistake.
    fn is_mistake(&self) -> bool {
        match self {
            Problem::Invalid(_) => true,
            Problem::Engine(error) => {
                matches!(error, EngineError::Cost(_) | EngineError::Store(StoreError::Invalid(_)))
            }
        }
    }
}

impl From<Problem> for Status {
    fn from(problem: Problem) -> Self {
        let text = problem.to_string();
        match &problem {
            _ if problem.is_mistake() => Status::invalid_argument(text),
            Problem::Engine(EngineError::NoRefunds(_)) => Status::permission_denied(text),
            _ => Status::unavailable(text),
        }
    }
}

/// Serves without TLS until `shutdown` is true, then answers what has arrived and returns.
///
/// # Errors
/// Never while it can accept connections: it waits when no file is free.
pub async fn serve(
    listener: TcpListener,
    engine: Engine,
    auth: Auth,
    shutdown: watch::Receiver<bool>,
) -> io::Result<()> {
    let listener =
        Listener::new(Protocol::Grpc, listener, None, Bounds::default(), engine.observer().clone());
    serve_at(listener, engine, Arc::new(Guard::new(auth)), supervise::Health::default(), shutdown)
        .await
}

/// Serves the connections of this listener.
pub(crate) async fn serve_at(
    listener: Listener,
    engine: Engine,
    guard: Arc<Guard>,
    tasks: supervise::Health,
    shutdown: watch::Receiver<bool>,
) -> io::Result<()> {
    let (bounds, observer) = (listener.bounds().clone(), listener.observer().clone());
    let patience = bounds.get().patience;
    let services = Services::new(engine, tasks, patience, shutdown.clone())?;
    let router = Router::new().fallback_service(services);
    let application = Application { router, access, refusal };
    let server = HttpServer::new(application, Protocol::Grpc, guard, bounds, observer);
    let down = shutdown.clone();
    listener.serve(shutdown, move |connection| server.clone().serve(connection, down.clone())).await
}

/// What a call of this method needs. Health is for monitoring, which has no token.
fn access(path: &str) -> Access {
    if path.starts_with(HEALTH) { May::Nothing.into() } else { May::Check.into() }
}

/// A rejected request as a gRPC status.
fn refusal(status: http::StatusCode, detail: &str) -> http::Response<Body> {
    let code = match status {
        http::StatusCode::UNAUTHORIZED => Code::Unauthenticated,
        http::StatusCode::FORBIDDEN => Code::PermissionDenied,
        http::StatusCode::URI_TOO_LONG => Code::Unimplemented,
        _ => Code::Internal,
    };
    Status::new(code, detail).into_http()
}

/// The response to a request that has not arrived in time.
fn late() -> http::Response<Body> {
    Status::deadline_exceeded("the request took too long to arrive").into_http()
}

/// The services by their paths.
#[derive(Clone)]
struct Services {
    engine: Engine,
    patience: Duration,
    health: HealthServer<health::HealthService>,
    reflection: Reflection,
}

type Answering = Pin<Box<dyn Future<Output = Result<http::Response<Body>, Infallible>> + Send>>;
/// A service whose type has no name.
type Reflection = Arc<dyn Fn(http::Request<Body>) -> Answering + Send + Sync>;

impl Services {
    fn new(
        engine: Engine,
        tasks: supervise::Health,
        patience: Duration,
        shutdown: watch::Receiver<bool>,
    ) -> io::Result<Services> {
        let health = HealthServer::new(health::HealthService::new(engine.clone(), tasks, shutdown));
        let health = health.max_decoding_message_size(MAX_MESSAGE_BYTES);
        Ok(Services {
            engine,
            patience,
            health,
            reflection: reflection().map_err(io::Error::other)?,
        })
    }
}

/// Both versions of reflection: new clients call v1, old ones v1alpha.
fn reflection() -> Result<Reflection, tonic_reflection::server::Error> {
    let about = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(DESCRIPTORS)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    let new = about().build_v1()?.max_decoding_message_size(MAX_MESSAGE_BYTES);
    let old = about().build_v1alpha()?.max_decoding_message_size(MAX_MESSAGE_BYTES);
    Ok(Arc::new(move |request| {
        if request.uri().path().starts_with("/grpc.reflection.v1.") {
            let answer = new.clone().call(request);
            Box::pin(async move { answer.await.map(|response| response.map(Body::new)) })
        } else {
            let answer = old.clone().call(request);
            Box::pin(async move { answer.await.map(|response| response.map(Body::new)) })
        }
    }))
}

impl Service<http::Request<Body>> for Services {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Answering;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let path = request.uri().path();
        if path == SHOULD_RATE_LIMIT {
            let (engine, patience) = (self.engine.clone(), self.patience);
            return Box::pin(async move {
                let request =
                    match GrpcFastPath::new(engine.clone(), patience).answer(request).await {
                        Ok(response) => return Ok(response),
                        Err(request) => request,
                    };
                let mut grpc = Grpc::new(Messages).max_decoding_message_size(MAX_MESSAGE_BYTES);
                let answer = grpc.unary(ShouldRateLimit(engine), request);
                Ok(timeout(patience, answer)
                    .await
                    .map_or_else(|_| late(), |answer| answer.map(Body::new)))
            });
        }
        if path.starts_with(HEALTH) {
            let answer = self.health.call(request);
            return Box::pin(async move { answer.await.map(|response| response.map(Body::new)) });
        }
        if path.starts_with("/grpc.reflection.") {
            return (self.reflection)(request);
        }
        let known = path.strip_prefix('/').is_some_and(|path| path.starts_with(SERVICE));
        let text =
            if known { "no such method: expected ShouldRateLimit" } else { "no such service" };
        Box::pin(async move { Ok(Status::unimplemented(text).into_http::<Body>()) })
    }
}

/// The one method of the service.
struct ShouldRateLimit(Engine);

impl UnaryService<RateLimitRequest> for ShouldRateLimit {
    type Response = RateLimitResponse;
    type Future = Pin<Box<dyn Future<Output = Result<Response<RateLimitResponse>, Status>> + Send>>;

    fn call(&mut self, request: Request<RateLimitRequest>) -> Self::Future {
        let engine = self.0.clone();
        Box::pin(async move {
            let answer = decide::decide(&engine, request.get_ref()).await;
            answer.map(Response::new).map_err(Status::from)
        })
    }
}

/// Protobuf, with small buffers.
#[derive(Clone, Copy, Default)]
struct Messages;

type Plain = ProstCodec<RateLimitResponse, RateLimitRequest>;

impl Codec for Messages {
    type Encode = RateLimitResponse;
    type Decode = RateLimitRequest;
    type Encoder = <Plain as Codec>::Encoder;
    type Decoder = <Plain as Codec>::Decoder;

    fn encoder(&mut self) -> Self::Encoder {
        Plain::raw_encoder(BufferSettings::new(BUFFER_BYTES, MAX_MESSAGE_BYTES))
    }

    fn decoder(&mut self) -> Self::Decoder {
        Plain::raw_decoder(BufferSettings::new(BUFFER_BYTES, MAX_MESSAGE_BYTES))
    }
}
