//! What a server keeps: strings that end at a moment of its clock, and what was changed lately, so
//! that a replica can be behind.

use std::collections::{BTreeMap, VecDeque};

/// What a command answers.
#[derive(Clone, Debug, PartialEq)]
pub enum Reply {
    Nil,
    Int(i64),
    Bulk(Vec<u8>),
    Status(&'static str),
    Error(String),
    Array(Vec<Reply>),
}

/// A string and when it ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) value: Vec<u8>,
    pub(crate) ends_ms: Option<u64>,
}

/// A key that was changed, when, and what it held before.
struct Undo {
    at_us: u64,
    key: Vec<u8>,
    before: Option<Entry>,
}

/// How long what was changed can be taken back.
const LONGEST_LAG_US: u64 = 2_000_000;

#[derive(Default)]
pub(crate) struct Data {
    pub(crate) entries: BTreeMap<Vec<u8>, Entry>,
    undo: VecDeque<Undo>,
    /// The server's clock.
    pub(crate) wall_us: u64,
    /// A clock that does not step, by which replicas lag.
    pub(crate) steady_us: u64,
    /// Why nothing may be written, if it may not.
    pub(crate) no_writes: Option<&'static str>,
}

impl Data {
    pub(crate) fn command(&mut self, words: &[Vec<u8>], in_script: bool) -> Reply {
        let Some(name) = words.first() else { return Reply::Error("ERR empty command".into()) };
        let name = name.to_ascii_uppercase();
        let writes: &[&[u8]] = &[b"SET", b"SETRANGE", b"APPEND", b"PEXPIRE", b"DEL"];
        if writes.contains(&&*name)
            && let Some(why) = self.no_writes
            // What frees memory is allowed when there is none.
            && !(why.starts_with("OOM") && matches!(&*name, b"DEL" | b"PEXPIRE"))
        {
            return Reply::Error(why.into());
        }
        match (&*name, &words[1..]) {
            (b"TIME", []) => {
                let (seconds, micros) = (self.wall_us / 1_000_000, self.wall_us % 1_000_000);
                Reply::Array(vec![Reply::Bulk(text(seconds)), Reply::Bulk(text(micros))])
            }
            (b"GET", [key]) => {
                self.live(key).map_or(Reply::Nil, |entry| Reply::Bulk(entry.value.clone()))
            }
            (b"STRLEN", [key]) => {
                Reply::Int(self.live(key).map_or(0, |entry| entry.value.len() as i64))
            }
            (b"GETRANGE", [key, from, to]) => {
                let (Some(from), Some(to)) = (number(from), number(to)) else {
                    return not_a_number();
                };
                let value = self.live(key).map(|entry| entry.value.clone()).unwrap_or_default();
                Reply::Bulk(range(&value, from, to).to_vec())
            }
            (b"SET", [key, value]) => {
                self.put(key, Some(Entry { value: value.clone(), ends_ms: None }));
                Reply::Status("OK")
            }
            (b"SET", [key, value, px, ms]) if px.eq_ignore_ascii_case(b"PX") => {
                let Some(ms) = number(ms) else { return not_a_number() };
                let Ok(ms @ 1..) = u64::try_from(ms) else {
                    return Reply::Error("ERR invalid expire time in 'set' command".into());
                };
                self.put(
                    key,
                    Some(Entry { value: value.clone(), ends_ms: Some(self.wall_us / 1000 + ms) }),
                );
                Reply::Status("OK")
            }
            (b"SETRANGE", [key, offset, part]) => {
                let Some(offset) = number(offset) else { return not_a_number() };
                let Ok(offset) = usize::try_from(offset) else {
                    return Reply::Error("ERR offset is out of range".into());
                };
                let mut entry =
                    self.live(key).cloned().unwrap_or(Entry { value: Vec::new(), ends_ms: None });
                if !part.is_empty() {
                    let end = offset + part.len();
                    if entry.value.len() < end {
                        entry.value.resize(end, 0);
                    }
                    entry.value[offset..end].copy_from_slice(part);
                    let length = entry.value.len() as i64;
                    self.put(key, Some(entry));
                    return Reply::Int(length);
                }
                Reply::Int(entry.value.len() as i64)
            }
            (b"APPEND", [key, part]) => {
                let mut entry =
                    self.live(key).cloned().unwrap_or(Entry { value: Vec::new(), ends_ms: None });
                entry.value.extend_from_slice(part);
                let length = entry.value.len() as i64;
                self.put(key, Some(entry));
                Reply::Int(length)
            }
            (b"PEXPIRE", [key, ms]) => {
                let Some(ms) = number(ms) else { return not_a_number() };
                let Some(mut entry) = self.live(key).cloned() else { return Reply::Int(0) };
                match u64::try_from(ms) {
                    Ok(ms @ 1..) => {
                        entry.ends_ms = Some(self.wall_us / 1000 + ms);
                        self.put(key, Some(entry));
                    }
                    _ => self.put(key, None),
                }
                Reply::Int(1)
            }
            (b"PTTL", [key]) if !in_script => {
                let now_ms = self.wall_us / 1000;
                match self.live(key) {
                    None => Reply::Int(-2),
                    Some(Entry { ends_ms: None, .. }) => Reply::Int(-1),
                    Some(Entry { ends_ms: Some(ends), .. }) => Reply::Int((ends - now_ms) as i64),
                }
            }
            (b"DEL", keys @ [_, ..]) => {
                let mut deleted = 0;
                for key in keys {
                    if self.live(key).is_some() {
                        self.put(key, None);
                        deleted += 1;
                    }
                }
                Reply::Int(deleted)
            }
            (b"DBSIZE", []) if !in_script => Reply::Int(self.entries.len() as i64),
            (b"FLUSHALL", []) if !in_script => {
                self.flush();
                Reply::Status("OK")
            }
            (
                known @ (b"GET" | b"STRLEN" | b"GETRANGE" | b"SETRANGE" | b"APPEND" | b"PEXPIRE"
                | b"DEL" | b"PTTL" | b"TIME"),
                _,
            ) => {
                let name = String::from_utf8_lossy(known).to_lowercase();
                if in_script {
                    Reply::Error(
                        "ERR Wrong number of args calling Redis command from script".into(),
                    )
                } else {
                    Reply::Error(format!("ERR wrong number of arguments for '{name}' command"))
                }
            }
            (b"SET", _) => Reply::Error("ERR syntax error".into()),
            _ if in_script => Reply::Error("ERR Unknown Redis command called from script".into()),
            _ => Reply::Error(format!(
                "ERR unknown command '{}'",
                String::from_utf8_lossy(&words[0])
            )),
        }
    }

    /// What a key holds, if it has not ended.
    pub(crate) fn live(&mut self, key: &[u8]) -> Option<&Entry> {
        let now_ms = self.wall_us / 1000;
        if self.entries.get(key)?.ends_ms.is_some_and(|ends| ends <= now_ms) {
            self.put(&key.to_vec(), None);
            return None;
        }
        self.entries.get(key)
    }

    fn put(&mut self, key: &Vec<u8>, entry: Option<Entry>) {
        let before = match entry {
            Some(entry) => self.entries.insert(key.clone(), entry),
            None => self.entries.remove(key),
        };
        self.undo.push_back(Undo { at_us: self.steady_us, key: key.clone(), before });
        while self.undo.front().is_some_and(|undo| undo.at_us + LONGEST_LAG_US < self.steady_us) {
            self.undo.pop_front();
        }
    }

    /// Forgets a key, as an eviction does.
    pub(crate) fn evict(&mut self, key: &Vec<u8>) {
        self.put(key, None);
    }

    pub(crate) fn flush(&mut self) {
        let keys: Vec<Vec<u8>> = self.entries.keys().cloned().collect();
        keys.iter().for_each(|key| self.put(key, None));
    }

    /// As it was so long ago: what a replica knows that is promoted.
    pub(crate) fn roll_back(&mut self, lag_us: u64) {
        while let Some(undo) = self.undo.pop_back_if(|undo| undo.at_us + lag_us >= self.steady_us) {
            match undo.before {
                Some(entry) => self.entries.insert(undo.key, entry),
                None => self.entries.remove(&undo.key),
            };
        }
    }
}

fn text(number: u64) -> Vec<u8> {
    number.to_string().into_bytes()
}

fn number(word: &[u8]) -> Option<i64> {
    std::str::from_utf8(word).ok()?.parse().ok()
}

fn not_a_number() -> Reply {
    Reply::Error("ERR value is not an integer or out of range".into())
}

/// Both ends included; negative ones count from the end.
fn range(value: &[u8], from: i64, to: i64) -> &[u8] {
    let length = value.len() as i64;
    if from < 0 && to < 0 && from > to {
        return &[];
    }
    let place = |at: i64| (if at < 0 { at + length } else { at }).max(0);
    let (from, to) = (place(from), place(to).min(length - 1));
    if from > to || length == 0 {
        return &[];
    }
    &value[usize::try_from(from).unwrap_or(0)..=usize::try_from(to).unwrap_or(0)]
}
