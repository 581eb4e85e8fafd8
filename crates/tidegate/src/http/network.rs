//! Networks in the notation `10.0.0.0/8`, and lists of them.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

/// The most networks in a list: each request is compared with all of them.
pub const MAX_NETWORKS: usize = 1024;

/// All addresses with the same first bits.
///
/// An address without a prefix is a network of one. Bits after the prefix are ignored: `10.1.2.3/8` is
/// `10.0.0.0/8`. IPv4 addresses mapped into IPv6 are IPv4: `::ffff:10.0.0.0/104` is
/// `10.0.0.0/8`, and `::/0` contains no IPv4 address.
///
/// ```
/// use tidegate::http::Network;
/// let network: Network = "10.0.0.0/8".parse()?;
/// assert!(network.contains("10.1.2.3".parse()?));
/// assert!(network.contains("::ffff:10.1.2.3".parse()?));
/// assert_eq!("10.0.0.0/33".parse::<Network>().unwrap_err().to_string(), r#"network "10.0.0.0/33": expected a prefix of 0 to 32 bits"#);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Network {
    /// The bits after the prefix are zero.
    base: IpAddr,
    prefix: u8,
}

/// Why a text is not a network, or a list is too long.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NetworkError {
    /// The text does not start with an address.
    #[error("network {0:?}: expected an address or a network such as 10.0.0.0/8 or 2001:db8::/32")]
    Address(String),
    /// The prefix is not a number or is too long for the address.
    #[error("network {text:?}: expected a prefix of 0 to {longest} bits")]
    Prefix {
        /// The text.
        text: String,
        /// The longest prefix of such an address.
        longest: u8,
    },
    /// The list has too many networks.
    #[error("{0} networks: expected at most {MAX_NETWORKS}")]
    TooMany(usize),
}

impl Network {
    /// The network of `address` with a prefix of this many bits; a longer prefix than the address has
    /// counts as the full address.
    pub fn new(address: IpAddr, prefix: u8) -> Self {
        let (address, prefix) = match (address, address.to_canonical()) {
            // The first 96 bits mark it as IPv4; a shorter prefix is one of IPv6.
            (IpAddr::V6(_), v4 @ IpAddr::V4(_)) if prefix >= 96 => (v4, prefix - 96),
            (address, _) => (address, prefix),
        };
        match address {
            IpAddr::V4(v4) => {
                let prefix = prefix.min(32);
                let mask = u32::MAX.checked_shl(32 - u32::from(prefix)).unwrap_or(0);
                Network { base: Ipv4Addr::from_bits(v4.to_bits() & mask).into(), prefix }
            }
            IpAddr::V6(v6) => {
                let prefix = prefix.min(128);
                Network { base: Ipv6Addr::from_bits(v6.to_bits() & mask_v6(prefix)).into(), prefix }
            }
        }
    }

    /// Whether `address` is in the network.
    pub fn contains(&self, address: IpAddr) -> bool {
        match (self.base, address.to_canonical()) {
            (IpAddr::V4(base), IpAddr::V4(v4)) => {
                (base.to_bits() ^ v4.to_bits()).leading_zeros() >= u32::from(self.prefix)
            }
            (IpAddr::V6(base), IpAddr::V6(v6)) => {
                (base.to_bits() ^ v6.to_bits()).leading_zeros() >= u32::from(self.prefix)
            }
            _ => false,
        }
    }

    /// The first address.
    pub fn address(&self) -> IpAddr {
        self.base
    }

    /// The number of bits that all addresses share.
    pub fn prefix(&self) -> u8 {
        self.prefix
    }
}

/// A mask with ones in the prefix.
pub(super) fn mask_v6(prefix: u8) -> u128 {
    u128::MAX.checked_shl(128 - u32::from(prefix.min(128))).unwrap_or(0)
}

impl FromStr for Network {
    type Err = NetworkError;

    fn from_str(text: &str) -> Result<Self, NetworkError> {
        let (address, prefix) = match text.split_once('/') {
            Some((address, prefix)) => (address, Some(prefix)),
            None => (text, None),
        };
        let address: IpAddr = address.parse().map_err(|_| NetworkError::Address(text.into()))?;
        let longest = if address.is_ipv4() { 32 } else { 128 };
        let prefix = match prefix {
            None => longest,
            // Digits only: `parse` would also accept a sign.
            Some(digits) => Some(digits)
                .filter(|digits| {
                    !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit())
                })
                .and_then(|digits| digits.parse().ok())
                .filter(|prefix| *prefix <= longest)
                .ok_or_else(|| NetworkError::Prefix { text: text.into(), longest })?,
        };
        Ok(Network::new(address, prefix))
    }
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.base, self.prefix)
    }
}

/// The proxies whose forwarding headers count; none by default.
///
/// `loopback` is this machine, `private` the networks that are not routed on the internet, including
/// this machine.
///
/// ```
/// use tidegate::http::TrustedProxies;
/// let trusted: TrustedProxies = "10.0.0.0/8, 2001:db8::1, loopback".parse()?;
/// assert!(trusted.contains("127.0.0.1".parse()?));
/// assert!(!trusted.contains("192.0.2.7".parse()?));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct TrustedProxies {
    networks: Vec<Network>,
}

const LOOPBACK: [&str; 2] = ["127.0.0.0/8", "::1/128"];
const PRIVATE: [&str; 8] = [
    "127.0.0.0/8",
    "::1/128",
    "10.0.0.0/8",
    "172.16.0.0/12",
    "192.168.0.0/16",
    "169.254.0.0/16",
    "fc00::/7",
    "fe80::/10",
];

impl TrustedProxies {
    /// No proxies.
    pub fn none() -> Self {
        Self::default()
    }

    /// Reads a list of networks, addresses, `loopback` and `private`.
    ///
    /// # Errors
    /// The first item that is none of them.
    pub fn read<T: AsRef<str>>(pieces: impl IntoIterator<Item = T>) -> Result<Self, NetworkError> {
        let mut networks = Vec::new();
        for piece in pieces {
            let piece = piece.as_ref().trim();
            let words: &[&str] = match piece {
                "loopback" => &LOOPBACK,
                "private" => &PRIVATE,
                network => &[network],
            };
            for word in words {
                networks.push(word.parse()?);
            }
        }
        Self::try_from(networks)
    }

    /// Whether `address` is a trusted proxy.
    pub fn contains(&self, address: IpAddr) -> bool {
        self.networks.iter().any(|network| network.contains(address))
    }

    /// Whether no proxy is trusted.
    pub fn is_empty(&self) -> bool {
        self.networks.is_empty()
    }

    /// The networks.
    pub fn networks(&self) -> &[Network] {
        &self.networks
    }
}

impl TryFrom<Vec<Network>> for TrustedProxies {
    type Error = NetworkError;

    fn try_from(networks: Vec<Network>) -> Result<Self, NetworkError> {
        if networks.len() > MAX_NETWORKS {
            return Err(NetworkError::TooMany(networks.len()));
        }
        Ok(TrustedProxies { networks })
    }
}

impl FromStr for TrustedProxies {
    type Err = NetworkError;

    /// Reads a list with commas or spaces between its items.
    fn from_str(text: &str) -> Result<Self, NetworkError> {
        Self::read(text.split([',', ' ']).filter(|piece| !piece.trim().is_empty()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn networks_parse_and_display() {
        // text => its short form, or a part of the error
        for (text, expected) in [
            ("10.0.0.0/8", "10.0.0.0/8"),
            ("10.1.2.3/8", "10.0.0.0/8"),
            ("10.1.2.3", "10.1.2.3/32"),
            ("0.0.0.0/0", "0.0.0.0/0"),
            ("2001:db8::1/32", "2001:db8::/32"),
            ("2001:DB8::1", "2001:db8::1/128"),
            ("::/0", "::/0"),
            ("::ffff:10.0.0.0/104", "10.0.0.0/8"),
            ("::ffff:10.0.0.1", "10.0.0.1/32"),
            ("::ffff:0:0/96", "0.0.0.0/0"),
            ("::ffff:10.0.0.1/95", "::fffe:0:0/95"),
        ] {
            assert_eq!(text.parse::<Network>().unwrap().to_string(), expected, "{text}");
        }
        for (text, expected) in [
            ("", "expected an address"),
            ("10.0.0/8", "expected an address"),
            ("010.0.0.0/8", "expected an address"),
            ("[::1]/64", "expected an address"),
            ("fe80::1%eth0", "expected an address"),
            ("localhost", "expected an address"),
            ("10.0.0.0/", "0 to 32"),
            ("10.0.0.0/33", "0 to 32"),
            ("10.0.0.0/+8", "0 to 32"),
            ("10.0.0.0/8/8", "0 to 32"),
            ("10.0.0.0/255.0.0.0", "0 to 32"),
            ("::/129", "0 to 128"),
            ("::/999", "0 to 128"),
        ] {
            let error = text.parse::<Network>().unwrap_err().to_string();
            assert!(
                error.contains(expected) && error.contains(&format!("{text:?}")),
                "{text}: {error}"
            );
        }
    }

    #[test]
    fn a_network_contains_the_addresses_with_its_prefix() {
        for (network, address, expected) in [
            ("10.0.0.0/8", "10.255.255.255", true),
            ("10.0.0.0/8", "11.0.0.0", false),
            ("10.0.0.0/8", "9.255.255.255", false),
            ("10.0.0.0/8", "::ffff:10.0.0.1", true),
            ("10.0.0.0/8", "::10.0.0.1", false),
            ("172.16.0.0/12", "172.31.255.255", true),
            ("172.16.0.0/12", "172.32.0.0", false),
            ("192.0.2.7", "192.0.2.7", true),
            ("192.0.2.7", "192.0.2.8", false),
            ("0.0.0.0/0", "255.255.255.255", true),
            ("0.0.0.0/0", "::1", false),
            ("::/0", "2001:db8::1", true),
            ("::/0", "192.0.2.7", false),
            ("::/0", "::ffff:192.0.2.7", false),
            ("2001:db8::/33", "2001:db8:7fff::1", true),
            ("2001:db8::/33", "2001:db8:8000::1", false),
            ("fe80::1", "fe80::1", true),
        ] {
            let contains = network.parse::<Network>().unwrap().contains(address.parse().unwrap());
            assert_eq!(contains, expected, "{address} in {network}");
        }
    }

    #[test]
    fn lists_accept_loopback_and_private_and_have_a_maximum() {
        let trusted: TrustedProxies = "192.0.2.0/24,  private".parse().unwrap();
        for address in
            ["192.0.2.1", "127.0.0.1", "::1", "10.0.0.1", "192.168.1.1", "fd00::1", "fe80::1"]
        {
            assert!(trusted.contains(address.parse().unwrap()), "{address}");
        }
        assert!(!trusted.contains("172.32.0.1".parse().unwrap()));
        assert!(TrustedProxies::none().is_empty());
        assert!("".parse::<TrustedProxies>().unwrap().is_empty());
        let error = "10.0.0.0/8, everything".parse::<TrustedProxies>().unwrap_err().to_string();
        assert!(error.contains("\"everything\""), "{error}");
        assert!(TrustedProxies::read(vec!["10.0.0.1"; MAX_NETWORKS]).is_ok());
        let many = vec!["10.0.0.1"; MAX_NETWORKS + 1];
        assert_eq!(
            TrustedProxies::read(many).unwrap_err(),
            NetworkError::TooMany(MAX_NETWORKS + 1)
        );
    }
}
