-- HAProxy calls Tidegate before it forwards a request. There is nothing to edit here: haproxy.cfg
-- has the settings. They are environment variables, set by `setenv` in the section `global`,
-- because arguments of `lua-load` need HAProxy 2.7.

local function setting(name, example, default)
  local value = os.getenv(name)
  if value and value ~= "" then return value end
  if default then return default end
  error("tidegate.lua: " .. name .. " is missing: write `setenv " .. name .. " " .. example .. "` in the section global, above lua-load", 0)
end

local function refuse(name, value, expected)
  error("tidegate.lua: " .. name .. " is `" .. value .. "`: " .. expected, 0)
end

local ADDRESS = setting("TIDEGATE_ADDRESS", "127.0.0.1:8080")
-- HAProxy resolves no names at run time.
if not (ADDRESS:find("^%d+%.%d+%.%d+%.%d+:%d+$") or ADDRESS:find("^%[[%x:.]+%]:%d+$")) then
  refuse("TIDEGATE_ADDRESS", ADDRESS, "write an IP address and a port, as 127.0.0.1:8080 or [::1]:8080; for a name or TLS see docs/haproxy.md")
end
local ON_FAILURE = setting("TIDEGATE_ON_FAILURE", "open")
if ON_FAILURE ~= "open" and ON_FAILURE ~= "closed" then
  refuse("TIDEGATE_ON_FAILURE", ON_FAILURE, "write open (requests pass while Tidegate does not answer) or closed (they get 503)")
end
local TIMEOUT = setting("TIDEGATE_TIMEOUT_MS", "100", "100")
local TIMEOUT_MS = tonumber(TIMEOUT:match("^%d+$"))
if not TIMEOUT_MS or TIMEOUT_MS < 1 then
  refuse("TIDEGATE_TIMEOUT_MS", TIMEOUT, "write whole milliseconds, as 100")
end
local TOKEN = setting("TIDEGATE_TOKEN", "", "")

-- Headers of the client that are not sent to Tidegate: those about its connection and body, and
-- those that only HAProxy may set.
local OWN = {}
for name in ([[
  connection content-length expect host keep-alive proxy-connection te trailer transfer-encoding upgrade
  x-forwarded-for x-forwarded-host x-forwarded-method x-forwarded-uri x-original-method x-original-uri x-original-url
  x-tidegate-token
]]):gmatch("%S+") do OWN[name] = true end

-- Headers of Tidegate's response that an allowed client sees, and the variables that carry them to
-- haproxy.cfg.
local SEEN = {
  ["ratelimit-policy"] = "txn.rl_policy",
  ["ratelimit"] = "txn.rl",
  ["x-ratelimit-limit"] = "txn.rl_limit",
  ["x-ratelimit-remaining"] = "txn.rl_left",
  ["x-ratelimit-reset"] = "txn.rl_reset",
}

local function now_ms()
  local now = core.now()
  return now.sec * 1000 + now.usec / 1000
end

-- The request to Tidegate, as text.
local function question(txn)
  local sent = txn.http:req_get_headers()
  local lines = { "GET /v1/auth HTTP/1.1", "host: " .. ADDRESS, "connection: close" }
  local function add(name, value) lines[#lines + 1] = name .. ": " .. value end
  for name, values in pairs(sent) do
    if not OWN[name] then
      -- HAProxy counts the values of a header from 0.
      for at = 0, 100 do
        if values[at] == nil then break end
        add(name, values[at])
      end
    end
  end
  add("x-forwarded-method", txn.f:method())
  add("x-forwarded-uri", txn.f:pathq())
  add("x-forwarded-host", sent["host"] and sent["host"][0] or "none")
  add("x-forwarded-for", txn.f:src())
  if TOKEN ~= "" then add("x-tidegate-token", TOKEN) end
  return table.concat(lines, "\r\n") .. "\r\n\r\n"
end

-- Sends the request and reads the response: status, headers as a list of { name, value }, body.
-- Raises an error after TIMEOUT_MS.
local function ask(socket, text)
  local deadline = now_ms() + TIMEOUT_MS
  local function in_time(what, ...)
    local left = deadline - now_ms()
    local result = nil
    if left > 0 then
      socket:settimeout(left / 1000)
      result = socket[what](socket, ...)
    end
    if result then return result end
    if now_ms() >= deadline then error("no answer within " .. TIMEOUT_MS .. " ms", 0) end
    error(what == "connect" and "the connection was refused" or "the connection was closed without an answer", 0)
  end
  in_time("connect", ADDRESS)
  in_time("send", text)
  local function line() return (in_time("receive", "*l"):gsub("\r$", "")) end
  local status = tonumber(line():match("^HTTP/1%.[01] (%d%d%d)"))
  if not status then error("the answer is not HTTP", 0) end
  local headers, length, is_json = {}, 0, false
  while true do
    local name, value = line():match("^([^:]+):%s*(.-)%s*$")
    if not name then break end
    name = name:lower()
    headers[#headers + 1] = { name, value }
    if name == "content-length" then length = tonumber(value) or 0 end
    if name == "content-type" then is_json = value:find("json", 1, true) ~= nil end
  end
  local body = length > 0 and in_time("receive", length) or ""
  -- Tidegate answers 204, 4xx, or 5xx as JSON (its store fails and a rule is closed). Anything else
  -- is another server, or a proxy on the way.
  local is_own = status == 204 or (status >= 400 and status < 500 and status ~= 404)
    or (status >= 500 and is_json)
  if not is_own then error("the answer is " .. status .. ", which is not Tidegate's", 0) end
  return { status = status, headers = headers, body = body }
end

-- Logs when Tidegate stops answering, at most one line a second while it does not, and when it
-- answers again.
local missing, next_line_ms = 0, 0
local WITHOUT = ON_FAILURE == "open" and "requests pass without a limit" or "requests get 503"

local function log_failure(problem)
  missing = missing + 1
  if now_ms() < next_line_ms then return end
  next_line_ms = now_ms() + 1000
  core.Warning("Tidegate at " .. ADDRESS .. ": " .. tostring(problem) .. ": " .. WITHOUT ..
    " (TIDEGATE_ON_FAILURE is " .. ON_FAILURE .. "), " .. missing .. " so far")
end

local function log_answer(status)
  if missing > 0 then
    core.Warning("Tidegate at " .. ADDRESS .. " answers again after " .. missing .. " requests without an answer")
    missing, next_line_ms = 0, 0
  end
  if status ~= 204 and status ~= 429 and status ~= 403 and now_ms() >= next_line_ms then
    next_line_ms = now_ms() + 1000
    core.Warning("Tidegate at " .. ADDRESS .. " answers " .. status .. " to HAProxy, and clients get that: its log says why")
  end
end

local function answer(txn, status, headers, body)
  local reply = txn:reply({ status = status, body = body })
  for _, header in ipairs(headers) do
    if not OWN[header[1]] then reply:add_header(header[1], header[2]) end
  end
  txn:done(reply)
end

core.register_action("tidegate", { "http-req" }, function(txn)
  local socket = core.tcp()
  local ok, answered = pcall(ask, socket, question(txn))
  socket:close()
  if not ok then
    log_failure(answered)
    if ON_FAILURE == "closed" then answer(txn, 503, { { "retry-after", "1" } }, "") end
    return
  end
  log_answer(answered.status)
  if answered.status ~= 204 then answer(txn, answered.status, answered.headers, answered.body) end
  for _, header in ipairs(answered.headers) do
    local variable = SEEN[header[1]]
    if variable then txn:set_var(variable, header[2]) end
  end
end)
