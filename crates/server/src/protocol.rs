//! The protocols that a check can arrive by.

/// The protocol that a check arrives by.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Protocol {
    /// Calls within this process: readiness, explanations, tests.
    #[default]
    Internal,
    /// The HTTP check API.
    Http,
    /// Envoy's rate limit service over gRPC.
    Grpc,
    /// RESP, the protocol of Redis clients.
    Resp,
    /// The administration part of the HTTP API, at an address of its own.
    Admin,
    /// The reverse proxy.
    Proxy,
}

impl Protocol {
    /// All protocols.
    pub const ALL: [Protocol; 6] = [
        Protocol::Internal,
        Protocol::Http,
        Protocol::Grpc,
        Protocol::Resp,
        Protocol::Admin,
        Protocol::Proxy,
    ];
    /// The protocols that have a listener.
    pub const OUTER: [Protocol; 5] =
        [Protocol::Http, Protocol::Grpc, Protocol::Resp, Protocol::Admin, Protocol::Proxy];

    /// The word used in configuration, metrics and logs.
    pub const fn name(self) -> &'static str {
        match self {
            Protocol::Internal => "internal",
            Protocol::Http => "http",
            Protocol::Grpc => "grpc",
            Protocol::Resp => "resp",
            Protocol::Admin => "admin",
            Protocol::Proxy => "proxy",
        }
    }
}
