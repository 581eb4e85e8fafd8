//! Checks of what a configuration names: files, folders and the store.

use std::path::Path;

use crate::auth::{MIN_REMOTE_TOKEN_BYTES, Secret, too_short};
use crate::config::Config;
use crate::findings::Finding;
use crate::listen::tls::Tls;
use crate::parse::outline::Step::{self, Key};
use crate::rules::envoy::Domains;
use crate::start_error::StartError;
use crate::store::{check_store, unknown};

/// Checks the files and the store of a configuration. Writes no file, and charges no key of the
/// rules.
pub async fn preflight(config: &Config) -> Vec<Finding> {
    let mut found = files(config);
    let has_store_error =
        |found: &[Finding]| found.iter().any(|one| one.message.starts_with("store_secret_file"));
    // A URL that cannot be read is an error of the text.
    if config.store != "memory"
        && config.store.parse::<tidegate::redis::RedisUrl>().is_ok()
        && !has_store_error(&found)
    {
        store(config, &mut found).await;
    }
    found
}

fn files(config: &Config) -> Vec<Finding> {
    let mut found = Vec::new();
    let place = |steps: &[Step<'_>]| config.outline.value(steps);
    for (key, file) in [("check_file", &config.tokens.checks), ("admin_file", &config.tokens.admin)]
    {
        let read = file.as_deref().map(|file| {
            let token = Secret::read(file)?;
            let (bytes, least) = (token.reveal().len(), MIN_REMOTE_TOKEN_BYTES);
            if config.listen.is_beyond_loopback() && bytes < least {
                return Err(format!("{}: {}", file.display(), too_short(bytes, least)));
            }
            Ok(())
        });
        if let Some(Err(problem)) = read {
            found.push(Finding::error(
                place(&[Key("tokens"), Key(key)]),
                format!("tokens.{key}: {problem}"),
            ));
        }
    }
    if let Some(tls) = &config.tls {
        let named = [
            ("cert", Some(&tls.cert)),
            ("key", Some(&tls.key)),
            ("client_ca", tls.client_ca.as_ref()),
        ];
        let before = found.len();
        for (key, file) in named {
            if let Some(problem) = file.and_then(|file| unusable(file)) {
                found.push(Finding::error(
                    place(&[Key("tls"), Key(key)]),
                    format!("tls.{key}: {problem}"),
                ));
            }
        }
        if found.len() == before
            && let Err(error) = Tls::load(tls.clone())
        {
            let key = named.iter().find(|(_, file)| file.is_some_and(|file| error.is_about(file)));
            let key = key.map_or("cert", |(key, _)| key);
            found.push(Finding::error(
                place(&[Key("tls"), Key(key)]),
                format!("tls.{key}: {error}"),
            ));
        }
    }
    if let Some(file) = &config.store_secret_file
        && let Some(problem) = unusable(file)
    {
        found.push(Finding::error(
            place(&[Key("store_secret_file")]),
            format!("store_secret_file: {problem}"),
        ));
    }
    if let Some(folder) = config.memory.snapshot_file.as_deref().and_then(Path::parent)
        && !folder.as_os_str().is_empty()
        && !folder.is_dir()
    {
        let message = format!(
            "memory.snapshot_file: {}: there is no such folder: create it",
            folder.display()
        );
        found.push(Finding::error(place(&[Key("memory"), Key("snapshot_file")]), message));
    }
    if let Some(file) = &config.memory.snapshot_file
        && let Err(error) = crate::memory::file::look_at(file)
    {
        let message = format!("memory.snapshot_file: {}: {error}", file.display());
        found.push(Finding::error(place(&[Key("memory"), Key("snapshot_file")]), message));
    }
    if let Some(folder) = &config.envoy.config {
        match Domains::load(folder) {
            Ok(domains) => found.extend(domains.warnings().iter().cloned()),
            Err(error) if folder.is_dir() => found.extend(error.findings()),
            Err(error) => {
                found.push(Finding::error(
                    place(&[Key("envoy"), Key("config")]),
                    format!("envoy.config: {error}"),
                ));
            }
        }
    }
    found
}

/// Why a file cannot be used: it is missing, unreadable or empty.
fn unusable(file: &Path) -> Option<String> {
    match tidegate_bounded::files::read_file(file, tidegate_bounded::files::MAX_SECRET_FILE_BYTES) {
        Err(error) => {
            Some(format!("{}: {}", file.display(), tidegate_bounded::files::why_unreadable(&error)))
        }
        Ok(bytes) if bytes.trim_ascii().is_empty() => {
            Some(format!("{}: the file is empty: expected PEM, or the secret", file.display()))
        }
        Ok(_) => None,
    }
}

/// Whether the store can be used, if it can be reached.
async fn store(config: &Config, found: &mut Vec<Finding>) {
    let place = config.outline.value(&[Key("store")]);
    match check_store(config).await {
        Err(StartError::StoreRefuses { store, why, advice }) => {
            found.push(Finding::error(place, format!("store {store}: {why}. {advice}")));
        }
        Err(error) => found.push(Finding::error(place, error.to_string())),
        Ok(check) => {
            if let Some(why) = check.unreachable {
                let message = format!(
                    "store: {why}: whether it can be used is not known; serve starts and tries again"
                );
                found.push(Finding::note(&*place, message));
            }
            if let Some(waited) = check.unknown_after {
                found.push(Finding::note(&*place, format!("store: {}", unknown(waited))));
            }
            if let Some(slow) = check.slow {
                found.push(Finding::warning(place, format!("store: {slow}")));
            }
        }
    }
}
