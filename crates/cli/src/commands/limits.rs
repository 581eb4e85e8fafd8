//! `tidegate limits`: what a limit means, in plain words.

use anyhow::Result;

use super::Outcome;
use crate::args::Explain;

pub(crate) fn run(_args: &Explain) -> Result<Outcome> {
    Ok(Outcome::Yes)
}
