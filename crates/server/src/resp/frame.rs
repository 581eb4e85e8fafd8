//! Parses commands: RESP arrays of strings, and lines as people type them. Memory is allocated only
//! for bytes that arrived, and only the words of a typed line are copied.

use tidegate::store::MAX_KEY_BYTES;

/// The most words of a command.
pub const MAX_WORDS: usize = 64;
/// The largest command, in bytes.
pub const MAX_COMMAND_BYTES: usize = 128 << 10;
/// The largest command of an unauthenticated connection, in bytes.
pub const MAX_UNKNOWN_BYTES: usize = 16 << 10;
/// The longest line: a typed command, or a length.
pub const MAX_LINE_BYTES: usize = 4 << 10;

/// The longest number before a length or a count, in bytes.
const MAX_NUMBER_BYTES: usize = 32;

/// The words of a command, where they are in the bytes that were read.
pub(crate) type Words<'a> = Vec<&'a [u8]>;

/// The next item in the bytes.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Parsed<'a> {
    /// A command and how many bytes it takes. Without words, it is empty and has no answer.
    Command(usize),
    /// A typed line, still to be [`split`], and how many bytes it takes.
    Line(&'a [u8], usize),
    /// More bytes are needed.
    Unfinished,
}

/// Why bytes are not a command. The connection gets the error and is closed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum FrameError {
    #[error("Protocol error: too big mbulk count string")]
    LongNumber,
    #[error("Protocol error: too big inline request")]
    LongLine,
    #[error("Protocol error: invalid multibulk length")]
    Words,
    #[error("Protocol error: expected '$', got '{0}'")]
    NotAString(char),
    #[error("Protocol error: invalid bulk length")]
    Length,
    #[error("Protocol error: a command of more than {0} bytes")]
    TooLarge(usize),
    #[error("Protocol error: unbalanced quotes in request")]
    Quotes,
    #[error("Protocol error: this is not HTTP")]
    Http,
}

/// Parses one command at the front of `bytes` and appends its words to `words`.
pub(crate) fn next<'a>(
    bytes: &'a [u8],
    words: &mut Words<'a>,
    max_bytes: usize,
) -> Result<Parsed<'a>, FrameError> {
    match bytes.first() {
        None => Ok(Parsed::Unfinished),
        Some(b'*') => array(bytes, words, max_bytes),
        Some(_) => line(bytes),
    }
}

/// The last command of a connection and where its words are. Most commands differ from the one
/// before only in their key; such a command needs no parsing.
#[derive(Debug, Default)]
pub(crate) struct LastCommand {
    bytes: Vec<u8>,
    /// The ranges of its words; the second word is the key.
    words: Vec<(usize, usize)>,
    /// How many commands were remembered.
    shape: Shape,
}

/// A number shared by commands that differ only in their keys. [`NO_SHAPE`] matches none.
pub(crate) type Shape = u64;
pub(crate) const NO_SHAPE: Shape = 0;

/// The largest command that is remembered, in bytes and in words.
const MAX_KNOWN: (usize, usize) = (256, 8);
/// The longest key that is recognized.
const MAX_KNOWN_KEY: usize = MAX_KEY_BYTES;

impl LastCommand {
    /// Remembers the command in the first `taken` bytes. Forgets instead if it has no key or is
    /// large.
    pub(crate) fn remember<'a>(&mut self, bytes: &'a [u8], taken: usize, words: &[&'a [u8]]) {
        self.bytes.clear();
        self.words.clear();
        if taken > MAX_KNOWN.0 || !(2..=MAX_KNOWN.1).contains(&words.len()) {
            return;
        }
        self.shape += 1;
        self.bytes.extend_from_slice(&bytes[..taken]);
        self.words.extend(words.iter().map(|word| {
            let from = word.as_ptr().addr() - bytes.as_ptr().addr();
            (from, from + word.len())
        }));
    }

    /// Forgets the last command.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn forget(&mut self) {
        self.bytes.clear();
        self.words.clear();
    }

    /// The shape of the last command.
    pub(crate) fn shape(&self) -> Shape {
        if self.words.is_empty() { NO_SHAPE } else { self.shape }
    }

    /// The words of the last command.
    pub(crate) fn words(&self) -> Words<'_> {
        self.words.iter().map(|(from, to)| &self.bytes[*from..*to]).collect()
    }

    /// The key of the command at the front of `bytes`, if only its key differs from the last
    /// command.
    #[inline]
    pub(crate) fn key<'a>(&self, bytes: &'a [u8]) -> Option<FoundKey<'a>> {
        let (from, to) = *self.words.get(1)?;
        // Fast check: most keys have the length of the one before.
        match bytes.get(..self.bytes.len()) {
            Some(own) if own[..from] == self.bytes[..from] && own[to..] == self.bytes[to..] => {
                Some(FoundKey { bytes: &own[from..to], taken: own.len() })
            }
            _ => self.key_of_other_length(bytes),
        }
    }

    #[inline(never)]
    fn key_of_other_length<'a>(&self, bytes: &'a [u8]) -> Option<FoundKey<'a>> {
        let (name, key) = (self.words.first()?, self.words.get(1)?);
        // The name is followed by CRLF, `$`, and the length of the key.
        let length_at = name.1 + 3;
        if bytes.get(..length_at)? != &self.bytes[..length_at] {
            return None;
        }
        let (length, from) = number(bytes, length_at, FrameError::Length).ok()??;
        let length = usize::try_from(length).ok().filter(|length| *length <= MAX_KNOWN_KEY)?;
        let (to, rest) = (from + length, &self.bytes[key.1..]);
        let is_same = bytes.get(to..to + rest.len())? == rest;
        is_same.then(|| FoundKey { bytes: &bytes[from..to], taken: to + rest.len() })
    }
}

/// The key of a command that differs from the last one only in its key.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FoundKey<'a> {
    pub(crate) bytes: &'a [u8],
    /// How many bytes the command takes.
    pub(crate) taken: usize,
}

fn array<'a>(
    bytes: &'a [u8],
    words: &mut Words<'a>,
    max_bytes: usize,
) -> Result<Parsed<'a>, FrameError> {
    let Some((count, mut at)) = number(bytes, 1, FrameError::Words)? else {
        return Ok(Parsed::Unfinished);
    };
    if count <= 0 {
        return if count == 0 || count == -1 {
            Ok(Parsed::Command(at))
        } else {
            Err(FrameError::Words)
        };
    }
    let count =
        usize::try_from(count).ok().filter(|count| *count <= MAX_WORDS).ok_or(FrameError::Words)?;
    for _ in 0..count {
        match bytes.get(at) {
            None => return Ok(Parsed::Unfinished),
            Some(b'$') => {}
            Some(other) => return Err(FrameError::NotAString(printable(*other))),
        }
        let Some((length, from)) = number(bytes, at + 1, FrameError::Length)? else {
            return Ok(Parsed::Unfinished);
        };
        let length = usize::try_from(length).map_err(|_| FrameError::Length)?;
        if length > max_bytes || from + length + 2 > max_bytes {
            return Err(FrameError::TooLarge(max_bytes));
        }
        let end = from + length;
        match bytes.get(end..end + 2) {
            None => return Ok(Parsed::Unfinished),
            Some(b"\r\n") => {}
            Some(_) => return Err(FrameError::Length),
        }
        words.push(&bytes[from..end]);
        at = end + 2;
    }
    Ok(Parsed::Command(at))
}

/// A number up to the end of its line, and where the next line begins. It saturates.
fn number(
    bytes: &[u8],
    from: usize,
    broken: FrameError,
) -> Result<Option<(i64, usize)>, FrameError> {
    let negative = bytes.get(from) == Some(&b'-');
    let first = from + usize::from(negative);
    let (mut at, mut value) = (first, 0_i64);
    loop {
        match bytes.get(at) {
            None => return Ok(None),
            Some(_) if at - from >= MAX_NUMBER_BYTES => return Err(FrameError::LongNumber),
            Some(b'\r') => break,
            Some(digit @ b'0'..=b'9') => {
                value = value.saturating_mul(10).saturating_add(i64::from(digit - b'0'))
            }
            Some(_) => return Err(broken),
        }
        at += 1;
    }
    match bytes.get(at + 1) {
        None => Ok(None),
        Some(b'\n') if at > first => Ok(Some((if negative { -value } else { value }, at + 2))),
        Some(_) => Err(broken),
    }
}

fn line(bytes: &[u8]) -> Result<Parsed<'_>, FrameError> {
    let Some(end) = bytes.iter().take(MAX_LINE_BYTES).position(|byte| *byte == b'\n') else {
        return if bytes.len() >= MAX_LINE_BYTES {
            Err(FrameError::LongLine)
        } else {
            Ok(Parsed::Unfinished)
        };
    };
    let line = &bytes[..end];
    let line = line.strip_suffix(b"\r").unwrap_or(line);
    // Most likely a web page made a browser send this. The lines of its body must not run as
    // commands.
    let http = line.windows(6).any(|part| part == b" HTTP/") || line.starts_with(b"POST ");
    if http || line.get(..5).is_some_and(|start| start.eq_ignore_ascii_case(b"Host:")) {
        return Err(FrameError::Http);
    }
    Ok(Parsed::Line(line, end + 1))
}

/// Splits a line into words. Quotes and backslashes mean what they mean to Redis.
pub(crate) fn split(line: &[u8]) -> Result<Vec<Vec<u8>>, FrameError> {
    let mut rest = line.iter().copied().peekable();
    let mut words = Vec::new();
    loop {
        while rest.next_if(u8::is_ascii_whitespace).is_some() {}
        let Some(first) = rest.peek() else { return Ok(words) };
        if words.len() == MAX_WORDS {
            return Err(FrameError::Words);
        }
        let quote = Some(*first).filter(|byte| matches!(byte, b'"' | b'\''));
        let mut word = Vec::new();
        match quote {
            None => {
                word.extend(std::iter::from_fn(|| rest.next_if(|byte| !byte.is_ascii_whitespace())))
            }
            Some(quote) => {
                rest.next();
                loop {
                    match rest.next().ok_or(FrameError::Quotes)? {
                        byte if byte == quote => break,
                        b'\\' if quote == b'"' => {
                            word.push(escaped(&mut rest).ok_or(FrameError::Quotes)?)
                        }
                        b'\\' if rest.peek() == Some(&b'\'') => word.extend(rest.next()),
                        byte => word.push(byte),
                    }
                }
                if rest.peek().is_some_and(|byte| !byte.is_ascii_whitespace()) {
                    return Err(FrameError::Quotes);
                }
            }
        }
        words.push(word);
    }
}

/// The byte of an escape: `x41`, `n`, `r`, `t`, `b`, `a`, or the character itself.
fn escaped(rest: &mut std::iter::Peekable<impl Iterator<Item = u8> + Clone>) -> Option<u8> {
    Some(match rest.next()? {
        b'n' => b'\n',
        b'r' => b'\r',
        b't' => b'\t',
        b'b' => 0x08,
        b'a' => 0x07,
        b'x' => {
            let mut ahead = rest.clone();
            let mut digit = || {
                ahead
                    .next()
                    .and_then(|byte| char::from(byte).to_digit(16))
                    .and_then(|digit| u8::try_from(digit).ok())
            };
            match (digit(), digit()) {
                (Some(high), Some(low)) => {
                    *rest = ahead;
                    high << 4 | low
                }
                _ => b'x',
            }
        }
        other => other,
    })
}

fn printable(byte: u8) -> char {
    if byte.is_ascii_graphic() { byte.into() } else { '?' }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read(bytes: &[u8]) -> Result<Vec<Vec<Vec<u8>>>, FrameError> {
        let (mut at, mut words, mut commands) = (0, Words::new(), Vec::new());
        loop {
            words.clear();
            let (command, next) = match super::next(&bytes[at..], &mut words, MAX_COMMAND_BYTES)? {
                Parsed::Command(next) => (words.iter().map(|word| word.to_vec()).collect(), next),
                Parsed::Line(line, next) => (split(line)?, next),
                Parsed::Unfinished => return Ok(commands),
            };
            commands.push(command);
            at += next;
        }
    }

    #[test]
    fn commands_are_read() {
        let text = |commands: Vec<Vec<Vec<u8>>>| -> Vec<Vec<String>> {
            commands
                .into_iter()
                .map(|c| c.into_iter().map(|w| String::from_utf8(w).unwrap()).collect())
                .collect()
        };
        assert_eq!(
            text(read(b"*2\r\n$4\r\nPING\r\n$2\r\na\n\r\n*1\r\n$0\r\n\r\n").unwrap()),
            [vec!["PING", "a\n"], vec![""]]
        );
        assert_eq!(
            text(read(b"PING  \"a b\" 'c'\r\n\r\nECHO x\n").unwrap()),
            [vec!["PING", "a b", "c"], vec![], vec!["ECHO", "x"]]
        );
        assert_eq!(
            text(
                read(
                    br#"ECHO "a\"b\x41\xzz\t\\" 'it\'s\n' a"b "" ''
"#
                )
                .unwrap()
            ),
            [vec!["ECHO", "a\"bAxzz\t\\", "it's\\n", "a\"b", "", ""]]
        );
    }

    #[test]
    fn bytes_that_are_no_command_are_refused() {
        for (bytes, expected) in [
            (&b"*1000000000\r\n"[..], "invalid multibulk length"),
            (b"*-2\r\n", "invalid multibulk length"),
            (b"*+1\r\n", "invalid multibulk length"),
            (b"*1\r\n$536870912\r\n", "more than"),
            (b"*1\r\n$-1\r\n", "invalid bulk length"),
            (b"*1\r\n:1\r\n", "expected '$', got ':'"),
            (b"*1\r\n$1\r\nab\r\n", "invalid bulk length"),
            (b"*11111111111111111111111111111111111111", "too big"),
            (b"*1\r\n$1\r\na\rb", "invalid bulk length"),
            (b"*\r\n", "invalid multibulk length"),
            (b"*1\r\n$\r\n", "invalid bulk length"),
            (b"GET / HTTP/1.1\r\n", "not HTTP"),
            (b"POST /\r\n", "not HTTP"),
            (b"host: here\r\n", "not HTTP"),
            (b"ECHO \"a\"b\r\n", "unbalanced quotes"),
            (b"PING \"a\r\n", "unbalanced quotes"),
        ] {
            let error = read(bytes).unwrap_err().to_string();
            assert!(error.contains(expected), "{} says {error}", bytes.escape_ascii());
        }
    }

    proptest! {
        /// A command is parsed the same wherever the bytes are cut.
        #[test]
        fn cuts_do_not_matter(words in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..20), 1..6), cut in any::<prop::sample::Index>()) {
            let mut bytes = format!("*{}\r\n", words.len()).into_bytes();
            for word in &words {
                bytes.extend_from_slice(format!("${}\r\n", word.len()).as_bytes());
                bytes.extend_from_slice(word);
                bytes.extend_from_slice(b"\r\n");
            }
            let cut = cut.index(bytes.len());
            let mut found = Words::new();
            prop_assert_eq!(super::next(&bytes[..cut], &mut found, MAX_COMMAND_BYTES), Ok(Parsed::Unfinished));
            prop_assert_eq!(read(&bytes).unwrap(), vec![words]);
        }

        /// A command recognized by its shape has the words that parsing finds, and a command that
        /// differs only in its key is recognized.
        #[test]
        fn a_recognized_command_has_the_words_that_parsing_finds(
            words in prop::collection::vec("[ab$\r\n]{0,3}", 2..5),
            key in "[ab$\r\n]{0,12}",
            change in any::<Option<(prop::sample::Index, u8)>>(),
        ) {
            let write = |words: &[String]| {
                let each: String = words.iter().map(|word| format!("${}\r\n{word}\r\n", word.len())).collect();
                format!("*{}\r\n{each}", words.len()).into_bytes()
            };
            let (first, mut other) = (write(&words), words.clone());
            other[1] = key;
            let mut second = write(&other);
            if let Some((at, byte)) = change {
                let at = at.index(second.len());
                second[at] = byte;
            }
            let mut found = Words::new();
            let taken = super::next(&first, &mut found, MAX_COMMAND_BYTES);
            prop_assert_eq!(taken, Ok(Parsed::Command(first.len())));
            let mut known = LastCommand::default();
            known.remember(&first, first.len(), &found);
            let mut plain = Words::new();
            if let Some(key) = known.key(&second) {
                prop_assert_eq!(super::next(&second, &mut plain, MAX_COMMAND_BYTES), Ok(Parsed::Command(key.taken)));
                prop_assert_eq!(plain[1], key.bytes);
                prop_assert!(plain.iter().zip(&found).enumerate().all(|(at, (own, first))| at == 1 || own == first));
            } else {
                prop_assert!(change.is_some());
            }
        }

        /// No bytes make the parser panic or loop.
        #[test]
        fn any_bytes_end(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = read(&bytes);
        }
    }
}
