//! `tidegate proxy`: limits in front of a web service, until a signal.

use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Result, bail};
use tidegate_server::Options;
use tidegate_server::config::{Config, Overlay};
use tidegate_server::listen::tls::TlsFiles;
use tidegate_server::proxy::ProxySettings;
use tidegate_server::rules::Rule;

use super::Outcome;
use super::greeting::Greeting;
use super::serve::{run_until_signal, standard_input};
use crate::args;
use crate::output;

pub(super) fn run(mut args: args::Proxy) -> Result<Outcome> {
    let mut config = match args.config.as_deref() {
        Some(file) if file == Path::new("-") => {
            Config::parse(&standard_input()?, "standard input")?
        }
        Some(file) => Config::load(file)?,
        None => Config::without_file(),
    };
    let more_rules = named(std::mem::take(&mut args.limits), &config);
    overlay(&mut config, &args)?;
    if config.rules.is_empty() && more_rules.is_empty() {
        bail!("nothing is limited: expected --limit '10/s by ip', or --config with rules");
    }
    if args.print_config {
        config.rules = config.rules.and(&more_rules);
        let mut out = output::stdout();
        write!(out, "{}", config.to_yaml())?;
        out.flush()?;
        return Ok(Outcome::Yes);
    }
    let rules_file = args.config.clone().filter(|file| file != Path::new("-"));
    let greeting = Greeting::new(&config, args.config.as_deref(), false)
        .with_rules_of_options(&config, &more_rules);
    let overlay =
        Overlay::new(move |config| overlay(config, &args).map_err(|error| error.to_string()));
    run_until_signal(
        config,
        Options { rules_file, overlay, more_rules, ..Options::default() },
        greeting,
    )
}

/// Gives each rule of the command line a unique name.
fn named(mut limits: Vec<Rule>, config: &Config) -> Vec<Rule> {
    let mut taken: Vec<Arc<str>> = config.rules.iter().map(|rule| Arc::clone(&rule.name)).collect();
    for rule in &mut limits {
        let wanted = Arc::clone(&rule.name);
        let mut number = 1;
        while taken.contains(&rule.name) {
            number += 1;
            rule.name = format!("{wanted}-{number}").into();
        }
        taken.push(Arc::clone(&rule.name));
    }
    limits
}

/// Options override the file. Only the proxy listens, and the admin listener if it is configured.
fn overlay(config: &mut Config, args: &args::Proxy) -> Result<()> {
    match (&args.upstream, &mut config.proxy) {
        (Some(upstream), Some(proxy)) => proxy.upstream = upstream.clone(),
        (Some(upstream), none) => *none = Some(ProxySettings::to(upstream.clone())),
        (None, Some(_)) => {}
        (None, None) => {
            bail!(
                "no upstream: expected --upstream http://HOST:PORT, or proxy: {{ upstream: … }} in the file"
            )
        }
    }
    let listen = &mut config.listen;
    (listen.http, listen.grpc, listen.resp) = (None, None, None);
    listen.proxy = args.listen.or(listen.proxy);
    listen.admin = args.admin.map_or(listen.admin, |at| at.0);
    if listen.proxy.is_none() {
        bail!("the file closes the proxy's listener: expected --listen ADDR");
    }
    if let Some(store) = &args.store {
        config.store.clone_from(store);
    }
    config.memory.max_bytes = args.max_bytes.unwrap_or(config.memory.max_bytes);
    if args.snapshot_file.is_some() {
        config.memory.snapshot_file.clone_from(&args.snapshot_file);
    }
    config.threads = args.threads.unwrap_or(config.threads);
    if let Some(trusted) = &args.trust {
        config.trusted_proxies.clone_from(trusted);
    }
    if let Some(words) = args.log {
        config.log.level = words.level.unwrap_or(config.log.level);
        config.log.format = words.format.unwrap_or(config.log.format);
    }
    if let (Some(cert), Some(key)) = (&args.tls_cert, &args.tls_key) {
        let client_ca = config.tls.take().and_then(|files| files.client_ca);
        config.tls = Some(TlsFiles { cert: cert.clone(), key: key.clone(), client_ca });
    }
    Ok(())
}
