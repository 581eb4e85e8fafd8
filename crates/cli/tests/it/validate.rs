//! `tidegate validate`: errors and warnings, and the same findings in the log of `serve`.
// Long because most of it is two tables of findings.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::shown;

const NO_RULES: &str = "listen: { http: 127.0.0.1:0, grpc: off, resp: off }\n";

/// A file of this text, and how messages call it.
fn written(folder: &Path, text: &str) -> String {
    let file = folder.join("tidegate.yaml");
    std::fs::write(&file, text).unwrap();
    file.to_str().unwrap().into()
}

#[test]
fn errors_and_warnings_are_counted_separately() {
    let folder = tempfile::tempdir().unwrap();
    let shown = |text: &str, args: &[&str]| {
        let file = written(folder.path(), text);
        let args = [&["validate", &file], args].concat();
        shown(&args, "").replace(&file, "f")
    };
    assert_eq!(
        shown("rules:\n  - { name: a, limit: 3/s }\n", &["--strict"]),
        "exit 0\n--- stdout\nf: 1 rule, nothing wrong\n"
    );
    let message = "f: no rules: only limits that callers bring are enforced; write `rules: []` if that is meant\n";
    assert_eq!(
        shown(NO_RULES, &[]),
        format!(
            "exit 0\n--- stdout\nf: 0 rules, 0 errors, 1 warning\n--- stderr\nwarning: {message}"
        )
    );
    assert_eq!(
        shown(NO_RULES, &["--strict"]),
        format!(
            "exit 2\n--- stdout\nf: 0 rules, 1 error, 0 warnings\n--- stderr\nerror: {message}"
        )
    );
    assert_eq!(
        shown(&format!("{NO_RULES}rules: []\n"), &[]),
        "exit 0\n--- stdout\nf: 0 rules, nothing wrong\n"
    );
    assert_eq!(
        shown("rules:\n  - name: a\n    limit: 3/s\n    settle: response_ms\n", &[]),
        "exit 0\n--- stdout\nf: 1 rule, 0 errors, 1 warning\n--- stderr\nwarning: f:4:5: rule a: settle has no effect: only the proxy sees responses; set proxy.upstream, or remove it\n"
    );
    let wrong = shown("rules:\n  - { name: a b, limit: 3/s }\n", &[]);
    assert!(
        wrong.starts_with(
            "exit 2\n--- stdout\nf: not read, 1 error, 0 warnings\n--- stderr\nerror: f:2:"
        ),
        "{wrong}"
    );
}

/// A server with a log that the test reads.
pub(crate) struct Logging {
    process: Child,
    log: std::io::Lines<BufReader<std::process::ChildStderr>>,
}

impl Logging {
    pub(crate) fn start(args: &[&str]) -> Logging {
        Logging::of("serve", args)
    }

    fn of(command: &str, args: &[&str]) -> Logging {
        let mut process = Command::new(env!("CARGO_BIN_EXE_tidegate"))
            .arg(command)
            .args(args)
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let log = BufReader::new(process.stderr.take().unwrap()).lines();
        Logging { process, log }
    }

    /// The next line that has these words in it, without its time.
    pub(crate) fn line(&mut self, words: &str) -> String {
        let line = self.log.by_ref().map(Result::unwrap).find(|line| line.contains(words));
        line.unwrap_or_else(|| panic!("the log ends without {words:?}"))
            .split_once(' ')
            .unwrap()
            .1
            .into()
    }
}

impl Drop for Logging {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
fn serve_logs_warnings_when_it_starts_and_when_it_reads_the_file_again() {
    let folder = tempfile::tempdir().unwrap();
    let file = written(folder.path(), &format!("{NO_RULES}rules: [{{ name: a, limit: 3/s }}]\n"));
    let mut server = Logging::start(&["--config", &file]);
    // It has started, and nothing was strange until then.
    let other = folder.path().join("other");
    let replace = |text: &str| {
        std::fs::write(&other, text).unwrap();
        std::fs::rename(&other, &file).unwrap();
    };
    replace(NO_RULES);
    let expected = format!(
        "warn  configuration place={file} warning=\"no rules: only limits that callers bring are enforced; write `rules: []` if that is meant\""
    );
    assert_eq!(server.line("configuration place"), expected);
    drop(server);
    let mut server = Logging::start(&["--config", &file]);
    assert_eq!(server.line("configuration place"), expected);
}

/// Rules of the command line have nothing to say about requests that lack an attribute.
#[test]
fn proxy_warns_about_a_limit_by_what_a_request_may_lack() {
    let upstream = ["--upstream", "http://127.0.0.1:1", "--listen", "127.0.0.1:0"];
    let limits = ["--limit", "10/s by ip, path", "--limit", "10/s by header.x-key"];
    let mut proxy = Logging::of("proxy", &[upstream, limits].concat());
    assert_eq!(
        proxy.line("configuration place"),
        "warn  configuration place=\"--limit '10/s by header.x-key'\" warning=\"all requests without header.x-key share one budget: if that is not meant, write the rule into a file with `missing: skip` or `missing: deny`; --print-config prints one to begin with\""
    );
}

/// What `validate --offline` prints about a file, without its name.
fn found(folder: &Path, text: &str) -> String {
    let file = written(folder, text);
    let shown = shown(&["validate", "--offline", &file], "");
    let lines = shown.split_once("--- stderr\n").map_or("", |(_, lines)| lines);
    lines.replace(&format!("{file}: "), "file: ").replace(&format!("{file}:"), "")
}

const NOTATION: &str = "looks like a regular expression: expected a pattern, in which * is any number of characters, ? is one, and ! in front means not";
const LITERALLY: &str = "or put \\ before characters that stand for themselves";

/// One rule with this after its name, and everything that is said about it. Places are those of the
/// rule's own line.
#[test]
fn every_finding_about_a_rule_says_what_to_write() {
    let (folder, mut wrong) = (tempfile::tempdir().unwrap(), Vec::new());
    let regex = |label: &str, advice: &str| format!("{label} {NOTATION}: {advice}; {LITERALLY}");
    for (rule, expected) in [
        // Networks and addresses.
        (
            "limit: 1/s, when: { ip: 10.0.0.0/33 }",
            "error: 2:40: rule r: when: ip \"10.0.0.0/33\" never matches: network \"10.0.0.0/33\": expected a prefix of 0 to 32 bits",
        ),
        (
            "limit: 1/s, when: { ip: 300.1.2.3 }",
            "error: 2:40: rule r: when: ip \"300.1.2.3\" never matches: it is not an address: expected an address such as 192.0.2.7, or a network such as 10.0.0.0/8",
        ),
        (
            "limit: 1/s, when: { ip: localhost }",
            "error: 2:40: rule r: when: ip \"localhost\" never matches: ip is an address, never a name: write 127.0.0.0/8 and \"::1\"",
        ),
        (
            "limit: 1/s, when: { ip: '!private' }",
            "error: 2:40: rule r: when: ip \"!private\" always matches: this word is for trusted_proxies: write networks such as 127.0.0.0/8 or 10.0.0.0/8",
        ),
        (
            "limit: 1/s, when: { ip: 'office-*' }",
            "error: 2:40: rule r: when: ip \"office-*\" never matches: no address has 'o': expected a network such as 10.0.0.0/8, or an address",
        ),
        (
            "limit: 1/s, when: { ip: [192.0.2.7, 10.0.0.5/8] }",
            "warning: 2:52: rule r: when: ip \"10.0.0.5/8\": it has bits after its prefix and means 10.0.0.0/8: write that, or 10.0.0.5 for this address alone",
        ),
        (
            "limit: 1/s, when: { ip: '2001:DB8::1' }",
            "warning: 2:40: rule r: when: ip \"2001:DB8::1\" never matches a request over HTTP: this address is written 2001:db8::1: write that",
        ),
        (
            "limit: 1/s, when: { ip: '2001:DB8:*' }",
            "warning: 2:40: rule r: when: ip \"2001:DB8:*\" never matches: addresses are written in lower case: write \"2001:db8:*\"",
        ),
        (
            "limit: 1/s, when: { ip: ['2001:db8::1/128', '10.0.*', '!192.0.2.0/24', '::ffff:10.0.0.0/104'] }",
            "",
        ),
        // Regular expressions.
        (
            "limit: 1/s, when: { path: '^/api/.*$' }",
            &regex("warning: 2:42: rule r: when: path \"^/api/.*$\"", "write \"/api/*\""),
        ),
        (
            "limit: 1/s, when: { path: '/v1/(a|b)' }",
            &regex(
                "warning: 2:42: rule r: when: path \"/v1/(a|b)\"",
                "write [\"/v1/a\", \"/v1/b\"]",
            ),
        ),
        (
            "limit: 1/s, when: { user: '\\d+' }",
            &regex("warning: 2:42: rule r: when: user \"\\\\d+\"", "write \"?*\""),
        ),
        (
            "limit: 1/s, when: { user: '[0-9]+' }",
            &regex("warning: 2:42: rule r: when: user \"[0-9]+\"", "write \"?*\""),
        ),
        (
            "limit: 1/s, when: { user: '(a|b)+' }",
            &regex(
                "warning: 2:42: rule r: when: user \"(a|b)+\"",
                "write each value that is meant, as a list",
            ),
        ),
        // Attributes.
        (
            "limit: 1/s, by: headers.x-user",
            "error: 2:32: rule r: by headers.x-user: no request has it: did you mean header.x-user?",
        ),
        (
            "limit: 1/s, by: [ip, jwt.sub], missing: skip",
            "error: 2:37: rule r: by jwt.sub: no request has it: did you mean bearer.sub?",
        ),
        (
            "limit: 1/s, when: { cookies.plan: gold }",
            "error: 2:36: rule r: when cookies.plan: no request has it: did you mean cookie.plan?",
        ),
        (
            "limit: 1/s, when: { Header.X-Plan: gold }",
            "error: 2:36: rule r: when Header.X-Plan: no request has it: did you mean header.x-plan?",
        ),
        (
            "limit: 1/s, cost: { from: heder.x-cost, max: 1 }",
            "error: 2:42: rule r: cost: from heder.x-cost: no request has it: did you mean header.x-cost?",
        ),
        (
            "limit: 1/s, when: { 'header.X Api': a }",
            "error: 2:36: rule r: when header.X Api: no header can have this name: expected letters, digits, - and _, such as header.x-api-key",
        ),
        (
            "limit: 1/s, when: { 'cookie.a=b': a }",
            "error: 2:36: rule r: when cookie.a=b: no cookie can have this name: expected letters, digits, - and _, such as cookie.session",
        ),
        (
            "limit: 1/s, when: { header.: a }",
            "error: 2:36: rule r: when header.: expected a name after the dot",
        ),
        (
            "limit: 1/s, when: { header.X-Plan: a }",
            "warning: 2:36: rule r: when header.X-Plan: names of headers are lower case, and callers of the check API give them exactly so: write header.x-plan",
        ),
        (
            "limit: 1/s, when: { Path: /a }",
            "warning: 2:36: rule r: when Path: names are lower case: did you mean path?",
        ),
        (
            "limit: 1/s, by: [ip, ip]",
            "warning: 2:37: rule r: by ip: it is there twice; remove one of them",
        ),
        ("limit: 1/s, by: [user, tenant.id], missing: share", ""),
        // Methods, paths and hosts.
        (
            "limit: 1/s, when: { method: GTE }",
            "warning: 2:44: rule r: when: method \"GTE\": unknown method: did you mean GET?",
        ),
        (
            "limit: 1/s, when: { method: [post, POST] }",
            "warning: 2:45: rule r: when: method \"post\" never matches a request over HTTP: methods are upper case: write POST",
        ),
        (
            "limit: 1/s, when: { path: foo }",
            "warning: 2:42: rule r: when: path \"foo\" never matches a request over HTTP: paths start with /: write \"/foo\"",
        ),
        (
            "limit: 1/s, when: { path: 'foo/*' }",
            "warning: 2:42: rule r: when: path \"foo/*\" never matches a request over HTTP: paths start with /: write \"/foo/*\" or \"*/foo/*\"",
        ),
        (
            "limit: 1/s, when: { path: /a//b/../c }",
            "warning: 2:42: rule r: when: path \"/a//b/../c\" never matches a request over HTTP: rules see paths in one spelling: write \"/a/c\"",
        ),
        (
            "limit: 1/s, when: { path: '/find?q=*' }",
            "warning: 2:42: rule r: when: path \"/find?q=*\": a path has no query, and ? stands for one character: write path \"/find\", and query.q for the rest",
        ),
        (
            "limit: 1/s, when: { host: 'Api.example.com:443' }",
            "warning: 2:42: rule r: when: host \"Api.example.com:443\" never matches a request over HTTP: hosts are lower case and without a port: write \"api.example.com\"",
        ),
        // Costs.
        (
            "limit: 10/s, cost: 50",
            "error: 2:23: rule r: cost: 50 can never pass 10/s, which holds at most 10: write a cost of at most 10, or a larger limit or burst",
        ),
        (
            "limit: '10/s; 100/min burst 5', cost: 8",
            "error: 2:23: rule r: cost: 8 can never pass 100/m burst 5, which holds at most 5: write a cost of at most 5, or a larger limit or burst",
        ),
        (
            "limit: 10/s, cost: 5, overrides: [{ when: { plan: free }, limit: 3/s }]",
            "error: 2:81: rule r: cost: 5 can never pass 3/s, which holds at most 3: write a cost of at most 3, or a larger limit or burst",
        ),
        (
            "limit: 10/s, cost: { from: header.x-cost, max: 0 }",
            "error: 2:63: rule r: cost: max: 0 makes every request free: expected at least 1, the most that one request may cost",
        ),
        (
            "limit: 10/s, cost: 0",
            "warning: 2:35: rule r: cost: 0 takes nothing, so the rule never limits: write a cost of at least 1, or remove the rule",
        ),
        // Missing attributes.
        (
            "limit: 1/s, by: [ip, header.x-key]",
            "warning: 2:37: rule r: by header.x-key: all requests without header.x-key share one budget: write `missing: skip` (the rule does not apply to them), `missing: deny`, or `missing: share` if that is meant",
        ),
        ("limit: 1/s, by: [ip, method, path, host]", ""),
        ("limit: 1/s, by: header.x-key, missing: share", ""),
        ("limit: 1/s, by: header.x-key, when: { header.x-key: 'k-*' }", ""),
        (
            "limit: 1/s, by: header.x-key, when: { header.x-key: '*' }",
            "warning: 2:32: rule r: by header.x-key: all requests without header.x-key share one budget: write `missing: skip` (the rule does not apply to them), `missing: deny`, or `missing: share` if that is meant",
        ),
        (
            "limit: 1/s, missing: skip",
            "warning: 2:28: rule r: missing: skip has no effect: the rule has no by; remove it",
        ),
        (
            "limit: exempt, by: user, missing: deny",
            "warning: 2:31: rule r: by has no effect: limit: exempt keeps no budgets; remove it\nwarning: 2:41: rule r: missing: deny has no effect: limit: exempt keeps no budgets; remove it",
        ),
        (
            "limit: deny, cost: 2",
            "warning: 2:29: rule r: cost has no effect: the rule has no limit to charge; remove it",
        ),
        // Overrides.
        (
            "limit: 1/s, overrides: [{ when: { plan: '*' }, limit: 2/s }, { when: { plan: gold }, limit: 3/s }]",
            "warning: 2:77: rule r: override 2 is never reached: override 1 matches first, and the first that matches counts; put the narrower one first, or remove one",
        ),
        (
            "limit: 1/s, when: { path: /a/* }, overrides: [{ when: { path: /b }, limit: 2/s }]",
            "warning: 2:62: rule r: override 1 never matches: the rule's own when excludes its path; change one of them",
        ),
        // Words.
        ("lmit: 1/s", "error: 2:16: unknown key \"lmit\": did you mean limit?"),
        (
            "limit: 1/s, colour: red",
            "error: 2:28: unknown key \"colour\": expected name, when, by, missing, limit, cost, overrides, mode, refunds, on_store_failure, sync, overflow, charge_when, settle or deny_status",
        ),
        ("limit: 1/s, mode: shaddow", "error: 2:34: mode: \"shaddow\": did you mean shadow?"),
        (
            "limit: 1/s, by: user, missing: forbid",
            "error: 2:47: missing: \"forbid\": expected share, skip or deny",
        ),
    ] {
        let text = format!("rules:\n  - {{ name: r, {rule} }}\n");
        let expected = if expected.is_empty() { String::new() } else { format!("{expected}\n") };
        let found = found(folder.path(), &text);
        if found != expected {
            wrong.push(format!("{rule}\n{found}instead of\n{expected}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Rules beside each other, and settings outside of rules.
#[test]
fn every_finding_about_a_file_says_what_to_write() {
    let (folder, mut wrong) = (tempfile::tempdir().unwrap(), Vec::new());
    const PROXY: &str = "proxy: { upstream: 'http://127.0.0.1:1' }\n";
    for (text, expected) in [
        (
            "",
            "warning: file: the file is empty: nothing is configured; expected settings such as `rules:`\n",
        ),
        (
            "# later\n",
            "warning: file: the file is empty: nothing is configured; expected settings such as `rules:`\n",
        ),
        ("ruls: []\n", "error: 1:1: unknown key \"ruls\": did you mean rules?\n"),
        (
            "rules: []\nresilience: { deadlne_ms: 3 }\n",
            "error: 2:15: unknown key \"deadlne_ms\": did you mean deadline_ms?\n",
        ),
        (
            "rules: []\nstore: rediss:127.0.0.1\n",
            "error: 2:8: store URL: no scheme: expected redis://HOST:PORT: write rediss://127.0.0.1; or memory\n",
        ),
        (
            "rules: []\nstore: redis://:sesame@127.0.0.1:99999\n",
            "error: 2:8: store URL: port \"99999\": expected a number from 1 to 65535; or memory\n",
        ),
        (
            "rules: []\ntrusted_proxies: [10.0.0.5/8, 0.0.0.0/0, private]\n",
            "warning: 2:19: trusted_proxies: \"10.0.0.5/8\": it has bits after its prefix and means 10.0.0.0/8: write that, or 10.0.0.5 for this address alone\n\
             warning: 2:31: trusted_proxies: \"0.0.0.0/0\": every client can claim any address: expected the networks of your proxies\n",
        ),
        (
            "rules: []\ntrusted_proxies: [10.0.0.0/33]\n",
            "error: 2:19: network \"10.0.0.0/33\": expected a prefix of 0 to 32 bits\n",
        ),
        (
            "rules: []\nlisten: { http: 0.0.0.0:80, resp: 0.0.0.0:80 }\ninsecure: true\n",
            "warning: 2:35: listen.resp: 0.0.0.0:80 is the address of listen.http, too: expected another port, in the file or by an option\n",
        ),
        (
            "rules: []\nlisten: { http: 0.0.0.0:80 }\n",
            "warning: 2:17: listen.http: 0.0.0.0:80 would accept any client, which serve refuses unless a token is given: write tokens.check_file, tls.client_ca, or `insecure: true` if that is meant\n",
        ),
        (
            "rules:\n  - { name: a, limit: 1/s }\n  - { name: b, limit: 1/s }\n  - { name: a, limit: 2/s }\n",
            "warning: 3:13: rule b repeats rule a: it has the same when, by and limit; remove one of them\n\
             error: 4:13: two rules are called \"a\": expected a name of its own for each, by which its state is known\n",
        ),
        (
            "rules:\n  - { name: a, when: { path: /a/b }, limit: 1/s }\n  - { name: all, when: { path: '/a/*' }, limit: exempt }\n",
            "warning: 2:13: rule a never decides: rule all exempts every request that it applies to; narrow the when of all, or remove a\n",
        ),
        (
            "rules:\n  - { name: none, limit: deny }\n  - { name: a, limit: 1/s }\n",
            "warning: 3:13: rule a never decides: rule none denies every request that it applies to; narrow the when of none, or remove a\n",
        ),
        (
            "rules:\n  - { name: none, limit: deny }\n  - { name: office, when: { ip: 10.0.0.0/8 }, limit: exempt }\n",
            "warning: 3:13: rule office never decides: rule none denies every request that it applies to; narrow the when of none, or remove office\n",
        ),
        (
            "rules:\n  - { name: all, when: { ip: 10.0.0.0/8 }, limit: exempt }\n  - { name: one, when: { ip: 10.0.0.1 }, limit: exempt }\n",
            "warning: 3:13: rule one never decides: rule all exempts every request that it applies to; narrow the when of all, or remove one\n",
        ),
        (
            "rules:\n  - { name: one, when: { ip: 10.0.0.1 }, limit: exempt }\n  - { name: all, when: { ip: 10.0.0.0/8 }, limit: exempt }\n",
            "",
        ),
        (
            "rules:\n  - { name: a, by: [ip, path], limit: 1/s }\n  - { name: b, by: [path, ip], limit: 1/s }\n",
            "warning: 3:13: rule b repeats rule a: it has the same when, by and limit; remove one of them\n",
        ),
        // Only HTTP supplies attributes by itself.
        (
            "listen: { http: off }\nrules:\n  - { name: a, by: ip, limit: 1/s }\n",
            "warning: 3:20: rule a: by ip: all requests without ip share one budget: write `missing: skip` (the rule does not apply to them), `missing: deny`, or `missing: share` if that is meant\n",
        ),
        // All errors together, by place.
        (
            "rules:\n  - { name: a, limit: 1/s, when: { path: a } }\n  - { name: b, limit: 1/s, when: { ip: b }, cost: 2 }\n",
            "warning: 2:42: rule a: when: path \"a\" never matches a request over HTTP: paths start with /: write \"/a\"\n\
             error: 3:23: rule b: cost: 2 can never pass 1/s, which holds at most 1: write a cost of at most 1, or a larger limit or burst\n\
             error: 3:40: rule b: when: ip \"b\" never matches: it is not an address: expected an address such as 192.0.2.7, or a network such as 10.0.0.0/8\n",
        ),
        // Where requests over HTTP are judged.
        (
            &format!(
                "{PROXY}rules:\n  - {{ name: a, limit: 1/s, when: {{ url: /a, status: 4xx }} }}\n"
            ),
            "warning: 3:36: rule a: when url: requests over HTTP do not have it, only callers that bring it: did you mean path?\n\
             warning: 3:45: rule a: when status: a request has none: conditions on the status of the response belong into charge_when\n",
        ),
        (
            &format!(
                "{PROXY}listen: {{ http: off, grpc: off, resp: off }}\nrules:\n  - {{ name: a, limit: 1/s, by: [user, hots], missing: skip }}\n"
            ),
            "warning: 4:33: rule a: by user: only the proxy listens, and it does not supply it: expected ip, method, path, host, bearer, bearer.CLAIM, header.NAME, query.NAME or cookie.NAME\n\
             warning: 4:39: rule a: by hots: only the proxy listens, and it does not supply it: did you mean host?\n",
        ),
        (
            &format!(
                "{PROXY}rules:\n  - {{ name: a, limit: 1/s, charge_when: {{ status: [4xx, '!5XX', 4*, 401] }} }}\n"
            ),
            "",
        ),
        (
            &format!(
                "{PROXY}rules:\n  - {{ name: a, limit: 1/s, charge_when: {{ status: [999, 20, '!9xx'] }} }}\n"
            ),
            "error: 3:52: rule a: charge_when: status \"999\" never matches: expected a status from 100 to 599, or a class such as 4xx\n\
             error: 3:57: rule a: charge_when: status \"20\" never matches: expected a status from 100 to 599, or a class such as 4xx\n\
             error: 3:61: rule a: charge_when: status \"!9xx\" always matches: expected a status from 100 to 599, or a class such as 4xx\n",
        ),
        (
            &format!(
                "{PROXY}rules:\n  - {{ name: a, limit: 1/s, when: {{ path: /a%2Fb, header.x_key: b }} }}\n"
            ),
            "warning: 3:42: rule a: when: path \"/a%2Fb\" never matches a request over HTTP: paths with an escaped slash, a backslash or NUL are refused: write another path, or see paths.escaped_slashes\n\
             warning: 3:50: rule a: when header.x_key: headers with `_` in their names are dropped: write header.x-key, or set headers.underscores: keep\n",
        ),
        (
            &format!(
                "{PROXY}paths: {{ escaped_slashes: keep }}\nheaders: {{ underscores: keep }}\nrules:\n  - {{ name: a, limit: 1/s, when: {{ path: /a%2Fb, header.x_key: b }} }}\n"
            ),
            "",
        ),
        (
            &format!(
                "{PROXY}rules:\n  - {{ name: a, limit: 1/s, charge_when: {{ headers.x: a }} }}\n"
            ),
            "error: 3:43: rule a: charge_when headers.x: a response does not have it: did you mean header.x?\n",
        ),
    ] {
        let found = found(folder.path(), text);
        if found != expected {
            wrong.push(format!("{text}\n{found}instead of\n{expected}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Keys that a configuration can begin with; a block of a page with others is for another program.
const KEYS: [&str; 20] = [
    "store",
    "store_secret_file",
    "memory",
    "threads",
    "listen",
    "trusted_proxies",
    "client_ip",
    "on_store_failure",
    "resilience",
    "tls",
    "tokens",
    "connections",
    "log",
    "insecure",
    "envoy",
    "http",
    "paths",
    "headers",
    "proxy",
    "rules",
];

/// `validate --strict` accepts every configuration that a page or an example shows.
#[test]
fn pages_and_examples_have_no_findings() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut shown_texts = Vec::new();
    let pages = std::fs::read_dir(root.join("docs")).unwrap().map(|entry| entry.unwrap().path());
    for page in pages
        .chain([root.join("README.md")])
        .filter(|page| page.extension().is_some_and(|end| end == "md"))
    {
        let text = std::fs::read_to_string(&page).unwrap();
        let blocks = text
            .split("```yaml\n")
            .skip(1)
            .map(|block| block.split_once("```").unwrap().0.to_string());
        shown_texts.extend(blocks.map(|block| (page.display().to_string(), block)));
    }
    let examples = std::fs::read_dir(root.join("examples/gateways"))
        .unwrap()
        .map(|entry| entry.unwrap().path());
    for example in examples.filter(|example| example.extension().is_some_and(|end| end == "yaml")) {
        shown_texts
            .push((example.display().to_string(), std::fs::read_to_string(&example).unwrap()));
    }
    let (mut files, mut folders) = (0, 0);
    for (page, text) in shown_texts {
        let keys: Vec<&str> = text
            .lines()
            .filter(|line| line.starts_with(|first: char| first.is_ascii_lowercase()))
            .filter_map(|line| Some(line.split_once(':')?.0))
            .collect();
        let folder = tempfile::tempdir().unwrap();
        let is_traefik = text.contains("middlewares:");
        let path = if keys.first() == Some(&"domain") {
            written(folder.path(), &text);
            folders += 1;
            folder.path().to_str().unwrap().to_string()
        } else if !keys.is_empty() && keys.iter().all(|key| KEYS.contains(key)) && !is_traefik {
            // Some pages show a part of a file.
            let rest = if keys.contains(&"rules") { "" } else { "rules: []\n" };
            files += 1;
            written(folder.path(), &format!("{text}{rest}"))
        } else {
            continue;
        };
        let shown = shown(&["validate", "--strict", "--offline", &path], "");
        assert!(
            shown.starts_with("exit 0\n") && shown.contains("nothing wrong"),
            "{page}\n{text}\n{shown}"
        );
    }
    assert!(files >= 10 && folders >= 1, "{files} files and {folders} folders were found");
}

/// Files that a configuration names: each that cannot be used is an error at its place.
#[test]
fn files_that_cannot_be_used_are_errors() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_string();
    for (name, text) in [
        ("empty", ""),
        ("words", "two words\n"),
        ("noise", "noise\n"),
        ("other", "noise\n"),
        ("good", "sesame\n"),
    ] {
        std::fs::write(at(name), text).unwrap();
    }
    let text = format!(
        "rules: []\ntokens:\n  check_file: {}\n  admin_file: {}\ntls:\n  cert: {}\n  key: {}\nstore_secret_file: {}\nmemory:\n  snapshot_file: {}\nenvoy:\n  config: {}\n",
        at("none"),
        at("words"),
        at("empty"),
        at("gone"),
        at("lost"),
        at("no/state"),
        at("folder"),
    );
    let file = written(folder.path(), &text);
    let shown_all = shown(&["validate", &file], "");
    let lines = shown_all.split_once("--- stderr\n").unwrap().1;
    let lines =
        lines.replace(&format!("{file}:"), "").replace(folder.path().to_str().unwrap(), "DIR");
    assert_eq!(
        lines,
        "error: 3:15: tokens.check_file: DIR/none: no such file: correct the path, or write the token into it\n\
         error: 4:15: tokens.admin_file: DIR/words: a token of 9 bytes: expected 1 to 512 printable characters without spaces\n\
         error: 6:9: tls.cert: DIR/empty: the file is empty: expected PEM, or the secret\n\
         error: 7:8: tls.key: DIR/gone: no such file: correct the path, or create it\n\
         error: 8:20: store_secret_file: DIR/lost: no such file: correct the path, or create it\n\
         error: 10:18: memory.snapshot_file: DIR/no: there is no such folder: create it\n\
         error: 12:11: envoy.config: DIR/folder: no such file: correct the path, or create it\n"
    );
    assert!(shown_all.starts_with("exit 2\n"), "{shown_all}");
    let offline = shown(&["validate", "--offline", "--strict", &file], "");
    assert_eq!(offline, format!("exit 0\n--- stdout\n{file}: 0 rules, nothing wrong\n"));
    let text = format!("rules: []\ntls: {{ cert: {}, key: {} }}\n", at("noise"), at("other"));
    let shown = shown(&["validate", &written(folder.path(), &text)], "");
    assert!(
        shown.contains("tls.key: ")
            && shown.contains("no private key in it: expected PEM with BEGIN PRIVATE KEY"),
        "{shown}"
    );
}

/// A folder in place of the file for snapshots.
#[test]
fn a_folder_is_not_a_snapshot_file() {
    let folder = tempfile::tempdir().unwrap();
    let state = folder.path().display();
    let file = written(folder.path(), &format!("rules: []\nmemory:\n  snapshot_file: {state}\n"));
    let shown = shown(&["validate", &file], "");
    assert_eq!(
        shown,
        format!(
            "exit 2\n--- stdout\n{file}: 0 rules, 1 error, 0 warnings\n--- stderr\nerror: {file}:3:18: memory.snapshot_file: {state}: is a folder: expected a file, or none yet\n"
        )
    );
}

/// A stopped store accepts connections and answers nothing: that is a note.
#[test]
fn a_store_that_does_not_answer_is_a_note() {
    let folder = tempfile::tempdir().unwrap();
    let server = tidegate_testkit::Server::start(tidegate_testkit::Flavor::Redis7);
    server.stop_signal();
    let file = written(folder.path(), &format!("rules: []\nstore: {}\n", server.url()));
    let shown = shown(&["validate", "--strict", &file], "").replace(&file, "f");
    assert_eq!(
        shown.replace(&server.port().to_string(), "PORT"),
        "exit 0\n--- stdout\nf: 0 rules, nothing wrong\n--- stderr\nnote: f:2:8: store: no connection to 127.0.0.1:PORT within 1000 ms: whether it can be used is not known; serve starts and tries again\n"
    );
}

/// A store with paused writes, as in a manual failover, connects and does not decide.
#[test]
fn a_store_that_does_not_decide_is_a_note() {
    let folder = tempfile::tempdir().unwrap();
    let server = tidegate_testkit::Server::start(tidegate_testkit::Flavor::Redis7);
    server.command(&["CLIENT", "PAUSE", "600000", "WRITE"]);
    let file = written(folder.path(), &format!("rules: []\nstore: {}\n", server.url()));
    let shown = shown(&["validate", "--strict", &file], "").replace(&file, "f");
    assert_eq!(
        shown.replace(&server.port().to_string(), "PORT"),
        "exit 0\n--- stdout\nf: 0 rules, nothing wrong\n--- stderr\nnote: f:2:8: store: 127.0.0.1:PORT said nothing for 1000 ms: whether it can be used is not known; serve starts and tries again\n"
    );
}

/// A store that refuses is an error, an unreachable one a note, and a good one is no finding.
#[test]
fn the_store_is_checked() {
    let folder = tempfile::tempdir().unwrap();
    let server = tidegate_testkit::Server::start(tidegate_testkit::Flavor::Redis7);
    let validate = |url: &str| {
        let file = written(
            folder.path(),
            &format!("rules: []\nresilience: {{ deadline_ms: 5000 }}\nstore: {url}\n"),
        );
        shown(&["validate", "--strict", &file], "").replace(&file, "f")
    };
    assert_eq!(validate(&server.url()), "exit 0\n--- stdout\nf: 0 rules, nothing wrong\n");
    let away = validate("redis://127.0.0.1:1");
    assert!(
        away.starts_with(
            "exit 0\n--- stdout\nf: 0 rules, nothing wrong\n--- stderr\nnote: f:3:8: store: "
        ),
        "{away}"
    );
    server.command(&["CONFIG", "SET", "requirepass", "sesame"]);
    let refused = validate(&server.url());
    assert!(
        refused.starts_with(
            "exit 2\n--- stdout\nf: 0 rules, 1 error, 0 warnings\n--- stderr\nerror: f:3:8: store "
        ),
        "{refused}"
    );
    assert!(
        !validate(&server.url().replace("redis://", "redis://:wrong-word@")).contains("wrong-word")
    );
}

/// The folder of envoyproxy/ratelimit.
#[test]
fn a_folder_for_envoy_has_warnings() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap().to_string();
    let validate = || shown(&["validate", &path], "").replace(&path, "d");
    assert_eq!(
        validate(),
        "exit 0\n--- stdout\nd: 0 domains with 0 limits, 0 errors, 1 warning\n--- stderr\nwarning: d: no *.yaml files in the folder: nothing is configured\n"
    );
    let limit = "rate_limit: { unit: day, requests_per_unit: 1";
    std::fs::write(
        folder.path().join("a.yaml"),
        format!(
            "domain: a\ndescriptors:\n  - {{ key: path, value: '^/api/.*', {limit}, name: api }} }}\n  - {{ key: path, value: '/v1/*', {limit} }} }}\n  - {{ key: path, value: '/v1/x*', {limit}, replaces: [{{ name: ap }}] }} }}\n"
        ),
    )
    .unwrap();
    assert_eq!(
        validate(),
        "exit 0\n--- stdout\nd: 1 domains with 3 limits, 0 errors, 3 warnings\n--- stderr\n\
         warning: d/a.yaml:3:25: a.path: value \"^/api/.*\" looks like a regular expression: expected a value, in which * is any number of characters: write \"/api/*\"\n\
         warning: d/a.yaml:5:25: a.path: value \"/v1/x*\" is never reached: \"/v1/*\" above it matches first; put the narrower one first\n\
         warning: d/a.yaml:5:101: a.path: replaces \"ap\", which is the name of no rate_limit: did you mean api?\n"
    );
    std::fs::write(
        folder.path().join("a.yaml"),
        "domain: a\ndescriptors:\n  - { key: k, rate_limit: { unit: minutes, requests_per_unit: 1 } }\n",
    )
    .unwrap();
    assert!(
        validate().contains("invalid rate limit unit 'minutes' at a.k: did you mean minute?"),
        "{}",
        validate()
    );
}
