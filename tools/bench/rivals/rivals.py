"""Decisions a second of the Python library `limits`, which asks one at a time. rivals.py PORT COUNT: prints a number."""
import sys
import time

from limits import RateLimitItemPerHour, storage, strategies

port, count = int(sys.argv[1]), int(sys.argv[2])
limiter = strategies.FixedWindowRateLimiter(storage.RedisStorage(f"redis://127.0.0.1:{port}"))
limit = RateLimitItemPerHour(1_000_000)


def work():
    for n in range(count):
        limiter.hit(limit, f"user:{n % 4096:08}")


work()  # connects, loads and warms up
start = time.perf_counter()
work()
print(round(count / (time.perf_counter() - start)))
