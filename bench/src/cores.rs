//! Who runs where: on a machine of two cores, those who ask have one and those who answer the other, as if they were two machines.

use std::process::{Command, Stdio};

/// The core of those who answer.
pub const SERVERS: &str = "0";
/// The core of those who ask.
pub const CLIENTS: &str = "1";

/// All threads of this process, and all that they start from now on, on one core.
pub fn stay_on(core: &str) {
    let pid = std::process::id().to_string();
    let pinned = Command::new("taskset").args(["-acp", core, &pid]).stdout(Stdio::null()).status();
    assert!(pinned.is_ok_and(|status| status.success()), "expected taskset (util-linux) and two cores");
}
