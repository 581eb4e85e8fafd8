//! The proxy listener: forwards requests that the rules allow to an upstream, and relays its
//! responses.
//!
//! ```text
//! client --> serve_connection (hyper), or fast_path (HTTP/1.1 without hyper)
//!              --> exchange: attributes --> engine --> denied: 429
//!                     --> head (headers to send) --> upstream: http1 or http2
//!              <-- body: relays pieces; tunnel: after an upgrade; settlement: charges by outcome
//! ```
//!
//! Bodies are streamed: at most one piece of each is in memory.

mod body;
mod codec;
mod exchange;
mod fast_path;
mod fields;
mod head;
mod http1;
mod http2;
mod in_flight;
pub(crate) mod settings;
mod settlement;
mod slow_start;
mod socket;
mod timer;
mod tunnel;
mod upstream;
mod window;

use std::convert::Infallible;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::sync::watch;

use self::exchange::{AllowedRequest, Forwarder};
use self::fast_path::AfterFastPath;
use self::head::ConnectionPeer;
use self::in_flight::LastShare;
pub use self::settings::{InvalidUpstream, ProxySettings, Upstream, UpstreamProtocol};
use self::slow_start::SlowStart;
use self::tunnel::Tunnel;
use self::upstream::{SentRequest, Upstreams};
use self::window::WindowWatch;
use crate::engine::Engine;
use crate::listen::http::{Ending, Timeouts, builder, drive};
use crate::listen::progress::{Progress, Tracked};
use crate::listen::scheduler::{RequestQueue, RequestScheduler};
use crate::listen::{self, Connection, Listener, Stream};
use crate::observe::log::Field;
use crate::observe::metrics::Refusal;

/// How often idle upstream connections are checked.
const SWEEP: Duration = Duration::from_secs(5);

/// State that the requests of one client connection share.
#[derive(Debug)]
struct ProxyConnection {
    peer: ConnectionPeer,
    progress: Arc<Progress>,
    /// The tunnel that the connection becomes after an upgrade.
    tunnel: Mutex<Option<Tunnel>>,
    /// What the fast path did already for the first request on the general path.
    handed_over: Mutex<Option<(AllowedRequest, Option<SentRequest>)>>,
    windows: Arc<WindowWatch>,
    slow_start: Arc<SlowStart>,
    /// The slots of the client that sent the last request.
    share: LastShare,
}

/// Serves until `shutdown`, then finishes the requests in flight.
pub(crate) async fn serve_at(
    listener: Listener,
    engine: Engine,
    settings: ProxySettings,
    shutdown: watch::Receiver<bool>,
) -> io::Result<()> {
    let (bounds, unread) = (listener.bounds().clone(), settings.idle);
    let waits = move || {
        let bounds = bounds.get();
        Timeouts { patience: bounds.patience, unread, idle: bounds.idle }
    };
    let upstreams = Arc::new(Upstreams::new(settings));
    let (files, wanted) = (upstreams.files.reserved, upstreams.settings.most_connections());
    if files < wanted {
        let advice =
            "raise the limit of open files (ulimit -n, LimitNOFILE=), or lower proxy.max_in_flight";
        let fields: [Field<'_>; 3] =
            [("reserved", &files), ("wanted", &wanted), ("advice", &advice)];
        engine.observer().log().warn("few files for connections to the upstream", &fields);
    }
    let forwarder = Arc::new(Forwarder { engine, upstreams: Arc::clone(&upstreams) });
    let down = shutdown.clone();
    let received = listener.serve(shutdown, move |accepted| {
        serve_connection(Arc::clone(&forwarder), accepted, waits(), down.clone())
    });
    let sweeping = async {
        loop {
            tokio::time::sleep(SWEEP).await;
            upstreams.pool.sweep();
        }
    };
    tokio::select! {
        received = received => received,
        () = sweeping => Ok(()),
    }
}

/// Serves one client connection until it ends.
async fn serve_connection(
    forwarder: Arc<Forwarder>,
    accepted: Connection,
    waits: Timeouts,
    mut shutdown: watch::Receiver<bool>,
) {
    let Connection { mut stream, peer, slot, .. } = accepted;
    let progress = Arc::new(Progress::default());
    let secure = matches!(stream, Stream::Tls(_));
    let peer = ConnectionPeer::new(peer.ip(), secure);
    let shared = Arc::new(ProxyConnection {
        peer,
        progress: Arc::clone(&progress),
        tunnel: Mutex::default(),
        handed_over: Mutex::default(),
        windows: Arc::default(),
        slow_start: Arc::default(),
        share: LastShare::default(),
    });
    let refused =
        |why| forwarder.engine.observer().metrics().refused(forwarder.engine.protocol(), why);
    let mut bytes = Vec::new();
    if forwarder.upstreams.has_fast_path() {
        match forwarder.serve_fast_path(&mut stream, &shared, waits, &mut shutdown).await {
            AfterFastPath::GeneralPath(read) => bytes = read,
            AfterFastPath::Ended(Ending::Done) => return,
            AfterFastPath::Ended(Ending::TooSlow) => return refused(Refusal::Slow),
        }
    }
    let stream = listen::wire::Prefixed { bytes, at: 0, stream };
    let service = {
        let (forwarder, shared) = (Arc::clone(&forwarder), Arc::clone(&shared));
        service_fn(move |request| {
            let (forwarder, shared) = (Arc::clone(&forwarder), Arc::clone(&shared));
            // The future is large, and moved several times before its first poll.
            Box::pin(async move { Ok::<_, Infallible>(forwarder.answer(request, &shared).await) })
        })
    };
    let queue = RequestQueue::default();
    let (builder, mut scheduler) =
        (builder(forwarder.engine.protocol(), queue.clone()), RequestScheduler::of(queue));
    let left = {
        let io = TokioIo::new(Tracked::new(stream, Arc::clone(&progress)));
        let connection = pin!(builder.serve_connection_with_upgrades(io, service));
        tokio::select! {
            left = drive(connection, &mut scheduler, &progress, waits, &mut shutdown) => left,
            () = shared.windows.stalled(waits.unread) => Ending::TooSlow,
        }
    };
    // Requests in flight end with the connection.
    scheduler.end().await;
    if progress.was_flooded() {
        refused(Refusal::Flood);
    }
    if let Some(socket) = progress.abused_socket() {
        return slot.hold(socket, &mut shutdown).await;
    }
    if left == Ending::TooSlow {
        return refused(Refusal::Slow);
    }
    let tunnel = shared.tunnel.lock().take();
    if let Some(tunnel) = tunnel {
        tunnel.run(shutdown).await;
    }
}
