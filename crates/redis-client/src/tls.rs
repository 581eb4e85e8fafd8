//! TLS by rustls and ring: trusted authorities and the client certificate.
//!
//! The trusted authorities are those of the system, or only those of `ca`. The files are read again
//! when they have changed, so the next connection uses a new certificate.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::client::WebPkiServerVerifier;
use tokio_rustls::rustls::client::danger::{
    HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier,
};
use tokio_rustls::rustls::crypto::{
    CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature,
};
use tokio_rustls::rustls::pki_types::pem::{self, PemObject};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use tokio_rustls::rustls::{
    ClientConfig, DigitallySignedStruct, Error, RootCertStore, SignatureScheme,
};

use super::outcome::{Failure, FailureKind, escaped};
use super::stream::Stream;
use super::tls_problem::{no_pem, pem_problem, rustls_problem, tls_problem};
use super::url::{Host, TlsFiles};
use tidegate_bounded::files::{MAX_SECRET_FILE_BYTES, read_file};

/// How long a handshake may have no reply before a PING without TLS tests for a plain server.
const BEFORE_PING: Duration = Duration::from_millis(300);

/// Encrypts connections.
pub(super) struct TlsClient {
    files: TlsFiles,
    current: Mutex<(Stamps, TlsConnector)>,
}

/// When the files were written.
type Stamps = [Option<SystemTime>; 3];

impl fmt::Debug for TlsClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.files.fmt(f)
    }
}

impl TlsClient {
    /// Reads the files.
    pub(super) fn new(files: &TlsFiles) -> Result<Self, Failure> {
        let current = Mutex::new((stamps(files), connector(files)?));
        Ok(TlsClient { files: files.clone(), current })
    }

    pub(super) async fn connect(&self, host: &Host, stream: TcpStream) -> Result<Stream, Failure> {
        let failed = |kind, why: &str| {
            Failure::local(kind, format!("TLS with {host} failed: {}", escaped(why)))
        };
        let name = ServerName::try_from(host.name.to_string());
        let name = name.map_err(|error| failed(FailureKind::Tls, &error.to_string()))?;
        let address = stream.peer_addr().ok();
        let stream = tokio::select! {
            stream = self.fresh().connect(name, stream) => stream.map_err(|error| {
                // A broken connection says nothing about certificates.
                let kind = match is_about_tls(&error) {
                    true => FailureKind::Tls,
                    false => FailureKind::Disconnected,
                };
                failed(kind, &tls_problem(&error))
            })?,
            () = answers_plainly(address) => {
                return Err(failed(FailureKind::Tls, "it answers without TLS"));
            }
        };
        Ok(Stream::Tls(Box::new(stream)))
    }

    /// The connector, built again if the files have changed. Files that cannot be read, perhaps
    /// because they are being written, change nothing.
    fn fresh(&self) -> TlsConnector {
        let now = stamps(&self.files);
        let mut current = self.current.lock();
        if current.0 != now
            && let Ok(connector) = connector(&self.files)
        {
            *current = (now, connector);
        }
        current.1.clone()
    }
}

/// Returns if the server speaks plain RESP. Such a server waits for the end of a command while the
/// client waits for the handshake, so a PING, which needs no secret, tells the two apart.
async fn answers_plainly(address: Option<SocketAddr>) {
    let ping = async {
        tokio::time::sleep(BEFORE_PING).await;
        let mut stream = TcpStream::connect(address?).await.ok()?;
        stream.write_all(b"PING\r\n").await.ok()?;
        let mut first = [0];
        stream.read_exact(&mut first).await.ok()?;
        // `+PONG`, or an error such as `-NOAUTH`.
        matches!(first[0], b'+' | b'-').then_some(())
    };
    if ping.await.is_none() {
        std::future::pending().await
    }
}

/// Whether an error of a stream is one of TLS.
pub(super) fn is_about_tls(error: &io::Error) -> bool {
    error.get_ref().is_some_and(|inner| inner.is::<Error>())
}

fn stamps(files: &TlsFiles) -> Stamps {
    let written = |path: &Path| std::fs::metadata(path).and_then(|file| file.modified()).ok();
    let identity = files.identity.as_ref();
    [
        files.ca.as_deref().and_then(written),
        identity.and_then(|(cert, _)| written(cert)),
        identity.and_then(|(_, key)| written(key)),
    ]
}

fn connector(files: &TlsFiles) -> Result<TlsConnector, Failure> {
    let failed = |text: String| Failure::local(FailureKind::Tls, text);
    let provider = Arc::new(ring::default_provider());
    let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .map_err(|error| failed(format!("TLS: {error}")))?;
    let builder = if files.insecure {
        builder
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(TrustAnyCertificate(provider)))
    } else {
        let roots = match &files.ca {
            Some(path) => authorities_of(path)?,
            None => authorities_of_the_system()?,
        };
        let verifier =
            WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider).build();
        builder.with_webpki_verifier(verifier.map_err(|error| failed(format!("TLS: {error}")))?)
    };
    let config = match &files.identity {
        None => builder.with_no_client_auth(),
        Some((cert, key)) => {
            let chain = certificates("cert", cert)?;
            let secret = read_file(key, MAX_SECRET_FILE_BYTES).map_err(pem::Error::Io);
            let secret =
                secret.and_then(|text| PrivateKeyDer::from_pem_slice(&text)).map_err(|error| {
                    failed(format!("key {key:?}: {}", pem_problem(&error, "PRIVATE KEY")))
                })?;
            builder.with_client_auth_cert(chain, secret).map_err(|error| {
                failed(format!("cert {cert:?} with key {key:?}: {}", rustls_problem(&error)))
            })?
        }
    };
    Ok(TlsConnector::from(Arc::new(config)))
}

/// The certificates in a file, which the URL names by a key.
fn certificates(key: &str, path: &Path) -> Result<Vec<CertificateDer<'static>>, Failure> {
    let failed = |why: String| Failure::local(FailureKind::Tls, format!("{key} {path:?}: {why}"));
    let found = read_file(path, MAX_SECRET_FILE_BYTES).map_err(pem::Error::Io);
    let found =
        found.and_then(|text| CertificateDer::pem_slice_iter(&text).collect::<Result<Vec<_>, _>>());
    let found = found.map_err(|error| failed(pem_problem(&error, "CERTIFICATE")))?;
    if found.is_empty() { Err(failed(no_pem("CERTIFICATE"))) } else { Ok(found) }
}

fn authorities_of(path: &Path) -> Result<RootCertStore, Failure> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates("ca", path)? {
        roots.add(certificate).map_err(|error| {
            Failure::local(FailureKind::Tls, format!("ca {path:?}: {}", rustls_problem(&error)))
        })?;
    }
    Ok(roots)
}

fn authorities_of_the_system() -> Result<RootCertStore, Failure> {
    let mut roots = RootCertStore::empty();
    let (added, _) =
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    if added == 0 {
        let text = "the system trusts no certificate authority: expected ?ca=FILE in the URL";
        return Err(Failure::local(FailureKind::Tls, text));
    }
    Ok(roots)
}

/// For `insecure=true`: accepts any certificate whose key the server holds.
#[derive(Debug)]
struct TrustAnyCertificate(Arc<CryptoProvider>);

impl ServerCertVerifier for TrustAnyCertificate {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(
            message,
            certificate,
            signed,
            &self.0.signature_verification_algorithms,
        )
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(
            message,
            certificate,
            signed,
            &self.0.signature_verification_algorithms,
        )
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
