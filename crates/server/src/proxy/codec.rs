//! HTTP/1.1 heads for the [fast path](super::fast_path): parsed as hyper parses them, and written
//! as hyper writes them.
//!
//! Only unambiguous messages are parsed here. A header that controls the connection or the body,
//! other than one length in digits, makes a message unsupported.

use std::mem::MaybeUninit;
use std::ops::Range;

use axum::http::StatusCode;

use super::fields::{Fields, write_field};
use crate::listen::wire::{is_framing_header, push_date};

/// Messages with more headers take the general path.
const MAX_HEADERS: usize = 64;
/// Longer lengths take the general path.
const MAX_DIGITS: usize = 15;

/// A complete request: where its parts are.
#[derive(Debug)]
pub(super) struct ParsedRequest {
    pub(super) method: Range<usize>,
    pub(super) target: Range<usize>,
    /// How many bytes the head takes.
    pub(super) body_at: usize,
    /// How many bytes head and body take together.
    pub(super) used: usize,
}

/// The request at the front of `bytes`, if the fast path supports it; `fields` receives its
/// headers.
pub(super) fn request(bytes: &[u8], fields: &mut Fields) -> Option<ParsedRequest> {
    let mut lines = [const { MaybeUninit::uninit() }; MAX_HEADERS];
    let mut parsed = httparse::Request::new(&mut []);
    let Ok(httparse::Status::Complete(body_at)) =
        parsed.parse_with_uninit_headers(bytes, &mut lines)
    else {
        return None;
    };
    let (Some(method), Some(target), Some(1)) = (parsed.method, parsed.path, parsed.version) else {
        return None;
    };
    // Their responses have no body, whatever the headers say.
    if matches!(method, "CONNECT" | "HEAD") {
        return None;
    }
    if !target.starts_with('/') || !target.bytes().all(is_plain) {
        return None;
    }
    let framing = read_fields(parsed.headers, &bytes[..body_at], fields)?;
    let used = body_at.checked_add(usize::try_from(framing.length.unwrap_or(0)).ok()?)?;
    if framing.closes || used > bytes.len() {
        return None;
    }
    let (method, target) = (range(bytes, method.as_bytes()), range(bytes, target.as_bytes()));
    Some(ParsedRequest { method, target, body_at, used })
}

/// Whether all servers read this byte of a target alike. A fragment, for example, is cut off.
fn is_plain(byte: u8) -> bool {
    matches!(byte, 0x21 | 0x24..=0x3b | 0x3d | 0x3f..=0x5f | 0x61..=0x7a | 0x7c | 0x7e)
}

/// Where in `bytes` a part of them is.
fn range(bytes: &[u8], part: &[u8]) -> Range<usize> {
    let start = part.as_ptr() as usize - bytes.as_ptr() as usize;
    start..start + part.len()
}

/// A response head, and where the body starts.
#[derive(Debug)]
pub(super) struct ParsedResponse {
    pub(super) status: StatusCode,
    /// The reason phrase, if it is not the usual one.
    reason: Option<Range<usize>>,
    /// How many bytes the head takes.
    pub(super) body_at: usize,
    /// How long the body is.
    pub(super) length: u64,
    /// Whether the connection can be used again.
    pub(super) is_reusable: bool,
}

/// The response at the front of `bytes`, if the fast path supports it; `fields` receives its
/// headers.
pub(super) fn response(bytes: &[u8], fields: &mut Fields) -> Option<ParsedResponse> {
    let mut lines = [const { MaybeUninit::uninit() }; MAX_HEADERS];
    let mut parsed = httparse::Response::new(&mut []);
    let read = httparse::ParserConfig::default().parse_response_with_uninit_headers(
        &mut parsed,
        bytes,
        &mut lines,
    );
    let Ok(httparse::Status::Complete(body_at)) = read else { return None };
    let (Some(code), Some(reason), Some(1)) = (parsed.code, parsed.reason, parsed.version) else {
        return None;
    };
    let status = StatusCode::from_u16(code).ok().filter(|status| !status.is_informational())?;
    let own = match reason {
        _ if status.canonical_reason() == Some(reason) => None,
        "" => Some(0..0),
        reason => Some(range(bytes, reason.as_bytes())),
    };
    let framing = read_fields(parsed.headers, &bytes[..body_at], fields)?;
    let bodiless = matches!(status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED);
    let length = match framing.length {
        None if bodiless => 0,
        Some(length) if !bodiless => length,
        _ => return None,
    };
    Some(ParsedResponse { status, reason: own, body_at, length, is_reusable: !framing.closes })
}

/// The framing of a message: body length, and whether the connection closes.
struct Framing {
    length: Option<u64>,
    closes: bool,
}

/// Reads the headers of a message; `None` if the fast path does not support one of them.
fn read_fields(
    lines: &[httparse::Header<'_>],
    head: &[u8],
    fields: &mut Fields,
) -> Option<Framing> {
    let mut framing = Framing { length: None, closes: false };
    fields.begin(head);
    for line in lines {
        match line.name {
            name if name.eq_ignore_ascii_case("content-length") => {
                let said = length(line.value)?;
                if framing.length.replace(said).is_some() {
                    return None;
                }
            }
            name if name.eq_ignore_ascii_case("connection") => match line.value {
                value if value.eq_ignore_ascii_case(b"keep-alive") => {}
                value if value.eq_ignore_ascii_case(b"close") => framing.closes = true,
                _ => return None,
            },
            name if name.eq_ignore_ascii_case("keep-alive") => {}
            name if is_framing_header(name) => return None,
            _ => {}
        }
        fields.add(head, line);
    }
    Some(framing)
}

/// A length that is written in digits.
fn length(value: &[u8]) -> Option<u64> {
    if value.is_empty() || value.len() > MAX_DIGITS || !value.iter().all(u8::is_ascii_digit) {
        return None;
    }
    Some(value.iter().fold(0, |number, digit| number * 10 + u64::from(digit - b'0')))
}

/// Writes the head of a request for a target behind this base.
pub(super) fn write_request(
    out: &mut Vec<u8>,
    method: &[u8],
    (base, target): (&str, &[u8]),
    fields: &Fields,
) {
    out.extend_from_slice(method);
    out.push(b' ');
    out.extend_from_slice(base.as_bytes());
    out.extend_from_slice(target);
    out.extend_from_slice(b" HTTP/1.1\r\n");
    fields.write(out);
    out.extend_from_slice(b"\r\n");
}

/// Writes the head of a response that was read from `bytes`.
pub(super) fn write_response(
    out: &mut Vec<u8>,
    response: &ParsedResponse,
    bytes: &[u8],
    fields: &Fields,
) {
    out.extend_from_slice(b"HTTP/1.1 ");
    out.extend_from_slice(response.status.as_str().as_bytes());
    out.push(b' ');
    match &response.reason {
        None => {
            out.extend_from_slice(response.status.canonical_reason().unwrap_or_default().as_bytes())
        }
        Some(own) => out.extend_from_slice(&bytes[own.clone()]),
    }
    out.extend_from_slice(b"\r\n");
    let (mut empty, mut dated) = (false, false);
    for (name, value) in fields.iter() {
        // hyper writes a length of 0 last.
        if response.length == 0 && name == b"content-length" {
            empty = true;
            continue;
        }
        dated |= name == b"date";
        write_field(out, name, value);
    }
    if empty {
        out.extend_from_slice(b"content-length: 0\r\n");
    }
    if !dated {
        out.extend_from_slice(b"date: ");
        push_date(out);
        out.extend_from_slice(b"\r\n");
    }
    out.extend_from_slice(b"\r\n");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(bytes: &[u8]) -> Option<ParsedRequest> {
        super::request(bytes, &mut Fields::default())
    }

    #[test]
    fn complete_requests_take_the_fast_path() {
        for (text, body) in [
            ("GET / HTTP/1.1\r\nhost: a\r\n\r\n", ""),
            (
                "GET /a/b?c=d HTTP/1.1\r\nHost: a\r\nConnection: Keep-Alive\r\nKeep-Alive: timeout=5\r\nX-A: 1\r\nX-A: 2\r\n\r\n",
                "",
            ),
            ("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nhello", "hello"),
            ("PURGE / HTTP/1.1\r\ncontent-length: 0\r\n\r\n", ""),
        ] {
            let parsed = request(text.as_bytes()).unwrap_or_else(|| panic!("{text}"));
            assert_eq!(
                (&text[parsed.body_at..parsed.used], parsed.used),
                (body, text.len()),
                "{text}"
            );
            // The bytes behind it are not consumed, and no prefix of it is a request.
            assert_eq!(
                request(format!("{text}GET").as_bytes()).map(|parsed| parsed.used),
                Some(text.len()),
                "{text}"
            );
            for end in 0..text.len() {
                assert!(request(&text.as_bytes()[..end]).is_none(), "{end} of {text}");
            }
        }
    }

    #[test]
    fn all_other_requests_take_the_general_path() {
        for head in [
            "GET / HTTP/1.0\r\nHost: a",
            "GET * HTTP/1.1\r\nHost: a",
            "GET http://a/ HTTP/1.1\r\nHost: a",
            "HEAD / HTTP/1.1\r\nHost: a",
            "CONNECT a:80 HTTP/1.1\r\nHost: a",
            "GET / HTTP/1.1\r\nHost: a\r\nConnection: close",
            "GET / HTTP/1.1\r\nHost: a\r\nConnection: x-own",
            "GET / HTTP/1.1\r\nHost: a\r\nConnection: keep-alive, upgrade\r\nUpgrade: websocket",
            "GET / HTTP/1.1\r\nHost: a\r\nUpgrade: websocket",
            "GET / HTTP/1.1\r\nHost: a\r\nTE: trailers",
            "POST / HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 0",
            "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked",
            "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\nTransfer-Encoding: chunked",
            "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\nContent-Length: 0",
            "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 0, 0",
            "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: +0",
            "POST / HTTP/1.1\r\nHost: a\r\nContent-Length:",
            "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999999999999",
            "POST / HTTP/1.1\r\nHost: a\r\nContent-Length : 0",
            "GET / HTTP/1.1\r\nHost: a\r\n folded: yes",
            "GET /\u{7f} HTTP/1.1\r\nHost: a",
            "GET /a#b HTTP/1.1\r\nHost: a",
        ] {
            assert!(request(format!("{head}\r\n\r\n").as_bytes()).is_none(), "{head}");
        }
    }

    #[test]
    fn responses_with_a_length_take_the_fast_path() {
        for (head, length, is_reusable) in [
            ("HTTP/1.1 200 OK\r\nContent-Length: 5", Some(5), true),
            ("HTTP/1.1 200\r\nContent-Length: 0\r\nConnection: keep-alive", Some(0), true),
            (
                "HTTP/1.1 404 What\r\nConnection: Close\r\nContent-Length: 100000000000",
                Some(100_000_000_000),
                false,
            ),
            ("HTTP/1.1 204 No Content", Some(0), true),
            ("HTTP/1.1 304 Not Modified\r\nETag: x", Some(0), true),
            ("HTTP/1.1 304 Not Modified\r\nContent-Length: 5", None, true),
            ("HTTP/1.1 200 OK", None, true),
            ("HTTP/1.0 200 OK\r\nContent-Length: 5", None, true),
            ("HTTP/1.1 100 Continue", None, true),
            ("HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade", None, true),
            ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked", None, true),
            ("HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked", None, true),
            ("HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 5", None, true),
            ("HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: x-own", None, true),
            ("HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTrailer: x", None, true),
        ] {
            let found = response(format!("{head}\r\n\r\n").as_bytes(), &mut Fields::default());
            assert_eq!(found.as_ref().map(|found| found.length), length, "{head}");
            assert!(found.is_none_or(|found| found.is_reusable == is_reusable), "{head}");
        }
    }
}
