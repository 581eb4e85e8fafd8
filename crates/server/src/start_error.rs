//! Why a server cannot start.

use std::io;
use std::net::SocketAddr;

use tidegate::redis::RedisError;

use crate::findings::ConfigError;
use crate::listen::tls::TlsError;

/// The listeners could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// An address cannot be listened on.
    #[error("cannot listen on {address} for {protocol}: {source}{}", listen_advice(source))]
    Listen {
        /// Which listener.
        protocol: &'static str,
        /// Where.
        address: SocketAddr,
        /// Why not.
        source: io::Error,
    },
    /// A listener would be open to everybody.
    #[error(
        "{protocol} on {address} would be open to everybody: add a token (--token-file FILE) or certificates of clients (--tls-client-ca FILE), listen on 127.0.0.1 alone, or write --insecure to allow it"
    )]
    Open {
        /// Which listener.
        protocol: &'static str,
        /// Where.
        address: SocketAddr,
    },
    /// The configuration for Envoy cannot be used.
    #[error(transparent)]
    Domains(#[from] ConfigError),
    /// The store's URL cannot be used.
    #[error("store: {0}")]
    Store(#[from] RedisError),
    /// The store refuses, and waiting cannot mend it.
    #[error("store {store}: {why}\n{advice}")]
    StoreRefuses {
        /// Which store, without credentials.
        store: String,
        /// What it said.
        why: String,
        /// What to do about it.
        advice: &'static str,
    },
    /// The file with the store's secret cannot be used.
    #[error("store_secret_file: {0}")]
    StoreSecret(String),
    /// The file in which state is kept cannot be used.
    #[error("memory.snapshot_file: {file}: {source}")]
    Snapshot {
        /// Which file.
        file: String,
        /// Why not.
        source: io::Error,
    },
    /// A certificate or key cannot be used.
    #[error("tls: {0}")]
    Tls(#[from] TlsError),
    /// A file with a token cannot be used.
    #[error("token file {0}")]
    Token(String),
    /// A token is too short for a listener that other machines can reach.
    #[error("{0}")]
    ShortToken(String),
}

fn listen_advice(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::AddrInUse => {
            "\nAnother program listens there: stop it, or choose another address, such as --http 127.0.0.1:8090."
        }
        io::ErrorKind::AddrNotAvailable => {
            "\nThis machine does not have that address: 0.0.0.0 stands for all that it has."
        }
        io::ErrorKind::PermissionDenied => {
            "\nPorts below 1024 need a privilege: choose a higher one."
        }
        _ => "",
    }
}
