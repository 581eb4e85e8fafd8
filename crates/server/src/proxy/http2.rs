//! The connection to an HTTP/2 upstream: one for all requests, replaced when it ends.

use axum::http::{Request, Response};
use hyper::body::Incoming;
use hyper::client::conn::http2::{Builder, SendRequest};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};

use tokio::sync::Mutex;

use super::body::RequestBody;
use super::http1::SendError;
use super::socket::Socket;
use crate::listen::http::MAX_HEAD_BYTES;

/// The flow-control windows of one stream, and of the connection.
const STREAM_BYTES: u32 = 256 << 10;
const CONNECTION_BYTES: u32 = 4 << 20;

/// The connection that all requests share.
#[derive(Debug, Default)]
pub(super) struct SharedConnection {
    current: Mutex<Option<SendRequest<RequestBody>>>,
}

impl SharedConnection {
    /// A sender on the open connection, or on a new one made by `connect`. Concurrent callers wait
    /// for the same connection.
    pub(super) async fn sender<E>(
        &self,
        connect: impl Future<Output = Result<Socket, E>>,
    ) -> Result<SendRequest<RequestBody>, E>
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
        // The task ends with the last sender, or when the upstream closes the connection.
        tokio::spawn(connection);
        *current = Some(sender.clone());
        Ok(sender)
    }
}

/// Sends a request, and waits for the head of the response.
pub(super) async fn send(
    sender: &mut SendRequest<RequestBody>,
    request: Request<RequestBody>,
) -> Result<Response<Incoming>, SendError> {
    if let Err(error) = sender.ready().await {
        return Err(SendError { error, request: Some(request) });
    }
    sender.try_send_request(request).await.map_err(|mut failed| {
        let request = failed.take_message();
        SendError { error: failed.into_error(), request }
    })
}
