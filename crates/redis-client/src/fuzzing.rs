//! Properties of any bytes that a server sends, as functions for a fuzzer. Not public API.

use super::resp::{Malformed, Scanner, Value, decode};

/// The largest reply, small because fuzzers make short inputs.
const MAX: usize = 4 << 10;

/// Splits a stream of replies: every split gives the same values or the same refusal, depth and
/// number are bounded by the bytes, and encoding and decoding again gives the same values. The
/// first byte is the size of the pieces.
pub fn replies(data: &[u8]) {
    let Some((first, stream)) = data.split_first() else { return };
    let whole = read(stream, stream.len().max(1), MAX);
    for piece in [1, 1 + usize::from(*first)] {
        let cut = read(stream, piece, MAX);
        assert_eq!(cut.0, whole.0, "{} in pieces of {piece}", stream.escape_ascii());
        assert_eq!(
            cut.1.is_err(),
            whole.1.is_err(),
            "{} in pieces of {piece}",
            stream.escape_ascii()
        );
    }
    for value in whole.0 {
        let mut size = Size::default();
        size.add(&value, 0);
        assert!(
            size.depth <= 16 && size.values * 3 <= MAX && size.bytes <= 3 * MAX,
            "{size:?}: {value:?}"
        );
        let mut written = Vec::new();
        write(&value, &mut written);
        assert_eq!(read(&written, written.len(), usize::MAX), (vec![value], Ok(0)));
    }
}

/// All values of a stream in pieces, then the length of an incomplete rest, or why it is refused.
fn read(stream: &[u8], piece: usize, max: usize) -> (Vec<Value>, Result<usize, Malformed>) {
    let (mut scanner, mut start, mut values) = (Scanner::default(), 0, Vec::new());
    let ends = (1..=stream.len() / piece).map(|pieces| pieces * piece).chain([stream.len()]);
    for end in ends {
        while start < end {
            match scanner.scan(&stream[start..end], max) {
                Ok(None) => break,
                Err(malformed) => return (values, Err(malformed)),
                Ok(Some(length)) => {
                    let reply = &stream[start..start + length];
                    values.push(
                        decode(reply)
                            .unwrap_or_else(|why| panic!("{}: {why}", reply.escape_ascii())),
                    );
                    start += length;
                }
            }
        }
    }
    (values, Ok(stream.len() - start))
}

#[derive(Debug, Default)]
struct Size {
    depth: usize,
    values: usize,
    bytes: usize,
}

impl Size {
    fn add(&mut self, value: &Value, depth: usize) {
        self.depth = self.depth.max(depth);
        self.values += 1;
        match value {
            Value::Array(items) | Value::Push(items) => {
                items.iter().for_each(|item| self.add(item, depth + 1))
            }
            Value::Map(pairs) => {
                pairs
                    .iter()
                    .flat_map(|(key, value)| [key, value])
                    .for_each(|item| self.add(item, depth + 1));
            }
            Value::Bulk(bytes) => self.bytes += bytes.len(),
            Value::Simple(text) | Value::Double(text) | Value::Error(text) => {
                self.bytes += text.len()
            }
            Value::Nil | Value::Int(_) | Value::Bool(_) => {}
        }
    }
}

/// A value as a server would write it, in RESP3.
fn write(value: &Value, out: &mut Vec<u8>) {
    let list = |kind: char, count: usize, out: &mut Vec<u8>| {
        out.extend_from_slice(format!("{kind}{count}\r\n").as_bytes());
    };
    let text = |kind: char, bytes: &[u8], out: &mut Vec<u8>| {
        list(kind, bytes.len(), out);
        out.extend_from_slice(bytes);
        out.extend_from_slice(b"\r\n");
    };
    match value {
        Value::Nil => out.extend_from_slice(b"_\r\n"),
        Value::Int(number) => out.extend_from_slice(format!(":{number}\r\n").as_bytes()),
        Value::Bool(yes) => out.extend_from_slice(if *yes { b"#t\r\n" } else { b"#f\r\n" }),
        Value::Bulk(bytes) => text('$', bytes, out),
        Value::Error(error) => text('!', error.as_bytes(), out),
        Value::Simple(line) => out.extend_from_slice(format!("+{line}\r\n").as_bytes()),
        Value::Double(line) => out.extend_from_slice(format!(",{line}\r\n").as_bytes()),
        Value::Array(items) | Value::Push(items) => {
            list(if matches!(value, Value::Push(_)) { '>' } else { '*' }, items.len(), out);
            items.iter().for_each(|item| write(item, out));
        }
        Value::Map(pairs) => {
            list('%', pairs.len(), out);
            pairs.iter().flat_map(|(key, value)| [key, value]).for_each(|item| write(item, out));
        }
    }
}
