//! The address of the client, also behind proxies.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::forwarded::{self, Syntax};
use super::network::{TrustedProxies, mask_v6};

/// The most hops that are read: a longer chain of trusted proxies is a mistake.
pub const MAX_HOPS: usize = 64;
/// The bits that the IPv6 addresses of one client share: a home or a server usually owns a network
/// of this prefix.
pub const DEFAULT_IPV6_PREFIX: u8 = 64;

/// Finds the address of the client.
///
/// It is the address of the peer, unless the peer is a trusted proxy. Then it is the right-most
/// address in the header that is not a trusted proxy: the last one that a trusted proxy has seen.
/// Addresses to its left can be forged and are ignored.
///
/// Only one header counts, `X-Forwarded-For` by default; other headers are ignored.
///
/// ```
/// use tidegate::http::ClientIp;
/// let clients = ClientIp::behind("10.0.0.0/8".parse()?);
/// let client = clients.find("10.0.0.1".parse()?, [&b"203.0.113.9, 192.0.2.7, 10.0.0.2"[..]]);
/// assert_eq!(client.ip().to_string(), "192.0.2.7");
/// // A header from a peer that is not trusted is ignored.
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

/// Why an option of [`ClientIp`] is not valid.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientIpError {
    /// The text is not the name of a header.
    #[error("header {0:?}: expected a name such as x-forwarded-for, forwarded or cf-connecting-ip")]
    Header(String),
    /// The prefix is too short, so that unrelated clients would share a budget, or too long.
    #[error("an IPv6 prefix of {0} bits: expected 32 to 128")]
    Prefix(u8),
}

/// How the address of a client was found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Found {
    /// It is the peer, which is not a trusted proxy or has forwarded no address.
    Peer,
    /// It is the right-most forwarded address that is not trusted.
    Hop,
    /// All forwarded addresses are trusted; it is the left-most.
    LastHop,
    /// The entry before it is not an address; it is the last one that can be read, or the peer.
    Unreadable,
    /// There are more than [`MAX_HOPS`]; it is the last one that was read.
    TooManyHops,
}

/// The address of a client, and how it was found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Client {
    ip: IpAddr,
    found: Found,
    ipv6_prefix: u8,
}

impl Client {
    /// The address; IPv4 addresses are never mapped into IPv6.
    pub fn ip(&self) -> IpAddr {
        self.ip
    }

    /// How the address was found.
    pub fn found(&self) -> Found {
        self.found
    }

    /// The addresses that share a budget with this one; see [`group`].
    pub fn group(&self) -> Group {
        group(self.ip, self.ipv6_prefix)
    }
}

impl ClientIp {
    /// Takes the peer as the client and ignores all headers: for a service without a proxy.
    pub fn of_peer() -> Self {
        Self::behind(TrustedProxies::none())
    }

    /// Reads `X-Forwarded-For` from these proxies.
    pub fn behind(trusted: TrustedProxies) -> Self {
        let header = "x-forwarded-for".into();
        ClientIp { trusted, header, syntax: Syntax::Plain, ipv6_prefix: DEFAULT_IPV6_PREFIX }
    }

    /// Reads another header: `forwarded` as in RFC 7239, any other as one address or a list.
    ///
    /// Every trusted proxy must set it or add to it. A header that a proxy forwards unchanged is
    /// written by the client.
    ///
    /// # Errors
    /// If `name` is not the name of a header.
    pub fn header(mut self, name: &str) -> Result<Self, ClientIpError> {
        let is_name = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
        if name.is_empty() || name.len() > 256 || !name.bytes().all(is_name) {
            return Err(ClientIpError::Header(name.chars().take(64).collect()));
        }
        self.header = name.to_ascii_lowercase().into();
        self.syntax = if &*self.header == "forwarded" { Syntax::Forwarded } else { Syntax::Plain };
        Ok(self)
    }

    /// Sets the bits that the IPv6 addresses of one client share; 64 by default.
    ///
    /// # Errors
    /// If `bits` is not 32 to 128.
    pub fn ipv6_prefix(mut self, bits: u8) -> Result<Self, ClientIpError> {
        if !(32..=128).contains(&bits) {
            return Err(ClientIpError::Prefix(bits));
        }
        self.ipv6_prefix = bits;
        Ok(self)
    }

    /// The header that is read, in lower case.
    pub fn header_name(&self) -> &str {
        &self.header
    }

    /// The bits that the IPv6 addresses of one client share.
    pub fn prefix(&self) -> u8 {
        self.ipv6_prefix
    }

    /// The trusted proxies.
    pub fn trusted(&self) -> &TrustedProxies {
        &self.trusted
    }

    /// Whether `peer` is a trusted proxy, so that its headers count.
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

    /// The client of a request from `peer` with these headers.
    #[cfg(feature = "http")]
    pub fn find_in(&self, peer: IpAddr, headers: &::http::HeaderMap) -> Client {
        let peer = peer.to_canonical();
        if !self.trusts(peer) {
            // Skip the search for the header.
            return Client { ip: peer, found: Found::Peer, ipv6_prefix: self.ipv6_prefix };
        }
        self.find(
            peer,
            headers.get_all(&*self.header).into_iter().map(::http::HeaderValue::as_bytes),
        )
    }

    /// Reads hops from the nearest outwards; `lines` come last first.
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

/// The addresses that share a budget with `ip`; the text of the result is the key.
///
/// An IPv4 address is a group of its own, also if it is mapped into IPv6 (`::ffff:192.0.2.7`) or
/// translated with the well-known prefix (`64:ff9b::192.0.2.7`). IPv6 addresses with the same first
/// `prefix` bits are one group, because one client usually owns all of them.
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
    /// All addresses with the same first bits, and the number of these bits.
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
