//! Replies: every cut gives the same value, garbage gives an error, announced lengths cost nothing.

use proptest::prelude::*;

use super::super::resp::{
    Malformed, Scanner, decode, put_command, put_header, put_number_word, put_word,
};
use super::*;

const MAX: usize = 64 << 10;

/// A value as a server would write it, in RESP3.
fn written(value: &Value, out: &mut Vec<u8>) {
    let all =
        |mark: u8, count: usize, items: &mut dyn Iterator<Item = &Value>, out: &mut Vec<u8>| {
            out.extend_from_slice(format!("{}{count}\r\n", char::from(mark)).as_bytes());
            items.for_each(|item| written(item, out));
        };
    match value {
        Value::Nil => out.extend_from_slice(b"_\r\n"),
        Value::Int(number) => out.extend_from_slice(format!(":{number}\r\n").as_bytes()),
        Value::Bulk(bytes) => {
            out.extend_from_slice(format!("${}\r\n", bytes.len()).as_bytes());
            out.extend_from_slice(bytes);
            out.extend_from_slice(b"\r\n");
        }
        Value::Simple(text) => out.extend_from_slice(format!("+{text}\r\n").as_bytes()),
        Value::Bool(yes) => out.extend_from_slice(if *yes { b"#t\r\n" } else { b"#f\r\n" }),
        Value::Double(text) => out.extend_from_slice(format!(",{text}\r\n").as_bytes()),
        Value::Array(items) => all(b'*', items.len(), &mut items.iter(), out),
        Value::Map(pairs) => {
            all(b'%', pairs.len(), &mut pairs.iter().flat_map(|(k, v)| [k, v]), out)
        }
        Value::Push(items) => all(b'>', items.len(), &mut items.iter(), out),
        Value::Error(text) => out.extend_from_slice(format!("-{text}\r\n").as_bytes()),
    }
}

fn values() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Nil),
        any::<i64>().prop_map(Value::Int),
        prop::collection::vec(any::<u8>(), 0..40).prop_map(Value::Bulk),
        "[ -~]{0,20}".prop_map(Value::Simple),
        any::<bool>().prop_map(Value::Bool),
        "-?[0-9]{1,5}(\\.[0-9]{1,3})?".prop_map(Value::Double),
        "[ -~]{0,20}".prop_map(Value::Error),
    ];
    leaf.prop_recursive(4, 40, 6, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..6).prop_map(Value::Array),
            prop::collection::vec((inner.clone(), inner), 0..4).prop_map(Value::Map),
        ]
    })
}

/// Feeds `bytes` in pieces and returns what comes out, with what is left.
fn fed(bytes: &[u8], cuts: &[usize]) -> Result<(Vec<Value>, usize), Malformed> {
    let (mut scanner, mut start, mut found) = (Scanner::default(), 0, Vec::new());
    for &end in cuts.iter().chain([&bytes.len()]) {
        while start < end {
            let Some(length) = scanner.scan(&bytes[start..end], MAX)? else { break };
            found.push(decode(&bytes[start..start + length])?);
            start += length;
        }
    }
    Ok((found, bytes.len() - start))
}

proptest! {
    #[test]
    fn a_reply_is_the_same_however_it_is_cut(value in values(), other in values()) {
        let mut bytes = Vec::new();
        written(&value, &mut bytes);
        written(&other, &mut bytes);
        let expected = Ok((vec![value, other], 0));
        prop_assert_eq!(&fed(&bytes, &[]), &expected);
        for cut in 0..bytes.len() {
            prop_assert_eq!(&fed(&bytes, &[cut]), &expected);
        }
        let every: Vec<usize> = (0..bytes.len()).collect();
        prop_assert_eq!(&fed(&bytes, &every), &expected);
    }

    #[test]
    fn garbage_is_refused_or_incomplete_but_never_a_panic(
        mut bytes in prop::collection::vec(any::<u8>(), 0..200),
        cuts in any::<u64>(),
    ) {
        // Mostly bytes that mean something.
        for (index, byte) in bytes.iter_mut().enumerate() {
            if cuts >> (index % 61) & 1 == 0 {
                *byte = b"*$:+-_#%~>|=!(,0123456789-\r\n\r\n"[usize::from(*byte) % 30];
            }
        }
        let every: Vec<usize> = (0..bytes.len()).collect();
        prop_assert_eq!(fed(&bytes, &[]).is_err(), fed(&bytes, &every).is_err());
    }

    #[test]
    fn a_changed_byte_changes_at_most_this_reply(
        value in values(),
        at in any::<prop::sample::Index>(),
        to in any::<u8>(),
    ) {
        let mut bytes = Vec::new();
        written(&value, &mut bytes);
        let at = at.index(bytes.len());
        bytes[at] = to;
        // Whatever it is now, it is not longer than what came.
        if let Ok((_, left)) = fed(&bytes, &[]) {
            prop_assert!(left <= bytes.len());
        }
    }
}

#[test]
fn every_kind_of_reply_is_understood() {
    for (bytes, value) in [
        ("+OK\r\n", Value::Simple("OK".into())),
        ("-ERR no\r\n", Value::Error("ERR no".into())),
        (":-5\r\n", Value::Int(-5)),
        (":9223372036854775807\r\n", Value::Int(i64::MAX)),
        (":-9223372036854775808\r\n", Value::Int(i64::MIN)),
        ("$-1\r\n", Value::Nil),
        ("*-1\r\n", Value::Nil),
        ("_\r\n", Value::Nil),
        ("$0\r\n\r\n", bulk("")),
        ("$4\r\na\r\nb\r\n", bulk("a\r\nb")),
        ("*0\r\n", Value::Array(vec![])),
        ("~1\r\n:1\r\n", Value::Array(vec![Value::Int(1)])),
        ("#t\r\n", Value::Bool(true)),
        (",1.5\r\n", Value::Double("1.5".into())),
        ("(123456789012345678901234567890\r\n", bulk("123456789012345678901234567890")),
        ("=7\r\ntxt:abc\r\n", bulk("abc")),
        ("!5\r\nERR x\r\n", Value::Error("ERR x".into())),
        ("%1\r\n+k\r\n:1\r\n", Value::Map(vec![(Value::Simple("k".into()), Value::Int(1))])),
        (">1\r\n+x\r\n", Value::Push(vec![Value::Simple("x".into())])),
        ("|1\r\n+ttl\r\n:5\r\n:7\r\n", Value::Int(7)),
        ("|0\r\n:7\r\n", Value::Int(7)),
        ("|0\r\n|1\r\n|0\r\n+a\r\n*1\r\n:9\r\n:7\r\n", Value::Int(7)),
        (
            "%1\r\n|0\r\n+k\r\n*0\r\n",
            Value::Map(vec![(Value::Simple("k".into()), Value::Array(vec![]))]),
        ),
        ("*2\r\n:1\r\n|1\r\n+a\r\n+b\r\n:2\r\n", Value::Array(vec![Value::Int(1), Value::Int(2)])),
    ] {
        assert_eq!(fed(bytes.as_bytes(), &[]), Ok((vec![value.clone()], 0)), "{bytes:?}");
        let every: Vec<usize> = (0..bytes.len()).collect();
        assert_eq!(fed(bytes.as_bytes(), &every), Ok((vec![value], 0)), "{bytes:?}");
    }
}

#[test]
fn what_is_no_reply_is_refused_as_soon_as_it_shows() {
    use Malformed::{Garbage, TooDeep, TooLarge};
    for (bytes, expected) in [
        ("HTTP/1.1 400 Bad Request\r\n", Garbage),
        ("\r\n", Garbage),
        ("+OK\n", Garbage),
        (":1x\r\n", Garbage),
        (":\r\n", Garbage),
        (":+1\r\n", Garbage),
        (":9223372036854775808\r\n", Garbage),
        ("$-2\r\n", Garbage),
        ("$x\r\n", Garbage),
        ("$?\r\n", Garbage),
        ("*?\r\n", Garbage),
        ("#x\r\n", Garbage),
        ("_x\r\n", Garbage),
        ("%-1\r\n", Garbage),
        ("$3\r\nabcXY", Garbage),
        ("*1000000000\r\n", TooLarge),
        ("$536870912\r\n", TooLarge),
        ("*2\r\n$40000\r\n", TooLarge),
        ("*1\r\n>1\r\n", TooDeep),
        ("$11111111111111111111111111111111111111", Garbage),
    ] {
        let mut padded = bytes.as_bytes().to_vec();
        if expected == TooLarge && bytes.starts_with("*2") {
            padded = format!("*2\r\n$40000\r\n{}\r\n$40000\r\n", "x".repeat(40000)).into_bytes();
        }
        assert_eq!(fed(&padded, &[]), Err(expected), "{bytes:?}");
    }
    assert_eq!(fed(&"*1\r\n".repeat(17).into_bytes(), &[]), Err(TooDeep));
    assert_eq!(fed(&[b"+".as_slice(), &vec![b'x'; MAX + 1]].concat(), &[]), Err(TooLarge));
}

#[test]
fn attributes_and_levels_cost_no_stack_and_are_bounded() {
    let reply = |attributes: usize| format!("{}+OK\r\n", "|0\r\n".repeat(attributes)).into_bytes();
    assert_eq!(fed(&reply(64), &[]), Ok((vec![Value::Simple("OK".into())], 0)));
    assert_eq!(fed(&reply(65), &[]), Err(Malformed::TooManyAttributes));
    // Without the scanner before it: what is decoded needs no stack either, on a thread that has
    // almost none.
    let deep = move || {
        let floods = [
            reply(1_000_000),
            format!("*1\r\n{}:1\r\n", "|1\r\n+a\r\n+b\r\n".repeat(1_000_000)).into_bytes(),
        ];
        (floods.map(|flood| decode(&flood)), decode(&b"*1\r\n".repeat(1_000_000)))
    };
    let (flat, nested) =
        std::thread::Builder::new().stack_size(64 << 10).spawn(deep).unwrap().join().unwrap();
    assert_eq!(flat, [Ok(Value::Simple("OK".into())), Ok(Value::Array(vec![Value::Int(1)]))]);
    assert_eq!(nested, Err(Malformed::TooDeep));
    // Sixteen levels are taken, in any mixture.
    let nested = |levels: usize| [b"*1\r\n".repeat(levels), b":1\r\n".to_vec()].concat();
    assert!(fed(&nested(16), &[]).is_ok() && fed(&nested(17), &[]) == Err(Malformed::TooDeep));
}

#[test]
fn a_drip_of_bytes_is_not_read_over_and_over() {
    // A reply of the largest size, a byte at a time. Scanning from the start each time would take
    // minutes.
    let mut bytes = b"*6000\r\n".to_vec();
    bytes.extend(b"$2\r\nab\r\n".repeat(6000));
    assert!(bytes.len() < MAX);
    let start = std::time::Instant::now();
    let every: Vec<usize> = (0..bytes.len()).collect();
    let (found, left) = fed(&bytes, &every).unwrap();
    assert_eq!((found.len(), left), (1, 0));
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
}

#[test]
fn commands_are_written_as_arrays_of_strings() {
    let mut out = Vec::new();
    put_command(&mut out, &["SET", "k", ""]);
    assert_eq!(out, b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$0\r\n\r\n");
    out.clear();
    put_header(&mut out, 12345);
    put_word(&mut out, b"a\r\nb");
    put_number_word(&mut out, 0);
    put_number_word(&mut out, usize::MAX);
    assert_eq!(out, b"*12345\r\n$4\r\na\r\nb\r\n$1\r\n0\r\n$20\r\n18446744073709551615\r\n");
}

#[test]
fn a_script_is_known_by_its_digest() {
    let script = Script::new("return 1");
    assert_eq!(script.sha(), "e0e1f9fabfc9d4800c877a703b823ac0578ff8db");
    let mut out = Vec::new();
    script.put_evalsha(&mut out, &["k"], &["a", "b"]);
    let expected = "*6\r\n$7\r\nEVALSHA\r\n$40\r\ne0e1f9fabfc9d4800c877a703b823ac0578ff8db\r\n$1\r\n1\r\n$1\r\nk\r\n$1\r\na\r\n$1\r\nb\r\n";
    assert_eq!(String::from_utf8(out).unwrap(), expected);
}

#[test]
fn slots_are_those_of_the_specification() {
    use super::super::slot_of;
    assert_eq!(slot_of(b"123456789"), 0x31C3);
    assert_eq!((slot_of(b""), slot_of(b"foo"), slot_of(b"user1000")), (0, 12182, 3443));
}
