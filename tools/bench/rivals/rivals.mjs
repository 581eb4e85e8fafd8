// Decisions a second of a limiter for Node over ioredis, which puts what is asked at once into one pipeline.
// node rivals.mjs WHO PORT CONCURRENCY COUNT: prints a number.
import { createRequire } from 'node:module'
const require = createRequire(process.cwd() + '/')
const Redis = require('ioredis')

const [who, port, concurrency, count] = [process.argv[2], ...process.argv.slice(3).map(Number)]
const redis = new Redis({ host: '127.0.0.1', port, enableAutoPipelining: true })

async function decider() {
  if (who === 'rate-limiter-flexible') {
    const { RateLimiterRedis } = require('rate-limiter-flexible')
    const limiter = new RateLimiterRedis({ storeClient: redis, points: 1_000_000, duration: 3600 })
    return (key) => limiter.consume(key)
  }
  if (who === 'rate-limit-redis') {
    const { RedisStore } = require('rate-limit-redis')
    const store = new RedisStore({ sendCommand: (...words) => redis.call(...words) })
    await store.init({ windowMs: 3_600_000 })
    return (key) => store.increment(key)
  }
  throw new Error(`${who}: expected rate-limiter-flexible or rate-limit-redis`)
}

async function round(decide) {
  const one = async (task) => {
    for (let n = task; n < count; n += concurrency) await decide(`user:${String(n % 4096).padStart(8, '0')}`)
  }
  await Promise.all(Array.from({ length: concurrency }, (_, task) => one(task)))
}

const decide = await decider()
await round(decide) // connects, loads and warms up
const start = process.hrtime.bigint()
await round(decide)
console.log(Math.round(count / (Number(process.hrtime.bigint() - start) / 1e9)))
redis.disconnect()
