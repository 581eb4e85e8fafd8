-- The stored value of one key and one limit, and how it survives a change of the limit: twin of
-- state.rs.
--
-- A value is: the scale in which it is written (its first byte is the algorithm's letter), the
-- state, then
-- - the number of receipts, the moment of the last give-back or conversion (epoch), the moment
--   until which callers may remember more than there is (horizon), and the receipts; nothing of
--   this for a bucket, window or estimate that needs none of it;
-- - for the other algorithms the pieces or leases.

-- After a give-back or a conversion: callers that observed more before must not take it for lost.
-- See `join`.
local function bump(m, idle_at)
  m.epoch = math.max(now, m.epoch + 1)
  m.horizon = math.max(m.horizon, math.min(idle_at, LAST))
end

-- How far a state is ahead of the server's clock, if it has to be rebased: twin of rebase.rs. The
-- clock went back, or this server took over from one whose clock was ahead. The time of a caller
-- never goes back.
local function far_ahead(kernel, k, s, foreign)
  if ahead == HOUR_US then return end
  local newest = kernel.newest(k, s)
  -- Another scale converts usage at the moment of the last charge.
  if foreign and s.last and kernel.letter ~= 'l' then newest = math.max(newest, s.last) end
  if newest - now >= ahead then return newest - now end
end

-- Moves every moment later than now to now; usage in units stays. A peek does not store it, but
-- every other call does, even a denied one, which stores the rebased state in its old scale.
local function rebase(m)
  local kernel, s = m.stored_kernel, m.s
  m.before_idle_at = m.stored_idle_at
  move_receipts(m, kernel.rebase(m.stored_k, s, now))
  m.stored_idle_at = kernel.idle_at(m.stored_k, s)
  m.text, m.rebased_body = sub(m.text, 1, kernel.scale_size) .. kernel.write(s), kernel.bytes and kernel.bytes(s) or ''
end

-- Decodes a value into the meter. False if Tidegate did not write it.
local function decode(m, text, size)
  local kernel = kernels[sub(text, 1, 1)]
  if not kernel then return false end
  local head = kernel.scale_size + kernel.state_size
  if #text < head then return false end
  local scale = sub(text, 1, kernel.scale_size)
  local k = scale == m.scale and m.k or kernel.scale(scale)
  local s = k and kernel.read(k, text, kernel.scale_size + 1)
  if not s then return false end
  m.text, m.size, m.head = text, size, head
  if not kernel.small or size > head then
    if size < head + 15 or #text < head + 15 then return false end
    local count
    count, m.epoch, m.horizon = unpack('>BI7I7', text, head + 1)
    m.body_at = head + 15 + count * RECEIPT
    if count > MOST_RECEIPTS or size < m.body_at or (kernel.small and size > m.body_at) then return false end
    if m.epoch >= EXACT or m.horizon > LAST then return false end
    m.receipts = sub(text, head + 16, m.body_at)
  end
  if not kernel.small and not kernel.read_body(k, s, m.key, text, m.body_at, size) then return false end
  m.stored_kernel, m.stored_k, m.s = kernel, k, s
  m.stored_idle_at = kernel.idle_at(k, s)
  m.foreign = scale ~= m.scale
  m.rebased_by = m.stored_idle_at > now and far_ahead(kernel, k, s, m.foreign) or nil
  if m.rebased_by then
    rebase(m)
  elseif s.newest - now > HOUR_US and s.newest > m.horizon then
    -- A state slightly ahead waits for the clock. One further ahead is damaged, unless a change of
    -- limits wrote it: usage above the largest number counts from a later moment, but not after the
    -- old state would have been idle.
    return false
  end
  m.idle = m.receipts ~= '' and now >= m.stored_idle_at
  return true
end

-- Converts usage to the scale of the limit without creating any: the level of a bucket drains at
-- the new rate; all other usage becomes one charge at the moment of the last charge.
local function carry(m)
  if now >= m.stored_idle_at then return m.kernel.empty() end
  local kernel, k = m.stored_kernel, m.stored_k
  if kernel.letter == 'b' and m.kernel.letter == 'b' then return kernel.carry(k, m.s, m.k, now) end
  local last = kernel.last(k, m.s, now)
  local usage = kernel.usage(k, m.s, now)
  local carried = m.kernel.empty()
  if usage > 0 then
    last = m.kernel.age(m.k, carried, last)
    m.kernel.charge(m.k, carried, last, usage)
  end
  return carried
end

-- The meter of one charge: its limit, and the state of its key aged to now.
local function meter(i, id)
  local charge = i == 1 and sub(first, 3) or ARGV[i]
  local kernel = kernels[sub(charge, 1, 1)]
  local scale = sub(charge, 1, kernel.scale_size)
  local options, cost, capacity, at = unpack('>BI7I7', charge, kernel.scale_size + 1)
  -- What the caller has observed of the key; the field is there even without an observation.
  local seen_at, epoch = at, nil
  if kernel.small then at = at + kernel.state_size end
  if options % 16 >= 8 then epoch, at = unpack('>I7', charge, at) end
  local debt, amount, charged, extra = 0, capacity, 0, 0 -- defaults
  if options % 32 >= 16 then debt, amount, charged, extra = unpack('>I7I7I7I7', charge, at) end
  options = options % 8
  local k = kernel.scale(scale)
  if kernel.extra then kernel.extra(k, extra) end
  -- One table constructor, because a table that grows field by field is reallocated repeatedly.
  local m = {
    key = KEYS[i], scale = scale, id = id, kernel = kernel, k = k,
    options = options, cost = cost, capacity = capacity, debt = debt, amount = amount, charged = charged,
    counts_rejected = options % 2 == 1,
    epoch = 0, horizon = 0, receipts = '', granted = 0, booked = 0,
  }

  local text = value
  if text == nil then text = redis.call('GETRANGE', m.key, 0, CHUNK - 1) end
  if not text or text == '' then
    text = nil
  elseif not decode(m, text, #text < CHUNK and #text or redis.call('STRLEN', m.key)) then
    -- Written by another program, or damaged: taken as used up. It is stored, so that it expires.
    m.epoch, m.horizon, m.receipts, m.foreign, m.idle, m.rebased_by = 0, 0, '', false, false, nil
    m.s, m.repaired = m.kernel.full(m.k, now, m.capacity), true
  end
  m.existed = text ~= nil
  if m.foreign then
    m.s = carry(m)
  elseif m.kernel.small and not m.repaired and epoch then
    local seen = m.kernel.read(m.k, charge, seen_at)
    if seen and m.epoch <= epoch then
      if far_ahead(m.kernel, m.k, seen) then m.kernel.rebase(m.k, seen, now) end
      local most = m.capacity + math.max(m.debt, m.counts_rejected and m.amount or 0)
      m.s, m.restored = m.kernel.join(m.k, m.s, seen, now, most)
      if m.restored and epoch > m.epoch then
        -- Other callers may remember states before that give-back, until the largest possible one
        -- has ended.
        local gone = m.kernel.idle_at(m.k, m.kernel.full(m.k, now, most))
        m.epoch, m.horizon = epoch, math.max(m.horizon, math.min(gone, LAST))
      end
    end
  end
  -- Callers that observed the state before the rebase must not take it for more.
  if m.rebased_by and m.stored_kernel.small and not m.restored then bump(m, m.before_idle_at) end
  m.s = m.s or m.kernel.empty()
  m.now = m.kernel.age(m.k, m.s, now)
  return m
end

local function ttl(idle_at)
  local ms = math.floor(idle_at / 1000) - math.floor(now / 1000) + 1
  if flags % 2 == 1 then ms = math.max(ms, 3600000) end -- the time is not the server's
  return math.min(math.max(ms, 1), 4503599627370)
end

-- Forgets the epoch a minute after its horizon, when no caller can remember more than there is; the
-- minute is for a clock that briefly goes back.
local function forget_epoch(m)
  if now - m.horizon >= 60000000 then m.epoch, m.horizon = 0, 0 end
end

-- The part between the state and the pieces or leases.
local function middle(m)
  return pack('>BI7I7', #m.receipts / RECEIPT, m.epoch, m.horizon) .. m.receipts
end

-- Stores a changed meter: value and expiry in one command, or a long log in a few, which never
-- leave it without an expiry.
local function keep(m)
  local kernel, s = m.kernel, m.s
  if not m.changed then
    if not m.receipts_changed and not m.keeps_rebased then return end
    -- Only the receipts have changed, or the state was rebased; the state is not aged.
    local rest = m.rebased_body or m.body_at and redis.call('GETRANGE', m.key, m.body_at, -1) or ''
    local ends = ttl(math.max(m.stored_idle_at, m.horizon))
    redis.call('SET', m.key, sub(m.text, 1, m.head) .. middle(m) .. rest, 'PX', ends)
    return
  end
  local idle_at = kernel.idle_at(m.k, s)
  if idle_at <= now and m.receipts == '' and m.horizon == 0 then
    if m.existed then redis.call('DEL', m.key) end
    return
  end
  local ends = ttl(math.max(idle_at, m.horizon))
  if kernel.small then
    local more = (m.epoch > 0 or m.receipts ~= '') and middle(m) or ''
    redis.call('SET', m.key, m.scale .. kernel.write(s) .. more, 'PX', ends)
  elseif not s.body and s.stored >= 0 and s.n >= s.stored and not m.receipts_changed and s.first * 2 < s.n then
    -- One piece was added to a long log: write only that piece and the state.
    redis.call('SETRANGE', m.key, kernel.scale_size, kernel.write(s))
    if s.name and s.n > s.stored then
      redis.call('APPEND', m.key, pack('>I7I7', s.name, s.sum))
    elseif s.name then
      redis.call('SETRANGE', m.key, s.offset + (s.n - 1) * PIECE, pack('>I7I7', s.name, s.sum))
    end
    redis.call('PEXPIRE', m.key, ends)
  else
    local body = kernel.bytes(s)
    if s.first then s.first = 0 end
    redis.call('SET', m.key, m.scale .. kernel.write(s) .. middle(m) .. body, 'PX', ends)
  end
end
