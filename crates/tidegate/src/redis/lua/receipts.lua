-- The latest charges with an id, so that each can be settled or refunded once: twin of `Receipts`
-- in state.rs. 23 bytes each, oldest first: the id, the refundable units, the moment of the charge,
-- whether it was settled.
local RECEIPT = 23
local MOST_RECEIPTS = 64

-- The position of the receipt, the refundable units, the moment of the charge, and whether it was
-- settled.
local function receipt(m)
  if m.idle or not m.id then return end
  local from = 1
  while true do
    local at = string.find(m.receipts, m.id, from, true)
    if not at then return end
    if fmod(at - 1, RECEIPT) == 0 then
      local refundable, charged_at, settled = unpack('>I7I7B', m.receipts, at + 8)
      return at, refundable, charged_at, settled == 1
    end
    from = at + 1
  end
end

-- Replaces the receipt at `at` by `new`.
local function put_receipt(m, at, new)
  m.receipts = sub(m.receipts, 1, at - 1) .. new .. sub(m.receipts, at + RECEIPT)
  m.receipts_changed = true
end

local function keep_receipt(m, units, charged_at)
  if #m.receipts >= MOST_RECEIPTS * RECEIPT then m.receipts = sub(m.receipts, RECEIPT + 1) end
  m.receipts = m.receipts .. m.id .. pack('>I7I7B', units, charged_at, 0)
  m.receipts_changed = true
end

-- The moments of charges move with a rebased state; a charge that has ended cannot be given back.
-- See bucket.lua.
local function move_receipts(m, by, oldest, latest)
  local kept = {}
  for at = 1, #m.receipts, RECEIPT do
    local refundable, charged_at = unpack('>I7I7', m.receipts, at + 8)
    if charged_at < oldest then refundable = 0 else charged_at = math.min(charged_at - by, latest) end
    kept[#kept + 1] = sub(m.receipts, at, at + 7) .. pack('>I7I7', refundable, charged_at)
      .. sub(m.receipts, at + 22, at + 22)
  end
  m.receipts = table.concat(kept)
end

-- After a change of scale, the remaining weight of a charge is unknown: nothing is refundable.
local function forfeit_receipts(m)
  local kept = {}
  for at = 1, #m.receipts, RECEIPT do
    kept[#kept + 1] = sub(m.receipts, at, at + 7) .. pack('>I7', 0) .. sub(m.receipts, at + 15, at + RECEIPT - 1)
  end
  m.receipts = table.concat(kept)
end
