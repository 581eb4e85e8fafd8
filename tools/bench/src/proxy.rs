//! `cargo xtask bench proxy`: the proxy beside nginx with `proxy_pass` and `limit_req`, in one run.
//!
//! Both stand before the same upstream, an nginx that answers a few bytes by itself, and both keep
//! connections to it. Each is a process of its own, loaded by wrk in turns; what counts is the
//! processor time that a request costs. nginx is one process with one worker, the proxy has a
//! thread for each core, as each does by default when it may use all cores without a setting that
//! says how much.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio, exit};
use std::time::Duration;

use tidegate_server::config::Config;
use tidegate_server::{Options, start};
use tidegate_testkit::wait_until;

use crate::server::{Own, ServerContender, table, until_left_alone, wrk};

const ROUNDS: usize = 9;
const CONNECTIONS: &str = "50";
const ROUND: &str = "1s";
const NGINX: &str = "nginx proxy_pass, limit_req";

pub fn run(args: &[&str]) {
    match args {
        [] => measure(ROUNDS),
        ["serve", upstream] => serve(upstream),
        [rounds] if rounds.parse::<usize>().is_ok() => measure(rounds.parse().expect("a number")),
        _ => {
            eprintln!("proxy {}: expected a number of rounds", args.join(" "));
            exit(2);
        }
    }
}

fn measure(rounds: usize) {
    let files = tempfile::tempdir().expect("a folder for a moment");
    let small = "location / { return 200 hello; } location /large { alias LARGE; default_type text/plain; }";
    let large = files.path().join("large");
    std::fs::write(&large, vec![b'x'; 100_000]).expect("a file for a moment");
    let upstream = Nginx::start(
        files.path().join("upstream"),
        "",
        &small.replace("LARGE", large.to_str().expect("a path that is text")),
    );
    let to = format!(
        "limit_req_zone $binary_remote_addr zone=all:10m rate=1000000r/s; upstream app {{ server {}; keepalive 256; keepalive_requests 1000000; }}",
        upstream.at
    );
    let pass = "location / { limit_req zone=all burst=1000000 nodelay; proxy_pass http://app; proxy_http_version 1.1; \
                proxy_set_header Connection ''; proxy_set_header Host $host; proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for; }";
    let nginx = Nginx::start(files.path().join("proxy"), &to, pass);
    let own = Own::start_as(&["proxy", "serve", &upstream.at.to_string()]);
    for path in ["/", "/large"] {
        let mut contenders = [
            ServerContender::new(
                "the upstream itself",
                upstream.child.id(),
                upstream.at.port(),
                &[],
            ),
            ServerContender::new(NGINX, nginx.child.id(), nginx.at.port(), &[]),
            ServerContender::new(
                "tidegate proxy, 1000000/s by ip",
                own.child.id(),
                own.http.port(),
                &[],
            ),
        ];
        for round in 0..rounds {
            let mut order: Vec<usize> = (0..contenders.len()).collect();
            if round % 2 == 1 {
                order.reverse();
            }
            for index in order {
                contenders[index].round(|port, _| {
                    let mut load = Command::new("wrk");
                    load.args(["-t1", &format!("-c{CONNECTIONS}"), &format!("-d{ROUND}")]);
                    wrk(load.arg(format!("http://127.0.0.1:{port}{path}")))
                });
            }
        }
        let size = if path == "/" { "5 bytes" } else { "100 kB" };
        println!(
            "\nresponses of {size}, {CONNECTIONS} connections, wrk with one thread: median of {rounds} interleaved rounds of {ROUND}"
        );
        table(&contenders, &[NGINX]);
    }
}

fn serve(upstream: &str) {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime");
    let text = format!(
        "listen: {{ http: off, grpc: off, resp: off, proxy: 127.0.0.1:0 }}\nproxy: {{ upstream: \"http://{upstream}\" }}\nrules: [{{ name: per-ip, by: ip, limit: 1000000/s }}]\n"
    );
    let config = Config::parse(&text, "bench").expect("a configuration");
    let running = runtime.block_on(start(config, Options::default())).expect("open listeners");
    let at = running.proxy.expect("a listener");
    until_left_alone(at, at);
}

/// An nginx of one process.
struct Nginx {
    child: Child,
    at: SocketAddr,
}

impl Nginx {
    fn start(folder: PathBuf, global: &str, server: &str) -> Nginx {
        let at = TcpListener::bind("127.0.0.1:0")
            .and_then(|listener| listener.local_addr())
            .expect("a port");
        std::fs::create_dir_all(&folder).expect("a folder for a moment");
        let own = folder.to_str().expect("a path that is text");
        let text = format!(
            "daemon off; master_process off; worker_processes 1; pid {own}/pid; error_log stderr crit;\n\
             events {{ worker_connections 4096; }}\n\
             http {{ access_log off; keepalive_requests 1000000; client_body_temp_path {own}/a; proxy_temp_path {own}/b; fastcgi_temp_path {own}/c; uwsgi_temp_path {own}/d;\n\
             scgi_temp_path {own}/e; {global} server {{ listen {at}; {server} }} }}\n"
        );
        let file = folder.join("nginx.conf");
        std::fs::write(&file, text).expect("a file for a moment");
        // As `cargo xtask servers` installed it, or as the system has it.
        let installed = std::env::var_os("TIDEGATE_SERVERS")
            .map_or_else(|| PathBuf::from("../../target/servers"), PathBuf::from)
            .join("nginx");
        let mut command =
            Command::new(if installed.exists() { installed.as_path() } else { Path::new("nginx") });
        command.args(["-p", own, "-c"]).arg(&file).stdin(Stdio::null());
        let child = command.spawn().unwrap_or_else(|error| {
            eprintln!(
                "nginx: {error}: run `cargo xtask servers`, or `apt-get install nginx-light`"
            );
            exit(1)
        });
        wait_until("nginx listens", Duration::from_secs(10), || TcpStream::connect(at).is_ok());
        Nginx { child, at }
    }
}

impl Drop for Nginx {
    fn drop(&mut self) {
        let _ = self.child.kill().and_then(|()| self.child.wait());
    }
}
