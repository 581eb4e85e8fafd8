//! Who may do what: one token for checks, another for what changes or shows budgets.
//!
//! Tokens come from a flag, the environment or a file, are compared in a time that says nothing about them, and are shown nowhere: their
//! `Debug` is three stars. Every door asks the same [`Guard`]. Whoever guesses waits: after [`FREE_FAILURES`] a minute from one address,
//! each further wrong token costs a second. A right one is never delayed, so nobody can lock out others from behind the same address.

use std::fmt;
use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use tidegate::http::{DEFAULT_IPV6_PREFIX, group};
use tidegate::{Limit, Memory, Period};

/// Wrong tokens from one address in a minute before they cost time.
pub const FREE_FAILURES: u64 = 10;
/// What each further one costs.
pub const PENALTY: Duration = Duration::from_secs(1);
/// The longest token, in bytes.
pub const MAX_TOKEN_BYTES: usize = 512;
/// Addresses whose failures are remembered.
const ADDRESSES: usize = 10_000;

/// A word that is never shown.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// The word itself, for whoever has to say it.
    pub fn reveal(&self) -> &str {
        &self.0
    }

    /// Reads a token: what is in the file, without the line's end.
    ///
    /// # Errors
    /// If it cannot be read or is not a token.
    pub fn read(file: &Path) -> Result<Secret, String> {
        let text = std::fs::read_to_string(file).map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => {
                format!("{}: no such file: correct the path, or write the token into it", file.display())
            }
            _ => format!("{}: {error}", file.display()),
        })?;
        text.trim_end_matches(['\r', '\n']).parse().map_err(|error| format!("{}: {error}", file.display()))
    }
}

impl std::str::FromStr for Secret {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let plain = text.bytes().all(|byte| byte.is_ascii_graphic());
        if text.is_empty() || text.len() > MAX_TOKEN_BYTES || !plain {
            let bytes = text.len();
            return Err(format!(
                "a token of {bytes} bytes: expected 1 to {MAX_TOKEN_BYTES} printable characters without spaces"
            ));
        }
        Ok(Secret(text.into()))
    }
}

impl From<&str> for Secret {
    fn from(text: &str) -> Self {
        Secret(text.into())
    }
}

impl From<String> for Secret {
    fn from(text: String) -> Self {
        Secret(text)
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

/// The words that let somebody in; none: everybody is.
#[derive(Clone, Debug, Default)]
pub struct Auth {
    /// For checks.
    pub checks: Option<Secret>,
    /// For everything, also what resets and shows budgets.
    pub admin: Option<Secret>,
}

/// What somebody may do.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum May {
    /// Say who they are.
    Nothing,
    /// Check, and everything that goes with it.
    Check,
    /// Also reset, and see rules and other people's keys.
    Everything,
}

impl Auth {
    /// What somebody may do who has said nothing yet.
    fn stranger(&self) -> May {
        match (&self.checks, &self.admin) {
            (Some(_), _) => May::Nothing,
            (None, Some(_)) => May::Check,
            (None, None) => May::Everything,
        }
    }

    /// What somebody may do who says `word`.
    fn knows(&self, word: &[u8]) -> Option<May> {
        let is = |token: &Option<Secret>| token.as_ref().is_some_and(|token| same(token.0.as_bytes(), word));
        // Both are compared, whichever it is, so that the time it takes says nothing.
        match (is(&self.admin), is(&self.checks)) {
            (true, _) => Some(May::Everything),
            (false, true) if self.admin.is_none() => Some(May::Everything),
            (false, true) => Some(May::Check),
            (false, false) => None,
        }
    }
}

/// Whether two words are the same, in a time that depends on nothing but the length of what was said.
fn same(token: &[u8], word: &[u8]) -> bool {
    let mut different = u8::from(token.len() != word.len());
    for (at, byte) in word.iter().enumerate() {
        different |= byte ^ token.get(at).copied().unwrap_or(!byte);
    }
    // Without this, a compiler may see that one difference decides.
    std::hint::black_box(different) == 0
}

/// Compares, and makes guessing slow.
pub struct Guard {
    auth: ArcSwap<Auth>,
    failures: tidegate::Gate,
}

impl fmt::Debug for Guard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.auth.load().fmt(f)
    }
}

impl Guard {
    /// Guards with these tokens.
    pub fn new(auth: Auth) -> Self {
        let limit = Limit::bucket(FREE_FAILURES, Period::MINUTE).build().expect("a constant that is a valid limit");
        Guard {
            auth: ArcSwap::from_pointee(auth),
            failures: Memory::builder().max_keys(ADDRESSES).build().gate(&limit),
        }
    }

    /// Lets in those who say these words from now on in place of the others; what is not there stays as it is, for without a word everybody
    /// would be let in. Who was let in already stays until the connection ends.
    pub fn change(&self, auth: Auth) {
        let known = self.auth.load();
        let or = |new: Option<Secret>, old: &Option<Secret>| new.or_else(|| old.clone());
        let (checks, admin) = (or(auth.checks, &known.checks), or(auth.admin, &known.admin));
        self.auth.store(Arc::new(Auth { checks, admin }));
    }

    /// What somebody may do who has said nothing yet.
    pub fn stranger(&self) -> May {
        self.auth.load().stranger()
    }

    /// Whether there are any tokens.
    pub fn has_tokens(&self) -> bool {
        let auth = self.auth.load();
        auth.checks.is_some() || auth.admin.is_some()
    }

    /// What somebody at `peer` may do who says `word`; nothing at all, after a while, if they have guessed too often.
    pub async fn admit(&self, peer: IpAddr, word: &[u8]) -> Option<May> {
        let may = self.auth.load().knows(word);
        if may.is_none() && self.has_tokens() {
            let client = group(peer, DEFAULT_IPV6_PREFIX).to_string();
            if !self.failures.allows(client.as_str(), 1) {
                tokio::time::sleep(PENALTY).await;
            }
        }
        may
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn auth(checks: Option<&str>, admin: Option<&str>) -> Auth {
        Auth { checks: checks.map(Secret::from), admin: admin.map(Secret::from) }
    }

    #[test]
    fn tokens_let_in_those_who_say_them() {
        use May::{Check, Everything, Nothing};
        for (checks, admin, stranger, with_c, with_a) in [
            (None, None, Everything, None, None),
            (Some("c"), None, Nothing, Some(Everything), None),
            (None, Some("a"), Check, None, Some(Everything)),
            (Some("c"), Some("a"), Nothing, Some(Check), Some(Everything)),
        ] {
            let auth = auth(checks, admin);
            assert_eq!(
                (auth.stranger(), auth.knows(b"c"), auth.knows(b"a")),
                (stranger, with_c, with_a),
                "{checks:?} {admin:?}"
            );
            assert_eq!((auth.knows(b""), auth.knows(b"cc"), auth.knows(b"\0")), (None, None, None));
        }
    }

    #[test]
    fn tokens_are_not_shown() {
        let shown = format!("{:?} {:?}", auth(Some("hush"), None), Guard::new(auth(None, Some("hush"))));
        assert!(!shown.contains("hush") && shown.contains("***"), "{shown}");
    }

    #[test]
    fn what_is_no_token_is_refused() {
        for text in ["", " ", "a b", "ä", "a\n", &"x".repeat(600)] {
            let error = text.parse::<Secret>().unwrap_err();
            assert!(error.contains("expected 1 to 512 printable characters") && !error.contains("a b"), "{error}");
        }
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(&file, "hush\n").unwrap();
        assert_eq!(Secret::read(file.path()).unwrap(), Secret::from("hush"));
        assert!(Secret::read(Path::new("/nowhere/token")).unwrap_err().starts_with("/nowhere/token: "));
    }

    #[tokio::test(start_paused = true)]
    async fn guessing_becomes_slow_and_knowing_does_not() {
        let guard = Guard::new(auth(Some("right"), None));
        let peer: IpAddr = [192, 0, 2, 7].into();
        let start = tokio::time::Instant::now();
        for _ in 0..FREE_FAILURES {
            assert_eq!(guard.admit(peer, b"wrong").await, None);
        }
        assert_eq!(start.elapsed(), Duration::ZERO);
        assert_eq!(guard.admit(peer, b"wrong").await, None);
        assert!(start.elapsed() >= PENALTY);
        let start = tokio::time::Instant::now();
        assert_eq!(guard.admit(peer, b"right").await, Some(May::Everything));
        assert_eq!(guard.admit([192, 0, 2, 8].into(), b"wrong").await, None);
        assert_eq!(start.elapsed(), Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn guesses_from_one_ipv6_network_are_counted_together() {
        let guard = Guard::new(auth(Some("right"), None));
        let start = tokio::time::Instant::now();
        for last in 0..FREE_FAILURES {
            let peer: IpAddr = format!("2001:db8::{last:x}").parse().unwrap();
            assert_eq!(guard.admit(peer, b"wrong").await, None);
        }
        assert_eq!(guard.admit("2001:db8:0:1::1".parse().unwrap(), b"wrong").await, None);
        assert_eq!(start.elapsed(), Duration::ZERO);
        assert_eq!(guard.admit("2001:db8::ffff".parse().unwrap(), b"wrong").await, None);
        assert!(start.elapsed() >= PENALTY);
    }
}
