//! The layer for axum, whose responses are axum's own type.
//!
//! It can be around a complete router, where its futures need not be boxed, and leaves bodies as
//! they are if no charge is settled at their end.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use ::http::Request;
use axum::response::Response;
use pin_project_lite::pin_project;
use tower_layer::Layer;
use tower_service::Service;

use super::body::RateLimitBody;
use super::fast_path::FastRuling;
use super::layer::RateLimitLayer;
use super::service::{RateLimit, ResponseFuture, ServiceOutcome};

/// A [`RateLimitLayer`] for axum; see [`RateLimitLayer::axum`].
#[derive(Clone, Debug)]
pub struct AxumLayer(pub(super) RateLimitLayer);

/// A service that limits requests, with axum's own response type; see [`RateLimitLayer::axum`].
#[derive(Clone, Debug)]
pub struct AxumRateLimit<S>(RateLimit<S>);

impl<S> Layer<S> for AxumLayer {
    type Service = AxumRateLimit<S>;

    fn layer(&self, inner: S) -> AxumRateLimit<S> {
        AxumRateLimit(self.0.layer(inner))
    }
}

impl<S, A> Service<Request<A>> for AxumRateLimit<S>
where
    S: Service<Request<A>, Response = Response> + Clone,
{
    type Response = Response;
    type Error = S::Error;
    type Future = AxumFuture<S, A>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.0.poll_ready(context)
    }

    #[inline(never)]
    fn call(&mut self, mut request: Request<A>) -> Self::Future {
        // The steps of `RateLimit::call`, repeated because requests and futures are large, and are
        // moved less often without a call in between.
        match self.0.try_fast_path(&mut request) {
            Some(FastRuling::Allow(headers)) => {
                AxumFuture { future: ResponseFuture::calling(self.0.inner.call(request), headers) }
            }
            other => AxumFuture { future: self.0.call_general(other, request) },
        }
    }
}

pin_project! {
    /// The future of a response that went through an [`AxumRateLimit`].
    pub struct AxumFuture<S, A>
    where
        S: Service<Request<A>>,
    {
        #[pin]
        future: ResponseFuture<S, A>,
    }
}

impl<S, A> Future for AxumFuture<S, A>
where
    S: Service<Request<A>, Response = Response>,
{
    type Output = Result<Response, S::Error>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let mut own = self.project().future;
        if let Some((service, headers)) = own.as_mut().service() {
            // Changed in place, because responses are large.
            let mut response = service.poll(context);
            if let Poll::Ready(Ok(response)) = &mut response {
                headers.add_to(response);
            }
            return response;
        }
        Poll::Ready(Ok(match ready!(own.poll_outcome(context))? {
            ServiceOutcome::Served(response, completions) if completions.is_empty() => response,
            ServiceOutcome::Served(response, completions) => response
                .map(|body| axum::body::Body::new(RateLimitBody::of_service(body, completions))),
            ServiceOutcome::Responded(response) => response.map(axum::body::Body::from),
        }))
    }
}

impl<S: Service<Request<A>>, A> std::fmt::Debug for AxumFuture<S, A> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AxumFuture").finish_non_exhaustive()
    }
}
