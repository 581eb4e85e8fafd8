//! A setting of a rule that is a constant, a function of the request, or an async function of it.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;

use super::head::RequestHead;

pub(super) type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// A constant, or a function of the request: `5`, [`per_request`]`(|head| …)` or
/// [`per_request_async`]`(|head| …)`.
///
/// ```
/// # use tidegate::tower::{PerRequest, Rule, key, per_request};
/// let by_method = per_request(|head| if head.method == "POST" { 10 } else { 1 });
/// for cost in [PerRequest::from(5), by_method] {
///     let rule = Rule::new("uploads", "100/min".parse()?, key::peer_ip()).cost(cost);
/// }
/// # Ok::<(), tidegate::ParseError>(())
/// ```
#[derive(Clone)]
pub struct PerRequest<T>(PerRequestKind<T>);

#[derive(Clone)]
enum PerRequestKind<T> {
    Value(T),
    Function(Arc<dyn Fn(&RequestHead<'_>) -> T + Send + Sync>),
    Async(Arc<dyn Fn(&RequestHead<'_>) -> BoxFuture<T> + Send + Sync>),
}

/// A setting that is a function of the request.
///
/// ```
/// # use tidegate::tower::{Rule, key, per_request};
/// let rule = Rule::new("uploads", "100/min".parse()?, key::peer_ip())
///     .cost(per_request(|head| if head.method == "POST" { 10 } else { 1 }))
///     .skip(per_request(|head| head.path() == "/healthz"));
/// # Ok::<(), tidegate::ParseError>(())
/// ```
pub fn per_request<T>(
    function: impl Fn(&RequestHead<'_>) -> T + Send + Sync + 'static,
) -> PerRequest<T> {
    PerRequest(PerRequestKind::Function(Arc::new(function)))
}

/// A setting that is an async function of the request. The function copies what it needs from the
/// head and returns a future.
///
/// ```
/// # use tidegate::tower::{Rule, key, per_request_async};
/// # use tidegate::Limits;
/// # async fn plan_of(key: Option<String>) -> Limits { "10/s".parse().unwrap() }
/// let plans = per_request_async(|head| {
///     let key = head.header("x-api-key").map(str::to_owned);
///     async move { plan_of(key).await }
/// });
/// let rule = Rule::new("plans", "10/s".parse()?, key::header("x-api-key")).limit(plans);
/// # Ok::<(), tidegate::ParseError>(())
/// ```
pub fn per_request_async<T, F>(
    function: impl Fn(&RequestHead<'_>) -> F + Send + Sync + 'static,
) -> PerRequest<T>
where
    F: Future<Output = T> + Send + 'static,
{
    PerRequest(PerRequestKind::Async(Arc::new(move |head| Box::pin(function(head)))))
}

impl<T> From<T> for PerRequest<T> {
    fn from(value: T) -> Self {
        PerRequest(PerRequestKind::Value(value))
    }
}

/// The value of a setting for one request, or the future of it.
pub(super) enum MaybeReady<T> {
    Ready(T),
    Pending(BoxFuture<T>),
}

impl<T> MaybeReady<T> {
    pub(super) async fn wait(self) -> T {
        match self {
            MaybeReady::Ready(value) => value,
            MaybeReady::Pending(future) => future.await,
        }
    }
}

impl<T: Clone> PerRequest<T> {
    pub(super) fn is_async(&self) -> bool {
        matches!(self.0, PerRequestKind::Async(_))
    }

    /// The value, if it is a constant.
    pub(super) fn value(&self) -> Option<&T> {
        match &self.0 {
            PerRequestKind::Value(value) => Some(value),
            _ => None,
        }
    }

    pub(super) fn get(&self, head: &RequestHead<'_>) -> MaybeReady<T> {
        match &self.0 {
            PerRequestKind::Value(value) => MaybeReady::Ready(value.clone()),
            PerRequestKind::Function(function) => MaybeReady::Ready(function(head)),
            PerRequestKind::Async(function) => MaybeReady::Pending(function(head)),
        }
    }
}

impl<T: fmt::Debug> fmt::Debug for PerRequest<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            PerRequestKind::Value(value) => value.fmt(f),
            PerRequestKind::Function(_) => f.write_str("a function"),
            PerRequestKind::Async(_) => f.write_str("an async function"),
        }
    }
}
