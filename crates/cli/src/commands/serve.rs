//! `tidegate serve`: open doors until told to stop.

use std::io::Write;

use anyhow::{Context, Result};
use tidegate_server::config::Config;
use tidegate_server::resp::Auth;
use tidegate_server::{BUILT_IN, Options, Running, start};
use tokio::signal::unix::{SignalKind, signal};

use super::Outcome;
use crate::args;
use crate::output;

pub(super) fn run(args: args::Serve) -> Result<Outcome> {
    let mut config = match &args.config {
        Some(file) => Config::load(file)?,
        None => Config::parse(BUILT_IN, "the built-in rules")?,
    };
    if let Some(store) = args.store {
        config.store = store;
    }
    if let Some(at) = args.http {
        config.listen.http = at.0;
    }
    if let Some(at) = args.resp {
        config.listen.resp = at.0;
    }
    let auth = Auth { checks: args.token.map(Into::into), admin: args.admin_token.map(Into::into) };
    let options = Options { rules_file: args.config, insecure: args.insecure, auth };
    let runtime =
        tokio::runtime::Builder::new_multi_thread().enable_all().build().context("could not start a runtime")?;
    runtime.block_on(async {
        // Before anything is said, so that whoever reads it can already stop us.
        let (mut term, mut int) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
        let running = start(config, options).await?;
        greet(&running)?;
        tokio::select! {
            _ = term.recv() => {}
            _ = int.recv() => {}
        }
        Ok(if running.stop().await { Outcome::Yes } else { Outcome::No })
    })
}

/// Where each door is, and a line to try it.
fn greet(running: &Running) -> Result<()> {
    let mut out = output::stdout();
    if let Some(at) = running.http {
        writeln!(out, "http  {at}    curl -d '{{\"key\":\"user:7\",\"limit\":\"10/s\"}}' http://{at}/v1/check")?;
    }
    if let Some(at) = running.resp {
        let (ip, port) = (at.ip(), at.port());
        writeln!(out, "resp  {at}    redis-cli -h {ip} -p {port} CL.THROTTLE user:7 15 30 60")?;
    }
    writeln!(out, "ready")?;
    out.flush()?;
    Ok(())
}
