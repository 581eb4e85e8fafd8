//! The body of a response: the service's, followed to its end if a charge is settled then, or the
//! body of a denial.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Buf;
use http_body::{Body as HttpBody, Frame, SizeHint};
use pin_project_lite::pin_project;

use super::completion::Completion;

pin_project! {
    /// The body of a response that went through a [`RateLimit`](super::RateLimit).
    pub struct RateLimitBody<B> {
        #[pin]
        kind: BodyKind<B>,
        // Dropped with the body, when the response is over.
        completions: Vec<Completion>,
    }
}

pin_project! {
    #[project = KindProject]
    enum BodyKind<B> {
        Service { #[pin] body: B },
        Text { text: Option<String> },
    }
}

impl<B> RateLimitBody<B> {
    pub(super) fn of_service(body: B, completions: Vec<Completion>) -> Self {
        RateLimitBody { kind: BodyKind::Service { body }, completions }
    }

    pub(super) fn of_layer(text: String) -> Self {
        let text = Some(text).filter(|text| !text.is_empty());
        RateLimitBody { kind: BodyKind::Text { text }, completions: Vec::new() }
    }
}

impl<B> HttpBody for RateLimitBody<B>
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
            KindProject::Text { text } => {
                return Poll::Ready(text.take().map(|text| Ok(Frame::data(text.into()))));
            }
            KindProject::Service { mut body } => {
                let frame = std::task::ready!(body.as_mut().poll_frame(context));
                let is_last = !this.completions.is_empty() && body.is_end_stream();
                (frame, is_last)
            }
        };
        if let Some(Ok(frame)) = &frame
            && let Some(data) = frame.data_ref()
        {
            let bytes = u64::try_from(data.remaining()).unwrap_or(u64::MAX);
            for completion in this.completions.iter_mut() {
                completion.bytes = completion.bytes.saturating_add(bytes);
            }
        }
        // Completed before the last frame is sent: when a client has read it, its lease has ended.
        if is_last || !matches!(frame, Some(Ok(_))) {
            this.completions.clear();
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        match &self.kind {
            BodyKind::Service { body } => body.is_end_stream(),
            BodyKind::Text { text } => text.is_none(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            BodyKind::Service { body } => body.size_hint(),
            BodyKind::Text { text } => SizeHint::with_exact(
                text.as_ref().map_or(0, |text| u64::try_from(text.len()).unwrap_or(u64::MAX)),
            ),
        }
    }
}

impl<B> std::fmt::Debug for RateLimitBody<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RateLimitBody").finish_non_exhaustive()
    }
}
