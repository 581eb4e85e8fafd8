//! The least rights in `docs/redis.md` are enough, and each of them is needed.

use std::fs;
use std::path::Path;

use tidegate::redis::Redis;
use tidegate::redis::inspect::{Finding, Severity, Topic};
use tidegate::{Check, Limits, ManualClock, Store};
use tidegate_testkit::{Cluster, Flavor, Reply, Server};

use super::{assert_all_expire, at, runtime};
use crate::conformance::{StepsBack, Trial};

/// The words of the line on the page: `ACL SETUSER limiter on >s3cret …`.
fn recipe() -> Vec<String> {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/redis.md");
    let page = fs::read_to_string(page).unwrap();
    let line = page
        .lines()
        .find(|line| line.starts_with("ACL SETUSER limiter "))
        .expect("the page has the recipe");
    line.split(' ').map(str::to_owned).collect()
}

/// Resets the user of the recipe, with `more` rights and without `less`.
fn set_user(server: &Server, more: &[&str], less: &str) {
    let mut words = recipe();
    words.insert(3, "reset".into());
    words.retain(|word| word != less);
    words.extend(more.iter().map(|word| (*word).to_owned()));
    assert_eq!(server.command(&words), Reply::Text("OK".into()), "{words:?}");
}

fn as_limiter(url: &str) -> String {
    url.replacen("://", "://limiter:s3cret@", 1)
}

fn store(server: &Server) -> Redis {
    at(&as_limiter(&server.url())).build().unwrap()
}

/// Every algorithm and operation, as in the comparison of the twins.
#[test]
fn the_recipe_is_enough_for_everything() {
    Flavor::on_all(|flavor| {
        let server = Server::start(flavor);
        set_user(&server, &[], "");
        runtime().block_on(async {
            let clock = ManualClock::new();
            let redis = at(&as_limiter(&server.url())).clock(clock.clone()).build().unwrap();
            let stores: &[(&str, &dyn Store)] = &[("redis", &redis)];
            Trial {
                stores,
                clock: &clock,
                forget: None,
                steps_back: StepsBack::Never,
                steady: false,
                model: false,
                seed: 3,
            }
            .run(5_000)
            .await;
            // Long logs use other commands than short ones, and the server's own clock one more.
            let limits: Limits = "100000/h log; 10/s; 1000/day window".parse().unwrap();
            let redis = store(&server);
            for _ in 0..1_000 {
                let _ = redis.decide(&Check::new().charge("k", &limits, 1)).await.unwrap();
            }
            let inspection = redis.inspect().await.unwrap();
            assert!(inspection.worst() <= Severity::Note, "{flavor}: {inspection}");
        });
        assert_all_expire(&server);
    });
}

#[test]
fn a_missing_right_is_named_with_the_line_that_grants_it() {
    Flavor::on_all(|flavor| {
        let server = Server::start(flavor);
        let rights: Vec<String> =
            recipe().into_iter().filter(|word| word.starts_with('+')).collect();
        assert_eq!(rights.len(), 11, "{rights:?}");
        runtime().block_on(async {
            for right in rights.iter().map(String::as_str).chain(["~tg1:*"]) {
                set_user(&server, &[], right);
                server.command(&["SCRIPT", "FLUSH"]);
                let inspection = store(&server).inspect().await.unwrap();
                let problems = || {
                    inspection
                        .findings
                        .iter()
                        .filter(|finding| finding.severity == Severity::Problem)
                };
                assert_eq!(problems().count(), 1, "{flavor} without {right}: {inspection}");
                let problem = problems().next().unwrap();
                assert_eq!(problem.topic, Topic::Rights);
                let line = format!("ACL SETUSER <user> {right}");
                assert!(
                    problem.advice.starts_with(&line),
                    "{flavor} without {right}: {inspection}"
                );
                assert!(!inspection.to_string().contains("s3cret"), "{inspection}");
            }
        });
        assert_all_expire(&server);
    });
}

#[test]
fn what_the_page_adds_for_other_uses_is_enough() {
    Flavor::on_all(|flavor| {
        let server = Server::start(flavor);
        runtime().block_on(async {
            set_user(&server, &["+info"], "");
            let inspection = store(&server).inspect().await.unwrap();
            let unseen = |finding: &Finding| finding.found.contains("may not");
            assert!(!inspection.findings.iter().any(unseen), "{flavor}: {inspection}");

            set_user(&server, &["+select"], "");
            let url = format!("{}/3", as_limiter(&server.url()));
            assert!(
                at(&url).build().unwrap().inspect().await.unwrap().worst() <= Severity::Note,
                "{flavor}"
            );

            set_user(&server, &["+scan", "+unlink"], "");
            let shop = at(&as_limiter(&server.url())).namespace("shop").build().unwrap();
            let limits: Limits = "5/h".parse().unwrap();
            let _ = shop.decide(&Check::new().charge("k", &limits, 1)).await.unwrap();
            assert_eq!(shop.clear().await.unwrap(), 1, "{flavor}");
        });
    });
}

#[test]
fn a_namespace_needs_its_own_keys_only() {
    let server = Server::start(Flavor::Redis7);
    set_user(&server, &["~tg1:shop:*"], "~tg1:*");
    runtime().block_on(async {
        let shop = at(&as_limiter(&server.url())).namespace("shop").build().unwrap();
        assert!(shop.inspect().await.unwrap().worst() <= Severity::Note);
        let inspection = store(&server).inspect().await.unwrap();
        assert!(inspection.to_string().contains("ACL SETUSER <user> ~tg1:*"), "{inspection}");
    });
}

#[test]
fn a_cluster_needs_two_rights_more_on_every_node() {
    let cluster = Cluster::start(Flavor::Redis7);
    for node in cluster.nodes() {
        set_user(node, &["+cluster|slots", "+asking"], "");
    }
    runtime().block_on(async {
        let redis = at(&as_limiter(&cluster.url())).build().unwrap();
        let limits: Limits = "10/s".parse().unwrap();
        for key in 0..100 {
            let key = key.to_string();
            assert!(redis.decide(&Check::new().charge(&key, &limits, 1)).await.unwrap().allowed());
        }
        let inspection = redis.inspect().await.unwrap();
        assert!(inspection.worst() <= Severity::Note, "{inspection}");
        // The users of a cluster are not copied, so one node may differ.
        let node = &cluster.nodes()[1];
        set_user(node, &["+cluster|slots", "+asking"], "+append");
        let inspection = redis.inspect().await.unwrap();
        let problem = inspection
            .findings
            .iter()
            .find(|finding| finding.severity == Severity::Problem)
            .unwrap();
        assert_eq!(problem.found, "the user may not run append");
        assert_eq!(problem.servers, [format!("127.0.0.1:{}", node.port())]);
    });
}
