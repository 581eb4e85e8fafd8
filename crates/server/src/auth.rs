//! Access: one token for checks, another for calls that change or show budgets.
//!
//! Tokens come from a flag, the environment or a file, are compared in constant time, and are never
//! shown: their `Debug` is three stars. All listeners share one [`Guard`], which also limits
//! [guesses](crate::guesses) and has the names under which [browsers may call](crate::browser) the
//! server.

use std::fmt;
use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use arc_swap::ArcSwap;

use crate::browser::Hosts;
use crate::guesses::{GuessVerdict, Guesses};

/// The longest token, in bytes.
pub const MAX_TOKEN_BYTES: usize = 512;
/// The shortest token of a listener that can be reached from other machines, in bytes.
pub const MIN_REMOTE_TOKEN_BYTES: usize = 16;
/// The largest file with a token, with the end of its line.
const MAX_TOKEN_FILE_BYTES: u64 = 64 << 10;

/// A token, which is never shown.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// The token itself, for the code that sends it.
    pub fn reveal(&self) -> &str {
        &self.0
    }

    /// Reads a token: the content of the file, without the end of its line.
    ///
    /// # Errors
    /// If it cannot be read or is not a token.
    pub fn read(file: &Path) -> Result<Secret, String> {
        let text = tidegate_bounded::files::read_text_file(file, MAX_TOKEN_FILE_BYTES).map_err(
            |error| match error.kind() {
                std::io::ErrorKind::NotFound => {
                    format!(
                        "{}: no such file: correct the path, or write the token into it",
                        file.display()
                    )
                }
                _ => format!("{}: {error}", file.display()),
            },
        )?;
        text.trim_end_matches(['\r', '\n'])
            .parse()
            .map_err(|error| format!("{}: {error}", file.display()))
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

/// The tokens that admit a caller; if there is none, every caller is admitted.
#[derive(Clone, Debug, Default)]
pub struct Auth {
    /// For checks.
    pub checks: Option<Secret>,
    /// For all calls, including those that reset and show budgets.
    pub admin: Option<Secret>,
}

/// What a caller may do.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum May {
    /// Authenticate.
    Nothing,
    /// Check, reserve, settle and refund.
    Check,
    /// All calls: also reset, and read rules and keys.
    Everything,
}

impl Auth {
    /// Refuses tokens with fewer bytes than this.
    fn check_length(&self, least: usize) -> Result<(), String> {
        for (name, token) in
            [("the token for checks", &self.checks), ("the admin token", &self.admin)]
        {
            if let Some(token) = token
                && token.0.len() < least
            {
                return Err(format!("{name}: {}", too_short(token.0.len(), least)));
            }
        }
        Ok(())
    }

    /// What a caller may do that has sent no token.
    fn without_token(&self) -> May {
        match (&self.checks, &self.admin) {
            (Some(_), _) => May::Nothing,
            (None, Some(_)) => May::Check,
            (None, None) => May::Everything,
        }
    }

    /// What a caller may do that sends `word`.
    fn knows(&self, word: &[u8]) -> Option<May> {
        let is = |token: &Option<Secret>| {
            token.as_ref().is_some_and(|token| same(token.0.as_bytes(), word))
        };
        // Both are compared, whichever it is, so that the time it takes says nothing.
        match (is(&self.admin), is(&self.checks)) {
            (true, _) => Some(May::Everything),
            (false, true) if self.admin.is_none() => Some(May::Everything),
            (false, true) => Some(May::Check),
            (false, false) => None,
        }
    }
}

/// The error for a token that is too short for a listener that other machines can reach.
pub(crate) fn too_short(bytes: usize, least: usize) -> String {
    format!(
        "{bytes} characters: expected at least {least} where other machines can connect; make one with `openssl rand -hex 32`, or listen on 127.0.0.1 alone"
    )
}

/// Whether two tokens are the same, in a time that depends only on the length of the second.
fn same(token: &[u8], word: &[u8]) -> bool {
    let mut different = u8::from(token.len() != word.len());
    for (at, byte) in word.iter().enumerate() {
        different |= byte ^ token.get(at).copied().unwrap_or(!byte);
    }
    // Without this, a compiler may see that one difference decides.
    std::hint::black_box(different) == 0
}

/// The result of the check of a token.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Admission {
    /// It is right.
    May(May),
    /// It is wrong.
    Wrong,
    /// It was not compared after too many wrong ones; the client may send it again after this time.
    Limited(Duration),
}

/// One connection, and what it has shown to the guard.
#[derive(Debug)]
pub struct Caller {
    ip: IpAddr,
    /// Which right tokens it has shown: the generation of tokens, and a bit for each of them.
    shown: AtomicU64,
}

impl Caller {
    /// A new connection from this address.
    pub fn at(ip: IpAddr) -> Self {
        Caller { ip, shown: AtomicU64::new(0) }
    }

    /// Its address.
    pub fn ip(&self) -> IpAddr {
        self.ip
    }
}

/// Compares tokens and limits guesses.
pub struct Guard {
    auth: ArcSwap<CurrentTokens>,
    guesses: Guesses,
    hosts: ArcSwap<Hosts>,
    min_token_bytes: usize,
}

/// The right tokens, and how often they have changed, from 1.
struct CurrentTokens {
    auth: Auth,
    generation: u64,
}

impl fmt::Debug for Guard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.auth.load().auth.fmt(f)
    }
}

impl Guard {
    /// A guard with these tokens.
    pub fn new(auth: Auth) -> Self {
        Guard {
            auth: ArcSwap::from_pointee(CurrentTokens { auth, generation: 1 }),
            guesses: Guesses::default(),
            hosts: ArcSwap::default(),
            min_token_bytes: 1,
        }
    }

    /// A guard for listeners that other machines can reach: tokens have at least
    /// [`MIN_REMOTE_TOKEN_BYTES`].
    ///
    /// # Errors
    /// If a token is shorter.
    pub fn beyond_loopback(auth: Auth) -> Result<Self, String> {
        auth.check_length(MIN_REMOTE_TOKEN_BYTES)?;
        Ok(Guard { min_token_bytes: MIN_REMOTE_TOKEN_BYTES, ..Guard::new(auth) })
    }

    /// Replaces the tokens. A token that is missing in `auth` stays, because without a token every
    /// call is allowed. A RESP connection that was admitted stays admitted until it ends.
    ///
    /// # Errors
    /// If a token is too short for the listeners that require it. Nothing changes then.
    pub fn change(&self, auth: Auth) -> Result<(), String> {
        auth.check_length(self.min_token_bytes)?;
        let known = self.auth.load();
        let or = |new: Option<Secret>, old: &Option<Secret>| new.or_else(|| old.clone());
        let (checks, admin) =
            (or(auth.checks, &known.auth.checks), or(auth.admin, &known.auth.admin));
        let auth = Auth { checks, admin };
        if auth.checks == known.auth.checks && auth.admin == known.auth.admin {
            return Ok(());
        }
        self.auth.store(Arc::new(CurrentTokens { auth, generation: known.generation + 1 }));
        self.guesses.forget_tokens();
        Ok(())
    }

    /// What a caller may do that has sent no token.
    pub fn without_token(&self) -> May {
        self.auth.load().auth.without_token()
    }

    /// Whether there are any tokens.
    pub fn has_tokens(&self) -> bool {
        let known = self.auth.load();
        known.auth.checks.is_some() || known.auth.admin.is_some()
    }

    /// What a caller may do that sends this token.
    pub fn admit(&self, caller: &Caller, token: &[u8]) -> Admission {
        let known = self.auth.load();
        let may = known.auth.knows(token);
        // A connection that has shown this token before guesses nothing.
        let mark = may.map(|may| known.generation << 2 | may as u64);
        if let Some(may) = may
            && mark == Some(caller.shown.load(Ordering::Relaxed))
        {
            return Admission::May(may);
        }
        if may.is_none() && !self.has_tokens() {
            return Admission::Wrong;
        }
        match (self.guesses.judge(caller.ip, token, may.is_some()), may) {
            (GuessVerdict::Nothing(wait), _) => Admission::Limited(wait),
            (GuessVerdict::Verdict, None) => Admission::Wrong,
            (GuessVerdict::Verdict, Some(may)) => {
                caller.shown.store(mark.unwrap_or(0), Ordering::Relaxed);
                Admission::May(may)
            }
        }
    }

    /// The names under which HTTP listeners are called.
    pub(crate) fn hosts(&self) -> arc_swap::Guard<Arc<Hosts>> {
        self.hosts.load()
    }

    /// Replaces the names.
    pub(crate) fn set_hosts(&self, hosts: Hosts) {
        self.hosts.store(Arc::new(hosts));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guesses::PER_ADDRESS;

    fn auth(checks: Option<&str>, admin: Option<&str>) -> Auth {
        Auth { checks: checks.map(Secret::from), admin: admin.map(Secret::from) }
    }

    #[test]
    fn a_token_admits_the_caller_that_sends_it() {
        use May::{Check, Everything, Nothing};
        for (checks, admin, without, with_c, with_a) in [
            (None, None, Everything, None, None),
            (Some("c"), None, Nothing, Some(Everything), None),
            (None, Some("a"), Check, None, Some(Everything)),
            (Some("c"), Some("a"), Nothing, Some(Check), Some(Everything)),
        ] {
            let auth = auth(checks, admin);
            assert_eq!(
                (auth.without_token(), auth.knows(b"c"), auth.knows(b"a")),
                (without, with_c, with_a),
                "{checks:?} {admin:?}"
            );
            assert_eq!((auth.knows(b""), auth.knows(b"cc"), auth.knows(b"\0")), (None, None, None));
        }
    }

    #[test]
    fn tokens_are_not_shown() {
        let shown =
            format!("{:?} {:?}", auth(Some("hush"), None), Guard::new(auth(None, Some("hush"))));
        assert!(!shown.contains("hush") && shown.contains("***"), "{shown}");
    }

    #[test]
    fn what_is_no_token_is_refused() {
        for text in ["", " ", "a b", "ä", "a\n", &"x".repeat(600)] {
            let error = text.parse::<Secret>().unwrap_err();
            assert!(
                error.contains("expected 1 to 512 printable characters") && !error.contains("a b"),
                "{error}"
            );
        }
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(&file, "hush\n").unwrap();
        assert_eq!(Secret::read(file.path()).unwrap(), Secret::from("hush"));
        assert!(
            Secret::read(Path::new("/nowhere/token")).unwrap_err().starts_with("/nowhere/token: ")
        );
    }

    #[test]
    fn guesses_are_limited_and_a_connection_that_showed_the_token_goes_on() {
        let guard = Guard::new(auth(Some("right"), Some("admin")));
        let peer: IpAddr = [192, 0, 2, 7].into();
        let (known, new) = (Caller::at(peer), Caller::at(peer));
        assert_eq!(guard.admit(&known, b"right"), Admission::May(May::Check));
        for number in 0..PER_ADDRESS {
            assert_eq!(guard.admit(&new, format!("wrong-{number}").as_bytes()), Admission::Wrong);
        }
        for token in ["wrong", "right", "admin"] {
            assert!(
                matches!(guard.admit(&new, token.as_bytes()), Admission::Limited(_)),
                "{token}"
            );
        }
        assert_eq!(guard.admit(&new, b"wrong-3"), Admission::Wrong, "which it knew already");
        assert_eq!(guard.admit(&known, b"right"), Admission::May(May::Check));
        // A right token gives no guesses at the other one.
        assert!(matches!(guard.admit(&known, b"admin"), Admission::Limited(_)));
        assert_eq!(
            guard.admit(&Caller::at([192, 0, 2, 8].into()), b"admin"),
            Admission::May(May::Everything)
        );
        // A token that was wrong can become right.
        guard.change(auth(Some("wrong-3"), None)).unwrap();
        assert!(matches!(guard.admit(&known, b"right"), Admission::Limited(_)));
        assert_eq!(
            guard.admit(&Caller::at([192, 0, 2, 8].into()), b"wrong-3"),
            Admission::May(May::Check)
        );
    }

    #[test]
    fn nothing_is_a_guess_without_tokens() {
        let (guard, caller) = (Guard::new(Auth::default()), Caller::at([192, 0, 2, 7].into()));
        for number in 0..1000 {
            assert_eq!(
                guard.admit(&caller, format!("wrong-{number}").as_bytes()),
                Admission::Wrong
            );
        }
    }

    #[test]
    fn tokens_for_other_machines_are_not_short() {
        let (short, long) = ("0123456789abcde", "0123456789abcdef");
        for (checks, admin, name) in [
            (Some(short), Some(long), "the token for checks"),
            (None, Some(short), "the admin token"),
        ] {
            let error = Guard::beyond_loopback(auth(checks, admin)).unwrap_err();
            let expected = "15 characters: expected at least 16 where other machines can connect; make one with";
            assert!(
                error.starts_with(&format!("{name}: {expected}")) && !error.contains(short),
                "{error}"
            );
        }
        let guard = Guard::beyond_loopback(auth(Some(long), None)).unwrap();
        assert!(
            guard
                .change(auth(Some(short), None))
                .unwrap_err()
                .starts_with("the token for checks: 15 characters")
        );
        assert_eq!(
            guard.admit(&Caller::at([192, 0, 2, 7].into()), long.as_bytes()),
            Admission::May(May::Everything)
        );
        Guard::new(auth(Some(short), None)).change(auth(Some("a"), None)).unwrap();
    }

    #[test]
    fn guesses_from_one_ipv6_network_are_counted_together() {
        let guard = Guard::new(auth(Some("right"), None));
        let guess = |address: &str, number: u64| {
            guard.admit(&Caller::at(address.parse().unwrap()), format!("wrong-{number}").as_bytes())
        };
        for number in 0..PER_ADDRESS {
            assert_eq!(guess(&format!("2001:db8::{number:x}"), number), Admission::Wrong);
        }
        assert!(matches!(guess("2001:db8::ffff", 100), Admission::Limited(_)));
        assert_eq!(guess("2001:db8:0:1::1", 101), Admission::Wrong, "another network");
    }
}
