//! The layer for axum: what comes out of it is axum's own response.
//!
//! So it can stand around a whole router that is served, where nothing has to be boxed for it; and
//! in one, bodies that nobody watches stay as they are.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use ::http::Request;
use axum::response::Response;
use pin_project_lite::pin_project;
use tower_layer::Layer;
use tower_service::Service;

use super::body::Body;
use super::layer::RateLimitLayer;
use super::plan::Quick;
use super::service::{Outcome, RateLimit, ResponseFuture};

/// A [`RateLimitLayer`] for axum; see [`RateLimitLayer::axum`].
#[derive(Clone, Debug)]
pub struct AxumLayer(pub(super) RateLimitLayer);

/// A service of axum that limits requests; see [`RateLimitLayer::axum`].
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
        // As the other one does, but for what is around it: requests and futures are large, and are
        // moved less if nothing is done with them in between.
        match self.0.quickly(&mut request) {
            Some(Quick::Pass(tell)) => {
                AxumFuture { future: ResponseFuture::calling(self.0.inner.call(request), tell) }
            }
            other => AxumFuture { future: self.0.call_the_long_way(other, request) },
        }
    }
}

pin_project! {
    /// A response to come.
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
        if let Some((service, tell)) = own.as_mut().service() {
            // Responses are large: this one stays where it was put.
            let mut response = service.poll(context);
            if let Poll::Ready(Ok(response)) = &mut response {
                tell.add_to(response);
            }
            return response;
        }
        Poll::Ready(Ok(match ready!(own.poll_outcome(context))? {
            // Nobody has to watch the body.
            Outcome::Served(response, after) if after.is_empty() => response,
            Outcome::Served(response, after) => {
                response.map(|body| axum::body::Body::new(Body::of_service(body, after)))
            }
            Outcome::Answered(answer) => answer.map(axum::body::Body::from),
        }))
    }
}

impl<S: Service<Request<A>>, A> std::fmt::Debug for AxumFuture<S, A> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AxumFuture").finish_non_exhaustive()
    }
}
