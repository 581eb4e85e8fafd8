//! The log: one line per event, for people or as JSON.
//!
//! Logging never blocks. A line is put into a bounded queue, and a separate thread writes it. If
//! the reader of the log is too slow, lines are dropped and counted. Values are escaped, so that no
//! key, name or error can end a line or control a terminal.

use std::fmt::{self, Display, Write as _};
use std::io::Write;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::findings::{Finding, Severity};

/// Lines that may wait to be written.
const QUEUE: usize = 1024;
/// The longest value, in characters; what is longer is cut.
const MAX_VALUE_CHARS: usize = 512;

/// How important a line is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub enum Level {
    /// Nothing is logged.
    Off,
    /// Something does not work.
    Error,
    /// Something needs attention.
    Warn,
    /// Something happened.
    #[default]
    Info,
    /// Details, for debugging.
    Debug,
}

/// The form of lines.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Format {
    /// `2026-11-16T02:44:33.123Z info  configuration reloaded file=tidegate.yaml rules=3`
    #[default]
    Human,
    /// `{"time":"2026-11-16T02:44:33.123Z","level":"info","message":"configuration
    /// reloaded","file":"tidegate.yaml","rules":"3"}`
    Json,
}

impl Level {
    /// The word used in configuration and log lines.
    pub const fn name(self) -> &'static str {
        match self {
            Level::Off => "off",
            Level::Error => "error",
            Level::Warn => "warn",
            Level::Info => "info",
            Level::Debug => "debug",
        }
    }
}

impl Format {
    /// The word used in configuration and log lines.
    pub const fn name(self) -> &'static str {
        match self {
            Format::Human => "human",
            Format::Json => "json",
        }
    }
}

impl Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Level {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let all = [Level::Off, Level::Error, Level::Warn, Level::Info, Level::Debug];
        let found = all.into_iter().find(|level| level.name() == text);
        found.ok_or_else(|| format!("log level {text:?}: expected off, error, warn, info or debug"))
    }
}

impl FromStr for Format {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = [Format::Human, Format::Json].into_iter().find(|format| format.name() == text);
        found.ok_or_else(|| format!("log format {text:?}: expected human or json"))
    }
}

/// The log. Cheap to clone; clones write to the same place.
#[derive(Clone, Debug)]
pub struct Log {
    inner: Arc<LogState>,
}

#[derive(Debug)]
struct LogState {
    /// A [`Level`] and a [`Format`]: both can change at any time.
    level: AtomicU8,
    format: AtomicU8,
    queue: SyncSender<Job>,
    lost: AtomicU64,
}

#[derive(Debug)]
enum Job {
    Line(String),
    Flush(SyncSender<()>),
}

/// A field of a line: what it is called, and its value.
pub type Field<'a> = (&'a str, &'a dyn Display);

impl Log {
    /// A log to `out`.
    pub fn to(out: impl Write + Send + 'static, level: Level, format: Format) -> Self {
        let (queue, lines) = sync_channel(QUEUE);
        let started =
            std::thread::Builder::new().name("log".into()).spawn(move || write(&lines, out));
        // If no thread can be started, the server runs without a log.
        drop(started);
        Self::through(queue, level, format)
    }

    /// A log that drops every line.
    pub fn disabled() -> Self {
        Self::through(sync_channel(0).0, Level::Off, Format::Human)
    }

    fn through(queue: SyncSender<Job>, level: Level, format: Format) -> Self {
        let (level, format) = (AtomicU8::new(level as u8), AtomicU8::new(format as u8));
        Log { inner: Arc::new(LogState { level, format, queue, lost: AtomicU64::new(0) }) }
    }

    /// Writes lines of another level, in another form, from now on.
    pub fn set(&self, level: Level, format: Format) {
        self.inner.level.store(level as u8, Ordering::Relaxed);
        self.inner.format.store(format as u8, Ordering::Relaxed);
    }

    /// Whether lines of this level are written.
    pub fn wants(&self, level: Level) -> bool {
        level as u8 <= self.inner.level.load(Ordering::Relaxed)
    }

    /// Something does not work.
    pub fn error(&self, message: &str, fields: &[Field<'_>]) {
        self.line(Level::Error, message, fields);
    }

    /// Something needs attention.
    pub fn warn(&self, message: &str, fields: &[Field<'_>]) {
        self.line(Level::Warn, message, fields);
    }

    /// Something happened.
    pub fn info(&self, message: &str, fields: &[Field<'_>]) {
        self.line(Level::Info, message, fields);
    }

    /// Details, for debugging.
    pub fn debug(&self, message: &str, fields: &[Field<'_>]) {
        self.line(Level::Debug, message, fields);
    }

    /// Lines that were dropped since the start, because the queue was full.
    pub fn lost(&self) -> u64 {
        self.inner.lost.load(Ordering::Relaxed)
    }

    /// Waits until all lines so far are written, at most this long.
    pub fn flush(&self, at_most: Duration) {
        let (done, written) = sync_channel(1);
        if self.inner.queue.try_send(Job::Flush(done)).is_ok() {
            let _ = written.recv_timeout(at_most);
        }
    }

    /// Logs each finding in a line of its own, at the level of its severity.
    pub(crate) fn findings(&self, findings: &[Finding]) {
        for Finding { severity, place, message } in findings {
            let (level, name) = match severity {
                Severity::Error => (Level::Error, "error"),
                Severity::Warning => (Level::Warn, "warning"),
                Severity::Note => (Level::Info, "note"),
            };
            self.line(level, "configuration", &[("place", place), (name, message)]);
        }
    }

    fn line(&self, level: Level, message: &str, fields: &[Field<'_>]) {
        if !self.wants(level) {
            return;
        }
        let is_json = self.inner.format.load(Ordering::Relaxed) == Format::Json as u8;
        let format = if is_json { Format::Json } else { Format::Human };
        let line = rendered(format, SystemTime::now(), level, message, fields);
        if self.inner.queue.try_send(Job::Line(line)).is_err() {
            self.inner.lost.fetch_add(1, Ordering::Relaxed);
        }
    }
}

fn write(lines: &Receiver<Job>, mut out: impl Write) {
    for job in lines {
        match job {
            // An error means that the log was closed.
            Job::Line(line) => _ = out.write_all(line.as_bytes()),
            Job::Flush(done) => {
                let _ = out.flush();
                let _ = done.try_send(());
            }
        }
    }
}

fn rendered(
    format: Format,
    at: SystemTime,
    level: Level,
    message: &str,
    fields: &[Field<'_>],
) -> String {
    let mut line = String::with_capacity(128);
    let time = rfc3339(at);
    match format {
        Format::Human => {
            let _ = write!(line, "{time} {:<5} {}", level.name(), message.escape_debug());
            for (name, value) in fields {
                let value = cut(value);
                let plain = !value.is_empty()
                    && !value.contains([' ', '"', '=', '\\'])
                    && !value.contains(odd);
                _ = if plain {
                    write!(line, " {name}={value}")
                } else {
                    write!(line, " {name}={value:?}")
                };
            }
        }
        Format::Json => {
            let string = |text: &str| serde_json::Value::from(text).to_string();
            let _ = write!(
                line,
                r#"{{"time":"{time}","level":"{}","message":{}"#,
                level.name(),
                string(message)
            );
            for (name, value) in fields {
                let _ = write!(line, r#","{name}":{}"#, string(&cut(value)));
            }
            line.push('}');
        }
    }
    line.push('\n');
    line
}

/// Whether a character must be escaped: control characters, and those that change the direction of
/// text.
fn odd(char: char) -> bool {
    char.escape_debug().next() == Some('\\')
}

fn cut(value: &dyn Display) -> String {
    let mut text = value.to_string();
    if let Some((at, _)) = text.char_indices().nth(MAX_VALUE_CHARS) {
        text.truncate(at);
        text.push('…');
    }
    text
}

/// `2026-11-16T02:44:33.123Z`.
fn rfc3339(at: SystemTime) -> String {
    let since = at.duration_since(UNIX_EPOCH).unwrap_or_default();
    let (days, second) = (since.as_secs() / 86_400, since.as_secs() % 86_400);
    // Days since 0000-03-01, in eras of 400 years: leap days are then last in each year.
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    let (hour, minute, second, milli) =
        (second / 3600, second / 60 % 60, second % 60, since.subsec_millis());
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{milli:03}Z")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_those_of_the_calendar() {
        for (secs, expected) in [
            (0, "1970-01-01T00:00:00.000Z"),
            (951_782_400, "2000-02-29T00:00:00.000Z"),
            (1_700_000_000, "2023-11-14T22:13:20.000Z"),
            (4_107_542_399, "2100-02-28T23:59:59.000Z"),
            (4_107_542_400, "2100-03-01T00:00:00.000Z"),
        ] {
            assert_eq!(rfc3339(UNIX_EPOCH + Duration::from_secs(secs)), expected);
        }
    }

    #[test]
    fn no_value_can_end_a_line_or_control_a_terminal() {
        let at = UNIX_EPOCH;
        let nasty = "a\r\n\x1b[31m\u{202e}\"=";
        let human =
            rendered(Format::Human, at, Level::Warn, "said\n", &[("key", &nasty), ("n", &3)]);
        assert_eq!(
            human,
            "1970-01-01T00:00:00.000Z warn  said\\n key=\"a\\r\\n\\u{1b}[31m\\u{202e}\\\"=\" n=3\n"
        );
        let json = rendered(Format::Json, at, Level::Warn, "said", &[("key", &nasty)]);
        let read: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert_eq!((read["key"].as_str(), read["level"].as_str()), (Some(nasty), Some("warn")));
        assert_eq!(json.matches('\n').count(), 1);
        let long = rendered(Format::Human, at, Level::Info, "x", &[("key", &"k".repeat(10_000))]);
        assert!(long.len() < 700, "{}", long.len());
    }

    #[test]
    fn logging_never_blocks() {
        struct Stuck(Receiver<()>);
        impl Write for Stuck {
            fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
                let _ = self.0.recv();
                Ok(bytes.len())
            }
            fn flush(&mut self) -> std::io::Result<()> {
                Ok(())
            }
        }
        let (go_on, stuck) = sync_channel(0);
        let log = Log::to(Stuck(stuck), Level::Info, Format::Human);
        for _ in 0..QUEUE + 10 {
            log.info("one of many", &[]);
        }
        assert!((9..=10).contains(&log.lost()), "{}", log.lost());
        drop(go_on);
        log.flush(Duration::from_secs(10));
    }
}
