//! What the pages say is what the core does: their tables are read and replayed.

use std::fs;
use std::path::Path;

use tidegate_core::{Limit, Limits, Period};

use crate::transcripts::replay;

fn page(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs").join(name);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The rows of every table with these headings, cell by cell, with the number of their line.
fn rows(text: &str, headings: &[&str]) -> Vec<(usize, Vec<String>)> {
    let cells = |line: &str| -> Option<Vec<String>> {
        let inner = line.trim().strip_prefix('|')?.strip_suffix('|')?;
        let bare = |cell: &str| match cell.trim() {
            // Two backticks stand around what has backticks itself.
            cell if cell.starts_with("``") => {
                cell.trim_matches('`').trim().to_owned() + closing(cell)
            }
            cell => cell.trim_matches('`').to_owned(),
        };
        Some(inner.split('|').map(bare).collect())
    };
    let mut found = Vec::new();
    let mut inside = false;
    for (number, line) in (1..).zip(text.lines()) {
        match cells(line) {
            None => inside = false,
            Some(cells) if cells == headings => inside = true,
            Some(cells) if inside && !cells[0].starts_with('-') => found.push((number, cells)),
            Some(_) => {}
        }
    }
    found
}

/// A cell in double backticks that ends in one of its own: `` a `b` ``.
fn closing(cell: &str) -> &'static str {
    if cell.ends_with("` ``") { "`" } else { "" }
}

#[test]
fn the_moments_of_every_algorithm_are_real() {
    let text = page("algorithms.md");
    let (mut blocks, mut wrong) = (0, Vec::new());
    for (index, block) in text.split("```").enumerate().filter(|(index, _)| index % 2 == 1) {
        let Some((_, block)) =
            block.split_once('\n').filter(|(_, block)| block.starts_with("# limit:"))
        else {
            continue;
        };
        blocks += 1;
        let before: usize =
            text.split("```").take(index).map(|part| part.matches('\n').count()).sum();
        wrong.extend(replay(block).iter().map(|what| format!("block after line {before}: {what}")));
    }
    assert!(blocks >= 10, "only {blocks} blocks: is the page still there?");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn capacity_worst_case_and_grid_are_real() {
    let text = page("algorithms.md");
    let rows = rows(&text, &["Limit", "Capacity", "Worst case in one period", "Clock grid"]);
    assert!(rows.len() >= 10, "only {} rows", rows.len());
    for (line, cells) in rows {
        let limit: Limit = cells[0].parse().unwrap_or_else(|error| panic!("line {line}: {error}"));
        let facts = [
            limit.capacity().to_string(),
            limit.worst_case().to_string(),
            Period::micros(limit.grid_us()).to_string(),
        ];
        assert_eq!(facts[..], cells[1..], "line {line}: {limit}");
    }
}

#[test]
fn every_spelling_on_the_page_has_its_canonical_form() {
    let text = page("notation.md");
    let rows = rows(&text, &["Written", "Canonical form"]);
    assert!(rows.len() >= 10, "only {} rows", rows.len());
    for (line, cells) in rows {
        let limits: Limits =
            cells[0].parse().unwrap_or_else(|error| panic!("line {line}: {error}"));
        assert_eq!(limits.to_string(), cells[1], "line {line}");
        assert_eq!(cells[1].parse(), Ok(limits), "line {line}");
    }
}

#[test]
fn every_mistake_on_the_page_gets_its_message() {
    let text = page("notation.md");
    let rows = rows(&text, &["Written", "Message"]);
    assert!(rows.len() >= 10, "only {} rows", rows.len());
    for (line, cells) in rows {
        let error = cells[0].parse::<Limits>().expect_err(&format!("line {line}"));
        assert_eq!(error.to_string(), cells[1], "line {line}");
    }
}
