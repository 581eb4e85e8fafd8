//! Words that an engineer of the field would not search for, and what to write instead.

use std::collections::BTreeSet;

use super::Finding;
use super::tree::{File, Tree, page_lines};

/// Phrases, one after the other behind `;`, with alternatives of a word behind `|`.
const WORDS: [(&str, &str); 21] = [
    (
        "whoever|whomever; he who; who asks; nobody|somebody|everybody|anybody",
        "client, caller, connection, request, task, process: the thing that acts",
    ),
    ("he|him|his", "the noun: client, caller, connection; or its"),
    ("visitor|visitors|guest|guests|stranger|strangers", "client, caller, connection, VM"),
    ("hall|halls", "HTTP server, acceptor"),
    (
        "rooms; a|the|own|this|that|one|each|every|another|which room",
        "module, listener, task, slot: the thing that it is (`room for` something is fine)",
    ),
    ("door|doors|entrance|entrances", "listener, protocol, acceptor"),
    ("manners", "response options"),
    ("in vain", "unnecessarily, without effect"),
    ("is|are|was|were|be|been|being told", "receives, gets, returned; or the verb in the active"),
    ("is|are|was|were|be|been|being asked", "called, requested, checked, queried"),
    (
        "let|lets|letting pass; let|lets through; is|are|was|were|be|been let",
        "allow, allows, allowed",
    ),
    ("at once", "immediately; concurrently, in parallel"),
    ("crowd|crowds|crowded", "coalescing, many concurrent requests, contention"),
    ("saga|sagas", "cross-slot transaction"),
    ("keeper|keepers", "background task"),
    ("short|quick way|ways", "fast path"),
    ("conversation|conversations", "connection"),
    (
        "fall|falls|fell|fallen|go|goes|went|is|are|was|were|stay|stays silent; silent store|server|line|lines|node",
        "unresponsive, does not answer",
    ),
    ("is|are|was|were away", "unavailable; disconnected"),
    ("near the store", "resilience layer"),
    ("on behalf of whom", "for which client"),
];

/// Places where a word is the right one, each with its reason.
const FINE: [(&str, &str, &str); 1] = [("tools/xtask/src/tidy/words.rs", "", "the list itself")];

/// Words that no identifier should have as a part.
const PARTS: [&str; 16] = [
    "whoever",
    "nobody",
    "somebody",
    "everybody",
    "anybody",
    "visitor",
    "visitors",
    "guest",
    "guests",
    "hall",
    "halls",
    "door",
    "doors",
    "crowd",
    "saga",
    "keeper",
];

/// Parts of identifiers that a library chose: the part, and what a file contains that uses it.
const FOREIGN: [(&str, &str, &str); 1] = [("visitor", "serde::de", "serde's trait `Visitor`")];

/// A word in lower case, with its line, and whether only spaces stand before it.
#[derive(Debug)]
struct Word {
    text: String,
    line: usize,
    follows: bool,
}

pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    tree.files.iter().flat_map(check_file).collect()
}

pub(super) fn check_identifiers(tree: &Tree) -> Vec<Finding> {
    tree.rust().flat_map(|(file, source)| identifiers(file, &source.code)).collect()
}

fn check_file(file: &File) -> Vec<Finding> {
    let texts = match &file.source {
        Some(source) => vec![without_code_spans(&source.comments), source.strings.clone()],
        None => vec![page_text(&file.text)],
    };
    texts.iter().flat_map(|text| check_text(&file.path, text)).collect()
}

fn check_text(path: &str, text: &str) -> Vec<Finding> {
    let words = words(text);
    let mut findings = Vec::new();
    for (phrases, instead) in WORDS {
        for phrase in phrases.split(';') {
            let phrase: Vec<&str> = phrase.split_whitespace().collect();
            for place in words.windows(phrase.len()).filter(|place| is_phrase(place, &phrase)) {
                let found: Vec<&str> = place.iter().map(|word| word.text.as_str()).collect();
                let found = found.join(" ");
                if !is_fine(path, &found) {
                    let advice = format!("\"{found}\": write {instead}");
                    findings.push(Finding::new(path, place[0].line, advice));
                }
            }
        }
    }
    findings
}

fn is_phrase(place: &[Word], phrase: &[&str]) -> bool {
    place.iter().zip(phrase).enumerate().all(|(index, (word, alternatives))| {
        (index == 0 || word.follows) && alternatives.split('|').any(|one| one == word.text)
    })
}

fn is_fine(path: &str, found: &str) -> bool {
    FINE.iter().any(|(place, word, _)| *place == path && (word.is_empty() || *word == found))
}

/// The words of a text. Names with an underscore or a point, as in `room.rs`, are one word.
fn words(text: &str) -> Vec<Word> {
    let mut found = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let mut rest = line;
        let mut is_first = true;
        while let Some(start) = rest.find(|c: char| c.is_alphanumeric() || c == '_') {
            let (gap, after) = rest.split_at(start);
            let end = word_end(after);
            // The marks of comments, lists and emphasis do not part a phrase.
            let follows = match is_first {
                true => gap.chars().all(|c| c.is_whitespace() || "/!*>-#".contains(c)),
                false => gap.chars().all(|c| c.is_whitespace() || "*_".contains(c)),
            };
            found.push(Word { text: after[..end].to_lowercase(), line: index + 1, follows });
            is_first = false;
            rest = &after[end..];
        }
    }
    found
}

fn word_end(text: &str) -> usize {
    let mut end = 0;
    let mut chars = text.char_indices().peekable();
    while let Some((at, c)) = chars.next() {
        let joins = ['.', '-', '_', '/', ':', '='].contains(&c)
            && chars.peek().is_some_and(|(_, next)| next.is_alphanumeric());
        if !c.is_alphanumeric() && c != '_' && !joins {
            return at;
        }
        end = at + c.len_utf8();
    }
    end
}

/// A page without its code spans and the targets of its links.
fn page_text(text: &str) -> String {
    let mut out = String::new();
    for (_, line, fenced) in page_lines(text) {
        out.push_str(&if fenced { line.to_owned() } else { without_spans(line) });
        out.push('\n');
    }
    out
}

fn without_code_spans(comments: &str) -> String {
    comments.lines().map(|line| without_spans(line) + "\n").collect()
}

/// Inline code and link targets name what exists; the words are checked where they are declared.
fn without_spans(line: &str) -> String {
    let (mut out, mut in_code, mut in_target, mut last) = (String::new(), false, false, ' ');
    for c in line.chars() {
        match c {
            '`' => in_code = !in_code,
            '(' if last == ']' && !in_code => in_target = true,
            ')' if in_target => in_target = false,
            _ => {}
        }
        out.push(if in_code || in_target || c == '`' { '`' } else { c });
        last = c;
    }
    out
}

/// Each identifier with a part that no name should have, once for each file.
fn identifiers(file: &File, code: &str) -> Vec<Finding> {
    let mut seen = BTreeSet::new();
    let mut findings = Vec::new();
    for (index, line) in code.lines().enumerate() {
        for name in line.split(|c: char| !c.is_alphanumeric() && c != '_') {
            let Some(part) = parts(name).into_iter().find(|part| PARTS.contains(&part.as_str()))
            else {
                continue;
            };
            let foreign =
                |(word, user, _): &(&str, &str, &str)| *word == part && code.contains(user);
            let may = is_fine(&file.path, &part) || FOREIGN.iter().any(foreign);
            if !may && seen.insert(name) {
                let advice = format!("`{name}`: name it without \"{part}\"");
                findings.push(Finding::new(&file.path, index + 1, advice));
            }
        }
    }
    findings
}

/// The words in `snake_case` and `CamelCase`.
fn parts(name: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut was_lower = false;
    for c in name.chars() {
        if c == '_' || c.is_uppercase() && was_lower {
            parts.push(String::new());
        }
        if c != '_' {
            parts.last_mut().expect("never empty").extend(c.to_lowercase());
        }
        was_lower = c.is_lowercase();
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(path: &str, text: &str) -> Vec<(usize, String)> {
        let quoted = |message: &str| message.split('"').nth(1).unwrap_or_default().to_owned();
        let findings = check_file(&File::new(path, text));
        findings.iter().map(|one| (one.line, quoted(&one.message))).collect()
    }

    #[test]
    fn comments_strings_and_pages_are_read() {
        let source = "// Whoever comes\nlet x = \"in vain\"; // is\n// told so\n";
        let all: Vec<_> = found("a.rs", source);
        for expected in [(1, "whoever"), (2, "in vain"), (2, "is told")] {
            assert!(all.contains(&(expected.0, expected.1.to_owned())), "{all:?}");
        }
        assert_eq!(found("a.md", "One\n**at\nonce** `whoever`\n"), [(2, "at once".to_owned())]);
        assert_eq!(found("a.md", "```text\nat once\n```\n"), [(2, "at once".to_owned())]);
    }

    #[test]
    fn names_and_other_meanings_are_no_findings() {
        assert_eq!(
            found("a.rs", "// There is room for it, in room.rs, `door`. A key is, told"),
            []
        );
        assert_eq!(found("a.rs", "let whoever = is_told(at, once);"), []);
        assert_eq!(found("a.md", "[rules](0029-one-room.md#the-door)"), []);
    }

    #[test]
    fn parts_of_identifiers_are_read() {
        let file = File::new("a.rs", "fn to_door(hall: BackDoor, challenge: Room) { hall }");
        let names: Vec<_> = identifiers(&file, &file.text).into_iter().map(|f| f.message).collect();
        assert_eq!(names.len(), 3, "{names:?}");
        let file = File::new("a.rs", "use serde::de::Visitor; fn a(visitor: impl Visitor) {}");
        assert_eq!(identifiers(&file, &file.text), []);
    }
}
