//! The catalogue of faults.

use super::Kind::{Net, Real};
use super::{Row, failing, forgetful, network};

/// All rows, in the order of their numbers.
#[rustfmt::skip]
pub(crate) static ROWS: &[Row] = &[
    Row {
        name: "F1", quick: true, kind: Real(failing::f1),
        fault: "Redis stalls, its connections stay open",
        inject: "SIGSTOP for 2 s, SIGCONT",
        holds: "no error, nothing above 10 ms, breaker open ≤ 100 ms, then p99 ≤ 1 ms, in sync ≤ 500 ms after SIGCONT; what passes alone is within the shares",
    },
    Row {
        name: "F2", quick: true, kind: Real(forgetful::f2),
        fault: "Redis is killed and comes back empty",
        inject: "kill -9, 1 s later a restart without data",
        holds: "no error; beyond the limit no more than what nobody had seen; the loss is counted; in sync ≤ 500 ms after the port opens",
    },
    Row {
        name: "F3", quick: false, kind: Real(forgetful::f3),
        fault: "Redis comes back with old data",
        inject: "SAVE, 0.5 s of writes, kill -9, restart",
        holds: "as F2",
    },
    Row {
        name: "F4", quick: false, kind: Real(failing::f4),
        fault: "Every call takes longer",
        inject: "a proxy delays by 1, 5, 20 and 100 ms, with jitter",
        holds: "no error, nothing above 10 ms; 1 ms is waited for, from 20 ms on nodes decide alone",
    },
    Row {
        name: "F5", quick: false, kind: Real(failing::f5),
        fault: "Stalls of a twentieth of a second",
        inject: "DEBUG SLEEP 0.05 every 0.5 s",
        holds: "no error, nothing above 10 ms, at most one change of mode a second on each node",
    },
    Row {
        name: "F6", quick: false, kind: Real(failing::f6),
        fault: "BUSY: an endless script of somebody else",
        inject: "EVAL of an endless loop for 1.5 s",
        holds: "as F1; nobody but the operator kills the script",
    },
    Row {
        name: "F7", quick: false, kind: Real(failing::f7),
        fault: "LOADING",
        inject: "DEBUG RELOAD of 20 000 keys, slowed down",
        holds: "as F1; no storm of connections",
    },
    Row {
        name: "F8", quick: true, kind: Real(failing::f8),
        fault: "OOM: no memory left",
        inject: "CONFIG SET maxmemory 1",
        holds: "no error, decided alone, the log names maxmemory",
    },
    Row {
        name: "F9", quick: false, kind: Real(forgetful::f9),
        fault: "Eviction of live counters",
        inject: "maxmemory 3mb, volatile-lru, and a flood of keys",
        holds: "beyond the limit no more than what nobody had seen; the loss is counted",
    },
    Row {
        name: "F10", quick: false, kind: Real(failing::f10),
        fault: "MISCONF: it cannot save",
        inject: "the folder of the data is removed, BGSAVE",
        holds: "as F8",
    },
    Row {
        name: "F11", quick: false, kind: Real(failing::f11),
        fault: "READONLY: the primary was demoted",
        inject: "REPLICAOF on the live primary; 0.6 s later its address leads to the new one",
        holds: "no error, nothing lost, found again by itself",
    },
    Row {
        name: "F12", quick: false, kind: Real(failing::f12),
        fault: "NOREPLICAS",
        inject: "min-replicas-to-write 2",
        holds: "as F8; the log names the setting",
    },
    Row {
        name: "F14", quick: true, kind: Real(failing::f14),
        fault: "NOSCRIPT: Redis forgets scripts",
        inject: "SCRIPT FLUSH every 100 ms",
        holds: "no error, decided by the store, nothing beyond the limit, at most one load for each node and flush",
    },
    Row {
        name: "F19", quick: false, kind: Real(failing::f19),
        fault: "NOAUTH: a password is wanted all of a sudden",
        inject: "CONFIG SET requirepass, connections killed; lifted after 1.5 s",
        holds: "no error, few logins tried, found again without a restart, the log says it",
    },
    Row {
        name: "F20", quick: false, kind: Real(failing::f20),
        fault: "No place for another connection",
        inject: "CONFIG SET maxclients, connections killed",
        holds: "no error, at most two connections a node, found again",
    },
    Row {
        name: "F21", quick: true, kind: Real(forgetful::f21),
        fault: "Somebody deletes everything",
        inject: "FLUSHALL",
        holds: "as F9",
    },
    Row {
        name: "F22", quick: false, kind: Real(forgetful::f22),
        fault: "Nonsense and other types in our keys",
        inject: "LPUSH and SET on our keys",
        holds: "no error, never unlimited, what is damaged is repaired and counted",
    },
    Row {
        name: "F24", quick: false, kind: Real(forgetful::f24),
        fault: "Keys without an end",
        inject: "nodes and server killed under load, three times; SCAN",
        holds: "there are none",
    },
    Row {
        name: "F29", quick: true, kind: Real(forgetful::f29),
        fault: "A replica that lagged is promoted",
        inject: "the replica is cut off, the primary goes on and is killed, the address moves to the replica",
        holds: "beyond the limit no more than what nobody had seen; the loss is counted",
    },
    Row {
        name: "F31", quick: false, kind: Net(network::f31),
        fault: "Packets are thrown away",
        inject: "nftables drop in a network of its own",
        holds: "as F1",
    },
    Row {
        name: "F32", quick: true, kind: Real(network::f32),
        fault: "Answers are lost, requests arrive",
        inject: "a proxy swallows replies",
        holds: "no error, nothing charged twice, what passes alone is within the shares",
    },
    Row {
        name: "F33", quick: true, kind: Real(network::f33),
        fault: "The connection ends after the request and before the answer",
        inject: "a proxy closes one in 50",
        holds: "no error, nothing charged twice",
    },
    Row {
        name: "F34", quick: false, kind: Net(network::f34),
        fault: "Packets are lost",
        inject: "nftables drops one packet in ten, both ways, in a network of its own",
        holds: "no error, nothing above 10 ms, nothing charged twice",
    },
    Row {
        name: "F35", quick: false, kind: Real(network::f35),
        fault: "A line of a hundred bytes a second",
        inject: "a proxy that drips",
        holds: "as F1",
    },
    Row {
        name: "F36", quick: true, kind: Real(network::f36),
        fault: "Nonsense instead of answers",
        inject: "a proxy replaces one reply in five",
        holds: "no error, nothing above 10 ms, nobody believes it",
    },
    Row {
        name: "F38", quick: false, kind: Net(network::f38),
        fault: "A name is gone, and then leads elsewhere",
        inject: "/etc/hosts of a mount of its own",
        holds: "what is connected stays; the new address is found",
    },
    Row {
        name: "F39", quick: false, kind: Net(network::f39),
        fault: "Some nodes are cut off",
        inject: "nftables drop for one of three nodes, in a network of its own",
        holds: "beyond the limit at most the share of the one; the others stay exact",
    },
];
