//! Tokens at the start: given outright, or read from files.

use std::path::Path;
use std::sync::Arc;

use crate::auth::{Auth, Guard, Secret};
use crate::config::{Config, TokenFiles};
use crate::start_error::StartError;

/// The tokens that listeners require.
pub(super) struct Access {
    pub(super) guard: Arc<Guard>,
    /// Files that are read again when they change. A token that is given outright stays.
    pub(super) token_files: TokenFiles,
    pub(super) has_check_token: bool,
}

impl Access {
    /// Reads the tokens that `given` lacks.
    pub(super) fn new(config: &Config, given: Auth) -> Result<Self, StartError> {
        let TokenFiles { checks, admin } = &config.tokens;
        let token_files = TokenFiles {
            checks: checks.clone().filter(|_| given.checks.is_none()),
            admin: admin.clone().filter(|_| given.admin.is_none()),
        };
        let auth = Auth {
            checks: token(given.checks, checks.as_deref())?,
            admin: token(given.admin, admin.as_deref())?,
        };
        let has_check_token = auth.checks.is_some();
        let guard = if config.listen.is_beyond_loopback() {
            Guard::beyond_loopback(auth).map_err(StartError::ShortToken)?
        } else {
            Guard::new(auth)
        };
        guard.set_hosts(config.http.hosts.clone());
        Ok(Access { guard: Arc::new(guard), token_files, has_check_token })
    }
}

fn token(given: Option<Secret>, file: Option<&Path>) -> Result<Option<Secret>, StartError> {
    match (given, file) {
        (None, Some(file)) => Secret::read(file).map(Some).map_err(StartError::Token),
        (given, _) => Ok(given),
    }
}
