//! Clients that others wrote: each connects as it always does, and asks.

use std::process::Command;

use tidegate_testkit::{node_client, python_client, redis_benchmark, redis_cli};

use crate::doors::Doors;

/// Runs a client to its end; what it printed.
#[track_caller]
fn printed(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}: run `cargo xtask servers`"));
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{command:?} ended with {}\n{out}\n{err}", output.status);
    out.into_owned()
}

#[test]
fn redis_cli_in_both_versions_of_the_protocol() {
    let doors = Doors::in_memory("");
    let cli = |words: &[&str]| printed(redis_cli().args(["-p", &doors.resp.to_string()]).args(words));
    assert_eq!(cli(&["CL.THROTTLE", "user:7", "15", "30", "60"]), "0\n16\n15\n-1\n2\n");
    assert_eq!(
        cli(&["-3", "TG.CHECK", "k", "2/min"]),
        "allowed 1\namount 2\nremaining 1\nretry_after_ms 0\nreset_after_ms 30000\nsource store\n"
    );
    assert_eq!(
        cli(&["-3", "--json", "TG.PEEK", "k", "2/min"]),
        "{\"allowed\":1,\"amount\":2,\"remaining\":1,\"retry_after_ms\":0,\"reset_after_ms\":30000,\"source\":\"store\"}\n"
    );
    assert_eq!(cli(&["PING"]), "PONG\n");
    assert_eq!(cli(&["TG.CHECK", "k"]), "ERR expected TG.<OPERATION> key limit [COST n] [RESERVED n] [ID n]\n\n");
    assert!(cli(&["INFO"]).contains("tidegate_version:"));
}

#[test]
fn redis_benchmark_runs() {
    let doors = Doors::in_memory("");
    let mut benchmark = redis_benchmark();
    benchmark.args(["-p", &doors.resp.to_string(), "-n", "20000", "-c", "20", "-P", "16", "-r", "1000", "-q"]);
    benchmark.args(["CL.THROTTLE", "key:__rand_int__", "15", "30", "60", "1"]);
    let out = printed(&mut benchmark);
    assert!(out.contains("requests per second"), "{out}");
}

#[test]
fn redis_py_asks_with_pipelines_in_both_versions() {
    let doors = Doors::in_memory("rules:\n  - { name: per-ip, by: [ip], limit: 2/min }\n");
    let script = r#"
import redis, sys
for protocol in (2, 3):
    r = redis.Redis(port=int(sys.argv[1]), protocol=protocol, decode_responses=True, client_name="tester", health_check_interval=1)
    assert r.ping() is True
    assert r.client_getname() == "tester"
    key = f"py{protocol}"
    assert r.execute_command("CL.THROTTLE", key, 15, 30, 60) == [0, 16, 15, -1, 2]
    answer = r.execute_command("TG.CHECK", key, "3/min", "COST", 2)
    if protocol == 3:
        assert answer == {"allowed": 1, "amount": 3, "remaining": 1, "retry_after_ms": 0, "reset_after_ms": 40000, "source": "store"}, answer
    else:
        assert answer == [1, 3, 1, 0, 40000], answer
    pipeline = r.pipeline(transaction=False)
    for _ in range(500):
        pipeline.execute_command("CL.THROTTLE", key + "p", 99, 1, 3600)
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
    assert_eq!(printed(python_client().args(["-c", script, &doors.resp.to_string()])), "done\n");
}

#[test]
fn ioredis_and_node_redis_ask() {
    let doors = Doors::in_memory("");
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
    const granted = answers.map((answer) => Array.isArray(answer) ? answer[5] : answer.granted);
    assert.strictEqual(granted.reduce((sum, one) => sum + Number(one), 0), 150);
    await client.close();
  }
  console.log('done');
})().catch((error) => { console.error(error); process.exit(1); });
"#;
    assert_eq!(printed(node_client().args(["-e", script, &doors.resp.to_string()])), "done\n");
}

#[test]
fn the_redis_crate_asks() {
    let doors = Doors::in_memory("");
    for protocol in ["resp2", "resp3"] {
        let client = redis::Client::open(format!("redis://127.0.0.1:{}/?protocol={protocol}", doors.resp)).unwrap();
        let mut connection = client.get_connection().unwrap();
        let key = format!("crate-{protocol}");
        let answer: Vec<i64> = redis::cmd("CL.THROTTLE").arg(&key).arg(&[15, 30, 60]).query(&mut connection).unwrap();
        assert_eq!(answer, [0, 16, 15, -1, 2]);
        let mut pipe = redis::pipe();
        for _ in 0..200 {
            pipe.cmd("CL.THROTTLE").arg(format!("{key}-many")).arg(&[99, 1, 3600]);
        }
        let answers: Vec<Vec<i64>> = pipe.query(&mut connection).unwrap();
        assert_eq!(answers.iter().filter(|answer| answer[0] == 0).count(), 100);
        let answer: redis::Value = redis::cmd("TG.CHECK").arg(&key).arg("2/min").query(&mut connection).unwrap();
        assert_eq!(matches!(answer, redis::Value::Map(_)), protocol == "resp3", "{answer:?}");
        let error = redis::cmd("CL.THROTTLE").arg("x").exec(&mut connection).unwrap_err().to_string();
        assert!(error.contains("Usage: cl.throttle"), "{error}");
    }
}

#[test]
fn curl_asks() {
    let doors = Doors::in_memory("");
    let url = format!("http://{}/v1/check", doors.http);
    let ask = |more: &[&str]| {
        let body = r#"{"key":"user:7","limit":"1/min"}"#;
        printed(
            Command::new("curl")
                .args(["-sS", "-w", "%{http_code} %header{retry-after}\n", "-o", "/dev/null", "-d", body, &url])
                .args(more),
        )
    };
    assert_eq!(ask(&[]), "200 \n");
    assert_eq!(ask(&[]), "429 60\n");
    assert_eq!(ask(&["--http2-prior-knowledge"]), "429 60\n");
    assert_eq!(ask(&["-H", "Expect: 100-continue"]), "429 60\n");
    assert_eq!(ask(&["-H", "Transfer-Encoding: chunked"]), "429 60\n");
}
