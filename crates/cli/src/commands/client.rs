//! Sends requests to the HTTP listener of a Tidegate server.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use serde_json::{Value, json};
use tidegate_core::{Decision, Retry, Timestamp, Verdict};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

use crate::args;

/// The timeout of a request. A person waits at a terminal, so it can be long.
const TIMEOUT: Duration = Duration::from_secs(10);
/// The longest response; Tidegate sends less.
const MAX_ANSWER_BYTES: u64 = 1 << 20;

/// The address of the server.
struct Server<'a> {
    tls: bool,
    host: &'a str,
    port: u16,
}

impl<'a> Server<'a> {
    fn read(url: &'a str) -> Result<Self> {
        let expected =
            || anyhow!("--server {url:?}: expected http://HOST:PORT or https://HOST:PORT");
        let (scheme, rest) = url.split_once("://").ok_or_else(expected)?;
        let (tls, port) = match scheme {
            "http" => (false, 80),
            "https" => (true, 443),
            _ => return Err(expected()),
        };
        let authority = rest.strip_suffix('/').unwrap_or(rest);
        let (host, port) = match authority.rsplit_once(':') {
            Some((host, digits)) if !digits.ends_with(']') => {
                (host, digits.parse().map_err(|_| expected())?)
            }
            _ => (authority, port),
        };
        let plain =
            !host.is_empty() && !host.contains(['/', '@', '?', '#', ' ']) && host.is_ascii();
        if !plain || (host.contains(':') && !host.starts_with('[')) {
            return Err(expected());
        }
        Ok(Server { tls, host, port })
    }

    /// The host name, or an IPv6 address without brackets.
    fn name(&self) -> &'a str {
        self.host.trim_start_matches('[').trim_end_matches(']')
    }
}

/// Sends the check of `args` to the server at `url`. `path` is the operation.
pub(super) fn check(url: &str, args: &args::Check, path: &str) -> Result<Decision> {
    let body = json!({"key": args.key, "limit": args.limit.text, "cost": args.cost}).to_string();
    let (status, body) = post(url, &args.server, path, "*/*", &body)?;
    if status != 200 && status != 429 {
        return Err(refusal(status, &body)).with_context(|| format!("{url} answered {status}"));
    }
    let body: Value = serde_json::from_str(&body)
        .with_context(|| format!("{url} answered {status}, and no JSON"))?;
    decision(status, &body).with_context(|| format!("{url} answered {status}"))
}

/// Posts JSON to the server at `url`; returns status and body.
pub(super) fn post(
    url: &str,
    at: &args::ServerArgs,
    path: &str,
    accept: &str,
    body: &str,
) -> Result<(u16, String)> {
    let server = Server::read(url)?;
    let tls = server.tls.then(|| trusting(at.ca.as_deref())).transpose()?;
    let token = at.token()?.map(|token| format!("Authorization: Bearer {}\r\n", token.reveal()));
    let request = format!(
        "POST /v1/{path} HTTP/1.1\r\nHost: {}:{}\r\n{}Accept: {accept}\r\nContent-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
        server.host,
        server.port,
        token.unwrap_or_default(),
        body.len(),
    );
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let exchanged = async {
        let stream = TcpStream::connect((server.name(), server.port)).await?;
        let Some(tls) = tls else { return exchange(stream, &request).await };
        let name = ServerName::try_from(server.name().to_owned()).context("its name")?;
        let stream = TlsConnector::from(Arc::new(tls)).connect(name, stream).await;
        exchange(
            stream.map_err(|error| {
                anyhow!("TLS failed: {}", tidegate_redis_client::tls_problem::tls_problem(&error))
            })?,
            &request,
        )
        .await
    };
    let answer = runtime.context("could not start a runtime")?.block_on(async {
        tokio::time::timeout(TIMEOUT, exchanged)
            .await
            .unwrap_or_else(|_| Err(anyhow!("no answer within {TIMEOUT:?}")))
    });
    answer.map_err(|error| {
        let why = format!("{error:#}");
        let advice = if why.contains("does not speak TLS") {
            "Write http:// instead of https://, or name the port on which it speaks TLS."
        } else if why.contains("not signed by an authority") {
            "--ca FILE names the authority that signed its certificate, if that is one of your own."
        } else if why.contains("(CA:TRUE)") {
            "Sign a server certificate with that authority, and start the server with it: --tls-cert FILE --tls-key FILE."
        } else if why.contains(", not for ") {
            "Write the host after --server as the certificate names it, or give the server a certificate for this host."
        } else if why.contains("certificate of the client") {
            "This command has no certificate of its own: use a listener without --tls-client-ca, or use curl --cert FILE --key FILE."
        } else if why.contains("TLS failed: ") {
            "`openssl s_client -connect HOST:PORT` shows its certificate and what it accepts."
        } else if why.contains("Redis or Valkey") {
            "Name the HTTP address of `tidegate serve`, or use the store directly with --store redis://HOST:PORT."
        } else if why.contains("without an answer") {
            "Is it the HTTP address of `tidegate serve`? Reach a Redis or Valkey with --store redis://HOST:PORT, and a server that speaks TLS with https://."
        } else if why.contains("not HTTP") || why.contains("reset by peer") {
            "Another program may listen there, or it speaks TLS: write https://."
        } else {
            "Is it running there? `tidegate serve` starts one; HTTP is on 127.0.0.1:8080 by default."
        };
        anyhow!("{url}: {why}\n{advice}")
    })
}

/// Why the server refuses a request, from its problem+json.
pub(super) fn refusal(status: u16, body: &str) -> anyhow::Error {
    let body: Value = serde_json::from_str(body).unwrap_or_default();
    let detail = body["detail"].as_str().unwrap_or("without saying why");
    match status {
        401 | 403 => anyhow!("{detail}\nGive the token with --token-file FILE or TIDEGATE_TOKEN."),
        _ => anyhow!("{detail}"),
    }
}

/// Sends a request and reads the response: its status and body.
async fn exchange(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    request: &str,
) -> Result<(u16, String)> {
    stream.write_all(request.as_bytes()).await?;
    let mut answer = Vec::new();
    let read = (&mut stream).take(MAX_ANSWER_BYTES).read_to_end(&mut answer).await;
    let answer = String::from_utf8(answer).context("its answer is not text")?;
    // A server may close without the last word of TLS. What was read is number if there is as much
    // as it said.
    let (head, body) = match (answer.split_once("\r\n\r\n"), read) {
        (Some(parts), _) => parts,
        (None, Err(error)) => return Err(error.into()),
        (None, Ok(_)) if answer.starts_with("-ERR") => {
            bail!("it is a Redis or Valkey, not a Tidegate")
        }
        // Redis and Valkey close a connection that sends POST.
        (None, Ok(_)) if answer.is_empty() => bail!("it closed the connection without an answer"),
        (None, Ok(_)) => bail!("it answered something that is not HTTP"),
    };
    let status = head
        .split(' ')
        .nth(1)
        .and_then(|code| code.parse().ok())
        .context("it answered without a status")?;
    let mut lengths = head.lines().filter_map(|line| line.split_once(':'));
    let length = lengths.find(|(name, _)| name.eq_ignore_ascii_case("content-length"));
    match length.and_then(|(_, length)| length.trim().parse::<usize>().ok()) {
        Some(length) if length != body.len() => {
            bail!("its answer ended after {} of {length} bytes", body.len())
        }
        _ => Ok((status, body.to_owned())),
    }
}

/// Trusts the authorities in a file, or those that the system trusts.
fn trusting(ca: Option<&Path>) -> Result<ClientConfig> {
    let mut roots = RootCertStore::empty();
    if let Some(file) = ca {
        let failed = |why: String| anyhow!("--ca {}: {why}", file.display());
        let text = tidegate_bounded::files::read_file(
            file,
            tidegate_bounded::files::MAX_SECRET_FILE_BYTES,
        );
        let text = text.map_err(|error| failed(tidegate_bounded::files::why_unreadable(&error)))?;
        for certificate in CertificateDer::pem_slice_iter(&text) {
            let certificate = certificate.map_err(|error| {
                failed(tidegate_redis_client::tls_problem::pem_problem(&error, "CERTIFICATE"))
            })?;
            roots.add(certificate).map_err(|error| {
                failed(tidegate_redis_client::tls_problem::rustls_problem(&error))
            })?;
        }
        if roots.is_empty() {
            return Err(failed(tidegate_redis_client::tls_problem::no_pem("CERTIFICATE")));
        }
    } else {
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        if roots.is_empty() {
            bail!("this system trusts no certificate authority: name one with --ca FILE");
        }
    }
    Ok(ClientConfig::builder().with_root_certificates(roots).with_no_client_auth())
}

/// Parses the decision of a response.
fn decision(status: u16, body: &Value) -> Result<Decision> {
    let number = |of: &Value, name: &str| {
        of[name].as_u64().with_context(|| format!("{name} is {}", of[name]))
    };
    let verdict = |of: &Value| -> Result<Verdict> {
        Ok(Verdict {
            allowed: of["allowed"].as_bool().context("allowed is missing")?,
            granted: number(of, "granted")?,
            amount: number(of, "amount")?,
            remaining: number(of, "remaining")?,
            retry: match &of["retry_after_us"] {
                Value::Null => Retry::Never,
                Value::Number(number) if number.as_u64() == Some(0) => Retry::Now,
                _ => Retry::After(number(of, "retry_after_us")?),
            },
            reset_after_us: number(of, "reset_after_us")?,
            next_after_us: number(of, "next_after_us")?,
        })
    };
    let charges = body["charges"]
        .as_array()
        .filter(|charges| !charges.is_empty())
        .context("charges are missing")?;
    let verdicts = charges.iter().map(verdict).collect::<Result<Vec<_>>>()?;
    Ok(Decision::of_many(verdicts, status == 200, Timestamp::from_micros(number(body, "t_us")?)))
}
