//! From an address to a connection that is ready for commands.

use std::fmt;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
#[cfg(unix)]
use tokio::net::UnixStream;
use tokio::time::timeout;

use super::handshake;
use super::outcome::{Failure, FailureKind, escaped};
use super::sentinel::{Primary, Sentinels};
#[cfg(feature = "tls")]
use super::tls::TlsClient;
use super::url::{Host, Login, Protocol};

/// The most addresses of one name that are tried.
const MAX_ADDRESSES: usize = 8;
/// How long one of several addresses is waited for before the next is tried.
const ADDRESS_TIMEOUT: Duration = Duration::from_millis(300);

/// What all connections of a router have in common.
#[derive(Debug)]
pub(super) struct Profile {
    pub(super) login: Login,
    pub(super) database: u32,
    pub(super) protocol: Option<Protocol>,
    pub(super) client_name: String,
    pub(super) connector: Option<Connector>,
    #[cfg(feature = "tls")]
    pub(super) tls: Option<TlsClient>,
}

/// Makes byte streams to servers, where they are not sockets: for simulations, and for whoever
/// reaches a server in another way.
pub trait Connect: Send + Sync + 'static {
    /// A stream to the server at `address`, which is `host:port`. What is returned must be ready
    /// for the first byte.
    fn connect(&self, address: &str) -> Connecting;
}

/// What [`Connect::connect`] returns.
pub type Connecting = Pin<Box<dyn Future<Output = io::Result<Box<dyn Link>>> + Send>>;

/// A byte stream in both directions.
pub trait Link: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Link for T {}

/// Somebody who makes streams.
#[derive(Clone)]
pub struct Connector(Arc<dyn Connect>);

impl Connector {
    /// Makes streams by `connect`.
    pub fn new(connect: impl Connect) -> Self {
        Connector(Arc::new(connect))
    }
}

impl fmt::Debug for Connector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Connector")
    }
}

/// Where a connection leads.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Place {
    Tcp(Host),
    Unix(PathBuf),
    /// Wherever Sentinel says that the primary of this service is.
    Service(Arc<str>),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Tcp(host) => host.fmt(f),
            Place::Unix(path) => f.write_str(&escaped(&path.to_string_lossy())),
            Place::Service(name) => write!(f, "the primary of {}", escaped(name)),
        }
    }
}

/// Makes connections to one place.
pub(super) struct Dialer {
    place: Place,
    profile: Arc<Profile>,
    /// Whom to ask first.
    sentinels: Option<Arc<Sentinels>>,
    /// Addresses that the name had when it was last resolved, for when it cannot be.
    known: Mutex<Vec<SocketAddr>>,
}

/// A connection that has been greeted.
pub(super) struct Opened {
    pub(super) stream: Stream,
    /// What came after the greeting.
    pub(super) early: Vec<u8>,
    /// The primary that Sentinel named, if it was asked.
    pub(super) primary: Option<Primary>,
}

impl fmt::Display for Dialer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.place.fmt(f)
    }
}

impl Dialer {
    pub(super) fn new(
        place: Place,
        profile: Arc<Profile>,
        sentinels: Option<Arc<Sentinels>>,
    ) -> Self {
        Dialer { place, profile, sentinels, known: Mutex::default() }
    }

    /// Connects and greets. Does not watch the time; whoever calls it does.
    pub(super) async fn open(&self) -> Result<Opened, Failure> {
        let Some(sentinels) = &self.sentinels else {
            let stream = connect(&self.place, &self.profile, &self.known).await?;
            return handshake::greet(stream, &self.profile, &self.place, false).await;
        };
        let primary = sentinels.primary().await?;
        let place = Place::Tcp(primary.host.clone());
        // The addresses of another primary would be of no use, so none are kept.
        let stream = connect(&place, &self.profile, &Mutex::default()).await?;
        let opened = handshake::greet(stream, &self.profile, &place, true).await?;
        sentinels.watch();
        Ok(Opened { primary: Some(primary), ..opened })
    }

    /// Whether a connection to `primary` leads to one that has been replaced.
    pub(super) fn is_replaced(&self, primary: Option<&Primary>) -> bool {
        primary
            .zip(self.sentinels.as_ref())
            .is_some_and(|(primary, sentinels)| sentinels.is_replaced(primary))
    }
}

/// A stream to `place`, encrypted if it is to be, not yet greeted.
pub(super) async fn connect(
    place: &Place,
    profile: &Profile,
    known: &Mutex<Vec<SocketAddr>>,
) -> Result<Stream, Failure> {
    let host = match place {
        Place::Tcp(host) => host,
        #[cfg(unix)]
        Place::Unix(path) => {
            let stream = UnixStream::connect(path).await.map_err(|error| refused(place, &error))?;
            return Ok(Stream::Unix(stream));
        }
        Place::Service(_) => {
            return Err(Failure::local(
                FailureKind::Unresolved,
                format!("{place}: expected Sentinel to be asked"),
            ));
        }
        #[cfg(not(unix))]
        Place::Unix(_) => {
            return Err(Failure::local(
                FailureKind::Other,
                "unix sockets are not available on this system",
            ));
        }
    };
    if let Some(Connector(connector)) = &profile.connector {
        let stream =
            connector.connect(&host.to_string()).await.map_err(|error| refused(place, &error))?;
        return Ok(Stream::Other(stream));
    }
    let addresses = resolve(host, known).await?;
    let stream = connect_to_one(place, &addresses).await?;
    // One write per batch already; waiting for more bytes would only add delay.
    let _ = stream.set_nodelay(true);
    #[cfg(feature = "tls")]
    if let Some(tls) = &profile.tls {
        return tls.connect(host, stream).await;
    }
    Ok(Stream::Tcp(stream))
}

/// The addresses of a name, asked for at every attempt; the last known ones where nobody answers.
async fn resolve(host: &Host, known: &Mutex<Vec<SocketAddr>>) -> Result<Vec<SocketAddr>, Failure> {
    let found = tokio::net::lookup_host((&*host.name, host.port)).await;
    let found = found.map(|addresses| addresses.take(MAX_ADDRESSES).collect::<Vec<_>>());
    match found {
        Ok(addresses) if !addresses.is_empty() => {
            known.lock().clone_from(&addresses);
            Ok(addresses)
        }
        other => {
            let addresses = known.lock().clone();
            if !addresses.is_empty() {
                return Ok(addresses);
            }
            let why = other
                .err()
                .map_or_else(|| "no address".into(), |error| escaped(&error.to_string()));
            Err(Failure::local(
                FailureKind::Unresolved,
                format!("{host} could not be resolved: {why}"),
            ))
        }
    }
}

async fn connect_to_one(place: &Place, addresses: &[SocketAddr]) -> Result<TcpStream, Failure> {
    let mut last = None;
    for (index, address) in addresses.iter().enumerate() {
        let attempt = TcpStream::connect(address);
        // The last address may take all the time there is.
        let result = if index + 1 < addresses.len() {
            timeout(ADDRESS_TIMEOUT, attempt)
                .await
                .unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
        } else {
            attempt.await
        };
        match result {
            Ok(stream) => return Ok(stream),
            Err(error) => last = Some(refused(place, &error)),
        }
    }
    Err(last.unwrap_or_else(|| {
        Failure::local(FailureKind::Unresolved, format!("{place} has no address"))
    }))
}

fn refused(place: &Place, error: &io::Error) -> Failure {
    let kind = if error.kind() == io::ErrorKind::TimedOut {
        FailureKind::Timeout
    } else {
        FailureKind::Refused
    };
    Failure::local(kind, format!("no connection to {place}: {}", escaped(&error.to_string())))
}

/// A byte stream of one kind or another.
pub(super) enum Stream {
    Tcp(TcpStream),
    #[cfg(unix)]
    Unix(UnixStream),
    #[cfg(feature = "tls")]
    Tls(Box<tokio_rustls::client::TlsStream<TcpStream>>),
    Other(Box<dyn Link>),
}

macro_rules! each {
    ($self:expr, $stream:ident => $call:expr) => {
        match $self.get_mut() {
            Stream::Tcp($stream) => $call,
            #[cfg(unix)]
            Stream::Unix($stream) => $call,
            #[cfg(feature = "tls")]
            Stream::Tls($stream) => $call,
            Stream::Other($stream) => $call,
        }
    };
}

impl AsyncRead for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        each!(self, stream => Pin::new(stream).poll_read(cx, buf))
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        each!(self, stream => Pin::new(stream).poll_write(cx, bytes))
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        each!(self, stream => Pin::new(stream).poll_flush(cx))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        each!(self, stream => Pin::new(stream).poll_shutdown(cx))
    }
}
