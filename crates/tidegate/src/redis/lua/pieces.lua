-- The sliding window in steps and the log: twins of algorithm/sliding.rs and algorithm/log.rs.
--
-- Both keep usage in pieces, oldest first, each of which ends at one moment: a step of the clock
-- with the units charged in it, or a moment with the units charged then. A piece is fourteen bytes:
-- its name (the number of the step, or the moment) and the sum of all pieces up to and including
-- it. So the usage between two pieces is a difference, and binary search finds live pieces and
-- waits. A long log is not read completely: pieces are fetched one by one, and a new one is
-- appended.
--
-- State: the moment of the last charge, the number of ended pieces at the front, and the sum up to
-- there. In memory also the number of pieces, how many are stored (-1: all must be written again),
-- and the last one if it has changed.
local PIECE = 14
local CHUNK = 4096 -- the bytes of a value that one command reads

local function pieces(letter, kernel)
  -- The name of piece i, and the sum up to it. The last piece may have changed since it was read.
  local function piece(s, i)
    if i == s.first then return 0, s.base end
    if i == s.n and s.name then return s.name, s.sum end
    if s.body then return unpack('>I7I7', s.body, (i - 1) * PIECE + 1) end
    local from = s.offset + (i - 1) * PIECE
    return unpack('>I7I7', redis.call('GETRANGE', s.key, from, from + PIECE - 1))
  end

  -- The first piece after `s.first` for which `holds` is true, which it must then be for all later
  -- ones; s.n + 1 if none.
  local function first_that(s, holds)
    local low, high = s.first + 1, s.n + 1
    if low < high and holds(piece(s, low)) then return low end
    while low < high do
      local middle = math.floor((low + high) / 2)
      if holds(piece(s, middle)) then high = middle else low = middle + 1 end
    end
    return low
  end

  -- Reads the rest of a long log.
  local function load_all(s)
    if not s.body then s.body = redis.call('GETRANGE', s.key, s.offset, -1) end
  end

  local function total(s)
    local _, sum = piece(s, s.n)
    return sum - s.base
  end

  -- The bytes of the remaining pieces.
  local function bytes(s)
    load_all(s)
    local kept = s.name and s.n - 1 or s.n
    return sub(s.body, s.first * PIECE + 1, kept * PIECE) .. (s.name and pack('>I7I7', s.name, s.sum) or '')
  end

  -- Replaces all pieces by `names` with these uses.
  local function replace(s, names, uses)
    local all, sum = {}, 0
    for i = 1, #names do
      sum = sum + uses[i]
      all[i] = pack('>I7I7', names[i], sum)
    end
    s.body, s.stored, s.n, s.first, s.base, s.name, s.sum = table.concat(all), -1, #names, 0, 0, nil, nil
  end

  kernel.letter, kernel.state_size = letter, 18

  kernel.read = function(k, value, from)
    local last, first, base = unpack('>I7I4I7', value, from)
    if base < EXACT then return {last = last, first = first, base = base} end
  end

  -- Reads the pieces at `offset` of the value, of which only a part was read if `size` is larger.
  kernel.read_body = function(k, s, key, value, offset, size)
    s.key, s.offset, s.n = key, offset, (size - offset) / PIECE
    s.stored = s.n
    if fmod(size - offset, PIECE) > 0 or s.first > s.n then return false end
    if size == #value then
      s.body = sub(value, offset + 1)
    elseif letter ~= 'l' then
      load_all(s)
    end
    if s.n > s.first then
      local name, sum = piece(s, s.n)
      s.newest = math.max(kernel.moment(k, name), s.last)
      return sum - s.base >= 1 and sum < EXACT and name < EXACT
    end
    s.newest = 0
    return true
  end

  kernel.write = function(s) return pack('>I7I4I7', s.last, s.first, s.base) end
  kernel.bytes = bytes

  kernel.empty = function()
    return {last = 0, first = 0, base = 0, n = 0, stored = 0, body = ''}
  end

  kernel.age = function(k, s, now)
    if s.n == s.first then return now end
    local newest = kernel.moment(k, (piece(s, s.n)))
    if newest > now then now = newest end
    local first = first_that(s, function(name) return kernel.ends(k, name) > now end) - 1
    if first > s.first then
      local _, base = piece(s, first)
      s.first, s.base = first, base
    end
    return now
  end

  kernel.room = function(_, s, _, ceiling) return math.max(ceiling - total(s), 0) end
  kernel.total = function(s) return total(s) end

  kernel.charge = function(k, s, now, cost)
    cost = math.min(cost, EXACT - 1 - total(s))
    s.last = now
    local name, sum = piece(s, s.n)
    if sum + cost >= EXACT then -- the sums reach the largest number: count from zero again
      load_all(s)
      local names, uses, before = {}, {}, s.base
      for i = s.first + 1, s.n do
        local one, upto = piece(s, i)
        names[#names + 1], uses[#uses + 1], before = one, upto - before, upto
      end
      replace(s, names, uses)
      name, sum = piece(s, s.n)
    end
    local own = kernel.name(k, now)
    if s.n == s.first or name ~= own then
      if s.name then -- the previous piece was changed and not yet written
        s.body = bytes(s)
        s.n, s.first, s.stored = s.n - s.first, 0, -1
      end
      s.n = s.n + 1
    end
    s.name, s.sum = own, sum + cost
    return kernel.moment(k, own)
  end

  -- Until `over` units have ended.
  kernel.until_ended = function(k, s, now, over)
    if over <= 0 or s.n == s.first then return 0 end
    local i = math.min(first_that(s, function(_, sum) return sum - s.base >= over end), s.n)
    return math.max(kernel.ends(k, (piece(s, i))) - now, 0)
  end

  kernel.give_back = function(k, s, _, cost, charged_at)
    if not charged_at then -- the newest first
      local back = math.min(cost, total(s))
      if back <= 0 then return 0 end
      local left = s.base + total(s) - back
      local i = left > s.base and first_that(s, function(_, sum) return sum >= left end) or s.first
      local name, sum = piece(s, i)
      if i < s.n then s.stored = -1 end
      s.n, s.name, s.sum = i, nil, nil
      if sum > left then s.name, s.sum = name, left end
      return back
    end
    local charged = kernel.name(k, charged_at)
    local i = first_that(s, function(name) return name >= charged end)
    if i > s.n then return 0 end
    local name, sum = piece(s, i)
    local _, before = piece(s, i - 1)
    local back = name == charged and math.min(cost, sum - before) or 0
    if back <= 0 then return 0 end
    -- All later sums shrink. Recent charges are near the end, so little has to be written.
    load_all(s)
    local after = {}
    if sum - back > before then after[1] = pack('>I7I7', name, sum - back) end
    for j = i + 1, s.n do
      local one, upto = piece(s, j)
      after[#after + 1] = pack('>I7I7', one, upto - back)
    end
    s.body, s.n = sub(s.body, 1, (i - 1) * PIECE) .. table.concat(after), i - 1 + #after
    s.stored, s.name, s.sum = -1, nil, nil
    return back
  end

  kernel.idle_at = function(k, s)
    return s.n > s.first and kernel.ends(k, (piece(s, s.n))) or 0
  end

  kernel.newest = function(k, s) return s.n > s.first and kernel.moment(k, (piece(s, s.n))) or 0 end

  -- Units charged later than `now` count as charged now, in one last piece. See bucket.lua.
  kernel.rebase = function(k, s, now)
    local newest = kernel.age(k, s, now)
    local own = kernel.name(k, now)
    local i = first_that(s, function(name) return name >= own end)
    if i <= s.n then
      local _, sum = piece(s, s.n)
      load_all(s)
      s.n, s.name, s.sum = i, own, sum
    end
    s.body = bytes(s)
    s.n, s.first, s.stored, s.name, s.sum = s.n - s.first, 0, -1, nil, nil
    s.last = math.min(s.last, now)
    local latest = kernel.moment(k, own)
    return 0, math.max(newest + 1 - (kernel.ends(k, own) - latest), 0), latest
  end

  -- The last charge of a log is its newest piece, even after a give-back.
  kernel.last = function(_, s)
    if letter == 's' then return s.last end
    return s.n > s.first and (piece(s, s.n)) or 0
  end

  kernel.usage = function(k, s, now)
    kernel.age(k, s, now)
    return total(s)
  end

  kernel.full = function(k, now, capacity)
    local s = kernel.empty()
    kernel.charge(k, s, now, capacity)
    return s
  end

  return kernel
end

makers.s = function() return pieces('s', {
  scale_size = 16,

  scale = function(text)
    local _, period, step, lenient = unpack('>BI7I7B', text)
    if counts(period) and counts(step) and step <= period and lenient <= 1 then
      return {period = period, step = step, lenient = lenient == 1}
    end
  end,

  name = function(k, now) return floor_div(now, k.step) end,
  moment = function(k, index) return index * k.step end,

  -- The first moment at which a step no longer counts: strict, when the last moment of the step
  -- leaves the window; lenient, when the first one does.
  ends = function(k, index)
    if k.lenient then return index * k.step + ceil_div(k.period, k.step) * k.step end
    return index * k.step + k.step - 1 + k.period
  end,
}) end

makers.l = function() return pieces('l', {
  scale_size = 8,

  scale = function(text)
    local _, period = unpack('>BI7', text)
    if counts(period) then return {period = period} end
  end,

  name = function(_, now) return now end,
  moment = function(_, at) return at end,
  ends = function(k, at) return at + k.period end,
}) end
