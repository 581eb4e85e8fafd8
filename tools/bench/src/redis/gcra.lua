-- A plain GCRA script, as most that are published: a float for the time until which everything is
-- taken, kept as text.
local rate, period = tonumber(ARGV[1]), tonumber(ARGV[2])
local burst, cost = tonumber(ARGV[3]), tonumber(ARGV[4])
local interval = period / rate
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1000000

local tat = redis.call('GET', KEYS[1])
if tat then tat = math.max(tonumber(tat), now) else tat = now end
local new_tat = tat + interval * cost
local allow_at = new_tat - interval * burst
if now < allow_at then
  return {0, 0, tostring(allow_at - now), tostring(tat - now)}
end
redis.call('SET', KEYS[1], string.format('%.6f', new_tat), 'EX', math.ceil(new_tat - now))
return {1, math.floor((now - allow_at) / interval), '-1', tostring(new_tat - now)}
