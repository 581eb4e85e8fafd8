//! The proxy over real connections, with clients and upstreams written by these tests.

mod failures;
mod fast_path;
mod forwarding;
mod http2;
mod leases;
mod outcome;
mod peers;
mod rules;
mod slow_bodies;
mod smuggling;
mod upgrades;

use std::collections::VecDeque;
use std::future::Future;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Body;
use axum::http::{Request, Response};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use tidegate_server::config::Config;
use tidegate_server::{Options, Running, start};
use tokio::runtime::Runtime;

/// Long enough for a busy machine.
const LONG: Duration = Duration::from_secs(20);

/// A proxy in front of an upstream.
struct Stage {
    runtime: Runtime,
    running: Option<Running>,
    at: SocketAddr,
}

impl Stage {
    /// A proxy in front of the URL `upstream`; `text` is the rest of the configuration.
    fn before(upstream: &str, text: &str) -> Stage {
        Self::with(upstream, "", text)
    }

    /// Like `before`, with more settings of the proxy.
    fn with(upstream: &str, settings: &str, text: &str) -> Stage {
        Self::on_path(!module_path!().contains("by_hyper"), upstream, settings, text)
    }

    /// Like `with`, with or without the fast path.
    fn on_path(has_fast_path: bool, upstream: &str, settings: &str, text: &str) -> Stage {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap();
        let listen = "listen: { http: off, grpc: off, resp: off, proxy: 127.0.0.1:0 }\nlog: { level: off }\n";
        let text = format!("{listen}proxy: {{ upstream: \"{upstream}\"{settings} }}\n{text}");
        let mut config = Config::parse(&text, "test").unwrap();
        config.proxy.as_mut().unwrap().has_fast_path = has_fast_path;
        let running = runtime.block_on(start(config, Options::default())).unwrap();
        let at = running.proxy.unwrap();
        Stage { runtime, running: Some(running), at }
    }

    fn connect(&self) -> Client {
        Client::to(self.at)
    }

    /// Connects from another loopback address: 127.0.0.`host`.
    fn connect_from(&self, host: u8) -> Client {
        let connected = self.runtime.block_on(async {
            let socket = tokio::net::TcpSocket::new_v4()?;
            socket.bind(([127, 0, 0, host], 0).into())?;
            socket.connect(self.at).await?.into_std()
        });
        let stream = connected.unwrap();
        stream.set_nonblocking(false).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        Client { stream: BufReader::new(stream) }
    }

    fn metric(&self, line: &str) -> u64 {
        let engine = self.running.as_ref().unwrap().engine();
        let text = engine.observer().metrics().text(engine.store(), 0);
        let found = text.lines().find_map(|own| own.strip_prefix(line)?.strip_prefix(' '));
        found.unwrap_or_else(|| panic!("{line} is not in\n{text}")).parse().unwrap()
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        let Some(running) = self.running.take() else { return };
        let stopped = self.runtime.block_on(running.stop());
        assert!(stopped || std::thread::panicking(), "every request was answered");
    }
}

/// An upstream that answers by a function, over HTTP/1.1 or HTTP/2. It ends with its runtime.
struct Upstream {
    _runtime: Runtime,
    at: SocketAddr,
}

impl Upstream {
    fn answering<A, F>(answer: A) -> Upstream
    where
        A: Fn(Request<Incoming>) -> F + Clone + Send + Sync + 'static,
        F: Future<Output = Response<Body>> + Send + 'static,
    {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
        let at = listener.local_addr().unwrap();
        runtime.spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let answer = answer.clone();
                tokio::spawn(async move {
                    let service = service_fn(move |request| {
                        let answer = answer(request);
                        async move { Ok::<_, std::convert::Infallible>(answer.await) }
                    });
                    let builder = auto::Builder::new(TokioExecutor::new());
                    let _ = builder.serve_connection(TokioIo::new(stream), service).await;
                });
            }
        });
        Upstream { _runtime: runtime, at }
    }

    /// Echoes the request in the body of the response.
    fn echoing() -> Upstream {
        Self::answering(|request| async {
            let mut echo =
                format!("{} {} {:?}\n", request.method(), request.uri(), request.version());
            for (name, value) in request.headers() {
                echo += &format!("{name}: {}\n", String::from_utf8_lossy(value.as_bytes()));
            }
            let body = http_body_util::BodyExt::collect(request.into_body()).await.unwrap();
            echo += &format!("\n{}", String::from_utf8_lossy(&body.to_bytes()));
            Response::new(Body::from(echo))
        })
    }

    fn http(&self) -> String {
        format!("http://{}", self.at)
    }

    fn h2c(&self) -> String {
        format!("h2c://{}", self.at)
    }
}

/// An upstream without an HTTP library: a function serves each connection on its own thread.
fn bare(serve: impl Fn(BufReader<TcpStream>) + Clone + Send + 'static) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            let serve = serve.clone();
            std::thread::spawn(move || serve(BufReader::new(stream)));
        }
    });
    at
}

/// Heads and bodies as the upstream received them.
type Seen = Arc<Mutex<VecDeque<(String, Vec<u8>)>>>;

/// A bare upstream that parses strictly, records every request as it arrived, and answers `ok`.
fn noting() -> (SocketAddr, Seen) {
    let seen = Seen::default();
    let noted = Arc::clone(&seen);
    let at = bare(move |mut stream| {
        while let Some((head, body)) = read_message(&mut stream) {
            noted.lock().unwrap().push_back((head, body));
            if stream
                .get_mut()
                .write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
                .is_err()
            {
                return;
            }
        }
    });
    (at, seen)
}

/// One message with its body, `content-length` or chunked; `None` at the end.
fn read_message(stream: &mut impl BufRead) -> Option<(String, Vec<u8>)> {
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        if stream.read_line(&mut head).ok()? == 0 {
            return None;
        }
    }
    let field = |name: &str| {
        let lines = head.lines().filter_map(|line| line.split_once(':'));
        let mut lines = lines.filter(|(own, _)| own.eq_ignore_ascii_case(name));
        let value = lines.next().map(|(_, value)| value.trim().to_string());
        assert!(lines.next().is_none(), "{name} twice in {head}");
        value
    };
    let (length, coding) = (field("content-length"), field("transfer-encoding"));
    assert!(length.is_none() || coding.is_none(), "both in {head}");
    let mut body = Vec::new();
    if let Some(length) = length {
        body.resize(length.parse().unwrap(), 0);
        stream.read_exact(&mut body).ok()?;
    } else if coding.as_deref() == Some("chunked") {
        loop {
            let mut size = String::new();
            stream.read_line(&mut size).ok()?;
            let size = usize::from_str_radix(size.trim_end(), 16).ok()?;
            let mut chunk = vec![0; size];
            stream.read_exact(&mut chunk).ok()?;
            body.extend(chunk);
            let mut line = String::new();
            stream.read_line(&mut line).ok()?;
            while size == 0 && !line.is_empty() && line != "\r\n" {
                body.extend(format!("\ntrailer {}", line.trim_end()).bytes());
                line.clear();
                stream.read_line(&mut line).ok()?;
            }
            if size == 0 {
                break;
            }
        }
    }
    Some((head, body))
}

/// An HTTP/1.1 client that sends arbitrary bytes.
struct Client {
    stream: BufReader<TcpStream>,
}

struct Answer {
    status: u16,
    head: String,
    body: String,
}

impl Answer {
    /// The value of a header.
    fn field(&self, name: &str) -> Option<&str> {
        let mut lines = self.head.lines().filter_map(|line| line.split_once(':'));
        lines.find(|(own, _)| own.eq_ignore_ascii_case(name)).map(|(_, value)| value.trim())
    }
}

impl Client {
    fn to(at: SocketAddr) -> Client {
        let stream = TcpStream::connect(at).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        Client { stream: BufReader::new(stream) }
    }

    fn send(&mut self, text: impl AsRef<[u8]>) {
        self.stream.get_mut().write_all(text.as_ref()).unwrap();
    }

    /// The next response; `None` if the connection is over.
    fn read(&mut self) -> Option<Answer> {
        let (head, body) = read_message(&mut self.stream)?;
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        Some(Answer { status, head, body: String::from_utf8_lossy(&body).into_owned() })
    }

    fn ask(&mut self, text: impl AsRef<[u8]>) -> Answer {
        self.send(text);
        self.read().expect("an answer")
    }

    fn get(&mut self, path: &str, headers: &str) -> Answer {
        self.ask(format!("GET {path} HTTP/1.1\r\nHost: a.example\r\n{headers}\r\n"))
    }

    /// Whether the proxy has closed the connection.
    fn is_over(&mut self) -> bool {
        matches!(self.stream.read(&mut [0; 1]), Ok(0) | Err(_))
    }
}

const FREE: &str = "rules: [{ name: all, limit: 1000000/s }]\n";
