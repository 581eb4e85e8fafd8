-- A plain fixed window that tells the caller how long to wait: it counts, and asks how much of the
-- window is left.
local used = redis.call('INCR', KEYS[1])
if used == 1 then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
  return {1, used, tonumber(ARGV[2])}
end
local left = redis.call('PTTL', KEYS[1])
return {used <= tonumber(ARGV[1]) and 1 or 0, used, left}
