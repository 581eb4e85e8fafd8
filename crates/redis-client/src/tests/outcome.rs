//! The table: every error that a server can answer, in the words of the servers.

use super::super::outcome::{Then, escaped, rule};
use super::*;

#[test]
fn every_error_has_its_row() {
    use FailureKind as K;
    use Then::{Ask, Follow, GiveUp, Load, Reconnect, Rediscover, Wait};
    // Whether it was certainly not applied, what it is, and what is done about it.
    for (error, not_applied, kind, then) in [
        ("NOSCRIPT No matching script. Please use EVAL.", true, K::NoScript, Load),
        ("READONLY You can't write against a read only replica.", true, K::ReadOnly, Rediscover),
        (
            "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
            true,
            K::MasterDown,
            Rediscover,
        ),
        ("NOREPLICAS Not enough good replicas to write.", true, K::NoReplicas, GiveUp),
        ("LOADING Redis is loading the dataset in memory", true, K::Loading, GiveUp),
        (
            "BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.",
            true,
            K::Busy,
            GiveUp,
        ),
        ("CLUSTERDOWN Hash slot not served", true, K::ClusterDown, Wait),
        ("MOVED 3999 127.0.0.1:6381", true, K::Moved, Follow),
        ("ASK 3999 127.0.0.1:6381", true, K::Ask, Ask),
        ("TRYAGAIN Multiple keys request during rehashing of slot", true, K::TryAgain, GiveUp),
        ("CROSSSLOT Keys in request don't hash to the same slot", true, K::CrossSlot, GiveUp),
        ("NOAUTH Authentication required.", true, K::NoAuth, Reconnect),
        ("DENIED Redis is running in protected mode because", true, K::NoAuth, GiveUp),
        (
            "WRONGPASS invalid username-password pair or user is disabled.",
            true,
            K::WrongPass,
            GiveUp,
        ),
        (
            "NOPERM this user has no permissions to run the 'evalsha' command",
            true,
            K::NoPerm,
            GiveUp,
        ),
        ("OOM command not allowed when used memory > 'maxmemory'.", true, K::Oom, GiveUp),
        ("MISCONF Redis is configured to save RDB snapshots, but it is", true, K::Misconf, GiveUp),
        (
            "WRONGTYPE Operation against a key holding the wrong kind of value",
            false,
            K::WrongType,
            GiveUp,
        ),
        ("ERR max number of clients reached", true, K::MaxClients, GiveUp),
        ("ERR max number of clients + cluster connections reached", true, K::MaxClients, GiveUp),
        ("ERR unknown command 'FOO', with args beginning with: 'a' ", true, K::Unsupported, GiveUp),
        ("ERR unknown subcommand 'LOAD'. Try SCRIPT HELP.", true, K::Unsupported, GiveUp),
        ("ERR This instance has cluster support disabled", true, K::Topology, GiveUp),
        ("ERR DB index is out of range", true, K::NoDatabase, GiveUp),
        ("ERR invalid DB index", true, K::NoDatabase, GiveUp),
        ("ERR SELECT is not allowed in cluster mode", true, K::NoDatabase, GiveUp),
        ("ERR wrong number of arguments for 'get' command", true, K::Other, GiveUp),
        ("ERR invalid password", true, K::WrongPass, GiveUp),
        // Raised by a script: Redis 7 and Valkey say so at the end, Redis 6.2 at the start.
        (
            "READONLY You can't write against a read only replica. script: 7a, on @user_script:1.",
            true,
            K::ReadOnly,
            Rediscover,
        ),
        (
            "OOM command not allowed when used memory > 'maxmemory'. script: 7a, on @user_script:1.",
            true,
            K::Oom,
            GiveUp,
        ),
        (
            "MISCONF Errors writing to the AOF file script: 7a, on @user_script:1.",
            true,
            K::Misconf,
            GiveUp,
        ),
        (
            "NOREPLICAS Not enough good replicas to write. script: 7a, on @user_script:1.",
            true,
            K::NoReplicas,
            GiveUp,
        ),
        (
            "ERR Error running script (call to f_7a): @user_script:1: @user_script: 1: -READONLY You can't write against a read only replica. ",
            true,
            K::ReadOnly,
            Rediscover,
        ),
        (
            "ERR Error running script (call to f_7a): @user_script:1: -OOM command not allowed when used memory > 'maxmemory'. ",
            true,
            K::Oom,
            GiveUp,
        ),
        (
            "READONLY You can't write against a read only replica. script: on @user_script:1.",
            true,
            K::ReadOnly,
            Rediscover,
        ),
        // It never ran.
        (
            "ERR Error compiling script (new function): user_script:1: '=' expected near 'nil'",
            true,
            K::Script,
            GiveUp,
        ),
        // These may come after a write of the same script.
        (
            "WRONGTYPE Operation against a key script: 7a, on @user_script:1.",
            false,
            K::WrongType,
            GiveUp,
        ),
        (
            "ERR Error running script (call to f_7a): @user_script:1: WRONGTYPE Operation against a key holding",
            false,
            K::WrongType,
            GiveUp,
        ),
        ("NOPERM no permissions script: 7a, on @user_script:1.", false, K::NoPerm, GiveUp),
        (
            "ERR ACL failure in script: User u has no permissions script: on @user_script:1.",
            false,
            K::NoPerm,
            GiveUp,
        ),
        (
            "ERR Error running script (call to f_7a): @user_script:1: @user_script: 1: The user executing the script can't run this command",
            false,
            K::NoPerm,
            GiveUp,
        ),
        (
            "ERR Error running script (call to f_7a): @user_script:1: @user_script: 1: Unknown Redis command called from Lua script",
            false,
            K::Unsupported,
            GiveUp,
        ),
        (
            "ERR Unknown Redis command called from script script: 7a, on @user_script:1.",
            false,
            K::Unsupported,
            GiveUp,
        ),
        (
            "ERR Unknown command called from script script: on @user_script:1.",
            false,
            K::Unsupported,
            GiveUp,
        ),
        (
            "ERR Error running script (call to f_7a): @user_script:1: user_script:1: boom",
            false,
            K::Script,
            GiveUp,
        ),
        (
            "ERR user_script:1: attempt to index a nil value script: 7a, on @user_script:1.",
            false,
            K::Script,
            GiveUp,
        ),
        ("ERR user_script:1: boom", false, K::Script, GiveUp),
        ("ERR something new", false, K::Other, GiveUp),
        ("STRANGE", false, K::Other, GiveUp),
        ("", false, K::Other, GiveUp),
    ] {
        let ruling = rule(error);
        assert_eq!(
            (ruling.not_applied, ruling.kind, ruling.then),
            (not_applied, kind, then),
            "{error}"
        );
    }
}

#[test]
fn what_a_server_says_is_short_printable_and_without_arguments() {
    assert_eq!(escaped("a\r\n\u{1b}[31m\"b\"é"), "a\\r\\n\\u{1b}[31m'b'\\u{e9}");
    for length in [127, 128, 129, 1000] {
        let text = escaped(&"x".repeat(length));
        assert_eq!(text.len(), length.min(128), "{length}");
        assert!(escaped(&"\u{1F600}".repeat(length)).len() <= 128);
    }
    let leaky = "ERR unknown command 'AUTH', with args beginning with: 'user' 's3cret' ";
    let failure = Failure::said(rule(leaky).kind, leaky);
    assert_eq!(
        failure.to_string(),
        "the server does not know a command that is needed: \"ERR unknown command 'AUTH'\""
    );
    assert!(!format!("{failure:?}").contains("s3cret"));
}

/// A failure that stops a server from starting always says what to do.
#[test]
fn what_waiting_cannot_mend_has_advice() {
    use FailureKind as K;
    let kinds = [
        K::NoAuth,
        K::WrongPass,
        K::NoPerm,
        K::NoDatabase,
        K::Unsupported,
        K::Topology,
        K::Tls,
        K::ReadOnly,
        K::MasterDown,
    ];
    for kind in kinds {
        let failure = Failure::local(kind, "something that no table knows");
        assert!(
            failure.is_permanent() && failure.advice().ends_with('.'),
            "{kind:?}: {:?}",
            failure.advice()
        );
    }
}
