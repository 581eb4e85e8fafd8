//! Rules that change while the server runs.

use std::time::Duration;

use tidegate::Op;
use tidegate_server::config::Config;
use tidegate_server::{Options, start};
use tidegate_testkit::wait_until;

#[test]
fn a_changed_file_is_read_and_a_bad_one_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("tidegate.yaml");
    let rules = |limit: &str| {
        format!("listen: {{ http: off, resp: off, grpc: off }}\nrules:\n  - {{ name: a, limit: {limit} }}\n")
    };
    std::fs::write(&file, rules("5/min")).unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let options = Options { rules_file: Some(file.clone()), ..Options::default() };
    let running = runtime.block_on(start(Config::load(&file).unwrap(), options)).unwrap();
    let gate = running.gate().clone();
    let peek = |op: Op| {
        let none: [(&str, &str); 0] = [];
        let ruling = runtime.block_on(gate.rule(op, &none[..], 1, None)).unwrap();
        let (charged, verdict) = ruling.binding().map(|(charged, verdict)| (charged.clone(), *verdict)).unwrap();
        (charged.limit.to_string(), verdict.remaining)
    };
    assert_eq!(peek(Op::Check), ("5/m".into(), 4));
    // Replaced by a rename, as editors and Kubernetes do it; what was used stays used.
    let other = folder.path().join("other");
    std::fs::write(&other, rules("3/min")).unwrap();
    std::fs::rename(&other, &file).unwrap();
    wait_until("the new rules count", Duration::from_secs(20), || peek(Op::Peek) == ("3/m".into(), 2));
    let known = gate.rules();
    std::fs::write(&file, "rules: [{ name: a, limit: nonsense }]").unwrap();
    std::fs::write(&other, rules("9/min")).unwrap();
    std::fs::rename(&other, &file).unwrap();
    wait_until("the good rules count", Duration::from_secs(20), || peek(Op::Peek).0 == "9/m");
    assert!(!std::sync::Arc::ptr_eq(&known, &gate.rules()));
    assert!(runtime.block_on(running.stop()));
}
