//! One request: checks it against the rules, forwards it, and relays the response.

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::http::header::{ACCEPT, CACHE_CONTROL, CONNECTION, RETRY_AFTER, UPGRADE};
use axum::http::{HeaderValue, Request, Response, StatusCode, Uri, Version};
use http_body_util::BodyExt;
use hyper::body::{Body as _, Incoming};
use tidegate::Op;
use tidegate::http::{Client, DEFAULT_IPV6_PREFIX, Group, Target, group, normal_path};

use super::ProxyConnection;
use super::body::ResponseBody;
use super::fields::Headers;
use super::head::{self, ConnectionPeer, RefusedRequest, RequestHead};
use super::settlement::Settlement;
use super::tunnel::Tunnel;
use super::upstream::{ForwardError, UpstreamResponse, Upstreams};
use crate::engine::Engine;
use crate::http::{denial, tell, unanswered};
use crate::listen::http::{MAX_TARGET_BYTES, NO_SNIFF};
use crate::panics::caught;
use crate::problem::mistake;
use crate::rules::{HttpRequest, HttpRequestError, Match};
use crate::ruling::Ruling;

/// What every request needs: the engine and the upstream.
#[derive(Debug)]
pub(super) struct Forwarder {
    pub(super) engine: Engine,
    pub(super) upstreams: Arc<Upstreams>,
}

/// A request that the rules allow.
#[derive(Debug)]
pub(super) struct AllowedRequest {
    ruling: Ruling,
    /// The settlement, due when the response is known.
    settlement: Option<Box<Settlement>>,
    /// The client whose slots at the upstream it uses.
    pub(super) client: Group,
}

/// An allowed request whose head is ready to send.
pub(super) struct PreparedRequest {
    pub(super) allowed: AllowedRequest,
    pub(super) host: Option<HeaderValue>,
    /// The target to send, if it differs from the one received.
    pub(super) target: Option<String>,
}

/// A response written by the proxy itself.
pub(super) type OwnResponse = Box<Response<axum::body::Body>>;

impl Forwarder {
    pub(super) async fn answer(
        &self,
        request: Request<Incoming>,
        shared: &Arc<ProxyConnection>,
    ) -> Response<ResponseBody> {
        let answering = shared.progress.request();
        let mut response = match caught(self.pass_on(request, shared)).await {
            Some(Ok(response)) => response,
            Some(Err(response)) => own(*response).await,
            None => own(self.panicked()).await,
        };
        if shared.progress.last.load(Ordering::Relaxed)
            && !shared.progress.is_http2()
            && response.status() != StatusCode::SWITCHING_PROTOCOLS
        {
            response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
        }
        if shared.progress.is_http2() {
            response.body_mut().waiting = Some(shared.windows.wait());
        }
        response.body_mut().answering = Some(answering);
        response
    }

    async fn pass_on(
        &self,
        mut request: Request<Incoming>,
        shared: &Arc<ProxyConnection>,
    ) -> Result<Response<ResponseBody>, OwnResponse> {
        let client_side = hyper::upgrade::on(&mut request);
        let (mut head, body) = request.into_parts();
        let (before, sent_request) = shared
            .handed_over
            .lock()
            .take()
            .map_or((None, None), |(allowed, sent_request)| (Some(allowed), sent_request));
        let upgrade = head::upgrade(&head);
        let PreparedRequest { mut allowed, host, target } =
            self.admit(RequestHead::of(&mut head), &shared.peer, before).await?;
        if let Some(target) = target {
            head.uri = with_target(head.uri, &target).ok_or_else(|| refuse(NO_TARGET))?;
        }
        let start =
            if shared.progress.is_http2() { Some(shared.slow_start.next().await) } else { None };
        let share = self.upstreams.in_flight.share(allowed.client, &shared.share);
        match self.upstreams.send(head, body, host.as_ref(), upgrade, sent_request, &share).await {
            Ok(UpstreamResponse::Http(mut response)) => {
                match start {
                    // There is no body to read.
                    Some(start) if response.body().is_end_stream() => start.response_read(),
                    start => response.body_mut().start = start,
                }
                // The version belongs to one connection: a response from an HTTP/1.0 upstream is
                // sent as HTTP/1.1.
                *response.version_mut() = Version::HTTP_11;
                head::one_length(response.headers_mut());
                let status = response.status();
                let settlement =
                    self.prepare_response(&mut allowed, status, response.headers_mut()).await;
                // Without a body the settlement is complete.
                response.body_mut().settlement =
                    settlement.filter(|_| !response.body().is_end_stream());
                Ok(response)
            }
            Ok(UpstreamResponse::Upgraded(response, upstream)) => {
                let idle = self.upstreams.settings.upgraded_idle;
                let protocol = response.headers().get(UPGRADE).cloned();
                let mut response = response.map(|()| ResponseBody::own(""));
                let status = response.status();
                let settlement =
                    self.prepare_response(&mut allowed, status, response.headers_mut()).await;
                *shared.tunnel.lock() =
                    Some(Tunnel { client: client_side, upstream, idle, settlement });
                response.headers_mut().insert(CONNECTION, HeaderValue::from_static("upgrade"));
                if let Some(protocol) = protocol {
                    response.headers_mut().insert(UPGRADE, protocol);
                }
                Ok(response)
            }
            Err(failed) => Err(self.error_response(&failed, &mut allowed).await),
        }
    }

    /// Checks a request against the rules, unless `before` has the result, and turns its head into
    /// the one to send.
    pub(super) async fn admit(
        &self,
        mut head: RequestHead<'_, impl Headers>,
        peer: &ConnectionPeer,
        before: Option<AllowedRequest>,
    ) -> Result<PreparedRequest, OwnResponse> {
        check_forwardable(&head).map_err(refuse)?;
        let host = head::host(&head, peer).map_err(refuse)?;
        let (target, trailers) = self.clean(&mut head, peer)?;
        let allowed = match before {
            Some(allowed) => allowed,
            None => self.check(&head, &target, host.as_ref(), peer).await?,
        };
        head::prepare(&mut head, host.as_ref(), peer, trailers).map_err(refuse)?;
        let target = match target.sent {
            Cow::Owned(sent) => Some(sent),
            Cow::Borrowed(_) => None,
        };
        Ok(PreparedRequest { allowed, host, target })
    }

    /// Cleans a head before the rules see it and the upstream gets it. Returns the target, and
    /// whether the client accepts trailers.
    fn clean<'a>(
        &self,
        head: &mut RequestHead<'a, impl Headers>,
        peer: &ConnectionPeer,
    ) -> Result<(Target<'a>, bool), OwnResponse> {
        let policy = self.engine.settings().requests();
        let target = if head.target.is_empty() { "/" } else { head.target };
        let target =
            HttpRequest::target(target, &policy.paths).map_err(|error| unreadable(&error))?;
        stays_within(&self.upstreams.settings.upstream.base, &target.sent).map_err(refuse)?;
        let trailers = head::clean(
            &mut *head.headers,
            peer,
            &self.engine.settings().clients(),
            &policy.headers,
        );
        Ok((target, trailers))
    }

    /// Turns the headers of a response into those that the client gets, and settles what they
    /// decide. Returns the settlement if part of it is still open.
    pub(super) async fn prepare_response(
        &self,
        allowed: &mut AllowedRequest,
        status: StatusCode,
        headers: &mut impl Headers,
    ) -> Option<Box<Settlement>> {
        head::strip(headers, |_| false);
        let settlement = self.settle(allowed, status, headers).await;
        self.write_limit_headers(headers, &allowed.ruling);
        settlement
    }

    /// The response to a request that has none from the upstream.
    pub(super) async fn error_response(
        &self,
        failed: &ForwardError,
        allowed: &mut AllowedRequest,
    ) -> OwnResponse {
        let mut response = self.failure(failed);
        drop(self.settle(allowed, response.status(), response.headers()).await);
        self.write_limit_headers(response.headers_mut(), &allowed.ruling);
        response
    }

    /// The response after a panic.
    pub(super) fn panicked(&self) -> Response<axum::body::Body> {
        self.engine.observer().metrics().panicked();
        self.engine
            .observer()
            .log()
            .error("a request panicked", &[("listener", &self.engine.protocol().name())]);
        mistake(StatusCode::INTERNAL_SERVER_ERROR, "this is our mistake, not yours")
    }

    /// Settles what the head of a response decides. Returns the settlement if part of it is open.
    async fn settle(
        &self,
        allowed: &mut AllowedRequest,
        status: StatusCode,
        headers: &impl Headers,
    ) -> Option<Box<Settlement>> {
        let mut settlement = allowed.settlement.take()?;
        settlement.begin(status, headers, &mut allowed.ruling).await;
        settlement.is_open().then_some(settlement)
    }

    /// Writes the rate limit headers, in place of any that the upstream sent.
    fn write_limit_headers(&self, headers: &mut impl Headers, ruling: &Ruling) {
        tell(ruling, self.engine.settings().response_options().headers, |name, value| {
            headers.put(name, value)
        });
    }

    /// Checks a request against the rules. A denied request is an error with its response.
    async fn check(
        &self,
        head: &RequestHead<'_, impl Headers>,
        target: &Target<'_>,
        host: Option<&HeaderValue>,
        peer: &ConnectionPeer,
    ) -> Result<AllowedRequest, OwnResponse> {
        let host = host.and_then(|host| host.to_str().ok()).filter(|host| !host.is_empty());
        let client = self.client(&*head.headers, peer);
        let share = group(client.ip(), DEFAULT_IPV6_PREFIX);
        // HTTP/1.0 requests may have no host; there is only one.
        let host = host.unwrap_or(&self.upstreams.settings.upstream.host);
        let request = HttpRequest::new(client, head.method, target, host, &*head.headers);
        let request = request.map_err(|error| unreadable(&error))?;
        self.engine.check_repeated(&request).map_err(|repeated| unreadable(&repeated.into()))?;
        let ruled = match self.engine.matching(&request, 1) {
            Ok(found) if found.iter().any(Match::has_outcome) => {
                Settlement::check(&self.engine, found).await
            }
            Ok(found) => {
                self.engine.check_rules(Op::Check, found, None).await.map(|ruling| (ruling, None))
            }
            Err(invalid) => Err(invalid.into()),
        };
        match ruled {
            Ok((ruling, settlement)) if ruling.allowed => {
                Ok(AllowedRequest { ruling, settlement, client: share })
            }
            Ok((ruling, _)) => {
                let accept = head.headers.lines(ACCEPT).next();
                Err(Box::new(denial(&self.engine, &ruling, accept)))
            }
            Err(error) => Err(Box::new(unanswered(&error))),
        }
    }

    /// The client of a request.
    fn client(&self, headers: &impl Headers, peer: &ConnectionPeer) -> Client {
        let clients = self.engine.settings().clients();
        if !clients.trusts(peer.ip) {
            return clients.find(peer.ip, []); // the header does not count
        }
        let lines: Vec<&[u8]> = headers.lines(clients.header_name()).collect();
        clients.find(peer.ip, lines)
    }

    fn failure(&self, failed: &ForwardError) -> OwnResponse {
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
        let mut response = mistake(failed.status(), &failed.to_string());
        response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
        match failed {
            ForwardError::Busy | ForwardError::BusyForClient(_) => {
                response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("1"));
            }
            // The rest of the body must not be parsed as the next request.
            ForwardError::BodyTimeout | ForwardError::BodySlow(_) | ForwardError::BodyLost => {
                response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
            }
            _ => {}
        }
        Box::new(response)
    }
}

/// Refuses requests that cannot be forwarded, whatever the rules say.
fn check_forwardable(head: &RequestHead<'_, impl Headers>) -> Result<(), RefusedRequest> {
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

/// Refuses dot segments, where they are kept, that lead out of the upstream's base path.
fn stays_within(base: &str, target: &str) -> Result<(), RefusedRequest> {
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

const NO_TARGET: RefusedRequest =
    (StatusCode::BAD_REQUEST, "the target is none: expected a path such as /v1/search?q=1");

/// The URI with another path and query.
fn with_target(uri: Uri, target: &str) -> Option<Uri> {
    let mut parts = uri.into_parts();
    parts.path_and_query = Some(target.parse().ok()?);
    Uri::from_parts(parts).ok()
}

/// The response to a request that the rules cannot read.
fn unreadable(error: &HttpRequestError) -> OwnResponse {
    let status =
        if error.is_too_long() { StatusCode::URI_TOO_LONG } else { StatusCode::BAD_REQUEST };
    Box::new(mistake(status, &error.to_string()))
}

/// The response to an invalid request. It closes the connection.
fn refuse((status, detail): RefusedRequest) -> OwnResponse {
    let mut response = mistake(status, detail);
    response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    Box::new(response)
}

/// A response of the proxy itself. Its body is in memory already.
async fn own(response: Response<axum::body::Body>) -> Response<ResponseBody> {
    let (mut head, body) = response.into_parts();
    let (name, value) = NO_SNIFF;
    head.headers.insert(name, value);
    let bytes = body.collect().await.map(|body| body.to_bytes()).unwrap_or_default();
    Response::from_parts(head, ResponseBody::own(bytes))
}
