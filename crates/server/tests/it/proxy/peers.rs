//! Messages between HTTP/2 clients and real HTTP/1.1 servers: cookies and lengths.

use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Stdio};

use axum::body::Body;
use axum::http::{Request, Response};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};

use super::http2::{DATA, HEADERS, OPENING, fields, frame, said};
use super::{FREE, Stage, bare, noting, read_message};

/// An application under Python's `wsgiref`, which reads several lines of a header as one with
/// commas.
const WSGI: &str = r#"
import http.cookies, wsgiref.simple_server

def app(environ, start_response):
    cookies = http.cookies.SimpleCookie(environ.get("HTTP_COOKIE", ""))
    session = cookies["session"].value if "session" in cookies else "logged out"
    length = environ.get("CONTENT_LENGTH") or "0"
    body = environ["wsgi.input"].read(int(length)).decode()
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [f"session={session} length={length} body={body}".encode()]

class Quiet(wsgiref.simple_server.WSGIRequestHandler):
    def log_message(self, *args): pass

server = wsgiref.simple_server.make_server("127.0.0.1", 0, app, handler_class=Quiet)
print(server.server_port, flush=True)
server.serve_forever()
"#;

/// A Python server whose responses have both a length and a transfer coding; `/short` and `/long`
/// say how the length is wrong.
const BOTH: &str = r#"
import http.server

class Both(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *args): pass
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "3" if self.path == "/short" else "30")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.write(b"5\r\nhello\r\n6\r\n world\r\n0\r\n\r\n")

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Both)
print(server.server_port, flush=True)
server.serve_forever()
"#;

/// A Python program that serves HTTP and prints its port.
struct Python {
    child: Child,
    at: SocketAddr,
}

impl Python {
    fn running(script: &str) -> Python {
        let started = tidegate_testkit::spawn(Path::new("python3"), |command| {
            command.args(["-c", script]).stdout(Stdio::piped());
        });
        let mut child = started.expect("python3 is installed by the package python3");
        let mut port = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut port).unwrap();
        let port: u16 = port.trim().parse().unwrap_or_else(|_| panic!("a port, not {port:?}"));
        Python { child, at: ([127, 0, 0, 1], port).into() }
    }

    fn http(&self) -> String {
        format!("http://{}", self.at)
    }
}

impl Drop for Python {
    fn drop(&mut self) {
        let _ = self.child.kill().and_then(|()| self.child.wait());
    }
}

/// Sends a request over HTTP/2.
fn ask(stage: &Stage, request: Request<Body>) -> Response<Incoming> {
    stage.runtime.block_on(async {
        let stream = tokio::net::TcpStream::connect(stage.at).await.unwrap();
        let (mut sender, connection) =
            http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        sender.send_request(request).await.unwrap()
    })
}

fn text(stage: &Stage, response: Response<Incoming>) -> String {
    let body = stage.runtime.block_on(response.into_body().collect()).unwrap().to_bytes();
    String::from_utf8(body.to_vec()).unwrap()
}

#[test]
fn cookie_crumbs_reach_a_wsgi_application_as_one_header() {
    let application = Python::running(WSGI);
    let stage = Stage::before(&application.http(), FREE);
    let request = Request::post("http://a.example/")
        .header("cookie", "theme=dark")
        .header("cookie", "session=S-7")
        .header("cookie", "lang=en")
        .body(Body::from("four"))
        .unwrap();
    let response = ask(&stage, request);
    assert_eq!(text(&stage, response), "session=S-7 length=4 body=four");
    // Two lines over HTTP/1.1 are joined as well.
    let answer = stage.connect().get("/", "Cookie: theme=dark\r\nCookie: session=S-8\r\n");
    assert!(answer.body.starts_with("session=S-8 "), "{}", answer.body);
}

#[test]
fn a_length_repeated_over_http_2_is_forwarded_once() {
    let (at, seen) = noting();
    let application = Python::running(WSGI);
    for upstream in [format!("http://{at}"), application.http()] {
        let stage = Stage::before(&upstream, FREE);
        let head = [
            (":method", "POST"),
            (":scheme", "http"),
            (":authority", "a"),
            (":path", "/"),
            ("content-length", "3"),
            ("content-length", "3"),
        ];
        let mut client = stage.connect();
        client.send(
            [OPENING, &frame(HEADERS, 4, 1, &fields(&head)), &frame(DATA, 1, 1, b"abc")].concat(),
        );
        assert_eq!(said(&mut client), "200", "{upstream}");
    }
    let seen = seen.lock().unwrap();
    let (head, body) = &seen[0];
    assert_eq!(
        (head.matches("content-length: 3\r\n").count(), &body[..]),
        (1, &b"abc"[..]),
        "{head}"
    );
}

#[test]
fn a_response_with_a_transfer_coding_is_complete_and_has_no_length() {
    let upstream = Python::running(BOTH);
    let stage = Stage::before(&upstream.http(), FREE);
    for path in ["/short", "/long"] {
        let mut client = stage.connect();
        for _ in 0..2 {
            let answer = client.get(path, "");
            assert_eq!((answer.status, answer.body.as_str()), (200, "hello world"), "{path}");
            assert_eq!(answer.field("content-length"), None, "{path}: {}", answer.head);
        }
        let request = Request::get(format!("http://a.example{path}")).body(Body::empty()).unwrap();
        let response = ask(&stage, request);
        assert!(!response.headers().contains_key("content-length"), "{path}");
        assert_eq!(text(&stage, response), "hello world", "{path}");
    }
}

#[test]
fn a_repeated_length_of_a_response_is_reduced_to_one() {
    let upstream = bare(|mut stream| {
        while let Some((head, _)) = read_message(&mut stream) {
            let lengths = if head.starts_with("GET /list") {
                "content-length: 2, 2\r\n"
            } else {
                "content-length: 2\r\ncontent-length: 2\r\n"
            };
            let _ = stream
                .get_mut()
                .write_all(format!("HTTP/1.1 200 OK\r\n{lengths}\r\nok").as_bytes());
        }
    });
    let stage = Stage::before(&format!("http://{upstream}"), FREE);
    for path in ["/list", "/lines"] {
        let answer = stage.connect().get(path, "");
        assert_eq!(
            (answer.field("content-length"), answer.body.as_str()),
            (Some("2"), "ok"),
            "{path}"
        );
    }
}
