//! The bound for `CL.THROTTLE` over RESP: tokio, a flat table of sixteen bytes a key, and a reply
//! of five numbers.
//!
//! It takes everything on trust: commands as redis-benchmark writes them, hashes that no client
//! attacks, a table that never grows or forgets. It counts nothing, bounds nothing, has one
//! command, and writes numbers of two digits. No product could ship it; no product that uses the
//! same runtime has much to win beyond it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// Of each key a hash and the moment at which it is idle, in microseconds.
struct Table {
    slots: Vec<(AtomicU64, AtomicU64)>,
    start: Instant,
}

pub(crate) fn serve() {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime");
    let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).expect("a port");
    let at = listener.local_addr().expect("an address");
    let slots = (0..1 << 21).map(|_| Default::default()).collect();
    let table = Arc::new(Table { slots, start: Instant::now() });
    runtime.spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let _ = stream.set_nodelay(true);
            tokio::spawn(talk(stream, Arc::clone(&table)));
        }
    });
    crate::server::until_left_alone(at, at);
}

async fn talk(mut stream: TcpStream, table: Arc<Table>) {
    let (mut bytes, mut out) = (Vec::with_capacity(16 << 10), Vec::new());
    while let Ok(1..) = stream.read_buf(&mut bytes).await {
        let (mut at, now) = (0, 1 + table.start.elapsed().as_micros() as u64);
        while let Some((words, taken)) = command(&bytes[at..]) {
            match words {
                [b"CL.THROTTLE", key, burst, count, period, cost] => {
                    let [burst, count, period, cost] = [burst, count, period, cost].map(number);
                    table.answer(key, burst + 1, period * 1_000_000 / count, cost, now, &mut out);
                }
                _ => out.extend_from_slice(b"*0\r\n"),
            }
            at += taken;
        }
        bytes.drain(..at);
        if stream.write_all(&out).await.is_err() {
            return;
        }
        out.clear();
    }
}

/// Up to six words, and how many bytes they take.
fn command(bytes: &[u8]) -> Option<([&[u8]; 6], usize)> {
    let count = usize::from(bytes.get(1)? - b'0').min(6);
    let (mut at, mut words) = (4, [&[][..]; 6]);
    for word in &mut words[..count] {
        let digits = if *bytes.get(at + 2)? == b'\r' { 1 } else { 2 };
        let from = at + 3 + digits;
        let end = from + number(bytes.get(at + 1..at + 1 + digits)?) as usize;
        *word = bytes.get(from..end)?;
        at = end + 2;
    }
    (at <= bytes.len()).then_some((words, at))
}

fn number(digits: &[u8]) -> u64 {
    digits.iter().fold(0, |number, digit| 10 * number + u64::from(digit - b'0'))
}

impl Table {
    fn answer(
        &self,
        key: &[u8],
        limit: u64,
        interval: u64,
        cost: u64,
        now: u64,
        out: &mut Vec<u8>,
    ) {
        let word = |at: usize| {
            key.get(at..at + 8)
                .map_or(0, |word| u64::from_le_bytes(word.try_into().expect("eight")))
        };
        let product = u128::from(word(0) ^ 0x9e37_79b9_7f4a_7c15)
            * u128::from(word(key.len().saturating_sub(8)) | 1);
        let hash =
            (product as u64 ^ (product >> 64) as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut index = (hash >> 20) as usize % self.slots.len();
        let tat = loop {
            let (tag, tat) = &self.slots[index];
            match tag.compare_exchange(0, hash, Ordering::Relaxed, Ordering::Relaxed) {
                Err(other) if other != hash => index = (index + 1) % self.slots.len(),
                _ => break tat,
            }
        };
        let old = tat.load(Ordering::Relaxed);
        let new = old.max(now) + interval * cost;
        let allowed = new <= now + interval * limit;
        if allowed {
            tat.store(new, Ordering::Relaxed);
        }
        let kept = if allowed { new } else { old };
        let remaining = (now + interval * limit).saturating_sub(kept) / interval;
        let seconds = |micros: u64| micros.div_ceil(1_000_000) as i64;
        let retry = if allowed { -1 } else { seconds(new - now - interval * limit) };
        out.extend_from_slice(b"*5\r\n");
        for number in [
            i64::from(!allowed),
            limit as i64,
            remaining as i64,
            retry,
            seconds(kept.saturating_sub(now)),
        ] {
            out.push(b':');
            if number < 0 {
                out.push(b'-');
            }
            if number >= 10 {
                out.push(b'0' + (number / 10 % 10) as u8);
            }
            out.extend_from_slice(&[b'0' + (number.unsigned_abs() % 10) as u8, b'\r', b'\n']);
        }
    }
}
