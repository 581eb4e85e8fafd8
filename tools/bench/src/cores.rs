//! Who runs where: on a machine of two cores, those who ask have one and those who answer the
//! other, as if they were two machines.

use std::process::{Command, Stdio};

/// The core of those who answer.
pub const SERVERS: &str = "0";
/// The core of those who ask.
pub const CLIENTS: &str = "1";

/// All threads of this process, and all that they start from now on, on one core.
pub fn stay_on(core: &str) {
    let pid = std::process::id().to_string();
    let pinned = Command::new("taskset").args(["-acp", core, &pid]).stdout(Stdio::null()).status();
    assert!(
        pinned.is_ok_and(|status| status.success()),
        "expected taskset (util-linux) and two cores"
    );
}

/// This process runs before all others on its core, whenever it has something to do.
pub fn go_first(pid: u32) {
    let done = Command::new("chrt")
        .args(["-a", "-f", "-p", "1", &pid.to_string()])
        .stdout(Stdio::null())
        .status();
    assert!(
        done.is_ok_and(|status| status.success()),
        "expected chrt (util-linux), and the right to use it"
    );
}
