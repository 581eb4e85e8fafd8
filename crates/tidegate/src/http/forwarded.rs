//! Parses the hops in forwarding headers from the right: the nearest first.
//!
//! Each proxy appends on the right, so trusted proxies have written the right side, and the left
//! side can be forged. A parser that starts on the right cannot be confused by the left side, such
//! as by an unterminated quote.

use std::net::{IpAddr, Ipv6Addr};

/// The most bytes of one hop: a longer one is not an address.
const MAX_HOP_BYTES: usize = 1024;

/// How a header lists its hops.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Syntax {
    /// `192.0.2.7, 10.0.0.1`.
    Plain,
    /// `for=192.0.2.7;proto=https, for=10.0.0.1`: RFC 7239.
    Forwarded,
}

/// Splits the last hop off a line: the hop, and what is before the comma, if there is one. `None` if
/// the hop has no end.
pub(super) fn last_hop(line: &[u8], syntax: Syntax) -> Option<(&[u8], Option<&[u8]>)> {
    let mut quoted = false;
    for (read, index) in (0..line.len()).rev().enumerate() {
        if read > MAX_HOP_BYTES {
            return None;
        }
        match line[index] {
            b'"' if syntax == Syntax::Forwarded && !is_escaped(&line[..index]) => quoted = !quoted,
            b',' if !quoted => return Some((&line[index + 1..], Some(&line[..index]))),
            _ => {}
        }
    }
    (!quoted).then_some((line, None))
}

/// Whether the text ends with an odd number of backslashes.
fn is_escaped(before: &[u8]) -> bool {
    before.iter().rev().take_while(|byte| **byte == b'\\').count() % 2 == 1
}

/// The address of a hop; `None` for `unknown`, obfuscated names and anything else.
pub(super) fn address(hop: &[u8], syntax: Syntax) -> Option<IpAddr> {
    let text = trim(std::str::from_utf8(hop).ok()?);
    match syntax {
        Syntax::Plain => node(text, false),
        Syntax::Forwarded => node(&for_of(text)?, true),
    }
}

/// Trims spaces and tabs, the only blanks in a header.
fn trim(text: &str) -> &str {
    text.trim_matches([' ', '\t'])
}

/// The value of `for` in one element of `Forwarded`: `for="[2001:db8::1]:80";proto=https`. There
/// must be exactly one.
fn for_of(element: &str) -> Option<String> {
    let mut found = None;
    let mut rest = element;
    loop {
        let (name, after) = rest.split_once('=')?;
        let name = trim(name);
        if name.is_empty() || !name.bytes().all(is_token) {
            return None;
        }
        let (value, after) = value(after)?;
        if name.eq_ignore_ascii_case("for") && found.replace(value).is_some() {
            return None; // ambiguous
        }
        match trim(after).strip_prefix(';') {
            // A semicolon at the end is common.
            Some(next) if !trim(next).is_empty() => rest = next,
            Some(_) => return found,
            None if trim(after).is_empty() => return found,
            None => return None,
        }
    }
}

/// A value, quoted or not, and the rest. Unquoted values may contain colons and brackets, against
/// the RFC, because some proxies write them.
fn value(text: &str) -> Option<(String, &str)> {
    let Some(quoted) = text.strip_prefix('"') else {
        let end = text.find(';').unwrap_or(text.len());
        let value = trim(&text[..end]);
        let plain =
            !value.is_empty() && value.bytes().all(|byte| is_token(byte) || b":[]".contains(&byte));
        return plain.then(|| (value.to_owned(), &text[end..]));
    };
    let mut value = String::new();
    let mut chars = quoted.char_indices();
    while let Some((index, char)) = chars.next() {
        match char {
            '"' => return Some((value, &quoted[index + 1..])),
            '\\' => value.push(chars.next()?.1),
            char => value.push(char),
        }
    }
    None
}

fn is_token(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
}

/// An address with or without port, brackets and zone. A port may be obfuscated where the header
/// allows that.
fn node(text: &str, hidden_port: bool) -> Option<IpAddr> {
    if let Some(inner) = text.strip_prefix('[') {
        let (inner, after) = inner.split_once(']')?;
        if !after.is_empty() && !is_port(after.strip_prefix(':')?, hidden_port) {
            return None;
        }
        return v6(inner).map(|v6| IpAddr::V6(v6).to_canonical());
    }
    let address = match text.split_once(':') {
        // Two colons: IPv6 without brackets and port.
        Some((_, rest)) if rest.contains(':') => {
            return v6(text).map(|v6| IpAddr::V6(v6).to_canonical());
        }
        Some((address, port)) if is_port(port, hidden_port) => address,
        Some(_) => return None,
        None => text,
    };
    address.parse().ok().map(IpAddr::V4)
}

/// An address without its zone, which is valid only on the machine that wrote it.
fn v6(text: &str) -> Option<Ipv6Addr> {
    let address = match text.split_once('%') {
        Some((address, zone))
            if !zone.is_empty() && zone.bytes().all(|byte| byte.is_ascii_graphic()) =>
        {
            address
        }
        Some(_) => return None,
        None => text,
    };
    address.parse().ok()
}

fn is_port(text: &str, hidden: bool) -> bool {
    match text.strip_prefix('_') {
        Some(name) if hidden => {
            !name.is_empty()
                && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
        }
        _ => {
            (1..=5).contains(&text.len())
                && text.bytes().all(|byte| byte.is_ascii_digit())
                && text.parse::<u16>().is_ok()
        }
    }
}
