//! A model of a Redis server: bytes of commands in, bytes of replies out. It runs the product's own
//! scripts; `tests/model.rs` compares it with real servers.

mod data;
mod lua;

use std::collections::BTreeSet;

pub(crate) use self::data::Data;
pub use self::data::Reply;
use self::lua::Vm;

/// A server.
pub struct Redis {
    vm: Vm,
    scripts: BTreeSet<String>,
    /// What stands in scripts, and what is run instead: for faults on purpose.
    changed: Option<(&'static str, &'static str)>,
}

/// What a server remembers of a client.
#[derive(Clone, Debug, Default)]
pub struct Client {
    resp3: bool,
    /// It is connected to what has become a replica.
    pub replica: bool,
}

pub const READONLY: &str = "READONLY You can't write against a read only replica.";

impl Redis {
    /// An empty server.
    ///
    /// # Panics
    /// If there is no interpreter to be had.
    pub fn new() -> Self {
        Redis {
            vm: Vm::new().expect("an interpreter needs nothing but memory"),
            scripts: BTreeSet::new(),
            changed: None,
        }
    }

    /// As if new, but faster.
    pub fn clear(&mut self) {
        *self.vm.data.borrow_mut() = Data::default();
        self.vm.collect();
        self.scripts.clear();
        self.changed = None;
    }

    /// Runs scripts with `to` wherever they say `from`, until it is cleared.
    pub fn change_scripts(&mut self, from: &'static str, to: &'static str) {
        self.changed = Some((from, to));
    }

    /// The name under which a script is compiled.
    fn compiled(&self, sha: &str) -> String {
        if self.changed.is_some() { format!("{sha} changed") } else { sha.into() }
    }

    pub(crate) fn data(&self) -> std::cell::RefMut<'_, Data> {
        self.vm.data.borrow_mut()
    }

    /// Sets the clocks: the server's own, and one that does not step.
    pub fn set_time(&mut self, wall_us: u64, steady_us: u64) {
        let mut data = self.data();
        (data.wall_us, data.steady_us) = (wall_us, steady_us);
    }

    pub fn forget_scripts(&mut self) {
        self.scripts.clear();
    }

    /// Runs one command of a client.
    pub fn command(&mut self, client: &mut Client, words: &[Vec<u8>]) -> Reply {
        let name = words.first().map(|name| name.to_ascii_uppercase()).unwrap_or_default();
        let second = words.get(1).map(|word| word.to_ascii_uppercase()).unwrap_or_default();
        match &*name {
            b"HELLO" => {
                match &*second {
                    b"3" => client.resp3 = true,
                    b"2" | b"" => client.resp3 = false,
                    _ => return Reply::Error("NOPROTO unsupported protocol version".into()),
                }
                Reply::Array(vec![Reply::Bulk(b"server".to_vec()), Reply::Bulk(b"redis".to_vec())])
            }
            b"CLIENT" | b"SELECT" => Reply::Status("OK"),
            b"PING" => Reply::Status("PONG"),
            b"ROLE" => Reply::Array(vec![Reply::Bulk(if client.replica {
                b"slave".to_vec()
            } else {
                b"master".to_vec()
            })]),
            b"SCRIPT" => match (&*second, words.get(2)) {
                (b"LOAD", Some(text)) => match self.load(text) {
                    Ok(sha) => Reply::Bulk(sha.into_bytes()),
                    Err(error) => Reply::Error(error),
                },
                (b"FLUSH", _) => {
                    self.forget_scripts();
                    Reply::Status("OK")
                }
                (b"EXISTS", Some(_)) => {
                    let known = |sha: &Vec<u8>| {
                        self.scripts.contains(&String::from_utf8_lossy(sha).to_lowercase())
                    };
                    Reply::Array(
                        words[2..].iter().map(|sha| Reply::Int(i64::from(known(sha)))).collect(),
                    )
                }
                _ => Reply::Error("ERR unknown subcommand".into()),
            },
            b"EVAL" | b"EVALSHA" => self.eval(&name, words, client.replica),
            _ => {
                let mut data = self.data();
                let before = data.no_writes;
                if client.replica {
                    data.no_writes = Some(READONLY);
                }
                let reply = data.command(words, false);
                data.no_writes = before;
                reply
            }
        }
    }

    fn load(&mut self, text: &[u8]) -> Result<String, String> {
        let sha = sha1_smol::Sha1::from(text).digest().to_string();
        match self.changed {
            None => self.vm.compile(&sha, text)?,
            Some((from, to)) => {
                let text = String::from_utf8_lossy(text).replace(from, to);
                self.vm.compile(&self.compiled(&sha), text.as_bytes())?;
            }
        }
        self.scripts.insert(sha.clone());
        Ok(sha)
    }

    fn eval(&mut self, name: &[u8], words: &[Vec<u8>], replica: bool) -> Reply {
        let Some((keys, args)) = keys_and_args(words) else {
            return Reply::Error("ERR Number of keys can't be greater than number of args".into());
        };
        let sha = if name == b"EVAL" {
            match self.load(&words[1]) {
                Ok(sha) => sha,
                Err(error) => return Reply::Error(error),
            }
        } else {
            let sha = String::from_utf8_lossy(&words[1]).to_lowercase();
            if !self.scripts.contains(&sha) {
                return Reply::Error("NOSCRIPT No matching script. Please use EVAL.".into());
            }
            sha
        };
        let before = self.data().no_writes;
        if replica {
            self.data().no_writes = Some(READONLY);
        }
        let reply = self.vm.run(&self.compiled(&sha), keys, args);
        self.data().no_writes = before;
        reply
    }
}

impl Default for Redis {
    fn default() -> Self {
        Self::new()
    }
}

/// One word of a command.
pub(crate) type Word = Vec<u8>;

/// The keys and arguments of EVAL and EVALSHA.
pub(crate) fn keys_and_args(words: &[Word]) -> Option<(&[Word], &[Word])> {
    let count: usize = std::str::from_utf8(words.get(2)?).ok()?.parse().ok()?;
    words.get(3..)?.split_at_checked(count)
}

/// The first whole command in `bytes`, and how long it is.
pub fn parse(bytes: &[u8]) -> Option<(Vec<Vec<u8>>, usize)> {
    let line = |from: usize| -> Option<(usize, usize)> {
        let end = from + bytes.get(from..)?.windows(2).position(|two| two == b"\r\n")?;
        let number = std::str::from_utf8(&bytes[from + 1..end]).ok()?.parse().ok()?;
        Some((number, end + 2))
    };
    let (count, mut at) = line(0)?;
    let mut words = Vec::with_capacity(count);
    for _ in 0..count {
        let (length, from) = line(at)?;
        words.push(bytes.get(from..from + length)?.to_vec());
        at = from + length + 2;
    }
    (at <= bytes.len()).then_some((words, at))
}

/// Writes a reply as this client expects it.
pub fn write(reply: &Reply, client: &Client, out: &mut Vec<u8>) {
    match reply {
        Reply::Nil if client.resp3 => out.extend_from_slice(b"_\r\n"),
        Reply::Nil => out.extend_from_slice(b"$-1\r\n"),
        Reply::Int(number) => out.extend_from_slice(format!(":{number}\r\n").as_bytes()),
        Reply::Status(text) => out.extend_from_slice(format!("+{text}\r\n").as_bytes()),
        Reply::Error(text) => out.extend_from_slice(format!("-{text}\r\n").as_bytes()),
        Reply::Bulk(bytes) => {
            out.extend_from_slice(format!("${}\r\n", bytes.len()).as_bytes());
            out.extend_from_slice(bytes);
            out.extend_from_slice(b"\r\n");
        }
        Reply::Array(items) => {
            out.extend_from_slice(format!("*{}\r\n", items.len()).as_bytes());
            items.iter().for_each(|item| write(item, client, out));
        }
    }
}
