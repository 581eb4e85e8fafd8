//! WebSocket and other upgrades.

use std::io::{Read, Write};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use sha1_smol::Sha1;

use super::{Client, FREE, Stage, bare, read_message};

const KEY: &str = "dGhlIHNhbXBsZSBub25jZQ==";

/// One frame: opcode and payload.
pub(super) fn read_frame(stream: &mut impl Read) -> Option<(u8, Vec<u8>)> {
    let mut head = [0; 2];
    stream.read_exact(&mut head).ok()?;
    let masked = head[1] & 0x80 > 0;
    let length = match head[1] & 0x7f {
        126 => {
            let mut long = [0; 2];
            stream.read_exact(&mut long).ok()?;
            usize::from(u16::from_be_bytes(long))
        }
        short => usize::from(short),
    };
    let mut mask = [0; 4];
    if masked {
        stream.read_exact(&mut mask).ok()?;
    }
    let mut text = vec![0; length];
    stream.read_exact(&mut text).ok()?;
    text.iter_mut().zip(mask.iter().cycle()).for_each(|(byte, mask)| *byte ^= mask);
    Some((head[0] & 0xf, text))
}

pub(super) fn frame(code: u8, text: &[u8], masked: bool) -> Vec<u8> {
    let (mut out, flag) = (vec![0x80 | code], if masked { 0x80 } else { 0 });
    match u8::try_from(text.len()) {
        Ok(short) if short < 126 => out.push(flag | short),
        _ => {
            out.push(flag | 126);
            out.extend(u16::try_from(text.len()).unwrap().to_be_bytes());
        }
    }
    let mask = if masked { [7, 13, 21, 42] } else { [0; 4] };
    if masked {
        out.extend(mask);
    }
    out.extend(text.iter().zip(mask.iter().cycle()).map(|(byte, mask)| byte ^ mask));
    out
}

/// Echoes frames, and answers pings and the close frame.
pub(super) fn echo() -> std::net::SocketAddr {
    bare(|mut stream| {
        let Some((head, _)) = read_message(&mut stream) else { return };
        assert!(
            head.contains("connection: upgrade\r\n") && head.contains("upgrade: websocket\r\n"),
            "{head}"
        );
        let key = head.lines().find_map(|line| line.strip_prefix("sec-websocket-key: ")).unwrap();
        let accept =
            Sha1::from(format!("{key}258EAFA5-E914-47DA-95CA-C5AB0DC85B11")).digest().bytes();
        let accept = STANDARD.encode(accept);
        let answer = format!(
            "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: {accept}\r\n\r\n"
        );
        // The first frame arrives together with the response.
        let first = [answer.as_bytes(), &frame(1, b"welcome", false)].concat();
        stream.get_mut().write_all(&first).unwrap();
        while let Some((code, text)) = read_frame(&mut stream) {
            let code = if code == 9 { 10 } else { code };
            stream.get_mut().write_all(&frame(code, &text, false)).unwrap();
            if code == 8 {
                return;
            }
        }
    })
}

pub(super) fn begin(client: &mut Client) -> super::Answer {
    client.get(
        "/chat",
        &format!("Connection: keep-alive, Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {KEY}\r\n"),
    )
}

#[test]
fn a_websocket_session_is_forwarded() {
    let stage = Stage::before(&format!("http://{}", echo()), FREE);
    let mut client = stage.connect();
    let answer = begin(&mut client);
    assert_eq!(answer.status, 101, "{}", answer.head);
    assert_eq!(answer.field("sec-websocket-accept"), Some("s3pPLMBiTxaQ9kYGzzhZRbK+xOo="));
    assert_eq!(answer.field("upgrade"), Some("websocket"));
    assert_eq!(read_frame(&mut client.stream), Some((1, b"welcome".to_vec())));
    let long = vec![b'x'; 60_000];
    for (code, text, back) in
        [(1, &b"hello"[..], 1), (9, b"are you there", 10), (2, &long, 2), (1, b"", 1)]
    {
        client.send(frame(code, text, true));
        assert_eq!(read_frame(&mut client.stream), Some((back, text.to_vec())));
    }
    client.send(frame(8, &[3, 232], true));
    assert_eq!(read_frame(&mut client.stream), Some((8, vec![3, 232])));
    assert!(client.is_over(), "the end is forwarded");
}

#[test]
fn rules_count_upgrades_and_upstreams_may_decline_them() {
    let stage =
        Stage::before(&format!("http://{}", echo()), "rules: [{ name: all, limit: 1/h }]\n");
    let mut first = stage.connect();
    assert_eq!(begin(&mut first).status, 101);
    assert_eq!(begin(&mut stage.connect()).status, 429);
    let declining = bare(|mut stream| {
        while read_message(&mut stream).is_some() {
            let _ = stream.get_mut().write_all(
                b"HTTP/1.1 426 Upgrade Required\r\nupgrade: foo/2\r\ncontent-length: 2\r\n\r\nno",
            );
        }
    });
    let stage = Stage::before(&format!("http://{declining}"), FREE);
    let mut client = stage.connect();
    for _ in 0..2 {
        let answer = begin(&mut client);
        assert_eq!((answer.status, answer.body.as_str()), (426, "no"), "and the connection stays");
    }
}

#[test]
fn an_idle_session_ends() {
    let stage = Stage::with(&format!("http://{}", echo()), ", upgraded_idle_secs: 1", FREE);
    let mut client = stage.connect();
    assert_eq!(begin(&mut client).status, 101);
    assert_eq!(read_frame(&mut client.stream), Some((1, b"welcome".to_vec())));
    assert!(client.is_over());
}
