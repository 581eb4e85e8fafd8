//! Headers of a message behind one trait, so that both paths share the code that changes them.
//!
//! The general path has hyper's table, with an allocation per value. The
//! [fast path](super::fast_path) has a list over the received text, with added values appended to
//! it: messages have so few headers that a scan costs less than a table, and a connection allocates
//! once instead of once per request.

use axum::http::header::AsHeaderName;
use axum::http::{HeaderMap, HeaderName, HeaderValue};

use crate::rules::HeaderLines;

/// Headers that can be looked up and changed. Names are in lower case.
pub(super) trait Headers: HeaderLines {
    /// The values of all lines of this name.
    fn lines<'a, N: AsHeaderName + AsRef<str> + 'a>(
        &'a self,
        name: N,
    ) -> impl Iterator<Item = &'a [u8]>;

    /// Whether a name satisfies `is`.
    fn any_name(&self, is: impl Fn(&[u8]) -> bool) -> bool;

    /// Removes all lines of this name.
    fn remove_lines(&mut self, name: &HeaderName);

    /// Removes all lines whose name satisfies `is`.
    fn remove_lines_if(&mut self, is: impl Fn(&[u8]) -> bool);

    /// Trims white space off values. The HTTP/1.1 parser does so; HTTP/2 values may have it.
    fn trim(&mut self);

    /// Replaces all lines of this name with one.
    fn put(&mut self, name: HeaderName, value: HeaderValue);

    /// Whether there is a line of this name.
    fn has(&self, name: &HeaderName) -> bool {
        self.lines(name).next().is_some()
    }
}

impl Headers for HeaderMap {
    fn lines<'a, N: AsHeaderName + AsRef<str> + 'a>(
        &'a self,
        name: N,
    ) -> impl Iterator<Item = &'a [u8]> {
        self.get_all(name).into_iter().map(HeaderValue::as_bytes)
    }

    fn any_name(&self, is: impl Fn(&[u8]) -> bool) -> bool {
        self.keys().any(|name| is(name.as_str().as_bytes()))
    }

    fn remove_lines(&mut self, name: &HeaderName) {
        self.remove(name);
    }

    fn remove_lines_if(&mut self, is: impl Fn(&[u8]) -> bool) {
        if self.any_name(&is) {
            let names: Vec<HeaderName> =
                self.keys().filter(|name| is(name.as_str().as_bytes())).cloned().collect();
            names.iter().for_each(|name| _ = self.remove(name));
        }
    }

    fn trim(&mut self) {
        for value in self.values_mut() {
            let (bytes, trimmed) = (value.as_bytes(), value.as_bytes().trim_ascii());
            if bytes.len() != trimmed.len()
                && let Ok(trimmed) = HeaderValue::from_bytes(trimmed)
            {
                *value = trimmed;
            }
        }
    }

    fn put(&mut self, name: HeaderName, value: HeaderValue) {
        self.insert(name, value);
    }
}

/// The headers of one message, in one buffer that is reused. The order is that of hyper's table:
/// lines of one name are adjacent, and the last name takes the place of a removed one.
#[derive(Debug, Default)]
pub(super) struct Fields {
    text: Vec<u8>,
    list: Vec<FieldSpan>,
}

#[derive(Clone, Copy, Debug)]
struct FieldSpan {
    name: TextSpan,
    value: TextSpan,
}

/// A part of the text.
#[derive(Clone, Copy, Debug)]
struct TextSpan {
    start: u32,
    end: u32,
}

impl TextSpan {
    #[allow(clippy::cast_possible_truncation, reason = "heads are read in pieces of kilobytes")]
    fn of(start: usize, end: usize) -> Self {
        TextSpan { start: start as u32, end: end as u32 }
    }

    fn within(self, text: &[u8]) -> &[u8] {
        &text[self.start as usize..self.end as usize]
    }
}

impl Fields {
    /// Starts over with the text of another head.
    pub(super) fn begin(&mut self, head: &[u8]) {
        self.list.clear();
        self.text.clear();
        self.text.extend_from_slice(head);
    }

    /// Adds a line of the text.
    pub(super) fn add(&mut self, head: &[u8], line: &httparse::Header<'_>) {
        // An empty part has no position of its own.
        let span = |part: &[u8]| match part.is_empty() {
            true => TextSpan::of(0, 0),
            false => {
                let start = part.as_ptr() as usize - head.as_ptr() as usize;
                TextSpan::of(start, start + part.len())
            }
        };
        let field = FieldSpan { name: span(line.name.as_bytes()), value: span(line.value) };
        self.text[field.name.start as usize..field.name.end as usize].make_ascii_lowercase();
        let name = field.name.within(&self.text);
        match self.list.iter().rposition(|own| own.name.within(&self.text) == name) {
            None => self.list.push(field),
            Some(last) => self.list.insert(last + 1, field),
        }
    }

    /// Names and values, in the order of writing.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&[u8], &[u8])> {
        self.list
            .iter()
            .map(|field| (field.name.within(&self.text), field.value.within(&self.text)))
    }

    /// Writes the header lines of the message.
    pub(super) fn write(&self, out: &mut Vec<u8>) {
        self.iter().for_each(|(name, value)| write_field(out, name, value));
    }

    /// Frees buffer memory beyond `bytes`.
    pub(super) fn shrink_to(&mut self, bytes: usize) {
        self.text.shrink_to(bytes);
    }

    /// The range of the lines whose name satisfies `is`.
    fn found(&self, is: impl Fn(&[u8]) -> bool) -> Option<std::ops::Range<usize>> {
        let start = self.list.iter().position(|field| is(field.name.within(&self.text)))?;
        let same =
            self.list[start..].iter().take_while(|field| is(field.name.within(&self.text))).count();
        Some(start..start + same)
    }

    /// Removes the lines of one name, and moves the last name to their place.
    fn remove_at(&mut self, lines: std::ops::Range<usize>) {
        if lines.end == self.list.len() {
            self.list.truncate(lines.start);
            return;
        }
        let Some(last) = self.list.last().map(|field| field.name.within(&self.text)) else {
            return;
        };
        let Some(moved) = self.found(|own| own == last) else { return };
        if lines.len() == 1 && moved.len() == 1 {
            self.list.swap_remove(lines.start);
        } else {
            let moved = self.list.split_off(moved.start);
            self.list.splice(lines, moved);
        }
    }

    fn push(&mut self, bytes: &[u8]) -> TextSpan {
        let start = self.text.len();
        self.text.extend_from_slice(bytes);
        TextSpan::of(start, self.text.len())
    }
}

impl HeaderLines for Fields {
    fn line(&self, name: &str, index: usize) -> Option<&[u8]> {
        let own = self.iter().filter(|(own, _)| own.eq_ignore_ascii_case(name.as_bytes()));
        own.map(|(_, value)| value).nth(index)
    }
}

impl Headers for Fields {
    fn lines<'a, N: AsHeaderName + AsRef<str> + 'a>(
        &'a self,
        name: N,
    ) -> impl Iterator<Item = &'a [u8]> {
        self.iter().filter(move |(own, _)| *own == name.as_ref().as_bytes()).map(|(_, value)| value)
    }

    fn any_name(&self, is: impl Fn(&[u8]) -> bool) -> bool {
        self.iter().any(|(name, _)| is(name))
    }

    fn remove_lines(&mut self, name: &HeaderName) {
        let name = name.as_str().as_bytes();
        if let Some(lines) = self.found(|own| own == name) {
            self.remove_at(lines);
        }
    }

    fn remove_lines_if(&mut self, is: impl Fn(&[u8]) -> bool) {
        // Collected first, because a removal moves other names.
        if self.any_name(&is) {
            let names = self.iter().map(|(name, _)| name).filter(|name| is(name));
            let mut names: Vec<Vec<u8>> = names.map(<[u8]>::to_vec).collect();
            names.dedup();
            for name in names {
                if let Some(lines) = self.found(|own| own == name) {
                    self.remove_at(lines);
                }
            }
        }
    }

    fn trim(&mut self) {
        let is_trimmed = |(_, value): (&[u8], &[u8])| value.len() == value.trim_ascii().len();
        debug_assert!(self.iter().all(is_trimmed), "the parser trims white space");
    }

    fn put(&mut self, name: HeaderName, value: HeaderValue) {
        let value = self.push(value.as_bytes());
        let name = name.as_str().as_bytes();
        match self.found(|own| own == name) {
            None => {
                let name = self.push(name);
                self.list.push(FieldSpan { name, value });
            }
            Some(lines) => {
                self.list[lines.start].value = value;
                self.list.drain(lines.start + 1..lines.end);
            }
        }
    }
}

/// Writes one line.
pub(super) fn write_field(out: &mut Vec<u8>, name: &[u8], value: &[u8]) {
    out.extend_from_slice(name);
    out.extend_from_slice(b": ");
    out.extend_from_slice(value);
    out.extend_from_slice(b"\r\n");
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const NAMES: [&str; 6] = ["via", "x-a", "x-bc", "cookie", "close", "connection"];

    /// A change to headers.
    #[derive(Clone, Debug)]
    enum HeaderEdit {
        Remove(usize),
        RemoveX,
        Put(usize, usize),
    }

    fn step() -> impl Strategy<Value = HeaderEdit> {
        prop_oneof![
            3 => (0..NAMES.len()).prop_map(HeaderEdit::Remove),
            1 => Just(HeaderEdit::RemoveX),
            3 => (0..NAMES.len(), 0..10_usize)
                .prop_map(|(name, value)| HeaderEdit::Put(name, value)),
        ]
    }

    fn change(headers: &mut impl Headers, step: &HeaderEdit) {
        match step {
            HeaderEdit::Remove(name) => {
                headers.remove_lines(&HeaderName::from_static(NAMES[*name]))
            }
            HeaderEdit::RemoveX => headers.remove_lines_if(|name| name.starts_with(b"x-")),
            HeaderEdit::Put(name, value) => {
                headers.put(HeaderName::from_static(NAMES[*name]), (*value).into())
            }
        }
    }

    proptest! {
        /// Both paths write the same heads because the list behaves like the table.
        #[test]
        fn the_list_behaves_like_the_table(
            lines in prop::collection::vec((0..NAMES.len(), 0..10_usize), 0..12),
            steps in prop::collection::vec(step(), 0..8),
        ) {
            // With white space around values, which the parser trims.
            let line = |(name, value): &(usize, usize)| {
                format!("{}: \t {value} \t\r\n", NAMES[*name].to_uppercase())
            };
            let head: String = lines.iter().map(line).collect();
            let head = format!("GET / HTTP/1.1\r\n{head}\r\n");
            let mut parsed = [httparse::EMPTY_HEADER; 16];
            let mut request = httparse::Request::new(&mut parsed);
            prop_assert!(request.parse(head.as_bytes()).unwrap().is_complete());
            let (mut table, mut list) = (HeaderMap::new(), Fields::default());
            list.begin(head.as_bytes());
            for line in request.headers.iter() {
                list.add(head.as_bytes(), line);
                let name = HeaderName::from_bytes(line.name.as_bytes()).unwrap();
                table.append(name, HeaderValue::from_bytes(line.value).unwrap());
            }
            table.trim();
            list.trim();
            for step in &steps {
                change(&mut table, step);
                change(&mut list, step);
            }
            let (mut from_table, mut from_list) = (Vec::new(), Vec::new());
            table.iter().for_each(|(name, value)| {
                write_field(&mut from_table, name.as_str().as_bytes(), value.as_bytes());
            });
            list.write(&mut from_list);
            prop_assert_eq!(String::from_utf8(from_list), String::from_utf8(from_table));
            for name in NAMES {
                let (of_list, of_table) = (list.lines(name), table.lines(name));
                prop_assert_eq!(of_list.collect::<Vec<_>>(), of_table.collect::<Vec<_>>());
                prop_assert_eq!(list.line(name, 1), table.line(name, 1));
            }
        }
    }
}
