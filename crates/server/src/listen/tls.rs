//! TLS for every listener, by rustls and ring: TLS 1.2 and 1.3, and client certificates if they are
//! configured.
//!
//! The files are checked every second. If they have changed and are valid, new connections get the
//! new certificate, and open ones keep theirs. If they are not valid, perhaps half written, the
//! last valid ones stay in force.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use serde::{Deserialize, Serialize};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::{Error, RootCertStore, ServerConfig};

use crate::observe::Observer;
use crate::observe::metrics::Reloaded;
use crate::parse::values;
use crate::protocol::Protocol;

/// How often the files are checked.
const EVERY: Duration = Duration::from_secs(1);
/// The largest file, in bytes.
const MAX_BYTES: u64 = 1 << 20;

/// The certificate of the server and the authorities of its clients, as PEM files.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct TlsFiles {
    /// The certificate, followed by the intermediate ones.
    #[serde(deserialize_with = "values::path")]
    pub cert: PathBuf,
    /// The key of the certificate.
    #[serde(deserialize_with = "values::path")]
    pub key: PathBuf,
    /// The authorities of client certificates. If set, a client needs a certificate by one of them.
    #[serde(default, deserialize_with = "values::some_path")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub client_ca: Option<PathBuf>,
}

/// A TLS file that cannot be used.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{file}: {problem}")]
pub struct TlsError {
    file: String,
    problem: String,
}

impl TlsError {
    /// Whether the problem is in this file.
    pub(crate) fn is_about(&self, file: &Path) -> bool {
        self.file == file.display().to_string()
    }
}

/// The TLS configuration. Cheap to clone; clones change together.
#[derive(Clone, Debug)]
pub struct Tls {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    files: TlsFiles,
    current: ArcSwap<Current>,
}

#[derive(Debug)]
struct Current {
    read: Read,
    http: Arc<ServerConfig>,
    grpc: Arc<ServerConfig>,
    resp: Arc<ServerConfig>,
}

/// The contents of the files.
#[derive(Clone, PartialEq, Eq)]
struct Read {
    cert: Vec<u8>,
    key: Vec<u8>,
    client_ca: Option<Vec<u8>>,
}

impl std::fmt::Debug for Read {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("***")
    }
}

impl Tls {
    /// Reads the files.
    ///
    /// # Errors
    /// If one of them is not as expected.
    pub fn load(files: TlsFiles) -> Result<Tls, TlsError> {
        let current = Current::new(&files, Read::from(&files)?)?;
        Ok(Tls { inner: Arc::new(Inner { files, current: ArcSwap::from_pointee(current) }) })
    }

    /// Whether clients need a certificate.
    pub fn knows_clients(&self) -> bool {
        self.inner.files.client_ca.is_some()
    }

    /// The acceptor for a protocol.
    pub fn acceptor(&self, protocol: Protocol) -> TlsAcceptor {
        let current = self.inner.current.load();
        let config = match protocol {
            Protocol::Grpc => &current.grpc,
            Protocol::Resp => &current.resp,
            _ => &current.http,
        };
        TlsAcceptor::from(Arc::clone(config))
    }

    /// Reads the files again, and returns whether they have changed.
    ///
    /// # Errors
    /// If they are not valid; then the configuration stays as it was.
    pub fn refresh(&self) -> Result<bool, TlsError> {
        let read = Read::from(&self.inner.files)?;
        if read == self.inner.current.load().read {
            return Ok(false);
        }
        self.inner.current.store(Arc::new(Current::new(&self.inner.files, read)?));
        Ok(true)
    }

    /// Checks the files forever.
    pub(crate) async fn watch(self, observer: Observer) {
        let mut every = tokio::time::interval(EVERY);
        every.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut last_problem = None;
        loop {
            every.tick().await;
            let tls = self.clone();
            let Ok(result) = tokio::task::spawn_blocking(move || tls.refresh()).await else {
                continue;
            };
            match result {
                Ok(changed) => {
                    last_problem = None;
                    observer.metrics().in_force().set("certificates", None);
                    if changed {
                        observer.metrics().reloaded(Reloaded::Certificates, true);
                        observer.log().info(
                            "certificates read",
                            &[("file", &self.inner.files.cert.display())],
                        );
                    }
                }
                // Logged once, not every second.
                Err(problem) if last_problem.as_ref() != Some(&problem) => {
                    observer.metrics().reloaded(Reloaded::Certificates, false);
                    observer.log().error(
                        "certificates refused; the last good ones stay in force",
                        &[("why", &problem)],
                    );
                    let difference = format!(
                        "certificates: refused, the last good ones stay in force: {problem}"
                    );
                    observer.metrics().in_force().set("certificates", Some(difference));
                    last_problem = Some(problem);
                }
                Err(_) => {}
            }
        }
    }
}

impl Read {
    fn from(files: &TlsFiles) -> Result<Read, TlsError> {
        Ok(Read {
            cert: bytes(&files.cert)?,
            key: bytes(&files.key)?,
            client_ca: files.client_ca.as_deref().map(bytes).transpose()?,
        })
    }
}

fn bytes(file: &Path) -> Result<Vec<u8>, TlsError> {
    let failed = |problem: String| TlsError { file: file.display().to_string(), problem };
    let size = std::fs::metadata(file).map_err(|error| failed(error.to_string()))?.len();
    if size > MAX_BYTES {
        return Err(failed(format!("{size} bytes: expected at most {MAX_BYTES}")));
    }
    tidegate_bounded::files::read_file(file, MAX_BYTES).map_err(|error| failed(error.to_string()))
}

impl Current {
    fn new(files: &TlsFiles, read: Read) -> Result<Current, TlsError> {
        let failed =
            |file: &Path, problem: String| TlsError { file: file.display().to_string(), problem };
        let provider = Arc::new(ring::default_provider());
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .map_err(|error| failed(&files.cert, error.to_string()))?;
        let builder = match (&files.client_ca, &read.client_ca) {
            (Some(file), Some(text)) => {
                let mut roots = RootCertStore::empty();
                for certificate in certificates(file, text)? {
                    roots.add(certificate).map_err(|error| {
                        failed(file, tidegate_redis_client::tls_problem::rustls_problem(&error))
                    })?;
                }
                let verifier =
                    WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider).build();
                builder.with_client_cert_verifier(
                    verifier.map_err(|error| failed(file, error.to_string()))?,
                )
            }
            _ => builder.with_no_client_auth(),
        };
        let key = PrivateKeyDer::from_pem_slice(&read.key).map_err(|error| {
            failed(
                &files.key,
                tidegate_redis_client::tls_problem::pem_problem(&error, "PRIVATE KEY"),
            )
        })?;
        let config = builder.with_single_cert(certificates(&files.cert, &read.cert)?, key).map_err(|error| {
            let problem = match error {
                Error::InconsistentKeys(_) => "this certificate was made for another key".into(),
                error => tidegate_redis_client::tls_problem::rustls_problem(&error),
            };
            failed(
                &files.key,
                format!(
                    "not the key of {}: {problem}: name the key that it was made with, or a certificate for this key",
                    files.cert.display()
                ),
            )
        })?;
        let speaking = |protocols: &[&[u8]]| {
            let mut config = config.clone();
            config.alpn_protocols = protocols.iter().map(|name| name.to_vec()).collect();
            Arc::new(config)
        };
        let (http, grpc, resp) =
            (speaking(&[b"h2", b"http/1.1"]), speaking(&[b"h2"]), speaking(&[]));
        Ok(Current { read, http, grpc, resp })
    }
}

fn certificates(file: &Path, text: &[u8]) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let failed = |problem: String| TlsError { file: file.display().to_string(), problem };
    let found = CertificateDer::pem_slice_iter(text).collect::<Result<Vec<_>, _>>();
    let found = found.map_err(|error| {
        failed(tidegate_redis_client::tls_problem::pem_problem(&error, "CERTIFICATE"))
    })?;
    if found.is_empty() {
        Err(failed(tidegate_redis_client::tls_problem::no_pem("CERTIFICATE")))
    } else {
        Ok(found)
    }
}
