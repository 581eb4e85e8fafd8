//! Files of at most 500 lines, or with a reason near their top.

use super::Finding;
use super::tree::{File, Tree};

const LINES: usize = 500;
const REASON: &str = "// Long because ";

pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    tree.files.iter().filter_map(check_file).collect()
}

fn check_file(file: &File) -> Option<Finding> {
    let lines = file.text.lines().count();
    let has_reason = file.text.lines().take(40).any(|line| line.starts_with(REASON));
    let is_long = file.source.is_some() && lines > LINES && !has_reason;
    is_long.then(|| {
        let advice =
            format!("{lines} lines: split it, or say `{REASON}…` below its first sentence");
        Finding::new(&file.path, 1, advice)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_file_needs_a_reason() {
        let found = |text: &str| check_file(&File::new("a.rs", text)).is_some();
        assert!(found(&"a();\n".repeat(501)));
        assert!(!found(&"a();\n".repeat(500)));
        let reason = "//! A table.\n// Long because it is one table.\n";
        assert!(!found(&format!("{reason}{}", "a();\n".repeat(501))));
    }
}
