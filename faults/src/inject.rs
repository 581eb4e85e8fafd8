//! What is done to the processes while somebody asks.

use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

/// Does something every so often, by a thread beside, as long as `meanwhile` runs; how often it did.
pub(crate) fn every(period: Duration, action: impl FnMut() + Send, meanwhile: impl FnOnce()) -> u64 {
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

/// Throws away what these rules of nftables say, in the network of this process, which must be its own.
pub(crate) fn firewall(rules: &[String]) {
    nft(&["add", "table", "ip", "faults"]);
    nft(&["add", "chain", "ip", "faults", "all", "{ type filter hook output priority 0; }"]);
    for rule in rules {
        nft(&["add", "rule", "ip", "faults", "all", rule]);
    }
}

/// Lets everything pass again.
pub(crate) fn open_wall() {
    nft(&["delete", "table", "ip", "faults"]);
}

fn nft(words: &[&str]) {
    let done = Command::new("nft").args(words).output();
    let done = done.unwrap_or_else(|error| panic!("nft: {error}; run `apt-get install nftables`"));
    assert!(done.status.success(), "nft {}: {}", words.join(" "), String::from_utf8_lossy(&done.stderr));
}
