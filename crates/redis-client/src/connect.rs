//! From an address to an open stream: name lookup, one attempt per address, TLS.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::net::TcpStream;
#[cfg(unix)]
use tokio::net::UnixStream;
use tokio::time::timeout;

use super::address::Address;
use super::outcome::{Failure, FailureKind, escaped};
use super::stream::{Connector, Stream};
#[cfg(feature = "tls")]
use super::tls::TlsClient;
use super::url::{Host, Login, Protocol};

/// The most addresses of one name to try.
const MAX_ADDRESSES: usize = 8;
/// The time to wait for one of several addresses before the next.
const ADDRESS_TIMEOUT: Duration = Duration::from_millis(300);

/// What all connections of a router share.
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

/// Opens a stream to `address`, over TLS if the profile has it.
pub(super) async fn connect(
    address: &Address,
    profile: &Profile,
    known: &Mutex<Vec<SocketAddr>>,
) -> Result<Stream, Failure> {
    let host = match address {
        Address::Tcp(host) => host,
        #[cfg(unix)]
        Address::Unix(path) => {
            let stream =
                UnixStream::connect(path).await.map_err(|error| refused(address, &error))?;
            return Ok(Stream::Unix(stream));
        }
        Address::Service(_) => {
            return Err(Failure::local(
                FailureKind::Unresolved,
                format!("{address}: expected a lookup through Sentinel"),
            ));
        }
        #[cfg(not(unix))]
        Address::Unix(_) => {
            return Err(Failure::local(
                FailureKind::Other,
                "unix sockets are not available on this system",
            ));
        }
    };
    if let Some(Connector(connector)) = &profile.connector {
        let stream =
            connector.connect(&host.to_string()).await.map_err(|error| refused(address, &error))?;
        return Ok(Stream::Other(stream));
    }
    let addresses = resolve(host, known).await?;
    let stream = connect_to_one(address, &addresses).await?;
    // Commands are batched into one write; waiting for more bytes would only add delay.
    let _ = stream.set_nodelay(true);
    #[cfg(feature = "tls")]
    if let Some(tls) = &profile.tls {
        return tls.connect(host, stream).await;
    }
    Ok(Stream::Tcp(stream))
}

/// Looks a name up, at every attempt; falls back to the last known addresses.
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

async fn connect_to_one(server: &Address, addresses: &[SocketAddr]) -> Result<TcpStream, Failure> {
    let mut last = None;
    for (index, address) in addresses.iter().enumerate() {
        let attempt = TcpStream::connect(address);
        // The last address may take all the remaining time.
        let result = if index + 1 < addresses.len() {
            timeout(ADDRESS_TIMEOUT, attempt)
                .await
                .unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
        } else {
            attempt.await
        };
        match result {
            Ok(stream) => return Ok(stream),
            Err(error) => last = Some(refused(server, &error)),
        }
    }
    Err(last.unwrap_or_else(|| {
        Failure::local(FailureKind::Unresolved, format!("{server} has no address"))
    }))
}

fn refused(address: &Address, error: &io::Error) -> Failure {
    let kind = if error.kind() == io::ErrorKind::TimedOut {
        FailureKind::Timeout
    } else {
        FailureKind::Refused
    };
    Failure::local(kind, format!("no connection to {address}: {}", escaped(&error.to_string())))
}
