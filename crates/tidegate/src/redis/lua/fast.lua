-- Tidegate: one decision, all or nothing, in one script.
--
-- KEYS     the state of each charge, all in one slot.
-- ARGV[1]  the call: operation, flags, the time (or none: then the server's), one more number, an id if there is one.
-- ARGV[2i], ARGV[2i+1]  of charge i: the scale its limit counts in, and its numbers.
-- Answers one string: allowed, the time, and for each charge what was found. `call.rs` writes and reads both.
--
-- All numbers are whole and below 2^53, so that doubles hold them exactly: divide with math.fmod, never with `%`,
-- which Lua 5.1 computes by a rounded division. Numbers are kept as seven bytes, most significant first.
--
-- This part decides the two most frequent calls by itself, in as few steps as can be: a check of one bucket or one
-- window, without an id, of a state that is in the limit's own scale and has never been given anything back. Whatever is
-- less simple goes on to the parts below, which know every operation. Both say the same: see bucket.lua and window.lua.
local pack, unpack, sub, fmod = struct.pack, struct.unpack, string.sub, math.fmod

local op, flags, now, more = unpack('>BBI7I7', ARGV[1])
if flags % 2 == 0 then
  local time = redis.call('TIME')
  now = time[1] * 1000000 + time[2]
end

local scale = ARGV[2]
local value -- of the only key, once it has been read
if op == 99 and flags < 2 and #KEYS == 1 then -- 99 is 'c', a check; no id, not forced
  local key, numbers = KEYS[1], ARGV[3]
  local kind = sub(scale, 1, 1)
  if kind == 'b' then
    value = redis.call('GET', key)
    if not value or (#value == 30 and sub(value, 1, 16) == scale) then
      local _, p, q, g = unpack('>BI7I7B', scale)
      local options, cost, capacity = unpack('>BI7I7', numbers)
      local grid = 10 ^ g
      local units, at, moment = 0, now, now
      if value then
        units, at = unpack('>I7I7', value, 17)
        if units == 0 then at = now elseif at > now then moment = at end
      end
      -- What this caller has seen of the key before: if that is more than there is now, something may have been lost, and
      -- `join` below looks closer.
      local lost = false
      if #numbers > 43 then
        local _, seen_units, seen_at = unpack('>I7I7I7', numbers, 44)
        local seen = seen_at + math.ceil(seen_units / p) * grid
        lost = seen > now and seen > at + math.ceil(units / p) * grid
      end
      if not lost and units < 9007199254740992 and at - now < 3600000000 then
        local ticks = moment - at
        if g > 0 then ticks = (ticks - fmod(ticks, grid)) / grid end
        units = units - ticks * p
        if units > 0 then
          at = at + ticks * grid
        else
          units, at = 0, moment
          if g > 0 then at = moment - fmod(moment, grid) end
        end
        if cost == 0 or (cost <= capacity and units <= (capacity - cost) * q) then
          if cost > 0 then
            units = units + cost * q
            local idle_at = at + math.ceil(units / p) * grid
            local ttl = math.floor(idle_at / 1000) - math.floor(now / 1000) + 1
            if flags == 1 and ttl < 3600000 then ttl = 3600000 end
            redis.call('SET', key, scale .. pack('>I7I7', units, at), 'PX', ttl)
          end
          return pack('>BI7BI7I7I7I7I7', 1, now, cost > 0 and 9 or 1, cost, 0, 0, units, at)
        elseif options == 0 then
          return pack('>BI7BI7I7I7I7I7', 0, now, 0, 0, 0, 0, units, at)
        end
      end
    end
  elseif kind == 'w' then
    value = redis.call('GET', key)
    if not value or (#value == 30 and sub(value, 1, 9) == scale) then
      local _, period, from_first_hit = unpack('>BI7B', scale)
      local options, cost, capacity = unpack('>BI7I7', numbers)
      local start, last, used, moment = 0, 0, 0, now
      if value then
        start, last, used = unpack('>I7I7I7', value, 10)
        if used > 0 and start > now then moment = start end
      end
      local lost = false
      if #numbers > 43 then
        local _, seen_start, _, seen_used = unpack('>I7I7I7I7', numbers, 44)
        lost = seen_start + period > now and (seen_start > start or seen_used > used)
      end
      if not lost and used < 9007199254740992 and start - now < 3600000000 then
        if used == 0 or moment - start >= period then
          start = moment
          if from_first_hit == 0 then start = moment - fmod(moment, period) end
          last, used = start, 0
        end
        if cost == 0 or used + cost <= capacity then
          if cost > 0 then
            used, last = used + cost, moment
            local ttl = math.floor((start + period) / 1000) - math.floor(now / 1000) + 1
            if flags == 1 and ttl < 3600000 then ttl = 3600000 end
            redis.call('SET', key, scale .. pack('>I7I7I7', start, last, used), 'PX', ttl)
          end
          return pack('>BI7BI7I7I7I7I7I7', 1, now, cost > 0 and 9 or 1, cost, 0, 0, start, last, used)
        elseif options == 0 then
          return pack('>BI7BI7I7I7I7I7I7', 0, now, 0, 0, 0, 0, start, last, used)
        end
      end
    end
  end
end
