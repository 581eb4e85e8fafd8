//! Denials over gRPC: a status in the headers, with details for programs.
//!
//! The details are four small messages of `google.rpc`, which do not change. This module encodes
//! them itself; the tests decode them with prost.

use std::fmt::Write;

use ::http::header::CONTENT_TYPE;
use ::http::{HeaderName, HeaderValue, Response};
use tidegate_core::Retry;

use super::denial::Denial;

pub(super) const INVALID_ARGUMENT: u32 = 3;
pub(super) const PERMISSION_DENIED: u32 = 7;
pub(super) const RESOURCE_EXHAUSTED: u32 = 8;
pub(super) const INTERNAL: u32 = 13;
pub(super) const UNAVAILABLE: u32 = 14;

const STATUS: HeaderName = HeaderName::from_static("grpc-status");
const MESSAGE: HeaderName = HeaderName::from_static("grpc-message");
const DETAILS: HeaderName = HeaderName::from_static("grpc-status-details-bin");
/// The wait of a client that retries automatically; negative if it should not retry.
const PUSHBACK: HeaderName = HeaderName::from_static("grpc-retry-pushback-ms");

/// RESOURCE_EXHAUSTED, with the wait and the policies that denied.
pub(super) fn exhausted(denial: &Denial<'_>) -> Response<String> {
    let wait_us = match denial.decision.retry() {
        Retry::Now => Some(0),
        Retry::After(micros) => Some(micros),
        Retry::Never => None,
    };
    let message = denial.reply.reason().detail();
    let mut response = failed(RESOURCE_EXHAUSTED, &message);
    let pushback = wait_us.map_or("-1".into(), |micros| micros.div_ceil(1000).to_string());
    let mut put = |name, value: String| {
        if let Ok(value) = HeaderValue::try_from(value) {
            response.headers_mut().insert(name, value);
        }
    };
    put(PUSHBACK, pushback);
    put(DETAILS, base64(&details(&message, wait_us, denial)));
    response
}

/// A response of a status only.
pub(super) fn failed(code: u32, message: &str) -> Response<String> {
    let mut response = Response::new(String::new());
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    headers.insert(STATUS, code.into());
    if let Ok(message) = HeaderValue::try_from(encoded(message)) {
        headers.insert(MESSAGE, message);
    }
    response
}

/// The percent encoding of gRPC messages: visible ASCII stays, except `%`.
fn encoded(message: &str) -> String {
    let mut out = String::with_capacity(message.len());
    for byte in message.bytes() {
        match byte {
            b' '..=b'~' if byte != b'%' => out.push(char::from(byte)),
            _ => {
                let _ = write!(out, "%{byte:02X}");
            }
        }
    }
    out
}

/// `google.rpc.Status` with `RetryInfo` and `QuotaFailure`.
fn details(message: &str, wait_us: Option<u64>, denial: &Denial<'_>) -> Vec<u8> {
    let mut status = Vec::new();
    number(&mut status, 1, u64::from(RESOURCE_EXHAUSTED));
    piece(&mut status, 2, message.as_bytes());
    if let Some(micros) = wait_us {
        let mut delay = Vec::new();
        number(&mut delay, 1, micros / 1_000_000);
        number(&mut delay, 2, micros % 1_000_000 * 1000);
        let mut retry = Vec::new();
        piece(&mut retry, 1, &delay);
        any(&mut status, "type.googleapis.com/google.rpc.RetryInfo", &retry);
    }
    let mut failure = Vec::new();
    for rule in denial.violated {
        let mut violation = Vec::new();
        piece(&mut violation, 1, rule.as_bytes());
        piece(&mut violation, 2, b"rate limit");
        piece(&mut failure, 1, &violation);
    }
    any(&mut status, "type.googleapis.com/google.rpc.QuotaFailure", &failure);
    status
}

/// Adds a detail to a status.
fn any(status: &mut Vec<u8>, kind: &str, message: &[u8]) {
    let mut any = Vec::new();
    piece(&mut any, 1, kind.as_bytes());
    piece(&mut any, 2, message);
    piece(status, 3, &any);
}

/// A field of bytes, text or a message.
fn piece(out: &mut Vec<u8>, field: u64, bytes: &[u8]) {
    varint(out, field << 3 | 2);
    varint(out, u64::try_from(bytes.len()).unwrap_or(u64::MAX));
    out.extend_from_slice(bytes);
}

/// A field with a number; none is written for zero.
fn number(out: &mut Vec<u8>, field: u64, value: u64) {
    if value != 0 {
        varint(out, field << 3);
        varint(out, value);
    }
}

fn varint(out: &mut Vec<u8>, mut value: u64) {
    loop {
        let low = u8::try_from(value & 0x7f).unwrap_or(0);
        value >>= 7;
        if value == 0 {
            return out.push(low);
        }
        out.push(low | 0x80);
    }
}

/// Without padding, as gRPC has it.
fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for three in bytes.chunks(3) {
        let at = |index: usize| u32::from(three.get(index).copied().unwrap_or(0));
        let bits = at(0) << 16 | at(1) << 8 | at(2);
        for digit in 0..=three.len() {
            let index = usize::try_from(bits >> (18 - 6 * digit) & 63).unwrap_or(0);
            out.push(char::from(DIGITS[index]));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digits_are_those_of_base64() {
        for (bytes, expected) in [
            ("", ""),
            ("f", "Zg"),
            ("fo", "Zm8"),
            ("foo", "Zm9v"),
            ("foobar", "Zm9vYmFy"),
            ("\u{7ff}?", "378/"),
        ] {
            assert_eq!(base64(bytes.as_bytes()), expected, "{bytes}");
        }
    }

    #[test]
    fn messages_are_ascii() {
        assert_eq!(encoded("100 % zu spät\n"), "100 %25 zu sp%C3%A4t%0A");
    }
}
