//! HTTP/1.1 written and read without hyper, for the fast paths of the protocols.

use std::cell::RefCell;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{SystemTime, UNIX_EPOCH};

use axum::body::Body;
use axum::http::Response;
use http_body_util::BodyExt;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::digits;

/// Whether a header changes how the connection or the body is framed.
pub(crate) fn is_framing_header(name: &str) -> bool {
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

/// Writes a response as hyper does.
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

/// Writes the date, formatted once a second.
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

/// A stream whose first bytes have been read already.
#[derive(Debug)]
pub(crate) struct Prefixed<S> {
    pub(crate) bytes: Vec<u8>,
    pub(crate) at: usize,
    pub(crate) stream: S,
}

impl<S: AsFd> AsFd for Prefixed<S> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Prefixed<S> {
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

impl<S: AsyncWrite + Unpin> AsyncWrite for Prefixed<S> {
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
