//! The connection to an upstream that speaks HTTP/2: one for all requests, made anew when it ends.

use axum::http::{Request, Response};
use hyper::body::Incoming;
use hyper::client::conn::http2::{Builder, SendRequest};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};

use tokio::sync::Mutex;

use super::body::Sent;
use super::http1::Unanswered;
use super::socket::Socket;
use crate::listen::http::MAX_HEAD_BYTES;

/// Bytes of a body that may be under way on one stream, and on the connection.
const STREAM_BYTES: u32 = 256 << 10;
const CONNECTION_BYTES: u32 = 4 << 20;

#[derive(Debug, Default)]
pub(super) struct Shared {
    current: Mutex<Option<SendRequest<Sent>>>,
}

impl Shared {
    /// Somebody to send by; `connect` is asked for a stream if there is nobody. While one waits for
    /// it, so do the others.
    pub(super) async fn sender<E>(
        &self,
        connect: impl Future<Output = Result<Socket, E>>,
    ) -> Result<SendRequest<Sent>, E>
    where
        E: From<hyper::Error>,
    {
        let mut current = self.current.lock().await;
        if let Some(sender) = current.as_ref().filter(|sender| !sender.is_closed()) {
            return Ok(sender.clone());
        }
        let stream = connect.await?;
        let (sender, connection) = Builder::new(TokioExecutor::new())
            .timer(TokioTimer::new())
            .initial_stream_window_size(STREAM_BYTES)
            .initial_connection_window_size(CONNECTION_BYTES)
            .max_header_list_size(u32::try_from(MAX_HEAD_BYTES).unwrap_or(u32::MAX))
            .handshake(TokioIo::new(stream))
            .await?;
        // It ends when nobody has a sender any more, or the upstream says so.
        tokio::spawn(connection);
        *current = Some(sender.clone());
        Ok(sender)
    }
}

/// Sends a request, and waits for the head of the response.
pub(super) async fn ask(
    sender: &mut SendRequest<Sent>,
    request: Request<Sent>,
) -> Result<Response<Incoming>, Unanswered> {
    if let Err(error) = sender.ready().await {
        return Err(Unanswered { error, request: Some(request) });
    }
    sender.try_send_request(request).await.map_err(|mut failed| {
        let request = failed.take_message();
        Unanswered { error: failed.into_error(), request }
    })
}
