//! The service: asks, and calls the one it stands before, or not.

use std::mem;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};

use ::http::{Request, Response};
use pin_project_lite::pin_project;
use tower_service::Service;

use super::after::After;
use super::body::Body;
use super::head::{Head, ResponseHead};
use super::layer::Setup;
use super::of::Later;
use super::plan::{self, Passed, Quick, Ruling, Start};
use super::rule::Meter;
use super::tell::Tell;

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
    type Response = Response<Body<B>>;
    type Error = S::Error;
    type Future = ResponseFuture<S, A>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    #[inline]
    fn call(&mut self, mut request: Request<A>) -> Self::Future {
        match self.quickly(&mut request) {
            Some(Quick::Pass(tell)) => ResponseFuture::calling(self.inner.call(request), tell),
            other => self.call_the_long_way(other, request),
        }
    }
}

impl<S> RateLimit<S> {
    /// Takes the short way, if there is one.
    #[inline(always)]
    pub(super) fn quickly<A>(&self, request: &mut Request<A>) -> Option<Quick> {
        if self.setup.of_path
            && let Some(ruling) = plan::check_path(&self.setup, request)
        {
            return Some(Quick::Ruled(Box::new(ruling)));
        }
        plan::quickly(&self.setup, self.setup.short.as_ref()?, &Head::of(request))
    }

    /// Does what the short way came to, or takes the long one.
    #[inline(never)]
    pub(super) fn call_the_long_way<A>(
        &mut self,
        quick: Option<Quick>,
        mut request: Request<A>,
    ) -> ResponseFuture<S, A>
    where
        S: Service<Request<A>> + Clone,
    {
        let start = match quick {
            Some(Quick::Pass(tell)) => {
                Start::Ruled(Ruling::Pass(Passed { tell, after: Vec::new() }))
            }
            Some(Quick::Ruled(ruling)) => Start::Ruled(*ruling),
            None => {
                let meter = self.setup.metered.then(|| {
                    let meter = Meter::new();
                    request.extensions_mut().insert(meter.clone());
                    meter
                });
                plan::start(&self.setup, &Head::of(&request), meter)
            }
        };
        let state = match start {
            Start::Ruled(ruling) => follow(&self.setup, ruling, request, &mut self.inner),
            Start::Later(ruling) => {
                // The one that said it is ready is the one to call; the clone will be asked whether
                // it is.
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

/// Does what was ruled.
fn follow<S, A>(setup: &Setup, ruling: Ruling, request: Request<A>, inner: &mut S) -> State<S, A>
where
    S: Service<Request<A>>,
{
    let answer = match ruling {
        Ruling::Pass(passed) => {
            return State::Calling { future: inner.call(request), passed };
        }
        Ruling::Deny(denied) => setup.deny(Head::of(&request), &denied),
        Ruling::Refuse => setup.refuse(Head::of(&request)),
        Ruling::Closed => setup.unavailable(Head::of(&request)),
        Ruling::Mistake(mistake) => setup.mistaken(Head::of(&request), mistake),
        Ruling::Unfit(unfit) => setup.unfit(Head::of(&request), &unfit),
    };
    State::Answered { answer: Some(Box::new(answer)) }
}

pin_project! {
    /// A response to come.
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
        // The store is asked.
        Deciding { ruling: Later<Ruling>, request: Option<Request<A>>, inner: S, setup: Arc<Setup> },
        // The service is at work.
        Calling { #[pin] future: S::Future, passed: Passed },
        // The store is told what it came to.
        Settling { settling: Later<Passed>, response: Option<S::Response> },
        // The service is not asked.
        Answered { answer: Option<Box<Response<String>>> },
    }
}

impl<S, A, B> Future for ResponseFuture<S, A>
where
    S: Service<Request<A>, Response = Response<B>>,
{
    type Output = Result<Response<Body<B>>, S::Error>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        Poll::Ready(Ok(match ready!(self.poll_outcome(context))? {
            Outcome::Served(response, after) => response.map(|body| Body::of_service(body, after)),
            Outcome::Answered(answer) => answer.map(Body::of_answer),
        }))
    }
}

/// What came of a request.
pub(super) enum Outcome<B> {
    /// The service's response, and what is left to do when its body is over.
    Served(Response<B>, Vec<After>),
    /// An answer in its place.
    Answered(Box<Response<String>>),
}

impl<S: Service<Request<A>>, A> ResponseFuture<S, A> {
    /// The service is called already, and nothing is left to do but to tell the client.
    #[inline(always)]
    pub(super) fn calling(future: S::Future, tell: Tell) -> Self {
        ResponseFuture {
            state: State::Calling { future, passed: Passed { tell, after: Vec::new() } },
        }
    }

    /// The service at work, if nothing is left to do for its response but to tell the client.
    #[cfg(feature = "axum")]
    pub(super) fn service(self: Pin<&mut Self>) -> Option<(Pin<&mut S::Future>, &mut Tell)> {
        match self.project().state.project() {
            StateProject::Calling { future, passed } if passed.after.is_empty() => {
                Some((future, &mut passed.tell))
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
    ) -> Poll<Result<Outcome<B>, S::Error>> {
        const TWICE: &str = "a future is not polled again after it is ready";
        let mut state = self.project().state;
        loop {
            let next = match state.as_mut().project() {
                StateProject::Deciding { ruling, request, inner, setup } => {
                    let ruling = ready!(ruling.as_mut().poll(context));
                    follow(setup, ruling, request.take().expect(TWICE), inner)
                }
                StateProject::Calling { future, passed } => {
                    let response = ready!(future.poll(context));
                    // Taken also if it failed: then it is over now.
                    let passed = mem::take(passed);
                    let response = response?;
                    if passed.after.is_empty() {
                        return Poll::Ready(Ok(finish(response, passed)));
                    }
                    match settle(passed, &ResponseHead::of(&response)) {
                        Ok(passed) => return Poll::Ready(Ok(finish(response, passed))),
                        Err(settling) => State::Settling { settling, response: Some(response) },
                    }
                }
                StateProject::Settling { settling, response } => {
                    let passed = ready!(settling.as_mut().poll(context));
                    return Poll::Ready(Ok(finish(response.take().expect(TWICE), passed)));
                }
                StateProject::Answered { answer } => {
                    return Poll::Ready(Ok(Outcome::Answered(answer.take().expect(TWICE))));
                }
            };
            state.set(next);
        }
    }
}

/// Settles what is known when a response begins: at once, if the store is in memory; otherwise
/// there is something to wait for.
fn settle(mut passed: Passed, response: &ResponseHead<'_>) -> Result<Passed, Later<Passed>> {
    let settlements: Vec<_> = passed.after.iter_mut().map(|after| after.begin(response)).collect();
    if settlements.iter().all(Option::is_none) {
        return Ok(passed);
    }
    let in_memory = passed.after.iter().all(|after| after.setup.memory().is_some());
    let settling = async move {
        for (after, settlement) in passed.after.iter_mut().zip(settlements) {
            let Some(settlement) = settlement else { continue };
            let store = Arc::clone(&after.setup.store);
            // Without an answer the estimate stays.
            if let Ok(decision) = store.decide(settlement.check.clone()).await
                && let Some(tell) = after.settled(&settlement, &decision)
            {
                passed.tell = tell;
            }
        }
        passed
    };
    if !in_memory {
        return Err(Box::pin(settling));
    }
    match pin!(settling).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(passed) => Ok(passed),
        Poll::Pending => unreachable!("the memory store answers at once"),
    }
}

/// Tells the client, and sees to it that the rest is done when the body is over.
fn finish<B>(mut response: Response<B>, passed: Passed) -> Outcome<B> {
    let Passed { mut tell, mut after } = passed;
    tell.add_to(&mut response);
    after.retain(|after: &After| !after.is_done());
    Outcome::Served(response, after)
}

impl<S: Service<Request<A>>, A> std::fmt::Debug for ResponseFuture<S, A> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ResponseFuture").finish_non_exhaustive()
    }
}
