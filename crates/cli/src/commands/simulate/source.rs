//! The source of a simulation's requests: a file, standard input, or a generator.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

use anyhow::{Context, Result, anyhow, bail};
use tidegate::store::MAX_KEY_BYTES;
use tidegate_trace::Line;

use super::generate::Generator;
use super::{Event, Scene};
use crate::args::{self, Generated, LimitText};

/// The longest line; a longer one is an error, which bounds memory.
const MAX_LINE: u64 = 64 * 1024;
/// The number of requests or bytes from which a trace is long.
const LONG_REQUESTS: u64 = 500_000;
const LONG_BYTES: u64 = 8 << 20;
/// The most `# limit:` lines a trace may begin with.
const MAX_LIMIT_LINES: usize = 64;

pub(super) enum Source {
    Trace(Trace),
    Generated(Generator),
}

impl Source {
    pub(super) fn open(path: &Path) -> Result<Self> {
        if path.as_os_str() == "-" {
            return Ok(Source::Trace(Trace::new(
                "standard input".into(),
                Box::new(io::stdin().lock()),
                None,
            )));
        }
        let opened = File::open(path).and_then(|file| Ok((file.metadata()?, file)));
        let (metadata, file) =
            opened.with_context(|| format!("could not open {}", path.display()))?;
        if metadata.is_dir() {
            bail!("could not open {}: it is a directory", path.display());
        }
        let reader = BufReader::with_capacity(64 * 1024, file);
        Ok(Source::Trace(Trace::new(
            path.display().to_string(),
            Box::new(reader),
            Some(metadata.len()),
        )))
    }

    pub(super) fn generate(args: &Generated) -> Self {
        Source::Generated(Generator::new(args))
    }

    /// The limits a trace names before its first request.
    pub(super) fn limits(&mut self) -> Result<Vec<LimitText>> {
        match self {
            Source::Trace(trace) => trace.limits(),
            Source::Generated(_) => Ok(Vec::new()),
        }
    }

    /// The next request.
    pub(super) fn next(&mut self) -> Result<Option<&Event>> {
        match self {
            Source::Trace(trace) => trace.next(),
            Source::Generated(generator) => Ok(generator.next()),
        }
    }

    /// The length in bytes or requests; `None` if it is unknown or short.
    pub(super) fn length(&self) -> Option<u64> {
        match self {
            Source::Trace(trace) => trace.bytes.filter(|bytes| *bytes >= LONG_BYTES),
            Source::Generated(generator) => {
                Some(generator.expected()).filter(|requests| *requests >= LONG_REQUESTS)
            }
        }
    }

    /// How much of the length was read or generated.
    pub(super) fn position(&self) -> u64 {
        match self {
            Source::Trace(trace) => trace.bytes_read,
            Source::Generated(generator) => generator.made(),
        }
    }

    /// What it is.
    pub(super) fn scene(&self) -> Scene {
        match self {
            Source::Trace(trace) => Scene { title: trace.name.clone(), end_us: None },
            Source::Generated(generator) => generator.scene(),
        }
    }
}

/// A trace that is read line by line.
pub(super) struct Trace {
    name: String,
    reader: Box<dyn BufRead>,
    /// The length of the file, if it is one.
    bytes: Option<u64>,
    /// The bytes read so far.
    bytes_read: u64,
    line: Vec<u8>,
    number: u64,
    event: Event,
    /// Whether `event` was read ahead and is still to be returned.
    ahead: bool,
    /// Whether the limits come from its own `# limit:` lines.
    names_limits: bool,
}

impl Trace {
    fn new(name: String, reader: Box<dyn BufRead>, bytes: Option<u64>) -> Self {
        let event = Event {
            number: 0,
            at_us: 0,
            key: String::new(),
            cost: 0,
            op: tidegate_core::Op::Check,
            expect: None,
        };
        Trace {
            name,
            reader,
            bytes,
            bytes_read: 0,
            line: Vec::new(),
            number: 0,
            event,
            ahead: false,
            names_limits: false,
        }
    }

    fn limits(&mut self) -> Result<Vec<LimitText>> {
        self.names_limits = true;
        let mut found = Vec::new();
        while let Some(header) = self.read()? {
            let Some((text, column)) = header else {
                self.ahead = true;
                break;
            };
            if found.len() == MAX_LIMIT_LINES {
                bail!(
                    "{}: line {}: expected at most {MAX_LIMIT_LINES} `# limit:` lines",
                    self.name,
                    self.number
                );
            }
            let limit = args::limit(&text);
            found.push(limit.map_err(|error| {
                anyhow!(
                    "{}: line {}: the limit that begins at column {column}: {error}",
                    self.name,
                    self.number
                )
            })?);
        }
        Ok(found)
    }

    fn next(&mut self) -> Result<Option<&Event>> {
        if std::mem::take(&mut self.ahead) {
            return Ok(Some(&self.event));
        }
        loop {
            match self.read()? {
                None => return Ok(None),
                Some(None) => return Ok(Some(&self.event)),
                Some(Some(_)) if self.names_limits => bail!(
                    "{}: line {}: expected every `# limit:` line before the first request",
                    self.name,
                    self.number
                ),
                Some(Some(_)) => {} // --limit says it: to us this is a comment
            }
        }
    }

    /// Reads up to the next line with content. Returns the text and column of a `# limit:` line;
    /// a request is in `event` instead.
    fn read(&mut self) -> Result<Option<Option<(String, usize)>>> {
        loop {
            self.line.clear();
            let mut limited = (&mut *self.reader).take(MAX_LINE);
            let read = limited
                .read_until(b'\n', &mut self.line)
                .with_context(|| format!("could not read {}", self.name))?;
            if read == 0 {
                return Ok(None);
            }
            self.number += 1;
            self.bytes_read += read as u64;
            let (name, number) = (&self.name, self.number);
            let complete = self.line.ends_with(b"\n");
            if !complete && read as u64 == MAX_LINE {
                bail!("{name}: line {number}: longer than {MAX_LINE} bytes");
            }
            let text = str::from_utf8(&self.line).map_err(|error| {
                anyhow!(
                    "{name}: line {number}: expected UTF-8, found other bytes at byte {}",
                    error.valid_up_to() + 1
                )
            })?;
            let text = if number == 1 { text.trim_start_matches('\u{feff}') } else { text };
            match Line::parse(text, number).map_err(|error| anyhow!("{name}: {error}"))? {
                Line::Comment => {}
                Line::Limit { text, column } => return Ok(Some(Some((text.to_owned(), column)))),
                Line::Event(event) => {
                    if event.key.len() > MAX_KEY_BYTES {
                        let bytes = event.key.len();
                        bail!(
                            "{name}: line {number}: a key of {bytes} bytes: expected at most {MAX_KEY_BYTES}"
                        );
                    }
                    self.event.number = number;
                    self.event.at_us = event.at.as_micros();
                    self.event.key.clear();
                    self.event.key.push_str(event.key);
                    (self.event.cost, self.event.op, self.event.expect) =
                        (event.cost, event.op, event.expect);
                    return Ok(Some(None));
                }
            }
        }
    }
}
