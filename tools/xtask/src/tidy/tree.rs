//! The files of the repository, as checks see them.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use super::source::SourceText;

/// A text file: its path from the root of the repository, and what it says.
pub(super) struct File {
    pub(super) path: String,
    pub(super) text: String,
    /// The text taken apart, if it is Rust or Lua.
    pub(super) source: Option<SourceText>,
}

impl File {
    pub(super) fn new(path: &str, text: &str) -> Self {
        let source = match path.rsplit_once('.') {
            Some((_, "rs")) => Some(SourceText::rust(text)),
            Some((_, "lua")) => Some(SourceText::lua(text)),
            _ => None,
        };
        Self { path: path.to_owned(), text: text.to_owned(), source }
    }

    pub(super) fn is_page(&self) -> bool {
        self.path.ends_with(".md")
    }

    /// The source, if the file is Rust.
    pub(super) fn rust(&self) -> Option<&SourceText> {
        self.source.as_ref().filter(|_| self.path.ends_with(".rs"))
    }
}

/// All files that a check may look at.
pub(super) struct Tree {
    pub(super) files: Vec<File>,
    /// Every file and folder of the repository, without those that are built or hidden.
    paths: BTreeSet<String>,
}

impl Tree {
    pub(super) fn read(root: &Path) -> Result<Self, String> {
        let mut tree = Self { files: Vec::new(), paths: BTreeSet::new() };
        tree.add(root, "")?;
        tree.files.sort_by(|a, b| a.path.cmp(&b.path));
        Ok(tree)
    }

    fn add(&mut self, folder: &Path, prefix: &str) -> Result<(), String> {
        let failed = |error: std::io::Error| format!("{}: {error}", folder.display());
        for entry in fs::read_dir(folder).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let name = entry.file_name().to_string_lossy().into_owned();
            let path = format!("{prefix}{name}");
            if [".git", "target", "node_modules", "__pycache__"].contains(&name.as_str()) {
                continue;
            }
            if entry.file_type().map_err(failed)?.is_dir() {
                self.add(&entry.path(), &format!("{path}/"))?;
            } else if [".rs", ".lua", ".md"].iter().any(|ending| name.ends_with(ending)) {
                let text = fs::read_to_string(entry.path()).map_err(|e| format!("{path}: {e}"))?;
                self.files.push(File::new(&path, &text));
            }
            self.paths.insert(path);
        }
        Ok(())
    }

    /// Whether there is such a file or folder.
    pub(super) fn has(&self, path: &str) -> bool {
        let path = path.trim_end_matches('/');
        path.is_empty() || self.paths.contains(path)
    }

    pub(super) fn file(&self, path: &str) -> Option<&File> {
        self.files.iter().find(|file| file.path == path)
    }

    pub(super) fn pages(&self) -> impl Iterator<Item = &File> {
        self.files.iter().filter(|file| file.is_page())
    }

    pub(super) fn rust(&self) -> impl Iterator<Item = (&File, &SourceText)> {
        self.files.iter().filter_map(|file| Some((file, file.rust()?)))
    }

    /// A tree of these paths and texts, for tests.
    #[cfg(test)]
    pub(super) fn of(files: &[(&str, &str)]) -> Self {
        let mut paths = BTreeSet::new();
        for (path, _) in files {
            for (slash, _) in path.match_indices('/') {
                paths.insert(path[..slash].to_owned());
            }
            paths.insert((*path).to_owned());
        }
        Self { files: files.iter().map(|(path, text)| File::new(path, text)).collect(), paths }
    }
}

/// The number of a line, from 1, by an offset in bytes.
pub(super) fn line_at(text: &str, offset: usize) -> usize {
    1 + text.as_bytes()[..offset].iter().filter(|byte| **byte == b'\n').count()
}

/// Each line of a page with its number, and whether it stands in a fenced block.
pub(super) fn page_lines(text: &str) -> impl Iterator<Item = (usize, &str, bool)> {
    let mut fence: Option<&str> = None;
    text.lines().enumerate().map(move |(index, line)| {
        let bare = line.trim_start();
        let mark = ["```", "~~~"].into_iter().find(|mark| bare.starts_with(mark));
        let inside = fence.is_some();
        if mark.is_some() && (fence.is_none() || fence == mark) {
            fence = if inside { None } else { mark };
            return (index + 1, line, true);
        }
        (index + 1, line, inside)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fenced_blocks_of_pages() {
        let page = "text\n```sh\ncode\n```\ntext";
        let fenced: Vec<bool> = page_lines(page).map(|(_, _, fenced)| fenced).collect();
        assert_eq!(fenced, [false, true, true, true, false]);
    }

    #[test]
    fn folders_exist_as_their_files_do() {
        let tree = Tree::of(&[("crates/core/src/lib.rs", "")]);
        assert!(tree.has("crates/core/") && tree.has("crates/core/src/lib.rs"));
        assert!(!tree.has("crates/cor"));
    }
}
