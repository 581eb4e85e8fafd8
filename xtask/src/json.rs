//! Just enough JSON to read what `cargo metadata` prints.

use std::collections::BTreeMap;

/// A JSON value. Numbers are kept as they were written.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Json {
    Null,
    Bool(bool),
    Number(String),
    Text(String),
    List(Vec<Json>),
    Object(BTreeMap<String, Json>),
}

impl Json {
    pub(crate) fn parse(text: &str) -> Result<Json, String> {
        let mut reader = Reader { bytes: text.as_bytes(), at: 0 };
        let value = reader.value(0)?;
        reader.space();
        if reader.at == reader.bytes.len() { Ok(value) } else { Err(reader.expected("the end")) }
    }

    pub(crate) fn get(&self, key: &str) -> &Json {
        match self {
            Json::Object(members) => members.get(key).unwrap_or(&Json::Null),
            _ => &Json::Null,
        }
    }

    pub(crate) fn text(&self) -> &str {
        match self {
            Json::Text(text) => text,
            _ => "",
        }
    }

    pub(crate) fn list(&self) -> &[Json] {
        match self {
            Json::List(items) => items,
            _ => &[],
        }
    }
}

struct Reader<'t> {
    bytes: &'t [u8],
    at: usize,
}

const DEEPEST: usize = 64;

impl Reader<'_> {
    fn expected(&self, what: &str) -> String {
        format!("byte {}: expected {what}", self.at)
    }

    fn peek(&self) -> u8 {
        self.bytes.get(self.at).copied().unwrap_or(0)
    }

    fn space(&mut self) {
        while self.peek().is_ascii_whitespace() {
            self.at += 1;
        }
    }

    fn eat(&mut self, word: &str) -> Result<(), String> {
        if !self.bytes[self.at..].starts_with(word.as_bytes()) {
            return Err(self.expected(word));
        }
        self.at += word.len();
        Ok(())
    }

    fn value(&mut self, depth: usize) -> Result<Json, String> {
        if depth > DEEPEST {
            return Err(self.expected("less nesting"));
        }
        self.space();
        match self.peek() {
            b'n' => self.eat("null").map(|()| Json::Null),
            b't' => self.eat("true").map(|()| Json::Bool(true)),
            b'f' => self.eat("false").map(|()| Json::Bool(false)),
            b'"' => self.string().map(Json::Text),
            b'[' => {
                let mut items = Vec::new();
                self.members(b']', |reader| {
                    items.push(reader.value(depth + 1)?);
                    Ok(())
                })?;
                Ok(Json::List(items))
            }
            b'{' => {
                let mut members = BTreeMap::new();
                self.members(b'}', |reader| {
                    let key = reader.string()?;
                    reader.space();
                    reader.eat(":")?;
                    members.insert(key, reader.value(depth + 1)?);
                    Ok(())
                })?;
                Ok(Json::Object(members))
            }
            _ => {
                let start = self.at;
                while matches!(self.peek(), b'0'..=b'9' | b'-' | b'+' | b'.' | b'e' | b'E') {
                    self.at += 1;
                }
                if self.at == start {
                    return Err(self.expected("a value"));
                }
                Ok(Json::Number(String::from_utf8_lossy(&self.bytes[start..self.at]).into_owned()))
            }
        }
    }

    fn members(&mut self, end: u8, mut one: impl FnMut(&mut Self) -> Result<(), String>) -> Result<(), String> {
        self.at += 1;
        self.space();
        if self.peek() == end {
            self.at += 1;
            return Ok(());
        }
        loop {
            self.space();
            one(self)?;
            self.space();
            match self.peek() {
                b',' => self.at += 1,
                byte if byte == end => {
                    self.at += 1;
                    return Ok(());
                }
                _ => return Err(self.expected("a comma or the end of the list")),
            }
        }
    }

    fn string(&mut self) -> Result<String, String> {
        self.eat("\"")?;
        let mut text = Vec::new();
        loop {
            let byte = self.peek();
            self.at += 1;
            match byte {
                0 => return Err(self.expected("the end of a string")),
                b'"' => return Ok(String::from_utf8_lossy(&text).into_owned()),
                b'\\' => {
                    let escaped = self.peek();
                    self.at += 1;
                    match escaped {
                        b'n' => text.push(b'\n'),
                        b't' => text.push(b'\t'),
                        b'r' => text.push(b'\r'),
                        b'b' | b'f' => text.push(b' '),
                        b'u' => {
                            let digits = self.bytes.get(self.at..self.at + 4).unwrap_or_default();
                            let code = u32::from_str_radix(&String::from_utf8_lossy(digits), 16).unwrap_or(0xfffd);
                            let c = char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER);
                            text.extend_from_slice(c.to_string().as_bytes());
                            self.at += 4;
                        }
                        other => text.push(other),
                    }
                }
                byte => text.push(byte),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_cargo_prints() {
        let json = Json::parse(r#" {"a":[1,-2.5e3,true,false,null,{}],"b":"x\"\\\u00e9\n","c":{"d":[]}} "#).unwrap();
        assert_eq!(json.get("b").text(), "x\"\\é\n");
        assert_eq!(json.get("a").list().len(), 6);
        assert_eq!(json.get("a").list()[1], Json::Number("-2.5e3".into()));
        assert_eq!(json.get("c").get("d"), &Json::List(Vec::new()));
        for wrong in ["", "{", "[1,]", "{\"a\"}", "nul", "\"abc", "1 2", &"[".repeat(100)] {
            assert!(Json::parse(wrong).is_err(), "{wrong}");
        }
    }
}
