//! Commands into answers. What clients send when they connect is answered as Redis does; everything that decides goes to the gate.

use std::sync::Arc;

use tidegate::{Check, Decision, Id, Limits, Op, Scope, Subject};

use super::reply::Replies;
use super::throttle::Throttle;
use crate::gate::{Gate, GateError};

/// Keys of `CL.THROTTLE` are a namespace of their own. No rule can have this name.
const CELL: &str = "cl:throttle";

/// What one connection knows.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) gate: Gate,
    pub(crate) auth: Arc<Auth>,
    pub(crate) may: May,
    pub(crate) number: i64,
    pub(crate) name: Vec<u8>,
    pub(crate) closing: bool,
    /// The limit of the last `CL.THROTTLE` or `TG.` call and how it was written: most connections ask about the same one.
    last: Option<(Vec<u8>, Limits)>,
}

/// The words that let somebody in; none: everybody is.
#[derive(Debug, Default)]
pub struct Auth {
    /// For checks.
    pub checks: Option<String>,
    /// For everything, also what resets budgets.
    pub admin: Option<String>,
}

/// What a connection may do.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum May {
    Nothing,
    Check,
    Everything,
}

impl Auth {
    /// What somebody may do who has said nothing yet.
    fn unknown(&self) -> May {
        match (&self.checks, &self.admin) {
            (Some(_), _) => May::Nothing,
            (None, Some(_)) => May::Check,
            (None, None) => May::Everything,
        }
    }

    /// What somebody may do who says `word`.
    fn knows(&self, word: &[u8]) -> Option<May> {
        let is = |token: &Option<String>| token.as_ref().is_some_and(|token| same(token.as_bytes(), word));
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
    different == 0
}

impl Session {
    pub(crate) fn new(gate: Gate, auth: Arc<Auth>, number: i64) -> Self {
        let may = auth.unknown();
        Session { gate, auth, may, number, name: Vec::new(), closing: false, last: None }
    }

    /// Answers one command.
    pub(crate) async fn answer(&mut self, words: &[&[u8]], out: &mut Replies) {
        let Some((name, rest)) = words.split_first() else { return };
        let name = name.to_ascii_uppercase();
        match (name.as_slice(), rest) {
            (b"AUTH", [word] | [_, word]) => match self.auth.knows(word) {
                Some(may) => {
                    self.may = may;
                    out.simple("OK");
                }
                None if self.auth.checks.is_none() && self.auth.admin.is_none() => {
                    out.error("ERR AUTH <password> called without any password configured for the default user.");
                }
                None => out.error("WRONGPASS invalid username-password pair or user is disabled."),
            },
            (b"HELLO", rest) => self.hello(rest, out),
            (b"QUIT", _) => {
                self.closing = true;
                out.simple("OK");
            }
            (b"RESET", []) => {
                (self.may, self.name) = (self.auth.unknown(), Vec::new());
                out.three = false;
                out.simple("RESET");
            }
            _ if self.may == May::Nothing => out.error("NOAUTH Authentication required."),
            (b"CL.THROTTLE", rest) => self.throttle(rest, out).await,
            (name, rest) if name.starts_with(b"TG.") => self.decide(&name[3..], rest, out).await,
            (name, rest) => self.courtesy(name, rest, out),
        }
    }

    /// What clients ask to find out with whom they are talking.
    fn courtesy(&mut self, name: &[u8], rest: &[&[u8]], out: &mut Replies) {
        let sub = rest.first().map(|word| word.to_ascii_uppercase()).unwrap_or_default();
        match (name, sub.as_slice(), rest) {
            (b"PING", _, []) => out.simple("PONG"),
            (b"PING", _, [word]) | (b"ECHO", _, [word]) => out.bulk(word),
            (b"SELECT", _, [b"0"]) => out.simple("OK"),
            (b"SELECT", _, [_]) => out.error("ERR DB index is out of range"),
            (b"CLIENT", b"SETNAME", [_, name]) => {
                self.name = name[..name.len().min(128)].to_vec();
                out.simple("OK");
            }
            (b"CLIENT", b"GETNAME", [_]) if self.name.is_empty() => out.null(),
            (b"CLIENT", b"GETNAME", [_]) => out.bulk(&self.name.clone()),
            (b"CLIENT", b"ID", [_]) => out.integer(self.number),
            (b"CLIENT", b"SETINFO", [_, _, _]) => out.simple("OK"),
            (b"CLIENT", b"TRACKING" | b"NO-EVICT" | b"NO-TOUCH", [_, ..]) => out.simple("OK"),
            (b"COMMAND", b"COUNT", _) => out.integer(0),
            (b"COMMAND", b"DOCS", _) => out.map(0),
            (b"COMMAND", _, _) => out.array(0),
            (b"CONFIG", b"GET", [_, ..]) => out.map(0),
            (b"INFO", _, _) => {
                let version = env!("CARGO_PKG_VERSION");
                out.bulk(
                    format!(
                        "# Server\r\ntidegate_version:{version}\r\nredis_version:7.0.0\r\nredis_mode:standalone\r\n"
                    )
                    .as_bytes(),
                );
            }
            (b"PING" | b"ECHO" | b"SELECT" | b"CLIENT" | b"CONFIG" | b"RESET", _, _) => {
                out.error("ERR wrong number of arguments or unknown subcommand");
            }
            _ => out.error("ERR unknown command: expected CL.THROTTLE, TG.CHECK or one of its kin"),
        }
    }

    fn hello(&mut self, rest: &[&[u8]], out: &mut Replies) {
        let mut rest = rest.iter();
        match rest.next() {
            None => {}
            Some(&b"2") => out.three = false,
            Some(&b"3") => out.three = true,
            Some(_) => return out.error("NOPROTO unsupported protocol version"),
        }
        while let Some(option) = rest.next() {
            match (option.to_ascii_uppercase().as_slice(), rest.next(), option) {
                (b"AUTH", Some(_user), _) => match rest.next().and_then(|word| self.auth.knows(word)) {
                    Some(may) => self.may = may,
                    None => return out.error("WRONGPASS invalid username-password pair or user is disabled."),
                },
                (b"SETNAME", Some(name), _) => self.name = name[..name.len().min(128)].to_vec(),
                _ => return out.error("ERR syntax error in HELLO"),
            }
        }
        if self.may == May::Nothing {
            return out.error("NOAUTH HELLO must be called with the client already authenticated");
        }
        out.map(7);
        let proto = if out.three { 3 } else { 2 };
        let version = env!("CARGO_PKG_VERSION").as_bytes();
        for (name, value) in
            [("server", &b"tidegate"[..]), ("version", version), ("mode", b"standalone"), ("role", b"master")]
        {
            out.bulk(name.as_bytes());
            out.bulk(value);
        }
        out.bulk(b"proto");
        out.integer(proto);
        out.bulk(b"id");
        out.integer(self.number);
        out.bulk(b"modules");
        out.array(0);
    }

    async fn throttle(&mut self, rest: &[&[u8]], out: &mut Replies) {
        let asked = match Throttle::read(rest) {
            Ok(asked) => asked,
            Err(problem) => return out.error(&problem),
        };
        let subject = Subject { scope: Scope::Rule(CELL.into()), key: rest[0].into() };
        let check = Check::of(asked.op).charge_subject(subject, [&asked.limit], asked.cost);
        match self.gate.decide(&check).await {
            Ok(decision) => {
                out.array(5);
                Throttle::numbers(&decision).into_iter().for_each(|number| out.integer(number));
            }
            Err(error) => out.error(&format!("ERR {error}")),
        }
    }

    /// `TG.CHECK key limit [COST n] [ID n]` and its kin.
    async fn decide(&mut self, verb: &[u8], rest: &[&[u8]], out: &mut Replies) {
        if verb == b"RULES" {
            return self.rules(rest, out).await;
        }
        let needs_id = matches!(verb, b"SETTLE" | b"RELEASE");
        let op = match verb {
            b"CHECK" | b"RESERVE" | b"LEASE" => Op::Check,
            b"PEEK" => Op::Peek,
            b"TAKE" => Op::Take,
            b"DEBIT" => Op::Debit,
            b"REFUND" => Op::Refund,
            b"RESET" if self.may < May::Everything => return out.error("NOPERM TG.RESET needs the admin token"),
            b"RESET" => Op::Reset,
            b"SETTLE" => Op::Settle,
            b"RELEASE" => Op::Release,
            _ => return out.error("ERR unknown command: expected TG.CHECK, PEEK, TAKE, DEBIT, REFUND, RESET, RESERVE, SETTLE, LEASE, RELEASE or RULES"),
        };
        let [key, limit, options @ ..] = rest else {
            return out.error("ERR expected TG.<OPERATION> key limit [COST n] [RESERVED n] [ID n]");
        };
        let asked = match Options::read(options) {
            Ok(asked) => asked,
            Err(problem) => return out.error(&problem),
        };
        if needs_id && asked.id.is_none() {
            return out.error("ERR expected ID n: the number that TG.RESERVE or TG.LEASE answered");
        }
        let limits = match self.limits(limit) {
            Ok(limits) => limits,
            Err(problem) => return out.error(&problem),
        };
        let id = asked.id.or_else(|| matches!(verb, b"RESERVE" | b"LEASE").then(fresh_id));
        let mut check = Check::of(op).charge(*key, &limits, asked.cost.unwrap_or(u64::from(op != Op::Reset)));
        if op == Op::Settle {
            check = check.reserving(asked.reserved.unwrap_or(0));
        }
        if let Some(id) = id {
            check = check.with_id(id);
        }
        match self.gate.decide(&check).await {
            Ok(decision) => {
                let number = i64::try_from(id.unwrap_or(Id::NONE).0).unwrap_or(0);
                let granted = super::reply::whole(decision.granted());
                let more: &[(&str, i64)] = match verb {
                    b"RESERVE" | b"LEASE" => &[("id", number)],
                    b"TAKE" | b"REFUND" | b"SETTLE" | b"RELEASE" => &[("granted", granted)],
                    _ => &[],
                };
                out.verdict(decision.allowed(), decision.binding(), more);
            }
            Err(error) => out.error(&format!("ERR {error}")),
        }
    }

    /// `TG.RULES attribute value … [COST n]`.
    async fn rules(&mut self, rest: &[&[u8]], out: &mut Replies) {
        let (attributes, options) = match rest.iter().position(|word| word.eq_ignore_ascii_case(b"COST")) {
            Some(at) if at % 2 == 0 => rest.split_at(at),
            _ => (rest, &[][..]),
        };
        let Ok(Options { cost, .. }) = Options::read(options) else { return out.error("ERR expected COST n") };
        if attributes.is_empty() || attributes.len() % 2 == 1 {
            return out.error("ERR expected TG.RULES attribute value [attribute value …] [COST n]");
        }
        let text = |word: &[u8]| String::from_utf8_lossy(word).into_owned();
        let attributes: Vec<(String, String)> =
            attributes.chunks(2).map(|pair| (text(pair[0]), text(pair[1]))).collect();
        match self.gate.rule(Op::Check, &attributes[..], cost.unwrap_or(1), None).await {
            Ok(ruling) => {
                let none = Decision::of_many(Vec::new(), ruling.allowed, tidegate::Timestamp::EPOCH);
                out.verdict(ruling.allowed, ruling.decision.as_ref().unwrap_or(&none).binding(), &[]);
            }
            Err(GateError::Store(error)) => out.error(&format!("ERR {error}")),
            Err(error) => out.error(&format!("ERR {error}")),
        }
    }

    fn limits(&mut self, text: &[u8]) -> Result<Limits, String> {
        if let Some((known, limits)) = &self.last
            && known == text
        {
            return Ok(limits.clone());
        }
        let said = std::str::from_utf8(text).map_err(|_| "ERR the limit is not text".to_string())?;
        let limits: Limits = said.parse().map_err(|error| format!("ERR limit '{said}': {error}"))?;
        self.last = Some((text.to_vec(), limits.clone()));
        Ok(limits)
    }
}

/// What may follow a key and a limit.
#[derive(Default)]
struct Options {
    cost: Option<u64>,
    reserved: Option<u64>,
    id: Option<Id>,
}

impl Options {
    fn read(words: &[&[u8]]) -> Result<Options, String> {
        let mut options = Options::default();
        for pair in words.chunks(2) {
            let [name, value] = pair else { return Err("ERR expected a number after the last word".into()) };
            let digits = !value.is_empty() && value.len() <= 20 && value.iter().all(u8::is_ascii_digit);
            let number = std::str::from_utf8(value).ok().filter(|_| digits).and_then(|text| text.parse::<u64>().ok());
            let name = name.to_ascii_uppercase();
            let number = number.ok_or_else(|| {
                format!("ERR {} is '{}': expected a whole number", name.escape_ascii(), value.escape_ascii())
            })?;
            match name.as_slice() {
                b"COST" => options.cost = Some(number),
                b"RESERVED" => options.reserved = Some(number),
                b"ID" => options.id = Some(Id(number)),
                other => return Err(format!("ERR '{}': expected COST, RESERVED or ID", other.escape_ascii())),
            }
        }
        Ok(options)
    }
}

/// A number that is hard to guess and fits into 53 bits, which is all that some clients' numbers hold.
fn fresh_id() -> Id {
    use std::hash::{BuildHasher, RandomState};
    Id(RandomState::new().hash_one(0) >> 11 | 1)
}
