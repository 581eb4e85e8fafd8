//! The values of labels: each is one series of its metric.

/// The outcome of a check.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// It is allowed.
    Allowed,
    /// It is denied.
    Denied,
    /// It is not a valid check.
    Invalid,
    /// The store did not answer.
    Failed,
}

impl Outcome {
    pub(super) const ALL: [Outcome; 4] =
        [Outcome::Allowed, Outcome::Denied, Outcome::Invalid, Outcome::Failed];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Outcome::Allowed => "allowed",
            Outcome::Denied => "denied",
            Outcome::Invalid => "invalid",
            Outcome::Failed => "failed",
        }
    }
}

/// Why a listener did not serve a connection or a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Refusal {
    /// Too many connections.
    Full,
    /// Too many connections from one address.
    FullForAddress,
    /// The TLS handshake failed.
    Tls,
    /// A wrong token, or none.
    Token,
    /// An untrusted peer stated the address of a client.
    Untrusted,
    /// A head, a body, a command or the reading of responses took too long.
    Slow,
    /// Too many HTTP/2 frames without a request: the connection was delayed.
    Flood,
    /// HTTP/2 abuse: the connection was closed, and keeps its slot for a while.
    Misuse,
    /// The upstream of the proxy did not answer.
    Upstream,
    /// The token was not compared after too many wrong ones.
    Guessing,
    /// A web page of another origin sent it, or its `Host` is unknown.
    Browser,
}

impl Refusal {
    pub(super) const ALL: [Refusal; 11] = [
        Refusal::Full,
        Refusal::FullForAddress,
        Refusal::Tls,
        Refusal::Token,
        Refusal::Untrusted,
        Refusal::Slow,
        Refusal::Flood,
        Refusal::Misuse,
        Refusal::Upstream,
        Refusal::Guessing,
        Refusal::Browser,
    ];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Refusal::Full => "full",
            Refusal::FullForAddress => "full_for_address",
            Refusal::Tls => "tls",
            Refusal::Token => "token",
            Refusal::Untrusted => "untrusted",
            Refusal::Slow => "slow",
            Refusal::Flood => "flood",
            Refusal::Misuse => "misuse",
            Refusal::Upstream => "upstream",
            Refusal::Guessing => "guessing",
            Refusal::Browser => "browser",
        }
    }
}

/// What is reloaded when it changes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reloaded {
    /// The rules.
    Rules,
    /// Certificates.
    Certificates,
    /// Tokens.
    Tokens,
}

impl Reloaded {
    pub(super) const ALL: [Reloaded; 3] =
        [Reloaded::Rules, Reloaded::Certificates, Reloaded::Tokens];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Reloaded::Rules => "rules",
            Reloaded::Certificates => "certificates",
            Reloaded::Tokens => "tokens",
        }
    }
}

/// What the watchdog has found stalled.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Stall {
    /// The event loop runs no tasks.
    Runtime,
    /// A shard of the store in memory stays locked.
    Store,
}

impl Stall {
    pub(super) const ALL: [Stall; 2] = [Stall::Runtime, Stall::Store];

    /// The word used in metrics and logs.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Stall::Runtime => "runtime",
            Stall::Store => "store",
        }
    }
}
