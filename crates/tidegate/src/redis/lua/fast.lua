-- Tidegate: one decision, all or nothing, in one script.
--
-- KEYS     the state of each charge, all in one slot.
-- ARGV[1]  the call (operation and flags), the first charge, and the time, if it is not the
--          server's. A flag says that it stands in for the server's clock, in tests.
-- ARGV[i]  charge i: the scale of its limit, options and numbers, and what the caller has observed
--          of the key.
-- ARGV[#KEYS + 1]  another number and an id, if the call has them.
-- Returns one string: allowed, the time, and an answer for each charge. `call.rs` encodes and
-- decodes both.
--
-- All numbers are whole and below 2^53, so that doubles hold them exactly: divide with math.fmod,
-- never with `%`, which Lua 5.1 computes by a rounded division. Numbers are stored as seven bytes,
-- most significant first.
--
-- This part is the fast path of the two most frequent calls: a check of one bucket or one window,
-- without an id, of a state in the scale of the limit and without a give-back. All other calls
-- continue with the parts below, which have every operation; both paths decide alike, see
-- bucket.lua and window.lua.
-- Answers of the fast path: 2 peeked, 3 charged, 4 denied; then the time
-- and the state. The most frequent one, a window charged now, is only the state, which contains the
-- time.
local call, struct = redis.call, struct
local unpack = struct.unpack

-- One step reads the fields of a window; no call is shorter than that. Other algorithms read their
-- own fields again.
local first = ARGV[1]
local what, period, from_first_hit, options, cost, capacity, seen_start, seen_used = unpack('>I3I7BBI7I7I7I7', first)
local now, simple, timed = nil, what - 6488064, false -- 'c' without flags: what remains is the algorithm's letter
local ahead = 1000001 -- a state this far ahead of the server's clock is rebased: see state.lua
if what == 6488183 or what % 512 < 256 then -- the most frequent call, by one comparison
  local time = call('TIME')
  now = time[1] * 1000000 + time[2]
else
  now, simple, timed = unpack('>I7', first, #first - 6), simple - 256, true
  if what % 8192 < 4096 then ahead = 3600000000 else simple = simple - 4096 end -- unless it stands in for the server's clock
end

local value -- of the only key, once read
if simple == 119 then -- a window
  local key = KEYS[1]
  value = call('GET', key)
  if not value or #value == 30 then
    local kind, its_period, its_first, start, used = unpack('>BI7BI7I7', value or '\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0')
    -- If this caller has observed more than there is now, the state may have been lost: continue
    -- with `join` below.
    if start - now < ahead and (seen_used <= used and seen_start <= start or seen_start + period <= now)
      and (its_period == period and its_first == from_first_hit and kind == 119 or not value) then
      -- The key of a window expires with it, so its expiry is set once, and later charges write
      -- only the state. But every 64 units the whole value is written with its expiry, in case
      -- another program removed that.
      local moment, written = now, used % 64 -- by 64, `%` is exact
      if start > now and used > 0 then moment = start end
      if used == 0 or moment - start >= period then
        start, used, written = moment, 0, 64
        if from_first_hit == 0 then start = moment - math.fmod(moment, period) end
      end
      if used + cost <= capacity and cost > 0 then
        local state = struct.pack('>I7I7I7', start, used + cost, moment)
        if written + cost > 63 then
          local ttl = math.floor((start + period) / 1000) - math.floor(now / 1000) + 1
          if timed and ttl < 3600000 then ttl = 3600000 end
          call('SET', key, string.sub(first, 3, 11) .. state, 'PX', string.format('%.0f', ttl))
        else
          call('SETRANGE', key, '9', state)
          if timed then call('PEXPIRE', key, math.max(period / 1000, 3600000)) end -- not the server's time
        end
        if moment == now then return state end
        return struct.pack('>BI7', 3, now) .. state
      elseif options % 8 == 0 and used < 9007199254740992 then
        local last = start
        if used > 0 then last = unpack('>I7', value, 24) end
        return struct.pack('>BI7I7I7I7', cost > 0 and 4 or 2, now, start, used, last)
      end
    end
  end
elseif simple == 98 then -- a bucket
  local p, q, g, options, cost, capacity, seen_units, seen_at = unpack('>I7I7BBI7I7I7I7', first, 4)
  local key, grid = KEYS[1], 10 ^ g
  local units, at, moment, ours = 0, now, now, true
  value = call('GET', key)
  if value then
    ours = #value == 30
    if ours then
      local its_kind, its_p, its_q, its_g
      its_kind, its_p, its_q, its_g, units, at = unpack('>BI7I7BI7I7', value)
      ours = its_kind == 98 and its_p == p and its_q == q and its_g == g
      if units == 0 then at = now elseif at > now then moment = at end
    end
  end
  local seen = seen_at + math.ceil(seen_units / p) * grid
  if ours and (seen <= now or seen <= at + math.ceil(units / p) * grid)
    and units < 9007199254740992 and at - now < ahead then
    local ticks = moment - at
    if g > 0 then ticks = (ticks - math.fmod(ticks, grid)) / grid end
    units = units - ticks * p
    if units > 0 then
      at = at + ticks * grid
    else
      units, at = 0, moment
      if g > 0 then at = moment - math.fmod(moment, grid) end
    end
    if cost == 0 then
      return struct.pack('>BI7I7I7', 2, now, units, at)
    elseif cost <= capacity and units <= (capacity - cost) * q then
      units = units + cost * q
      local answer = struct.pack('>BI7I7I7', 3, now, units, at)
      local ttl = math.floor((at + math.ceil(units / p) * grid) / 1000) - math.floor(now / 1000) + 1
      if timed and ttl < 3600000 then ttl = 3600000 end
      call('SET', key, string.sub(first, 3, 18) .. string.sub(answer, 9), 'PX', string.format('%.0f', ttl))
      return answer
    elseif options % 8 == 0 then
      return struct.pack('>BI7I7I7', 4, now, units, at)
    end
  end
end

-- All other calls. A function of its own, so that the fast path has few local variables to
-- initialise.
return (function()
local op, flags = string.byte(first, 1, 2)
local pack, sub, fmod = struct.pack, string.sub, math.fmod
local rest = ARGV[#KEYS + 1] or ''
local more = rest ~= '' and unpack('>I7', rest) or 0

