//! Answers commands: those that decide by the engine, those that clients send when they connect as
//! Redis does.

use std::borrow::Cow;
use std::sync::Arc;

use futures_util::future::join_all;
use tidegate::{Check, Decision, Id, Limit, Limits, Op, Scope, Source, Subject, Verdict};

use tokio::time::Instant;

use super::arity;
use super::fast_path::PreparedShape;
use super::frame::{LastCommand, Words};
use super::reply::Replies;
use super::throttle::{Parameters, Throttle};
use super::transaction::Transaction;
use crate::auth::{Admission, Caller, Guard, May};
use crate::engine::Engine;
use crate::guesses;
use crate::ids::fresh_id;
use crate::nearest::nearest;
use crate::observe::metrics::Refusal;
use crate::protocol::Protocol;
use crate::reset::{Emptied, Target};

/// The namespace of keys of `CL.THROTTLE`. No rule can have this name.
pub(crate) const CELL: &str = "cl:throttle";
pub(crate) const CELL_SCOPE: Scope<'static> = Scope::Rule(Cow::Borrowed(CELL));

/// The options of a `TG.` command, as errors name them.
const OPTIONS: &str = "COST n, RESERVED n, ID n or AS MAP";

/// The state of one connection.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) engine: Engine,
    pub(crate) guard: Arc<Guard>,
    pub(crate) caller: Caller,
    /// Whether administration commands are answered here; otherwise they have a listener of their
    /// own.
    pub(crate) has_admin_calls: bool,
    pub(crate) may: May,
    pub(crate) number: i64,
    pub(crate) name: Vec<u8>,
    pub(crate) closing: bool,
    /// The deadline of a command that has begun to arrive.
    pub(crate) begun: Option<Instant>,
    /// The limits of the last `TG.` command and their text: most connections repeat them.
    last: Option<(Vec<u8>, Limits)>,
    /// The limit of the last `CL.THROTTLE`.
    throttle: Parameters,
    /// The last command.
    pub(crate) known: LastCommand,
    /// The batch that commands of its shape are checked in.
    pub(crate) fast_path: PreparedShape,
    /// The commands since `MULTI`.
    pub(crate) transaction: Transaction,
    /// An allocation for the words of commands.
    pub(crate) words: Words<'static>,
    /// An allocation for their ends.
    pub(crate) ends: Vec<super::turn::CommandEnd>,
}

/// A parsed command.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Command<'b, 'a> {
    pub(crate) words: &'b [&'a [u8]],
    /// Its length in bytes.
    pub(crate) bytes: usize,
}

impl Session {
    pub(crate) fn new(engine: Engine, guard: Arc<Guard>, caller: Caller, number: i64) -> Self {
        let may = guard.without_token();
        Session {
            engine,
            guard,
            caller,
            has_admin_calls: true,
            may,
            number,
            name: Vec::new(),
            closing: false,
            begun: None,
            last: None,
            throttle: Parameters::default(),
            known: LastCommand::default(),
            fast_path: PreparedShape::default(),
            transaction: Transaction::None,
            words: Words::new(),
            ends: Vec::new(),
        }
    }

    /// A `CL.THROTTLE` or `TG.CHECK` that can be decided concurrently with the commands behind it.
    pub(crate) fn batchable<'w>(&mut self, words: &[&'w [u8]]) -> Option<BatchedCheck<'w>> {
        match words {
            _ if self.may == May::Nothing => None,
            [name, rest @ ..] if name.eq_ignore_ascii_case(b"CL.THROTTLE") => {
                let asked = Throttle::read(rest, &mut self.throttle)
                    .ok()
                    .filter(|asked| asked.op == Op::Check)?;
                Some(BatchedCheck {
                    key: rest[0],
                    cost: asked.cost,
                    under: CheckedLimits::Throttle(*asked.limit),
                })
            }
            [name, key, limit, options @ ..] if name.eq_ignore_ascii_case(b"TG.CHECK") => {
                let Ok(CheckOptions { cost, reserved: None, id: None, as_map: false }) =
                    CheckOptions::read(options)
                else {
                    return None;
                };
                Some(BatchedCheck {
                    key,
                    cost: cost.unwrap_or(1),
                    under: CheckedLimits::Limits(self.limits(limit).ok()?),
                })
            }
            _ => None,
        }
    }

    /// Decides several checks concurrently, so that a remote store costs one round trip. They reach
    /// the store in order.
    pub(crate) async fn answer_all(&self, checked: &[BatchedCheck<'_>], out: &mut Replies) {
        let checks: Vec<Check<'_>> = checked.iter().map(BatchedCheck::check).collect();
        let decided = join_all(checks.iter().map(|check| self.engine.check(check))).await;
        for (check, decided) in checked.iter().zip(decided) {
            match decided {
                Ok(decision) if matches!(check.under, CheckedLimits::Throttle(_)) => {
                    out.throttle(
                        Throttle::numbers(decision.allowed(), decision.binding()),
                        decision.source(),
                    );
                }
                Ok(decision) => {
                    out.verdict(decision.allowed(), decision.binding(), &[], decision.source())
                }
                Err(error) => out.error(&format!("ERR {error}")),
            }
        }
    }

    /// Answers one command.
    pub(crate) async fn answer(&mut self, words: &[&[u8]], out: &mut Replies) {
        let Some((name, rest)) = words.split_first() else { return };
        let name = name.to_ascii_uppercase();
        match (name.as_slice(), rest) {
            (b"AUTH", [word] | [_, word]) => match self.guard.admit(&self.caller, word) {
                Admission::May(may) => {
                    self.may = may;
                    out.simple("OK");
                }
                _ if !self.guard.has_tokens() => {
                    out.error("ERR AUTH <password> called without any password configured for the default user.");
                }
                refused => self.wrong(refused, out),
            },
            (b"HELLO", rest) => self.hello(rest, out),
            (b"QUIT", _) => {
                self.closing = true;
                out.simple("OK");
            }
            (b"RESET", []) => {
                (self.may, self.name) = (self.guard.without_token(), Vec::new());
                (out.is_resp3, out.has_source) = (false, false);
                self.transaction = Transaction::None;
                out.simple("RESET");
            }
            _ if self.may == May::Nothing => out.error("NOAUTH Authentication required."),
            (name, rest) => match arity::problem(name, rest.len()) {
                Some(problem) => out.error(&problem),
                None => self.dispatch(name, rest, out).await,
            },
        }
    }

    /// Answers a known command with a valid number of words.
    async fn dispatch(&mut self, name: &[u8], rest: &[&[u8]], out: &mut Replies) {
        match name {
            b"CL.THROTTLE" => self.throttle(rest, out).await,
            b"TG.RULES" => self.rules(rest, out).await,
            b"TG.RESETRULE" | b"TG.RESETRULES" => self.reset_rules(&name[3..], rest, out).await,
            b"TG.MARK" => match rest {
                [word] if word.eq_ignore_ascii_case(b"ON") || word.eq_ignore_ascii_case(b"OFF") => {
                    out.has_source = word.eq_ignore_ascii_case(b"ON");
                    out.simple("OK");
                }
                _ => out.error(&arity::usage(name)),
            },
            b"MULTI" | b"EXEC" | b"DISCARD" | b"WATCH" | b"UNWATCH" => self.transact(name, out),
            _ => match name.strip_prefix(b"TG.") {
                Some(verb) => self.decide(verb, rest, out).await,
                None => self.answer_client_command(name, rest, out),
            },
        }
    }

    /// Answers a token that is wrong or was not looked at.
    pub(crate) fn wrong(&self, refused: Admission, out: &mut Replies) {
        let observer = self.engine.observer();
        if let Admission::Limited(wait) = refused {
            observer.metrics().refused(Protocol::Resp, Refusal::Guessing);
            observer.guessed(Protocol::Resp, self.caller.ip());
            return out.error(&format!("WRONGPASS {}", guesses::advice(wait)));
        }
        observer.metrics().refused(Protocol::Resp, Refusal::Token);
        out.error("WRONGPASS invalid username-password pair or user is disabled.");
    }

    /// The error for an administration command that is answered elsewhere or needs another token.
    fn not_admin(&self, name: &str) -> Option<String> {
        if !self.has_admin_calls {
            return Some(format!(
                "NOPERM {name} is at the admin address (listen.admin): use POST /v1/reset there"
            ));
        }
        (self.may < May::Everything).then(|| format!("NOPERM {name} needs the admin token"))
    }

    async fn throttle(&mut self, rest: &[&[u8]], out: &mut Replies) {
        let asked = match Throttle::read(rest, &mut self.throttle) {
            Ok(asked) => asked,
            Err(problem) => return out.error(&problem),
        };
        let subject = Subject { scope: CELL_SCOPE, key: rest[0].into() };
        let check = Check::of(asked.op).charge_subject(subject, [asked.limit], asked.cost);
        match self.engine.check(&check).await {
            Ok(decision) => {
                out.throttle(
                    Throttle::numbers(decision.allowed(), decision.binding()),
                    decision.source(),
                );
            }
            Err(error) => out.error(&format!("ERR {error}")),
        }
    }

    /// `TG.<OPERATION> key limit [COST n] [RESERVED n] [ID n] [AS MAP]`.
    async fn decide(&mut self, verb: &[u8], rest: &[&[u8]], out: &mut Replies) {
        let needs_id = matches!(verb, b"SETTLE" | b"RELEASE");
        let op = match verb {
            b"CHECK" | b"RESERVE" | b"LEASE" => Op::Check,
            b"PEEK" => Op::Peek,
            b"TAKE" => Op::Take,
            b"DEBIT" => Op::Debit,
            b"REFUND" => Op::Refund,
            b"RESET" => match self.not_admin("TG.RESET") {
                Some(problem) => return out.error(&problem),
                None => Op::Reset,
            },
            b"SETTLE" => Op::Settle,
            b"RELEASE" => Op::Release,
            _ => return out.error(&arity::unknown(&[b"TG.", verb].concat())),
        };
        let [key, limit, options @ ..] = rest else {
            return out.error(&arity::usage(&[b"TG.", verb].concat()));
        };
        let asked = match CheckOptions::read(options) {
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
        let mut check =
            Check::of(op).charge(*key, &limits, asked.cost.unwrap_or(u64::from(op != Op::Reset)));
        if op == Op::Settle {
            check = check.reserving(asked.reserved.unwrap_or(0));
        }
        if let Some(id) = id {
            check = check.with_id(id);
        }
        match self.engine.check(&check).await {
            Ok(decision) => {
                let number = i64::try_from(id.unwrap_or(Id::NONE).0).unwrap_or(0);
                let granted = super::reply::whole(decision.granted());
                let more: &[(&str, i64)] = match verb {
                    b"RESERVE" | b"LEASE" => &[("id", number)],
                    b"TAKE" | b"REFUND" | b"SETTLE" | b"RELEASE" => &[("granted", granted)],
                    _ => &[],
                };
                let write = if asked.as_map { Replies::verdict_map } else { Replies::verdict };
                write(out, decision.allowed(), decision.binding(), more, decision.source());
            }
            Err(error) => out.error(&format!("ERR {error}")),
        }
    }

    /// `TG.RULES attribute value … [COST n] [AS MAP]`. Options come last, each at most once;
    /// everything before them is an attribute, whatever its name.
    async fn rules(&mut self, rest: &[&[u8]], out: &mut Replies) {
        let (mut attributes, mut has_cost, mut has_map) = (rest, false, false);
        while let [before @ .., name, value] = attributes {
            let option = match name.to_ascii_uppercase().as_slice() {
                b"COST" => &mut has_cost,
                b"AS" if value.eq_ignore_ascii_case(b"MAP") => &mut has_map,
                _ => break,
            };
            if std::mem::replace(option, true) {
                break;
            }
            attributes = before;
        }
        let options = match CheckOptions::read(&rest[attributes.len()..]) {
            Ok(options) => options,
            Err(problem) => return out.error(&problem),
        };
        if attributes.is_empty() || attributes.len() % 2 == 1 {
            return out.error(&arity::usage(b"TG.RULES"));
        }
        let attributes = match pairs(attributes) {
            Ok(attributes) => attributes,
            Err(problem) => return out.error(&problem),
        };
        let ruling = match self.engine.matching(&attributes[..], options.cost.unwrap_or(1)) {
            Ok(matches) => self.engine.check_rules(Op::Check, matches, None).await,
            Err(error) => Err(error.into()),
        };
        match ruling {
            Ok(ruling) => {
                let none = Verdict::default();
                let verdict = ruling.decision.as_ref().map_or(&none, Decision::binding);
                let shadowed = ruling.shadow.iter().filter(|shadowed| !shadowed.allowed).count();
                let source = ruling.decision.as_ref().map_or(Source::Store, Decision::source);
                let more = [("shadow_denied", super::reply::whole(shadowed as u64))];
                let warning = self.engine.unknown_attributes(&attributes);
                if options.as_map {
                    out.verdict_map_with_warning(
                        ruling.allowed,
                        verdict,
                        &more,
                        source,
                        warning.as_deref(),
                    );
                } else {
                    out.verdict(ruling.allowed, verdict, &more, source);
                }
            }
            Err(error) => out.error(&format!("ERR {error}")),
        }
    }

    /// `TG.RESETRULE rule [attribute value …]`, `TG.RESETRULE * attribute value …` and
    /// `TG.RESETRULES attribute value …`: the answer is a list of the budgets that were reset, each
    /// with the words by which `TG.RESETRULE` names it.
    async fn reset_rules(&mut self, verb: &[u8], rest: &[&[u8]], out: &mut Replies) {
        if let Some(problem) = self.not_admin(&format!("TG.{}", verb.escape_ascii())) {
            return out.error(&problem);
        }
        let target = match (verb, rest) {
            (b"RESETRULES", given) if !given.is_empty() && given.len() % 2 == 0 => {
                pairs(given).map(Target::Given)
            }
            (b"RESETRULES", _) => Err(arity::usage(b"TG.RESETRULES")),
            (_, [b"*", given @ ..]) if !given.is_empty() && given.len() % 2 == 0 => {
                pairs(given).map(Target::Applying)
            }
            (_, [b"*", ..]) => {
                Err("ERR expected TG.RESETRULE * attribute value [attribute value ...]".into())
            }
            (_, [name, by @ ..]) if by.len() % 2 == 0 => {
                pairs(by).map(|by| Target::Rule { name: text(name), by })
            }
            _ => Err(arity::usage(b"TG.RESETRULE")),
        };
        let target = match target {
            Ok(target) => target,
            Err(problem) => return out.error(&problem),
        };
        match self.engine.reset(&target).await {
            Ok(emptied) => {
                out.array(emptied.len());
                for Emptied { rule, by } in emptied {
                    out.array(1 + 2 * by.len());
                    out.bulk(rule.name.as_bytes());
                    for (name, value) in by {
                        out.bulk(name.as_bytes());
                        out.bulk(value.unwrap_or_default().as_bytes());
                    }
                }
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
        let said =
            std::str::from_utf8(text).map_err(|_| "ERR the limit is not text".to_string())?;
        let limits: Limits =
            said.parse().map_err(|error| format!("ERR limit '{said}': {error}"))?;
        self.last = Some((text.to_vec(), limits.clone()));
        Ok(limits)
    }
}

fn text(word: &[u8]) -> String {
    String::from_utf8_lossy(word).into_owned()
}

/// Attributes and their values, one after the other, each attribute once.
fn pairs(words: &[&[u8]]) -> Result<Vec<(String, String)>, String> {
    let pairs: Vec<(String, String)> =
        words.chunks_exact(2).map(|pair| (text(pair[0]), text(pair[1]))).collect();
    let mut names: Vec<&str> = pairs.iter().map(|(name, _)| name.as_str()).collect();
    names.sort_unstable();
    match names.windows(2).find(|pair| pair[0] == pair[1]) {
        None => Ok(pairs),
        Some(pair) => {
            let shown: String = pair[0].escape_default().take(64).collect();
            Err(format!("ERR attribute '{shown}' is there twice: expected each attribute once"))
        }
    }
}

/// A check that can be decided with others of the same turn.
pub(crate) struct BatchedCheck<'w> {
    key: &'w [u8],
    pub(crate) cost: u64,
    pub(crate) under: CheckedLimits,
}

pub(crate) enum CheckedLimits {
    /// The limit of a `CL.THROTTLE`.
    Throttle(Limit),
    Limits(Limits),
}

impl BatchedCheck<'_> {
    fn check(&self) -> Check<'_> {
        match &self.under {
            CheckedLimits::Throttle(limit) => {
                let subject = Subject { scope: CELL_SCOPE, key: self.key.into() };
                Check::new().charge_subject(subject, [limit], self.cost)
            }
            CheckedLimits::Limits(limits) => Check::new().charge(self.key, limits, self.cost),
        }
    }
}

/// The options of a `TG.` command.
#[derive(Default)]
struct CheckOptions {
    cost: Option<u64>,
    reserved: Option<u64>,
    id: Option<Id>,
    /// `AS MAP`: the answer is a map.
    as_map: bool,
}

impl CheckOptions {
    fn read(words: &[&[u8]]) -> Result<CheckOptions, String> {
        let mut options = CheckOptions::default();
        for pair in words.chunks(2) {
            let name = pair[0].to_ascii_uppercase();
            let [_, value] = pair else {
                return Err(format!(
                    "ERR '{}' has no value: expected {OPTIONS}",
                    pair[0].escape_ascii()
                ));
            };
            let number = || {
                let digits =
                    !value.is_empty() && value.len() <= 20 && value.iter().all(u8::is_ascii_digit);
                let text = std::str::from_utf8(value).ok().filter(|_| digits);
                text.and_then(|text| text.parse::<u64>().ok()).ok_or_else(|| {
                    format!(
                        "ERR {} is '{}': expected a whole number",
                        name.escape_ascii(),
                        value.escape_ascii()
                    )
                })
            };
            let is_repeated = match name.as_slice() {
                b"COST" => options.cost.is_some(),
                b"RESERVED" => options.reserved.is_some(),
                b"ID" => options.id.is_some(),
                _ => false,
            };
            if is_repeated {
                return Err(format!(
                    "ERR {} is there twice: expected each option once",
                    name.escape_ascii()
                ));
            }
            match name.as_slice() {
                b"COST" => options.cost = Some(number()?),
                b"RESERVED" => options.reserved = Some(number()?),
                b"ID" => match number()? {
                    0 => return Err("ERR ID is '0': expected a positive number".into()),
                    id => options.id = Some(Id(id)),
                },
                b"AS" if value.eq_ignore_ascii_case(b"MAP") => options.as_map = true,
                b"AS" => return Err(format!("ERR AS is '{}': expected MAP", value.escape_ascii())),
                other => {
                    let shown = other.escape_ascii().to_string();
                    return Err(match nearest(&shown, ["COST", "RESERVED", "ID", "AS"]) {
                        Some(right) => format!("ERR '{shown}': did you mean {right}?"),
                        None => format!("ERR '{shown}': expected {OPTIONS}"),
                    });
                }
            }
        }
        Ok(options)
    }
}
