//! A short way for what is asked most over HTTP: questions to the engine by HTTP/1.1 that arrive
//! whole, one after the other on a connection that stays.
//!
//! It reads with the parser that hyper has (`httparse`), strictly: a POST to the path of a
//! question, one length in digits, and nothing among the headers that says how the connection or
//! the body is to be treated. Whatever else comes, or comes in pieces, or is HTTP/2, goes to hyper
//! together with what was read, and the connection stays there. Answers are the same to the byte.
//! What it saves: `docs/decisions/0021-http-fast-path.md`.

use std::cell::RefCell;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::pin::{Pin, pin};
use std::task::{Context, Poll};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::body::Body;
use axum::http::Response;
use http_body_util::BodyExt;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};

use super::http::{Hall, NO_SNIFF, Said};
use crate::auth::Caller;
use crate::browser;
use crate::digits;
use crate::http::{MAX_BODY_BYTES, Verb};
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

/// Whether a header says how the connection or the body is to be treated.
pub(crate) fn decides_how(name: &str) -> bool {
    [
        "transfer-encoding",
        "expect",
        "upgrade",
        "te",
        "trailer",
        "keep-alive",
        "proxy-connection",
        "http2-settings",
    ]
    .iter()
    .any(|own| name.eq_ignore_ascii_case(own))
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

impl Hall {
    /// Answers what goes the short way. Returns what was read of something else, for which the
    /// connection has to go the other way; nothing if it ended.
    pub(super) async fn talk_briefly(
        &self,
        stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
        caller: &Caller,
        (patience, idle): (Duration, Duration),
        shutdown: &mut watch::Receiver<bool>,
    ) -> Option<Vec<u8>> {
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
                    self.refuse(Refusal::Slow);
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
        let refused = self.refused(question.path, said, caller, |hosts| {
            browser::foreign_host(hosts, question.host)
        });
        let mut response = match refused {
            Some(refused) => self.refusal(refused),
            None => {
                self.unless_it_panics(self.ask(question.verb, question.body, question.accept)).await
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

/// An answer as hyper writes it.
pub(crate) async fn write(out: &mut Vec<u8>, response: Response<Body>) -> Option<()> {
    let (head, body) = response.into_parts();
    let body = body.collect().await.ok()?.to_bytes(); // it is all in memory
    out.reserve(512 + body.len());
    out.extend_from_slice(b"HTTP/1.1 ");
    out.extend_from_slice(head.status.as_str().as_bytes());
    out.push(b' ');
    out.extend_from_slice(head.status.canonical_reason().unwrap_or("<none>").as_bytes());
    for (name, value) in &head.headers {
        out.extend_from_slice(b"\r\n");
        out.extend_from_slice(name.as_str().as_bytes());
        out.extend_from_slice(b": ");
        out.extend_from_slice(value.as_bytes());
    }
    out.extend_from_slice(b"\r\ncontent-length: ");
    digits::push(out, body.len() as u64);
    out.extend_from_slice(b"\r\ndate: ");
    push_date(out);
    out.extend_from_slice(b"\r\n\r\n");
    out.extend_from_slice(&body);
    Some(())
}

/// The date, which is written anew once a second.
pub(crate) fn push_date(out: &mut Vec<u8>) {
    thread_local! {
        static LAST: RefCell<(u64, String)> = const { RefCell::new((0, String::new())) };
    }
    let now = SystemTime::now();
    let second = now.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    LAST.with_borrow_mut(|(known, text)| {
        if *known != second || text.is_empty() {
            (*known, *text) = (second, httpdate::fmt_http_date(now));
        }
        out.extend_from_slice(text.as_bytes());
    });
}

/// A stream of which the beginning has been read already.
#[derive(Debug)]
pub(crate) struct Begun<S> {
    pub(crate) bytes: Vec<u8>,
    pub(crate) at: usize,
    pub(crate) stream: S,
}

impl<S: AsFd> AsFd for Begun<S> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Begun<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.at < self.bytes.len() {
            let count = buf.remaining().min(self.bytes.len() - self.at);
            buf.put_slice(&self.bytes[self.at..self.at + count]);
            self.at += count;
            if self.at == self.bytes.len() {
                self.bytes = Vec::new();
                self.at = 0;
            }
            return Poll::Ready(Ok(()));
        }
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Begun<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
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
