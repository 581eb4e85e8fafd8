//! The fast path of HTTP: checks over HTTP/1.1 that arrive complete, on a connection that stays
//! open.
//!
//! It parses strictly, with the parser that hyper uses (`httparse`): a POST to the path of an
//! operation, one length in digits, and no header that changes how the connection or the body is
//! framed. Anything else, also a request in pieces or HTTP/2, is handed to hyper with the bytes
//! read so far, and the connection stays there. Responses are the same to the byte. Decision record
//! 0021 has the figures.

use std::io;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use axum::body::Body;
use axum::http::Response;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};

use super::request::Operation;
use super::{MAX_BODY_BYTES, decide};
use crate::auth::Caller;
use crate::browser;
use crate::engine::Engine;
use crate::listen::http::{Credentials, HttpServer, NO_SNIFF};
use crate::listen::wire::{is_framing_header, write};
use crate::observe::metrics::Refusal;

/// Bytes per read. A longer request arrives in pieces and takes the general path.
const READ_BYTES: usize = 8 << 10;
/// A request with more headers takes the general path.
const MAX_HEADERS: usize = 32;
/// Bytes of responses after which they are written before further requests are answered.
const MAX_ANSWERS_BYTES: usize = 64 << 10;

/// A request that has arrived completely.
#[derive(Debug, PartialEq, Eq)]
struct CompleteRequest<'a> {
    operation: Operation,
    path: &'a str,
    authorization: Option<&'a [u8]>,
    host: Option<&'a [u8]>,
    accept: Option<&'a [u8]>,
    body: &'a [u8],
    /// Its length in bytes, head included.
    used: usize,
}

/// The request at the front of `bytes`, if it is one for the fast path.
fn complete_request(bytes: &[u8]) -> Option<CompleteRequest<'_>> {
    let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
    let mut request = httparse::Request::new(&mut headers);
    let Ok(httparse::Status::Complete(head)) = request.parse(bytes) else { return None };
    let (Some("POST"), Some(path), Some(1)) = (request.method, request.path, request.version)
    else {
        return None;
    };
    let operation = Operation::at(path).filter(|operation| *operation != Operation::Reset)?;
    let (mut length, mut authorization, mut accept, mut host) = (None, None, None, None);
    for header in request.headers.iter() {
        let fine = match header.name {
            name if name.eq_ignore_ascii_case("content-length") => {
                length.replace(digits_only(header.value)?).is_none()
            }
            name if name.eq_ignore_ascii_case("authorization") => {
                authorization.replace(header.value).is_none()
            }
            name if name.eq_ignore_ascii_case("accept") => accept.replace(header.value).is_none(),
            name if name.eq_ignore_ascii_case("host") => host.replace(header.value).is_none(),
            name if name.eq_ignore_ascii_case("connection") => {
                header.value.eq_ignore_ascii_case(b"keep-alive")
            }
            name => !is_framing_header(name) && !is_of_a_browser(name),
        };
        if !fine {
            return None;
        }
    }
    let used = head + length?;
    Some(CompleteRequest {
        operation,
        path,
        authorization,
        host,
        accept,
        body: bytes.get(head..used)?,
        used,
    })
}

/// Whether browsers set this header to name the page that sends a request.
fn is_of_a_browser(name: &str) -> bool {
    name.eq_ignore_ascii_case("origin") || name.eq_ignore_ascii_case("sec-fetch-site")
}

/// A length in digits, at most that of the largest body.
fn digits_only(value: &[u8]) -> Option<usize> {
    if value.is_empty() || value.len() > 5 || !value.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let number = value.iter().fold(0, |number, digit| number * 10 + usize::from(digit - b'0'));
    (number <= MAX_BODY_BYTES).then_some(number)
}

/// The fast path of one listener.
#[derive(Clone)]
pub(super) struct FastPath {
    pub(super) server: HttpServer,
    pub(super) engine: Engine,
}

impl FastPath {
    /// Answers requests until one needs the general path, and returns the bytes read so far; `None`
    /// if the connection has ended.
    pub(super) async fn serve(
        &self,
        stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
        caller: &Caller,
        shutdown: &mut watch::Receiver<bool>,
    ) -> Option<Vec<u8>> {
        let (patience, idle) = {
            let bounds = self.server.bounds();
            (bounds.patience, bounds.idle)
        };
        let (mut bytes, mut out) = (Vec::with_capacity(READ_BYTES), Vec::new());
        let mut stop = pin!(shutdown.wait_for(|down| *down));
        // One timer per connection. When it expires, the connection is idle if nothing was read
        // since.
        let (mut idle_timer, mut has_read) = (pin!(sleep(idle)), false);
        loop {
            let mut at = 0;
            let mut is_for_hyper = false;
            while at < bytes.len() && out.len() <= MAX_ANSWERS_BYTES {
                let Some(check_request) = complete_request(&bytes[at..]) else {
                    is_for_hyper = true;
                    break;
                };
                write(&mut out, self.answer_request(&check_request, caller).await).await?;
                at += check_request.used;
            }
            bytes.drain(..at);
            if !out.is_empty() {
                if within(patience, stream, &out)
                    .await
                    .is_err_and(|error| error.kind() == io::ErrorKind::TimedOut)
                {
                    self.server.refuse(Refusal::Slow);
                    return None;
                }
                out.clear();
                out.shrink_to(READ_BYTES);
            }
            if is_for_hyper {
                return Some(bytes);
            }
            if !bytes.is_empty() {
                continue;
            }
            tokio::select! {
                biased;
                read = stream.read_buf(&mut bytes) => {
                    has_read = true;
                    if read.ok()? == 0 {
                        return None;
                    }
                }
                _ = &mut stop => return Some(bytes),
                () = &mut idle_timer => {
                    if !has_read {
                        return None;
                    }
                    has_read = false;
                    idle_timer.as_mut().reset(Instant::now() + idle);
                }
            }
        }
    }

    async fn answer_request(
        &self,
        check_request: &CompleteRequest<'_>,
        caller: &Caller,
    ) -> Response<Body> {
        let said = Credentials::by(check_request.authorization);
        let refused = self.server.refused(check_request.path, said, caller, |hosts| {
            browser::foreign_host(hosts, check_request.host)
        });
        let mut response = match refused {
            Some(refused) => self.server.refusal(refused),
            None => {
                let answer = decide(
                    &self.engine,
                    check_request.operation,
                    check_request.body,
                    check_request.accept,
                );
                self.server.unless_it_panics(answer).await
            }
        };
        let (name, value) = NO_SNIFF;
        response.headers_mut().insert(name, value);
        response
    }
}

/// Writes everything, within a time limit.
async fn within(
    patience: Duration,
    stream: &mut (impl AsyncWrite + Unpin),
    out: &[u8],
) -> io::Result<()> {
    let mut written = pin!(stream.write_all(out));
    // Most writes complete at the first poll and need no timer.
    if let Poll::Ready(done) =
        std::future::poll_fn(|context| Poll::Ready(written.as_mut().poll(context))).await
    {
        return done;
    }
    timeout(patience, written).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(head: &str, body: &str) -> String {
        format!("{head}\r\n\r\n{body}")
    }

    #[test]
    fn complete_requests_take_the_fast_path() {
        for (head, body) in [
            ("POST /v1/check HTTP/1.1\r\nhost: a\r\ncontent-length: 2", "{}"),
            (
                "POST /v1/peek HTTP/1.1\r\nContent-Length: 2\r\nConnection: Keep-Alive\r\nAccept: */*",
                "{}",
            ),
            ("POST /v1/settle HTTP/1.1\r\ncontent-length: 0", ""),
        ] {
            let text = request(head, body);
            let check_request =
                complete_request(text.as_bytes()).unwrap_or_else(|| panic!("{text}"));
            assert_eq!(
                (check_request.body, check_request.used),
                (body.as_bytes(), text.len()),
                "{text}"
            );
            // Bytes behind the request are not touched.
            let more = format!("{text}POST");
            assert_eq!(complete_request(more.as_bytes()), Some(check_request), "{text}");
            // No prefix of it is a request.
            for end in 0..text.len() {
                assert_eq!(complete_request(&text.as_bytes()[..end]), None, "{end} of {text}");
            }
        }
    }

    #[test]
    fn everything_else_takes_the_general_path() {
        for head in [
            "GET /v1/check HTTP/1.1\r\ncontent-length: 2",
            "POST /v1/check HTTP/1.0\r\ncontent-length: 2",
            "POST /v1/check?a HTTP/1.1\r\ncontent-length: 2",
            "POST http://a/v1/check HTTP/1.1\r\ncontent-length: 2",
            "POST /v1/reset HTTP/1.1\r\ncontent-length: 2",
            "POST /v1/explain HTTP/1.1\r\ncontent-length: 2",
            "POST /v1/check HTTP/1.1\r\nhost: a",
            "POST /v1/check HTTP/1.1\r\ncontent-length: 2\r\ncontent-length: 2",
            "POST /v1/check HTTP/1.1\r\ncontent-length: 2, 2",
            "POST /v1/check HTTP/1.1\r\ncontent-length: +2",
            "POST /v1/check HTTP/1.1\r\ncontent-length: 99999",
            "POST /v1/check HTTP/1.1\r\ncontent-length: 2\r\ntransfer-encoding: chunked",
            "POST /v1/check HTTP/1.1\r\ntransfer-encoding: chunked",
            "POST /v1/check HTTP/1.1\r\ncontent-length: 2\r\nexpect: 100-continue",
            "POST /v1/check HTTP/1.1\r\ncontent-length: 2\r\nupgrade: h2c",
            "POST /v1/check HTTP/1.1\r\ncontent-length: 2\r\nconnection: close",
            "POST /v1/check HTTP/1.1\r\ncontent-length: 2\r\nconnection: keep-alive, upgrade",
            "POST /v1/check HTTP/1.1\r\ncontent-length : 2",
            "POST /v1/check HTTP/1.1\r\ncontent-length: 2\r\n folded: yes",
            "POST /v1/check HTTP/1.1\r\ncontent-length: 2\r\nauthorization: a\r\nauthorization: b",
            "POST /v1/check HTTP/1.1\r\ncontent-length: 2\r\nhost: a\r\nhost: a",
            "POST /v1/check HTTP/1.1\r\ncontent-length: 2\r\norigin: http://a",
            "POST /v1/check HTTP/1.1\r\ncontent-length: 2\r\nSec-Fetch-Site: none",
            "PRI * HTTP/2.0\r\n\r\nSM",
        ] {
            assert_eq!(complete_request(request(head, "{}").as_bytes()), None, "{head}");
        }
    }
}
