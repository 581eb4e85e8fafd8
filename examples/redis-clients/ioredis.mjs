import { Redis } from "ioredis";

const tidegate = new Redis({ host: "127.0.0.1", port: 6380 });

function show([allowed, amount, remaining, retryAfterMs, resetAfterMs]) {
  console.log(allowed ? "allowed" : "denied", remaining, retryAfterMs);
}

show(await tidegate.call("TG.CHECK", "user:7", "3/min"));

const pipeline = tidegate.multi();
for (let i = 0; i < 3; i++) pipeline.call("TG.CHECK", "user:7", "3/min");
for (const [error, answer] of await pipeline.exec()) {
  if (error) throw error;
  show(answer);
}
await tidegate.quit();
