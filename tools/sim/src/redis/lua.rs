//! Scripts, run by Lua 5.1 as Redis does: `redis.call`, `redis.pcall` and the part of `struct` that
//! is used.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

use mlua::{Function, Lua, Table, Value, Variadic};

use super::data::{Data, Reply};

/// So many bytes are worth collecting.
const MUCH: usize = 64 << 20;

/// An interpreter with the data that its scripts work on. It keeps nothing between calls but
/// compiled scripts.
pub(crate) struct Vm {
    lua: Lua,
    pub(crate) data: Rc<RefCell<Data>>,
    compiled: HashMap<String, Function>,
}

impl Vm {
    pub(crate) fn new() -> mlua::Result<Self> {
        let lua = Lua::new();
        lua.gc_stop(); // garbage is collected between runs
        let data = Rc::new(RefCell::new(Data::default()));
        let redis = lua.create_table()?;
        let shared = Rc::clone(&data);
        let call = lua.create_function(move |lua, words: Variadic<Value>| {
            let reply = run(&shared, &words);
            match reply {
                Reply::Error(text) => Err(mlua::Error::RuntimeError(text)),
                reply => to_lua(lua, reply),
            }
        })?;
        let shared = Rc::clone(&data);
        let pcall = lua.create_function(move |lua, words: Variadic<Value>| {
            to_lua(lua, run(&shared, &words))
        })?;
        redis.set("call", call)?;
        redis.set("pcall", pcall)?;
        lua.globals().set("redis", redis)?;
        let table = lua.create_table()?;
        table.set("pack", lua.create_function(pack)?)?;
        table.set("unpack", lua.create_function(unpack)?)?;
        lua.globals().set("struct", table)?;
        Ok(Vm { lua, data, compiled: HashMap::new() })
    }

    /// Collects what scripts have left, if it is much.
    pub(crate) fn collect(&self) {
        if self.lua.used_memory() > MUCH {
            let _ = self.lua.gc_collect();
            self.lua.gc_stop();
        }
    }

    /// Whether it is a script; kept for later.
    pub(crate) fn compile(&mut self, sha: &str, text: &[u8]) -> Result<(), String> {
        if !self.compiled.contains_key(sha) {
            let function = self.lua.load(text).set_name("@user_script").into_function();
            let function = function
                .map_err(|error| format!("ERR Error compiling script (new function): {error}"))?;
            self.compiled.insert(sha.into(), function);
        }
        Ok(())
    }

    /// Runs a compiled script.
    pub(crate) fn run(&self, sha: &str, keys: &[Vec<u8>], args: &[Vec<u8>]) -> Reply {
        let result = || -> mlua::Result<Reply> {
            let globals = self.lua.globals();
            globals.raw_set("KEYS", self.strings(keys)?)?;
            globals.raw_set("ARGV", self.strings(args)?)?;
            let value: Value = self.compiled[sha].call(())?;
            from_lua(&value)
        };
        result().unwrap_or_else(|error| {
            let text = innermost(&error);
            // An error of a command is returned as it is, with its place; everything else is a
            // mistake of the script.
            let known = text.split(' ').next().is_some_and(|word| {
                word.len() > 2 && !word.contains(|c: char| !c.is_ascii_uppercase())
            });
            if known {
                Reply::Error(format!("{text} script: {sha}, on @user_script:1."))
            } else {
                Reply::Error(format!("ERR {text} script: {sha}"))
            }
        })
    }

    fn strings(&self, words: &[Vec<u8>]) -> mlua::Result<Table> {
        let table = self.lua.create_table_with_capacity(words.len(), 0)?;
        for (at, word) in words.iter().enumerate() {
            table.raw_set(at + 1, self.lua.create_string(word)?)?;
        }
        Ok(table)
    }
}

fn innermost(error: &mlua::Error) -> String {
    match error {
        mlua::Error::CallbackError { cause, .. } => innermost(cause),
        mlua::Error::RuntimeError(text) => text.clone(),
        other => other.to_string(),
    }
}

fn run(data: &Rc<RefCell<Data>>, words: &[Value]) -> Reply {
    let words: Vec<Vec<u8>> = words.iter().map(bytes_of).collect();
    data.borrow_mut().command(&words, true)
}

/// As Redis writes numbers that are arguments.
fn bytes_of(value: &Value) -> Vec<u8> {
    match value {
        Value::String(text) => text.as_bytes().to_vec(),
        Value::Integer(number) => number.to_string().into_bytes(),
        Value::Number(number) if number.fract() == 0.0 && number.abs() < 1e17 => {
            format!("{number:.0}").into_bytes()
        }
        Value::Number(number) => number.to_string().into_bytes(),
        _ => Vec::new(),
    }
}

fn to_lua(lua: &Lua, reply: Reply) -> mlua::Result<Value> {
    Ok(match reply {
        Reply::Nil => Value::Boolean(false),
        Reply::Int(number) => Value::Number(number as f64),
        Reply::Bulk(bytes) => Value::String(lua.create_string(bytes)?),
        Reply::Status(text) => {
            let table = lua.create_table()?;
            table.set("ok", text)?;
            Value::Table(table)
        }
        Reply::Error(text) => {
            let table = lua.create_table()?;
            table.set("err", text)?;
            Value::Table(table)
        }
        Reply::Array(items) => {
            let table = lua.create_table()?;
            for (at, item) in items.into_iter().enumerate() {
                table.set(at + 1, to_lua(lua, item)?)?;
            }
            Value::Table(table)
        }
    })
}

fn from_lua(value: &Value) -> mlua::Result<Reply> {
    Ok(match value {
        Value::String(text) => Reply::Bulk(text.as_bytes().to_vec()),
        Value::Integer(number) => Reply::Int(*number),
        #[allow(
            clippy::cast_possible_truncation,
            reason = "Redis cuts off what is behind the point"
        )]
        Value::Number(number) => Reply::Int(*number as i64),
        Value::Boolean(true) => Reply::Int(1),
        Value::Table(table) => {
            if let Ok(text) = table.get::<String>("err") {
                return Ok(Reply::Error(text));
            }
            if table.contains_key("ok")? {
                return Ok(Reply::Status("OK"));
            }
            let items: mlua::Result<Vec<Reply>> =
                table.sequence_values::<Value>().map(|item| from_lua(&item?)).collect();
            Reply::Array(items?)
        }
        _ => Reply::Nil,
    })
}

/// One field of a format: big-endian numbers of some bytes, and strings of some bytes.
enum Field {
    Number(usize),
    Text(usize),
}

fn fields(format: &[u8]) -> mlua::Result<Vec<Field>> {
    let mut fields = Vec::new();
    let mut rest =
        format.strip_prefix(b">").ok_or_else(|| wrong("only big-endian formats are known"))?;
    while let Some((&letter, after)) = rest.split_first() {
        let digits = after.iter().take_while(|byte| byte.is_ascii_digit()).count();
        let size =
            std::str::from_utf8(&after[..digits]).ok().and_then(|digits| digits.parse().ok());
        fields.push(match letter {
            b'B' => Field::Number(1),
            b'I' => Field::Number(size.unwrap_or(4)),
            b'c' => Field::Text(size.unwrap_or(1)),
            other => return Err(wrong(&format!("no field {:?} is known", char::from(other)))),
        });
        rest = &after[digits..];
    }
    Ok(fields)
}

fn wrong(text: &str) -> mlua::Error {
    mlua::Error::RuntimeError(format!("struct: {text}"))
}

#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "as struct.c does")]
fn number_of(value: Option<&Value>) -> mlua::Result<u64> {
    match value {
        Some(Value::Integer(number)) => Ok(*number as u64),
        Some(Value::Number(number)) => Ok(*number as i64 as u64),
        _ => Err(wrong("a number was expected")),
    }
}

fn pack(lua: &Lua, values: Variadic<Value>) -> mlua::Result<mlua::String> {
    let Some(Value::String(format)) = values.first() else {
        return Err(wrong("a format was expected"));
    };
    let mut bytes = Vec::with_capacity(64);
    for (at, field) in fields(&format.as_bytes())?.iter().enumerate() {
        let value = values.get(at + 1);
        match field {
            Field::Number(size) => {
                bytes.extend_from_slice(&number_of(value)?.to_be_bytes()[8 - size..])
            }
            Field::Text(size) => match value {
                Some(Value::String(text)) if text.as_bytes().len() >= *size => {
                    bytes.extend_from_slice(&text.as_bytes()[..*size])
                }
                _ => return Err(wrong("a longer string was expected")),
            },
        }
    }
    lua.create_string(bytes)
}

fn unpack(
    lua: &Lua,
    (format, text, from): (mlua::String, mlua::String, Option<usize>),
) -> mlua::Result<Variadic<Value>> {
    let text = text.as_bytes();
    let mut at = from.unwrap_or(1).saturating_sub(1);
    let mut values = Variadic::new();
    for field in fields(&format.as_bytes())? {
        let (Field::Number(size) | Field::Text(size)) = field;
        let Some(bytes) = text.get(at..at + size) else {
            return Err(wrong("data string too short"));
        };
        at += size;
        values.push(match field {
            Field::Number(_) => Value::Number(
                bytes.iter().fold(0_u64, |number, byte| number << 8 | u64::from(*byte)) as f64,
            ),
            Field::Text(_) => Value::String(lua.create_string(bytes)?),
        });
    }
    values.push(Value::Number((at + 1) as f64));
    Ok(values)
}
