//! RESP2 and RESP3, the protocols of Redis, as a client needs them.
//!
//! A reply is read in two steps. [`Scanner`] finds its end, reads each byte once however the bytes
//! are split, and refuses a malformed or oversized reply before it is complete. [`decode`] then
//! turns a complete reply into a [`Value`]. An announced length never causes an allocation; only
//! received bytes do. Neither step recurses: the server chooses nesting and attributes, so both are
//! counted and bounded.

use std::fmt;

/// The deepest nesting of a reply. `CLUSTER SLOTS`, the deepest in use, has five levels.
const MAX_DEPTH: usize = 16;
/// The most attributes of one reply. No command in use returns any; a server sends one before a
/// value.
const MAX_ATTRIBUTES: usize = 64;
/// The longest line that carries a number. Twenty digits and a sign are the longest that is one.
const MAX_NUMBER_LINE: usize = 32;

/// A reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    /// Null: RESP3 null, or a null string or array of RESP2.
    Nil,
    /// An integer.
    Int(i64),
    /// A string of bytes; also verbatim strings (without their format) and big numbers.
    Bulk(Vec<u8>),
    /// A one-line text such as `OK`.
    Simple(String),
    /// True or false (RESP3).
    Bool(bool),
    /// A floating-point number as it was written (RESP3).
    Double(String),
    /// A list; also sets.
    Array(Vec<Value>),
    /// Pairs in the order they came (RESP3).
    Map(Vec<(Value, Value)>),
    /// A message that the server sends unprompted (RESP3). Calls never return one.
    Push(Vec<Value>),
    /// An error inside a reply. A reply that is an error is never a value.
    Error(String),
}

impl Value {
    /// The integer, or the integer that a text is.
    pub fn as_int(&self) -> Option<i64> {
        match self {
            Value::Int(number) => Some(*number),
            Value::Bulk(bytes) => parse_int(bytes),
            Value::Simple(text) => parse_int(text.as_bytes()),
            _ => None,
        }
    }

    /// The bytes of a text.
    pub fn as_bytes(&self) -> Option<&[u8]> {
        match self {
            Value::Bulk(bytes) => Some(bytes),
            Value::Simple(text) => Some(text.as_bytes()),
            _ => None,
        }
    }

    /// A text, where it is UTF-8.
    pub fn as_str(&self) -> Option<&str> {
        self.as_bytes().and_then(|bytes| std::str::from_utf8(bytes).ok())
    }

    /// The items of a list.
    pub fn as_array(&self) -> Option<&[Value]> {
        match self {
            Value::Array(items) => Some(items),
            _ => None,
        }
    }
}

/// Bytes that are not a reply, or not an acceptable one. The connection has to be closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Malformed {
    /// An unknown type, or a malformed number or line end.
    Garbage,
    /// More bytes than the bound, received or announced.
    TooLarge,
    /// Nested too deep, or a push message inside a reply.
    TooDeep,
    /// More attributes than [`MAX_ATTRIBUTES`].
    TooManyAttributes,
}

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Malformed::Garbage => "it is not RESP",
            Malformed::TooLarge => "it is too large",
            Malformed::TooDeep => "it is nested too deep",
            Malformed::TooManyAttributes => {
                return write!(f, "it has more than {MAX_ATTRIBUTES} attributes");
            }
        })
    }
}

/// Finds the end of a reply, however the bytes are split. It keeps its position, so each byte is
/// read once.
#[derive(Debug, Default)]
pub(super) struct Scanner {
    /// The start of the current element.
    at: usize,
    /// The end of the part already searched for a line end.
    searched: usize,
    /// The reply cannot end before this offset.
    need: usize,
    /// How many elements each open list still lacks; the innermost is the last of `depth`.
    open: [usize; MAX_DEPTH],
    depth: usize,
    /// How many attributes the reply has so far.
    attributes: usize,
}

impl Scanner {
    /// The length of the reply at the start of `bytes`, or `None` while it is incomplete. `bytes`
    /// must start with the same bytes at every call. After a length the scanner is ready for the
    /// next reply.
    pub(super) fn scan(&mut self, bytes: &[u8], max: usize) -> Result<Option<usize>, Malformed> {
        if bytes.len() < self.need {
            return if bytes.len() > max { Err(Malformed::TooLarge) } else { Ok(None) };
        }
        loop {
            let Some(line_end) = self.line_end(bytes, max)? else {
                self.need = bytes.len() + 1;
                return Ok(None);
            };
            let kind = bytes[self.at];
            let line = &bytes[self.at + 1..line_end];
            let mut end = line_end + 2;
            let mut complete = true;
            match kind {
                b'+' | b'-' | b',' | b'(' => {}
                b':' => {
                    parse_int(line).ok_or(Malformed::Garbage)?;
                }
                b'_' if line.is_empty() => {}
                b'#' if line == b"t" || line == b"f" => {}
                b'$' | b'=' | b'!' => {
                    if let Some(length) = parse_length(line, kind == b'$', max)? {
                        end += length + 2;
                    }
                }
                b'*' | b'~' | b'%' | b'>' | b'|' => {
                    if kind == b'>' && self.depth > 0 {
                        return Err(Malformed::TooDeep);
                    }
                    let count = parse_length(line, kind == b'*', max)?.unwrap_or(0);
                    let count = if matches!(kind, b'%' | b'|') { count * 2 } else { count };
                    if kind == b'|' {
                        self.attributes += 1;
                        if self.attributes > MAX_ATTRIBUTES {
                            return Err(Malformed::TooManyAttributes);
                        }
                        // Attributes go before the value they are about and do not count as one.
                        if self.depth == 0 {
                            self.push(1)?;
                        }
                        self.open[self.depth - 1] += 1;
                    }
                    if count > 0 {
                        self.push(count)?;
                        complete = false;
                    }
                }
                _ => return Err(Malformed::Garbage),
            }
            if end > max {
                return Err(Malformed::TooLarge);
            }
            if end > bytes.len() {
                // The line is read again, once, when all that it announces has arrived.
                self.need = end;
                return Ok(None);
            }
            if end > line_end + 2 && &bytes[end - 2..end] != b"\r\n" {
                return Err(Malformed::Garbage);
            }
            self.at = end;
            self.searched = end;
            if complete && self.close() {
                *self = Scanner::default();
                return Ok(Some(end));
            }
        }
    }

    /// Where the line at `at` ends, before its CR LF.
    fn line_end(&mut self, bytes: &[u8], max: usize) -> Result<Option<usize>, Malformed> {
        let Some(kind) = bytes.get(self.at) else { return Ok(None) };
        if !b"+-:,_#($=!*~%>|".contains(kind) {
            return Err(Malformed::Garbage);
        }
        let from = self.searched.max(self.at);
        let rest = bytes.get(from..).unwrap_or(&[]);
        let Some(found) = rest.iter().position(|&byte| byte == b'\n') else {
            self.searched = bytes.len();
            let length = bytes.len() - self.at;
            let text = matches!(kind, b'+' | b'-' | b',' | b'(');
            if !text && length > MAX_NUMBER_LINE {
                return Err(Malformed::Garbage);
            }
            return if bytes.len() > max { Err(Malformed::TooLarge) } else { Ok(None) };
        };
        let newline = from + found;
        // If the element is incomplete, the next search starts at this line end.
        self.searched = newline;
        if newline < self.at + 2 || bytes[newline - 1] != b'\r' {
            return Err(Malformed::Garbage);
        }
        Ok(Some(newline - 1))
    }

    fn push(&mut self, count: usize) -> Result<(), Malformed> {
        *self.open.get_mut(self.depth).ok_or(Malformed::TooDeep)? = count;
        self.depth += 1;
        Ok(())
    }

    /// Counts a complete element. Returns whether the reply is complete.
    fn close(&mut self) -> bool {
        while self.depth > 0 {
            self.open[self.depth - 1] -= 1;
            if self.open[self.depth - 1] > 0 {
                return false;
            }
            self.depth -= 1;
        }
        true
    }
}

/// The value of a reply that [`Scanner`] found complete.
pub(super) fn decode(bytes: &[u8]) -> Result<Value, Malformed> {
    let mut rest = bytes;
    // Incomplete lists, the innermost last. A reply that is not a list allocates nothing here.
    let mut open: Vec<List> = Vec::new();
    loop {
        let mut done = match decode_element(&mut rest)? {
            Element::Value(value) => Some(value),
            Element::List(list) if list.lacking == 0 => list.closed(),
            Element::List(list) => {
                if open.len() == MAX_DEPTH {
                    return Err(Malformed::TooDeep);
                }
                open.push(list);
                None
            }
        };
        // A value may complete its list, and that list the one around it. An attribute is not an
        // element of the list around it: its value comes next.
        while let Some(value) = done {
            let Some(mut list) = open.pop() else {
                return if rest.is_empty() { Ok(value) } else { Err(Malformed::Garbage) };
            };
            if list.kind != b'|' {
                list.items.push(value);
            }
            list.lacking -= 1;
            if list.lacking > 0 {
                open.push(list);
                break;
            }
            done = list.closed();
        }
    }
}

/// What a line of a reply starts.
enum Element {
    Value(Value),
    List(List),
}

/// A list whose elements follow.
struct List {
    /// The type byte.
    kind: u8,
    /// How many elements are missing; a pair counts as two.
    lacking: usize,
    items: Vec<Value>,
}

impl List {
    fn new(kind: u8, count: usize, rest: &[u8]) -> Self {
        // Every element has at least three bytes, and all of them are here. The elements of an
        // attribute are dropped.
        let most = if kind == b'|' { 0 } else { rest.len() / 3 + 1 };
        List { kind, lacking: count, items: Vec::with_capacity(count.min(most)) }
    }

    /// The value of a complete list; `None` for an attribute.
    fn closed(self) -> Option<Value> {
        match self.kind {
            b'|' => None,
            b'>' => Some(Value::Push(self.items)),
            b'%' => {
                let mut pairs = Vec::with_capacity(self.items.len() / 2);
                let mut items = self.items.into_iter();
                while let (Some(key), Some(value)) = (items.next(), items.next()) {
                    pairs.push((key, value));
                }
                Some(Value::Map(pairs))
            }
            _ => Some(Value::Array(self.items)),
        }
    }
}

/// Decodes one line and the bytes that belong to it.
fn decode_element(rest: &mut &[u8]) -> Result<Element, Malformed> {
    let newline = rest.iter().position(|&byte| byte == b'\n').ok_or(Malformed::Garbage)?;
    let (line, after) = rest.split_at(newline + 1);
    let (&kind, line) = line.split_first().ok_or(Malformed::Garbage)?;
    let line = line.strip_suffix(b"\r\n").ok_or(Malformed::Garbage)?;
    *rest = after;
    let text = |line: &[u8]| String::from_utf8_lossy(line).into_owned();
    Ok(Element::Value(match kind {
        b'+' => Value::Simple(text(line)),
        b'-' => Value::Error(text(line)),
        b':' => Value::Int(parse_int(line).ok_or(Malformed::Garbage)?),
        b',' => Value::Double(text(line)),
        b'(' => Value::Bulk(line.to_vec()),
        b'_' => Value::Nil,
        b'#' => Value::Bool(line == b"t"),
        b'$' | b'=' | b'!' => match parse_length(line, true, usize::MAX)? {
            None => Value::Nil,
            Some(length) => {
                let body = rest.get(..length).ok_or(Malformed::Garbage)?;
                *rest = rest.get(length + 2..).ok_or(Malformed::Garbage)?;
                match kind {
                    b'!' => Value::Error(text(body)),
                    // A verbatim string says its format first: `txt:`.
                    b'=' => Value::Bulk(body.get(4..).unwrap_or(body).to_vec()),
                    _ => Value::Bulk(body.to_vec()),
                }
            }
        },
        b'*' | b'~' | b'>' => match parse_length(line, true, usize::MAX)? {
            None => Value::Nil,
            Some(count) => return Ok(Element::List(List::new(kind, count, rest))),
        },
        b'%' | b'|' => {
            let pairs = parse_length(line, false, usize::MAX / 2)?.unwrap_or(0);
            return Ok(Element::List(List::new(kind, pairs * 2, rest)));
        }
        _ => return Err(Malformed::Garbage),
    }))
}

fn parse_int(text: &[u8]) -> Option<i64> {
    let (negative, digits) = match text {
        [b'-', digits @ ..] => (true, digits),
        digits => (false, digits),
    };
    if digits.is_empty() || digits.len() > 19 {
        return None;
    }
    let mut number: i64 = 0;
    for &digit in digits {
        if !digit.is_ascii_digit() {
            return None;
        }
        // Counted downwards, because the lowest integer has no positive counterpart.
        number = number.checked_mul(10)?.checked_sub(i64::from(digit - b'0'))?;
    }
    if negative { Some(number) } else { number.checked_neg() }
}

/// A length or count; `None` for the null of RESP2.
fn parse_length(text: &[u8], may_be_null: bool, max: usize) -> Result<Option<usize>, Malformed> {
    match parse_int(text) {
        Some(-1) if may_be_null => Ok(None),
        Some(number) => {
            let number = usize::try_from(number).map_err(|_| Malformed::Garbage)?;
            if number > max { Err(Malformed::TooLarge) } else { Ok(Some(number)) }
        }
        None => Err(Malformed::Garbage),
    }
}

/// Starts a command of `words` words.
pub(super) fn put_header(out: &mut Vec<u8>, words: usize) {
    put_number(out, b'*', words);
}

/// Adds a word to a command.
pub(super) fn put_word(out: &mut Vec<u8>, word: &[u8]) {
    put_number(out, b'$', word.len());
    out.extend_from_slice(word);
    out.extend_from_slice(b"\r\n");
}

/// Adds a number as a word.
pub(super) fn put_number_word(out: &mut Vec<u8>, number: usize) {
    let (digits, from) = decimal(number);
    put_word(out, &digits[from..]);
}

/// Adds a whole command.
pub(super) fn put_command<W: AsRef<[u8]>>(out: &mut Vec<u8>, words: &[W]) {
    put_header(out, words.len());
    for word in words {
        put_word(out, word.as_ref());
    }
}

fn put_number(out: &mut Vec<u8>, kind: u8, number: usize) {
    let (mut line, from) = decimal(number);
    line[from - 1] = kind;
    out.extend_from_slice(&line[from - 1..]);
    out.extend_from_slice(b"\r\n");
}

/// The digits of a number at the end of a buffer, with room for one byte before them, and where
/// they begin.
fn decimal(mut number: usize) -> ([u8; 21], usize) {
    let mut digits = [0; 21];
    let mut from = digits.len();
    loop {
        from -= 1;
        digits[from] = b'0' + u8::try_from(number % 10).unwrap_or(0);
        number /= 10;
        if number == 0 {
            return (digits, from);
        }
    }
}
