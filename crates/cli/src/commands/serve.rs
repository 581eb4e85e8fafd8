//! `tidegate serve`: runs the listeners until a signal.

use std::ffi::OsString;
use std::io::{Read, Write};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use tidegate_server::auth::Auth;
use tidegate_server::config::{Config, MAX_FILE_BYTES, Overlay};
use tidegate_server::listen::tls::TlsFiles;
use tidegate_server::{BUILT_IN, Options, start};
use tokio::signal::unix::{SignalKind, signal};

use super::Outcome;
use super::greeting::Greeting;
use crate::args;
use crate::output;

/// How long to wait for the log of the start, before `ready` is printed.
const LOG_FLUSH: Duration = Duration::from_secs(1);

pub(super) fn run(args: args::Serve) -> Result<Outcome> {
    let mut config = match args.config.as_deref() {
        Some(file) if file == Path::new("-") => {
            Config::parse(&standard_input()?, "standard input")?
        }
        Some(file) => Config::load(file)?,
        // A user with Envoy domains wants those, and no example rules.
        None if args.envoy_config.is_some() => Config::without_file(),
        None => Config::parse(BUILT_IN, "the built-in rules")?,
    };
    overlay(&mut config, &args)?;
    if args.print_config {
        return print(&config, &args);
    }
    let auth = Auth { checks: args.token.clone(), admin: args.admin_token.clone() };
    let rules_file = args.config.clone().filter(|file| file != Path::new("-"));
    let greeting = Greeting::new(&config, args.config.as_deref(), args.token.is_some());
    let overlay =
        Overlay::new(move |config| overlay(config, &args).map_err(|error| error.to_string()));
    let tokens_in_arguments = tokens_in(std::env::args_os());
    run_until_signal(
        config,
        Options { rules_file, overlay, auth, tokens_in_arguments, ..Options::default() },
        greeting,
    )
}

/// The options among these arguments that pass a token as their value. A token from the environment
/// does not count.
fn tokens_in(arguments: impl Iterator<Item = OsString>) -> Vec<&'static str> {
    let given: Vec<OsString> = arguments.collect();
    let has = |option: &str| {
        let is_own = |argument: &OsString| {
            let rest = argument.to_str().and_then(|argument| argument.strip_prefix(option));
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('='))
        };
        given.iter().any(is_own)
    };
    ["--token", "--admin-token"].into_iter().filter(|option| has(option)).collect()
}

/// Starts the server, and stops it on a signal.
pub(super) fn run_until_signal(
    config: Config,
    options: Options,
    greeting: Greeting,
) -> Result<Outcome> {
    raise_files();
    let runtime = config.threads.runtime().context("could not start a runtime")?;
    let outcome = runtime.block_on(async {
        // Before any output, so that a process that reads it can send a signal.
        let (mut term, mut int) =
            (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
        let running = start(config, options).await?;
        // The log of the start is complete before `ready` is printed.
        running.engine().observer().log().flush(LOG_FLUSH);
        let mut out = output::stdout();
        greeting.write(&mut out, &running)?;
        out.flush()?;
        tokio::select! {
            _ = term.recv() => {}
            _ = int.recv() => {}
        }
        anyhow::Ok(if running.stop().await { Outcome::Yes } else { Outcome::No })
    });
    // The grace period for open connections is over.
    runtime.shutdown_background();
    outcome
}

/// Options override the file.
fn overlay(config: &mut Config, args: &args::Serve) -> Result<()> {
    if let Some(store) = &args.store {
        config.store.clone_from(store);
    }
    if args.store_secret_file.is_some() {
        config.store_secret_file.clone_from(&args.store_secret_file);
    }
    config.memory.max_bytes = args.max_bytes.unwrap_or(config.memory.max_bytes);
    if args.snapshot_file.is_some() {
        config.memory.snapshot_file.clone_from(&args.snapshot_file);
    }
    config.threads = args.threads.unwrap_or(config.threads);
    let listeners = &mut config.listen;
    for (said, protocol) in [
        (args.http, &mut listeners.http),
        (args.grpc, &mut listeners.grpc),
        (args.resp, &mut listeners.resp),
        (args.admin, &mut listeners.admin),
    ] {
        if let Some(at) = said {
            *protocol = at.0;
        }
    }
    if args.envoy_config.is_some() {
        config.envoy.config.clone_from(&args.envoy_config);
    }
    if let Some(words) = args.log {
        config.log.level = words.level.unwrap_or(config.log.level);
        config.log.format = words.format.unwrap_or(config.log.format);
    }
    config.log.show_keys |= args.show_keys;
    config.insecure |= args.insecure;
    config.is_given_token |= args.token.is_some();
    // A token given as a value replaces one in a file.
    let tokens = &mut config.tokens;
    for (word, file, own) in [
        (&args.token, &args.token_file, &mut tokens.checks),
        (&args.admin_token, &args.admin_token_file, &mut tokens.admin),
    ] {
        if file.is_some() || word.is_some() {
            own.clone_from(file);
        }
    }
    if let (Some(cert), Some(key)) = (&args.tls_cert, &args.tls_key) {
        let client_ca = config.tls.take().and_then(|files| files.client_ca);
        config.tls = Some(TlsFiles { cert: cert.clone(), key: key.clone(), client_ca });
    }
    match (&args.tls_client_ca, &mut config.tls) {
        (None, _) => {}
        (Some(file), Some(tls)) => tls.client_ca = Some(file.clone()),
        (Some(_), None) => {
            bail!("--tls-client-ca without TLS: expected --tls-cert and --tls-key, too")
        }
    }
    Ok(())
}

fn print(config: &Config, args: &args::Serve) -> Result<Outcome> {
    let mut out = output::stdout();
    for (name, token) in [("check", &args.token), ("admin", &args.admin_token)] {
        if token.is_some() {
            writeln!(out, "# a {name} token was given, and is not shown")?;
        }
    }
    write!(out, "{}", config.to_yaml())?;
    out.flush()?;
    Ok(Outcome::Yes)
}

pub(super) fn standard_input() -> Result<String> {
    let mut text = String::new();
    std::io::stdin()
        .take(MAX_FILE_BYTES + 1)
        .read_to_string(&mut text)
        .context("standard input")?;
    if text.len() as u64 > MAX_FILE_BYTES {
        bail!("standard input: more than {MAX_FILE_BYTES} bytes: expected a configuration");
    }
    Ok(text)
}

/// Raises the limit of open files as far as allowed, because each connection is one.
fn raise_files() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_among_the_arguments_are_found() {
        for (arguments, expected) in [
            ("tidegate serve", &[][..]),
            ("tidegate serve --token-file /run/token --admin-token-file=/run/admin", &[]),
            ("tidegate serve --token secret", &["--token"]),
            ("tidegate serve --token=secret --admin-token secret", &["--token", "--admin-token"]),
        ] {
            assert_eq!(
                tokens_in(arguments.split(' ').map(OsString::from)),
                expected,
                "{arguments}"
            );
        }
    }
}
