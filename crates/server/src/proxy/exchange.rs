//! One request: what the rules say about it, and what the upstream answers.

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::http::header::{ACCEPT, CACHE_CONTROL, CONNECTION, RETRY_AFTER, UPGRADE};
use axum::http::{HeaderValue, Request, Response, StatusCode, Uri, Version};
use http_body_util::BodyExt;
use hyper::body::{Body as _, Incoming};
use tidegate::Op;
use tidegate::http::{Client, DEFAULT_IPV6_PREFIX, Group, Target, group, normal_path};

use super::Guest;
use super::body::Returned;
use super::fields::Headers;
use super::head::{self, Head, Peer, Refused};
use super::settlement::Later;
use super::tunnel::Tunnel;
use super::upstream::{Answer, Failed, Upstreams};
use crate::engine::Engine;
use crate::http::{denial, mistake, tell, unanswered};
use crate::listen::http::{MAX_TARGET_BYTES, NO_SNIFF};
use crate::panics::caught;
use crate::rules::{HttpRequest, HttpRequestError, Match};
use crate::ruling::Ruling;

/// What every request needs.
#[derive(Debug)]
pub(super) struct Desk {
    pub(super) engine: Engine,
    pub(super) upstreams: Arc<Upstreams>,
}

/// A request that may go on.
#[derive(Debug)]
pub(super) struct Passed {
    ruling: Ruling,
    /// What is settled or ends when there is a response.
    later: Option<Box<Later>>,
    /// Whose share of the slots at the upstream it takes.
    pub(super) client: Group,
}

/// A request that may go on and whose head is ready for that.
pub(super) struct Admitted {
    pub(super) passed: Passed,
    pub(super) host: Option<HeaderValue>,
    /// The target that goes on, if it is not the one that came.
    pub(super) target: Option<String>,
}

/// The answer to a request that does not go on, or has no response.
pub(super) type No = Box<Response<axum::body::Body>>;

impl Desk {
    pub(super) async fn answer(
        &self,
        request: Request<Incoming>,
        guest: &Arc<Guest>,
    ) -> Response<Returned> {
        let answering = guest.pace.request();
        let mut response = match caught(self.pass_on(request, guest)).await {
            Some(Ok(response)) => response,
            Some(Err(no)) => own(*no).await,
            None => own(self.panicked()).await,
        };
        if guest.pace.last.load(Ordering::Relaxed)
            && !guest.pace.is_second()
            && response.status() != StatusCode::SWITCHING_PROTOCOLS
        {
            response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
        }
        if guest.pace.is_second() {
            response.body_mut().waiting = Some(guest.windows.wait());
        }
        response.body_mut().answering = Some(answering);
        response
    }

    async fn pass_on(
        &self,
        mut request: Request<Incoming>,
        guest: &Arc<Guest>,
    ) -> Result<Response<Returned>, No> {
        let client_side = hyper::upgrade::on(&mut request);
        let (mut head, body) = request.into_parts();
        let (before, begun) =
            guest.asked.lock().take().map_or((None, None), |(passed, begun)| (Some(passed), begun));
        let upgrade = head::upgrade(&head);
        let Admitted { mut passed, host, target } =
            self.admit(Head::of(&mut head), &guest.peer, before).await?;
        if let Some(target) = target {
            head.uri = with_target(head.uri, &target).ok_or_else(|| refuse(NO_TARGET))?;
        }
        let start = if guest.pace.is_second() { Some(guest.starts.next().await) } else { None };
        let share = self.upstreams.in_flight.share(passed.client, &guest.share);
        match self.upstreams.ask(head, body, host.as_ref(), upgrade, begun, &share).await {
            Ok(Answer::Http(mut response)) => {
                match start {
                    // There is nothing more to take.
                    Some(start) if response.body().is_end_stream() => start.taken(),
                    start => response.body_mut().start = start,
                }
                // The version is that of one connection, too: what comes from an old server goes on
                // as our own.
                *response.version_mut() = Version::HTTP_11;
                head::one_length(response.headers_mut());
                let status = response.status();
                let later = self.returned(&mut passed, status, response.headers_mut()).await;
                // Without a body it is over now.
                response.body_mut().later = later.filter(|_| !response.body().is_end_stream());
                Ok(response)
            }
            Ok(Answer::Upgraded(response, upstream)) => {
                let idle = self.upstreams.settings.upgraded_idle;
                let protocol = response.headers().get(UPGRADE).cloned();
                let mut response = response.map(|()| Returned::own(""));
                let status = response.status();
                let later = self.returned(&mut passed, status, response.headers_mut()).await;
                *guest.tunnel.lock() = Some(Tunnel { client: client_side, upstream, idle, later });
                response.headers_mut().insert(CONNECTION, HeaderValue::from_static("upgrade"));
                if let Some(protocol) = protocol {
                    response.headers_mut().insert(UPGRADE, protocol);
                }
                Ok(response)
            }
            Err(failed) => Err(self.unanswered(&failed, &mut passed).await),
        }
    }

    /// Whether a request may go on; its head is then as it goes on. What the rules say is not asked
    /// if it was said before.
    pub(super) async fn admit(
        &self,
        mut head: Head<'_, impl Headers>,
        peer: &Peer,
        before: Option<Passed>,
    ) -> Result<Admitted, No> {
        possible(&head).map_err(refuse)?;
        let host = head::host(&head, peer).map_err(refuse)?;
        let (target, trailers) = self.cleaned(&mut head, peer)?;
        let passed = match before {
            Some(passed) => passed,
            None => self.ruled(&head, &target, host.as_ref(), peer).await?,
        };
        head::prepare(&mut head, host.as_ref(), peer, trailers).map_err(refuse)?;
        let target = match target.sent {
            Cow::Owned(sent) => Some(sent),
            Cow::Borrowed(_) => None,
        };
        Ok(Admitted { passed, host, target })
    }

    /// Makes a head what rules judge and the upstream gets. The target, and whether the client
    /// takes trailers.
    fn cleaned<'a>(
        &self,
        head: &mut Head<'a, impl Headers>,
        peer: &Peer,
    ) -> Result<(Target<'a>, bool), No> {
        let policy = self.engine.settings().requests();
        let target = if head.target.is_empty() { "/" } else { head.target };
        let target = HttpRequest::target(target, &policy.paths).map_err(|error| unfit(&error))?;
        stays_within(&self.upstreams.settings.upstream.base, &target.sent).map_err(refuse)?;
        let trailers = head::clean(
            &mut *head.headers,
            peer,
            &self.engine.settings().clients(),
            &policy.headers,
        );
        Ok((target, trailers))
    }

    /// Makes the headers of a response those that the client gets, and settles what is known by
    /// them; what is not is returned.
    pub(super) async fn returned(
        &self,
        passed: &mut Passed,
        status: StatusCode,
        headers: &mut impl Headers,
    ) -> Option<Box<Later>> {
        head::strip(headers, |_| false);
        let later = self.settled(passed, status, headers).await;
        self.tell(headers, &passed.ruling);
        later
    }

    /// What is said when there is no response.
    pub(super) async fn unanswered(&self, failed: &Failed, passed: &mut Passed) -> No {
        let mut no = self.failed(failed);
        drop(self.settled(passed, no.status(), no.headers()).await);
        self.tell(no.headers_mut(), &passed.ruling);
        no
    }

    /// What is said when we have failed.
    pub(super) fn panicked(&self) -> Response<axum::body::Body> {
        self.engine.observer().metrics().panicked();
        self.engine
            .observer()
            .log()
            .error("a request panicked", &[("listener", &self.engine.protocol().name())]);
        mistake(StatusCode::INTERNAL_SERVER_ERROR, "this is our mistake, not yours")
    }

    /// Settles what is known by the head of a response; what is not is returned.
    async fn settled(
        &self,
        passed: &mut Passed,
        status: StatusCode,
        headers: &impl Headers,
    ) -> Option<Box<Later>> {
        let mut later = passed.later.take()?;
        later.begin(status, headers, &mut passed.ruling).await;
        later.is_open().then_some(later)
    }

    /// Our headers stand in place of those that the upstream may have sent.
    fn tell(&self, headers: &mut impl Headers, ruling: &Ruling) {
        tell(ruling, self.engine.settings().response_options().headers, |name, value| {
            headers.put(name, value)
        });
    }

    /// What the rules say, or the answer to a request that they deny.
    async fn ruled(
        &self,
        head: &Head<'_, impl Headers>,
        target: &Target<'_>,
        host: Option<&HeaderValue>,
        peer: &Peer,
    ) -> Result<Passed, No> {
        let host = host.and_then(|host| host.to_str().ok()).filter(|host| !host.is_empty());
        let client = self.client(&*head.headers, peer);
        let share = group(client.ip(), DEFAULT_IPV6_PREFIX);
        // Who names no host, as HTTP/1.0 may, means the only one there is.
        let host = host.unwrap_or(&self.upstreams.settings.upstream.host);
        let asked = HttpRequest::new(client, head.method, target, host, &*head.headers);
        let asked = asked.map_err(|error| unfit(&error))?;
        self.engine.check_repeated(&asked).map_err(|repeated| unfit(&repeated.into()))?;
        let ruled = match self.engine.matching(&asked, 1) {
            Ok(found) if found.iter().any(Match::has_outcome) => {
                Later::rule(&self.engine, found).await
            }
            Ok(found) => {
                self.engine.rule_on(Op::Check, found, None).await.map(|ruling| (ruling, None))
            }
            Err(invalid) => Err(invalid.into()),
        };
        match ruled {
            Ok((ruling, later)) if ruling.allowed => Ok(Passed { ruling, later, client: share }),
            Ok((ruling, _)) => {
                let accept = head.headers.lines(ACCEPT).next();
                Err(Box::new(denial(&self.engine, &ruling, accept)))
            }
            Err(error) => Err(Box::new(unanswered(&error))),
        }
    }

    /// Whose request it is.
    fn client(&self, headers: &impl Headers, peer: &Peer) -> Client {
        let clients = self.engine.settings().clients();
        if !clients.trusts(peer.ip) {
            return clients.find(peer.ip, []); // the header need not even be looked for
        }
        let lines: Vec<&[u8]> = headers.lines(clients.header_name()).collect();
        clients.find(peer.ip, lines)
    }

    fn failed(&self, failed: &Failed) -> No {
        if failed.is_upstreams() {
            self.engine.observer().upstream_failed(
                self.engine.protocol(),
                &self.upstreams.settings.upstream,
                failed,
            );
        }
        if let Some(why) = failed.refusal() {
            self.engine.observer().metrics().refused(self.engine.protocol(), why);
        }
        let mut no = mistake(failed.status(), &failed.to_string());
        no.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
        match failed {
            Failed::Busy | Failed::BusyForClient(_) => {
                no.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("1"));
            }
            // What is still to come of the body must not be taken for a request.
            Failed::BodyTimeout | Failed::BodySlow(_) | Failed::BodyLost => {
                no.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
            }
            _ => {}
        }
        Box::new(no)
    }
}

/// What cannot go on, whatever the rules say.
fn possible(head: &Head<'_, impl Headers>) -> Result<(), Refused> {
    if head.method == "CONNECT" {
        return Err((
            StatusCode::METHOD_NOT_ALLOWED,
            "CONNECT is for other proxies: this one leads to one upstream",
        ));
    }
    if head.target.len() > MAX_TARGET_BYTES {
        return Err((
            StatusCode::URI_TOO_LONG,
            "the target is too long: expected at most 8192 bytes",
        ));
    }
    Ok(())
}

/// Dots in a path, where they are kept, must not lead out of the base of the upstream.
fn stays_within(base: &str, target: &str) -> Result<(), Refused> {
    let leaves = |path: &str| {
        normal_path(path)
            .is_ok_and(|path| path.strip_prefix(base).is_none_or(|rest| !rest.starts_with('/')))
    };
    let path = target.split('?').next().unwrap_or_default();
    if !base.is_empty() && path != "*" && leaves(&format!("{base}{path}")) {
        return Err((StatusCode::BAD_REQUEST, "the path leads out of what the proxy serves"));
    }
    Ok(())
}

const NO_TARGET: Refused =
    (StatusCode::BAD_REQUEST, "the target is none: expected a path such as /v1/search?q=1");

/// The same with another path and query.
fn with_target(uri: Uri, target: &str) -> Option<Uri> {
    let mut parts = uri.into_parts();
    parts.path_and_query = Some(target.parse().ok()?);
    Uri::from_parts(parts).ok()
}

/// The answer to a request that rules cannot judge.
fn unfit(error: &HttpRequestError) -> No {
    let status =
        if error.is_too_long() { StatusCode::URI_TOO_LONG } else { StatusCode::BAD_REQUEST };
    Box::new(mistake(status, &error.to_string()))
}

/// Who sends what cannot be is not listened to any further.
fn refuse((status, detail): Refused) -> No {
    let mut no = mistake(status, detail);
    no.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    Box::new(no)
}

/// An answer of our own. Its body is in memory already.
async fn own(response: Response<axum::body::Body>) -> Response<Returned> {
    let (mut head, body) = response.into_parts();
    let (name, value) = NO_SNIFF;
    head.headers.insert(name, value);
    let bytes = body.collect().await.map(|body| body.to_bytes()).unwrap_or_default();
    Response::from_parts(head, Returned::own(bytes))
}
