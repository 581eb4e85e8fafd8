//! The proxy listener: requests that the rules let pass go on to an upstream, and its responses
//! come back.
//!
//! ```text
//! client --> talk: a connection, HTTP/1.1 or HTTP/2; quick: what arrives whole over HTTP/1.1, without the detour by hyper
//!              --> exchange: attributes --> the engine --> denied: 429
//!                     --> head (what goes on) --> upstream: first (HTTP/1.1) or second (HTTP/2)
//!              <-- body: a piece at a time; tunnel: what is no longer HTTP; later: what it came to is settled
//! ```
//!
//! Nothing is kept of a body but the piece that is on its way.

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

use self::exchange::{Desk, Passed};
use self::fast_path::Next;
use self::head::Peer;
use self::in_flight::LastShare;
pub use self::settings::{InvalidUpstream, ProxySettings, Speech, Upstream};
use self::slow_start::Starts;
use self::tunnel::Tunnel;
use self::upstream::{Begun, Upstreams};
use self::window::Windows;
use crate::engine::Engine;
use crate::listen::http::{Left, Waits, attend, builder};
use crate::listen::pace::{Pace, Paced};
use crate::listen::turns::{Rounds, Turns};
use crate::listen::{self, Entrance, Stream, Visitor};
use crate::observe::log::Field;
use crate::observe::metrics::Refusal;

/// How often connections that wait for a request are looked at.
const SWEEP: Duration = Duration::from_secs(5);

/// What one visitor's requests share.
#[derive(Debug)]
struct Guest {
    peer: Peer,
    pace: Arc<Pace>,
    /// What becomes of the connection when HTTP is over.
    tunnel: Mutex<Option<Tunnel>>,
    /// What the first request that comes to hyper has met already, on the short way.
    asked: Mutex<Option<(Passed, Option<Begun>)>>,
    windows: Arc<Windows>,
    starts: Arc<Starts>,
    /// The slots of the client whose request came last.
    share: LastShare,
}

/// Serves until `shutdown` says so, then finishes what has begun.
pub(crate) async fn serve_at(
    entrance: Entrance,
    engine: Engine,
    settings: ProxySettings,
    shutdown: watch::Receiver<bool>,
) -> io::Result<()> {
    let (bounds, unread) = (entrance.bounds().clone(), settings.idle);
    let waits = move || {
        let bounds = bounds.get();
        Waits { patience: bounds.patience, unread, idle: bounds.idle }
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
    let desk = Arc::new(Desk { engine, upstreams: Arc::clone(&upstreams) });
    let down = shutdown.clone();
    let received = entrance
        .receive(shutdown, move |visitor| talk(Arc::clone(&desk), visitor, waits(), down.clone()));
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

/// Serves one visitor to the end.
async fn talk(
    desk: Arc<Desk>,
    visitor: Visitor,
    waits: Waits,
    mut shutdown: watch::Receiver<bool>,
) {
    let Visitor { mut stream, peer, place, .. } = visitor;
    let pace = Arc::new(Pace::default());
    let secure = matches!(stream, Stream::Tls(_));
    let peer = Peer::new(peer.ip(), secure);
    let guest = Arc::new(Guest {
        peer,
        pace: Arc::clone(&pace),
        tunnel: Mutex::default(),
        asked: Mutex::default(),
        windows: Arc::default(),
        starts: Arc::default(),
        share: LastShare::default(),
    });
    let refused = |why| desk.engine.observer().metrics().refused(desk.engine.protocol(), why);
    let mut bytes = Vec::new();
    if desk.upstreams.are_near() {
        match desk.talk_briefly(&mut stream, &guest, waits, &mut shutdown).await {
            Next::Other(read) => bytes = read,
            Next::Over(Left::Done) => return,
            Next::Over(Left::TooSlow) => return refused(Refusal::Slow),
        }
    }
    let stream = listen::quick::Begun { bytes, at: 0, stream };
    let service = {
        let (desk, guest) = (Arc::clone(&desk), Arc::clone(&guest));
        service_fn(move |request| {
            let (desk, guest) = (Arc::clone(&desk), Arc::clone(&guest));
            // It is large, and handed from one to the other before it begins.
            Box::pin(async move { Ok::<_, Infallible>(desk.answer(request, &guest).await) })
        })
    };
    let turns = Turns::default();
    let (builder, mut rounds) = (builder(desk.engine.protocol(), turns.clone()), Rounds::of(turns));
    let left = {
        let io = TokioIo::new(Paced::new(stream, Arc::clone(&pace)));
        let connection = pin!(builder.serve_connection_with_upgrades(io, service));
        tokio::select! {
            left = attend(connection, &mut rounds, &pace, waits, &mut shutdown) => left,
            () = guest.windows.starve(waits.unread) => Left::TooSlow,
        }
    };
    // Whatever is under way ends with the connection.
    rounds.end().await;
    if pace.was_flooded() {
        refused(Refusal::Flood);
    }
    if let Some(socket) = pace.misused() {
        return place.hold(socket, &mut shutdown).await;
    }
    if left == Left::TooSlow {
        return refused(Refusal::Slow);
    }
    let tunnel = guest.tunnel.lock().take();
    if let Some(tunnel) = tunnel {
        tunnel.run(shutdown).await;
    }
}
