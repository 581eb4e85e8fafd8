//! The place of each value in its file, for findings about values that were already read.

use std::fmt;
use std::sync::Arc;

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_saphyr::{Location, Spanned};

/// The places of all keys and values of a file.
#[derive(Clone, Default)]
pub(crate) struct Outline {
    file: String,
    text: Arc<str>,
    root: Option<Node>,
}

/// One step from a value into it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Step<'a> {
    /// To the value under this key.
    Key(&'a str),
    /// To an item of a list, counted from 0.
    Item(usize),
}

#[derive(Clone)]
struct Node {
    at: Location,
    inside: Inside,
}

#[derive(Clone)]
enum Inside {
    /// Its text.
    Scalar(String),
    /// Nothing after the colon, `~` or `null`.
    Blank,
    List(Vec<Node>),
    Map(Vec<(Spanned<String>, Node)>),
}

impl Outline {
    /// The outline of a text that was already read; `file` is its name.
    pub(crate) fn of(text: &str, file: &str) -> Outline {
        let root = serde_saphyr::from_str::<Option<Node>>(text).ok().flatten();
        Outline { file: file.into(), text: text.into(), root }
    }

    /// The name of the file.
    pub(crate) fn file(&self) -> &str {
        &self.file
    }

    /// The text of the file.
    pub(crate) fn text(&self) -> Arc<str> {
        Arc::clone(&self.text)
    }

    /// Whether the configuration has a file.
    pub(crate) fn is_of_file(&self) -> bool {
        !self.file.is_empty()
    }

    /// Whether the file is empty.
    pub(crate) fn is_empty(&self) -> bool {
        self.root.is_none()
    }

    /// Whether the file has a value there.
    pub(crate) fn has(&self, steps: &[Step<'_>]) -> bool {
        self.walk(steps).is_some_and(|(_, left)| left == 0)
    }

    /// `FILE:LINE:COLUMN` of the value; of the innermost value around it if the file does not have
    /// it.
    pub(crate) fn value(&self, steps: &[Step<'_>]) -> String {
        self.place(self.walk(steps).map(|(node, _)| node.at))
    }

    /// The same for its key.
    pub(crate) fn key(&self, steps: &[Step<'_>]) -> String {
        if let Some((Step::Key(name), before)) = steps.split_last()
            && let Some((node, 0)) = self.walk(before)
            && let Inside::Map(pairs) = &node.inside
            && let Some((key, _)) = pairs.iter().find(|(key, _)| key.value == *name)
        {
            return self.place(Some(key.referenced));
        }
        self.value(steps)
    }

    /// The text of a single value.
    pub(crate) fn scalar(&self, steps: &[Step<'_>]) -> Option<&str> {
        match self.walk(steps)? {
            (Node { inside: Inside::Scalar(text), .. }, 0) => Some(text),
            _ => None,
        }
    }

    /// How many items a list has.
    pub(crate) fn items(&self, steps: &[Step<'_>]) -> usize {
        match self.walk(steps) {
            Some((Node { inside: Inside::List(items), .. }, 0)) => items.len(),
            _ => 0,
        }
    }

    /// Keys and items without a value, with their places.
    pub(crate) fn blanks(&self) -> Vec<(String, &str)> {
        fn collect<'a>(outline: &Outline, node: &'a Node, found: &mut Vec<(String, &'a str)>) {
            match &node.inside {
                Inside::Map(pairs) => {
                    for (key, node) in pairs {
                        match node.inside {
                            Inside::Blank => {
                                found.push((outline.place(Some(key.referenced)), &*key.value))
                            }
                            _ => collect(outline, node, found),
                        }
                    }
                }
                Inside::List(items) => {
                    for node in items {
                        match node.inside {
                            Inside::Blank => {
                                found.push((outline.place(Some(node.at)), "an item of the list"))
                            }
                            _ => collect(outline, node, found),
                        }
                    }
                }
                Inside::Scalar(_) | Inside::Blank => {}
            }
        }
        let mut found = Vec::new();
        self.root.iter().for_each(|root| collect(self, root, &mut found));
        found
    }

    /// Whether this line has a key without a value, in a section all of whose settings have
    /// defaults.
    pub(crate) fn has_blank_setting(&self, line: u64) -> bool {
        fn is_in(node: &Node, line: u64) -> bool {
            let Inside::Map(pairs) = &node.inside else { return false };
            pairs.iter().any(|(key, node)| match node.inside {
                Inside::Blank => key.referenced.line() == line,
                _ => is_in(node, line),
            })
        }
        let Some(Node { inside: Inside::Map(pairs), .. }) = &self.root else { return false };
        pairs.iter().any(|(key, node)| match node.inside {
            Inside::Blank => key.referenced.line() == line,
            _ => !["rules", "tls", "proxy"].contains(&&*key.value) && is_in(node, line),
        })
    }

    /// The innermost value on the path, and how many steps are left.
    fn walk(&self, steps: &[Step<'_>]) -> Option<(&Node, usize)> {
        let mut node = self.root.as_ref()?;
        for (taken, step) in steps.iter().enumerate() {
            let next = match (step, &node.inside) {
                (Step::Key(name), Inside::Map(pairs)) => {
                    pairs.iter().find(|(key, _)| key.value == *name).map(|(_, node)| node)
                }
                (Step::Item(index), Inside::List(items)) => items.get(*index),
                // One item may be written without its list.
                (Step::Item(0), Inside::Scalar(_) | Inside::Blank) => Some(node),
                _ => None,
            };
            match next {
                Some(next) => node = next,
                None => return Some((node, steps.len() - taken)),
            }
        }
        Some((node, 0))
    }

    fn place(&self, at: Option<Location>) -> String {
        match at {
            Some(at) if at.line() > 0 => format!("{}:{}:{}", self.file, at.line(), at.column()),
            _ => self.file.clone(),
        }
    }
}

/// Places are not part of the value of a configuration.
impl fmt::Debug for Outline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Outline")
    }
}

impl<'de> Deserialize<'de> for Node {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let Spanned { value: inside, referenced: at, .. } = Spanned::<Inside>::deserialize(from)?;
        Ok(Node { at, inside })
    }
}

impl<'de> Deserialize<'de> for Inside {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Any;
        impl<'de> Visitor<'de> for Any {
            type Value = Inside;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("any value")
            }

            fn visit_bool<E>(self, value: bool) -> Result<Inside, E> {
                Ok(Inside::Scalar(value.to_string()))
            }

            fn visit_i64<E>(self, value: i64) -> Result<Inside, E> {
                Ok(Inside::Scalar(value.to_string()))
            }

            fn visit_u64<E>(self, value: u64) -> Result<Inside, E> {
                Ok(Inside::Scalar(value.to_string()))
            }

            fn visit_f64<E>(self, value: f64) -> Result<Inside, E> {
                Ok(Inside::Scalar(value.to_string()))
            }

            fn visit_str<E>(self, value: &str) -> Result<Inside, E> {
                Ok(Inside::Scalar(value.into()))
            }

            fn visit_unit<E>(self) -> Result<Inside, E> {
                Ok(Inside::Blank)
            }

            fn visit_none<E>(self) -> Result<Inside, E> {
                Ok(Inside::Blank)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Inside, A::Error> {
                let mut items = Vec::new();
                while let Some(item) = list.next_element()? {
                    items.push(item);
                }
                Ok(Inside::List(items))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Inside, A::Error> {
                let mut pairs = Vec::new();
                while let Some(pair) = map.next_entry()? {
                    pairs.push(pair);
                }
                Ok(Inside::Map(pairs))
            }
        }
        from.deserialize_any(Any)
    }
}

#[cfg(test)]
mod tests {
    use super::Step::{Item, Key};
    use super::*;

    #[test]
    fn places_are_those_of_the_text() {
        let text = "\
store: memory
rules:
  - name: a
    when: { ip: [10.0.0.0/8, 192.0.2.1], path: /x }
    by: ip
  - &b
    name: b
    limit: 3
  - *b
";
        let outline = Outline::of(text, "f");
        for (steps, value, key) in [
            (&[Key("store")][..], "f:1:8", "f:1:1"),
            (&[Key("rules"), Item(0), Key("name")], "f:3:11", "f:3:5"),
            (&[Key("rules"), Item(0), Key("when"), Key("ip"), Item(1)], "f:4:30", "f:4:30"),
            (&[Key("rules"), Item(0), Key("when"), Key("path")], "f:4:48", "f:4:42"),
            (&[Key("rules"), Item(0), Key("by"), Item(0)], "f:5:9", "f:5:9"),
            (&[Key("rules"), Item(1), Key("limit")], "f:8:12", "f:8:5"),
            (&[Key("rules"), Item(0), Key("limit")], "f:3:5", "f:3:5"),
            (&[Key("listen"), Key("http")], "f:1:1", "f:1:1"),
        ] {
            assert_eq!(
                (outline.value(steps), outline.key(steps)),
                (value.into(), key.into()),
                "{steps:?}"
            );
        }
        assert_eq!(outline.scalar(&[Key("rules"), Item(1), Key("limit")]), Some("3"));
        assert_eq!(outline.scalar(&[Key("rules"), Item(0), Key("limit")]), None);
        assert_eq!(outline.items(&[Key("rules")]), 3);
        assert!(outline.has(&[Key("rules"), Item(2), Key("limit")]));
        assert!(!outline.has(&[Key("rules"), Item(2), Key("by")]));
        for text in ["", "# nothing\n", "---\n", "~\n"] {
            let empty = Outline::of(text, "f");
            assert!(empty.is_empty() && empty.value(&[Key("store")]) == "f", "{text:?}");
        }
    }
}
