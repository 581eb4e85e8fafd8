//! Commands into answers. What clients send when they connect is answered as Redis does; everything that decides goes to the gate.

use std::borrow::Cow;
use std::net::IpAddr;
use std::sync::Arc;

use futures_util::future::join_all;
use tidegate::{Awaited, Check, Decision, Id, Limit, Limits, Op, Scope, Source, Subject, Verdict};

use tokio::time::Instant;

use super::alike::Alike;
use super::frame::{Known, NO_SHAPE, Shape, Words};
use super::reply::Replies;
use super::throttle::{Parameters, Throttle};
use crate::auth::{Guard, May};
use crate::gate::{Backend, Door, Gate, Together};
use crate::observe::metrics::Refusal;

/// Keys of `CL.THROTTLE` are a namespace of their own. No rule can have this name.
pub(crate) const CELL: &str = "cl:throttle";
pub(crate) const CELL_SCOPE: Scope<'static> = Scope::Rule(Cow::Borrowed(CELL));

/// The longest name that a client may give itself, in bytes.
const MAX_NAME_BYTES: usize = 128;

/// What one connection knows.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) gate: Gate,
    pub(crate) guard: Arc<Guard>,
    peer: IpAddr,
    pub(crate) may: May,
    pub(crate) number: i64,
    pub(crate) name: Vec<u8>,
    pub(crate) closing: bool,
    /// By when the command must be here whose first bytes have come.
    pub(crate) begun: Option<Instant>,
    /// The limits of the last `TG.` call and how they were written: most connections ask about the same ones.
    last: Option<(Vec<u8>, Limits)>,
    /// The same for `CL.THROTTLE`.
    throttle: Parameters,
    /// The shape of the last command whose kind was asked for, and its kind.
    kind: (Shape, Kind),
    /// The last command that was read.
    pub(crate) known: Known,
    /// What commands like that ask.
    pub(crate) alike: Alike,
    /// Room for the words of commands.
    pub(crate) words: Words<'static>,
    /// Room for where they end.
    pub(crate) ends: Vec<super::End>,
}

/// What a command asks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    /// `CL.THROTTLE`.
    Throttle,
    /// `TG.CHECK`.
    Check,
    /// Anything else.
    Other,
}

/// A command that was read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Command<'b, 'a> {
    pub(crate) words: &'b [&'a [u8]],
    /// How many bytes it takes.
    pub(crate) bytes: usize,
    /// What it has in common with others.
    pub(crate) shape: Shape,
}

impl Session {
    pub(crate) fn new(gate: Gate, guard: Arc<Guard>, peer: IpAddr, number: i64) -> Self {
        let may = guard.stranger();
        Session {
            gate,
            guard,
            peer,
            may,
            number,
            name: Vec::new(),
            closing: false,
            begun: None,
            last: None,
            throttle: Parameters::default(),
            kind: (NO_SHAPE, Kind::Other),
            known: Known::default(),
            alike: Alike::default(),
            words: Words::new(),
            ends: Vec::new(),
        }
    }

    /// What this command asks, by its name.
    fn kind(&mut self, command: &Command<'_, '_>) -> Kind {
        if command.shape == NO_SHAPE || command.shape != self.kind.0 {
            let kind = match command.words {
                [name, _, ..] if name.eq_ignore_ascii_case(b"CL.THROTTLE") => Kind::Throttle,
                [name, _, ..] if name.eq_ignore_ascii_case(b"TG.CHECK") => Kind::Check,
                _ => Kind::Other,
            };
            self.kind = (command.shape, kind);
        }
        self.kind.1
    }

    /// This command will be answered soon: what it is about can be fetched.
    pub(crate) fn expect(&mut self, command: &Command<'_, '_>) -> Option<Awaited> {
        let scope = match self.kind(command) {
            _ if self.may == May::Nothing => return None,
            Kind::Throttle => CELL_SCOPE,
            Kind::Check => Scope::AdHoc,
            Kind::Other => return None,
        };
        self.gate.expect(&Subject { scope, key: (*command.words.get(1)?).into() })
    }

    /// Answers what is asked most, was [expected](Session::expect), and can be decided in this process without waiting for anybody; says whether it did.
    pub(crate) fn answer_at_once(
        &mut self,
        command: &Command<'_, '_>,
        awaited: &Awaited,
        together: &mut Together,
        out: &mut Replies,
    ) -> bool {
        match (self.kind(command), command.words) {
            _ if self.may == May::Nothing => false, // since it was expected: RESET takes it all back
            (Kind::Throttle, [_, rest @ ..]) => {
                let Ok(asked) = Throttle::of(command.shape, rest, &mut self.throttle) else { return false };
                if asked.op != Op::Check {
                    return false;
                }
                let subject = Subject { scope: CELL_SCOPE, key: rest[0].into() };
                let verdict = self.gate.check_together(together, awaited, &subject, asked.limit, asked.cost);
                let Some(verdict) = verdict else { return false };
                out.throttle(Throttle::numbers(verdict.allowed, &verdict), Source::Store);
                true
            }
            (Kind::Check, [_, key, limit, options @ ..]) => {
                let Ok(Options { cost, reserved: None, id: None }) = Options::read(options) else { return false };
                let Some((_, limits)) = self.last.as_ref().filter(|(known, _)| known == limit) else { return false };
                let [limit] = limits.as_slice() else { return false };
                let subject = Subject { scope: Scope::AdHoc, key: (*key).into() };
                let verdict = self.gate.check_together(together, awaited, &subject, limit, cost.unwrap_or(1));
                let Some(verdict) = verdict else { return false };
                out.verdict(verdict.allowed, &verdict, &[], Source::Store);
                true
            }
            _ => false,
        }
    }

    /// What is asked most, if it is asked properly: to be decided beside others that came with it.
    pub(crate) fn question<'w>(&mut self, words: &[&'w [u8]]) -> Option<Question<'w>> {
        match words {
            _ if self.may == May::Nothing => None,
            [name, rest @ ..] if name.eq_ignore_ascii_case(b"CL.THROTTLE") => {
                let asked = Throttle::read(rest, &mut self.throttle).ok().filter(|asked| asked.op == Op::Check)?;
                Some(Question { key: rest[0], cost: asked.cost, under: Under::Throttle(*asked.limit) })
            }
            [name, key, limit, options @ ..] if name.eq_ignore_ascii_case(b"TG.CHECK") => {
                let Ok(Options { cost, reserved: None, id: None }) = Options::read(options) else { return None };
                Some(Question { key, cost: cost.unwrap_or(1), under: Under::Limits(self.limits(limit).ok()?) })
            }
            _ => None,
        }
    }

    /// Decides several questions at once: who waits for a remote store waits once for all of them. They are asked in the order in which they came.
    pub(crate) async fn answer_all(&self, questions: &[Question<'_>], out: &mut Replies) {
        let checks: Vec<Check<'_>> = questions.iter().map(Question::check).collect();
        let decided = join_all(checks.iter().map(|check| self.gate.decide(check))).await;
        for (question, decided) in questions.iter().zip(decided) {
            match decided {
                Ok(decision) if matches!(question.under, Under::Throttle(_)) => {
                    out.throttle(Throttle::numbers(decision.allowed(), decision.binding()), decision.source());
                }
                Ok(decision) => out.verdict(decision.allowed(), decision.binding(), &[], decision.source()),
                Err(error) => out.error(&format!("ERR {error}")),
            }
        }
    }

    /// Answers one command.
    pub(crate) async fn answer(&mut self, words: &[&[u8]], out: &mut Replies) {
        let Some((name, rest)) = words.split_first() else { return };
        let name = name.to_ascii_uppercase();
        match (name.as_slice(), rest) {
            (b"AUTH", [word] | [_, word]) => match self.guard.admit(self.peer, word).await {
                Some(may) => {
                    self.may = may;
                    out.simple("OK");
                }
                None if !self.guard.has_tokens() => {
                    out.error("ERR AUTH <password> called without any password configured for the default user.");
                }
                None => self.wrong(out),
            },
            (b"HELLO", rest) => self.hello(rest, out).await,
            (b"QUIT", _) => {
                self.closing = true;
                out.simple("OK");
            }
            (b"RESET", []) => {
                (self.may, self.name) = (self.guard.stranger(), Vec::new());
                (out.three, out.marked) = (false, false);
                out.simple("RESET");
            }
            _ if self.may == May::Nothing => out.error("NOAUTH Authentication required."),
            (b"CL.THROTTLE", rest) => self.throttle(rest, out).await,
            (name, rest) if name.starts_with(b"TG.") => self.decide(&name[3..], rest, out).await,
            (name, rest) => self.courtesy(name, rest, out),
        }
    }

    fn wrong(&self, out: &mut Replies) {
        self.gate.observer().metrics().refused(Door::Resp, Refusal::Token);
        out.error("WRONGPASS invalid username-password pair or user is disabled.");
    }

    /// What clients ask to find out with whom they are talking.
    fn courtesy(&mut self, name: &[u8], rest: &[&[u8]], out: &mut Replies) {
        let sub = rest.first().map(|word| word.to_ascii_uppercase()).unwrap_or_default();
        match (name, sub.as_slice(), rest) {
            (b"PING", _, []) => out.simple("PONG"),
            (b"PING", _, [word]) | (b"ECHO", _, [word]) => out.bulk(word),
            (b"SELECT", _, [b"0"]) => out.simple("OK"),
            (b"SELECT", _, [_]) => out.error("ERR DB index is out of range"),
            (b"CLIENT", b"SETNAME", [_, name]) => match self.called(name) {
                Ok(()) => out.simple("OK"),
                Err(problem) => out.error(problem),
            },
            (b"CLIENT", b"GETNAME", [_]) if self.name.is_empty() => out.null(),
            (b"CLIENT", b"GETNAME", [_]) => out.bulk(&self.name),
            (b"CLIENT", b"ID", [_]) => out.integer(self.number),
            (b"CLIENT", b"SETINFO", [_, _, _]) => out.simple("OK"),
            (b"CLIENT", b"TRACKING", [_, word, ..]) if !word.eq_ignore_ascii_case(b"OFF") => {
                out.error("ERR nothing is kept that could be tracked: expected CLIENT TRACKING off");
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
            (b"PING" | b"ECHO" | b"SELECT" | b"RESET" | b"AUTH", ..) => {
                let name = String::from_utf8_lossy(name).to_ascii_lowercase();
                out.error(&format!("ERR wrong number of arguments for '{name}' command"));
            }
            (b"CLIENT" | b"COMMAND" | b"CONFIG", ..) => {
                out.error("ERR unknown subcommand or wrong number of arguments");
            }
            _ => out.error("ERR unknown command: expected CL.THROTTLE, TG.CHECK or one of its kin"),
        }
    }

    /// How this server stands with its store, as lines of `INFO`.
    fn store(&self) -> String {
        let store = self.gate.store();
        let name = if matches!(store, Backend::Memory(_)) { "memory" } else { "redis" };
        let mut lines = format!("store:{name}\r\nstore_answers:{}\r\n", u8::from(!store.is_away()));
        if let Backend::Near(near, _) = store {
            let stats = near.stats();
            let alone = stats.fallback_allowed + stats.fallback_denied;
            lines += &format!("answers_without_store:{alone}\r\nbreaker_opened:{}\r\n", stats.opened);
        }
        lines
    }

    /// Takes the name that a client gives itself.
    fn called(&mut self, name: &[u8]) -> Result<(), &'static str> {
        if !name.iter().all(u8::is_ascii_graphic) {
            return Err("ERR Client names cannot contain spaces, newlines or special characters.");
        }
        if name.len() > MAX_NAME_BYTES {
            return Err("ERR the name is too long: expected at most 128 bytes");
        }
        self.name = name.to_vec();
        Ok(())
    }

    /// `HELLO [2|3 [AUTH user word] [SETNAME name]]`. Nothing changes unless all of it is right.
    async fn hello(&mut self, rest: &[&[u8]], out: &mut Replies) {
        let mut rest = rest.iter();
        let three = match rest.next() {
            None => out.three,
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
                    Some(word) => match self.guard.admit(self.peer, word).await {
                        Some(known) => may = known,
                        None => return self.wrong(out),
                    },
                    None => return out.error("ERR Syntax error in HELLO option 'auth'"),
                },
                (b"SETNAME", Some(word)) => name = Some(word),
                _ => return out.error(&format!("ERR Syntax error in HELLO option '{}'", option.escape_ascii())),
            }
        }
        if may == May::Nothing {
            return out.error(
                "NOAUTH HELLO must be called with the client already authenticated, otherwise the HELLO <proto> AUTH <user> <pass> option can be used to authenticate the client and select the RESP protocol version at the same time",
            );
        }
        if let Some(Err(problem)) = name.map(|name| self.called(name)) {
            return out.error(problem);
        }
        (self.may, out.three) = (may, three);
        out.map(7);
        let version = env!("CARGO_PKG_VERSION").as_bytes();
        for (name, value) in
            [("server", &b"tidegate"[..]), ("version", version), ("mode", b"standalone"), ("role", b"master")]
        {
            out.bulk(name.as_bytes());
            out.bulk(value);
        }
        out.bulk(b"proto");
        out.integer(if three { 3 } else { 2 });
        out.bulk(b"id");
        out.integer(self.number);
        out.bulk(b"modules");
        out.array(0);
    }

    async fn throttle(&mut self, rest: &[&[u8]], out: &mut Replies) {
        let asked = match Throttle::read(rest, &mut self.throttle) {
            Ok(asked) => asked,
            Err(problem) => return out.error(&problem),
        };
        let subject = Subject { scope: CELL_SCOPE, key: rest[0].into() };
        let check = Check::of(asked.op).charge_subject(subject, [asked.limit], asked.cost);
        match self.gate.decide(&check).await {
            Ok(decision) => {
                out.throttle(Throttle::numbers(decision.allowed(), decision.binding()), decision.source());
            }
            Err(error) => out.error(&format!("ERR {error}")),
        }
    }

    /// `TG.CHECK key limit [COST n] [ID n]` and its kin.
    async fn decide(&mut self, verb: &[u8], rest: &[&[u8]], out: &mut Replies) {
        match (verb, rest) {
            (b"RULES", rest) => return self.rules(rest, out).await,
            (b"MARK", [word]) if word.eq_ignore_ascii_case(b"ON") || word.eq_ignore_ascii_case(b"OFF") => {
                out.marked = word.eq_ignore_ascii_case(b"ON");
                return out.simple("OK");
            }
            (b"MARK", _) => return out.error("ERR expected TG.MARK ON or TG.MARK OFF"),
            _ => {}
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
            _ => return out.error("ERR unknown command: expected TG.CHECK, PEEK, TAKE, DEBIT, REFUND, RESET, RESERVE, SETTLE, LEASE, RELEASE, RULES or MARK"),
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
                out.verdict(decision.allowed(), decision.binding(), more, decision.source());
            }
            Err(error) => out.error(&format!("ERR {error}")),
        }
    }

    /// `TG.RULES attribute value … [COST n]`. The last two words are the cost if they are called so; no attribute can be.
    async fn rules(&mut self, rest: &[&[u8]], out: &mut Replies) {
        let (attributes, options) = match rest {
            [.., word, _] if word.eq_ignore_ascii_case(b"COST") => rest.split_at(rest.len() - 2),
            _ => (rest, &[][..]),
        };
        let cost = match Options::read(options) {
            Ok(options) => options.cost.unwrap_or(1),
            Err(problem) => return out.error(&problem),
        };
        if attributes.is_empty() || attributes.len() % 2 == 1 {
            return out.error("ERR expected TG.RULES attribute value [attribute value ...] [COST n]");
        }
        let text = |word: &[u8]| String::from_utf8_lossy(word).into_owned();
        let attributes: Vec<(String, String)> =
            attributes.chunks(2).map(|pair| (text(pair[0]), text(pair[1]))).collect();
        match self.gate.rule(Op::Check, &attributes[..], cost, None).await {
            Ok(ruling) => {
                let none = Verdict::default();
                let verdict = ruling.decision.as_ref().map_or(&none, Decision::binding);
                let shadowed = ruling.shadow.iter().filter(|shadowed| !shadowed.allowed).count();
                let source = ruling.decision.as_ref().map_or(Source::Store, Decision::source);
                out.verdict(
                    ruling.allowed,
                    verdict,
                    &[("shadow_denied", super::reply::whole(shadowed as u64))],
                    source,
                );
            }
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

/// A check that came with others.
pub(crate) struct Question<'w> {
    key: &'w [u8],
    pub(crate) cost: u64,
    pub(crate) under: Under,
}

pub(crate) enum Under {
    /// The limit of a `CL.THROTTLE`, which is also answered as such.
    Throttle(Limit),
    Limits(Limits),
}

impl Question<'_> {
    fn check(&self) -> Check<'_> {
        match &self.under {
            Under::Throttle(limit) => {
                let subject = Subject { scope: CELL_SCOPE, key: self.key.into() };
                Check::new().charge_subject(subject, [limit], self.cost)
            }
            Under::Limits(limits) => Check::new().charge(self.key, limits, self.cost),
        }
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
                b"ID" if number == 0 => return Err("ERR ID is '0': expected a positive number".into()),
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
