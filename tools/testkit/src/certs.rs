//! Certificates for tests with TLS, made anew each time.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

use rcgen::{
    BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use tempfile::TempDir;

/// An authority, and a certificate by it for a server at `127.0.0.1` or `localhost`, and one for a
/// client: PEM files in a temporary folder. It goes with the last clone, and a server that uses it
/// holds one.
#[derive(Clone, Debug)]
pub struct Certs {
    folder: Arc<TempDir>,
}

impl Certs {
    /// Makes new ones.
    pub fn new() -> Certs {
        let folder = tempfile::Builder::new()
            .prefix("tidegate-")
            .tempdir()
            .expect("a temporary folder can be made");
        let certs = Certs { folder: Arc::new(folder) };
        certs
            .write(&["127.0.0.1".to_owned(), "localhost".to_owned()])
            .expect("certificates with constant names can be made");
        certs
    }

    /// The certificate of the authority, for clients that are to trust the others.
    pub fn ca(&self) -> PathBuf {
        self.path("ca.pem")
    }

    /// The server's certificate.
    pub fn server_cert(&self) -> PathBuf {
        self.path("server.pem")
    }

    /// The server's key.
    pub fn server_key(&self) -> PathBuf {
        self.path("server.key")
    }

    /// The client's certificate.
    pub fn client_cert(&self) -> PathBuf {
        self.path("client.pem")
    }

    /// The client's key.
    pub fn client_key(&self) -> PathBuf {
        self.path("client.key")
    }

    /// The same, with the authority's own certificate as the server's: what is presented by mistake
    /// after `openssl req -x509`.
    pub fn with_authority_as_server() -> Certs {
        let certs = Certs::new();
        for (from, to) in [("ca.pem", "server.pem"), ("ca.key", "server.key")] {
            fs::copy(certs.path(from), certs.path(to)).expect("a temporary file can be copied");
        }
        certs
    }

    /// The same, with a server's certificate for these names alone.
    pub fn for_server_called(names: &[&str]) -> Certs {
        let certs = Certs::new();
        let names: Vec<String> = names.iter().map(ToString::to_string).collect();
        certs.write(&names).expect("certificates with constant names can be made");
        certs
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write(&self, names: &[String]) -> Result<(), rcgen::Error> {
        let mut authority = CertificateParams::new([])?;
        authority.distinguished_name.push(rcgen::DnType::CommonName, "Tidegate test authority");
        authority.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        authority.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let key = KeyPair::generate()?;
        self.put("ca.pem", &authority.self_signed(&key)?.pem());
        self.put("ca.key", &key.serialize_pem());
        let issuer = Issuer::new(authority, key);

        self.issue(
            "server",
            CertificateParams::new(names.to_vec())?,
            ExtendedKeyUsagePurpose::ServerAuth,
            &issuer,
        )?;
        self.issue(
            "client",
            CertificateParams::new([])?,
            ExtendedKeyUsagePurpose::ClientAuth,
            &issuer,
        )
    }

    fn issue(
        &self,
        name: &str,
        mut params: CertificateParams,
        purpose: ExtendedKeyUsagePurpose,
        issuer: &Issuer<'_, KeyPair>,
    ) -> Result<(), rcgen::Error> {
        params.distinguished_name.push(rcgen::DnType::CommonName, format!("Tidegate test {name}"));
        params.extended_key_usages = vec![purpose];
        params.use_authority_key_identifier_extension = true;
        let key = KeyPair::generate()?;
        self.put(&format!("{name}.pem"), &params.signed_by(&key, issuer)?.pem());
        self.put(&format!("{name}.key"), &key.serialize_pem());
        Ok(())
    }

    fn put(&self, name: &str, text: &str) {
        fs::write(self.path(name), text).expect("a temporary file can be written");
    }
}

impl Default for Certs {
    fn default() -> Certs {
        Certs::new()
    }
}
