//! A short way for what is asked most over HTTP: questions to the engine by HTTP/1.1 that arrive
//! whole, one after the other on a connection that stays.
//!
//! It reads with the parser that hyper has (`httparse`), strictly: a POST to the path of a
//! question, one length in digits, and nothing among the headers that says how the connection or
//! the body is to be treated. Whatever else comes, or comes in pieces, or is HTTP/2, goes to hyper
//! together with what was read, and the connection stays there. Answers are the same to the byte.
//! What it saves: `docs/decisions/0021-http-fast-path.md`.

use std::io;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use axum::body::Body;
use axum::http::Response;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};

use super::request::Verb;
use super::{MAX_BODY_BYTES, decide};
use crate::auth::Caller;
use crate::browser;
use crate::engine::Engine;
use crate::listen::http::{HttpServer, NO_SNIFF, Said};
use crate::listen::wire::{decides_how, write};
use crate::observe::metrics::Refusal;

/// How much is read at once. What is longer arrives in pieces, and goes the other way.
const READ_BYTES: usize = 8 << 10;
/// More headers than that go the other way.
const MAX_HEADERS: usize = 32;
/// Answers that may wait to be written before more of what was read is answered.
const MAX_ANSWERS_BYTES: usize = 64 << 10;

/// A question that has arrived whole.
#[derive(Debug, PartialEq, Eq)]
struct Whole<'a> {
    verb: Verb,
    path: &'a str,
    authorization: Option<&'a [u8]>,
    host: Option<&'a [u8]>,
    accept: Option<&'a [u8]>,
    body: &'a [u8],
    /// How many bytes it takes, with its head.
    used: usize,
}

/// The question at the front of `bytes`, if it is one for the short way.
fn whole(bytes: &[u8]) -> Option<Whole<'_>> {
    let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
    let mut request = httparse::Request::new(&mut headers);
    let Ok(httparse::Status::Complete(head)) = request.parse(bytes) else { return None };
    let (Some("POST"), Some(path), Some(1)) = (request.method, request.path, request.version)
    else {
        return None;
    };
    let verb = Verb::at(path).filter(|verb| *verb != Verb::Reset)?;
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
            name => !decides_how(name) && !is_of_a_browser(name),
        };
        if !fine {
            return None;
        }
    }
    let used = head + length?;
    Some(Whole { verb, path, authorization, host, accept, body: bytes.get(head..used)?, used })
}

/// Whether a header says which web page sends a request.
fn is_of_a_browser(name: &str) -> bool {
    name.eq_ignore_ascii_case("origin") || name.eq_ignore_ascii_case("sec-fetch-site")
}

/// A length that is written in digits and not too large.
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
    /// Answers what goes the short way. Returns what was read of something else, for which the
    /// connection has to go the other way; nothing if it ended.
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
        // One timer for the whole conversation. When it rings, it is looked at whether anything was
        // heard since it was set.
        let (mut bell, mut heard) = (pin!(sleep(idle)), false);
        loop {
            let mut at = 0;
            let mut other = false;
            while at < bytes.len() && out.len() <= MAX_ANSWERS_BYTES {
                let Some(question) = whole(&bytes[at..]) else {
                    other = true;
                    break;
                };
                write(&mut out, self.answer_whole(&question, caller).await).await?;
                at += question.used;
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
            if other {
                return Some(bytes);
            }
            if !bytes.is_empty() {
                continue;
            }
            tokio::select! {
                biased;
                read = stream.read_buf(&mut bytes) => {
                    heard = true;
                    if read.ok()? == 0 {
                        return None;
                    }
                }
                _ = &mut stop => return Some(bytes),
                () = &mut bell => {
                    if !heard {
                        return None;
                    }
                    heard = false;
                    bell.as_mut().reset(Instant::now() + idle);
                }
            }
        }
    }

    async fn answer_whole(&self, question: &Whole<'_>, caller: &Caller) -> Response<Body> {
        let said = Said::by(question.authorization);
        let refused = self.server.refused(question.path, said, caller, |hosts| {
            browser::foreign_host(hosts, question.host)
        });
        let mut response = match refused {
            Some(refused) => self.server.refusal(refused),
            None => {
                let answer = decide(&self.engine, question.verb, question.body, question.accept);
                self.server.unless_it_panics(answer).await
            }
        };
        let (name, value) = NO_SNIFF;
        response.headers_mut().insert(name, value);
        response
    }
}

/// Writes everything; an error, if that takes too long.
async fn within(
    patience: Duration,
    stream: &mut (impl AsyncWrite + Unpin),
    out: &[u8],
) -> io::Result<()> {
    let mut written = pin!(stream.write_all(out));
    // Nearly always it can be done at once, and then no timer is needed.
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
    fn questions_that_arrive_whole_go_the_short_way() {
        for (head, body) in [
            ("POST /v1/check HTTP/1.1\r\nhost: a\r\ncontent-length: 2", "{}"),
            (
                "POST /v1/peek HTTP/1.1\r\nContent-Length: 2\r\nConnection: Keep-Alive\r\nAccept: */*",
                "{}",
            ),
            ("POST /v1/settle HTTP/1.1\r\ncontent-length: 0", ""),
        ] {
            let text = request(head, body);
            let question = whole(text.as_bytes()).unwrap_or_else(|| panic!("{text}"));
            assert_eq!((question.body, question.used), (body.as_bytes(), text.len()), "{text}");
            // What comes behind it is not touched.
            let more = format!("{text}POST");
            assert_eq!(whole(more.as_bytes()), Some(question), "{text}");
            // None of its beginnings is a question.
            for end in 0..text.len() {
                assert_eq!(whole(&text.as_bytes()[..end]), None, "{end} of {text}");
            }
        }
    }

    #[test]
    fn everything_else_goes_the_other_way() {
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
            assert_eq!(whole(request(head, "{}").as_bytes()), None, "{head}");
        }
    }
}
