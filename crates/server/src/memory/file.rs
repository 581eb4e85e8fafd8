//! The file of a snapshot: whether it can be used, its lock, and the names beside it.

use std::ffi::OsString;
use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, OFlags, flock};

/// Readable by the user of the server only: the file has the secret that hashes keys.
pub(super) const MODE: u32 = 0o600;

/// Whether the file can be used as a snapshot, if there is one.
///
/// # Errors
/// If it is no file, or another user can have written it.
pub(crate) fn look_at(file: &Path) -> io::Result<()> {
    match file.symlink_metadata() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        about => usable(&about?, rustix::process::geteuid().as_raw()),
    }
}

/// The file decides what clients may do, and has the secret that hashes keys: only `user` may be
/// able to write it.
pub(super) fn usable(about: &Metadata, user: u32) -> io::Result<()> {
    let wrong = |problem: String| Err(io::Error::new(io::ErrorKind::InvalidInput, problem));
    let (kind, mode) = (about.file_type(), about.mode() & 0o777);
    if !kind.is_file() {
        let kind = match kind {
            kind if kind.is_dir() => "a folder",
            kind if kind.is_symlink() => "a symbolic link",
            kind if kind.is_char_device() || kind.is_block_device() => "a device",
            _ => "no file",
        };
        return wrong(format!("is {kind}: expected a file, or none yet"));
    }
    if about.uid() != user {
        let owner = about.uid();
        return wrong(format!(
            "belongs to user {owner}, and this process runs as user {user}: expected a file of its own; \
             remove it, `chown {user}` it if it is this server's, or name another file"
        ));
    }
    if mode & 0o022 != 0 {
        return wrong(format!(
            "other users may write to it (mode {mode:o}): expected mode 600; \
             remove it, or `chmod 600` it if its content can be trusted"
        ));
    }
    Ok(())
}

/// Whether the file is text, such as a configuration, and not a damaged snapshot.
pub(super) fn is_text(file: &Path) -> io::Result<bool> {
    let mut beginning = Vec::new();
    File::open(file)?.take(256).read_to_end(&mut beginning)?;
    Ok(beginning.iter().all(|byte| !byte.is_ascii_control() || byte.is_ascii_whitespace()))
}

/// A name that is not in use yet.
pub(super) fn free_name(file: &Path, ending: &str) -> PathBuf {
    let names = std::iter::once(ending.to_string())
        .chain((1..1000).map(|number| format!("{ending}.{number}")));
    let mut names = names.map(|ending| beside(file, &ending));
    names.find(|name| name.symlink_metadata().is_err()).unwrap_or_else(|| beside(file, ending))
}

/// A lock on the file, against other servers. The system releases it with the process.
#[derive(Debug)]
pub(crate) struct Held {
    _lock: File,
}

impl Held {
    /// Takes the lock; waits for a server that is about to stop.
    pub(super) fn take(file: &Path, patience: Duration) -> io::Result<Held> {
        let mut options = OpenOptions::new();
        let name = beside(file, ".lock");
        let lock = match options
            .write(true)
            .create(true)
            .truncate(false)
            .mode(MODE)
            .custom_flags(no_follow())
            .open(name)
        {
            // On a read-only file system no other server can write either; the error is reported
            // when the snapshot is written.
            Err(error) if error.kind() == io::ErrorKind::ReadOnlyFilesystem => {
                return Ok(Held { _lock: File::open("/dev/null")? });
            }
            lock => lock?,
        };
        let begun = Instant::now();
        while let Err(error) = flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            if error != rustix::io::Errno::WOULDBLOCK {
                return Err(error.into());
            }
            if begun.elapsed() >= patience {
                return Err(io::Error::new(
                    io::ErrorKind::ResourceBusy,
                    "another server uses it: expected a file for each",
                ));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(Held { _lock: lock })
    }
}

/// A symbolic link in place of the file could lead anywhere.
pub(super) fn no_follow() -> i32 {
    OFlags::NOFOLLOW.bits().cast_signed()
}

pub(super) fn beside(file: &Path, ending: &str) -> PathBuf {
    let mut name: OsString = file.as_os_str().to_owned();
    name.push(ending);
    name.into()
}
