//! TLS errors as texts for users.

use std::io;

use tokio_rustls::rustls::pki_types::pem;
use tokio_rustls::rustls::{AlertDescription, CertificateError, Error, InvalidMessage};

use tidegate_bounded::files::why_unreadable;

/// The text for an error of a handshake or of an encrypted connection.
pub fn tls_problem(error: &io::Error) -> String {
    match error.get_ref().and_then(|inner| inner.downcast_ref::<Error>()) {
        Some(error) => rustls_problem(error),
        None if error.kind() == io::ErrorKind::UnexpectedEof => {
            "the other side closed the connection".into()
        }
        None => error.to_string(),
    }
}

/// The text for an error of rustls.
pub fn rustls_problem(error: &Error) -> String {
    match error {
        Error::InvalidCertificate(problem) => certificate(problem),
        Error::NoCertificatesPresented => "the other side has no certificate".into(),
        Error::InvalidMessage(InvalidMessage::InvalidContentType) => {
            "the other side does not speak TLS".into()
        }
        Error::InvalidMessage(_) => "the other side does not speak TLS as expected".into(),
        Error::InconsistentKeys(_) => "the key does not belong to the certificate".into(),
        Error::PeerIncompatible(_) => {
            "the other side supports no version or cipher of TLS that is safe".into()
        }
        Error::AlertReceived(alert) => match alert {
            AlertDescription::CertificateRequired => {
                "the other side wants a certificate of the client".into()
            }
            AlertDescription::UnknownCA => {
                "the other side does not trust the authority of the client's certificate".into()
            }
            AlertDescription::BadCertificate
            | AlertDescription::CertificateUnknown
            | AlertDescription::UnsupportedCertificate
            | AlertDescription::CertificateExpired
            | AlertDescription::CertificateRevoked => {
                "the other side does not accept the client's certificate".into()
            }
            AlertDescription::HandshakeFailure => {
                "the other side refuses the handshake; it may want a certificate of the client"
                    .into()
            }
            AlertDescription::ProtocolVersion => {
                "the other side supports neither TLS 1.2 nor TLS 1.3".into()
            }
            other => format!("the other side ended the handshake ({other:?})"),
        },
        other => other.to_string(),
    }
}

/// The text for an error of a PEM file; `expected` is `CERTIFICATE` or `PRIVATE KEY`.
pub fn pem_problem(error: &pem::Error, expected: &str) -> String {
    match error {
        pem::Error::NoItemsFound => no_pem(expected),
        pem::Error::Io(error) => why_unreadable(error),
        _ => format!("damaged: expected PEM with BEGIN {expected}"),
    }
}

/// The text for a PEM file without an item of the expected kind.
pub fn no_pem(expected: &str) -> String {
    format!("no {} in it: expected PEM with BEGIN {expected}", expected.to_lowercase())
}

fn certificate(problem: &CertificateError) -> String {
    match problem {
        CertificateError::UnknownIssuer | CertificateError::BadSignature => {
            "its certificate is not signed by an authority that is trusted here".into()
        }
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
            "its certificate has expired".into()
        }
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
            "its certificate is not valid yet".into()
        }
        CertificateError::Revoked => "its certificate was revoked".into(),
        CertificateError::NotValidForNameContext { expected, presented } => {
            // `DnsName("a.example")` as rustls writes it.
            let plain = |name: &String| {
                let inner = name.split_once('(').and_then(|(_, rest)| rest.strip_suffix(')'));
                inner.unwrap_or(name).trim_matches(['"', '\'']).to_owned()
            };
            let names: Vec<String> = presented.iter().map(plain).collect();
            let names = if names.is_empty() { "no name".to_owned() } else { names.join(", ") };
            format!("its certificate is for {names}, not for {}", expected.to_str())
        }
        CertificateError::NotValidForName => "its certificate is for another name".into(),
        CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. } => {
            "its certificate is not one for servers".into()
        }
        // By its name, since the type is not one of rustls's own.
        CertificateError::Other(other) if format!("{other:?}").contains("CaUsedAsEndEntity") => {
            "its certificate is that of a certificate authority (CA:TRUE), not of a server".into()
        }
        _ => "its certificate cannot be used".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_text_shows_the_name_of_a_type() {
        let errors = [
            Error::InvalidCertificate(CertificateError::UnknownIssuer),
            Error::InvalidCertificate(CertificateError::BadEncoding),
            Error::InvalidCertificate(CertificateError::NotValidForName),
            Error::InvalidMessage(InvalidMessage::InvalidContentType),
            Error::InvalidMessage(InvalidMessage::MessageTooLarge),
            Error::AlertReceived(AlertDescription::UnknownCA),
            Error::NoCertificatesPresented,
        ];
        for error in errors {
            let told = tls_problem(&io::Error::other(error));
            assert!(
                told.contains(' ') && !told.contains("::") && !told.contains("Other("),
                "{told}"
            );
        }
    }
}
