//! The commands and how many words each takes. Checked before a command runs: in a transaction these
//! errors are reported when a command is queued.

use super::frame::MAX_WORDS;
use crate::nearest::nearest;

/// The error for a command of this name, in capitals, with this many words behind its name.
pub(crate) fn problem(name: &[u8], words: usize) -> Option<String> {
    let (least, most) = match name {
        // redis-cell answers its own usage line.
        b"CL.THROTTLE" => (0, MAX_WORDS),
        b"TG.RULES" | b"TG.RESETRULES" => (2, MAX_WORDS),
        b"TG.RESETRULE" => (1, MAX_WORDS),
        b"TG.MARK" => (1, 1),
        name if is_operation(name) => (2, MAX_WORDS),
        b"PING" => (0, 1),
        b"AUTH" => (1, 2),
        b"ECHO" | b"SELECT" => (1, 1),
        b"CLIENT" | b"CONFIG" | b"WATCH" => (1, MAX_WORDS),
        b"HELLO" | b"INFO" | b"COMMAND" | b"QUIT" => (0, MAX_WORDS),
        b"MULTI" | b"EXEC" | b"DISCARD" | b"UNWATCH" | b"RESET" => (0, 0),
        _ => return Some(unknown(name)),
    };
    if (least..=most).contains(&words) { None } else { Some(usage(name)) }
}

/// `TG.CHECK` and the other commands that take a key and a limit.
fn is_operation(name: &[u8]) -> bool {
    const OPERATIONS: [&[u8]; 10] = [
        b"CHECK", b"PEEK", b"TAKE", b"DEBIT", b"REFUND", b"RESET", b"RESERVE", b"SETTLE", b"LEASE",
        b"RELEASE",
    ];
    name.strip_prefix(b"TG.").is_some_and(|verb| OPERATIONS.contains(&verb))
}

/// The error for a command with too few or too many words.
pub(crate) fn usage(name: &[u8]) -> String {
    let shown = String::from_utf8_lossy(name);
    match name {
        b"TG.MARK" => "ERR expected TG.MARK ON or TG.MARK OFF".into(),
        b"TG.RULES" => {
            "ERR expected TG.RULES attribute value [attribute value ...] [COST n] [AS MAP]".into()
        }
        b"TG.RESETRULE" => "ERR expected TG.RESETRULE rule [attribute value ...]".into(),
        b"TG.RESETRULES" => {
            "ERR expected TG.RESETRULES attribute value [attribute value ...]".into()
        }
        name if is_operation(name) => {
            format!("ERR expected {shown} key limit [COST n] [RESERVED n] [ID n] [AS MAP]")
        }
        _ => format!("ERR wrong number of arguments for '{}' command", shown.to_ascii_lowercase()),
    }
}

/// The `TG.` commands, as errors list them.
const VERBS: &str = "CHECK, PEEK, TAKE, DEBIT, REFUND, RESET, RESERVE, SETTLE, LEASE, RELEASE, RULES, RESETRULE, RESETRULES or MARK";

/// The error for a command that does not exist.
pub(crate) fn unknown(name: &[u8]) -> String {
    let shown: String = name.escape_ascii().to_string().chars().take(64).collect();
    if name.starts_with(b"TG.") {
        let verbs: Vec<&str> =
            VERBS.split([',', ' ']).filter(|verb| !verb.is_empty() && *verb != "or").collect();
        if let Some(right) = nearest(&shown[3..], verbs) {
            return format!("ERR unknown command '{shown}': did you mean TG.{right}?");
        }
        return format!("ERR unknown command '{shown}': expected TG.{VERBS}");
    }
    format!(
        "ERR unknown command '{shown}': Tidegate has CL.THROTTLE, TG.CHECK and the other TG. commands, and no keys to read"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_say_what_was_expected() {
        for (name, words, expected) in [
            ("TG.CHECK", 2, None),
            (
                "TG.CHECK",
                1,
                Some("ERR expected TG.CHECK key limit [COST n] [RESERVED n] [ID n] [AS MAP]"),
            ),
            ("TG.MARK", 0, Some("ERR expected TG.MARK ON or TG.MARK OFF")),
            ("PING", 1, None),
            ("PING", 2, Some("ERR wrong number of arguments for 'ping' command")),
            ("EXEC", 1, Some("ERR wrong number of arguments for 'exec' command")),
            ("CL.THROTTLE", 0, None),
        ] {
            assert_eq!(problem(name.as_bytes(), words).as_deref(), expected, "{name} with {words}");
        }
        assert!(problem(b"GET", 1).unwrap().starts_with("ERR unknown command 'GET': "));
        assert_eq!(
            problem(b"TG.CHEK", 2).unwrap(),
            "ERR unknown command 'TG.CHEK': did you mean TG.CHECK?"
        );
        assert!(
            problem(b"TG.FLY", 2)
                .unwrap()
                .starts_with("ERR unknown command 'TG.FLY': expected TG.CHECK, PEEK, ")
        );
    }
}
