//! Files that a configuration names, read up to a maximum length, because a path may name a device
//! without an end. Hidden in the API: only the server and the binary of this workspace use it.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

/// The longest file of certificates, keys or a secret.
pub const MAX_SECRET_FILE_BYTES: u64 = 4 << 20;

/// Reads a file of at most `max_bytes` bytes.
///
/// # Errors
/// If it cannot be read, or is longer.
pub fn read_file(path: &Path, max_bytes: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(max_bytes.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > max_bytes {
        let problem = format!("more than {max_bytes} bytes: expected a file of at most so many");
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, problem));
    }
    Ok(bytes)
}

/// Reads a text file of at most `max_bytes` bytes.
///
/// # Errors
/// If it cannot be read, is longer, or is not UTF-8.
pub fn read_text_file(path: &Path, max_bytes: u64) -> io::Result<String> {
    String::from_utf8(read_file(path, max_bytes)?).map_err(|_| {
        io::Error::new(io::ErrorKind::InvalidData, "stream did not contain valid UTF-8")
    })
}

/// Why a file that a setting names cannot be read, and what to do about it.
pub fn why_unreadable(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::NotFound => "no such file: correct the path, or create it".into(),
        io::ErrorKind::PermissionDenied => {
            "this user may not read it: change its owner or mode".into()
        }
        io::ErrorKind::IsADirectory => "it is a folder: name a file".into(),
        io::ErrorKind::InvalidData => "it is not UTF-8 text: is it the right file?".into(),
        _ => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_without_end_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        std::fs::write(&file, "1234").unwrap();
        assert_eq!(read_text_file(&file, 4).unwrap(), "1234");
        let too_long = read_file(&file, 3).unwrap_err();
        assert_eq!(too_long.to_string(), "more than 3 bytes: expected a file of at most so many");
        #[cfg(unix)]
        assert_eq!(
            read_file(Path::new("/dev/zero"), 1000).unwrap_err().kind(),
            io::ErrorKind::FileTooLarge
        );
        std::fs::write(&file, [0xff]).unwrap();
        assert_eq!(read_text_file(&file, 4).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }
}
