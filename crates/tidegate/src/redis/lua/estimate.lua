-- The two-window estimate: twin of algorithm/estimate.rs. It assumes that the usage of the previous
-- window was spread evenly.

-- A copy, aged to the window of `moment`.
local function aged(k, s, moment)
  local copy = {start = s.start, last = s.last, previous = s.previous, current = s.current}
  kernels.e.age(k, copy, moment)
  return copy
end

local function no_less(a, b)
  return a.current >= b.current and a.previous >= b.previous
end

makers.e = function() return {
  letter = 'e', scale_size = 8, state_size = 28, small = true,

  scale = function(text)
    local _, period = unpack('>BI7', text)
    if counts(period) then return {period = period, grid = 1} end
  end,

  -- The grid is the limit's, not the state's: limits on different grids share the two counts.
  extra = function(k, grid) k.grid = grid end,

  read = function(k, value, from)
    local start, last, previous, current = unpack('>I7I7I7I7', value, from)
    if previous < EXACT and current < EXACT and last - start < k.period then
      local idle = previous == 0 and current == 0
      return {start = start, last = last, previous = previous, current = current, newest = idle and 0 or math.max(start, last)}
    end
  end,

  write = function(s) return pack('>I7I7I7I7', s.start, s.last, s.previous, s.current) end,

  empty = function() return {start = 0, last = 0, previous = 0, current = 0} end,

  age = function(k, s, now)
    local idle = s.previous == 0 and s.current == 0
    if not idle and s.start > now then now = s.start end
    local start = now - fmod(now, k.period)
    local windows = start > s.start and floor_div(start - s.start, k.period) or 0
    if windows == 1 and not idle then
      s.start, s.previous, s.current = start, s.current, 0
    elseif windows > 0 or idle then
      s.start, s.last, s.previous, s.current = start, start, 0, 0
    end
    return now
  end,

  room = function(k, s, now, ceiling)
    local ticks = k.period / k.grid
    local left = ticks - floor_div(math.max(now - s.start, 0), k.grid)
    return math.max(ceiling - s.current - mul_div_ceil(s.previous, left, ticks), 0)
  end,

  charge = function(_, s, now, cost)
    s.last = now
    s.current = math.min(s.current + cost, EXACT - 1)
    return s.start
  end,

  give_back = function(k, s, _, cost, charged_at)
    local from_current, from_previous = 0, 0
    if not charged_at or charged_at == s.start then from_current = math.min(cost, s.current) end
    if not charged_at or charged_at + k.period == s.start then
      from_previous = math.min(cost - from_current, s.previous)
    end
    s.current, s.previous = s.current - from_current, s.previous - from_previous
    return from_current + from_previous
  end,

  newest = function(_, s) return (s.previous > 0 or s.current > 0) and s.start or 0 end,

  -- The usage at the last charge becomes the usage of the window of `now`, if it was in a later
  -- one. See bucket.lua.
  rebase = function(k, s, now)
    local before, last = s.start, math.min(s.last, now)
    if before <= now then
      s.last = last
      return 0, 0, LAST
    end
    s.current = kernels.e.usage(k, s, now)
    s.start, s.last, s.previous = now - fmod(now, k.period), last, 0
    return before - s.start, before, LAST
  end,

  idle_at = function(k, s)
    if s.current > 0 then return s.start + 2 * k.period end
    return s.previous > 0 and s.start + k.period or 0
  end,

  last = function(_, s) return s.last end,

  -- The usage at the last charge; in an earlier window, the whole count of that window.
  usage = function(k, s, now)
    local k1, last = {period = k.period, grid = 1}, s.last
    kernels.e.age(k1, s, now)
    return EXACT - 1 - kernels.e.room(k1, s, math.max(last, s.start), EXACT - 1)
  end,

  -- See bucket.lua. An observation may be a window older than the state, or, after a clock went
  -- back, a window newer. So both are compared in the latest window.
  join = function(k, s, seen, now, most)
    if kernels.e.idle_at(k, seen) <= now then return s end
    local right = {start = seen.start, last = seen.last,
      previous = math.min(seen.previous, most), current = math.min(seen.current, most)}
    local latest = math.max(now, seen.start, s and s.start or 0)
    if s and no_less(aged(k, s, latest), aged(k, right, latest)) then return s end
    right.start, right.last = math.min(right.start, now - fmod(now, k.period)), math.min(right.last, now)
    kernels.e.age(k, right, now)
    local kept = s and aged(k, s, now)
    if kept then
      if kept.start > right.start or no_less(kept, right) then return s end
      right.last = math.max(right.last, kept.last)
      right.previous, right.current = math.max(right.previous, kept.previous), math.max(right.current, kept.current)
    end
    return right, true
  end,

  full = function(k, now, capacity)
    return {start = now - fmod(now, k.period), last = now, previous = 0, current = capacity}
  end,
} end
