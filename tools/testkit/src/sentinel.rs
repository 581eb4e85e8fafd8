//! A master and a replica, watched by three sentinels.

use std::thread;
use std::time::{Duration, Instant};

use crate::{Flavor, Reply, Server, wait_until};

/// What the sentinels call the master.
const NAME: &str = "mymaster";
/// Meeting takes 2 s and a failover 3 s; a machine under load takes longer.
const PATIENCE: Duration = Duration::from_secs(60);
/// After so long a failover by order has come to nothing: three times its timeout.
const FAILOVER: Duration = Duration::from_secs(9);

/// Two servers and three sentinels, two of which have to agree. A master that is unresponsive for a
/// second (two with [`Flavor::Redis62`]) is replaced.
///
/// All are ordinary [`Server`]s: each can be stopped, killed and started again by itself.
#[derive(Debug)]
pub struct Sentinels {
    servers: Vec<Server>,
    sentinels: Vec<Server>,
}

impl Sentinels {
    /// Starts all five, and comes back when the replica follows its master and every sentinel knows
    /// the replica and the other two sentinels.
    ///
    /// # Panics
    /// If that takes longer than a minute.
    pub fn start(flavor: Flavor) -> Sentinels {
        let master = Server::builder(flavor).follows_at_once().start();
        let port = master.port().to_string();
        let replica = Server::builder(flavor)
            .follows_at_once()
            .args("--replicaof", &["127.0.0.1", &port])
            .start();
        wait_until("the replica follows its master", PATIENCE, || follows(&replica));
        // A sentinel connects to a new master up to one ping period after it has heard of it. If
        // that is as long as the time until a silent master counts as dead, a failover is now and
        // then followed by one back to the old master.
        let down_after_ms = if flavor == Flavor::Redis62 { 2000 } else { 1000 };
        let lines = format!(
            "sentinel monitor {NAME} 127.0.0.1 {port} 2\n\
             sentinel down-after-milliseconds {NAME} {down_after_ms}\n\
             sentinel failover-timeout {NAME} 3000\n"
        );
        let sentinel = || {
            let sentinel = Server::builder(flavor).sentinel(&lines).start();
            if flavor != Flavor::Redis62 {
                // Usually 1, 2 and 10 seconds: the last is how long a master that comes back is
                // taken for a master.
                let periods =
                    ["ping-period", "250", "publish-period", "500", "info-period", "1000"];
                let reply = sentinel.command(&[&["SENTINEL", "DEBUG"], &periods[..]].concat());
                assert_eq!(reply, Reply::Text("OK".into()), "SENTINEL DEBUG");
            }
            sentinel
        };
        let sentinels = thread::scope(|scope| {
            let starts: Vec<_> = (0..3).map(|_| scope.spawn(sentinel)).collect();
            starts.into_iter().map(|start| start.join().expect("a sentinel starts")).collect()
        });
        let all = Sentinels { servers: vec![master, replica], sentinels };
        all.wait_until_ok();
        all
    }

    /// What a client is given to find the master: `redis+sentinel://` the sentinels, and the name
    /// of the master.
    pub fn url(&self) -> String {
        let hosts: Vec<_> =
            self.sentinels.iter().map(|node| format!("127.0.0.1:{}", node.port())).collect();
        format!("redis+sentinel://{}/{NAME}", hosts.join(","))
    }

    /// What the sentinels call the master.
    pub fn master_name(&self) -> &'static str {
        NAME
    }

    /// The master and the replica; the first began as the master.
    pub fn servers(&self) -> &[Server] {
        &self.servers
    }

    /// The three sentinels.
    pub fn sentinels(&self) -> &[Server] {
        &self.sentinels
    }

    /// The server that the sentinels name as the master. Between its death and the failover it may
    /// be a dead one.
    ///
    /// # Panics
    /// If the sentinels do not agree, as during a failover.
    #[track_caller]
    pub fn master(&self) -> &Server {
        self.find_master().expect("the sentinels agree on a master")
    }

    /// The other server.
    ///
    /// # Panics
    /// If the sentinels do not agree which is the master.
    #[track_caller]
    pub fn replica(&self) -> &Server {
        let master = self.master().port();
        self.servers.iter().find(|server| server.port() != master).expect("there are two servers")
    }

    /// Kills the master and says which it was. The replica takes over some two seconds later: see
    /// [`Sentinels::wait_for_failover`].
    #[track_caller]
    pub fn kill_master(&self) -> &Server {
        let master = self.master();
        master.kill();
        master
    }

    /// Lets master and replica change places by order of a sentinel (`SENTINEL FAILOVER`), and
    /// returns the new master when all sentinels know it. What is written meanwhile may be lost.
    #[track_caller]
    pub fn failover(&self) -> &Server {
        let replica = self.replica();
        let mut ordered: Option<Instant> = None;
        wait_until("the replica is the master", PATIENCE, || {
            if self.find_master().is_some_and(|master| master.port() == replica.port()) {
                return true;
            }
            // A sentinel refuses with NOGOODSLAVE until it has heard from the replica that all is
            // well. On a busy machine a failover that has begun may come to nothing, or the new
            // master may be taken for dead and replaced by the old.
            let again = ordered.is_none_or(|ordered| ordered.elapsed() > FAILOVER);
            if again
                && self.sentinels[0].command(&["SENTINEL", "FAILOVER", NAME])
                    == Reply::Text("OK".into())
            {
                ordered = Some(Instant::now());
            }
            false
        });
        self.wait_until_ok();
        replica
    }

    /// Comes back when the sentinels name a master that is neither killed nor stopped and says so
    /// itself; with it.
    #[track_caller]
    pub fn wait_for_failover(&self) -> &Server {
        wait_until("there is a new master", PATIENCE, || {
            self.find_master()
                .is_some_and(|master| master.is_awake() && info(master).contains("role:master"))
        });
        self.master()
    }

    /// Comes back when both servers run, one follows the other, and all sentinels know all servers.
    #[track_caller]
    pub fn wait_until_ok(&self) {
        wait_until("the sentinels know all servers", PATIENCE, || {
            let know = |sentinel: &Server| {
                let fields = fields(sentinel);
                let is =
                    |name: &str, value: &str| fields.iter().any(|(n, v)| n == name && v == value);
                is("flags", "master") && is("num-slaves", "1") && is("num-other-sentinels", "2")
            };
            let Some(master) = self.find_master() else { return false };
            let follow = |server: &Server| server.port() == master.port() || follows(server);
            info(master).contains("role:master")
                && self.servers.iter().all(follow)
                && self.sentinels.iter().all(know)
        });
    }

    /// The server that all sentinels name, except those that are killed or stopped.
    fn find_master(&self) -> Option<&Server> {
        let mut ports =
            self.sentinels.iter().filter(|sentinel| sentinel.is_awake()).map(|sentinel| {
                match sentinel.try_command(&["SENTINEL", "GET-MASTER-ADDR-BY-NAME", NAME]) {
                    Ok(Reply::Array(address)) => address[1].text().parse::<u16>().ok(),
                    _ => None,
                }
            });
        let first = ports.next()??;
        let agreed = ports.all(|port| port == Some(first));
        self.servers.iter().find(|server| agreed && server.port() == first)
    }
}

/// What a sentinel says about the master: names and values in turn.
fn fields(sentinel: &Server) -> Vec<(String, String)> {
    match sentinel.try_command(&["SENTINEL", "MASTER", NAME]) {
        Ok(Reply::Array(words)) => words
            .chunks_exact(2)
            .map(|pair| (pair[0].text().to_owned(), pair[1].text().to_owned()))
            .collect(),
        _ => Vec::new(),
    }
}

fn follows(server: &Server) -> bool {
    let info = info(server);
    info.contains("role:slave") && info.contains("master_link_status:up")
}

fn info(server: &Server) -> String {
    match server.try_command(&["INFO", "replication"]) {
        Ok(Reply::Text(info)) => info,
        _ => String::new(),
    }
}
