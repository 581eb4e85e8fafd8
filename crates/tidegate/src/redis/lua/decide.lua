-- The operations: twin of decide.rs and meter.rs. Written once for all algorithms.

-- Marks the state as different from the stored one.
local function change(m)
  m.changed = true
  if m.idle then
    m.idle, m.receipts, m.receipts_changed = false, '', true
  end
  if m.foreign then
    m.foreign = false
    forfeit_receipts(m)
    bump(m, m.stored_idle_at)
  end
end

local function is_charged(m)
  if m.kernel.letter == 'c' then return m.id and m.kernel.held(m.s, m.id) ~= nil end
  return receipt(m) ~= nil
end

local function charged_units(m)
  if m.kernel.letter == 'c' then return m.id and m.kernel.held(m.s, m.id) or 0 end
  local _, refundable = receipt(m)
  return refundable or 0
end

local function room(m, ceiling)
  return m.kernel.room(m.k, m.s, m.now, ceiling)
end

local function add(m, units, id)
  change(m)
  m.charged_at = m.kernel.charge(m.k, m.s, m.now, units, id)
  return m.charged_at
end

local function charge(m, units)
  m.granted = units
  if units == 0 or is_charged(m) then return end
  local charged_at = add(m, units, m.id)
  if m.id and m.kernel.letter ~= 'c' then keep_receipt(m, units, charged_at) end
end

-- Charges a denied check: not if it could never fit, and at most one amount beyond the capacity.
local function charge_rejected(m)
  if m.cost > m.capacity then return end
  local units = math.min(m.cost, room(m, m.capacity + m.amount))
  if units > 0 then add(m, units) end
end

local function give_back(m, units, charged_at)
  local idle_at = m.kernel.idle_at(m.k, m.s)
  local back = m.kernel.give_back(m.k, m.s, m.now, units, charged_at)
  if back > 0 then
    change(m)
    if m.kernel.small then bump(m, idle_at) end
  end
  return back
end

local function release(m, units)
  if m.kernel.letter ~= 'c' or not m.id then return end
  m.granted = m.kernel.release(m.s, m.id, units)
  if m.granted > 0 then change(m) end
end

local function refund(m)
  if not m.id then
    m.granted = give_back(m, m.cost, m.options >= 2 and m.charged or nil)
    return
  end
  -- A lease ends completely, unless this check granted it and keeps a part.
  if m.kernel.letter == 'c' then return release(m, m.options >= 2 and m.cost or nil) end
  local at, refundable, charged_at, settled = receipt(m)
  if not at or m.foreign then return end
  local units = math.min(m.cost, refundable)
  local id = m.id
  put_receipt(m, at, id .. pack('>I7I7B', refundable - units, charged_at, settled and 1 or 0))
  m.granted = give_back(m, units, charged_at)
  if refundable == units and not settled and units > 0 then
    at = receipt(m)
    if at then put_receipt(m, at, '') end
  end
end

-- Settles the difference between the reserved and the actual cost: `cost` is missing, or was too
-- much.
local function settle(m)
  if m.kernel.letter == 'c' then
    release(m)
    return true
  end
  local at, refundable, charged_at, settled = receipt(m)
  if settled then return true end
  if at then
    put_receipt(m, at, m.id .. pack('>I7I7B', 0, charged_at, 1))
  else
    -- No receipt: too old, or too many since. Nothing is given back, but a missing cost is still
    -- charged.
    refundable, charged_at = 0, m.now
  end
  if m.options < 4 then
    local units = m.foreign and 0 or math.min(m.cost, refundable)
    m.granted = give_back(m, units, charged_at)
    return true
  end
  local units = math.min(m.cost, room(m, m.capacity + m.debt))
  if units > 0 then add(m, units) end
  m.granted = units
  return units == m.cost
end

local function reset(m)
  local idle_at = m.kernel.idle_at(m.k, m.s)
  change(m)
  if m.kernel.small and idle_at > now then bump(m, idle_at) end
  m.s = m.kernel.empty()
  m.kernel.age(m.k, m.s, m.now)
  m.receipts, m.receipts_changed = '', true
end

local function book(m)
  if m.cost > m.capacity then return false end
  local wait = m.cost == 0 and 0 or m.kernel.book(m.k, m.s, m.now, m.cost, m.capacity, more)
  if not wait then return false end
  if m.cost > 0 then change(m) end
  m.booked, m.granted = wait, m.cost
  return true
end

local function unbook(m)
  if m.kernel.letter == 'b' and m.kernel.idle_at(m.k, m.s) == more then m.granted = give_back(m, m.cost) end
end

local CHECK, PEEK, TAKE, DEBIT, REFUND, RESET, SETTLE, RELEASE, BOOK, UNBOOK =
  99, 112, 116, 100, 114, 120, 115, 108, 98, 117 -- the letters c p t d r x s l b u

local function ceiling(m)
  return (op == DEBIT or op == SETTLE) and m.capacity + m.debt or m.capacity
end

-- Applies the operation to every meter. Returns whether it is allowed. `denied`: another slot
-- denied the check, so apply here what a denied check stores.
local function apply(meters, denied)
  local allowed = not denied
  if op == CHECK or op == DEBIT or op == PEEK then
    for _, m in ipairs(meters) do
      m.fits = is_charged(m) or m.cost <= room(m, ceiling(m)) or m.cost == 0
      allowed = allowed and m.fits
    end
    for _, m in ipairs(meters) do
      if op == PEEK then -- changes nothing
      elseif allowed then
        charge(m, m.cost)
      elseif m.counts_rejected and op == CHECK then
        charge_rejected(m)
      end
    end
  elseif op == TAKE then
    local before = false
    for _, m in ipairs(meters) do before = before or is_charged(m) end
    local grant = EXACT
    for _, m in ipairs(meters) do
      if before then -- repeated under the same id: the answer is the units granted before
        m.fits, m.granted = true, charged_units(m)
      else
        grant = math.min(grant, m.cost, room(m, m.capacity))
      end
    end
    for _, m in ipairs(meters) do
      if not before then
        m.fits = m.cost == 0 or room(m, m.capacity) > 0
        charge(m, grant)
      end
      allowed = allowed and m.fits
    end
  elseif op == SETTLE then
    for _, m in ipairs(meters) do
      m.fits = settle(m)
      allowed = allowed and m.fits
    end
  elseif op == BOOK then
    local m = meters[1]
    m.fits = book(m)
    allowed = m.fits
  else
    local act = ({[REFUND] = refund, [RESET] = reset, [RELEASE] = release, [UNBOOK] = unbook})[op]
    for _, m in ipairs(meters) do
      m.fits = true
      act(m)
    end
  end
  return allowed
end

-- The units that must end before the same call fits; 0 if it never can.
local function over(m)
  local units, most = m.cost, ceiling(m)
  if op == TAKE then units = 1 elseif op == SETTLE then units = math.max(m.options >= 4 and m.cost or 0, 1) end
  if units == 0 or units > most then return 0 end
  return m.kernel.total(m.s) - (most - units)
end

-- Whether a call stores the states that it rebased.
local function keeps_rebased(m)
  if op == CHECK or op == TAKE or op == DEBIT or op == BOOK then return m.cost > 0 end
  return op ~= PEEK
end

-- The part of the answer for one charge.
local function report(m)
  if (m.repaired or m.restored) and op ~= PEEK and m.cost > 0 then change(m) end
  if m.changed then forget_epoch(m) end
  local rebased = m.rebased_by and keeps_rebased(m)
  m.keeps_rebased = m.keeps_rebased or rebased
  -- A state that was converted or rebased but not stored must not be remembered: flag 16.
  local found = (m.fits and 1 or 0) + (m.restored and 2 or 0) + (m.repaired and 4 or 0) + (m.charged_at and 8 or 0)
    + ((m.foreign or m.rebased_by and not rebased) and 16 or 0) + (rebased and 32 or 0)
  found = pack('>B', found) .. (rebased and pack('>I7', math.min(m.rebased_by, LAST)) or '')
  if m.kernel.small then
    return found .. pack('>I7I7I7', m.granted, m.booked, m.epoch) .. m.kernel.write(m.s)
  end
  local total = math.min(m.kernel.total(m.s), EXACT - 1)
  local left = math.max(m.capacity - total, 0)
  local function wait(units) return math.min(m.kernel.until_ended(m.k, m.s, m.now, units), LAST) end
  local next_after = left < m.capacity and wait(total - (m.capacity - left - 1)) or 0
  return found .. pack('>I7I7I7I7I7I7', math.min(m.granted, EXACT - 1), total,
    wait(over(m)), next_after, wait(total), m.charged_at or 0)
end

if op == 109 then -- 'm': many checks of one key, in order; the last argument has the costs after the first
  op = CHECK
  local m, answer = meter(1), {}
  for i = 1, #rest / 7 + 1 do
    if i > 1 then m.cost = unpack('>I7', rest, (i - 2) * 7 + 1) end
    m.granted, m.charged_at = 0, nil
    answer[i] = pack('>BI7', apply({m}) and 1 or 0, now) .. report(m)
    -- Stored once is enough for the next check.
    if m.cost > 0 then m.repaired, m.restored, m.rebased_by = nil, nil, nil end
  end
  keep(m)
  return table.concat(answer)
end

local id
if #rest > 7 then id = sub(rest, 8, 15) end
local denied = flags % 8 >= 4
local meters = {}
for i = 1, #KEYS do meters[i] = meter(i, id) end

if denied then
  -- First give back what this check charged here before another slot denied it.
  for _, m in ipairs(meters) do
    if m.options >= 2 then
      local cost = m.cost
      refund(m)
      m.granted, m.cost = 0, cost
    end
  end
end
local allowed = apply(meters, denied)

local answer = {pack('>BI7', allowed and 1 or 0, now)}
for i, m in ipairs(meters) do answer[i + 1] = report(m) end
for _, m in ipairs(meters) do keep(m) end
return table.concat(answer)
end)()
