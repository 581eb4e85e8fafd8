//! The commands that client libraries send when they connect: `HELLO`, `CLIENT`, `COMMAND`, `INFO`.

use super::arity;
use super::command::Session;
use super::reply::Replies;
use crate::auth::{Admission, May};
use crate::backend::Backend;

/// The longest name of a connection, in bytes.
const MAX_NAME_BYTES: usize = 128;

impl Session {
    /// Answers a command about the connection or the server.
    pub(crate) fn answer_client_command(&mut self, name: &[u8], rest: &[&[u8]], out: &mut Replies) {
        let sub = rest.first().map(|word| word.to_ascii_uppercase()).unwrap_or_default();
        match (name, sub.as_slice(), rest) {
            (b"PING", _, []) => out.simple("PONG"),
            (b"PING", _, [word]) | (b"ECHO", _, [word]) => out.bulk(word),
            (b"SELECT", _, [b"0"]) => out.simple("OK"),
            (b"SELECT", _, [_]) => out.error("ERR DB index is out of range"),
            (b"CLIENT", b"SETNAME", [_, name]) => match self.set_name(name) {
                Ok(()) => out.simple("OK"),
                Err(problem) => out.error(problem),
            },
            (b"CLIENT", b"GETNAME", [_]) if self.name.is_empty() => out.null(),
            (b"CLIENT", b"GETNAME", [_]) => out.bulk(&self.name),
            (b"CLIENT", b"ID", [_]) => out.integer(self.number),
            (b"CLIENT", b"SETINFO", [_, _, _]) => out.simple("OK"),
            (b"CLIENT", b"TRACKING", [_, word, ..]) if !word.eq_ignore_ascii_case(b"OFF") => {
                out.error(
                    "ERR nothing is kept that could be tracked: expected CLIENT TRACKING off",
                );
            }
            (b"CLIENT", b"TRACKING" | b"NO-EVICT" | b"NO-TOUCH", [_, _, ..]) => out.simple("OK"),
            (b"COMMAND", b"COUNT", [_]) => out.integer(0),
            (b"COMMAND", b"DOCS", _) => out.map(0),
            (b"COMMAND", b"INFO", [_, names @ ..]) => {
                out.array(names.len());
                names.iter().for_each(|_| out.null());
            }
            (b"COMMAND", b"" | b"LIST", _) => out.array(0),
            (b"CONFIG", b"GET", [_, _, ..]) => out.map(0),
            (b"INFO", _, _) => {
                let version = env!("CARGO_PKG_VERSION");
                let text = format!(
                    "# Server\r\nredis_version:7.0.0\r\nredis_mode:standalone\r\ntidegate_version:{version}\r\n\r\n# Persistence\r\nloading:0\r\n\r\n# Store\r\n{}",
                    self.store()
                );
                out.bulk(text.as_bytes());
            }
            (b"CLIENT" | b"COMMAND" | b"CONFIG", ..) => {
                out.error("ERR unknown subcommand or wrong number of arguments");
            }
            _ => out.error(&arity::usage(name)),
        }
    }

    /// The state of the store, as lines of `INFO`.
    fn store(&self) -> String {
        let store = self.engine.store();
        let name = if matches!(store, Backend::Memory(_)) { "memory" } else { "redis" };
        let mut lines =
            format!("store:{name}\r\nstore_answers:{}\r\n", u8::from(!store.is_degraded()));
        if let Backend::Resilient(resilient, _) = store {
            let stats = resilient.stats();
            let local = stats.fallback_allowed + stats.fallback_denied;
            lines +=
                &format!("answers_without_store:{local}\r\nbreaker_opened:{}\r\n", stats.opened);
        }
        lines
    }

    /// Sets the name of the connection.
    fn set_name(&mut self, name: &[u8]) -> Result<(), &'static str> {
        if !name.iter().all(u8::is_ascii_graphic) {
            return Err("ERR Client names cannot contain spaces, newlines or special characters.");
        }
        if name.len() > MAX_NAME_BYTES {
            return Err("ERR the name is too long: expected at most 128 bytes");
        }
        self.name = name.to_vec();
        Ok(())
    }

    /// `HELLO [2|3 [AUTH user word] [SETNAME name]]`. Nothing changes unless all of it is valid.
    pub(crate) fn hello(&mut self, rest: &[&[u8]], out: &mut Replies) {
        let mut rest = rest.iter();
        let is_resp3 = match rest.next() {
            None => out.is_resp3,
            Some(&b"2") => false,
            Some(&b"3") => true,
            Some(other) if other.iter().all(u8::is_ascii_digit) => {
                return out.error("NOPROTO unsupported protocol version");
            }
            Some(_) => return out.error("ERR Protocol version is not an integer or out of range"),
        };
        let (mut may, mut name) = (self.may, None);
        while let Some(option) = rest.next() {
            match (option.to_ascii_uppercase().as_slice(), rest.next()) {
                (b"AUTH", Some(_user)) => match rest.next() {
                    Some(word) => match self.guard.admit(&self.caller, word) {
                        Admission::May(known) => may = known,
                        refused => return self.wrong(refused, out),
                    },
                    None => return out.error("ERR Syntax error in HELLO option 'auth'"),
                },
                (b"SETNAME", Some(word)) => name = Some(word),
                _ => {
                    return out.error(&format!(
                        "ERR Syntax error in HELLO option '{}'",
                        option.escape_ascii()
                    ));
                }
            }
        }
        if may == May::Nothing {
            return out.error(
                "NOAUTH HELLO must be called with the client already authenticated, otherwise the HELLO <proto> AUTH <user> <pass> option can be used to authenticate the client and select the RESP protocol version at the same time",
            );
        }
        if let Some(Err(problem)) = name.map(|name| self.set_name(name)) {
            return out.error(problem);
        }
        (self.may, out.is_resp3) = (may, is_resp3);
        out.map(7);
        let version = env!("CARGO_PKG_VERSION").as_bytes();
        for (name, value) in [
            ("server", &b"tidegate"[..]),
            ("version", version),
            ("mode", b"standalone"),
            ("role", b"master"),
        ] {
            out.bulk(name.as_bytes());
            out.bulk(value);
        }
        out.bulk(b"proto");
        out.integer(if is_resp3 { 3 } else { 2 });
        out.bulk(b"id");
        out.integer(self.number);
        out.bulk(b"modules");
        out.array(0);
    }
}
