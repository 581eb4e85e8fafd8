//! Every transcript, replayed on every server, and on a cluster.

use tidegate::redis::{Redis, RedisBuilder};
use tidegate::{ManualClock, Store};
use tidegate_testkit::{Flavor, Server};

use super::{assert_all_expire, at, runtime, store};
use crate::transcripts::holds_for;

fn every_transcript_holds(builder: impl Fn() -> RedisBuilder) {
    let runtime = runtime();
    let mut stories = 0;
    let mut told: Option<(Redis, ManualClock)> = None;
    holds_for(|begins, check, at| {
        if begins {
            stories += 1;
            let clock = ManualClock::new();
            let builder = builder().namespace(format!("story{stories}")).clock(clock.clone());
            told = Some((runtime.block_on(async { builder.build() }).unwrap(), clock));
        }
        let (redis, clock) = told.as_ref().unwrap();
        clock.set(at);
        runtime.block_on(redis.decide(check)).unwrap()
    });
}

#[test]
fn every_transcript_holds_on_every_server() {
    Flavor::on_all(|flavor| {
        let server = Server::start(flavor);
        every_transcript_holds(|| store(&server));
        assert_all_expire(&server);
    });
}

#[test]
fn every_transcript_holds_on_a_cluster() {
    let cluster = super::cluster::shared(Flavor::Valkey9);
    every_transcript_holds(|| at(&cluster.url()));
    assert_eq!(cluster.keys_without_ttl("tg1:"), Vec::<String>::new());
}
