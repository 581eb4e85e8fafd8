//! The service: rules on a request, then calls the inner service or responds itself.

use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use ::http::{Request, Response};
use pin_project_lite::pin_project;
use tower_service::Service;

use super::body::RateLimitBody;
use super::budget_headers::BudgetHeaders;
use super::completion::{Completion, Settlement};
use super::fast_path::FastRuling;
use super::head::{RequestHead, ResponseHead};
use super::layer::Setup;
use super::per_request::BoxFuture;
use super::plan::{self, AllowedRequest, Ruling};
use super::rule::Meter;

/// A service that limits requests; see [`RateLimitLayer`](super::RateLimitLayer).
#[derive(Clone, Debug)]
pub struct RateLimit<S> {
    pub(super) inner: S,
    setup: Arc<Setup>,
}

impl<S> RateLimit<S> {
    pub(super) fn new(inner: S, setup: Arc<Setup>) -> Self {
        RateLimit { inner, setup }
    }
}

impl<S, A, B> Service<Request<A>> for RateLimit<S>
where
    S: Service<Request<A>, Response = Response<B>> + Clone,
{
    type Response = Response<RateLimitBody<B>>;
    type Error = S::Error;
    type Future = ResponseFuture<S, A>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    #[inline]
    fn call(&mut self, mut request: Request<A>) -> Self::Future {
        match self.try_fast_path(&mut request) {
            Some(FastRuling::Allow(headers)) => {
                ResponseFuture::calling(self.inner.call(request), headers)
            }
            other => self.call_general(other, request),
        }
    }
}

impl<S> RateLimit<S> {
    /// Normalizes the path, and rules on the request if the layer has a fast path.
    #[inline(always)]
    pub(super) fn try_fast_path<A>(&self, request: &mut Request<A>) -> Option<FastRuling> {
        if self.setup.uses_path
            && let Some(ruling) = plan::normalize_path(&self.setup, request)
        {
            return Some(FastRuling::Other(Box::new(ruling)));
        }
        self.setup.fast_path.as_ref()?.rule_on(&self.setup, &RequestHead::of(request))
    }

    /// Follows the ruling of the fast path, or takes the general path.
    #[inline(never)]
    pub(super) fn call_general<A>(
        &mut self,
        fast: Option<FastRuling>,
        mut request: Request<A>,
    ) -> ResponseFuture<S, A>
    where
        S: Service<Request<A>> + Clone,
    {
        let start = match fast {
            Some(FastRuling::Allow(headers)) => {
                Err(Ruling::Allow(AllowedRequest { headers, completions: Vec::new() }))
            }
            Some(FastRuling::Other(ruling)) => Err(*ruling),
            None => {
                let meter = self.setup.has_meter.then(|| {
                    let meter = Meter::new();
                    request.extensions_mut().insert(meter.clone());
                    meter
                });
                plan::start(&self.setup, &RequestHead::of(&request), meter)
            }
        };
        let state = match start {
            Err(ruling) => follow(&self.setup, ruling, request, &mut self.inner),
            Ok(ruling) => {
                // The instance that `poll_ready` returned ready for is the one to call.
                let clone = self.inner.clone();
                let inner = mem::replace(&mut self.inner, clone);
                State::Deciding {
                    ruling,
                    request: Some(request),
                    inner,
                    setup: Arc::clone(&self.setup),
                }
            }
        };
        ResponseFuture { state }
    }
}

/// Calls the service, or makes the response that the ruling demands.
fn follow<S, A>(setup: &Setup, ruling: Ruling, request: Request<A>, inner: &mut S) -> State<S, A>
where
    S: Service<Request<A>>,
{
    let response = match ruling {
        Ruling::Allow(allowed) => {
            return State::Calling { future: inner.call(request), allowed };
        }
        Ruling::Deny(denied) => setup.deny(RequestHead::of(&request), &denied),
        Ruling::MissingKey => setup.missing_key(RequestHead::of(&request)),
        Ruling::Unavailable => setup.unavailable(RequestHead::of(&request)),
        Ruling::Misconfigured(advice) => setup.misconfigured(RequestHead::of(&request), advice),
        Ruling::Invalid(invalid) => setup.invalid(RequestHead::of(&request), &invalid),
    };
    State::Responding { response: Some(Box::new(response)) }
}

pin_project! {
    /// The future of a response that went through a [`RateLimit`].
    pub struct ResponseFuture<S, A>
    where
        S: Service<Request<A>>,
    {
        #[pin]
        state: State<S, A>,
    }
}

pin_project! {
    #[project = StateProject]
    enum State<S, A>
    where
        S: Service<Request<A>>,
    {
        // The store decides.
        Deciding {
            ruling: BoxFuture<Ruling>,
            request: Option<Request<A>>,
            inner: S,
            setup: Arc<Setup>,
        },
        // The inner service works.
        Calling { #[pin] future: S::Future, allowed: AllowedRequest },
        // The store settles the true costs.
        Settling { settling: BoxFuture<AllowedRequest>, response: Option<S::Response> },
        // The layer responds itself.
        Responding { response: Option<Box<Response<String>>> },
    }
}

impl<S, A, B> Future for ResponseFuture<S, A>
where
    S: Service<Request<A>, Response = Response<B>>,
{
    type Output = Result<Response<RateLimitBody<B>>, S::Error>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        Poll::Ready(Ok(match ready!(self.poll_outcome(context))? {
            ServiceOutcome::Served(response, completions) => {
                response.map(|body| RateLimitBody::of_service(body, completions))
            }
            ServiceOutcome::Responded(response) => response.map(RateLimitBody::of_layer),
        }))
    }
}

/// A response, of the service or of the layer.
pub(super) enum ServiceOutcome<B> {
    /// The service's response, and what is left to do when its body ends.
    Served(Response<B>, Vec<Completion>),
    /// The layer's own response.
    Responded(Box<Response<String>>),
}

impl<S: Service<Request<A>>, A> ResponseFuture<S, A> {
    /// The service is called already, and the response only gets headers.
    #[inline(always)]
    pub(super) fn calling(future: S::Future, headers: BudgetHeaders) -> Self {
        let allowed = AllowedRequest { headers, completions: Vec::new() };
        ResponseFuture { state: State::Calling { future, allowed } }
    }

    /// The service's future and the headers, if the response only gets headers.
    #[cfg(feature = "axum")]
    pub(super) fn service(
        self: Pin<&mut Self>,
    ) -> Option<(Pin<&mut S::Future>, &mut BudgetHeaders)> {
        match self.project().state.project() {
            StateProject::Calling { future, allowed } if allowed.completions.is_empty() => {
                Some((future, &mut allowed.headers))
            }
            _ => None,
        }
    }
}

impl<S, A, B> ResponseFuture<S, A>
where
    S: Service<Request<A>, Response = Response<B>>,
{
    pub(super) fn poll_outcome(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Result<ServiceOutcome<B>, S::Error>> {
        const TWICE: &str = "a future is not polled again after it is ready";
        let mut state = self.project().state;
        loop {
            let next = match state.as_mut().project() {
                StateProject::Deciding { ruling, request, inner, setup } => {
                    let ruling = ready!(ruling.as_mut().poll(context));
                    follow(setup, ruling, request.take().expect(TWICE), inner)
                }
                StateProject::Calling { future, allowed } => {
                    let response = ready!(future.poll(context));
                    // Also taken if the service failed: then its completions run now.
                    let mut allowed = mem::take(allowed);
                    let response = response?;
                    if allowed.completions.is_empty() {
                        return Poll::Ready(Ok(finish(response, allowed)));
                    }
                    let settlements = begin_response(&mut allowed, &ResponseHead::of(&response));
                    if settlements.iter().all(Option::is_none) {
                        return Poll::Ready(Ok(finish(response, allowed)));
                    }
                    let settling = Box::pin(settle(allowed, settlements));
                    State::Settling { settling, response: Some(response) }
                }
                StateProject::Settling { settling, response } => {
                    let allowed = ready!(settling.as_mut().poll(context));
                    return Poll::Ready(Ok(finish(response.take().expect(TWICE), allowed)));
                }
                StateProject::Responding { response } => {
                    let response = response.take().expect(TWICE);
                    return Poll::Ready(Ok(ServiceOutcome::Responded(response)));
                }
            };
            state.set(next);
        }
    }
}

/// What each completion settles when the response begins.
fn begin_response(
    allowed: &mut AllowedRequest,
    response: &ResponseHead<'_>,
) -> Vec<Option<Settlement>> {
    allowed.completions.iter_mut().map(|completion| completion.begin(response)).collect()
}

/// Settles, and replaces the headers by those of the new decision. Without an answer of the store
/// the estimate stays charged.
async fn settle(
    mut allowed: AllowedRequest,
    settlements: Vec<Option<Settlement>>,
) -> AllowedRequest {
    for (completion, settlement) in allowed.completions.iter_mut().zip(settlements) {
        let Some(settlement) = settlement else { continue };
        let store = Arc::clone(&completion.setup.store);
        if let Ok(decision) = store.decide(settlement.check.clone()).await
            && let Some(headers) = completion.settled(&settlement, &decision)
        {
            allowed.headers = headers;
        }
    }
    allowed
}

/// Adds the headers, and leaves the other completions for the end of the body.
fn finish<B>(mut response: Response<B>, allowed: AllowedRequest) -> ServiceOutcome<B> {
    let AllowedRequest { mut headers, mut completions } = allowed;
    headers.add_to(&mut response);
    completions.retain(|completion: &Completion| !completion.is_done());
    ServiceOutcome::Served(response, completions)
}

impl<S: Service<Request<A>>, A> std::fmt::Debug for ResponseFuture<S, A> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ResponseFuture").finish_non_exhaustive()
    }
}
