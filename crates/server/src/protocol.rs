//! The protocols: over which one a check arrives.

/// Where a question comes in.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Protocol {
    /// Within this process: readiness, explanations, tests.
    #[default]
    Internal,
    /// HTTP.
    Http,
    /// gRPC.
    Grpc,
    /// RESP.
    Resp,
    /// HTTP for those who look after it.
    Admin,
    /// HTTP that goes on to an upstream.
    Proxy,
}

impl Protocol {
    /// All of them.
    pub const ALL: [Protocol; 6] = [
        Protocol::Internal,
        Protocol::Http,
        Protocol::Grpc,
        Protocol::Resp,
        Protocol::Admin,
        Protocol::Proxy,
    ];
    /// Those that others can come through.
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
