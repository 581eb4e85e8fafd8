//! The body of a response: the service's own, watched to its end if something is paid by then, or
//! that of a denial.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Buf;
use http_body::{Body as HttpBody, Frame, SizeHint};
use pin_project_lite::pin_project;

use super::after::After;

pin_project! {
    /// The body of a response that went through a [`RateLimit`](super::RateLimit).
    pub struct Body<B> {
        #[pin]
        kind: Kind<B>,
        // Dropped with the body, which is when the response is over.
        after: Vec<After>,
    }
}

pin_project! {
    #[project = KindProject]
    enum Kind<B> {
        Service { #[pin] body: B },
        Answer { text: Option<String> },
    }
}

impl<B> Body<B> {
    pub(super) fn of_service(body: B, after: Vec<After>) -> Self {
        Body { kind: Kind::Service { body }, after }
    }

    pub(super) fn of_answer(text: String) -> Self {
        let text = Some(text).filter(|text| !text.is_empty());
        Body { kind: Kind::Answer { text }, after: Vec::new() }
    }
}

impl<B> HttpBody for Body<B>
where
    B: HttpBody,
    B::Data: From<String>,
{
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        let this = self.project();
        let (frame, is_last) = match this.kind.project() {
            KindProject::Answer { text } => {
                return Poll::Ready(text.take().map(|text| Ok(Frame::data(text.into()))));
            }
            KindProject::Service { mut body } => {
                let frame = std::task::ready!(body.as_mut().poll_frame(context));
                let is_last = !this.after.is_empty() && body.is_end_stream();
                (frame, is_last)
            }
        };
        if let Some(Ok(frame)) = &frame
            && let Some(data) = frame.data_ref()
        {
            let bytes = u64::try_from(data.remaining()).unwrap_or(u64::MAX);
            this.after.iter_mut().for_each(|after| after.bytes = after.bytes.saturating_add(bytes));
        }
        // It is over before its last piece is sent: a client that has read it finds its lease
        // ended.
        if is_last || !matches!(frame, Some(Ok(_))) {
            this.after.clear();
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        match &self.kind {
            Kind::Service { body } => body.is_end_stream(),
            Kind::Answer { text } => text.is_none(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            Kind::Service { body } => body.size_hint(),
            Kind::Answer { text } => SizeHint::with_exact(
                text.as_ref().map_or(0, |text| u64::try_from(text.len()).unwrap_or(u64::MAX)),
            ),
        }
    }
}

impl<B> std::fmt::Debug for Body<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Body").finish_non_exhaustive()
    }
}
