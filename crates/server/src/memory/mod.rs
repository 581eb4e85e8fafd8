//! The store in this process: how much it may keep, and the file that keeps it over a restart.

pub(crate) mod file;
pub(crate) mod snapshot;

use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;
use std::{fmt, fs};

use serde::{Deserialize, Serialize};
use tidegate::memory::Overflow;
use tidegate::{Memory, MemoryBuilder};

use self::snapshot::{EVERY, Snapshot};
use crate::parse::values;

/// The least that can be configured.
const LEAST: u64 = 1 << 20;

/// Bounds of a store in memory.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct MemorySettings {
    /// The most keys.
    #[serde(deserialize_with = "values::within::<1, 4_000_000_000, _, _>")]
    pub max_keys: usize,
    /// The most bytes.
    #[serde(with = "values::text")]
    pub max_bytes: Bytes,
    /// What happens to a new key when the store is full.
    #[serde(with = "values::Overflow")]
    pub overflow: Overflow,
    /// The snapshot file that keeps the store over a restart, if there is one.
    #[serde(deserialize_with = "values::some_path", skip_serializing_if = "Option::is_none")]
    pub snapshot_file: Option<PathBuf>,
    /// The period in which the snapshot is written.
    #[serde(rename = "snapshot_secs", deserialize_with = "values::secs::<1, 1_000_000, _>")]
    #[serde(serialize_with = "values::as_secs")]
    pub snapshot_every: Duration,
}

impl Default for MemorySettings {
    fn default() -> Self {
        MemorySettings {
            max_keys: tidegate::memory::DEFAULT_MAX_KEYS,
            max_bytes: Bytes::default(),
            overflow: Overflow::default(),
            snapshot_file: None,
            snapshot_every: EVERY,
        }
    }
}

impl MemorySettings {
    /// The file and the period of snapshots, if there is a file.
    pub(crate) fn snapshot(&self) -> Option<Snapshot> {
        Some(Snapshot { file: self.snapshot_file.clone()?, every: self.snapshot_every })
    }

    /// A store with these bounds, before it is built.
    pub(crate) fn builder(&self) -> MemoryBuilder {
        let bytes = usize::try_from(self.max_bytes.number()).unwrap_or(usize::MAX);
        Memory::builder().max_keys(self.max_keys).max_bytes(bytes).overflow(self.overflow)
    }
}

/// A number of bytes. The default is `auto`: half of the memory that this process may have.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Bytes(Option<u64>);

impl Bytes {
    /// The number of bytes on this machine.
    pub fn number(self) -> u64 {
        self.0.unwrap_or_else(|| (available(Path::new("/")) / 2).max(LEAST))
    }
}

const UNITS: [(&str, u64); 4] = [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("", 1)];

impl FromStr for Bytes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "auto" {
            return Ok(Bytes(None));
        }
        let read = || {
            let (number, unit) = UNITS
                .iter()
                .find_map(|(name, unit)| text.strip_suffix(name).map(|number| (number, unit)))?;
            number
                .trim_end()
                .parse::<u64>()
                .ok()?
                .checked_mul(*unit)
                .filter(|bytes| *bytes >= LEAST)
        };
        let wrong = || {
            format!(
                "{text:?}: expected auto, or a number of bytes such as 512MiB or 2GiB, at least 1MiB"
            )
        };
        read().map(|bytes| Bytes(Some(bytes))).ok_or_else(wrong)
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(bytes) = self.0 else { return f.write_str("auto") };
        let (name, unit) =
            UNITS.iter().find(|(_, unit)| bytes.is_multiple_of(*unit)).unwrap_or(&UNITS[3]);
        write!(f, "{}{name}", bytes / unit)
    }
}

/// How many bytes of memory this process may have: the memory of the machine, or the lowest limit
/// of its control groups. `root` is where the system's files are.
fn available(root: &Path) -> u64 {
    let read = |file: &str| fs::read_to_string(root.join(file)).unwrap_or_default();
    let machine = read("proc/meminfo").lines().find_map(|line| {
        let kib = line.strip_prefix("MemTotal:")?.trim().strip_suffix(" kB")?;
        kib.parse::<u64>().ok()?.checked_mul(1024)
    });
    let groups = read("proc/self/cgroup");
    let bounds = groups.lines().flat_map(|line| {
        let mut parts = line.splitn(3, ':').skip(1);
        let (kinds, own) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
        let (folder, file) = match kinds {
            "" => ("sys/fs/cgroup", "memory.max"),
            _ if kinds.split(',').any(|kind| kind == "memory") => {
                ("sys/fs/cgroup/memory", "memory.limit_in_bytes")
            }
            _ => return Vec::new(),
        };
        // A group is bounded by those it is part of, too; in a container the outer ones cannot be
        // seen.
        let folders = Path::new(own)
            .ancestors()
            .map(|group| Path::new(folder).join(group.strip_prefix("/").unwrap_or(group)));
        let numbers = folders.filter_map(|folder| {
            fs::read_to_string(root.join(folder).join(file)).ok()?.trim().parse::<u64>().ok()
        });
        numbers.collect()
    });
    // Without any number, assume a small machine.
    bounds.chain(machine).min().unwrap_or(1 << 30)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_bytes_are_read_and_written() {
        for (text, number, written) in [
            ("1MiB", 1 << 20, "1MiB"),
            ("1048576", 1 << 20, "1MiB"),
            ("2048 KiB", 2 << 20, "2MiB"),
            ("3GiB", 3 << 30, "3GiB"),
            ("1048577", (1 << 20) + 1, "1048577"),
        ] {
            let bytes: Bytes = text.parse().unwrap();
            assert_eq!((bytes.number(), bytes.to_string().as_str()), (number, written));
            assert_eq!(bytes.to_string().parse(), Ok(bytes));
        }
        assert_eq!(Bytes::default(), "auto".parse().unwrap());
        assert!(Bytes::default().number() >= LEAST);
        for text in
            ["", "0", "1", "1023KiB", "-1MiB", "1.5GiB", "1TB", "MiB", "99999999999GiB", "1MB"]
        {
            let expected = format!(
                "{text:?}: expected auto, or a number of bytes such as 512MiB or 2GiB, at least 1MiB"
            );
            assert_eq!(text.parse::<Bytes>(), Err(expected));
        }
    }

    #[test]
    fn the_lowest_limit_of_machine_and_control_groups_holds() {
        const FILES: [(&str, &str); 7] = [
            ("proc/meminfo", "MemTotal:        1000 kB\nMemFree: 3 kB\n"),
            ("proc/self/cgroup", "4:cpu,memory:/a/b\n3:cpu:/c\n0::/d/e\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
            ("sys/fs/cgroup/memory/a/b/memory.limit_in_bytes", "900000\n"),
            ("sys/fs/cgroup/d/memory.max", "800000\n"),
            ("sys/fs/cgroup/d/e/memory.max", "max\n"),
            ("sys/fs/cgroup/c/memory.max", "1\n"),
        ];
        let expected =
            [1 << 30, 1_024_000, 1_024_000, 1_024_000, 900_000, 800_000, 800_000, 800_000];
        for (count, expected) in expected.into_iter().enumerate() {
            let root = tempfile::tempdir().unwrap();
            for (file, text) in &FILES[..count] {
                let file = root.path().join(file);
                fs::create_dir_all(file.parent().unwrap()).unwrap();
                fs::write(file, text).unwrap();
            }
            assert_eq!(available(root.path()), expected, "the first {count} files");
        }
    }
}
