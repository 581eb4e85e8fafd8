//! Clients that others wrote: each connects as it always does, and asks.

use std::path::Path;
use std::process::Command;

use tidegate_testkit::{node_client, python_client, redis_benchmark, redis_cli};

use crate::listeners::Listeners;

/// Runs a client to its end; what it printed.
#[track_caller]
fn printed(command: &mut Command) -> String {
    let output = command
        .output()
        .unwrap_or_else(|error| panic!("{command:?}: {error}: run `cargo xtask servers`"));
    let (out, err) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{command:?} ended with {}\n{out}\n{err}", output.status);
    out.into_owned()
}

#[test]
fn redis_cli_in_both_versions_of_the_protocol() {
    let listeners = Listeners::in_memory("");
    let cli =
        |words: &[&str]| printed(redis_cli().args(["-p", &listeners.resp.to_string()]).args(words));
    assert_eq!(cli(&["CL.THROTTLE", "user:7", "15", "30", "60"]), "0\n16\n15\n-1\n2\n");
    assert_eq!(cli(&["-3", "TG.CHECK", "k", "2/min"]), "1\n2\n1\n0\n30000\n");
    assert_eq!(cli(&["-2", "TG.PEEK", "k", "2/min"]), "1\n2\n1\n0\n30000\n");
    assert_eq!(
        cli(&["-3", "--json", "TG.PEEK", "k", "2/min", "AS", "MAP"]),
        "{\"allowed\":1,\"amount\":2,\"remaining\":1,\"retry_after_ms\":0,\"reset_after_ms\":30000,\"source\":\"store\"}\n"
    );
    assert_eq!(cli(&["PING"]), "PONG\n");
    assert_eq!(
        cli(&["TG.CHECK", "k"]),
        "ERR expected TG.CHECK key limit [COST n] [RESERVED n] [ID n] [AS MAP]\n\n"
    );
    assert!(cli(&["INFO"]).contains("tidegate_version:"));
}

#[test]
fn redis_benchmark_runs() {
    let listeners = Listeners::in_memory("");
    let mut benchmark = redis_benchmark();
    benchmark.args([
        "-p",
        &listeners.resp.to_string(),
        "-n",
        "20000",
        "-c",
        "20",
        "-P",
        "16",
        "-r",
        "1000",
        "-q",
    ]);
    benchmark.args(["CL.THROTTLE", "key:__rand_int__", "15", "30", "60", "1"]);
    let out = printed(&mut benchmark);
    assert!(out.contains("requests per second"), "{out}");
}

#[test]
fn redis_py_asks_with_pipelines_in_both_versions() {
    let listeners = Listeners::in_memory("rules:\n  - { name: per-ip, by: [ip], limit: 2/min }\n");
    let script = r#"
import redis, sys
for protocol in (2, 3):
    r = redis.Redis(port=int(sys.argv[1]), protocol=protocol, decode_responses=True, client_name="tester", health_check_interval=1)
    assert r.ping() is True
    assert r.client_getname() == "tester"
    key = f"py{protocol}"
    assert r.execute_command("CL.THROTTLE", key, 15, 30, 60) == [0, 16, 15, -1, 2]
    answer = r.execute_command("TG.CHECK", key, "3/min", "COST", 2)
    assert answer == [1, 3, 1, 0, 40000], answer
    if protocol == 3:
        answer = r.execute_command("TG.PEEK", key, "3/min", "AS", "MAP")
        assert answer == {"allowed": 1, "amount": 3, "remaining": 1, "retry_after_ms": 0, "reset_after_ms": 40000, "source": "store"}, answer
    for transaction in (False, True):
        pipeline = r.pipeline(transaction=transaction)
        for _ in range(500):
            pipeline.execute_command("CL.THROTTLE", f"{key}p{transaction}", 99, 1, 3600)
        answers = pipeline.execute()
        assert [a[0] for a in answers] == [0] * 100 + [1] * 400
    try:
        r.execute_command("CL.THROTTLE", key, "x", 1, 1)
        raise SystemExit("no error")
    except redis.ResponseError as error:
        assert "Couldn't parse as integer: x" in str(error), error
    try:
        r.get("k")
        raise SystemExit("no error")
    except redis.ResponseError as error:
        assert "unknown command" in str(error), error
    r.close()
print("done")
"#;
    assert_eq!(
        printed(python_client().args(["-c", script, &listeners.resp.to_string()])),
        "done\n"
    );
}

#[test]
fn ioredis_and_node_redis_ask() {
    let listeners = Listeners::in_memory("");
    let script = r#"
const assert = require('assert');
const port = Number(process.argv[1]);
(async () => {
  const { Redis } = require('ioredis');
  const io = new Redis({ port, enableAutoPipelining: true });
  assert.deepStrictEqual(await io.call('CL.THROTTLE', 'io', 15, 30, 60), [0, 16, 15, -1, 2]);
  const many = await Promise.all(Array.from({ length: 300 }, () => io.call('CL.THROTTLE', 'io-many', 99, 1, 3600)));
  assert.strictEqual(many.filter((answer) => answer[0] === 0).length, 100);
  await assert.rejects(io.call('TG.CHECK', 'k', '1/fortnight'), /fortnight/);
  await io.quit();
  const { createClient } = require('redis');
  for (const RESP of [2, 3]) {
    const client = createClient({ socket: { port }, RESP, name: 'tester' });
    client.on('error', (error) => { throw error; });
    await client.connect();
    assert.strictEqual(await client.ping(), 'PONG');
    assert.deepStrictEqual(await client.sendCommand(['CL.THROTTLE', `node${RESP}`, '15', '30', '60']), [0, 16, 15, -1, 2]);
    const answers = await Promise.all(Array.from({ length: 200 }, () => client.sendCommand(['TG.TAKE', `take${RESP}`, '150/min'])));
    const granted = answers.map((answer) => answer[5]);
    assert.strictEqual(granted.reduce((sum, one) => sum + Number(one), 0), 150);
    await client.close();
  }
  console.log('done');
})().catch((error) => { console.error(error); process.exit(1); });
"#;
    assert_eq!(printed(node_client().args(["-e", script, &listeners.resp.to_string()])), "done\n");
}

/// The programs of `examples/redis-clients`, as they stand there but for the port: clients with
/// their defaults, which are version 3 of the protocol and pipelines in `MULTI`.
#[test]
fn the_example_programs_print_what_the_page_says() {
    let text = |file: &str| {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(file);
        std::fs::read_to_string(path).unwrap()
    };
    let page = text("docs/resp.md");
    let section = page.split("## From your program").nth(1).unwrap();
    let expected = section.split("```text\n").nth(1).unwrap().split("```").next().unwrap();
    let run = |client: &mut Command, file: &str| {
        let code = text(&format!("examples/redis-clients/{file}"));
        assert_eq!(code.matches("6380").count(), 1, "one address to change in {file}");
        let listeners = Listeners::in_memory("");
        let code = code.replace("6380", &listeners.resp.to_string());
        assert_eq!(printed(client.arg(code)), expected, "{file}");
    };
    run(python_client().arg("-c"), "redis_py.py");
    for file in ["ioredis.mjs", "node_redis.mjs"] {
        run(node_client().args(["--input-type=module", "-e"]), file);
    }
}

/// What the example programs rely on: the clients ask for version 3 without being told to.
#[test]
fn clients_speak_version_three_by_default() {
    let listeners = Listeners::in_memory("");
    let port = listeners.resp.to_string();
    let script = "import redis, sys; print(redis.Redis(port=int(sys.argv[1])).execute_command('HELLO')[b'proto'])";
    assert_eq!(printed(python_client().args(["-c", script, &port])), "3\n");
    let script = r#"
import { Redis } from 'ioredis';
import { createClient } from 'redis';
const port = Number(process.argv[1]);
const proto = (hello) => Array.isArray(hello) ? hello[hello.indexOf('proto') + 1] : hello.proto;
const io = new Redis(port);
const client = await createClient({ socket: { port } }).connect();
console.log(proto(await io.call('HELLO')), proto(await client.sendCommand(['HELLO'])));
await io.quit();
await client.close();
"#;
    assert_eq!(printed(node_client().args(["--input-type=module", "-e", script, &port])), "3 3\n");
}

#[test]
fn the_redis_crate_asks() {
    let listeners = Listeners::in_memory("");
    for protocol in ["resp2", "resp3"] {
        let client = redis::Client::open(format!(
            "redis://127.0.0.1:{}/?protocol={protocol}",
            listeners.resp
        ))
        .unwrap();
        let mut connection = client.get_connection().unwrap();
        let key = format!("crate-{protocol}");
        let answer: Vec<i64> =
            redis::cmd("CL.THROTTLE").arg(&key).arg(&[15, 30, 60]).query(&mut connection).unwrap();
        assert_eq!(answer, [0, 16, 15, -1, 2]);
        let mut pipe = redis::pipe();
        for _ in 0..200 {
            pipe.cmd("CL.THROTTLE").arg(format!("{key}-many")).arg(&[99, 1, 3600]);
        }
        let answers: Vec<Vec<i64>> = pipe.query(&mut connection).unwrap();
        assert_eq!(answers.iter().filter(|answer| answer[0] == 0).count(), 100);
        let answer: redis::Value =
            redis::cmd("TG.CHECK").arg(&key).arg("2/min").query(&mut connection).unwrap();
        assert!(matches!(answer, redis::Value::Array(_)), "{answer:?}");
        let error =
            redis::cmd("CL.THROTTLE").arg("x").exec(&mut connection).unwrap_err().to_string();
        assert!(error.contains("Usage: cl.throttle"), "{error}");
    }
}

#[test]
fn curl_asks() {
    let listeners = Listeners::in_memory("");
    let url = format!("http://{}/v1/check", listeners.http);
    let ask = |more: &[&str]| {
        let body = r#"{"key":"user:7","limit":"1/min"}"#;
        printed(
            Command::new("curl")
                .args([
                    "-sS",
                    "-w",
                    "%{http_code} %header{retry-after}\n",
                    "-o",
                    "/dev/null",
                    "-d",
                    body,
                    &url,
                ])
                .args(more),
        )
    };
    assert_eq!(ask(&[]), "200 \n");
    assert_eq!(ask(&[]), "429 60\n");
    assert_eq!(ask(&["--http2-prior-knowledge"]), "429 60\n");
    assert_eq!(ask(&["-H", "Expect: 100-continue"]), "429 60\n");
    assert_eq!(ask(&["-H", "Transfer-Encoding: chunked"]), "429 60\n");
}
