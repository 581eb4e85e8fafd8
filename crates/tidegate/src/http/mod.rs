//! HTTP for rate limits: the client's address, the path of a request, and the headers and bodies of
//! decisions.
//!
//! A limit must not be bypassed by a forged address or by another spelling of a path. [`ClientIp`]
//! finds the client behind trusted proxies. [`normal_path`] gives all spellings of a path the same
//! text, and [`PathPolicy`] refuses targets that servers read as different paths. [`headers`] and
//! [`denial`] write responses. The tower layer, the server and the proxy share this module.

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
