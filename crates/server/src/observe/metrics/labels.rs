//! The values of labels: each is one series of its metric.

/// How a question ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// It may pass.
    Allowed,
    /// It may not.
    Denied,
    /// It was not a question that can be decided.
    Invalid,
    /// The store had no answer.
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

/// Why somebody at a listener was not served.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Refusal {
    /// Too many connections.
    Full,
    /// Too many connections from one address.
    FullForAddress,
    /// No TLS came about.
    Tls,
    /// A wrong token, or none.
    Token,
    /// Somebody who is not trusted spoke for others.
    Untrusted,
    /// Too slow: a head, a body, a command or the reading of answers took too long.
    Slow,
    /// Too many frames of HTTP/2 about nothing: it had to wait.
    Flood,
    /// HTTP/2 was misused: the connection ended, and its place stayed taken for a while.
    Misuse,
    /// The upstream of the proxy did not answer.
    Upstream,
    /// Too many wrong tokens came before: the token was not looked at.
    Guessing,
    /// A web page of another origin sent it, or it was sent to a name that is not known.
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

/// What is read again when it changes.
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
