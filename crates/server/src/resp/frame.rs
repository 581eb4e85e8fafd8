//! Bytes into commands: RESP arrays of strings, and lines as people type them. Nothing is copied, and memory is used only for bytes that came.

use std::ops::Range;

/// The most words of a command.
pub const MAX_WORDS: usize = 64;
/// The largest command, in bytes.
pub const MAX_COMMAND_BYTES: usize = 1 << 20;
/// The largest command of somebody who has yet to say who he is.
pub const MAX_UNKNOWN_BYTES: usize = 16 << 10;
/// The longest line, typed by a person or before a length.
pub const MAX_LINE_BYTES: usize = 4 << 10;

/// Where the words of a command are in the bytes that were read.
pub(crate) type Words = Vec<Range<usize>>;

/// What the next bytes are.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// A command, whose words are at these places, and where the next one begins. No words: an empty line.
    Command(usize),
    /// Not all of it is here yet.
    Unfinished,
}

/// Bytes that are no command. The connection is closed after saying so.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Broken {
    #[error("Protocol error: too big mbulk count string")]
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

/// Reads one command from the front of `bytes`; its words are put into `words`.
pub(crate) fn next(bytes: &[u8], words: &mut Words, max_bytes: usize) -> Result<Next, Broken> {
    words.clear();
    match bytes.first() {
        None => Ok(Next::Unfinished),
        Some(b'*') => array(bytes, words, max_bytes),
        Some(_) => inline(bytes, words),
    }
}

fn array(bytes: &[u8], words: &mut Words, max_bytes: usize) -> Result<Next, Broken> {
    let Some((count, mut at)) = number(bytes, 1, Broken::Words)? else { return Ok(Next::Unfinished) };
    if count <= 0 {
        return if count == 0 || count == -1 { Ok(Next::Command(at)) } else { Err(Broken::Words) };
    }
    let count = usize::try_from(count).ok().filter(|count| *count <= MAX_WORDS).ok_or(Broken::Words)?;
    for _ in 0..count {
        match bytes.get(at) {
            None => return Ok(Next::Unfinished),
            Some(b'$') => {}
            Some(other) => return Err(Broken::NotAString(printable(*other))),
        }
        let Some((length, from)) = number(bytes, at + 1, Broken::Length)? else { return Ok(Next::Unfinished) };
        let length = usize::try_from(length).map_err(|_| Broken::Length)?;
        if length > max_bytes || from + length + 2 > max_bytes {
            return Err(Broken::TooLarge(max_bytes));
        }
        let end = from + length;
        match bytes.get(end..end + 2) {
            None => return Ok(Next::Unfinished),
            Some(b"\r\n") => {}
            Some(_) => return Err(Broken::Length),
        }
        words.push(from..end);
        at = end + 2;
    }
    Ok(Next::Command(at))
}

/// A number up to the end of its line, and where the next line begins.
fn number(bytes: &[u8], from: usize, broken: Broken) -> Result<Option<(i64, usize)>, Broken> {
    let line = bytes.get(from..).unwrap_or_default();
    let Some(end) = line.iter().take(32).position(|byte| *byte == b'\r') else {
        return if line.len() >= 32 { Err(Broken::LongLine) } else { Ok(None) };
    };
    match line.get(end + 1) {
        None => return Ok(None),
        Some(b'\n') => {}
        Some(_) => return Err(broken),
    }
    let text = std::str::from_utf8(&line[..end]).ok().filter(|text| !text.starts_with('+'));
    let number = text.and_then(|text| text.parse().ok()).ok_or(broken)?;
    Ok(Some((number, from + end + 2)))
}

/// A line of words between blanks; quotes hold words together.
fn inline(bytes: &[u8], words: &mut Words) -> Result<Next, Broken> {
    let Some(end) = bytes.iter().take(MAX_LINE_BYTES).position(|byte| *byte == b'\n') else {
        return if bytes.len() >= MAX_LINE_BYTES { Err(Broken::LongLine) } else { Ok(Next::Unfinished) };
    };
    let line = &bytes[..end];
    let line = line.strip_suffix(b"\r").unwrap_or(line);
    if [&b"GET "[..], b"POST ", b"PUT ", b"HEAD ", b"Host:", b"OPTIONS "].iter().any(|http| line.starts_with(http)) {
        return Err(Broken::Http);
    }
    let mut at = 0;
    while at < line.len() {
        if line[at].is_ascii_whitespace() {
            at += 1;
            continue;
        }
        if words.len() == MAX_WORDS {
            return Err(Broken::Words);
        }
        let quote = Some(line[at]).filter(|byte| matches!(byte, b'"' | b'\''));
        let from = if quote.is_some() { at + 1 } else { at };
        let ends = |byte: &u8| quote.map_or(byte.is_ascii_whitespace(), |quote| *byte == quote);
        let to = line[from..].iter().position(ends).map(|length| from + length);
        match (quote, to) {
            (Some(_), None) => return Err(Broken::Quotes),
            (Some(_), Some(to)) => {
                if line.get(to + 1).is_some_and(|byte| !byte.is_ascii_whitespace()) {
                    return Err(Broken::Quotes);
                }
                words.push(from..to);
                at = to + 1;
            }
            (None, to) => {
                let to = to.unwrap_or(line.len());
                words.push(from..to);
                at = to;
            }
        }
    }
    Ok(Next::Command(end + 1))
}

fn printable(byte: u8) -> char {
    if byte.is_ascii_graphic() { byte.into() } else { '?' }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read(bytes: &[u8]) -> Result<Vec<Vec<Vec<u8>>>, Broken> {
        let (mut at, mut words, mut commands) = (0, Words::new(), Vec::new());
        while let Next::Command(next) = super::next(&bytes[at..], &mut words, MAX_COMMAND_BYTES)? {
            commands.push(words.iter().map(|word| bytes[at..][word.clone()].to_vec()).collect());
            at += next;
        }
        Ok(commands)
    }

    #[test]
    fn commands_are_read() {
        let text = |commands: Vec<Vec<Vec<u8>>>| -> Vec<Vec<String>> {
            commands.into_iter().map(|c| c.into_iter().map(|w| String::from_utf8(w).unwrap()).collect()).collect()
        };
        assert_eq!(
            text(read(b"*2\r\n$4\r\nPING\r\n$2\r\na\n\r\n*1\r\n$0\r\n\r\n").unwrap()),
            [vec!["PING", "a\n"], vec![""]]
        );
        assert_eq!(
            text(read(b"PING  \"a b\" 'c'\r\n\r\nECHO x\n").unwrap()),
            [vec!["PING", "a b", "c"], vec![], vec!["ECHO", "x"]]
        );
    }

    #[test]
    fn what_is_no_command_is_refused() {
        for (bytes, expected) in [
            (&b"*1000000000\r\n"[..], "invalid multibulk length"),
            (b"*-2\r\n", "invalid multibulk length"),
            (b"*+1\r\n", "invalid multibulk length"),
            (b"*1\r\n$536870912\r\n", "more than"),
            (b"*1\r\n$-1\r\n", "invalid bulk length"),
            (b"*1\r\n:1\r\n", "expected '$', got ':'"),
            (b"*1\r\n$1\r\nab\r\n", "invalid bulk length"),
            (b"*11111111111111111111111111111111111111", "too big"),
            (b"GET / HTTP/1.1\r\n", "not HTTP"),
            (b"PING \"a\r\n", "unbalanced quotes"),
        ] {
            let error = read(bytes).unwrap_err().to_string();
            assert!(error.contains(expected), "{} says {error}", bytes.escape_ascii());
        }
    }

    proptest! {
        /// Wherever the bytes are cut, what is read first is the same.
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
            prop_assert_eq!(super::next(&bytes[..cut], &mut found, MAX_COMMAND_BYTES), Ok(Next::Unfinished));
            prop_assert_eq!(read(&bytes).unwrap(), vec![words]);
        }

        /// No bytes make it panic or go on for ever.
        #[test]
        fn any_bytes_end(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = read(&bytes);
        }
    }
}
