//! Upgraded connections: copies bytes in both directions until both sides are done or the tunnel is
//! idle for too long.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, split};
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use super::http1::Http1Connection;
use super::settlement::Settlement;

/// The buffer of one direction.
const BUFFER_BYTES: usize = 16 << 10;
/// How long both upgrades may take.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a tunnel may continue during shutdown.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(3);

/// Two upgraded connections, joined.
#[derive(Debug)]
pub(super) struct Tunnel {
    pub(super) client: OnUpgrade,
    pub(super) upstream: Http1Connection,
    pub(super) idle: Duration,
    /// The settlement, due when the tunnel ends.
    pub(super) settlement: Option<Box<Settlement>>,
}

impl Tunnel {
    /// Copies bytes until the tunnel ends.
    pub(super) async fn run(self, mut shutdown: watch::Receiver<bool>) {
        let Tunnel { client, upstream, idle, mut settlement } = self;
        let both = async { tokio::join!(client, upstream.into_stream()) };
        let Ok((Ok(client), (upstream, first))) = timeout(HANDSHAKE_TIMEOUT, both).await else {
            return;
        };
        let (moved, returned) = (AtomicU64::new(0), AtomicU64::new(first.len() as u64));
        let (from_client, mut to_client) = split(TokioIo::new(client));
        let (from_upstream, to_upstream) = split(upstream);
        let down = async {
            to_client.write_all(&first).await?;
            pump(from_upstream, to_client, &returned).await
        };
        // The end of one direction is forwarded and the other continues; an error ends both.
        let copied = async { tokio::try_join!(down, pump(from_client, to_upstream, &moved)) };
        let idle_for_too_long = async {
            let total =
                || moved.load(Ordering::Relaxed).wrapping_add(returned.load(Ordering::Relaxed));
            let mut seen = None;
            while seen != Some(total()) {
                seen = Some(total());
                sleep(idle).await;
            }
        };
        let stopped = async {
            let _ = shutdown.wait_for(|down| *down).await;
            sleep(SHUTDOWN_GRACE).await;
        };
        tokio::select! {
            _ = copied => {}
            () = idle_for_too_long => {}
            () = stopped => {}
        }
        if let Some(settlement) = &mut settlement {
            settlement.bytes = returned.load(Ordering::Relaxed);
        }
    }
}

/// Copies bytes in one direction, and forwards the end.
async fn pump(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    moved: &AtomicU64,
) -> io::Result<()> {
    let mut buffer = vec![0; BUFFER_BYTES];
    loop {
        let bytes = from.read(&mut buffer).await?;
        if bytes == 0 {
            return to.shutdown().await;
        }
        to.write_all(&buffer[..bytes]).await?;
        to.flush().await?;
        moved.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}
