//! `tidegate validate`: checks a configuration before it is used.

use std::io::Write;

use anyhow::{Context, Result};
use tidegate_server::config::{Config, ConfigError};
use tidegate_server::findings::{self, Finding, Severity};
use tidegate_server::preflight;
use tidegate_server::rules::envoy::Domains;

use super::Outcome;
use crate::args;
use crate::output::{self, counted};

/// Prints the findings for a file, and a summary.
pub(super) fn validate(args: &args::Validate) -> Result<Outcome> {
    let (what, findings) = match found(args)? {
        Ok(found) => found,
        Err(error) => ("not read".into(), error.findings()),
    };
    for finding in &findings {
        let is_raised = args.strict && finding.severity == Severity::Warning;
        let shown = if is_raised {
            Finding::error(&*finding.place, &*finding.message)
        } else {
            finding.clone()
        };
        eprintln!("{shown}");
    }
    let count = |severity| findings.iter().filter(|finding| finding.severity == severity).count();
    let (errors, warnings) = (count(Severity::Error), count(Severity::Warning));
    let (errors, warnings) = if args.strict { (errors + warnings, 0) } else { (errors, warnings) };
    let found = if errors + warnings == 0 {
        "nothing wrong".into()
    } else {
        format!("{}, {}", counted(errors, "error"), counted(warnings, "warning"))
    };
    let mut out = output::stdout();
    writeln!(out, "{}: {what}, {found}", args.file.display())?;
    out.flush()?;
    Ok(if errors == 0 { Outcome::Yes } else { Outcome::Wrong })
}

/// Describes the contents of a file or folder, and finds its mistakes.
fn found(args: &args::Validate) -> Result<Result<(String, Vec<Finding>), ConfigError>> {
    if args.file.is_dir() {
        return Ok(Domains::load(&args.file).map(|domains| {
            let what =
                format!("{} domains with {} limits", domains.names().len(), domains.limits());
            (what, domains.warnings().to_vec())
        }));
    }
    let (config, mut findings) = match Config::examine(&args.file) {
        Ok(examined) => examined,
        Err(error) => return Ok(Err(error)),
    };
    if !args.offline {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.context("could not start a runtime")?;
        findings.extend(runtime.block_on(preflight(&config)));
        findings::sort(&mut findings);
    }
    Ok(Ok((counted(config.rules.iter().count(), "rule"), findings)))
}
