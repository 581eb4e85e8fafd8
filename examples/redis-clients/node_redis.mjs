import { createClient } from "redis";

const tidegate = createClient({ url: "redis://127.0.0.1:6380" });
tidegate.on("error", console.error);
await tidegate.connect();

function show([allowed, amount, remaining, retryAfterMs, resetAfterMs]) {
  console.log(allowed ? "allowed" : "denied", remaining, retryAfterMs);
}

show(await tidegate.sendCommand(["TG.CHECK", "user:7", "3/min"]));

const pipeline = tidegate.multi();
for (let i = 0; i < 3; i++) pipeline.addCommand(["TG.CHECK", "user:7", "3/min"]);
for (const answer of await pipeline.exec()) show(answer);
await tidegate.close();
