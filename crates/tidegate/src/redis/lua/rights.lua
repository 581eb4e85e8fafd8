-- For the startup check: tries every command that the script calls, on a key of its own, and names those that are refused.
-- Nothing stays: the key is deleted, and where that is refused it ends by itself.
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
try('SETRANGE', key, 0, '') -- of nothing: makes no key where there is none
if there then try('APPEND', key, 'x') end -- which would make one that stays
try('PEXPIRE', key, 10000)
try('DEL', key)
return refused
