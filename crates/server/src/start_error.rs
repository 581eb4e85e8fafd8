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
    /// The address of a listener cannot be bound.
    #[error("cannot listen on {address} for {protocol}: {source}{}", listen_advice(source))]
    Listen {
        /// The listener.
        protocol: &'static str,
        /// Its address.
        address: SocketAddr,
        /// The cause.
        source: io::Error,
    },
    /// A listener would accept any client.
    #[error(
        "{protocol} on {address} would accept any client: add a token (--token-file FILE) or certificates of clients (--tls-client-ca FILE), listen on 127.0.0.1 alone, or write --insecure to allow it"
    )]
    Open {
        /// The listener.
        protocol: &'static str,
        /// Its address.
        address: SocketAddr,
    },
    /// The configuration for Envoy cannot be used.
    #[error(transparent)]
    Domains(#[from] ConfigError),
    /// The store's URL cannot be used.
    #[error("store: {0}")]
    Store(#[from] RedisError),
    /// The store refuses charges for a reason that does not pass by itself.
    #[error("store {store}: {why}\n{advice}")]
    StoreRefuses {
        /// The store, without credentials.
        store: String,
        /// The reason that it gave.
        why: String,
        /// How to fix it.
        advice: &'static str,
    },
    /// The file with the store's secret cannot be used.
    #[error("store_secret_file: {0}")]
    StoreSecret(String),
    /// The file in which state is kept cannot be used.
    #[error("memory.snapshot_file: {file}: {source}")]
    Snapshot {
        /// The file.
        file: String,
        /// The cause.
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
