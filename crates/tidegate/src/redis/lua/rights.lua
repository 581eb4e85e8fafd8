-- For the startup check: runs every command that the script calls, on a key of its own, and returns
-- the refused ones. The key is deleted, or expires if that is refused.
local key = KEYS[1]
local refused = {}

local function try(...)
  local reply = redis.pcall(...)
  local fine = type(reply) ~= 'table' or not reply.err
  if not fine then refused[#refused + 1] = (...) .. ' ' .. reply.err end
  return fine
end

try('TIME')
local there = try('SET', key, 'x', 'PX', 10000)
try('GET', key)
try('GETRANGE', key, 0, -1)
try('STRLEN', key)
try('SETRANGE', key, 0, '') -- of nothing: creates no key
if there then try('APPEND', key, 'x') end -- which would create a key without expiry
try('PEXPIRE', key, 10000)
try('DEL', key)
return refused
