//! Web servers that read a request in their own way, for tests of what stands before them: Flask
//! under gunicorn, Node, and a program in Go.
//!
//! PHP and Go come as [packages](super::SOURCES); the program in Go is compiled here, once, and
//! again when its source changes.

use std::fs;
use std::path::Path;

use super::clients::{need, once};
use super::fetch::{bounded, need_pip, quiet};
use crate::root;

/// Packages of the Python index, and the folder they go into. The rest is what they depend on.
const PYTHON: (&[&str], &str) = (&["flask==3.1.2", "gunicorn==23.0.0"], "python-backends");
/// The program in Go, and the folder that it is compiled into.
const GO: (&str, &str) = ("tools/testkit/backends/server.go", "go-backend");

pub(super) fn install(folder: &Path) -> Result<(), String> {
    let (packages, name) = PYTHON;
    once(folder, name, &packages.join(" "), |place| {
        need_pip()?;
        let mut pip = bounded("python3");
        pip.args(["-m", "pip", "install", "--quiet", "--only-binary", ":all:", "--target"])
            .arg(place)
            .args(packages);
        quiet(&mut pip).map(drop)
    })?;
    let (source, name) = GO;
    let source = root().join(source);
    let text =
        fs::read_to_string(&source).map_err(|error| format!("{}: {error}", source.display()))?;
    once(folder, name, &format!("Go 1.19, net/http\n{text}"), |place| {
        let home = folder.join("backends/usr/lib/go-1.19");
        let mut go = bounded(&home.join("bin/go").to_string_lossy());
        go.arg("build").arg("-o").arg(place.join("server")).arg(&source);
        go.env("GOROOT", &home)
            .env("GOCACHE", place.join("cache"))
            .env("GOPATH", place.join("path"));
        go.env("GO111MODULE", "off").env("CGO_ENABLED", "0");
        quiet(&mut go)?;
        fs::remove_dir_all(place.join("cache"))
            .map_err(|error| format!("{}: {error}", place.display()))
    })?;
    need("node", "nodejs")
}
