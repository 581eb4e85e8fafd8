//! How servers read a path, as small functions: each is held to the real server, and rules to all
//! of them.
//!
//! A rule must decide on the path that the service sees. So every server must read a target that a
//! [`PathPolicy`] allows as a path with the same normal form, or not serve it.

use proptest::prelude::*;
use tidegate::http::{DotSegments, EscapedSlashes, PathPolicy, normal_path};
use tidegate_testkit::{Backend, BackendKind};

/// A server's reading of a path: the path it serves, spelled as a target; nothing if it refuses the
/// request or answers with a redirect.
type Reading = fn(&str) -> Option<String>;

/// The bytes that a path stands for. A `%` that begins nothing is one, unless that is an error.
fn decoded(path: &str, is_strict: bool) -> Option<Vec<u8>> {
    let (bytes, mut out, mut index) = (path.as_bytes(), Vec::new(), 0);
    while index < bytes.len() {
        let escaped = (bytes[index] == b'%').then(|| path.get(index + 1..index + 3)).flatten();
        let escaped =
            escaped.filter(|digits| digits.bytes().all(|digit| digit.is_ascii_hexdigit()));
        match escaped {
            Some(digits) => out.push(u8::from_str_radix(digits, 16).unwrap()),
            None if bytes[index] == b'%' && is_strict => return None,
            None => out.push(bytes[index]),
        }
        index += if escaped.is_some() { 3 } else { 1 };
    }
    Some(out)
}

/// A path of these bytes as a target.
fn spelled(path: &[u8]) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~!$&'()*+,=:@/;".contains(&byte);
    path.iter()
        .map(
            |byte| {
                if plain(*byte) { char::from(*byte).to_string() } else { format!("%{byte:02X}") }
            },
        )
        .collect()
}

/// Without `.` and `..`, several slashes being one; nothing if `..` leaves the root and that is an
/// error.
fn resolved(path: &[u8], leaves: bool) -> Option<Vec<u8>> {
    let (mut kept, mut is_folder): (Vec<&[u8]>, bool) = (Vec::new(), false);
    for segment in path.split(|byte| *byte == b'/') {
        is_folder = matches!(segment, b"" | b"." | b"..");
        match segment {
            b"" | b"." => {}
            b".." if kept.pop().is_none() && !leaves => return None,
            b".." => {}
            segment => kept.push(segment),
        }
    }
    let mut out = Vec::new();
    kept.iter().for_each(|segment| out.extend([b"/", *segment].concat()));
    if is_folder || out.is_empty() {
        out.push(b'/');
    }
    Some(out)
}

fn nginx(path: &str) -> Option<String> {
    let decoded = decoded(path, true).filter(|path| !path.contains(&0))?;
    resolved(&decoded, false).map(|path| spelled(&path))
}

/// Flask under gunicorn: escapes are decoded, and slashes at the beginning are one.
fn flask(path: &str) -> Option<String> {
    let decoded = spelled(&decoded(path, false)?);
    Some(format!("/{}", decoded.trim_start_matches('/')))
}

/// Go's ServeMux: escapes are decoded, and what is not clean is redirected.
fn go(path: &str) -> Option<String> {
    let decoded = decoded(path, true)?;
    (resolved(&decoded, true)? == decoded).then(|| spelled(&decoded))
}

/// Node's `new URL`: a backslash is a slash, dots are resolved, and other escapes stay as they are.
fn node(path: &str) -> Option<String> {
    let path = path.replace('\\', "/");
    let path = match path.strip_prefix("//").map(|rest| rest.trim_start_matches('/')) {
        // It names a host.
        Some(rest) => rest.find('/').map_or("/", |at| &rest[at..]),
        None => &path,
    };
    let mut kept: Vec<&str> = Vec::new();
    let segments: Vec<&str> = path.split('/').skip(1).collect();
    for (index, segment) in segments.iter().enumerate() {
        let is_last = index + 1 == segments.len();
        let dots = segment.to_ascii_lowercase().replace("%2e", ".");
        match dots.as_str() {
            "." | ".." => {
                if dots == ".." {
                    kept.pop();
                }
                if is_last {
                    kept.push("");
                }
            }
            _ => kept.push(segment),
        }
    }
    Some(format!("/{}", kept.join("/")))
}

/// PHP: `rawurldecode` of `REQUEST_URI`.
fn php(path: &str) -> Option<String> {
    decoded(path, false).map(|path| spelled(&path))
}

/// Tomcat and its like: parameters are cut off before anything is decoded; escaped slashes are
/// refused.
fn tomcat(path: &str) -> Option<String> {
    let lower = path.to_ascii_lowercase();
    if lower.contains("%2f")
        || lower.contains("%5c")
        || path.contains('\\')
        || lower.contains("%00")
    {
        return None;
    }
    let cut: Vec<&str> =
        path.split('/').map(|segment| segment.split(';').next().unwrap()).collect();
    resolved(&decoded(&cut.join("/"), true)?, false).map(|path| spelled(&path))
}

const READINGS: [(&str, Reading); 6] = [
    ("nginx", nginx),
    ("flask", flask),
    ("go", go),
    ("node", node),
    ("php", php),
    ("tomcat", tomcat),
];

fn reading_of(kind: BackendKind) -> Reading {
    match kind {
        BackendKind::Nginx => nginx,
        BackendKind::Flask => flask,
        BackendKind::Go => go,
        BackendKind::Node => node,
        BackendKind::Php => php,
    }
}

const TARGETS: [&str; 38] = [
    "/login",
    "/%6cogin",
    "/%2flogin",
    "/%2Flogin",
    "//login",
    "/x/..%2flogin",
    "/x/../login",
    "/x/%2e%2e/login",
    "/x/.%2E/login",
    "/./login",
    "/login/",
    "/login/.",
    "/login/..",
    "/login/%2e",
    "/x//login",
    "/x/y//../login",
    "/v1%2fsearch",
    "/v1%2Fsearch?k=1",
    "/v1/%73earch",
    "/v1/chat/..;/search",
    "/v1/chat/..;/x",
    "/v1/chat/%2e%2e%3b/search",
    "/v1\\search",
    "/v1%5csearch",
    "/v1/x\\..\\search",
    "/v1/search;a=1",
    "/v1/search%3ba=1",
    "/v1;a=1/search",
    "/v1/search%20",
    "/v1/search%23",
    "/v1/search%3f",
    "/v1/search%252f",
    "/v1/%252e%252e/search",
    "/v1/search+a",
    "/V1/search",
    "/v1/.../search",
    "/%c3%a9",
    "/a:b@c!$&'()*+,=",
];

#[test]
fn each_reading_is_the_one_of_its_server() {
    for kind in BackendKind::ALL {
        let (backend, reading) = (Backend::start(kind), reading_of(kind));
        for target in TARGETS {
            let (status, body) = backend.get(target, &[]);
            let path =
                body.lines().find_map(|line| line.strip_prefix("path: ")).filter(|_| status == 200);
            // Node does not decode, and says the path in its escapes.
            let seen = path.map(|path| {
                if kind == BackendKind::Node { path.into() } else { spelled(path.as_bytes()) }
            });
            let expected = reading(target.split('?').next().unwrap());
            assert_eq!(seen, expected, "{kind:?} reads {target}: {status} {body}");
        }
        // NUL, of which each has an opinion: it is refused before it gets there.
        assert!(PathPolicy::KEEP.read("/login%00").is_err());
    }
}

/// Pieces that make paths which servers read in different ways.
fn target() -> impl Strategy<Value = String> {
    let pieces = [
        "/", "/", "/", "//", "%2f", "%2F", "\\", "%5c", ".", "..", "%2e", "%2E%2e", "..;", ";",
        "%3b", ";a=1", "login", "v1", "search", "%73", "%", "%zz", "%25", "%252f", "%00", "%20",
        "%3f", "%23", "+", "a", "\u{e9}", "%c3%a9", "{",
    ];
    prop::collection::vec(prop::sample::select(pieces.to_vec()), 0..10)
        .prop_map(|pieces| format!("/{}", pieces.concat()))
}

fn policies() -> impl Iterator<Item = PathPolicy> {
    let slashes = [EscapedSlashes::Reject, EscapedSlashes::Decode];
    let dots = [DotSegments::Reject, DotSegments::Resolve];
    slashes.into_iter().flat_map(move |escaped_slashes| {
        dots.into_iter().map(move |dot_segments| PathPolicy { escaped_slashes, dot_segments })
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4096))]

    /// The path that is judged is the one that each server reads in what it is sent.
    #[test]
    fn what_is_judged_is_what_every_server_reads(target in target()) {
        for policy in policies() {
            let Ok(read) = policy.read(&target) else { continue };
            prop_assert_eq!(&*normal_path(&read.sent).unwrap(), &*read.path, "{} with {:?}", target, policy);
            for (server, reading) in READINGS {
                if let Some(seen) = reading(&read.sent) {
                    let seen_by_rules = normal_path(&seen).unwrap();
                    prop_assert_eq!(
                        &*seen_by_rules, &*read.path,
                        "{} reads {} as {}; it was {} with {:?}", server, read.sent, seen, target, policy
                    );
                }
            }
        }
    }

    /// By default nothing is changed but slashes at the beginning: what cannot be changed on its
    /// way, at forward-auth, is judged as safely.
    #[test]
    fn without_settings_a_target_goes_on_as_it_came(target in target()) {
        if let Ok(read) = PathPolicy::default().read(&target) {
            prop_assert_eq!(read.sent.trim_start_matches('/'), target.trim_start_matches('/'));
        }
    }
}
