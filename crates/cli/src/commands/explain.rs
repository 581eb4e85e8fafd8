//! `tidegate explain`: which rules apply to a request and why, and what they would answer, by the
//! state of a running server or of the store that the file names.

use std::io::Write;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::json;
use tidegate_server::backend::Backend;
use tidegate_server::config::Config;
use tidegate_server::engine::{Engine, EngineError};
use tidegate_server::explain::{Explanation, WOULD_BE_DENIED, WOULD_PASS};
use tidegate_server::remote_store;

use super::{Outcome, client, store};
use crate::args;
use crate::output::{self, Paint};

/// How long the store may take to answer.
const TIMEOUT: Duration = Duration::from_secs(3);

const IN_MEMORY: &str = "\
note: the memory store of this file is inside the server: use --server http://HOST:PORT to see the state.
note: this shows only which rules apply.
";

pub(super) fn run(args: &args::Explain) -> Result<Outcome> {
    let names = args.attributes.iter().map(|(name, _)| name);
    if let Some((_, name)) =
        names.clone().enumerate().find(|(at, name)| names.clone().take(*at).any(|own| own == *name))
    {
        bail!("{name} is there twice: expected each attribute once");
    }
    if let Some(url) = &args.server.server {
        if args.config.is_some() || args.store.is_some() {
            eprintln!(
                "note: the server {url} answers by its own rules and store; --config and --store have no effect."
            );
        }
        return by_server(url, args);
    }
    let file =
        args.config.as_deref().context("no rules: expected --config FILE, or --server URL")?;
    let mut config = Config::load(file)?;
    if let Some(url) = &args.store {
        config.store.clone_from(url);
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let explanation = runtime.block_on(async {
        let Some(redis) = remote_store(&config, TIMEOUT)? else {
            return Ok(Explanation::of_matching(&config.rules, &args.attributes[..], args.cost)?);
        };
        let shown = config.shown_store();
        let engine = Engine::new(Backend::Redis(redis), config.rules.clone());
        engine.explain(&args.attributes[..], args.cost).await.map_err(|error| match error {
            EngineError::Store(error) => {
                store::explained(error).context(format!("what is used is not known: store {shown}"))
            }
            other => other.into(),
        })
    })?;
    if explanation.allowed.is_none() {
        eprint!("{IN_MEMORY}");
    }
    print(&explanation.to_string())?;
    Ok(match explanation.allowed {
        Some(true) => Outcome::Yes,
        Some(false) => Outcome::No,
        None => Outcome::Unknown,
    })
}

/// The explanation of a running server.
fn by_server(url: &str, args: &args::Explain) -> Result<Outcome> {
    let attributes: serde_json::Map<_, _> =
        args.attributes.iter().map(|(name, value)| (name.clone(), json!(value))).collect();
    let body = json!({ "attributes": attributes, "cost": args.cost }).to_string();
    let (status, text) = client::post(url, &args.server, "explain", "text/plain", &body)?;
    if status != 200 {
        return Err(client::refusal(status, &text))
            .with_context(|| format!("{url} answered {status}"));
    }
    let outcome = match text.trim_end().lines().last() {
        Some(line) if line.starts_with(WOULD_PASS) => Outcome::Yes,
        Some(line) if line.starts_with(WOULD_BE_DENIED) => Outcome::No,
        _ => bail!(
            "{url} answered something that is not an explanation: is it a Tidegate of this version?"
        ),
    };
    print(&text)?;
    Ok(outcome)
}

fn print(text: &str) -> Result<()> {
    let (mut out, paint) = (output::stdout(), Paint::stdout());
    for line in text.lines() {
        let line = if line.contains(": does not apply") {
            paint.faint(line.to_string())
        } else {
            line.to_string()
        };
        writeln!(out, "{line}")?;
    }
    out.flush()?;
    Ok(())
}
