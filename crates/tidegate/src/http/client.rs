//! Whose request it is, behind proxies or not.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::forwarded::{self, Syntax};
use super::network::{TrustedProxies, mask_v6};

/// The most hops that are walked. A chain of so many trusted proxies is a mistake.
pub const MAX_HOPS: usize = 64;
/// One budget for addresses that have so many bits in common: a home or a server is given at least
/// that many of its own.
pub const DEFAULT_IPV6_PREFIX: u8 = 64;

/// Finds the address of the client.
///
/// It is the peer's, unless the peer is a trusted proxy. Then it is the right-most address in the
/// header which is not a trusted proxy's: the last one that somebody trusted has seen with own
/// eyes. Whatever stands left of it may be made up, and is not looked at.
///
/// One header is believed, `X-Forwarded-For` unless told otherwise. If a request has others too,
/// they count for nothing, whatever they say.
///
/// ```
/// use tidegate::http::ClientIp;
/// let clients = ClientIp::behind("10.0.0.0/8".parse()?);
/// let client = clients.find("10.0.0.1".parse()?, [&b"203.0.113.9, 192.0.2.7, 10.0.0.2"[..]]);
/// assert_eq!(client.ip().to_string(), "192.0.2.7");
/// // Nobody vouches for what a stranger says of itself.
/// let client = clients.find("198.51.100.1".parse()?, [&b"192.0.2.7"[..]]);
/// assert_eq!(client.ip().to_string(), "198.51.100.1");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ClientIp {
    trusted: TrustedProxies,
    header: Box<str>,
    syntax: Syntax,
    ipv6_prefix: u8,
}

/// What is wrong with a setting.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientIpError {
    /// The header cannot be the name of one.
    #[error("header {0:?}: expected a name such as x-forwarded-for, forwarded or cf-connecting-ip")]
    Header(String),
    /// The prefix would put strangers together, or is none.
    #[error("an IPv6 prefix of {0} bits: expected 32 to 128")]
    Prefix(u8),
}

/// How the address was found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Found {
    /// It is the peer's: it is not a trusted proxy, or it forwarded nothing.
    Peer,
    /// It is the right-most one that is not trusted.
    Hop,
    /// All that were forwarded are trusted; it is the left-most.
    LastHop,
    /// Before it stands something that is not an address, so that nobody knows who was there: it is
    /// the last that can be read, or the peer's.
    Unreadable,
    /// There are more than [`MAX_HOPS`]; it is the last that was walked to.
    TooManyHops,
}

/// A client, as far as it is known.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Client {
    ip: IpAddr,
    found: Found,
    ipv6_prefix: u8,
}

impl Client {
    /// Its address; never an IPv4 address that is written as IPv6.
    pub fn ip(&self) -> IpAddr {
        self.ip
    }

    /// How it was found.
    pub fn found(&self) -> Found {
        self.found
    }

    /// Whose budget it is: the address, or for IPv6 the network around it. See [`group`].
    pub fn group(&self) -> Group {
        group(self.ip, self.ipv6_prefix)
    }
}

impl ClientIp {
    /// The peer is the client, whatever it says: for a service that stands before everything else.
    pub fn of_peer() -> Self {
        Self::behind(TrustedProxies::none())
    }

    /// Believes the header `X-Forwarded-For` if it comes from these.
    pub fn behind(trusted: TrustedProxies) -> Self {
        let header = "x-forwarded-for".into();
        ClientIp { trusted, header, syntax: Syntax::Plain, ipv6_prefix: DEFAULT_IPV6_PREFIX }
    }

    /// Believes another header: `forwarded` is read as RFC 7239 says, any other as a list of
    /// addresses, or a single one.
    ///
    /// It must be a header that every trusted proxy sets or adds to. One that a proxy lets through
    /// unchanged is written by the client.
    ///
    /// # Errors
    /// If it cannot be the name of a header.
    pub fn header(mut self, name: &str) -> Result<Self, ClientIpError> {
        let is_name = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
        if name.is_empty() || name.len() > 256 || !name.bytes().all(is_name) {
            return Err(ClientIpError::Header(name.chars().take(64).collect()));
        }
        self.header = name.to_ascii_lowercase().into();
        self.syntax = if &*self.header == "forwarded" { Syntax::Forwarded } else { Syntax::Plain };
        Ok(self)
    }

    /// How many bits IPv6 addresses of one client have in common; 64 unless told otherwise.
    ///
    /// # Errors
    /// If it is not 32 to 128.
    pub fn ipv6_prefix(mut self, bits: u8) -> Result<Self, ClientIpError> {
        if !(32..=128).contains(&bits) {
            return Err(ClientIpError::Prefix(bits));
        }
        self.ipv6_prefix = bits;
        Ok(self)
    }

    /// Which header is believed, in lower case.
    pub fn header_name(&self) -> &str {
        &self.header
    }

    /// How many bits IPv6 addresses of one client have in common.
    pub fn prefix(&self) -> u8 {
        self.ipv6_prefix
    }

    /// Who is trusted.
    pub fn trusted(&self) -> &TrustedProxies {
        &self.trusted
    }

    /// Whether `peer` may say who the client is, and what it asked for.
    pub fn trusts(&self, peer: IpAddr) -> bool {
        self.trusted.contains(peer)
    }

    /// The client of a request from `peer` with these lines of [the header](ClientIp::header_name),
    /// in the order of the request.
    pub fn find<'a, L>(&self, peer: IpAddr, lines: L) -> Client
    where
        L: IntoIterator<Item = &'a [u8]>,
        L::IntoIter: DoubleEndedIterator,
    {
        let peer = peer.to_canonical();
        let (ip, found) = if self.trusts(peer) {
            self.walk(peer, lines.into_iter().rev())
        } else {
            (peer, Found::Peer)
        };
        Client { ip, found, ipv6_prefix: self.ipv6_prefix }
    }

    /// The same, from a request's headers.
    #[cfg(feature = "http")]
    pub fn find_in(&self, peer: IpAddr, headers: &::http::HeaderMap) -> Client {
        let peer = peer.to_canonical();
        if !self.trusts(peer) {
            // The header need not even be looked for.
            return Client { ip: peer, found: Found::Peer, ipv6_prefix: self.ipv6_prefix };
        }
        self.find(
            peer,
            headers.get_all(&*self.header).into_iter().map(::http::HeaderValue::as_bytes),
        )
    }

    /// From the nearest hop outwards; `lines` are from the last to the first.
    fn walk<'a>(&self, peer: IpAddr, lines: impl Iterator<Item = &'a [u8]>) -> (IpAddr, Found) {
        let (mut last, mut hops) = (peer, 0);
        for line in lines {
            let mut rest = Some(line);
            while let Some(line) = rest {
                if hops == MAX_HOPS {
                    return (last, Found::TooManyHops);
                }
                let Some((hop, before)) = forwarded::last_hop(line, self.syntax) else {
                    return (last, Found::Unreadable);
                };
                let Some(address) = forwarded::address(hop, self.syntax) else {
                    return (last, Found::Unreadable);
                };
                if !self.trusts(address) {
                    return (address, Found::Hop);
                }
                (last, rest) = (address, before);
                hops += 1;
            }
        }
        (last, if hops == 0 { Found::Peer } else { Found::LastHop })
    }
}

/// Whose budget an address belongs to: its text is the key.
///
/// IPv4 addresses stand for themselves, in whatever way they came: as IPv6 (`::ffff:192.0.2.7`), or
/// through a translator with the well-known prefix (`64:ff9b::192.0.2.7`), which would otherwise
/// put all of them together. Of IPv6 addresses only the first `prefix` bits count, because who has
/// one has as many as there are after them.
///
/// ```
/// use tidegate::http::group;
/// assert_eq!(group("2001:db8:1:2:3::4".parse()?, 64).to_string(), "2001:db8:1:2::/64");
/// assert_eq!(group("2001:db8:1:2:3::4".parse()?, 128).to_string(), "2001:db8:1:2:3::4");
/// assert_eq!(group("::ffff:192.0.2.7".parse()?, 64).to_string(), "192.0.2.7");
/// # Ok::<(), std::net::AddrParseError>(())
/// ```
pub fn group(ip: IpAddr, prefix: u8) -> Group {
    match ip.to_canonical() {
        IpAddr::V4(v4) => Group::V4(v4),
        IpAddr::V6(v6) => match v6.segments() {
            [0x64, 0xff9b, 0, 0, 0, 0, high, low] => {
                let ([a, b], [c, d]) = (high.to_be_bytes(), low.to_be_bytes());
                Group::V4(Ipv4Addr::new(a, b, c, d))
            }
            _ => Group::V6(Ipv6Addr::from_bits(v6.to_bits() & mask_v6(prefix)), prefix.min(128)),
        },
    }
}

/// Addresses that share a budget; see [`group`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Group {
    /// One address.
    V4(Ipv4Addr),
    /// All that begin with so many bits.
    V6(Ipv6Addr, u8),
}

impl fmt::Display for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Group::V4(v4) => write!(f, "{v4}"),
            Group::V6(v6, 128) => write!(f, "{v6}"),
            Group::V6(v6, prefix) => write!(f, "{v6}/{prefix}"),
        }
    }
}
