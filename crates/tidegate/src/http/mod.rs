//! What every way in over HTTP must agree on: who asks, and for what.
//!
//! Two questions decide whether a limit can be walked around. *Whose address is it?* [`ClientIp`]
//! finds the client behind proxies that are trusted, and believes nobody else. *Which path is it?*
//! [`normal_path`] gives all spellings of one path the same text, and [`PathPolicy`] refuses
//! targets that servers read as different paths. The library, the server and the proxy answer both
//! here.

mod authorization;
mod client;
mod forwarded;
mod network;
mod path;
mod target;

pub mod denial;
pub mod headers;
mod missing;

pub use authorization::bearer_token;
pub use client::{
    Client, ClientIp, ClientIpError, DEFAULT_IPV6_PREFIX, Found, Group, MAX_HOPS, group,
};
pub use missing::Missing;
pub use network::{MAX_NETWORKS, Network, NetworkError, TrustedProxies};
pub use path::{DotSegments, EscapedSlashes, PathPolicy, RefusedPath, Target};
pub use target::{MAX_HOST_BYTES, MAX_PATH_BYTES, TargetTooLong, normal_host, normal_path};
