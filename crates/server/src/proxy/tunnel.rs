//! What is no longer HTTP: bytes in both directions, until both sides are done or nothing has come
//! for long.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, split};
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use super::http1::Line;
use super::settlement::Later;

/// Bytes on their way in one direction.
const BUFFER_BYTES: usize = 16 << 10;
/// How long both sides may take to begin.
const BEGINNING: Duration = Duration::from_secs(10);
/// How long both sides may go on after the order to stop.
const FAREWELL: Duration = Duration::from_secs(3);

/// Two connections that become one.
#[derive(Debug)]
pub(super) struct Tunnel {
    pub(super) client: OnUpgrade,
    pub(super) upstream: Line,
    pub(super) idle: Duration,
    /// What is settled or ends when it is over.
    pub(super) later: Option<Box<Later>>,
}

impl Tunnel {
    /// Carries bytes until there are no more.
    pub(super) async fn run(self, mut shutdown: watch::Receiver<bool>) {
        let Tunnel { client, upstream, idle, mut later } = self;
        let both = async { tokio::join!(client, upstream.into_stream()) };
        let Ok((Ok(client), (upstream, first))) = timeout(BEGINNING, both).await else { return };
        let (moved, returned) = (AtomicU64::new(0), AtomicU64::new(first.len() as u64));
        let (from_client, mut to_client) = split(TokioIo::new(client));
        let (from_upstream, to_upstream) = split(upstream);
        let down = async {
            to_client.write_all(&first).await?;
            pump(from_upstream, to_client, &returned).await
        };
        // An end is carried on and the other direction goes on; a side that has failed ends both.
        let carried = async { tokio::try_join!(down, pump(from_client, to_upstream, &moved)) };
        let silent = async {
            let look =
                || moved.load(Ordering::Relaxed).wrapping_add(returned.load(Ordering::Relaxed));
            let mut seen = None;
            while seen != Some(look()) {
                seen = Some(look());
                sleep(idle).await;
            }
        };
        let told = async {
            let _ = shutdown.wait_for(|down| *down).await;
            sleep(FAREWELL).await;
        };
        tokio::select! {
            _ = carried => {}
            () = silent => {}
            () = told => {}
        }
        if let Some(later) = &mut later {
            later.bytes = returned.load(Ordering::Relaxed);
        }
    }
}

/// Carries bytes in one direction; the end is carried, too.
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
