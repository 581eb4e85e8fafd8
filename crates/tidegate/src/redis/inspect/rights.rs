//! The rights of the user, tested by use: a decision by the real script, and every command that
//! the script calls.

use std::ops::RangeInclusive;

use tidegate_core::{Limit, Op};
use tokio::time::Instant;

use super::super::call::CallHead;
use super::super::keys::Keys;
use super::super::{NoAnswer, Redis};
use super::{Finding, Inspection, Severity, Topic, patience};
use crate::store::{Charge, Scope, StoreError, Subject};
use tidegate_redis_client::{Failure, FailureKind, Outcome, Script, Value, is_unknown_command};

/// A script that runs all commands of the real one.
const RIGHTS: &str = include_str!("../lua/rights.lua");
/// What every user of the store needs, from `docs/redis.md`.
const LEAST: &str =
    "+evalsha +script|load +time +get +set +getrange +setrange +append +strlen +del +pexpire";
/// The most keys to try for one in a given slot: enough to miss one of 16 384 slots once in 10^13
/// searches.
const TRIES: u32 = 500_000;

/// The rule name of the test keys.
const PROBE: &str = "tidegate inspect";

impl Redis {
    /// Makes a decision, and tests all rights that decisions need, on a key in one of these slots.
    pub(super) async fn try_out(
        &self,
        server: &str,
        slots: RangeInclusive<u16>,
        inspection: &mut Inspection,
    ) {
        let Some(charge) = probe(&self.shared.keys, &slots) else { return };
        let named = self.shared.named(&charge);
        let mut decision = Ok(());
        for op in [Op::Peek, Op::Take, Op::Reset] {
            let head = CallHead { op, id: None, time: self.shared.time(), denied: false };
            let answer =
                self.shared.call(head, std::slice::from_ref(&named), &[None], patience()).await;
            decision = decision.and(answer.map(|_| ()));
        }
        // Last, because it deletes the key.
        let rights = self.rights(named.slot, &named.name, patience()).await;
        let findings = judge(&rights, decision.err().as_ref(), &self.pattern());
        findings.into_iter().for_each(|finding| inspection.add(server, finding));
    }

    /// The refused commands, each with the error of the server.
    pub(in crate::redis) async fn rights(
        &self,
        slot: u16,
        key: &[u8],
        deadline: Instant,
    ) -> Result<Vec<String>, Failure> {
        let none: &[&str] = &[];
        match self.shared.router.eval(&Script::new(RIGHTS), slot, &[key], none, deadline).await {
            Outcome::Applied(Value::Array(refused)) => {
                Ok(refused.iter().filter_map(Value::as_str).map(str::to_owned).collect())
            }
            Outcome::Applied(_) => Err(Failure::local(
                FailureKind::Protocol,
                "the script that tries out rights answered something else",
            )),
            Outcome::NotApplied(failure) | Outcome::Unknown(failure) => Err(failure),
        }
    }

    /// The key pattern that the user needs.
    pub(in crate::redis) fn pattern(&self) -> String {
        format!("~{}*", self.shared.keys.prefix())
    }
}

/// A charge whose key is in one of these slots. It drains within a microsecond, so the key expires
/// almost immediately.
pub(in crate::redis) fn probe(keys: &Keys, slots: &RangeInclusive<u16>) -> Option<Charge<'static>> {
    let limit: Limit = "1000000/s".parse().ok()?;
    (0..TRIES).find_map(|number| {
        let key = number.to_string().into_bytes();
        let subject = Subject { scope: Scope::Rule(PROBE.into()), key: key.into() };
        let found = slots.contains(&keys.tag(&subject).slot());
        found.then_some(Charge {
            subject,
            limit,
            position: 0,
            cost: 1,
            reserved: 0,
            policy: Default::default(),
        })
    })
}

/// The finding for a check that failed.
pub(super) fn unseen(command: &str, failure: &Failure) -> Finding {
    if failure.kind() != FailureKind::NoPerm {
        return Finding::new(
            Severity::Warning,
            Topic::Reach,
            format!("{command} had no answer: {failure}"),
        )
        .because("What it would have told was not looked at.")
        .advise("Look again.");
    }
    let right = command.to_ascii_lowercase().replace(' ', "|");
    Finding::new(Severity::Note, Topic::Rights, format!("the user may not run {command}"))
        .because("What it would have told was not looked at. Decisions do not need it.")
        .advise(format!("To have it looked at: ACL SETUSER <user> +{right}"))
}

/// The rights that the user lacks.
#[derive(Debug, Default)]
struct MissingRights {
    /// Commands that were refused, as an ACL names them.
    commands: Vec<String>,
    /// Commands that the server does not have.
    unknown: Vec<String>,
    /// Whether the keys of the store were refused.
    keys: bool,
}

impl MissingRights {
    fn of(rights: &Result<Vec<String>, Failure>) -> Self {
        let mut missing = MissingRights::default();
        match rights {
            Ok(refused) => {
                for text in refused {
                    let (command, error) = text.split_once(' ').unwrap_or((text, ""));
                    match refusal(error) {
                        Some(Refusal::Command) => {
                            missing.commands.push(command.to_ascii_lowercase())
                        }
                        Some(Refusal::Key) => missing.keys = true,
                        None if is_unknown_command(error) => {
                            missing.unknown.push(command.to_owned())
                        }
                        None => {} // not about rights: the decision failed with it, too
                    }
                }
            }
            Err(failure) => match refusal(&failure.to_string()) {
                Some(Refusal::Command) => missing.commands.push(named(&failure.to_string())),
                Some(Refusal::Key) => missing.keys = true,
                None => {}
            },
        }
        missing
    }

    /// Result, reason and advice for each kind that is missing.
    fn findings(&self, pattern: &str) -> Vec<(String, &'static str, String)> {
        let mut findings = Vec::new();
        if !self.commands.is_empty() {
            let found = format!("the user may not run {}", self.commands.join(", "));
            let lines: Vec<String> =
                self.commands.iter().map(|command| format!("+{command}")).collect();
            let advice = format!(
                "ACL SETUSER <user> {}. All that is needed: {LEAST} {pattern}",
                lines.join(" ")
            );
            findings.push((
                found,
                "The script calls these commands with the rights of whoever runs it.",
                advice,
            ));
        }
        if !self.unknown.is_empty() {
            let found = format!("the server does not know {}", self.unknown.join(", "));
            let advice = "Remove rename-command for them from the configuration of the server, and restart it.".into();
            findings.push((found, "The script calls these commands by their own names.", advice));
        }
        if self.keys {
            let found = "the user may not touch the keys of this store".to_owned();
            let advice = format!("ACL SETUSER <user> {pattern}");
            findings.push((found, "All that the store writes begins with its prefix.", advice));
        }
        findings
    }
}

/// A failure that names the missing rights and commands and how to grant them; `None` if nothing is
/// missing.
pub(in crate::redis) fn missing_rights(
    rights: &Result<Vec<String>, Failure>,
    pattern: &str,
) -> Option<Failure> {
    let missing = MissingRights::of(rights);
    let text: Vec<String> = missing
        .findings(pattern)
        .into_iter()
        .map(|(found, _, advice)| format!("{found}: {advice}"))
        .collect();
    let kind =
        if missing.unknown.is_empty() { FailureKind::NoPerm } else { FailureKind::Unsupported };
    (!text.is_empty()).then(|| Failure::local(kind, text.join(" ")))
}

fn judge(
    rights: &Result<Vec<String>, Failure>,
    decision: Option<&StoreError>,
    pattern: &str,
) -> Vec<Finding> {
    let missing = MissingRights::of(rights).findings(pattern);
    let lacks = !missing.is_empty();
    let problem = |(found, why, advice): (String, &str, String)| {
        Finding::new(Severity::Problem, Topic::Rights, found).because(why).advise(advice)
    };
    let mut findings: Vec<Finding> = missing.into_iter().map(problem).collect();
    if !lacks && rights.is_ok() {
        findings.push(Finding::ok(Topic::Rights, "all that decisions need"));
    }
    match decision {
        None => findings
            .push(Finding::ok(Topic::Decision, "a look, a charge and a reset were answered")),
        Some(_) if lacks => {} // that is why
        Some(error) => findings.push(no_decision(error)),
    }
    findings
}

fn no_decision(error: &StoreError) -> Finding {
    let failure = match error {
        StoreError::Unavailable(cause) => cause.downcast_ref::<NoAnswer>().map(NoAnswer::failure),
        _ => None,
    };
    let finding = match failure {
        Some(failure) => {
            Finding::new(Severity::Problem, Topic::Decision, format!("none: {failure}"))
        }
        None => Finding::new(Severity::Problem, Topic::Decision, format!("none: {error}")),
    };
    let advice = match failure.map_or("", Failure::advice) {
        "" => "The server's log may say more.",
        advice => advice,
    };
    finding.because("The script was run on a key of its own, and did not answer.").advise(advice)
}

/// The kind of a refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Refusal {
    Command,
    Key,
}

/// The kind of a refusal by its text, which differs between Redis 6.2, inside and outside of
/// scripts, and later servers.
fn refusal(error: &str) -> Option<Refusal> {
    let lower = error.to_ascii_lowercase();
    let has = |text: &str| lower.contains(text);
    if has("no permissions to run") || has("can't run this command") {
        Some(Refusal::Command)
    } else if has("no permissions to access") || has("can't access at least one of the keys") {
        Some(Refusal::Key)
    } else {
        None
    }
}

/// The command that a refusal names, between quotes.
fn named(error: &str) -> String {
    let command = error.split_once("run the '").and_then(|(_, rest)| rest.split_once('\''));
    match command.map(|(name, _)| name) {
        // The text is sent where loading it did not help.
        Some("eval" | "script") => "script|load".into(),
        Some(name) => name.into(),
        None => "evalsha".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(texts: &[&str]) -> Result<Vec<String>, Failure> {
        Ok(texts.iter().map(|text| (*text).to_owned()).collect())
    }

    #[test]
    fn missing_rights_are_named_with_the_line_that_grants_them() {
        let rights = refused(&[
            "TIME NOPERM User limiter has no permissions to run the 'time' command",
            "SETRANGE The user executing the script can't run this command or subcommand",
        ]);
        let error = StoreError::Unavailable("x".into());
        let findings = judge(&rights, Some(&error), "~tg1:*");
        let [finding] = &findings[..] else { panic!("{findings:?}") };
        assert_eq!(finding.found, "the user may not run time, setrange");
        assert!(
            finding.advice.starts_with("ACL SETUSER <user> +time +setrange."),
            "{}",
            finding.advice
        );
        assert!(finding.advice.ends_with(" ~tg1:*") && !finding.advice.contains("limiter"));
    }

    #[test]
    fn commands_that_the_server_does_not_have_are_named() {
        let rights = refused(&[
            "TIME ERR Unknown command called from script",
            "SET ERR Unknown Redis command called from script",
            "GET @user_script: 1: Unknown Redis command called from Lua script",
        ]);
        let failure = missing_rights(&rights, "~tg1:*").unwrap();
        assert_eq!((failure.kind(), failure.is_permanent()), (FailureKind::Unsupported, true));
        assert!(
            failure.to_string().starts_with("the server does not know TIME, SET, GET: Remove"),
            "{failure}"
        );
    }

    #[test]
    fn a_command_that_was_refused_before_the_script_ran_is_named() {
        for (error, command) in [
            (
                "NOPERM this user has no permissions to run the 'evalsha' command or its subcommand",
                "evalsha",
            ),
            ("NOPERM User x has no permissions to run the 'eval' command", "script|load"),
            ("NOPERM User x has no permissions to run the 'script|load' command", "script|load"),
        ] {
            let findings = judge(&Err(Failure::local(FailureKind::NoPerm, error)), None, "~tg1:*");
            assert_eq!(findings[0].found, format!("the user may not run {command}"));
        }
    }

    #[test]
    fn refused_keys_are_named_with_their_pattern() {
        for error in [
            "NOPERM No permissions to access a key",
            "NOPERM this user has no permissions to access one of the keys used as arguments",
        ] {
            let findings =
                judge(&Err(Failure::local(FailureKind::NoPerm, error)), None, "~tg1:shop:*");
            assert_eq!(findings[0].advice, "ACL SETUSER <user> ~tg1:shop:*");
        }
    }

    #[test]
    fn an_error_that_is_not_about_rights_is_reported_once() {
        let oom = Failure::local(FailureKind::Oom, "the server is out of memory (maxmemory)");
        let error = StoreError::Unavailable(Box::new(NoAnswer { applied: false, failure: oom }));
        let findings = judge(
            &refused(&["SET OOM command not allowed when used memory > 'maxmemory'."]),
            Some(&error),
            "~tg1:*",
        );
        let [rights, decision] = &findings[..] else { panic!("{findings:?}") };
        assert_eq!((rights.severity, decision.severity), (Severity::Ok, Severity::Problem));
        assert_eq!(decision.found, "none: the server is out of memory (maxmemory)");
    }

    #[test]
    fn a_probe_is_found_for_every_part_of_a_cluster() {
        let keys = Keys::new(None, None).unwrap();
        for slots in [0..=u16::MAX, 0..=5460, 5461..=10_922, 10_923..=16_383, 7..=7] {
            let charge = probe(&keys, &slots).unwrap();
            assert!(slots.contains(&keys.tag(&charge.subject).slot()));
        }
        assert!(probe(&keys, &(20_000..=20_001)).is_none());
    }
}
