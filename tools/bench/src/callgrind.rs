//! Instructions instead of time: a number that a busy machine does not change. The process runs
//! under `valgrind --tool=callgrind`.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Counts the instructions of a process from one call to the next.
pub struct Counter {
    pid: u32,
    file: PathBuf,
    dumps: usize,
}

impl Counter {
    /// Of a process whose counts callgrind writes to `file`.
    pub fn of(pid: u32, file: &Path) -> Counter {
        Counter { pid, file: file.to_owned(), dumps: 0 }
    }

    /// The instructions since the last time, from the file that callgrind writes on request.
    pub fn since(&mut self) -> f64 {
        let told = Command::new("callgrind_control").args(["-d", &self.pid.to_string()]).output();
        let told = told.expect("callgrind_control: apt-get install -y valgrind");
        assert!(
            told.status.success(),
            "callgrind_control: {}",
            String::from_utf8_lossy(&told.stderr)
        );
        self.dumps += 1;
        let file = self.file.with_added_extension(self.dumps.to_string());
        for _ in 0..500 {
            if let Some(counted) = totals(&file) {
                return counted;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("{}: expected callgrind to have written it", file.display());
    }
}

fn totals(file: &Path) -> Option<f64> {
    let text = std::fs::read_to_string(file).ok()?;
    text.lines().find_map(|line| line.strip_prefix("totals: "))?.trim().parse().ok()
}
