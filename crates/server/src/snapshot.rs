//! State in memory, kept in a file, so that a restart forgets little.
//!
//! A thread of its own writes it every so often, and once more at the end: beside the file, to the disk, and then in its place, so that there is always a whole one. If that does not
//! work, decisions go on as before and the old file stays; it is logged and counted.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::fs::OFlags;
use tidegate::{LoadError, Loaded, Memory, MemoryBuilder, Saved};

use crate::observe::Observer;

/// How often it is written unless told otherwise.
pub(crate) const EVERY: Duration = Duration::from_secs(1);
/// Of the time, no more than one part in so many is spent on writing.
const RARELY: u32 = 10;
/// Only for whoever runs the server: it has the secret by which keys are hashed.
const MODE: u32 = 0o600;

/// Where it is kept, and how often it is written.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Snapshot {
    pub(crate) file: PathBuf,
    pub(crate) every: Duration,
}

/// What became of the file at the start.
#[derive(Debug)]
pub(crate) enum Found {
    Nothing,
    Loaded(Loaded),
    /// It cannot be read; it is now called so.
    Unreadable(LoadError, PathBuf),
}

impl Found {
    /// Says it.
    pub(crate) fn tell(&self, settings: &Snapshot, observer: &Observer) {
        let (file, log) = (settings.file.display(), observer.log());
        match self {
            Found::Nothing => log.info("no snapshot yet: the store is empty", &[("file", &file)]),
            Found::Loaded(loaded) if loaded.is_whole() => {
                let fields: [(&str, &dyn std::fmt::Display); 3] =
                    [("file", &file), ("keys", &loaded.keys), ("idle", &loaded.idle)];
                log.info("the store is as it was saved", &fields);
            }
            Found::Loaded(loaded) => {
                let fields: [(&str, &dyn std::fmt::Display); 5] = [
                    ("file", &file),
                    ("keys", &loaded.keys),
                    ("damaged_blocks", &loaded.damaged_blocks),
                    ("lost", &loaded.lost),
                    ("truncated", &loaded.truncated),
                ];
                log.warn("only a part of the snapshot could be read", &fields);
            }
            Found::Unreadable(error, kept) => {
                let kept = kept.display();
                let fields: [(&str, &dyn std::fmt::Display); 3] =
                    [("file", &file), ("problem", error), ("kept_as", &kept)];
                log.warn("the snapshot cannot be read: the store is empty", &fields);
            }
        }
    }
}

/// The store of a file, as much of it as can be read; an empty one if there is no file, or nothing in it that can be.
///
/// # Errors
/// If there is something that is not a file of ours to read and to replace: that is a mistake in the configuration, and nothing is overwritten.
pub(crate) fn open(settings: &Snapshot, builder: MemoryBuilder) -> io::Result<(Memory, Found)> {
    let file = OpenOptions::new().read(true).custom_flags(no_follow()).open(&settings.file);
    let mut file = match file {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok((builder.build(), Found::Nothing)),
        file => file?,
    };
    let about = file.metadata()?;
    if !about.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "expected a file"));
    }
    if about.len() == 0 {
        return Ok((builder.build(), Found::Nothing));
    }
    match builder.clone().load(&mut file) {
        Ok((memory, loaded)) => Ok((memory, Found::Loaded(loaded))),
        Err(LoadError::Io(error)) => Err(error),
        Err(error) => {
            // Whatever it is, somebody may want it: it is not written over.
            let kept = beside(&settings.file, ".unreadable");
            fs::rename(&settings.file, &kept)?;
            Ok((builder.build(), Found::Unreadable(error, kept)))
        }
    }
}

/// A symbolic link in its place could lead anywhere.
fn no_follow() -> i32 {
    OFlags::NOFOLLOW.bits().cast_signed()
}

fn beside(file: &Path, ending: &str) -> PathBuf {
    let mut name: OsString = file.as_os_str().to_owned();
    name.push(ending);
    name.into()
}

/// Writes a whole file, or none.
fn save(memory: &Memory, file: &Path) -> io::Result<Saved> {
    let new = beside(file, ".new");
    let written = write(memory, &new).and_then(|saved| {
        fs::rename(&new, file)?;
        let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        File::open(folder)?.sync_all()?;
        Ok(saved)
    });
    if written.is_err() {
        let _ = fs::remove_file(&new);
    }
    written
}

fn write(memory: &Memory, new: &Path) -> io::Result<Saved> {
    let mut options = OpenOptions::new();
    let mut output = options.write(true).create(true).truncate(true).mode(MODE).custom_flags(no_follow()).open(new)?;
    // One that was left over may be anybody's to read.
    output.set_permissions(fs::Permissions::from_mode(MODE))?;
    let saved = memory.save(&mut output)?;
    output.sync_all()?;
    Ok(saved)
}

/// Writes until it is told to stop.
#[derive(Debug)]
pub(crate) struct Saver {
    stop: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Saver {
    pub(crate) fn start(memory: Memory, settings: Snapshot, observer: Observer) -> io::Result<Self> {
        let (stop, stopped) = mpsc::channel::<()>();
        let work = move || {
            let mut failing = false;
            // At once for the first time: whoever looks at the log after a start knows whether it works.
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
                        let fields: [(&str, &dyn std::fmt::Display); 2] = [("file", &file), ("problem", error)];
                        observer.log().error("the snapshot cannot be written: the old one stays", &fields);
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

    /// Writes once more. Whoever gives up waiting leaves the file of before.
    pub(crate) async fn finish(mut self, patience: Duration) {
        self.stop = None;
        let Some(thread) = self.thread.take() else { return };
        let _ = tokio::time::timeout(patience, tokio::task::spawn_blocking(move || thread.join())).await;
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

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

    #[test]
    fn what_is_saved_is_found_and_only_ours_to_read() {
        let folder = tempfile::tempdir().unwrap();
        let settings = settings(folder.path());
        let (memory, found) = open(&settings, Memory::builder()).unwrap();
        assert!(memory.is_empty() && matches!(found, Found::Nothing));
        let (memory, limit) = some();
        // One that was left over, which everybody may read.
        fs::write(beside(&settings.file, ".new"), "rest").unwrap();
        for _ in 0..2 {
            assert_eq!(save(&memory, &settings.file).unwrap().keys, 1);
        }
        assert_eq!(fs::metadata(&settings.file).unwrap().permissions().mode() & 0o777, MODE);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        let (memory, found) = open(&settings, Memory::builder()).unwrap();
        assert!(matches!(found, Found::Loaded(loaded) if loaded.is_whole() && loaded.keys == 1), "{found:?}");
        assert_eq!(memory.check("k", &limit, 0).remaining, 3);
    }

    #[test]
    fn what_cannot_be_read_is_kept_and_the_store_is_empty() {
        let (memory, _) = some();
        let mut file = Vec::new();
        memory.save(&mut file).unwrap();
        let mut later = file.clone();
        later[8] = 9;
        for text in [&b"rules:\n  - name: a\n"[..], &later, &file[..30]] {
            let folder = tempfile::tempdir().unwrap();
            let settings = settings(folder.path());
            fs::write(&settings.file, text).unwrap();
            let (memory, found) = open(&settings, Memory::builder()).unwrap();
            let Found::Unreadable(_, kept) = found else { panic!("{found:?}") };
            assert!(memory.is_empty() && !settings.file.exists());
            assert_eq!(fs::read(kept).unwrap(), text);
        }
        let folder = tempfile::tempdir().unwrap();
        let settings = settings(folder.path());
        fs::write(&settings.file, &file[..file.len() - 1]).unwrap();
        let (memory, found) = open(&settings, Memory::builder()).unwrap();
        assert!(matches!(found, Found::Loaded(loaded) if loaded.truncated), "{found:?}");
        assert_eq!(memory.len(), 1);
        fs::write(&settings.file, "").unwrap();
        assert!(matches!(open(&settings, Memory::builder()).unwrap().1, Found::Nothing));
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
        symlink(&target, beside(&settings.file, ".new")).unwrap();
        assert!(save(&memory, &settings.file).is_err());
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
