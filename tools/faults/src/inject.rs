//! What is done to the processes under load.

use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use tidegate_testkit::{Cluster, Reply, Server};

/// Does something every so often, by a thread beside, as long as `meanwhile` runs; how often it
/// did.
pub(crate) fn every(
    period: Duration,
    action: impl FnMut() + Send,
    meanwhile: impl FnOnce(),
) -> u64 {
    let mut action = action;
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let acting = scope.spawn(|| {
            let mut times = 0;
            while !over.load(Ordering::Relaxed) {
                action();
                times += 1;
                thread::sleep(period);
            }
            times
        });
        meanwhile();
        over.store(true, Ordering::Relaxed);
        acting.join().expect("what was done did not panic")
    })
}

/// Throws away what these rules of nftables say, in the network of this process, which must be its
/// own.
pub(crate) fn firewall(rules: &[String]) {
    nft(&["add", "table", "ip", "faults"]);
    nft(&["add", "chain", "ip", "faults", "wall", "{ type filter hook output priority 0 ; }"]);
    for rule in rules {
        nft(&["add", "rule", "ip", "faults", "wall", rule]);
    }
}

/// Lets everything pass again.
pub(crate) fn open_wall() {
    nft(&["delete", "table", "ip", "faults"]);
}

fn nft(words: &[&str]) {
    let done = Command::new("nft").args(words).output();
    let done = done.unwrap_or_else(|error| panic!("nft: {error}; run `apt-get install nftables`"));
    assert!(
        done.status.success(),
        "nft {}: {}",
        words.join(" "),
        String::from_utf8_lossy(&done.stderr)
    );
}

/// Moves a slot with its keys to another master, as `redis-cli --cluster reshard` does; `meanwhile`
/// runs when half of the keys are there.
pub(crate) fn move_slot(
    cluster: &Cluster,
    slot: u16,
    from: &Server,
    to: &Server,
    meanwhile: impl FnOnce(),
) {
    let ok = |reply: Reply| assert_eq!(reply, Reply::Text("OK".into()), "slot {slot}");
    let number = slot.to_string();
    let (old, new) = (cluster.id(from), cluster.id(to));
    ok(to.command(&["CLUSTER", "SETSLOT", &number, "IMPORTING", &old]));
    ok(from.command(&["CLUSTER", "SETSLOT", &number, "MIGRATING", &new]));
    let mut meanwhile = Some(meanwhile);
    loop {
        let keys = from.command(&["CLUSTER", "GETKEYSINSLOT", &number, "1"]);
        let [key] = keys.array() else { break };
        let reply = from.command(&[
            "MIGRATE",
            "127.0.0.1",
            &to.port().to_string(),
            key.text(),
            "0",
            "5000",
        ]);
        assert!(!reply.is_error(), "MIGRATE: {reply:?}");
        if let Some(meanwhile) = meanwhile.take() {
            meanwhile();
        }
    }
    for node in [to, from] {
        ok(node.command(&["CLUSTER", "SETSLOT", &number, "NODE", &new]));
    }
}
