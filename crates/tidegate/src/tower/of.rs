//! A setting that is a value, or a function of the request, or an async function of it.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;

use super::head::Head;

/// A future that is waited for.
pub(super) type Later<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// A value, or where to get it from: `5`, [`of`]`(|head| …)`, [`of_async`]`(|head| …)`.
#[derive(Clone)]
pub struct Of<T>(Kind<T>);

#[derive(Clone)]
enum Kind<T> {
    Value(T),
    Now(Arc<dyn Fn(&Head<'_>) -> T + Send + Sync>),
    Later(Arc<dyn Fn(&Head<'_>) -> Later<T> + Send + Sync>),
}

/// A function of the request.
///
/// ```
/// # use tidegate::tower::{Rule, key, of};
/// let rule = Rule::new("uploads", "100/min".parse()?, key::peer_ip())
///     .cost(of(|head| if head.method == "POST" { 10 } else { 1 }))
///     .skip(of(|head| head.path() == "/healthz"));
/// # Ok::<(), tidegate::ParseError>(())
/// ```
pub fn of<T>(function: impl Fn(&Head<'_>) -> T + Send + Sync + 'static) -> Of<T> {
    Of(Kind::Now(Arc::new(function)))
}

/// An async function of the request: it takes what it needs out of the head, and returns a future.
///
/// ```
/// # use tidegate::tower::{Rule, key, of_async};
/// # use tidegate::Limits;
/// # async fn plan_of(key: Option<String>) -> Limits { "10/s".parse().unwrap() }
/// let rule = Rule::new("plans", "10/s".parse()?, key::header("x-api-key")).limit(of_async(|head| {
///     let key = head.header("x-api-key").map(str::to_owned);
///     async move { plan_of(key).await }
/// }));
/// # Ok::<(), tidegate::ParseError>(())
/// ```
pub fn of_async<T, F>(function: impl Fn(&Head<'_>) -> F + Send + Sync + 'static) -> Of<T>
where
    F: Future<Output = T> + Send + 'static,
{
    Of(Kind::Later(Arc::new(move |head| Box::pin(function(head)))))
}

impl<T> From<T> for Of<T> {
    fn from(value: T) -> Self {
        Of(Kind::Value(value))
    }
}

/// What a setting came to, or will.
pub(super) enum Got<T> {
    Now(T),
    Later(Later<T>),
}

impl<T> Got<T> {
    pub(super) async fn wait(self) -> T {
        match self {
            Got::Now(value) => value,
            Got::Later(later) => later.await,
        }
    }
}

impl<T: Clone> Of<T> {
    pub(super) fn is_later(&self) -> bool {
        matches!(self.0, Kind::Later(_))
    }

    /// The value, if it depends on nothing.
    pub(super) fn value(&self) -> Option<&T> {
        match &self.0 {
            Kind::Value(value) => Some(value),
            _ => None,
        }
    }

    pub(super) fn get(&self, head: &Head<'_>) -> Got<T> {
        match &self.0 {
            Kind::Value(value) => Got::Now(value.clone()),
            Kind::Now(function) => Got::Now(function(head)),
            Kind::Later(function) => Got::Later(function(head)),
        }
    }
}

impl<T: fmt::Debug> fmt::Debug for Of<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Kind::Value(value) => value.fmt(f),
            Kind::Now(_) => f.write_str("a function"),
            Kind::Later(_) => f.write_str("an async function"),
        }
    }
}
