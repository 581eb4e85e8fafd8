//! Where a connection leads.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use super::outcome::escaped;
use super::url::Host;

/// The address of a server.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Address {
    Tcp(Host),
    Unix(PathBuf),
    /// The primary of this service, as named by Sentinel.
    Service(Arc<str>),
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Tcp(host) => host.fmt(f),
            Address::Unix(path) => f.write_str(&escaped(&path.to_string_lossy())),
            Address::Service(name) => write!(f, "the primary of {}", escaped(name)),
        }
    }
}
