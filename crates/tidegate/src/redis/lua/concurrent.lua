-- Concurrency: twin of algorithm/concurrent.rs. Leases, each of which ends when it is released or
-- expires.
--
-- State: when the newest was granted, and the units of all; then the leases in the order of their
-- ends, 22 bytes each: end, id, units.
local LEASE = 22

makers.c = function()
  local function lease(s, i)
    return unpack('>I7c8I7', s.body, (i - 1) * LEASE + 1)
  end

  local function lease_of(s, id)
    local from = 1
    while true do
      local at = string.find(s.body, id, from, true)
      if not at then return end
      if fmod(at - 8, LEASE) == 0 then return (at - 8) / LEASE + 1 end
      from = at + 1
    end
  end

  local function cut(s, i)
    local _, _, cost = lease(s, i)
    s.body = sub(s.body, 1, (i - 1) * LEASE) .. sub(s.body, i * LEASE + 1)
    s.n, s.total = s.n - 1, math.max(s.total - cost, 0)
    return cost
  end

  return {
    letter = 'c', scale_size = 1, state_size = 14,

    scale = function() return {ttl = 1} end,

    -- The ttl is the limit's, not the state's: every lease has its own end.
    extra = function(k, ttl) k.ttl = ttl end,

    read = function(_, value, from)
      local newest, held = unpack('>I7I7', value, from)
      if held < EXACT then return {newest_grant = newest, total = held} end
    end,

    read_body = function(_, s, key, value, offset, size)
      if size > #value then value = redis.call('GET', key) end
      s.body, s.n = sub(value, offset + 1), (size - offset) / LEASE
      s.newest = s.n > 0 and s.newest_grant or 0
      return fmod(size - offset, LEASE) == 0
    end,

    write = function(s) return pack('>I7I7', s.newest_grant, s.total) end,
    bytes = function(s) return s.body end,

    empty = function() return {newest_grant = 0, total = 0, body = '', n = 0} end,

    age = function(_, s, now)
      if s.n == 0 then return now end
      if s.newest_grant > now then now = s.newest_grant end
      local ended = 0
      while ended < s.n do
        local deadline, _, cost = lease(s, ended + 1)
        if deadline > now then break end
        ended, s.total = ended + 1, math.max(s.total - cost, 0)
      end
      if ended > 0 then
        s.body, s.n = sub(s.body, ended * LEASE + 1), s.n - ended
      end
      return now
    end,

    room = function(_, s, _, ceiling) return math.max(ceiling - s.total, 0) end,
    total = function(s) return s.total end,

    charge = function(k, s, now, cost, id)
      cost = math.min(cost, EXACT - 1 - s.total)
      local deadline = now + k.ttl
      local before = s.n -- after a change of ttl an older lease may outlive a newer one
      while before > 0 and lease(s, before) > deadline do before = before - 1 end
      local new = pack('>I7c8I7', deadline, id or string.rep('\0', 8), cost)
      s.body = sub(s.body, 1, before * LEASE) .. new .. sub(s.body, before * LEASE + 1)
      s.n, s.total, s.newest_grant = s.n + 1, s.total + cost, now
      return now
    end,

    held = function(s, id)
      local i = lease_of(s, id)
      if not i then return end
      local _, _, cost = lease(s, i)
      return cost
    end,

    -- Ends a lease, or `units` of it.
    release = function(s, id, units)
      local i = lease_of(s, id)
      if not i then return 0 end
      local deadline, _, held = lease(s, i)
      if not units or units >= held then return cut(s, i) end
      local rest = pack('>I7c8I7', deadline, id, held - units)
      s.body, s.total = sub(s.body, 1, (i - 1) * LEASE) .. rest .. sub(s.body, i * LEASE + 1), math.max(s.total - units, 0)
      return units
    end,

    until_ended = function(_, s, now, over)
      if over <= 0 or s.n == 0 then return 0 end
      if over >= s.total then return math.max(lease(s, s.n) - now, 0) end -- every lease must end
      local wait, i = 0, 1
      while over > 0 and i <= s.n do
        local deadline, _, cost = lease(s, i)
        over, wait, i = over - cost, math.max(deadline - now, 0), i + 1
      end
      return wait
    end,

    give_back = function(_, s, _, cost)
      local left, n, rest = cost, s.n, ''
      while left > 0 and n > 0 do -- the last to end first
        local deadline, id, held = lease(s, n)
        n = n - 1
        if held > left then rest = pack('>I7c8I7', deadline, id, held - left) end
        left = math.max(left - held, 0)
      end
      s.body, s.n = sub(s.body, 1, n * LEASE) .. rest, n + #rest / LEASE
      s.total = math.max(s.total - (cost - left), 0)
      return cost - left
    end,

    idle_at = function(_, s) return s.n > 0 and (lease(s, s.n)) or 0 end,

    newest = function(_, s) return s.n > 0 and s.newest_grant or 0 end,

    -- The newest lease moves to `now`, and the end of every lease moves with it.
    rebase = function(_, s, now)
      local by, moved = math.max(s.newest_grant - now, 0), {}
      for i = 1, s.n do
        local deadline, id, cost = lease(s, i)
        moved[i] = pack('>I7c8I7', math.max(deadline - by, 0), id, cost)
      end
      s.body, s.newest_grant = table.concat(moved), s.newest_grant - by
      return 0, 0, LAST
    end,

    last = function(_, s) return s.newest_grant end,

    usage = function(k, s, now)
      kernels.c.age(k, s, now)
      return s.total
    end,

    full = function(k, now, capacity)
      local s = kernels.c.empty()
      kernels.c.charge(k, s, now, capacity)
      return s
    end,
  }
end
