//! Open listeners over a store whose clock stands still, and the smallest HTTP client.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use tidegate::redis::{Redis, RedisBuilder};
use tidegate::resilience::Resilient;
use tidegate::{ManualClock, Memory, Timestamp};
use tidegate_server::backend::Backend;
use tidegate_server::config::Config;
use tidegate_server::{Options, Running, start_over};
use tidegate_testkit::Client;
use tokio::runtime::Runtime;

/// Where the clock of [`Listeners::in_memory`] stands at first.
pub(crate) const BEGIN: Timestamp = Timestamp::from_secs(1_700_000_000);

/// The listeners for HTTP and RESP over one store.
pub(crate) struct Listeners {
    pub(crate) http: SocketAddr,
    pub(crate) grpc: u16,
    pub(crate) resp: u16,
    pub(crate) clock: ManualClock,
    pub(crate) runtime: Runtime,
    running: Option<Running>,
}

impl Listeners {
    /// Over a memory whose clock stands at [`BEGIN`]. `rules` is the text of a rules file; it may
    /// be empty.
    pub(crate) fn in_memory(rules: &str) -> Listeners {
        let clock = ManualClock::new();
        clock.set(BEGIN);
        Listeners::over(rules, clock.clone(), |_| {
            Backend::Memory(Memory::builder().clock(clock).build())
        })
    }

    /// The same, with room for a single key.
    pub(crate) fn in_small_memory(rules: &str) -> Listeners {
        let clock = ManualClock::new();
        clock.set(BEGIN);
        Listeners::over(rules, clock.clone(), |_| {
            Backend::Memory(Memory::builder().clock(clock).max_keys(1).build())
        })
    }

    /// Over Redis or Valkey, at the time that the clock shows.
    pub(crate) fn in_redis(rules: &str, builder: RedisBuilder) -> Listeners {
        let clock = ManualClock::new();
        clock.set(BEGIN);
        Listeners::over(rules, clock.clone(), |runtime| {
            let redis: Redis = runtime.block_on(async { builder.clock(clock).build() }).unwrap();
            Backend::Redis(redis)
        })
    }

    /// The same with what stands before a store.
    pub(crate) fn resilient(rules: &str, builder: RedisBuilder) -> Listeners {
        Listeners::over(rules, ManualClock::new(), |runtime| {
            let redis: Redis = runtime.block_on(async { builder.build() }).unwrap();
            let _entered = runtime.enter();
            Backend::Resilient(Resilient::new(redis.clone()), redis)
        })
    }

    /// With a whole file, that has a listener for HTTP and may have one for gRPC.
    pub(crate) fn as_told(text: &str) -> Listeners {
        let clock = ManualClock::new();
        clock.set(BEGIN);
        Listeners::open(text, clock.clone(), |_| {
            Backend::Memory(Memory::builder().clock(clock).build())
        })
    }

    /// The same over a Redis that nobody runs, with what stands before a store.
    pub(crate) fn without_store(text: &str) -> Listeners {
        Listeners::open(text, ManualClock::new(), |runtime| {
            let _entered = runtime.enter();
            let redis = Redis::new("redis://127.0.0.1:1/").unwrap();
            Backend::Resilient(Resilient::builder(redis.clone()).nodes(1).build(), redis)
        })
    }

    fn over(rules: &str, clock: ManualClock, store: impl FnOnce(&Runtime) -> Backend) -> Listeners {
        let text =
            format!("listen: {{ http: 127.0.0.1:0, resp: 127.0.0.1:0, grpc: off }}\n{rules}");
        Listeners::open(&text, clock, store)
    }

    fn open(text: &str, clock: ManualClock, store: impl FnOnce(&Runtime) -> Backend) -> Listeners {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let config = Config::parse(text, "test").unwrap();
        let store = store(&runtime);
        let running = runtime.block_on(start_over(store, config, Options::default())).unwrap();
        let (http, grpc) = (running.http.unwrap(), running.grpc.map_or(0, |at| at.port()));
        let resp = running.resp.map_or(0, |at| at.port());
        Listeners { http, grpc, resp, clock, runtime, running: Some(running) }
    }

    /// The engine behind the listeners.
    pub(crate) fn engine(&self) -> &tidegate_server::engine::Engine {
        self.running.as_ref().unwrap().engine()
    }

    /// A connection to the proxy.
    pub(crate) fn proxy(&self) -> Http {
        Http::connect(self.running.as_ref().unwrap().proxy.unwrap())
    }

    /// A connection to the RESP listener.
    pub(crate) fn resp(&self) -> Client {
        Client::connect(self.resp).unwrap()
    }

    /// A connection to the HTTP listener.
    pub(crate) fn http(&self) -> Http {
        Http::connect(self.http)
    }
}

impl Drop for Listeners {
    fn drop(&mut self) {
        let running = self.running.take().unwrap();
        let answered = self.runtime.block_on(running.stop());
        assert!(
            answered || std::thread::panicking(),
            "the listeners close in time, and everything was answered"
        );
    }
}

/// A connection that is kept, one request after the other.
pub(crate) struct Http {
    stream: BufReader<TcpStream>,
}

/// What was answered.
#[derive(Clone, Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    /// The status line and the headers, as they came.
    pub(crate) head: String,
    pub(crate) body: String,
}

impl Answer {
    /// The lines of the head but for the date and what every answer of our own has.
    pub(crate) fn own_head(&self) -> Vec<&str> {
        assert!(self.head.contains("\r\nx-content-type-options: nosniff\r\n"), "{}", self.head);
        let is_own = |line: &&str| {
            !line.starts_with("date: ") && !line.starts_with("x-content-type-options: ")
        };
        self.head.trim_end().lines().filter(is_own).collect()
    }
}

impl Http {
    pub(crate) fn connect(at: SocketAddr) -> Http {
        let stream = TcpStream::connect(at).unwrap();
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        Http { stream: BufReader::new(stream) }
    }

    /// Posts JSON.
    pub(crate) fn post(&mut self, path: &str, body: &str) -> Answer {
        let length = body.len();
        self.send(&format!(
            "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
        ));
        self.receive().expect("an answer")
    }

    pub(crate) fn send(&mut self, text: &str) {
        self.stream.get_mut().write_all(text.as_bytes()).unwrap();
    }

    /// The next answer; none if the connection ends before it begins.
    pub(crate) fn receive(&mut self) -> Option<Answer> {
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            match self.stream.read_line(&mut head) {
                Ok(0) | Err(_) if head.is_empty() => return None,
                Ok(0) => panic!("the answer ends early: {head:?}"),
                Ok(_) => {}
                Err(error) => panic!("{error} after {head:?}"),
            }
        }
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        let length = head.lines().find_map(|line| {
            line.to_ascii_lowercase().strip_prefix("content-length: ").map(str::to_owned)
        });
        let mut body = vec![0; length.map_or(0, |length| length.parse().unwrap())];
        self.stream.read_exact(&mut body).unwrap();
        Some(Answer { status, head, body: String::from_utf8(body).unwrap() })
    }
}
