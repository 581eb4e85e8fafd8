//! Processors that do not fall asleep.
//!
//! A virtual machine gives a processor back to its host whenever there is nothing to do, and has to
//! wait until the host lets it run again: several milliseconds for each wake-up, on a host with
//! other machines. So while times are judged strictly, every processor has something to do that
//! gives way to anything else.

use std::process::{Child, Stdio};
use std::thread;

use crate::spawn;

/// Keeps all processors awake until it is dropped.
#[derive(Debug)]
pub struct Awake(Vec<Child>);

impl Awake {
    /// Gives each processor something to do. Needs `chrt` and `taskset`, of util-linux.
    pub fn keep() -> Awake {
        let processors = thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let busy = |processor: usize| {
            let child = spawn("chrt".as_ref(), |command| {
                command.args([
                    "-i",
                    "0",
                    "taskset",
                    "-c",
                    &processor.to_string(),
                    "sh",
                    "-c",
                    "while :; do :; done",
                ]);
                command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
            });
            child.expect("`chrt` is part of util-linux: run `apt-get install util-linux`")
        };
        Awake((0..processors).map(busy).collect())
    }
}

impl Drop for Awake {
    fn drop(&mut self) {
        for busy in &mut self.0 {
            let _ = busy.kill().and_then(|()| busy.wait());
        }
    }
}
