import redis

tidegate = redis.Redis(host="127.0.0.1", port=6380)


def show(answer):
    allowed, amount, remaining, retry_after_ms, reset_after_ms = answer
    print("allowed" if allowed else "denied", remaining, retry_after_ms)


show(tidegate.execute_command("TG.CHECK", "user:7", "3/min"))

pipeline = tidegate.pipeline()
for _ in range(3):
    pipeline.execute_command("TG.CHECK", "user:7", "3/min")
for answer in pipeline.execute():
    show(answer)
