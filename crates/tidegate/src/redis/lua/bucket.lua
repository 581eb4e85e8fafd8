-- The bucket: twin of algorithm/bucket.rs. A charge adds its cost; the level drains evenly; a
-- charge that would overflow is denied.
--
-- Scale: p units drain in a tick of `grid` microseconds, a token is q units. State: the units, and
-- the moment of that level. A token has so many units that every tick drains a whole number of
-- them: nothing is ever rounded.
makers.b = function() return {
  letter = 'b', scale_size = 16, state_size = 14, small = true,

  scale = function(text)
    local _, p, q, g = unpack('>BI7I7B', text)
    if counts(p) and counts(q) and g <= 6 then return {p = p, q = q, grid = 10 ^ g} end
  end,

  read = function(_, value, from)
    local units, at = unpack('>I7I7', value, from)
    if units < EXACT then return {units = units, at = at, newest = units > 0 and at or 0} end
  end,

  write = function(s) return pack('>I7I7', s.units, s.at) end,

  empty = function() return {units = 0, at = 0} end,

  age = function(k, s, now)
    if s.units > 0 and s.at > now then now = s.at end -- time does not go back
    local elapsed = now - s.at
    local ticks = elapsed > 0 and floor_div(elapsed, k.grid) or 0
    s.units = s.units - ticks * k.p
    if s.units > 0 then
      s.at = s.at + ticks * k.grid -- only whole ticks count; the rest of the last one is kept
    else
      s.units, s.at = 0, now - fmod(now, k.grid) -- an idle key does not save up
    end
    return now
  end,

  room = function(k, s, _, ceiling)
    local free = ceiling * k.q - s.units
    return free > 0 and floor_div(free, k.q) or 0
  end,

  charge = function(k, s, _, cost)
    s.units = math.min(s.units + cost * k.q, EXACT - 1)
    return s.at
  end,

  give_back = function(k, s, _, cost, charged_at)
    -- Without the charge, the bucket could have been idle since then and saved nothing up: only the
    -- part of the cost that cannot have drained yet may be given back.
    local drained = 0
    if charged_at and s.at > charged_at then drained = ceil_div(s.at - charged_at, k.grid) * k.p end
    local back = math.min(math.max(cost * k.q - drained, 0), s.units)
    s.units = s.units - back
    return ceil_div(back, k.q)
  end,

  idle_at = function(k, s) return s.units > 0 and s.at + ceil_div(s.units, k.p) * k.grid or 0 end,

  -- A level that a change of limits raised above the largest number counts from a later moment: not
  -- a step of the clock.
  newest = function(_, s) return s.units > 0 and s.units < EXACT / 2 and s.at or 0 end,

  -- The same level at `now`. Returns how the moments of charges move: those before the second
  -- number have ended, the others move back by the first, and to the third if they are still later.
  rebase = function(_, s, now)
    local by = math.max(s.at - now, 0)
    s.at = s.at - by
    return by, by, LAST
  end,

  -- The last moment at which the level can have been charged: on a coarse grid, its clock starts
  -- with its tick.
  last = function(k, s, now)
    if fmod(s.at, k.grid) > 0 then return s.at end
    return math.min(s.at + k.grid - 1, math.max(now, s.at))
  end,

  usage = function(k, s) return ceil_div(s.units, k.q) end,

  -- The same usage at another rate, rounded up to a whole unit.
  carry = function(from, s, to, now)
    local at = from.grid > to.grid and kernels.b.last(from, s, now) or s.at
    local units = mul_div_ceil(s.units, to.q, from.q)
    if units < EXACT then return {units = units, at = at} end
    -- More than the new scale can count: it counts from the moment at which the old rate has
    -- drained the excess.
    local countable = mul_div_floor(EXACT - 1, from.q, to.q)
    local ticks = ceil_div(math.max(s.units - countable, 0), from.p)
    return {units = EXACT - 1, at = math.min(at + ticks * from.grid, LAST)}
  end,

  -- Charges the cost now, as if it came when it fits. Returns the wait until then, or nothing if
  -- that is too long.
  book = function(k, s, now, cost, capacity, max_wait)
    local over = s.units - (capacity - cost) * k.q
    local wait = over > 0 and math.max(s.at + ceil_div(over, k.p) * k.grid - now, 0) or 0
    if wait > max_wait or wait >= LAST then return end
    -- When it fits, the bucket may have run dry within the last tick; that fraction is not saved
    -- up.
    local ticks = floor_div(math.max(now + wait - s.at, 0), k.grid)
    local units = math.max(s.units, ticks * k.p) + cost * k.q
    if units >= EXACT then return end
    s.units = units
    return wait
  end,

  -- The observed state, if the most of it that can be right is more than the stored one: aged to
  -- now, no later than now, no more than `most`. Never less than the stored one, or an observation
  -- would undo later charges.
  join = function(k, s, seen, now, most)
    local right = {units = seen.units, at = math.min(seen.at, now)}
    kernels.b.age(k, right, now)
    right.units = math.min(right.units, most * k.q)
    if right.units == 0 or (s and kernels.b.idle_at(k, right) <= kernels.b.idle_at(k, s)) then return s end
    return right, true
  end,

  -- A full bucket.
  full = function(k, now, capacity) return {units = capacity * k.q, at = now - fmod(now, k.grid)} end,
} end
