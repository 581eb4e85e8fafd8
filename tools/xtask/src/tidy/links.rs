//! Links between pages: that the file is there, and the heading in it.

use super::Finding;
use super::tree::{File, Tree, page_lines};

pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    tree.pages().flat_map(|page| check_page(tree, page)).collect()
}

fn check_page(tree: &Tree, page: &File) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (line, target) in targets(&page.text) {
        if target.contains("://") || target.starts_with("mailto:") {
            continue;
        }
        let (path, anchor) = target.split_once('#').unwrap_or((target.as_str(), ""));
        let path = if path.is_empty() { page.path.clone() } else { join(&page.path, path) };
        if !tree.has(&path) {
            let advice = format!("dead link {target}: there is no {path}");
            findings.push(Finding::new(&page.path, line, advice));
        } else if let Some(other) = tree.file(&path).filter(|file| file.is_page())
            && !anchor.is_empty()
            && !anchors(&other.text).iter().any(|known| known == anchor)
        {
            let advice = format!("dead link {target}: {path} has no heading #{anchor}");
            findings.push(Finding::new(&page.path, line, advice));
        }
    }
    findings
}

/// The targets of `[text](target)` and `[name]: target` outside code, with their lines.
fn targets(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for (number, line, fenced) in page_lines(text) {
        if fenced {
            continue;
        }
        let line = without_code(line);
        for (at, _) in line.match_indices("](") {
            let rest = &line[at + 2..];
            let end = rest.find([')', ' ']).unwrap_or(rest.len());
            found.push((number, rest[..end].to_owned()));
        }
        if let Some((_, target)) = line.strip_prefix('[').and_then(|rest| rest.split_once("]: ")) {
            found.push((number, target.trim().to_owned()));
        }
    }
    found
}

/// Blanks the text of code spans, which may look like a link.
fn without_code(line: &str) -> String {
    let mut in_code = false;
    line.chars()
        .map(|c| {
            in_code ^= c == '`';
            if in_code { '`' } else { c }
        })
        .collect()
}

/// A path relative to the folder of a page, without `..`.
pub(super) fn join(page: &str, relative: &str) -> String {
    let mut parts: Vec<&str> = page.split('/').collect();
    parts.pop();
    for part in relative.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()),
            name => parts.push(name),
        }
    }
    parts.join("/")
}

/// The anchors that GitHub gives the headings of a page.
fn anchors(text: &str) -> Vec<String> {
    let mut found: Vec<String> = Vec::new();
    for (_, line, fenced) in page_lines(text) {
        if let Some(name) = line.split("<a id=\"").nth(1).and_then(|rest| rest.split('"').next()) {
            found.push(name.to_owned());
        }
        let title = line.trim_start_matches('#');
        if fenced || title.len() == line.len() || !title.starts_with(' ') {
            continue;
        }
        let slug = slug(title);
        let again = (1..).map(|n| format!("{slug}-{n}"));
        let free = [slug.clone()].into_iter().chain(again).find(|name| !found.contains(name));
        found.extend(free);
    }
    found
}

fn slug(title: &str) -> String {
    // Of a link, only the text counts.
    let text: String = title
        .trim()
        .split('[')
        .map(|part| match part.split_once("](") {
            Some((text, rest)) => {
                format!("{text}{}", rest.split_once(')').map_or("", |(_, after)| after))
            }
            None => part.to_owned(),
        })
        .collect();
    text.to_lowercase()
        .chars()
        .filter(|c| c.is_alphanumeric() || *c == ' ' || *c == '-' || *c == '_')
        .map(|c| if c == ' ' { '-' } else { c })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dead_links_and_anchors_are_found() {
        let tree = Tree::of(&[
            (
                "docs/a.md",
                "[x](b.md) [x](b.md#in-short) [x](../README.md#why-not) [x](#self)\n\
                 `[x](no.md)` [x](https://example.com)\n# Self\n\
                 [dead](c.md)\n[dead](b.md#none)\n[dead]: ../c.md\n",
            ),
            ("docs/b.md", "## In `short`\n"),
            ("README.md", "# [Why](x) not?\n"),
        ]);
        let page = tree.file("docs/a.md").expect("it is there");
        let lines: Vec<usize> = check_page(&tree, page).iter().map(|one| one.line).collect();
        assert_eq!(lines, [4, 5, 6]);
    }

    #[test]
    fn two_headings_of_one_name_have_two_anchors() {
        assert_eq!(anchors("# A b\n## A b\n```\n# no\n```\n"), ["a-b", "a-b-1"]);
    }
}
