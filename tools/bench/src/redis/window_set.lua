-- A plain fixed window in the form that begins the window by itself and takes any cost.
redis.call('SET', KEYS[1], 0, 'PX', ARGV[2], 'NX')
local used = redis.call('INCRBY', KEYS[1], 1)
local left = redis.call('PTTL', KEYS[1])
return {used <= tonumber(ARGV[1]) and 1 or 0, used, left}
