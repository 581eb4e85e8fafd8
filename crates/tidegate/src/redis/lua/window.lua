-- The fixed window: twin of algorithm/window.rs. State: its start, the units used, and the moment
-- of the last charge.
makers.w = function() return {
  letter = 'w', scale_size = 9, state_size = 21, small = true,

  scale = function(text)
    local _, period, from_first_hit = unpack('>BI7B', text)
    if counts(period) and from_first_hit <= 1 then return {period = period, from_first_hit = from_first_hit == 1} end
  end,

  read = function(k, value, from)
    local start, used, last = unpack('>I7I7I7', value, from)
    if used < EXACT and last >= start and last - start < k.period then
      return {start = start, last = last, used = used, newest = used > 0 and last or 0}
    end
  end,

  write = function(s) return pack('>I7I7I7', s.start, s.used, s.last) end,

  empty = function() return {start = 0, last = 0, used = 0} end,

  age = function(k, s, now)
    if s.used > 0 and s.start > now then now = s.start end
    if s.used == 0 or now - s.start >= k.period then
      s.start = k.from_first_hit and now or now - fmod(now, k.period)
      s.last, s.used = s.start, 0
    end
    return now
  end,

  room = function(_, s, _, ceiling) return math.max(ceiling - s.used, 0) end,

  charge = function(_, s, now, cost)
    s.last = now
    s.used = math.min(s.used + cost, EXACT - 1)
    return s.start
  end,

  give_back = function(_, s, _, cost, charged_at)
    if charged_at and charged_at ~= s.start then return 0 end -- only to the window that was charged
    local back = math.min(cost, s.used)
    s.used = s.used - back
    return back
  end,

  newest = function(_, s) return s.used > 0 and s.start or 0 end,

  -- The same usage in the window of `now`, if it was in a later one. See bucket.lua.
  rebase = function(k, s, now)
    local before = s.start
    s.start, s.last = math.min(before, k.from_first_hit and now or now - fmod(now, k.period)), math.min(s.last, now)
    return before - s.start, before, LAST
  end,

  idle_at = function(k, s) return s.used > 0 and s.start + k.period or 0 end,

  last = function(_, s) return s.last end,

  usage = function(k, s, now)
    kernels.w.age(k, s, now)
    return s.used
  end,

  -- See bucket.lua. After a loss, two windows from a first hit can be open: the larger count, until
  -- the later end.
  join = function(k, s, seen, now, most)
    if kernels.w.idle_at(k, seen) <= now then return s end
    local start = math.min(seen.start, k.from_first_hit and now or now - fmod(now, k.period))
    local last, used = math.min(seen.last, now), math.min(seen.used, most)
    if s and kernels.w.idle_at(k, s) > now then
      if s.used >= used or (s.start > start and not k.from_first_hit) then return s end
      start, last = math.max(start, s.start), math.max(last, s.last)
    end
    return {start = start, last = math.max(last, start), used = used}, true
  end,

  full = function(k, now, capacity)
    return {start = k.from_first_hit and now or now - fmod(now, k.period), last = now, used = capacity}
  end,
} end
