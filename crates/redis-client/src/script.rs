//! A script and its digest.

use super::resp::{put_header, put_number_word, put_word};

/// A Lua script and its SHA-1. Make it once and reuse it.
#[derive(Clone, Debug)]
pub struct Script {
    text: String,
    sha: String,
    /// `EVALSHA` and the digest as words of a command: the same in every call.
    by_digest: Vec<u8>,
}

impl Script {
    /// A script of this text; computes its digest.
    pub fn new(text: impl Into<String>) -> Self {
        let text = text.into();
        let sha = sha1_smol::Sha1::from(&text).digest().to_string();
        let mut by_digest = Vec::new();
        put_word(&mut by_digest, b"EVALSHA");
        put_word(&mut by_digest, sha.as_bytes());
        Script { text, sha, by_digest }
    }

    /// The text.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The SHA-1: forty hexadecimal digits in lower case.
    pub fn sha(&self) -> &str {
        &self.sha
    }

    /// Writes EVALSHA.
    pub(super) fn put_evalsha<K: AsRef<[u8]>, A: AsRef<[u8]>>(
        &self,
        out: &mut Vec<u8>,
        keys: &[K],
        args: &[A],
    ) {
        put_header(out, 3 + keys.len() + args.len());
        out.extend_from_slice(&self.by_digest);
        put_rest(out, keys, args);
    }

    /// Writes EVAL; the server keeps the script.
    pub(super) fn put_eval<K: AsRef<[u8]>, A: AsRef<[u8]>>(
        &self,
        out: &mut Vec<u8>,
        keys: &[K],
        args: &[A],
    ) {
        put_header(out, 3 + keys.len() + args.len());
        put_word(out, b"EVAL");
        put_word(out, self.text.as_bytes());
        put_rest(out, keys, args);
    }

    pub(super) fn put_load(&self, out: &mut Vec<u8>) {
        put_header(out, 3);
        put_word(out, b"SCRIPT");
        put_word(out, b"LOAD");
        put_word(out, self.text.as_bytes());
    }
}

fn put_rest<K: AsRef<[u8]>, A: AsRef<[u8]>>(out: &mut Vec<u8>, keys: &[K], args: &[A]) {
    put_number_word(out, keys.len());
    for key in keys {
        put_word(out, key.as_ref());
    }
    for arg in args {
        put_word(out, arg.as_ref());
    }
}
