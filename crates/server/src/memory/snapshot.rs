//! Snapshots: the store in memory in a file, so that a restart loses little.
//!
//! A separate thread writes the file periodically and once more at the end: to a temporary file
//! beside it, which is synced and renamed, so that a complete file is always there. A failure is
//! logged and counted; the old file stays, and decisions are not affected.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::fs::OFlags;
use tidegate::memory::{LoadError, Loaded, Saved};
use tidegate::{Memory, MemoryBuilder};

use super::file::{Held, MODE, beside, free_name, is_text, look_at, no_follow, usable};
use crate::observe::Observer;

/// The default period of snapshots.
pub(crate) const EVERY: Duration = Duration::from_secs(1);
/// Writing takes at most one part of the time in this many.
const RARELY: u32 = 10;
/// How long to wait for another server to stop, which may take as long as its last requests.
const PATIENCE: Duration = Duration::from_secs(11);
/// The snapshot file, and the period in which it is written.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Snapshot {
    pub(crate) file: PathBuf,
    pub(crate) every: Duration,
}

/// What was read from the file at the start.
#[derive(Debug)]
pub(crate) enum Restored {
    Nothing,
    Loaded(Loaded),
    /// A part of the file, which is kept under this name.
    Partly(Loaded, PathBuf),
    /// An unreadable file, which is kept under this name.
    Unreadable(LoadError, PathBuf),
}

impl Restored {
    /// Logs it.
    pub(crate) fn tell(&self, settings: &Snapshot, observer: &Observer) {
        let (file, log) = (settings.file.display(), observer.log());
        match self {
            Restored::Nothing => {
                log.info("no snapshot yet: the store is empty", &[("file", &file)])
            }
            Restored::Loaded(loaded) => {
                let fields: [(&str, &dyn std::fmt::Display); 3] =
                    [("file", &file), ("keys", &loaded.keys), ("idle", &loaded.idle)];
                log.info("the store is as it was saved", &fields);
                warn_of_rebased(loaded, observer);
            }
            Restored::Partly(loaded, kept) => {
                let kept = kept.display();
                let fields: [(&str, &dyn std::fmt::Display); 6] = [
                    ("file", &file),
                    ("keys", &loaded.keys),
                    ("damaged_blocks", &loaded.damaged_blocks),
                    ("lost", &loaded.lost),
                    ("truncated", &loaded.truncated),
                    ("kept_as", &kept),
                ];
                log.warn("only a part of the snapshot could be read", &fields);
                warn_of_rebased(loaded, observer);
            }
            Restored::Unreadable(error, kept) => {
                let kept = kept.display();
                let fields: [(&str, &dyn std::fmt::Display); 3] =
                    [("file", &file), ("problem", error), ("kept_as", &kept)];
                log.warn("the snapshot cannot be read: the store is empty", &fields);
            }
        }
    }
}

fn warn_of_rebased(loaded: &Loaded, observer: &Observer) {
    if loaded.rebased > 0 {
        let meaning = "what was used stays used and drains from now on";
        let fields: [(&str, &dyn std::fmt::Display); 2] =
            [("keys", &loaded.rebased), ("meaning", &meaning)];
        observer.log().warn("the machine's clock went back since the snapshot was saved", &fields);
    }
}

/// Loads the store from its file, as much of it as can be read; it is empty if there is no file, or
/// none that can be read. Other servers cannot use the file until the [`Held`] is dropped.
///
/// # Errors
/// If the file cannot be a snapshot of this server or another server uses it: that is a mistake in
/// the configuration, and nothing is overwritten.
pub(crate) fn open(
    settings: &Snapshot,
    builder: MemoryBuilder,
) -> io::Result<(Memory, Restored, Held)> {
    // Before the lock file is made: nothing is written beside something that is not a file.
    look_at(&settings.file)?;
    let held = Held::take(&settings.file, PATIENCE)?;
    // Do not wait for the writer of a pipe.
    let flags = no_follow() | OFlags::NONBLOCK.bits().cast_signed();
    let file = OpenOptions::new().read(true).custom_flags(flags).open(&settings.file);
    let mut file = match file {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Ok((builder.build(), Restored::Nothing, held));
        }
        file => file?,
    };
    // Again, for the file that was really opened.
    let about = file.metadata()?;
    usable(&about, rustix::process::geteuid().as_raw())?;
    if about.len() == 0 {
        return Ok((builder.build(), Restored::Nothing, held));
    }
    match builder.clone().load(&mut file.by_ref().take(about.len())) {
        Ok((memory, loaded)) if loaded.is_complete() => {
            Ok((memory, Restored::Loaded(loaded), held))
        }
        Ok((memory, loaded)) => {
            // Other tools might read more of it: it is not overwritten.
            let kept = free_name(&settings.file, ".partly");
            // Rename it where the file system has no hard links.
            fs::hard_link(&settings.file, &kept).or_else(|_| fs::rename(&settings.file, &kept))?;
            Ok((memory, Restored::Partly(loaded, kept), held))
        }
        Err(LoadError::Io(error)) => Err(error),
        Err(LoadError::NotASnapshot) if is_text(&settings.file)? => Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "is a text: expected a snapshot, or no file yet",
        )),
        Err(error) => {
            // It may be of value to its owner: it is not overwritten.
            let kept = free_name(&settings.file, ".unreadable");
            fs::rename(&settings.file, &kept)?;
            Ok((builder.build(), Restored::Unreadable(error, kept), held))
        }
    }
}

/// Writes the complete file, or leaves the old one.
fn save(memory: &Memory, file: &Path) -> io::Result<Saved> {
    let new = beside(file, ".new");
    let written = write(memory, &new).and_then(|saved| {
        fs::rename(&new, file)?;
        let folder =
            file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        File::open(folder)?.sync_all()?;
        Ok(saved)
    });
    if written.is_err() {
        let _ = fs::remove_file(&new);
    }
    written
}

fn write(memory: &Memory, new: &Path) -> io::Result<Saved> {
    // A file that was left over may be open elsewhere or readable by others.
    match fs::remove_file(new) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut output = OpenOptions::new().write(true).create_new(true).mode(MODE).open(new)?;
    let saved = memory.save(&mut output)?;
    output.sync_all()?;
    Ok(saved)
}

/// The thread that writes snapshots until it is stopped.
#[derive(Debug)]
pub(crate) struct Saver {
    stop: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Saver {
    /// Starts the thread, which holds the lock until its last snapshot.
    pub(crate) fn start(
        memory: Memory,
        settings: Snapshot,
        held: Held,
        observer: Observer,
    ) -> io::Result<Self> {
        let (stop, stopped) = mpsc::channel::<()>();
        let work = move || {
            let _held = held;
            let mut failing = false;
            // The first one immediately, so that the log of the start has its errors.
            let mut pause = Duration::ZERO;
            loop {
                let is_last = stopped.recv_timeout(pause) != Err(RecvTimeoutError::Timeout);
                let begun = Instant::now();
                let saved = save(&memory, &settings.file);
                let took = begun.elapsed();
                observer.metrics().saved(saved.as_ref().ok().map(|saved| saved.bytes), took);
                let file = settings.file.display();
                match &saved {
                    Err(error) if !failing || is_last => {
                        let fields: [(&str, &dyn std::fmt::Display); 2] =
                            [("file", &file), ("problem", error)];
                        observer
                            .log()
                            .error("the snapshot cannot be written: the old one stays", &fields);
                    }
                    Ok(saved) if failing || is_last => {
                        let fields: [(&str, &dyn std::fmt::Display); 3] =
                            [("file", &file), ("keys", &saved.keys), ("bytes", &saved.bytes)];
                        observer.log().info("the snapshot is written", &fields);
                    }
                    _ => {}
                }
                failing = saved.is_err();
                pause = settings.every.max(took.saturating_mul(RARELY));
                if is_last {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name("snapshot".into()).spawn(work)?;
        Ok(Saver { stop: Some(stop), thread: Some(thread) })
    }

    /// Writes the last snapshot; after `patience`, the one before stays.
    pub(crate) async fn finish(mut self, patience: Duration, observer: &Observer) {
        self.stop = None;
        let Some(thread) = self.thread.take() else { return };
        let last = tokio::task::spawn_blocking(move || thread.join());
        if tokio::time::timeout(patience, last).await.is_err() {
            let waited = patience.as_millis();
            observer.log().error(
                "the last snapshot was not written in time: that of before stays",
                &[("waited_ms", &waited)],
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

    use tidegate::Limit;

    use super::*;

    fn settings(folder: &Path) -> Snapshot {
        Snapshot { file: folder.join("state"), every: EVERY }
    }

    fn some() -> (Memory, Limit) {
        let (memory, limit) = (Memory::new(), "5/h".parse().unwrap());
        assert_eq!(memory.check("k", &limit, 2).remaining, 3);
        (memory, limit)
    }

    /// Writes a file as a snapshot is written, whatever this process lets others do otherwise.
    fn put(file: &Path, bytes: &[u8]) {
        fs::write(file, bytes).unwrap();
        fs::set_permissions(file, PermissionsExt::from_mode(MODE)).unwrap();
    }

    #[test]
    fn what_others_can_have_written_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let settings = settings(folder.path());
        let (memory, _) = some();
        save(&memory, &settings.file).unwrap();
        let before = fs::read(&settings.file).unwrap();
        for (mode, problem) in [(0o620, "mode 620"), (0o602, "mode 602"), (0o666, "mode 666")] {
            fs::set_permissions(&settings.file, PermissionsExt::from_mode(mode)).unwrap();
            let error = open(&settings, Memory::builder()).unwrap_err().to_string();
            assert!(error.contains(problem) && error.contains("`chmod 600` it"), "{error}");
        }
        assert_eq!(fs::read(&settings.file).unwrap(), before, "it is left as it is");
        // As those of before were, which others may read; and as it should be.
        for mode in [0o644, MODE] {
            fs::set_permissions(&settings.file, PermissionsExt::from_mode(mode)).unwrap();
            assert!(matches!(open(&settings, Memory::builder()).unwrap().1, Restored::Loaded(_)));
        }
        let about = fs::metadata(&settings.file).unwrap();
        let error = usable(&about, about.uid() + 1).unwrap_err().to_string();
        let expected = format!(
            "belongs to user {}, and this process runs as user {}",
            about.uid(),
            about.uid() + 1
        );
        assert!(error.starts_with(&expected) && error.contains("`chown "), "{error}");
    }

    #[test]
    fn nothing_is_made_beside_what_is_no_file() {
        for device in ["/dev/null", "/dev/zero"] {
            let settings = Snapshot { file: device.into(), every: EVERY };
            let error = open(&settings, Memory::builder()).unwrap_err().to_string();
            assert_eq!(error, "is a device: expected a file, or none yet");
            assert!(!beside(&settings.file, ".lock").exists(), "{device}");
        }
        let folder = tempfile::tempdir().unwrap();
        let settings = settings(folder.path());
        fs::create_dir(&settings.file).unwrap();
        let error = open(&settings, Memory::builder()).unwrap_err().to_string();
        assert_eq!(error, "is a folder: expected a file, or none yet");
        fs::remove_dir(&settings.file).unwrap();
        symlink("/dev/zero", &settings.file).unwrap();
        let error = open(&settings, Memory::builder()).unwrap_err().to_string();
        assert_eq!(error, "is a symbolic link: expected a file, or none yet");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "there is no lock");
    }

    #[test]
    fn what_is_saved_is_found_and_only_ours_to_read() {
        let folder = tempfile::tempdir().unwrap();
        let settings = settings(folder.path());
        let (memory, found, _) = open(&settings, Memory::builder()).unwrap();
        assert!(memory.is_empty() && matches!(found, Restored::Nothing));
        let (memory, limit) = some();
        // A file that was left over, readable by other users.
        fs::write(beside(&settings.file, ".new"), "rest").unwrap();
        for _ in 0..2 {
            assert_eq!(save(&memory, &settings.file).unwrap().keys, 1);
        }
        assert_eq!(fs::metadata(&settings.file).unwrap().permissions().mode() & 0o777, MODE);
        // With the owner that the message names.
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
        let (memory, found, _) = open(&settings, Memory::builder()).unwrap();
        assert!(
            matches!(found, Restored::Loaded(loaded) if loaded.is_complete() && loaded.keys == 1),
            "{found:?}"
        );
        assert_eq!(memory.check("k", &limit, 0).remaining, 3);
    }

    #[test]
    fn what_cannot_be_read_is_kept_and_the_store_is_empty() {
        let (memory, _) = some();
        let mut file = Vec::new();
        memory.save(&mut file).unwrap();
        let mut later = file.clone();
        later[8] = 9;
        for text in [&b"\x7fELF and so on"[..], &later, &file[..30]] {
            let folder = tempfile::tempdir().unwrap();
            let settings = settings(folder.path());
            put(&settings.file, text);
            // Twice: what was kept before stays, too.
            for ending in ["state.unreadable", "state.unreadable.1"] {
                put(&settings.file, text);
                let (memory, found, _) = open(&settings, Memory::builder()).unwrap();
                let Restored::Unreadable(_, kept) = found else { panic!("{found:?}") };
                assert!(memory.is_empty() && !settings.file.exists() && kept.ends_with(ending));
                assert_eq!(fs::read(kept).unwrap(), text);
            }
        }
        let folder = tempfile::tempdir().unwrap();
        let settings = settings(folder.path());
        put(&settings.file, &file[..file.len() - 1]);
        let (memory, found, _) = open(&settings, Memory::builder()).unwrap();
        let Restored::Partly(Loaded { truncated: true, .. }, kept) = found else {
            panic!("{found:?}")
        };
        assert_eq!(memory.len(), 1);
        // What comes in its place leaves it as it was.
        save(&memory, &settings.file).unwrap();
        assert_eq!(fs::read(kept).unwrap(), file[..file.len() - 1]);
        put(&settings.file, b"");
        assert!(matches!(open(&settings, Memory::builder()).unwrap().1, Restored::Nothing));
    }

    /// Saved an hour from now, because the machine's clock went back: what was used stays used.
    #[test]
    fn what_was_saved_in_the_future_is_loaded() {
        let folder = tempfile::tempdir().unwrap();
        let settings = settings(folder.path());
        let clock = tidegate::ManualClock::new();
        clock.set(tidegate::SystemClock::new().now().after(Duration::from_secs(3600)));
        let limit: tidegate::Limit = "5/h".parse().unwrap();
        let memory = Memory::builder().clock(clock).build();
        assert!(memory.check("k", &limit, 3).allowed);
        save(&memory, &settings.file).unwrap();
        let (memory, found, _) = open(&settings, Memory::builder()).unwrap();
        assert!(
            matches!(found, Restored::Loaded(loaded) if (loaded.keys, loaded.rebased) == (1, 1)),
            "{found:?}"
        );
        assert_eq!(memory.check("k", &limit, 0).remaining, 2);
    }

    #[test]
    fn a_text_file_is_not_touched() {
        let folder = tempfile::tempdir().unwrap();
        let settings = settings(folder.path());
        put(&settings.file, b"rules:\n  - name: a\n");
        let error = open(&settings, Memory::builder()).unwrap_err();
        assert_eq!(error.to_string(), "is a text: expected a snapshot, or no file yet");
        assert_eq!(fs::read_to_string(&settings.file).unwrap(), "rules:\n  - name: a\n");
    }

    #[test]
    fn a_file_is_one_servers_at_a_time() {
        let folder = tempfile::tempdir().unwrap();
        let settings = settings(folder.path());
        let (_, _, held) = open(&settings, Memory::builder()).unwrap();
        let error = Held::take(&settings.file, Duration::ZERO).unwrap_err();
        assert_eq!(error.to_string(), "another server uses it: expected a file for each");
        drop(held);
        Held::take(&settings.file, Duration::ZERO).unwrap();
    }

    #[test]
    fn links_and_folders_in_its_place_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let settings = settings(folder.path());
        let (memory, _) = some();
        let target = folder.path().join("precious");
        fs::write(&target, "precious").unwrap();
        symlink(&target, &settings.file).unwrap();
        assert!(open(&settings, Memory::builder()).is_err());
        // One beside it is replaced, and so is the link itself: where they lead to is not touched.
        symlink(&target, beside(&settings.file, ".new")).unwrap();
        assert_eq!(save(&memory, &settings.file).unwrap().keys, 1);
        assert_eq!(fs::read_to_string(&target).unwrap(), "precious");
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("state")).unwrap();
        assert!(open(&self::settings(folder.path()), Memory::builder()).is_err());
    }

    /// A folder that is gone, and a disk without room: the old file stays.
    #[test]
    fn when_it_cannot_be_written_the_old_one_stays() {
        let folder = tempfile::tempdir().unwrap();
        let settings = settings(folder.path());
        let (memory, limit) = some();
        save(&memory, &settings.file).unwrap();
        let before = fs::read(&settings.file).unwrap();
        let _ = memory.check("another", &limit, 1);
        // Nothing can be made where a folder has the name.
        fs::create_dir(beside(&settings.file, ".new")).unwrap();
        assert!(save(&memory, &settings.file).is_err());
        assert_eq!(fs::read(&settings.file).unwrap(), before);
        fs::remove_dir(beside(&settings.file, ".new")).unwrap();
        assert_eq!(save(&memory, &settings.file).unwrap().keys, 2);
        // The device that is always full.
        let mut full = OpenOptions::new().write(true).open("/dev/full").unwrap();
        assert_eq!(memory.save(&mut full).unwrap_err().kind(), io::ErrorKind::StorageFull);
        assert!(save(&memory, &folder.path().join("gone/state")).is_err());
    }
}
